// What happens in the pools of a device, told at the moment it happens and
// under the pool's lock, so in the right order. It knows nobody who listens.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "base/units.h"
#include "driver/driver.h"

namespace vmm {

class Pool;
struct RegionId;

// The names are those of torch's memory history.
enum class PoolEvent : std::uint8_t {
  alloc,           // bytes: as requested
  free_requested,  // bytes: as requested
  free_completed,  // the same; at once, or when the recorded streams have passed
  segment_map,     // a chunk stands at the address, accessible; bytes: the chunk's
  segment_unmap,   // it has left the pool's range; queued work may still use the address
  // For whoever registers segments: as above, of chunks alone that a block lies in
  // wholly or not at all (DeviceMemory::keep_blocks_within_chunks()).
  segment_alloc,  // right after segment_map
  // The address is nobody's any more: it is unmapped now, or when something else is to
  // stand there. After segment_unmap; of a model that goes to sleep right before it.
  segment_free,
};

class PoolObserver {
 public:
  PoolObserver() = default;
  PoolObserver(const PoolObserver&) = delete;
  PoolObserver& operator=(const PoolObserver&) = delete;
  virtual ~PoolObserver() = default;
  // Called under the pool's lock, for one event at a time in the whole process.
  // It may look at pools (Pool::snapshot and what is const beside it), and must
  // not call into any otherwise.
  virtual void on_event(const Pool& pool, PoolEvent event, Address address, std::size_t bytes,
                        Stream stream) noexcept = 0;
  // A segment that another allocator gave, and that is no pool's, has come or goes
  // (ProvidedMemory): the events of segments alone. Called with no lock held.
  virtual void on_provided(int /*device*/, const RegionId& /*region*/, PoolEvent /*event*/, Address /*address*/,
                           std::size_t /*bytes*/, Stream /*stream*/) noexcept {}
};

// Held while an observer is told, one in the whole process. An observer that
// looks at a pool cannot wait for its lock: whoever has that may be waiting to
// tell something too, or for the lock of the pool that tells. But such a pool
// stands still then; its flag says so, and it may be read as it is.
class Telling {
 public:
  using Flag = std::atomic<bool>;
  explicit Telling(Flag& still) : still_(still) {
    stand_still(true);
    one_at_a_time_.lock();
    ++depth_;
  }
  ~Telling() {
    --depth_;
    stand_still(false);
    one_at_a_time_.unlock();
  }
  Telling(const Telling&) = delete;
  Telling& operator=(const Telling&) = delete;
  // The calling thread is in an observer.
  static bool is_mine() { return depth_ != 0; }

  // Of a thread that locks several pools: before the first, as there may be no memory for
  // it, right after each, then after the last, and before the first is unlocked.
  static void will_lock(std::size_t pools) { beside_.reserve(beside_.size() + pools); }
  static void locked_one_of_several(Flag& still) {
    still.store(true, std::memory_order_release);
    beside_.push_back(&still);
  }
  static void locked_all() {
    const std::lock_guard<std::recursive_mutex> nobody_looks(one_at_a_time_);
    for (Flag* flag : beside_) flag->store(false, std::memory_order_relaxed);
  }
  static void unlocks_all() { beside_.clear(); }

 private:
  void stand_still(bool still) {
    still_.store(still, std::memory_order_release);
    for (Flag* flag : beside_) flag->store(still, std::memory_order_release);
  }

  Flag& still_;
  static inline std::recursive_mutex one_at_a_time_;
  static inline thread_local int depth_ = 0;
  static inline thread_local std::vector<Flag*> beside_;  // of the pools that this thread has locked with it
};

}  // namespace vmm
