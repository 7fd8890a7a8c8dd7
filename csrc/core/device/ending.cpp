// DeviceMemory: the end of pools and groups, and of addresses that no pool has. What queued
// work still uses waits, and ends when somebody comes by after that.
#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

#include "base/errors.h"
#include "core/device/afterwards.h"
#include "core/device/device_memory.h"

namespace vmm {

namespace {

constexpr int kGoAttempts = 3;
// What queued work holds up may also pass without a tick (recorded streams): for each pool
// that it holds up, so many calls go by between two looks at them all.
constexpr std::size_t kCallsPerTending = 64;
// Where a tick has no fence (a stream was met that nobody can ask later) nothing passes by itself:
// of what closes and leaves then, so much waits at a time. Without a bound 200 models that came
// and went kept their 200 stretches of addresses and 806 MiB.
constexpr std::size_t kMostWithoutFence = 8;

}  // namespace

void DeviceMemory::close_pools(const PoolList& pools, bool force) {
  for (const auto& pool : pools) pool->settle();
  // They and the spaces of their tags and of what they spilled, which end with them.
  PoolList closing = pools;
  {
    const MutexLock tags_lock(tags_mutex_);  // no tag gets a space meanwhile
    // They and models' parts, in order of registration: that is in which they are locked. A
    // part alone, of which a model may have thousands, ends without a look at the others.
    PoolList members;
    {
      const MutexLock lock(registry_mutex_);
      members = registry_.deciding(pools);
      for (const auto& pool : pools) {
        const PoolList spaces = registry_.tagged(*pool);
        closing.insert(closing.end(), spaces.begin(), spaces.end());
        if (pool->is_part()) continue;
        const PoolList family = registry_.family(*pool);
        std::copy_if(family.begin(), family.end(), std::back_inserter(closing),
                     [](const auto& member) { return member->is_spill(); });
      }
    }
    // Whether they are in use, and that nobody uses them any more, is one step.
    const BlockCaches::Still still(caches_, members, BlockCaches::Kept::gone);
    const AllLocked locked(members);
    std::size_t blocks = 0;
    std::size_t bytes = 0;
    std::string holds;  // by whom: a model with its tags, graphs and tensors of their own is one
    for (const auto& member : members) {
      if (member->live_blocks_locked() == 0) continue;
      if (holds.empty()) holds = member->model().name();
      blocks += member->live_blocks_locked();
      bytes += member->live_bytes_locked();
    }
    if (!force && blocks != 0) {
      throw StillInUseError("pool '" + holds + "' still holds " + std::to_string(blocks) + " live " +
                                (blocks == 1 ? "block, " : "blocks, ") + format_bytes(bytes) +
                                "; free its tensors and pages first, or force",
                            bytes, blocks);
    }
    // Before any of them can be drained: whoever drains it looks for it there.
    const MutexLock lock(registry_mutex_);
    for (const auto& pool : closing) {
      if (registry_.find(pool.get()) != nullptr) closed_.emplace(pool.get(), pool);
      pool->close_locked();
    }
  }
  for (const auto& pool : closing) {
    pool->drop_pages();
    pool->forget_unchanged();
    if (pool->live_blocks() != 0) {  // a last small tensor does not keep what nobody uses
      pool->shed(0);
      trim_shelf(*pool);
    }
    bury(pool);
  }
  // A tensor's own part ends with each such tensor: only what it has left goes back then, as at
  // any free over a limit. (With a look at all pools each, 1600 of them took 0.6 ms.)
  const bool is_over = over_limit_.load(std::memory_order_relaxed);
  const bool are_parts = std::all_of(pools.begin(), pools.end(), [](const auto& pool) { return pool->is_part(); });
  if (is_over && are_parts) {
    for (const auto& pool : pools) {
      for (Budget* level = &pool->budget(); level != nullptr; level = level->parent()) {
        if (level->excess() != 0) pool->store().trim_under(*level, level->excess());
      }
    }
  }
  std::set<const Budget*> groups;  // the first look may end one
  for (const auto& pool : pools) groups.insert(&pool->model().group());
  for (const Budget* group : groups) bury_group(group);
  if (is_over && (!are_parts || is_look_due())) is_look_owed_.store(true, std::memory_order_relaxed);
}

void DeviceMemory::after_closing() {
  afterwards([&] { tend_if_any_wait(); });
  if (is_look_owed_.load(std::memory_order_relaxed) && is_look_owed_.exchange(false))
    afterwards([&] { enforce_limits(nullptr, {}); });
  wait_if_much_has_no_fence();
}

// A capture keeps fences away too, and ends.
void DeviceMemory::wait_if_much_has_no_fence() {
  if (!clock_.is_without_fence() || clock_.is_capturing()) return;
  {
    const MutexLock lock(registry_mutex_);
    if (waiting_.size() + leaving_.size() < kMostWithoutFence) return;
  }
  count_sync();
  settle(/*wait=*/true);
}

// Ends a closed pool that holds nothing any more. One that queued work still uses
// stays until another time. Whether it ended, or gave memory back.
bool DeviceMemory::bury(const std::shared_ptr<Pool>& pool) {
  if (pool->live_blocks() != 0) return false;
  const bool ended = pool->end();
  const std::size_t given_back = pool->is_spill() ? spill_store_.trim(pool->group(), 0) : trim_shelf(*pool);
  if (!ended) {
    const MutexLock lock(registry_mutex_);
    waiting_.insert(closed_.extract(pool.get()));
    beside_.fetch_or(kHasEnded, std::memory_order_relaxed);
    return given_back != 0;
  }
  std::uint64_t resets = 0;
  {
    const MutexLock lock(registry_mutex_);
    resets = times_reset_;
  }
  const Statistics statistics = pool->statistics();
  {
    const MutexLock lock(registry_mutex_);
    closed_.erase(pool.get());
    waiting_.erase(pool.get());
    if (!registry_.remove(*pool)) return true;
    // What was counted before a reset that came meanwhile is not to come back.
    Statistics since = statistics;
    if (times_reset_ != resets) since.reset_accumulated();
    counted_before_.add_totals(since);
  }
  if (pool->is_part()) {
    pool->model().inherit(statistics);
  } else {
    ladder_.log().forget(pool->id());
  }
  return true;
}

// `pool` lost its last block, and may have gone meanwhile: it is only compared.
void DeviceMemory::bury_drained(const Pool* pool) {
  std::shared_ptr<Pool> drained;
  {
    const MutexLock lock(registry_mutex_);
    waiting_.insert(closed_.extract(pool));  // first, and without memory: whoever comes next finds it there
    if (const auto at = waiting_.find(pool); at != waiting_.end()) drained = at->second;
  }
  if (drained == nullptr) return;
  bury_with_group(drained);
  tend_if_any_wait();
}

void DeviceMemory::bury_with_group(const std::shared_ptr<Pool>& pool) {
  try {
    const Budget* const group = &pool->model().group();
    bury(pool);
    bury_group(group);
  } catch (...) {
    beside_.fetch_or(kHasEnded, std::memory_order_relaxed);  // whoever comes by next goes on
    throw;
  }
}

void DeviceMemory::after_transfer(const PoolList& pools) noexcept {
  for (const auto& pool : pools) {
    try {
      if (pool->is_closed()) bury_with_group(pool);
    } catch (...) {
      // It is noted that one waits.
    }
  }
  if (!over_limit_.load(std::memory_order_relaxed)) return;
  try {
    enforce_limits(nullptr, {});
  } catch (...) {
    // It is noted that one is over its limit.
  }
}

// All that can be. Whether anything changed.
bool DeviceMemory::bury_closed() {
  PoolList closed;
  {
    const MutexLock lock(registry_mutex_);
    for (const auto& [key, pool] : closed_) closed.push_back(pool);
    for (const auto& [key, pool] : waiting_) closed.push_back(pool);
  }
  bool any = false;
  for (const auto& pool : closed) {
    any = pool->drop_pages() || any;  // that whoever held them last found no host memory to drop
    any = bury(pool) || any;
  }
  any = bury_groups() || any;
  return run_passed() || any;
}

void DeviceMemory::end_group(const Budget& group) {
  {
    const MutexLock lock(registry_mutex_);
    groups_.at(&group).has_ended = true;
  }
  try {
    bury_group(&group);
  } catch (const std::bad_alloc&) {
    beside_.fetch_or(kHasEnded, std::memory_order_relaxed);  // whoever comes by next goes on
  }
}

bool DeviceMemory::bury_groups() {
  std::vector<const Budget*> ended;
  {
    const MutexLock lock(registry_mutex_);
    for (const auto& [key, group] : groups_) {
      if (group.has_ended) ended.push_back(key);
    }
  }
  bool any = false;
  for (const Budget* group : ended) any = bury_group(group) || any;
  return any;
}

// Ends the group if it is closed and has nothing any more: it is only compared, as others may
// do so at the same time. Whether it ended, or gave memory back.
bool DeviceMemory::bury_group(const Budget* key) {
  Group group;
  {
    const MutexLock lock(registry_mutex_);
    const auto at = groups_.find(key);
    if (at == groups_.end() || !at->second.has_ended) return false;
    group = at->second;
  }
  const bool any = store_.trim(*group.budget, 0) + spill_store_.trim(*group.spill, 0) != 0;
  std::shared_ptr<const OnPressure> last;  // somebody's code: it ends with no lock held
  const MutexLock lock(registry_mutex_);
  const auto at = groups_.find(key);
  if (at == groups_.end()) return any;
  // Whoever buries its last pool comes here again.
  if (!registry_.of_group(*group.budget)->empty() || !registry_.of_group(*group.spill)->empty()) return any;
  if (!store_.forget(*group.budget) || !spill_store_.forget(*group.spill)) {
    beside_.fetch_or(kHasEnded, std::memory_order_relaxed);
    return any;
  }
  last.swap(at->second.on_pressure);
  groups_.erase(at);
  return true;
}

void DeviceMemory::once_passed(std::function<bool()> go) noexcept {
  const Epoch last_use = clock_.now();
  Leaving leaving{last_use, std::move(go)};
  bool is_noted = false;
  try {
    {
      const MutexLock lock(registry_mutex_);
      leaving_.push_back(std::move(leaving));  // all or none: its move does not throw
      is_noted = true;
    }
    beside_.fetch_or(kHasEnded, std::memory_order_relaxed);
    clock_.cover_in_time(last_use);
    wait_if_much_has_no_fence();
    tend();
  } catch (const std::exception&) {
    if (is_noted) return;  // whoever comes by
    // Without room to note it, it goes now, after a wait.
    try {
      for (int attempt = 0; attempt < kGoAttempts; ++attempt) {
        if (clock_.wait(last_use).ok() && leaving.go()) return;
      }
    } catch (const std::exception&) {
      return;  // it costs its addresses
    }
  }
}

// Whether anything went.
bool DeviceMemory::run_passed() {
  Epoch newest = kLongAgo;    // of what waits
  std::list<Leaving> passed;  // from one to the other they go as nodes, which takes no memory
  {
    const MutexLock lock(registry_mutex_);
    for (auto at = leaving_.begin(); at != leaving_.end();) {
      const auto each = at++;
      if (clock_.has_passed(each->last_use)) {
        passed.splice(passed.end(), leaving_, each);
      } else {
        newest = std::max(newest, each->last_use);
      }
    }
  }
  bool any = false;
  for (auto at = passed.begin(); at != passed.end();) {
    bool went = false;
    try {
      went = at->go();
    } catch (...) {  // it is asked again
      went = false;
    }
    any = any || went;
    at = went ? passed.erase(at) : std::next(at);
  }
  {
    const MutexLock lock(registry_mutex_);
    leaving_.splice(leaving_.end(), passed);
    if (!leaving_.empty()) beside_.fetch_or(kHasEnded, std::memory_order_relaxed);
  }
  clock_.cover_in_time(newest);
  if (!any) return false;
  // What it had mapped may rest on shelves, from where it could not go before.
  afterwards([&] { trim_shelves(); });
  return true;
}

// What closed pools left behind comes back when the work that used it is done,
// found by whoever allocates next.
void DeviceMemory::tend() {
  clock_.poll();
  const Epoch passed = clock_.passed();
  const std::size_t between = kCallsPerTending * held_up_.load(std::memory_order_relaxed);
  const bool is_due = tendings_.fetch_add(1, std::memory_order_relaxed) % between == 0;
  if (tended_.exchange(passed, std::memory_order_relaxed) == passed && !is_due) return;
  beside_.fetch_and(~unsigned{kHasEnded}, std::memory_order_relaxed);
  PoolList waiting;
  std::size_t looked_at = 1;
  const bool is_full = is_shelf_full_.exchange(false, std::memory_order_relaxed);
  try {
    {
      const MutexLock lock(registry_mutex_);
      for (const auto& [key, pool] : waiting_) waiting.push_back(pool);
      looked_at = std::max(looked_at, is_full ? registry_.all().size() : waiting.size());
    }
    for (const auto& pool : waiting) bury(pool);
    bury_groups();
    run_passed();
    if (is_full) {
      settle(/*wait=*/false);
      trim_shelves();
    }
  } catch (...) {
    if (is_full) is_shelf_full_.store(true, std::memory_order_relaxed);
    beside_.fetch_or(kHasEnded, std::memory_order_relaxed);  // whoever comes by next goes on
    throw;
  }
  held_up_.store(looked_at, std::memory_order_relaxed);
}

}  // namespace vmm
