#include "base/units.h"

#include <algorithm>
#include <array>
#include <cstdio>

namespace vmm {

void append_joined(std::vector<ByteRange>& sorted, ByteRange range) {
  if (range.size == 0) return;
  if (!sorted.empty() && sorted.back().end() >= range.offset) {
    sorted.back().size = std::max(sorted.back().end(), range.end()) - sorted.back().offset;
  } else {
    sorted.push_back(range);
  }
}

std::vector<ByteRange> joined(std::vector<ByteRange> ranges) {
  std::sort(ranges.begin(), ranges.end(), [](const ByteRange& a, const ByteRange& b) { return a.offset < b.offset; });
  std::vector<ByteRange> found;
  for (const ByteRange& range : ranges) append_joined(found, range);
  return found;
}

std::string format_bytes(std::size_t bytes) {
  if (bytes == kUnlimited) return "no limit";
  static constexpr std::array<const char*, 6> kNames = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  auto value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 1024.0 && unit + 1 < kNames.size()) {
    value /= 1024.0;
    ++unit;
  }
  const bool whole = value == static_cast<double>(static_cast<std::size_t>(value));
  return format_decimal(value, whole ? 0 : 1) + " " + kNames.at(unit);
}

std::string format_decimal(double value, int places) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%.*f", places, value);
  std::string digits = text.data();
  // Under some locales a comma: nothing of ours, nor of torch's, would read it back.
  if (places != 0) digits[digits.size() - static_cast<std::size_t>(places) - 1] = '.';
  return digits;
}

std::string format_count(std::size_t count, const std::string& one, const std::string& many) {
  return std::to_string(count) + " " + (count == 1 ? one : many.empty() ? one + "s" : many);
}

std::string format_hex(std::uint64_t value) {
  std::array<char, 24> text{};
  std::snprintf(text.data(), text.size(), "0x%llx", static_cast<unsigned long long>(value));
  return text.data();
}

}  // namespace vmm
