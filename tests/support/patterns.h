// What tests write to memory, and whether it is still there. In a file of its own, which is
// optimised under sanitizers too: of a run of all tests these loops were most of the time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/units.h"

namespace vmm::testing {

// Content that differs from word to word and from seed to seed.
void fill_pattern(Address address, std::size_t bytes, std::uint64_t seed);
// The offset of the first wrong byte, or `bytes`.
std::size_t first_wrong_of_pattern(Address address, std::size_t bytes, std::uint64_t seed);
bool is_all_zero(Address address, std::size_t bytes);

// As bf16 weights are: of each word the mantissa is anything, and exponents are few.
std::uint16_t weight(std::uint64_t seed, std::size_t index);
void fill_weights(Address address, std::size_t bytes, std::uint64_t seed);
std::size_t wrong_weights(Address address, std::size_t bytes, std::uint64_t seed);

}  // namespace vmm::testing
