// Pool: how it is locked: to look at it, an observer included; to change it with what threads
// keep given back first; and while they keep still.
#include <thread>

#include "core/pool/pool.h"

namespace vmm {

Pool::ReadLock::ReadLock(const Pool& pool) : pool_(pool) {
  if (!Telling::is_mine()) {
    pool_.mutex_.lock_to_look();
    locked_ = true;
    return;
  }
  while (!pool_.stands_still_.load(std::memory_order_acquire)) {
    if (pool_.mutex_.try_lock_to_look()) {
      locked_ = true;
      return;
    }
    std::this_thread::yield();
  }
}

Pool::ReadLock::~ReadLock() {
  if (locked_) pool_.mutex_.unlock();
}

Pool::GatheredLock::GatheredLock(const Pool& pool) VMM_NO_THREAD_SAFETY_ANALYSIS : pool_(pool) {
  pool.context_.caches.gather(pool);
  pool.mutex_.lock();
}

Pool::GatheredLock::~GatheredLock() VMM_NO_THREAD_SAFETY_ANALYSIS { pool_.mutex_.unlock(); }

Pool::StillLock::StillLock(const Pool& pool, BlockCaches::Kept kept) VMM_NO_THREAD_SAFETY_ANALYSIS
    : pool_(pool),
      still_(pool.context_.caches, pool, kept) {
  pool.mutex_.lock();
}

Pool::StillLock::~StillLock() VMM_NO_THREAD_SAFETY_ANALYSIS { pool_.mutex_.unlock(); }

}  // namespace vmm
