#include "support/patterns.h"

namespace vmm::testing {

namespace {

std::uint64_t word(std::uint64_t seed, std::size_t index) {
  return (seed * 0x9E3779B97F4A7C15ULL + 1) ^ (static_cast<std::uint64_t>(index) * 0x100000001B3ULL);
}

}  // namespace

void fill_pattern(Address address, std::size_t bytes, std::uint64_t seed) {
  auto* const words = reinterpret_cast<std::uint64_t*>(address);
  for (std::size_t k = 0; k < bytes / 8; ++k) words[k] = word(seed, k);
}

std::size_t first_wrong_of_pattern(Address address, std::size_t bytes, std::uint64_t seed) {
  const auto* const words = reinterpret_cast<const std::uint64_t*>(address);
  for (std::size_t k = 0; k < bytes / 8; ++k) {
    if (words[k] != word(seed, k)) return k * 8;
  }
  return bytes;
}

bool is_all_zero(Address address, std::size_t bytes) {
  const auto* const words = reinterpret_cast<const std::uint64_t*>(address);
  for (std::size_t k = 0; k < bytes / 8; ++k) {
    if (words[k] != 0) return false;
  }
  return true;
}

std::uint16_t weight(std::uint64_t seed, std::size_t index) {
  const std::uint64_t draw = (seed * 0x9E3779B97F4A7C15ULL + index + 1) * 0xD6E8FEB86659FD93ULL;
  const auto exponent = static_cast<std::uint64_t>(120 - __builtin_ctzll(draw >> 20 | 1ULL << 40));
  return static_cast<std::uint16_t>(exponent << 7 | (draw >> 48 & 0x807f));
}

void fill_weights(Address address, std::size_t bytes, std::uint64_t seed) {
  auto* const words = reinterpret_cast<std::uint16_t*>(address);
  for (std::size_t k = 0; k < bytes / 2; ++k) words[k] = weight(seed, k);
}

std::size_t wrong_weights(Address address, std::size_t bytes, std::uint64_t seed) {
  const auto* const words = reinterpret_cast<const std::uint16_t*>(address);
  std::size_t wrong = 0;
  for (std::size_t k = 0; k < bytes / 2; ++k) wrong += words[k] == weight(seed, k) ? 0 : 1;
  return wrong;
}

}  // namespace vmm::testing
