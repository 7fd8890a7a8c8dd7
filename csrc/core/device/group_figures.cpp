#include "core/device/group_figures.h"

#include <algorithm>
#include <atomic>
#include <iterator>
#include <utility>

#include "core/device/all_locked.h"

namespace vmm {

namespace {

// How often it is tried again with those that were touched meanwhile before all
// are locked.
constexpr int kTries = 2;

}  // namespace

// Pools have ended, or have come behind the others, since the last answer.
void GroupFigures::follow(const std::shared_ptr<const PoolList>& pools) {
  if (of_.lock() == pools) return;
  std::vector<Seen> seen;
  std::vector<MemoryStats> figures;
  seen.reserve(pools->size());
  figures.reserve(pools->size());
  std::size_t former = 0;
  for (const auto& pool : *pools) {
    while (former != seen_.size() && seen_[former].id != pool->id()) sum_.subtract(figures_[former++]);
    const bool is_known = former != seen_.size();
    seen.push_back(is_known ? seen_[former] : Seen{pool->id(), pool.get()});
    figures.push_back(is_known ? figures_[former] : MemoryStats{});
    if (is_known) ++former;
  }
  for (; former != seen_.size(); ++former) sum_.subtract(figures_[former]);
  seen_ = std::move(seen);
  figures_ = std::move(figures);
  of_ = pools;
}

// Those, without `locked`, that somebody has locked since they were looked at.
GroupFigures::Places GroupFigures::changed_beside(const Places& locked) const {
  Places changed;
  auto next = locked.begin();
  for (std::size_t place = 0; place < seen_.size(); ++place) {
    if (next != locked.end() && *next == place) {
      ++next;
    } else if (seen_[place].as_of == kNever || seen_[place].as_of != seen_[place].pool->times_locked()) {
      changed.push_back(place);
    }
  }
  return changed;
}

// With its lock held.
void GroupFigures::look_at(std::size_t place, Pool& pool) {
  const MemoryStats now = pool.memory_stats_locked();  // first: the sum is never without it
  sum_.subtract(figures_[place]);
  figures_[place] = now;
  sum_.add(now);
  seen_[place].as_of = pool.changes_by_itself_locked() ? kNever : pool.times_locked();
}

MemoryStats GroupFigures::sum(const std::shared_ptr<const PoolList>& pools, const std::function<void()>& beside) {
  const MutexLock lock(mutex_);
  follow(pools);
  Places places = changed_beside({});
  for (int round = 0;; ++round) {
    PoolList changed;
    changed.reserve(places.size());
    for (const std::size_t place : places) changed.push_back((*pools)[place]);
    const AllLocked locked(changed);
    for (std::size_t k = 0; k < places.size(); ++k) look_at(places[k], *changed[k]);
    beside();
    // What `beside` saw of a pool's doing, the pool's count tells of from here on.
    std::atomic_thread_fence(std::memory_order_acquire);
    const Places touched = changed_beside(places);
    if (touched.empty()) return sum_;
    Places both;
    std::merge(places.begin(), places.end(), touched.begin(), touched.end(), std::back_inserter(both));
    places = std::move(both);
    if (round + 1 < kTries) continue;
    places.resize(seen_.size());
    for (std::size_t place = 0; place < places.size(); ++place) places[place] = place;
  }
}

}  // namespace vmm
