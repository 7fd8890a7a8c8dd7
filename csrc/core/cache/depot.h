// Small blocks on their way from threads that free them to threads that want their
// size: a pool's, by stream and size, in batches, past the pool's space and its lock.
// One lock for a batch: a thread that hands each block on to another one took the
// pool's lock for each before, 450 ns a block where two did, and more with every pair
// of threads.
//
// Like what threads keep they are still allocated for the pool, and are given back with
// it: no thread has a shard of the pool -> its depot is empty.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>

#include "base/sync.h"
#include "core/blocks/block.h"

namespace vmm {

class Depot {
 public:
  struct Batch {
    Block* first = nullptr;  // linked by `bin_next`; nullptr: none
    std::size_t count = 0;
  };

  // Takes in of these blocks, linked by `bin_next` and of one stream, what makes batches
  // and has room. Returns the rest.
  Block* put(Block* first) VMM_EXCLUDES(mutex_);
  Batch take(StreamTag tag, std::size_t size) VMM_EXCLUDES(mutex_);
  Block* take_all() VMM_EXCLUDES(mutex_);
  // At this moment: one relaxed load.
  [[nodiscard]] bool is_empty() const { return blocks_.load(std::memory_order_relaxed) == 0; }
  [[nodiscard]] std::size_t blocks() const { return blocks_.load(std::memory_order_relaxed); }

 private:
  // Fewer of a size are given back: they are left over, not handed on.
  static constexpr std::size_t kLeastBatch = 8;
  static constexpr std::size_t kMostBatches = 32;
  static constexpr std::size_t kMostBytes = 8 * kMiB;

  Mutex mutex_;                                                     // a leaf
  std::array<Batch, kMostBatches> batches_ VMM_GUARDED_BY(mutex_);  // of which the first so many:
  std::size_t count_ VMM_GUARDED_BY(mutex_) = 0;
  std::size_t bytes_ VMM_GUARDED_BY(mutex_) = 0;
  std::atomic<std::size_t> blocks_{0};
};

}  // namespace vmm
