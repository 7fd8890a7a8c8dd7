// Addresses of the process, beside pools', that are mapped and that nobody may write to: for
// who explains a fault, and has an address alone. It never knows what is there.
#pragma once

#include <cstddef>
#include <iterator>
#include <map>

#include "base/sync.h"
#include "base/units.h"
#include "driver/driver.h"

namespace vmm {

class ReadOnlyRanges {
 public:
  // Never destroyed: a thread may fault late.
  static ReadOnlyRanges& of_process() {
    static auto* const kRanges = new ReadOnlyRanges;
    return *kRanges;
  }
  // REQUIRES: no range there overlaps it.
  void add(Address base, std::size_t size) VMM_EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    sizes_.emplace(base, size);
  }
  // Nothing where there is none.
  void remove(Address base) noexcept VMM_EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    sizes_.erase(base);
  }
  // For a thread that may have been stopped anywhere. False, too, where it is being changed
  // just now.
  [[nodiscard]] bool holds_now(Address address) const noexcept VMM_NO_THREAD_SAFETY_ANALYSIS {
    if (!mutex_.try_lock_to_look()) return false;
    const auto above = sizes_.upper_bound(address);
    const bool is_held = above != sizes_.begin() && address - std::prev(above)->first < std::prev(above)->second;
    mutex_.unlock();
    return is_held;
  }

 private:
  mutable Mutex mutex_;                                          // a leaf
  std::map<Address, std::size_t> sizes_ VMM_GUARDED_BY(mutex_);  // bytes, by base
};

}  // namespace vmm
