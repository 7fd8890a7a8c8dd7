// torch_vmm.strict(): tensors that are made outside every model raise, or warn.
// One relaxed load an allocation where it is off. It knows no pool.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "process/runtime.h"

namespace vmm {

enum class Strictness : std::uint8_t { off, warn, raise };

namespace detail {
// By kind and ordinal rather than in the rooms: setting one needs no driver.
inline std::array<std::array<std::atomic<Strictness>, Runtime::kMostDevices>, kDeviceKinds.size()>
    strictness_by_device{};
void refuse_outside(DeviceKind kind, int ordinal, std::size_t bytes);
}  // namespace detail

// REQUIRES: an ordinal below Runtime::kMostDevices.
inline std::atomic<Strictness>& strictness(DeviceKind kind, int ordinal) {
  return detail::strictness_by_device[index_of(kind)][static_cast<std::size_t>(ordinal)];
}

// Called before torch is given memory, with no lock held. Throws c10::Error
// outside every model where that raises; a warning goes to torch's own buffer,
// which Python emits once the call has come back to it: the GIL is never taken.
inline void require_model(DeviceKind kind, int ordinal, std::size_t bytes) {
  if (strictness(kind, ordinal).load(std::memory_order_relaxed) != Strictness::off) [[unlikely]]
    detail::refuse_outside(kind, ordinal, bytes);
}

}  // namespace vmm
