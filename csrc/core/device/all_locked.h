// Several pools locked at once, for an answer that holds for one moment and for
// the last rung of the ladder. It never knows why.
#pragma once

#include "base/sync.h"
#include "core/device/pool_registry.h"
#include "core/numbers/observer.h"
#include "core/pool/pool.h"

namespace vmm {

// Locks several pools at once. Safe because everyone who does so takes them in
// the order of registration; the analysis cannot follow a loop.
class AllLocked {
 public:
  explicit AllLocked(const PoolList& pools) VMM_NO_THREAD_SAFETY_ANALYSIS : pools_(pools) {
    Telling::will_lock(pools_.size());
    for (const auto& pool : pools_) {
      pool->mutex().lock();
      Telling::locked_one_of_several(pool->stands_still());
    }
    Telling::locked_all();
  }
  ~AllLocked() VMM_NO_THREAD_SAFETY_ANALYSIS {
    Telling::unlocks_all();
    for (auto it = pools_.rbegin(); it != pools_.rend(); ++it) (*it)->mutex().unlock();
  }
  AllLocked(const AllLocked&) = delete;
  AllLocked& operator=(const AllLocked&) = delete;

 private:
  const PoolList& pools_;
};

}  // namespace vmm
