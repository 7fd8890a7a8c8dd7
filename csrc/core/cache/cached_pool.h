// What a thread's cache needs to know of a pool, and what a pool gives it.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>

#include "base/units.h"
#include "core/blocks/block.h"
#include "core/blocks/block_directory.h"
#include "core/cache/depot.h"
#include "core/numbers/peaks.h"
#include "core/numbers/stats.h"

namespace vmm {

class CachedPool {
 public:
  CachedPool(const CachedPool&) = delete;
  CachedPool& operator=(const CachedPool&) = delete;

  // Threads may keep blocks of it that are freed, as far as it goes by the pool: not a graph's,
  // nor of one that closes, sleeps or is sealed. BlockCaches::may_keep() is the whole rule.
  [[nodiscard]] bool is_cached() const { return is_cached_.load(std::memory_order_relaxed); }
  // Threads that have a place for its blocks: they may have kept some.
  [[nodiscard]] bool has_shards() const { return shards_.load(std::memory_order_relaxed) != 0; }
  [[nodiscard]] int shards() const { return shards_.load(std::memory_order_relaxed); }
  void count_shards(int change) { shards_.fetch_add(change, std::memory_order_relaxed); }
  // What threads hand on to each other. Empty where no thread has a place for its blocks.
  [[nodiscard]] Depot& depot() { return depot_; }
  [[nodiscard]] const Depot& depot() const { return depot_; }
  [[nodiscard]] Address base() const { return base_; }
  [[nodiscard]] const BlockDirectory& directory() const { return *directory_; }

  // Blocks that a thread has kept, linked by `bin_next` (nullptr: none): the pool's
  // again, and free. They are no longer counted.
  virtual void take_back(Block* first) = 0;
  // What a thread has counted of the pool's blocks is counted by the pool from now on
  // (PoolCounters::absorb).
  virtual void absorb(const BlockCounts& came, BlockSeat& of_pool, BlockSeat& of_device) = 0;
  // Followed pool by pool, and for the model and its parts together (or nullptr).
  [[nodiscard]] virtual Peaks& own_peaks() = 0;
  [[nodiscard]] virtual Peaks* peaks_of_family() const = 0;

 protected:
  CachedPool() = default;
  ~CachedPool() = default;

  std::atomic<bool> is_cached_{false};
  std::atomic<int> shards_{0};
  Depot depot_;
  Address base_ = 0;
  std::unique_ptr<BlockDirectory> directory_;
};

}  // namespace vmm
