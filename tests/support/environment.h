// What the environment asks of a test: seeds, steps.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace vmm::testing {

// `otherwise`: where the variable is not set, or empty.
inline std::uint64_t from_environment(const char* name, std::uint64_t otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr || *text == '\0' ? otherwise : std::strtoull(text, nullptr, 10);
}

}  // namespace vmm::testing
