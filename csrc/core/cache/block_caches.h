// The caches of a device's threads: what stands before every pool. An allocation
// that finds a block of its size here, and a free that leaves one, take no lock of a
// pool and no locked instruction.
//
// What makes that safe:
//   - a kept block is used again only on the stream that had it, behind its work;
//   - whoever has to see a pool as it is (numbers, growth, limits, closing) has what
//     threads keep of it given back first: gather(), or Still for as long as needed;
//   - where nothing of a pool may be kept any more, no thread has a shard of it: shards
//     end (Kept::gone) and the reason is set while mutex_ is held, or before, and a new
//     one is made under mutex_, where the reason is looked at.
//
// Lock order: mutex_, the threads' BiasedLocks, then a pool's. A thread that holds
// its own BiasedLock may take a pool's lock, and mutex_ never.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/sync.h"
#include "core/cache/thread_cache.h"
#include "core/numbers/observer.h"
#include "core/streams/clock.h"

namespace vmm {

class BlockCaches;

// What the calling thread has: the cache it used last, and all of them. The first
// has no constructor and no destructor, so that looking at it costs no guard.
struct LatestCache {
  std::uint64_t id;  // of the BlockCaches; 0: none
  ThreadCache* cache;
  const BlockCaches* home;
  bool has_ended;
};
// In the block of thread storage that is there from the start (initial-exec): found by
// one addition instead of a call, of which a pair would make two. glibc keeps 1664 bytes
// for libraries that are loaded later and ask for it; this takes 32.
[[gnu::tls_model("initial-exec")]] extern constinit thread_local LatestCache latest_cache;

class BlockCaches {
 public:
  // `oversize_bytes`: blocks of so many and more are counted apart, and not kept.
  BlockCaches(Peaks& device_peaks, const Clock& clock, const std::atomic<std::size_t>& oversize_bytes);
  BlockCaches(const BlockCaches&) = delete;
  BlockCaches& operator=(const BlockCaches&) = delete;
  // REQUIRES: no pool has shards any more.
  ~BlockCaches();

  // -- The hot path ---------------------------------------------------------
  // A kept block's address for `bytes` (0: as for one) on `stream`, counted as allocated, or 0.
  Address take(CachedPool& pool, std::size_t bytes, Stream stream) noexcept;
  // Keeps the live block at `address`, counted as freed, of whatever pool.
  enum class Put : std::uint8_t {
    kept,
    refused,  // the pool has to free it
    unknown,  // this thread has not allocated it lately
  };
  static Put put(Address address) noexcept;
  // The same for any. False: the pool has to free it, or say what is wrong.
  bool put(CachedPool& pool, Address address) noexcept;

  // Threads may keep blocks of the pool now.
  [[nodiscard]] bool may_keep(const CachedPool& pool) const noexcept {
    return pool.is_cached() && off_.load(std::memory_order_relaxed) == 0;
  }

  // -- Beside it --------------------------------------------------------------
  // The calling thread's own cache, held while the pool itself allocates or frees: so
  // the thread goes on counting what it began to count, and the sizes that it asks
  // for are kept from then on. Costs two plain stores.
  class Mine {
   public:
    explicit Mine(BlockCaches& caches) noexcept : caches_(caches), cache_(caches.mine()) {
      if (cache_ != nullptr) cache_->lock.enter();
    }
    ~Mine() {
      if (cache_ != nullptr) cache_->lock.leave();
    }
    Mine(const Mine&) = delete;
    Mine& operator=(const Mine&) = delete;
    // nullptr: it has none, and the pool counts.
    [[nodiscard]] Shard* shard(const CachedPool& pool, StreamTag tag) const noexcept {
      return cache_ != nullptr && caches_.may_keep(pool) ? cache_->find(pool, tag) : nullptr;
    }
    // The same for a stream: where nothing may be kept any more there is none (take()).
    [[nodiscard]] Shard* shard(const CachedPool& pool, Stream stream) const noexcept {
      return cache_ != nullptr ? cache_->find(pool, stream) : nullptr;
    }
    // The thread's shards of the pool, by Shard::next.
    [[nodiscard]] Shard* shards(const CachedPool& pool) const noexcept {
      return cache_ == nullptr ? nullptr : cache_->first_of(pool);
    }
    // No other thread keeps blocks of the pool.
    [[nodiscard]] bool is_alone(const CachedPool& pool) const {
      return cache_ == nullptr ? !pool.has_shards() : cache_->is_alone(pool);
    }
    // The block was allocated here. REQUIRES: shard() gave that one.
    void note(Address address, Block* block, Shard* shard) const { cache_->note(address, block, shard); }

