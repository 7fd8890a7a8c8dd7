// That work on a device has touched an address with no memory, or written where it may only
// read (CUDA's error 700): seen by whichever of our calls the driver answers so first. From
// then on it answers all calls of the process' context so, and never says which address it
// was. Whoever knows what lay where asks here; what the driver is told of beside it is not
// kept.
#pragma once

#include <atomic>

namespace vmm {

// The call that was answered so first, a literal; nullptr: none.
inline std::atomic<const char*>& device_fault() {
  static std::atomic<const char*> call{nullptr};
  return call;
}
inline void note_device_fault(const char* call) noexcept {
  const char* none = nullptr;
  device_fault().compare_exchange_strong(none, call);
}

}  // namespace vmm
