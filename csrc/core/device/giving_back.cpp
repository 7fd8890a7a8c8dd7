// DeviceMemory: giving memory back to the driver, because somebody asks or because a
// limit was lowered below what is held.
#include <algorithm>

#include "base/errors.h"
#include "core/device/afterwards.h"
#include "core/device/device_memory.h"

namespace vmm {

namespace {

// While some limit is below what is in use, so many frees, or as many as there
// are pools, go by between two looks at all of them.
constexpr std::size_t kFreesPerLook = 64;

}  // namespace

std::size_t DeviceMemory::trim(Pool& pool, std::size_t keep) {
  return trim(pool, [&] {
    if (pool.is_part()) {
      pool.shed(keep);
      return;
    }
    for (const auto& member : family(pool)) {
      if (member->is_spill()) {  // the host's: none of it is to stay
        member->shed(0);
        continue;
      }
      const std::size_t idle = keep == 0 ? 0 : std::min(keep, member->idle_bytes());
      member->shed(idle);
      keep -= idle;
    }
  });
}

std::size_t DeviceMemory::empty_cache(Pool& pool) {
  const std::size_t given_back = trim(pool, 0);
  return given_back + store_.trim(pool.group(), 0);
}

std::size_t DeviceMemory::trim_passed(Pool& pool, const FunctionRef<void()>& shed) {
  Budget& group = pool.group();
  settle_watched(pool);
  const std::size_t shelved = store_.shelved_bytes(group);
  shed();
  return store_.trim(group, shelved);
}

std::size_t DeviceMemory::trim(Pool& pool, const FunctionRef<void()>& shed) {
  Budget& group = pool.group();
  clock_.synchronize().ignore();
  // What pools that have closed still have to give is not this one's.
  if (beside_.load(std::memory_order_relaxed) != 0) settle(/*wait=*/true);
  const std::size_t shelved = store_.shelved_bytes(group);
  shed();
  // A chunk may still be mapped where another pool had it before.
  settle(/*wait=*/true);
  pool.count_sync();
  std::size_t given_back = store_.trim(group, shelved);
  for (const auto& member : family(pool)) {
    if (member->is_spill()) given_back += spill_store_.trim(member->group(), 0);
  }
  return given_back;
}

std::size_t DeviceMemory::empty_cache() {
  clock_.synchronize().ignore();  // settle() waits for what this could not
  settle(/*wait=*/true);
  for (const auto& pool : pools()) pool->shed(0);
  settle(/*wait=*/true);
  streams_.destroy_free_fences();
  count_sync();
  return store_.trim_all() + spill_store_.trim_all();
}

// What is idle above the floors beneath `level`, and of shelves there, until about `want` bytes
// have gone. Waits for queued work.
std::size_t DeviceMemory::give_idle_back(const Budget& level, const Budget& payer, std::size_t want) {
  std::size_t given_back = store_.trim_under(level, want);
  std::size_t lacking = want - std::min(want, given_back);
  for (const auto& pool : Ladder::in_order_of_yielding(pools_under(level))) {
    if (lacking == 0) break;
    lacking -= std::min(lacking, pool->shed_about(lacking, &payer));
  }
  // A chunk may still be mapped where another pool had it before.
  settle(/*wait=*/true);
  if (given_back < want) given_back += store_.trim_under(level, want - given_back);
  return given_back;
}

bool DeviceMemory::reclaim_for(const Budget& payer, std::size_t bytes, const FunctionRef<bool()>& attempt) {
  if (!could_hold(payer, bytes)) return false;
  clock_.synchronize().ignore();  // settle() waits for what this could not
  settle(/*wait=*/true);
  count_sync();
  std::size_t given_back = 0;
  for (const Budget* level = &payer; level != nullptr; level = level->parent()) {
    const std::size_t room = level->room_for(payer);
    if (room < bytes) given_back += give_idle_back(*level, payer, bytes - room);
  }
  // No limit refused it: the driver did.
  if (given_back == 0) given_back = give_idle_back(budget_, payer, bytes);
  if (attempt()) return true;
  return given_back != 0 && give_idle_back(budget_, payer, kUnlimited) != 0 && attempt();
}

// A wait for all streams that no pool asked for.
void DeviceMemory::count_sync() {
  const MutexLock lock(registry_mutex_);
  ++counted_before_.num_sync_all_streams;
}

bool DeviceMemory::settle(bool wait) {
  if (wait) clock_.wait(clock_.now()).ignore();  // what it could not wait for stays
  bool any = false;
  for (const auto& pool : pools()) {
    if (!pool->settle()) continue;
    any = true;
    trim_shelf(*pool);
  }
  return bury_closed() || any;
}

bool DeviceMemory::settle_covered() {
  clock_.passes_at_once(clock_.now());
  return settle(/*wait=*/false);
}

// To what a shelf may keep. Of what stays above that somebody must think later on: it is still mapped
// at former addresses, which pass by themselves only once there is a tick behind them.
std::size_t DeviceMemory::trim_shelf(ChunkStore& store, Budget& group) {
  const std::size_t given_back = store.trim(group, options_.store_bytes);
  if (store.shelved_bytes(group) <= options_.store_bytes) return given_back;
  if (clock_.has_unreachable()) return given_back;  // it goes when somebody waits
  const bool is_noted = is_shelf_full_.exchange(true, std::memory_order_relaxed);
  beside_.fetch_or(kHasEnded, std::memory_order_relaxed);
  // Once, until it is looked at again: of 8000 pages that were freed one by one each walk took 80 us.
  if (!is_noted) clock_.cover_in_time(store.waiting(group, clock_.passed()).newest);
  return given_back;
}

void DeviceMemory::trim_shelves() {
  std::vector<std::shared_ptr<Budget>> groups;
  {
    const MutexLock lock(registry_mutex_);
    for (const auto& [key, group] : groups_) groups.push_back(group.budget);
  }
  trim_shelf(store_, budget_);
  for (const auto& group : groups) trim_shelf(store_, *group);
}

std::size_t DeviceMemory::set_limit(Budget& budget, std::size_t limit_bytes) {
  budget.set_limit(limit_bytes);
  return enforce_limit(budget);
}

void DeviceMemory::require_floor(const std::string& name, std::size_t floor_bytes) const {
  if (floor_bytes <= capabilities_.total_memory) return;
  throw InvalidArgumentError("floor " + format_bytes(floor_bytes) + " of " + name + ": the device has " +
                             format_bytes(capabilities_.total_memory));
}

std::size_t DeviceMemory::set_floor(Budget& budget, std::size_t floor_bytes) {
  require_floor(budget.name(), floor_bytes);
  budget.set_floor(floor_bytes);
  return enforce_floor(budget);
}

std::size_t DeviceMemory::enforce_floor(const Budget& budget) {
  std::size_t given_back = 0;
  afterwards([&] {
    for (Budget* level = budget.parent(); level != nullptr; level = level->parent()) {
      if (level->is_over()) given_back += enforce_limit(*level);
    }
  });
  return given_back;
}

std::size_t DeviceMemory::set_floor(Pool& model, std::size_t floor_bytes) {
  model.require_open();
  const std::size_t given_back = set_floor(model.budget(), floor_bytes);
  if (model.is_closed()) model.budget().set_floor(0);
  return given_back;
}

// At once what is possible, and the rest as it is freed.
std::size_t DeviceMemory::enforce_limit(Budget& budget) {
  std::size_t given_back = 0;
  try {
    given_back = give_back_excess(budget, /*wait=*/true);
  } catch (...) {
    note_over_limit(budget);  // the limit is set, and frees bring it nearer
    throw;
  }
  if (budget.is_over()) {
    note_over_limit(budget);
  } else if (over_limit_.load(std::memory_order_relaxed)) {
    enforce_limits(nullptr, {});  // perhaps it was the last
  }
  return given_back;
}

// What is freed has to go back, and threads keep none of it. Said first: whoever lets
// them keep it again at this moment looks at that afterwards.
void DeviceMemory::note_over_limit(const Budget& budget) {
  over_limit_.store(true, std::memory_order_seq_cst);
  may_be_over_.store(true, std::memory_order_seq_cst);
  // Memory in the host's is seldom, and keeps nobody's caches on the device from working.
  if (!budget.stands_under(spill_budget_)) caches_.stop(BlockCaches::kOverLimit);
}

// Gives back what `budget` holds above its limit and does not need: first what
// rests on shelves, then what is idle in pools above their floors, lowest priority first,
// and at last, as a limit goes before the floors, what is idle at all.
std::size_t DeviceMemory::give_back_excess(Budget& budget, bool wait) {
  ChunkStore& store = budget.stands_under(spill_budget_) ? spill_store_ : store_;
  std::size_t given_back = store.trim_under(budget, budget.excess());
  bool has_shed = false;
  for (const bool beneath_floors : {false, true}) {
    // What is idle beneath a floor is claimed whoever has it.
    const auto claims = [&] { return beneath_floors ? std::size_t{0} : budget.excess_claims(); };
    std::size_t excess = budget.excess();  // what is on a shelf still counts
    if (std::max(excess, claims()) == 0) break;
    if (log_ != nullptr) settle(wait);
    for (const auto& pool : Ladder::in_order_of_yielding(pools_under(budget))) {
      const std::size_t want = std::max(excess, claims());
      if (want == 0) break;
      excess -= std::min(excess, pool->shed_about(want, beneath_floors ? nullptr : &budget));
      has_shed = true;
    }
    if (wait) {
      settle(/*wait=*/true);
    } else {
      settle_covered();
    }
    given_back += store.trim_under(budget, budget.excess());
  }
  if (!has_shed) return given_back;
  // Where the limit is a model's own, or a floor's, that rests on shelves, which keep no more than ever.
  for (const auto& pool : pools_under(budget)) given_back += trim_shelf(*pool);
  return given_back;
}

// The same by what `pool` has come to hold idle with a free of `range`, for every limit above
// it. What it had idle before has gone: of 4000 free blocks a walk took 0.2 ms at each free.
void DeviceMemory::give_back_excess_above(Pool& pool, ByteRange range) {
  const std::vector<ByteRange> freed = pool.came_free_with(range);
  for (Budget* level = &pool.budget(); level != nullptr; level = level->parent()) {
    if (level->excess() != 0) pool.store().trim_under(*level, level->excess());
    std::size_t shed = 0;
    if (const std::size_t want = level->excess(); want != 0) shed += pool.shed_in(freed, want, nullptr);
    if (const std::size_t want = level->excess_claims(); want != 0) shed += pool.shed_in(freed, want, level);
    if (level->excess() != 0) pool.store().trim_under(*level, level->excess());
    if (shed == 0 || level->excess() == 0) continue;
    // It is mapped where it was until a tick has passed.
    clock_.cover_in_time(clock_.now());
    clock_.poll();
    if (pool.settle()) pool.store().trim_under(*level, level->excess());
  }
}

bool DeviceMemory::is_look_due() {
  const std::size_t frees = frees_over_limit_.fetch_add(1, std::memory_order_relaxed) + 1;
  if (frees < kFreesPerLook) return false;
  {
    const MutexLock lock(registry_mutex_);
    if (frees < registry_.all().size()) return false;
  }
  frees_over_limit_.store(0, std::memory_order_relaxed);
  return true;
}

// A limit was lowered below what was in use: every free brings it nearer. What was
// idle elsewhere has been given back before. What queued work held up there is
// found by a look at all pools, which 4000 of them make 2 ms: now and then.
void DeviceMemory::enforce_limits(Pool* freed, ByteRange range) {
  caches_.finish_stop();
  if (freed != nullptr && !is_look_due()) {
    give_back_excess_above(*freed, range);
    trim_shelf(*freed);
    return;
  }
  // Before it looks: a limit that is lowered meanwhile sets it again.
  over_limit_.store(false, std::memory_order_relaxed);
  bool still = true;
  try {
    still = give_back_all_excess();
  } catch (...) {
    over_limit_.store(true, std::memory_order_seq_cst);  // another free looks again
    may_be_over_.store(true, std::memory_order_seq_cst);
    throw;
  }
  if (still) {
    over_limit_.store(true, std::memory_order_seq_cst);
    may_be_over_.store(true, std::memory_order_seq_cst);  // another look, which found nothing, may have said no,
    caches_.stop(BlockCaches::kOverLimit);                // and let them go on
  } else if (!over_limit_.load(std::memory_order_relaxed)) {
    may_be_over_.store(false, std::memory_order_seq_cst);
    caches_.resume(BlockCaches::kOverLimit);
    // Lowered at this very moment: it said so before it stopped them.
    if (over_limit_.load(std::memory_order_seq_cst)) {
      may_be_over_.store(true, std::memory_order_seq_cst);
      caches_.stop(BlockCaches::kOverLimit);
    }
  }
}

// Of every budget that there is. Whether one is still over its limit.
bool DeviceMemory::give_back_all_excess() {
  std::vector<Budget*> over;
  const auto note = [&over](Budget& budget) {
    if (budget.is_over()) over.push_back(&budget);
  };
  const PoolList all = pools();
  std::vector<std::shared_ptr<Budget>> groups;  // one may end meanwhile
  {
    const MutexLock lock(registry_mutex_);
    for (const auto& [key, group] : groups_) {
      groups.push_back(group.budget);
      groups.push_back(group.spill);
    }
  }
  for (const auto& pool : all) note(pool->budget());
  for (const auto& group : groups) note(*group);
  note(budget_);
  bool still = false;
  for (Budget* budget : over) {
    give_back_excess(*budget, /*wait=*/false);
    still = still || budget->is_over();
  }
  return still;
}

}  // namespace vmm
