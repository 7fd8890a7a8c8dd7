// A lock that one thread, its owner, takes again and again and others seldom:
// the owner pays two plain stores, the others a barrier on every CPU that runs
// this process (membarrier, about 1 us), one for as many locks as they take.
//
// Where the kernel refuses membarrier (a sandbox), and under ThreadSanitizer,
// which does not know it, the owner's store is a full barrier instead (8 ns).
#pragma once

#include <atomic>
#include <cstdint>

#include "base/sync.h"

namespace vmm {

class BiasedLock {
 public:
  // `others`: held by whoever is not the owner, for as long as it holds this.
  explicit BiasedLock(Mutex& others) : others_(others) {}
  BiasedLock(const BiasedLock&) = delete;
  BiasedLock& operator=(const BiasedLock&) = delete;

  // -- The owner. REQUIRES: it holds no lock that stands below `others`.
  void enter() noexcept {
    if (has_membarrier_) [[likely]] {
      is_inside_.store(true, std::memory_order_relaxed);
      std::atomic_signal_fence(std::memory_order_seq_cst);  // the other side's barrier does the rest
    } else {
      is_inside_.store(true, std::memory_order_seq_cst);
    }
    if (is_wanted_.load(std::memory_order_seq_cst)) [[unlikely]]
      wait_outside();
  }
  void leave() noexcept { is_inside_.store(false, std::memory_order_release); }

  // -- Others, who hold `others`. Of several locks: want() each, then one
  // barrier(), then wait() for each; release() each in the end.
  void want() noexcept { is_wanted_.store(true, std::memory_order_seq_cst); }
  static void barrier() noexcept;
  void wait() const noexcept;
  void release() noexcept { is_wanted_.store(false, std::memory_order_release); }

 private:
  void wait_outside() noexcept;
  static bool register_membarrier() noexcept;
  static const bool has_membarrier_;

  std::atomic<bool> is_inside_{false};
  std::atomic<bool> is_wanted_{false};
  Mutex& others_;
};

}  // namespace vmm
