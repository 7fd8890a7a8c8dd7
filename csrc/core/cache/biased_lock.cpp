#include "core/cache/biased_lock.h"

#include <linux/membarrier.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <thread>

namespace vmm {

namespace {
constexpr int kMostSpins = 100;
constexpr std::chrono::microseconds kNap{20};
}  // namespace

bool BiasedLock::register_membarrier() noexcept {
#ifdef VMM_UNDER_TSAN
  return false;
#else
  return ::syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0U, 0) == 0;
#endif
}

const bool BiasedLock::has_membarrier_ = register_membarrier();

void BiasedLock::barrier() noexcept {
  if (has_membarrier_) ::syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0U, 0);
}

void BiasedLock::wait() const noexcept {
  for (int spins = 0; is_inside_.load(std::memory_order_seq_cst); ++spins) {
    // Inside for long: it maps memory.
    if (spins < kMostSpins) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(kNap);
    }
  }
}

void BiasedLock::wait_outside() noexcept {
  do {
    is_inside_.store(false, std::memory_order_release);
    { const MutexLock until_they_are_done(others_); }
    is_inside_.store(true, std::memory_order_seq_cst);
  } while (is_wanted_.load(std::memory_order_seq_cst));
}

}  // namespace vmm