   private:
    const BlockCaches& caches_;
    ThreadCache* const cache_;
  };
  // The calling thread keeps blocks of this stream from now on, if the host has memory for
  // that. REQUIRES: it lasts, and has no shard here yet.
  void add_shard(CachedPool& pool, Stream stream, StreamTag tag) noexcept VMM_EXCLUDES(mutex_);
  // All that threads keep is the pool's again. Costs nothing where no thread keeps
  // anything of it.
  void gather(const CachedPool& pool) VMM_EXCLUDES(mutex_);
  // Blocks that threads keep of it now.
  [[nodiscard]] std::size_t kept_blocks(const CachedPool& pool) VMM_EXCLUDES(mutex_);
  // No thread keeps anything from now on, of any pool, as long as one reason is set.
  enum Reason : unsigned { kObserved = 1, kOverLimit = 2 };
  void stop(Reason reason) VMM_EXCLUDES(mutex_);
  // Takes back what they kept where stop() could not, for want of host memory.
  void finish_stop() VMM_EXCLUDES(mutex_);
  void resume(Reason reason) { off_.fetch_and(~static_cast<unsigned>(reason), std::memory_order_relaxed); }

  // What becomes of kept blocks, and of what threads have counted.
  enum class Kept : std::uint8_t {
    stays,  // what was counted is the pool's; the blocks stay
    back,   // the blocks are the pool's too
    gone,   // the same, and the threads' shards end
  };
  // While it lives no thread takes or keeps a block: the pools' own numbers are
  // exact. The calling thread must not allocate or free either. In an observer it
  // does nothing: while there is one nothing is kept, and a pool's lock is held.
  class VMM_SCOPED_CAPABILITY Still {
   public:
    Still(BlockCaches& caches, const CachedPool& pool, Kept kept) VMM_ACQUIRE(caches.mutex_);
    // Of several pools, or of all.
    template <typename AnyPool>
    Still(BlockCaches& caches, const std::vector<std::shared_ptr<AnyPool>>& pools,
          Kept kept) VMM_NO_THREAD_SAFETY_ANALYSIS : Still(caches) {
      if (!holds_) return;
      caches_.stop_those([&](const ThreadCache& cache) {
        return std::any_of(pools.begin(), pools.end(),
                           [&](const auto& pool) { return cache.first_of(*pool) != nullptr; });
      });
      for (const auto& pool : pools) caches_.give_back(*pool, kept);
    }
    Still(BlockCaches& caches, Kept kept) VMM_ACQUIRE(caches.mutex_);
    ~Still() VMM_RELEASE();
    Still(const Still&) = delete;
    Still& operator=(const Still&) = delete;

   private:
    // Stops nobody yet. The others begin with it: where one of them fails, as the host has
    // no memory, it ends as one that was made.
    explicit Still(BlockCaches& caches) VMM_ACQUIRE(caches.mutex_);

    BlockCaches& caches_;
    const bool holds_;
  };
  // While it lives nothing moves from what threads have counted to the pools' own.
  class VMM_SCOPED_CAPABILITY Reading {
   public:
    explicit Reading(const BlockCaches& caches) VMM_ACQUIRE(caches.mutex_);
    ~Reading() VMM_RELEASE();
    Reading(const Reading&) = delete;
    Reading& operator=(const Reading&) = delete;
    // Adds what threads have counted of the pool's blocks.
    void add_counts(const CachedPool& pool, Statistics* out) const VMM_NO_THREAD_SAFETY_ANALYSIS;

   private:
    const BlockCaches& caches_;
    const bool holds_;
  };

 private:
  friend class ThreadEnd;
  // The calling thread's, or nullptr.
  [[nodiscard]] ThreadCache* mine() const noexcept {
    if (latest_cache.id == id_) [[likely]]
      return latest_cache.cache;
    return find_mine();
  }
  [[nodiscard]] ThreadCache* find_mine() const noexcept;
  // Keeps a live block in its shard, which is the calling thread's.
  bool keep(const ThreadCache& cache, Shard& shard, Block* block) const noexcept;
  // A block that another thread has freed, or nullptr.
  static Block* take_handed_on(Shard& shard, std::size_t size);
  // Of a shard that keeps more than a thread should.
  static void let_go(const ThreadCache& cache, Shard& shard);
  // Nobody else has blocks of the shard's pool.
  static bool is_alone(const ThreadCache& cache, const Shard& shard) {
    return shard.pool.shards() == 1 || cache.is_alone(shard.pool);
  }
  ThreadCache* make_mine() VMM_EXCLUDES(mutex_);
  // The thread is about to end.
  void end_thread(ThreadCache* cache) VMM_EXCLUDES(mutex_);
  // Only those threads are stopped that have something of what is asked about: one
  // that maps memory for its own pool is inside for as long as the driver takes.
  template <typename Which>
  void stop_those(const Which& which) VMM_NO_THREAD_SAFETY_ANALYSIS {
    stopped_.clear();
    stopped_.reserve(threads_.size());  // all of them or none
    for (const auto& cache : threads_) {
      if (which(*cache)) stopped_.push_back(cache.get());
    }
    if (stopped_.empty()) return;
    for (ThreadCache* cache : stopped_) cache->lock.want();
    BiasedLock::barrier();
    for (ThreadCache* cache : stopped_) cache->lock.wait();
  }
  void stop_all() VMM_REQUIRES(mutex_);
  void go_on() VMM_REQUIRES(mutex_);
  static void empty_depot(CachedPool& pool);
  static void give_back(ThreadCache& cache, const CachedPool& pool, Kept kept);
  void give_back(const CachedPool& pool, Kept kept) VMM_REQUIRES(mutex_);
  bool hold() VMM_NO_THREAD_SAFETY_ANALYSIS;

