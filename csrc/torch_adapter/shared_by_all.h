// Memory that torch's libraries keep for whoever calls them next, in whatever pool was open
// when they first needed it: cuBLAS's workspaces, and what CUDA graphs draw random numbers
// from. It is no model's, so no model takes it along when it sleeps.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/units.h"

namespace vmm {

// Addresses of such blocks on this GPU, wherever they are.
std::vector<Address> blocks_shared_by_all(int ordinal);

namespace detail {
// Callers that are known to want something else, by their addresses' hash.
inline std::array<std::atomic<const void*>, 64> other_callers{};
bool looks_for_workspace(std::size_t bytes, const void* caller) noexcept;
}  // namespace detail

// Whether a request of `bytes` by the code at `caller` is for a workspace: torch has no other
// way to tell. What is taken for one by mistake counts in the default pool, no more. Smaller
// ones than 1 MiB, by the user's wish, are not looked at.
inline bool is_for_workspace(std::size_t bytes, const void* caller) noexcept {
  constexpr std::size_t kLeast = kMiB;
  if (bytes < kLeast) [[likely]]
    return false;
  const auto hash = reinterpret_cast<std::uintptr_t>(caller) % detail::other_callers.size();
  if (detail::other_callers[hash].load(std::memory_order_relaxed) == caller) [[likely]]
    return false;
  return detail::looks_for_workspace(bytes, caller);
}

}  // namespace vmm
