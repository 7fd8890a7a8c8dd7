#include "core/cache/block_caches.h"

#include <pthread.h>

#include <atomic>
#include <map>
#include <new>
#include <utility>

namespace vmm {

namespace {

std::uint64_t next_id() {
  static std::atomic<std::uint64_t> next{0};
  return ++next;
}

// The caches that exist, for threads that end. Never destroyed: threads end late.
struct Everyone {
  Mutex mutex;
  std::map<std::uint64_t, BlockCaches*> caches VMM_GUARDED_BY(mutex);
};
Everyone& everyone() {
  static auto* const kEveryone = new Everyone;
  return *kEveryone;
}

}  // namespace

[[gnu::tls_model("initial-exec")]] constinit thread_local LatestCache latest_cache{0, nullptr, nullptr, false};

// In a forked child nothing is kept and nothing given back: threads that are not
// there may have held any lock.
std::atomic<bool> is_forked_child{false};

class ThreadEnd {
 public:
  ThreadEnd() {
    static const int kWatched = ::pthread_atfork(nullptr, nullptr, [] {
      is_forked_child.store(true, std::memory_order_relaxed);
      latest_cache = {0, nullptr, nullptr, true};
    });
    (void)kWatched;
  }
  ThreadEnd(const ThreadEnd&) = delete;
  ThreadEnd& operator=(const ThreadEnd&) = delete;
  ~ThreadEnd() {
    latest_cache = {0, nullptr, nullptr, true};
    if (is_forked_child.load(std::memory_order_relaxed)) return;
    const MutexLock lock(everyone().mutex);
    for (const auto& [id, cache] : caches_) {
      const auto found = everyone().caches.find(id);
      if (found != everyone().caches.end()) found->second->end_thread(cache.get());
    }
  }
  [[nodiscard]] ThreadCache* find(std::uint64_t id) const {
    const auto found = caches_.find(id);
    return found == caches_.end() ? nullptr : found->second.get();
  }
  void add(std::uint64_t id, std::shared_ptr<ThreadCache> cache) {
    caches_.emplace(id, std::move(cache));
    // Those of devices that have ended: nobody else has them.
    std::erase_if(caches_, [](const auto& entry) { return entry.second.use_count() == 1; });
  }

