// What one pool counts: the families of torch.cuda.memory_stats, and their peaks in
// its own right, for the device and for the model with its parts. It knows what a
// block's life moves, and no block of the pool.
//
// PoolCounters' calls are made with the pool's lock held. What threads' caches have
// counted comes in by absorb(), or is added by whoever tells the numbers.
#pragma once

#include <cstddef>
#include <memory>

#include "base/sync.h"
#include "core/blocks/block.h"
#include "core/numbers/peaks.h"
#include "core/numbers/stats.h"

namespace vmm {

inline SizeClass size_class_of(const Block& block) { return size_class_of(block.small); }

class PoolCounters {
 public:
  // Whose peaks the pool's numbers are part of: its own, and the device's.
  PoolCounters(Peaks& own, Peaks& of_device) : own_(own), own_seat_(own), seat_(of_device) {}
  PoolCounters(const PoolCounters&) = delete;
  PoolCounters& operator=(const PoolCounters&) = delete;

  // -- A block's life, once for each: it is somebody's, its owner lets go of it,
  // nobody uses it any more.
  void block_began(const Block& block);
  void block_ended(const Block& block);
  void block_finished(const Block& block);

  // -- Memory. What a pool maps is the large pool's until a slab is made of it.
  void mapped(std::size_t bytes, bool is_oversize, SizeClass size_class = SizeClass::large_pool);
  void unmapped(std::size_t bytes, bool is_oversize, SizeClass size_class = SizeClass::large_pool);
  // num_device_alloc and _free; those of a pool its range counts, until that ends.
  void count_device_calls(std::int64_t allocs, std::int64_t frees) {
    statistics_.num_device_alloc += allocs;
    statistics_.num_device_free += frees;
  }
  // A slab's memory changes hands; `is_whole_chunk`: so does the chunk itself.
  void slab_changed_hands(std::size_t bytes, bool is_whole_chunk, SizeClass from, SizeClass to);
  // A number that is worked out when somebody asks.
  void set(StatKind kind, SizeClass size_class, std::size_t value);

  void retried() { ++statistics_.num_alloc_retries; }
  void ran_out() { ++statistics_.num_ooms; }
  void synchronized() { ++statistics_.num_sync_all_streams; }

  // What a thread has counted of the pool's blocks is counted here from now on: all that
  // came, those there are, which is what its seat in the pool's peaks says; its seat in the
  // device's counts other pools' too.
  void absorb(const BlockCounts& came, BlockSeat& of_pool, BlockSeat& of_device);

  // -- The model's parts. From now on the peaks of all of them together are
  // followed; a part begins so. REQUIRES: they outlive this.
  void follow_family(Peaks& family);
  // The same for a model that has counted before its first part came.
  void begin_family(Peaks& family);
  // What a part that has ended had counted.
  void inherit(const Statistics& of_part) { inherited_.add_totals(of_part); }
  [[nodiscard]] const Statistics& inherited() const { return inherited_; }

  // Without what threads have counted; its peaks are not the pool's (fill_peaks).
  [[nodiscard]] const Statistics& totals() const { return statistics_; }
  [[nodiscard]] std::size_t current(StatKind kind) const {
    return static_cast<std::size_t>(statistics_[kind][0].current);
  }
  [[nodiscard]] std::size_t current(StatKind kind, SizeClass size_class) const {
    return static_cast<std::size_t>(statistics_[kind][1 + static_cast<std::size_t>(size_class)].current);
  }
  void reset_peaks();
  void reset_accumulated();

 private:
  void rose(StatKind kind, SizeClass size_class, std::size_t amount);
  void fell(StatKind kind, SizeClass size_class, std::size_t amount);
  void reclassify(StatKind kind, SizeClass from, SizeClass to, std::size_t amount);

  Peaks& own_;
  Statistics statistics_;
  Statistics inherited_;  // of parts that have ended
  Peaks::Seat own_seat_;
  Peaks::Seat seat_;
  std::unique_ptr<Peaks::Seat> family_seat_;  // nullptr: the model has no parts
};

// The same for memory that is the device's and no Pool's, with a lock of its own.
class CountersBeside {
 public:
  explicit CountersBeside(Peaks& of_device) : peaks_(of_device), counters_(peaks_, of_device) {}

  // Calls `count` with the counters.
  template <typename Count>
  void count(const Count& count) VMM_EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    count(counters_);
  }
  [[nodiscard]] Statistics statistics() const VMM_EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    Statistics statistics = counters_.totals();
    peaks_.fill_peaks(statistics);
    return statistics;
  }

 private:
  Peaks peaks_;
  mutable Mutex mutex_;  // above Peaks' alone
  PoolCounters counters_ VMM_GUARDED_BY(mutex_);
};

}  // namespace vmm
