// MemoryPool's core: a stream-ordered pool of buffers. It owns one pool of the
// device's, beside the models', and four rules that such pools have and ours do not:
// what was freed first goes back first, how much of what is free may be kept,
// it rather takes new memory than moves what it has, and before that what other streams
// have freed and the GPU has finished.
// Stream order, reuse, limits and numbers are the pool's own.
//
// The threshold. What is cached above it goes back only when nobody has needed it
// for kUnused: at the first request or free after such a time, as much goes as has
// been free all the while, and never what was in use at any moment of it. So memory
// that a step takes and frees again and again stays while the steps go on, and a
// pool that rests gives all of it up. Only what queued work uses no more goes, and
// nobody waits.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "base/sync.h"
#include "core/device/device_memory.h"
#include "core/faces/freed_order.h"
#include "core/numbers/stats.h"

namespace vmm {

// Bytes are as everywhere: a buffer's rounded up to 512.
struct BufferStats {
  std::size_t allocated_bytes = 0;   // of live buffers
  std::size_t peak_bytes = 0;        // the most that those have been
  std::size_t allocation_count = 0;  // buffers made so far
  std::size_t free_count = 0;        // of these, freed ones
  std::size_t cached_bytes = 0;      // held beyond the live ones
};
inline constexpr std::array<FieldRow<BufferStats>, 5> kBufferFields = {
    {{"allocated_bytes", &BufferStats::allocated_bytes},
     {"peak_bytes", &BufferStats::peak_bytes},
     {"allocation_count", &BufferStats::allocation_count},
     {"free_count", &BufferStats::free_count},
     {"cached_bytes", &BufferStats::cached_bytes}}};
static_assert(every_field_has_its_row(kBufferFields));

class MemoryPool {
 public:
  using Time = std::chrono::steady_clock::time_point;
  using Now = std::function<Time()>;
  static constexpr std::chrono::seconds kUnused{1};

  // Throws NotAvailableError, OutOfMemoryError (no addresses). `now` tells the time.
  explicit MemoryPool(DeviceMemory& memory, Now now = &std::chrono::steady_clock::now);
  MemoryPool(const MemoryPool&) = delete;
  MemoryPool& operator=(const MemoryPool&) = delete;
  ~MemoryPool();

  // A buffer of `bytes` > 0, aligned to 512, for work on `stream` from now on. Throws
  // OutOfMemoryError, InvalidArgumentError (closed).
  Address allocate(std::size_t bytes, Stream stream) VMM_EXCLUDES(mutex_);
  // Gives it back: at once for work on its own stream, for any other behind what is
  // queued now. REQUIRES: live. It may be of a pool that was closed by force.
  void free(Address address) VMM_EXCLUDES(mutex_);
  // `stream` uses the buffer too: it is freed behind what is queued there by then.
  void record_stream(Address address, Stream stream) { pool_->record_stream(address, stream); }

  [[nodiscard]] BufferStats stats() VMM_EXCLUDES(mutex_);
  // Gives back what was freed first, until at most `keep` bytes are cached or the
  // rest lies in chunks with live buffers. Waits for the work that still uses it.
  // Returns the bytes given back.
  std::size_t trim(std::size_t keep) VMM_EXCLUDES(mutex_);
  // How many cached bytes stay, from now on; kUnlimited: all.
  void set_threshold(std::size_t bytes) VMM_EXCLUDES(mutex_);
  [[nodiscard]] std::size_t threshold() const { return threshold_.load(std::memory_order_relaxed); }

  // Ends it; twice is fine. StillInUseError while a buffer lives, unless `force`:
  // then it ends with its last buffer.
  void close(bool force);
  [[nodiscard]] bool is_closed() const { return pool_->is_closed(); }
  [[nodiscard]] Pool& pool() const { return *pool_; }
  [[nodiscard]] DeviceMemory& memory() const { return memory_; }

 private:
  // Who asks: a request may be about to use what has been free for long.
  enum class Asks : std::uint8_t { user, reader };
  // `live`: bytes in use when it asked. What fails is for the next look: a request has its
  // buffer by then, and a free has been made.
  void look(Asks who, std::size_t live) noexcept VMM_EXCLUDES(mutex_);
  // A Pool::FreedAt: asked under the pool's lock.
  [[nodiscard]] std::uint64_t freed_at(ByteRange range) VMM_EXCLUDES(mutex_);
  [[nodiscard]] ByteRange range_of(Address address, std::size_t bytes) const {
    return {address - pool_->base(), bytes};
  }

  DeviceMemory& memory_;
  const Now now_;
  const std::shared_ptr<Pool> pool_;
  std::atomic<std::size_t> threshold_{kUnlimited};
  Mutex mutex_;  // a leaf: nobody is called under it
  FreedOrder freed_ VMM_GUARDED_BY(mutex_);
  std::atomic<std::size_t> live_{0};             // bytes in use now: a request takes no lock
  std::size_t high_ VMM_GUARDED_BY(mutex_) = 0;  // the most that this has been since `since_`, under a threshold
  Time since_ VMM_GUARDED_BY(mutex_);
  Time changed_ VMM_GUARDED_BY(mutex_);  // when it changed last
};

}  // namespace vmm