 private:
  // Kept beyond their device: a free looks into the latest before it knows whose block
  // it frees.
  std::map<std::uint64_t, std::shared_ptr<ThreadCache>> caches_;
};

namespace {
ThreadEnd& this_thread() {
  thread_local ThreadEnd end;
  return end;
}
}  // namespace

BlockCaches::BlockCaches(Peaks& device_peaks, const Clock& clock, const std::atomic<std::size_t>& oversize_bytes)
    : id_(next_id()),
      device_peaks_(device_peaks),
      clock_(clock),
      oversize_bytes_(oversize_bytes),
      shared_mutex_(std::make_shared<Mutex>()),
      mutex_(*shared_mutex_) {
  const MutexLock lock(everyone().mutex);
  everyone().caches.emplace(id_, this);
}

BlockCaches::~BlockCaches() {
  const MutexLock lock(everyone().mutex);
  everyone().caches.erase(id_);
  const MutexLock own_lock(mutex_);
  for (const auto& cache : threads_) cache->end();
}

// Another device's, or none yet, or the thread ends.
ThreadCache* BlockCaches::find_mine() const noexcept {
  LatestCache& latest = latest_cache;
  if (latest.id == 0) return nullptr;
  ThreadCache* const cache = this_thread().find(id_);
  if (cache != nullptr) latest = {id_, cache, this, false};
  return cache;
}

ThreadCache* BlockCaches::make_mine() {
  if (latest_cache.has_ended) return nullptr;
  auto fresh = std::make_shared<ThreadCache>(shared_mutex_, device_peaks_);
  ThreadCache* const cache = fresh.get();
  {
    const MutexLock lock(mutex_);
    threads_.push_back(fresh);
    try {
      this_thread().add(id_, std::move(fresh));
    } catch (...) {
      threads_.pop_back();
      throw;
    }
  }
  latest_cache = {id_, cache, this, false};
  return cache;
}

// ------------------------------------------------------------------ hot path

Block* BlockCaches::take_handed_on(Shard& shard, std::size_t size) {
  const Depot::Batch batch = shard.pool.depot().take(shard.tag, size);
  if (batch.first == nullptr) return nullptr;
  shard.accept(batch);
  return shard.take(size);
}

void BlockCaches::let_go(const ThreadCache& cache, Shard& shard) {
  // Where nobody else could want them they are the pool's, to coalesce: handed on to
  // itself, a thread needed 5 % more driver calls for the same program.
  const bool coalesces = is_alone(cache, shard);
  Block* const excess = shard.take_excess(coalesces);
  shard.pool.take_back(coalesces ? excess : shard.pool.depot().put(excess));
}

bool BlockCaches::put(CachedPool& pool, Address address) noexcept {
  ThreadCache* const cache = mine();
  if (cache == nullptr) [[unlikely]]
    return false;
  const std::size_t offset = address - pool.base();
  cache->lock.enter();
  bool is_kept = false;
  // Its owner frees it, so the block stands still: it is looked at without the
  // pool's lock.
  Block* const block = cache->has(pool) ? pool.directory().find(offset) : nullptr;
  if (block != nullptr && block->state == BlockState::used && block->offset == offset) [[likely]] {
    Shard* const shard = cache->find(pool, block->tag);
    is_kept = shard != nullptr && keep(*cache, *shard, block);
  }
  cache->lock.leave();
  return is_kept;
}

// ----------------------------------------------------------------- beside it

void BlockCaches::add_shard(CachedPool& pool, Stream stream, StreamTag tag) noexcept {
  try {
    ThreadCache* cache = mine();
    if (cache == nullptr && (cache = make_mine()) == nullptr) return;
    // Others read the thread's table under this lock, so it grows under it; and shards
    // end under it, after it was said that the pool may have none.
    const MutexLock lock(mutex_);
    if (may_keep(pool) && cache->find(pool, tag) == nullptr) cache->add(pool, stream, tag);
  } catch (const std::bad_alloc&) {
    return;  // its next request, or free, tries again
  }
}

void BlockCaches::stop_all() {
  stop_those([](const ThreadCache&) { return true; });
}

void BlockCaches::go_on() {
  for (ThreadCache* cache : stopped_) cache->lock.release();
  stopped_.clear();
}

// Of the blocks that threads have handed on nobody knows whose they were.
void BlockCaches::empty_depot(CachedPool& pool) { pool.take_back(pool.depot().take_all()); }

void BlockCaches::give_back(ThreadCache& cache, const CachedPool& pool, Kept kept) {
  Shard* const first = cache.first_of(pool);
  if (first == nullptr) return;  // and it has not been stopped
  if (kept != Kept::stays) empty_depot(first->pool);
  for (Shard* shard = first; shard != nullptr; shard = shard->next.get()) {
    if (kept != Kept::stays) shard->pool.take_back(shard->take_all());
  }
  // A pool that nobody has used stays untouched: its figures of last time hold.
  if (first->tally.has_counted()) first->tally.merge();
  if (kept == Kept::gone) cache.remove(pool);
}

void BlockCaches::gather(const CachedPool& pool) {
  if (pool.has_shards()) const Still still(*this, pool, Kept::back);
}

std::size_t BlockCaches::kept_blocks(const CachedPool& pool) {
  const MutexLock lock(mutex_);
  stop_all();
  std::size_t kept = 0;
  for (const auto& cache : threads_) {
    for (const Shard* shard = cache->first_of(pool); shard != nullptr; shard = shard->next.get()) kept += shard->kept();
  }
  go_on();
  return kept + pool.depot().blocks();
}

void BlockCaches::stop(Reason reason) {
  off_.fetch_or(reason, std::memory_order_relaxed);
  is_stop_due_.store(true, std::memory_order_relaxed);
  finish_stop();
}

void BlockCaches::finish_stop() {
  if (!is_stop_due_.load(std::memory_order_relaxed)) return;
  const Still still(*this, Kept::gone);
  is_stop_due_.store(false, std::memory_order_relaxed);
}

void BlockCaches::end_thread(ThreadCache* cache) {
  const MutexLock lock(mutex_);
  // One after the other, without a list: a thread that ends can not do without memory.
  while (const CachedPool* const pool = cache->any_pool()) give_back(*cache, *pool, Kept::gone);
  cache->end();  // while the device is there
  std::erase_if(threads_, [cache](const auto& thread) { return thread.get() == cache; });
}

void BlockCaches::give_back(const CachedPool& pool, Kept kept) {
  if (!pool.has_shards()) return;
  for (const auto& cache : threads_) give_back(*cache, pool, kept);
}

// False in an observer.
bool BlockCaches::hold() {
  if (Telling::is_mine()) return false;
  mutex_.lock();
  return true;
}

BlockCaches::Still::Still(BlockCaches& caches) VMM_NO_THREAD_SAFETY_ANALYSIS : caches_(caches), holds_(caches.hold()) {}

BlockCaches::Still::Still(BlockCaches& caches, const CachedPool& pool, Kept kept) VMM_NO_THREAD_SAFETY_ANALYSIS
    : Still(caches) {
  if (!holds_) return;
  caches_.stop_those([&pool](const ThreadCache& cache) { return cache.first_of(pool) != nullptr; });
  caches_.give_back(pool, kept);
}

BlockCaches::Still::Still(BlockCaches& caches, Kept kept) VMM_NO_THREAD_SAFETY_ANALYSIS : Still(caches) {
  if (!holds_) return;
  caches_.stop_all();
  for (const auto& cache : caches_.threads_) {
    for (const CachedPool* pool : cache->pools()) give_back(*cache, *pool, kept);
  }
}

BlockCaches::Still::~Still() VMM_NO_THREAD_SAFETY_ANALYSIS {
  if (!holds_) return;
  caches_.go_on();
  caches_.mutex_.unlock();
}

BlockCaches::Reading::Reading(const BlockCaches& caches) VMM_NO_THREAD_SAFETY_ANALYSIS : caches_(caches),
                                                                                         holds_(!Telling::is_mine()) {
  if (holds_) caches_.mutex_.lock();
}

BlockCaches::Reading::~Reading() VMM_NO_THREAD_SAFETY_ANALYSIS {
  if (holds_) caches_.mutex_.unlock();
}

void BlockCaches::Reading::add_counts(const CachedPool& pool, Statistics* out) const {
  if (!holds_) return;
  for (const auto& cache : caches_.threads_) {
    if (const PoolTally* tally = cache->tally_of(pool)) out->add_blocks(tally->counts(), tally->came());
  }
}

}  // namespace vmm
