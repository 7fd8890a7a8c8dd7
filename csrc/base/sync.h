// Mutexes that clang's thread-safety analysis understands. The lock order is
// written once, in core/device/device_memory.h.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

#if defined(__SANITIZE_THREAD__)
#define VMM_UNDER_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define VMM_UNDER_TSAN 1
#endif
#endif

#if defined(__clang__)
#define VMM_THREAD_ANNOTATION(x) __attribute__((x))
#else
#define VMM_THREAD_ANNOTATION(x)
#endif
#define VMM_CAPABILITY(x) VMM_THREAD_ANNOTATION(capability(x))
#define VMM_SCOPED_CAPABILITY VMM_THREAD_ANNOTATION(scoped_lockable)
#define VMM_GUARDED_BY(x) VMM_THREAD_ANNOTATION(guarded_by(x))
#define VMM_PT_GUARDED_BY(x) VMM_THREAD_ANNOTATION(pt_guarded_by(x))
#define VMM_REQUIRES(...) VMM_THREAD_ANNOTATION(requires_capability(__VA_ARGS__))
#define VMM_ACQUIRE(...) VMM_THREAD_ANNOTATION(acquire_capability(__VA_ARGS__))
#define VMM_RELEASE(...) VMM_THREAD_ANNOTATION(release_capability(__VA_ARGS__))
#define VMM_TRY_ACQUIRE(...) VMM_THREAD_ANNOTATION(try_acquire_capability(__VA_ARGS__))
#define VMM_EXCLUDES(...) VMM_THREAD_ANNOTATION(locks_excluded(__VA_ARGS__))
#define VMM_NO_THREAD_SAFETY_ANALYSIS VMM_THREAD_ANNOTATION(no_thread_safety_analysis)

namespace vmm {

// std::mutex inline: its calls were 60 of the 1250 instructions of a small block that
// misses its thread's cache. Who waits sleeps in the kernel. ThreadSanitizer, which finds
// locks taken in two orders, gets one that it knows.
#ifdef VMM_UNDER_TSAN
using PlainMutex = std::mutex;
#else
class PlainMutex {
 public:
  void lock() noexcept {
    if (!try_lock()) [[unlikely]]
      wait();
  }
  bool try_lock() noexcept {
    int free = kFree;
    return state_.compare_exchange_strong(free, kHeld, std::memory_order_acquire, std::memory_order_relaxed);
  }
  void unlock() noexcept {
    if (state_.exchange(kFree, std::memory_order_release) == kWanted) [[unlikely]]
      state_.notify_one();
  }

 private:
  // Whoever has waited takes it for wanted: others may wait still.
  void wait() noexcept {
    while (state_.exchange(kWanted, std::memory_order_acquire) != kFree) {
      state_.wait(kWanted, std::memory_order_relaxed);
    }
  }
  enum State : int { kFree, kHeld, kWanted };
  std::atomic<int> state_{kFree};
};
#endif

class VMM_CAPABILITY("mutex") Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;
  void lock() VMM_ACQUIRE() {
    mutex_.lock();
    count();
  }
  void unlock() VMM_RELEASE() { mutex_.unlock(); }
  bool try_lock() VMM_TRY_ACQUIRE(true) {
    if (!mutex_.try_lock()) return false;
    count();
    return true;
  }
  // The same to look only: it is not counted.
  void lock_to_look() VMM_ACQUIRE() { mutex_.lock(); }
  bool try_lock_to_look() VMM_TRY_ACQUIRE(true) { return mutex_.try_lock(); }

  // How often it was locked by who may change what it guards. May be asked
  // without the lock: as long as it stays the same, that has not changed. (A
  // store to the line that the lock has just fetched: no time that shows.)
  [[nodiscard]] std::uint64_t times_locked() const { return times_locked_.load(std::memory_order_acquire); }

 private:
  void count() {
    times_locked_.store(times_locked_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    // Whoever sees what is done under the lock sees the count as well.
#ifndef VMM_UNDER_TSAN  // it knows no fences
    std::atomic_thread_fence(std::memory_order_release);
#endif
  }

  PlainMutex mutex_;
  std::atomic<std::uint64_t> times_locked_{0};
};

// A plain value that another thread may read at any time.
template <typename T, std::memory_order kLoad, std::memory_order kStore>
class ReadByOthers {
 public:
  ReadByOthers() noexcept : value_(T{}) {}
  ReadByOthers(const ReadByOthers& other) noexcept : value_(T(other)) {}
  ReadByOthers& operator=(const ReadByOthers& other) noexcept { return *this = T(other); }
  ~ReadByOthers() = default;
  ReadByOthers(T value) noexcept : value_(value) {}  // NOLINT(google-explicit-constructor): it stands for a T
  ReadByOthers& operator=(T value) noexcept {
    value_.store(value, kStore);
    return *this;
  }
  operator T() const noexcept { return value_.load(kLoad); }  // NOLINT(google-explicit-constructor)

 private:
  std::atomic<T> value_;
};
// It orders nothing.
template <typename T>
using Relaxed = ReadByOthers<T, std::memory_order_relaxed, std::memory_order_relaxed>;
// Whoever reads it sees what was written before it.
template <typename T>
using Published = ReadByOthers<T, std::memory_order_acquire, std::memory_order_release>;

class VMM_SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) VMM_ACQUIRE(mutex) : mutex_(mutex) { mutex_.lock(); }
  ~MutexLock() VMM_RELEASE() { mutex_.unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

}  // namespace vmm