  static constexpr std::size_t kMostBytes = std::size_t{1} << 46U;  // beyond it, rounding up could wrap

  const std::uint64_t id_;
  Peaks& device_peaks_;
  const Clock& clock_;
  const std::atomic<std::size_t>& oversize_bytes_;
  std::atomic<unsigned> off_{0};               // Reasons
  std::atomic<bool> is_stop_due_{false};       // threads may have some from before
  const std::shared_ptr<Mutex> shared_mutex_;  // with threads' caches
  Mutex& mutex_;
  std::vector<std::shared_ptr<ThreadCache>> threads_ VMM_GUARDED_BY(mutex_);
  std::vector<ThreadCache*> stopped_ VMM_GUARDED_BY(mutex_);
};

// The hot path stands here, and becomes one function with its callers: from Python, a
// tensor and its end run through 43 KiB of instructions, so those of the allocator come from
// the second cache, line by line. As functions of their own these were 84 such lines more
// than the ones of an allocator that does nothing.

// That threads may keep nothing of a pool any more need not be asked here: then they
// have no shard of it.
[[gnu::always_inline]] inline Address BlockCaches::take(CachedPool& pool, std::size_t bytes, Stream stream) noexcept {
  ThreadCache* const cache = mine();
  if (cache == nullptr || bytes > kMostBytes) [[unlikely]]
    return 0;
  cache->lock.enter();
  Address address = 0;
  if (Shard* shard = cache->find(pool, stream); shard != nullptr) [[likely]] {
    const std::size_t size = align_up(std::max<std::size_t>(bytes, 1), kBlockAlignment);
    Block* block = shard->take(size);
    if (block == nullptr && size <= kSmallLimitBytes && !shard->pool.depot().is_empty())
      block = take_handed_on(*shard, size);
    if (block != nullptr) [[likely]] {
      block->requested = bytes;
      block->state = BlockState::used;
      shard->tally.count_allocation(*block, size);
      address = shard->base + block->offset;
      cache->note(address, block, shard);
    }
  }
  cache->lock.leave();
  return address;
}

[[gnu::always_inline]] inline bool BlockCaches::keep(const ThreadCache& cache, Shard& shard,
                                                     Block* block) const noexcept {
  if (block->recorded != 0 || block->oversize) [[unlikely]]
    return false;
  std::size_t size = 0;
  if (block->small) {  // below what may count as oversize: torch takes no less than 20 MiB for that
    size = block->units() * kBlockAlignment;
    shard.put(block, size);
  } else {
    size = block->size();
    const bool is_oversize = size >= oversize_bytes_.load(std::memory_order_relaxed);
    if (is_oversize || !shard.put_large(block, [&] { return is_alone(cache, shard); })) return false;
  }
  shard.tally.count_free(*block, size);
  block->epoch = clock_.now();  // in the place of what was asked for
  block->state = BlockState::cached;
  if (shard.is_full()) [[unlikely]]
    let_go(cache, shard);
  return true;
}

[[gnu::always_inline]] inline BlockCaches::Put BlockCaches::put(Address address) noexcept {
  const LatestCache& latest = latest_cache;
  if (latest.cache == nullptr) [[unlikely]]
    return Put::unknown;
  latest.cache->lock.enter();
  Block* block = nullptr;
  Put answer = Put::unknown;
  if (Shard* const shard = latest.cache->find_recent(address, &block); shard != nullptr) [[likely]] {
    answer = latest.home->keep(*latest.cache, *shard, block) ? Put::kept : Put::refused;
  }
  latest.cache->lock.leave();
  return answer;
}

}  // namespace vmm
