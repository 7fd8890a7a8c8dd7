// NativeMemoryPool's core: one of the driver's own stream-ordered pools, with the
// misuse named that the driver would not, or not before it is too late. It owns the
// driver's pool and the list of what is allocated from it; the memory is the
// driver's, and no limit of ours counts it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/function_ref.h"
#include "base/sync.h"
#include "core/faces/live_addresses.h"
#include "driver/driver.h"
#include "driver/native_pools.h"

namespace vmm {

class NativeMemoryPool {
 public:
  // Says what a destructor could not do: who, and what.
  using Report = void (*)(const char* who, const char* what) noexcept;

  // `max_bytes` 0: as much as the driver lets it. Throws NotAvailableError: the device
  // has no such pools, and why; DriverError. `driver` outlives this.
  NativeMemoryPool(Driver& driver, int device, std::size_t max_bytes, Report report);
  NativeMemoryPool(const NativeMemoryPool&) = delete;
  NativeMemoryPool& operator=(const NativeMemoryPool&) = delete;
  // As destroy(/*force=*/true); what fails is reported and counted.
  ~NativeMemoryPool();

  // Throws InvalidArgumentError (no bytes; destroyed), OutOfMemoryError (over the
  // maximum, or the driver has none), NotAvailableError (a stream that is being
  // captured), DriverError.
  Address allocate(std::size_t bytes, Stream stream) VMM_EXCLUDES(mutex_);
  // Behind the work that is queued on `stream`. Throws InvalidArgumentError: no live
  // allocation of this pool, or destroyed; and what the driver says.
  void free(Address address, Stream stream) VMM_EXCLUDES(mutex_);
  // Ends it, once all queued work is done; twice is fine. StillInUseError while something
  // is allocated, unless `force`: then that is freed first. Throws what the driver
  // says; what is done by then stays done, and it may be called again.
  void destroy(bool force) VMM_EXCLUDES(destroying_, asking_, mutex_);

  // As the driver counts; of a pool that is not destroyed.
  [[nodiscard]] NativePoolUsage usage() const VMM_EXCLUDES(asking_, mutex_);
  // Bytes given back now.
  std::size_t trim(std::size_t keep) VMM_EXCLUDES(asking_, mutex_);
  void set_release_threshold(std::size_t bytes) VMM_EXCLUDES(asking_, mutex_);
  [[nodiscard]] std::size_t release_threshold() const VMM_EXCLUDES(asking_, mutex_);

  [[nodiscard]] bool is_destroyed() const VMM_EXCLUDES(mutex_);
  // The driver's name of it.
  [[nodiscard]] NativePool raw() const VMM_EXCLUDES(mutex_);
  [[nodiscard]] int device() const { return device_; }
  [[nodiscard]] std::size_t max_bytes() const { return max_bytes_; }  // 0: no maximum of ours
  // Driver calls that failed in destructors, in this process.
  [[nodiscard]] static std::uint64_t failures() { return failures_.load(std::memory_order_relaxed); }

 private:
  void require_open() const VMM_REQUIRES(mutex_);
  [[nodiscard]] std::size_t limit() const { return max_bytes_ == 0 ? kUnlimited : max_bytes_; }
  bool count(std::size_t bytes);
  void charge(std::size_t bytes) VMM_EXCLUDES(mutex_);
  void refuse(const Status& status, std::size_t bytes) const;
  // `about` the pool the driver is asked, which does not end meanwhile.
  void ask(const std::string& doing, const FunctionRef<Status(NativePool)>& about) const VMM_EXCLUDES(asking_, mutex_);
  [[nodiscard]] std::string name() const { return "NativeMemoryPool of cuda:" + std::to_string(device_); }

  static inline std::atomic<std::uint64_t> failures_{0};

  Driver& driver_;
  NativePools* const pools_;
  const int device_;
  const std::size_t max_bytes_;
  const Report report_;
  Mutex destroying_;      // above the others: one thread at a time ends it
  mutable Mutex asking_;  // what is asked about the pool itself; destroy() lets it end first
  mutable Mutex mutex_;   // no call of the driver's is made under it
  // What a request reads is in atomics, so that it takes the lock once: the driver
  // needs little more time than two locks do. Written under the lock.
  std::atomic<NativePool> pool_{0};
  std::atomic<bool> destroyed_{false};
  std::atomic<std::size_t> charged_{0};  // bytes allocated, or about to be, or not yet freed: live_'s at least
  LiveAddresses live_ VMM_GUARDED_BY(mutex_);
};

}  // namespace vmm
