// Byte units and the arithmetic on them. Sizes are `size_t` bytes and their
// names say so; everything here is constexpr and checked for overflow where a
// caller's value could overflow.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace vmm {

using Address = std::uintptr_t;

inline constexpr std::size_t kKiB = std::size_t{1} << 10;
inline constexpr std::size_t kMiB = std::size_t{1} << 20;
inline constexpr std::size_t kGiB = std::size_t{1} << 30;
inline constexpr std::size_t kTiB = std::size_t{1} << 40;
inline constexpr std::size_t kUnlimited = std::numeric_limits<std::size_t>::max();
inline constexpr std::size_t kMostAddresses = std::size_t{1} << 47;  // bytes that one process can address, or map

constexpr bool is_power_of_two(std::size_t value) { return value != 0 && (value & (value - 1)) == 0; }

// REQUIRES: `alignment` is a power of two; the result fits.
constexpr std::size_t align_down(std::size_t value, std::size_t alignment) { return value & ~(alignment - 1); }
constexpr std::size_t align_up(std::size_t value, std::size_t alignment) {
  return align_down(value + alignment - 1, alignment);
}
constexpr bool is_aligned(std::size_t value, std::size_t alignment) { return (value & (alignment - 1)) == 0; }

constexpr bool sum_overflows(std::size_t a, std::size_t b) { return a > std::numeric_limits<std::size_t>::max() - b; }

// Largest power of two that is <= `value`. REQUIRES: value > 0.
constexpr std::size_t floor_power_of_two(std::size_t value) {
  return std::size_t{1} << (63 - __builtin_clzll(static_cast<unsigned long long>(value)));
}

// A stretch of bytes by offset: [offset, offset + size).
struct ByteRange {
  std::size_t offset = 0;
  std::size_t size = 0;
  [[nodiscard]] constexpr std::size_t end() const { return offset + size; }
  friend constexpr bool operator==(const ByteRange& a, const ByteRange& b) {
    return a.offset == b.offset && a.size == b.size;
  }
};

// Adds `range`, unless it is empty, behind those of `sorted`: to the last one where it
// touches or overlaps it. REQUIRES: it begins where the last one does or behind that.
void append_joined(std::vector<ByteRange>& sorted, ByteRange range);
// Sorted, without overlaps and empty ones, what touches joined.
std::vector<ByteRange> joined(std::vector<ByteRange> ranges);
// With so many decimals, and a point whatever the locale: "1.50".
std::string format_decimal(double value, int places);

// "512 B", "19.8 GiB": at most one decimal, binary units.
std::string format_bytes(std::size_t bytes);
// "1 tensor", "2 tensors"; `many`: where an s is not enough.
std::string format_count(std::size_t count, const std::string& one, const std::string& many = "");
// "0x7f0000000000"
std::string format_hex(std::uint64_t value);

}  // namespace vmm
