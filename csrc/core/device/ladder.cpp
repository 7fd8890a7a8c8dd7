#include "core/device/ladder.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <optional>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "core/device/device_memory.h"
#include "core/device/reclaim_feed.h"
#include "core/memory/dormant_mappings.h"

namespace vmm {

namespace {

// How often the last rung is tried again because other threads, meanwhile, have
// queued work on memory that they then freed. Each round waits for that work.
constexpr int kMostRounds = 16;
// Pools of which threads are made to give back what they keep one after the other, 1 us each;
// then those of all that are left give it back at once.
constexpr std::size_t kAskedOneByOne = 8;
static_assert(Ladder::kMostAsked < kAskedOneByOne);
// What of a chunk a request leaves unused is its pool's, and nobody else's while the request lives. So
// much is worth a release, 0.5 ms for each GiB, and a chunk of the right size. Ordinary chunks, of a 48th of
// a request, go from pool to pool as they are.
constexpr std::size_t kMostLeftOver = 128 * kMiB;
// Who has what was at the very place before gives it first, which costs no call of the driver; but
// of those with a floor only who has at least this share as much to give above it as whoever has most.
constexpr std::size_t kNearlyAsMuch = 2;

bool has_floor(const Pool& pool) {
  for (const Budget* level = &pool.budget(); level != nullptr; level = level->parent()) {
    if (level->floor() != 0) return true;
  }
  return false;
}

std::size_t could_give(Pool& pool) { return std::min(pool.idle_bytes(), pool.bytes_above_floor()); }

}  // namespace

PoolList Ladder::in_order_of_yielding(PoolList pools) {
  std::vector<std::tuple<std::int64_t, std::size_t, std::shared_ptr<Pool>>> keyed;
  for (auto& pool : pools) {
    keyed.emplace_back(pool->budget().priority_in_all(), pool->bytes_above_floor(), pool);
  }
  std::stable_sort(keyed.begin(), keyed.end(), [](const auto& a, const auto& b) {
    if (std::get<0>(a) != std::get<0>(b)) return std::get<0>(a) < std::get<0>(b);
    return std::get<1>(a) > std::get<1>(b);
  });
  pools.clear();
  for (auto& entry : keyed) pools.push_back(std::get<2>(entry));
  return pools;
}

PoolList Ladder::victims(const Pool& asker, const Budget* refused) const {
  PoolList found = refused == nullptr ? memory_.pools_under(memory_.budget()) : memory_.pools_under(*refused);
  std::erase_if(found, [&](const auto& pool) { return pool.get() == &asker || pool->budget().used() == 0; });
  return in_order_of_yielding(std::move(found));
}

bool Ladder::is_above(const Pool& pool, const Pool& asker) {
  return pool.budget().priority_in_all() > asker.budget().priority_in_all();
}

// Among those of one priority what was at the very place before comes first, unless that would take
// one near its floor down to it beside others who are far from theirs; then whoever is furthest.
void Ladder::gather_from(const PoolList& pools, const WantedChunks& wanted, Grant& grant, ReclaimStep* step) {
  Budget* refused = nullptr;  // then the asker may take no more
  const auto has_wanted = [&wanted](const Pool& pool) {
    return std::any_of(wanted.first.begin(), wanted.first.end(),
                       [&pool](const DormantMappings::Dormant& chunk) { return chunk.holder == pool.id(); });
  };
  std::set<const Pool*> asked;
  const auto take = [&](Pool& pool, std::size_t bytes, std::span<const DormantMappings::Dormant> first) {
    const bool is_new = asked.insert(&pool).second;
    if (is_new && asked.size() == kAskedOneByOne) {
      const BlockCaches::Still still(caches_, pools, BlockCaches::Kept::back);
    }
    WantedChunks of_it = wanted;
    of_it.bytes = bytes;
    of_it.first = first;
    const std::size_t moved = pool.surrender(of_it, asked.size() >= kAskedOneByOne, grant, &refused);
    if (moved != 0) step->yielded.push_back({pool.name(), moved});
  };
  for (auto first = pools.begin(); first != pools.end();) {
    const std::int64_t priority = (*first)->budget().priority_in_all();
    // From the next on: it may be given another priority meanwhile.
    const auto last = std::find_if(std::next(first), pools.end(), [priority](const auto& pool) {
      return pool->budget().priority_in_all() != priority;
    });
    std::optional<std::size_t> most;  // that one of them could give; a look at each, so only where it matters
    const auto may_come_first = [&](Pool& pool) {
      if (!has_floor(pool)) return true;
      if (!most.has_value()) {
        most = 0;
        for (auto at = first; at != last; ++at) most = std::max(*most, could_give(**at));
      }
      return could_give(pool) >= *most / kNearlyAsMuch;
    };
    for (auto at = first; at != last && refused == nullptr && grant.bytes() < wanted.bytes; ++at) {
      if (has_wanted(**at) && may_come_first(**at)) take(**at, 0, wanted.first);
    }
    for (auto at = first; at != last && refused == nullptr && grant.bytes() < wanted.bytes; ++at) {
      take(**at, wanted.bytes - grant.bytes(), {});
    }
    if (refused != nullptr || grant.bytes() >= wanted.bytes) return;
    first = last;
  }
}

// With every pool locked: gives idle memory back until the asker has room for
// `want` bytes (`need` at the least), and takes them for it before anyone else
// can. Returns the idle bytes that could not be had, as queued work may still
// use them.
std::size_t Ladder::melt(Pool& asker, const Budget* refused, std::size_t need, std::size_t want, Grant& grant) {
  const PoolList all = memory_.pools_under(memory_.budget());
  const BlockCaches::Still still(caches_, BlockCaches::Kept::back);
  const AllLocked locked(all);
  const PoolList order = in_order_of_yielding(all);
  Budget& payer = asker.budget();
  std::size_t in_use = 0;
  if (refused == nullptr) {
    // The device itself has run out: every shelf and pool may hold what the
    // driver needs, whatever the limits say.
    for (const auto& pool : order) in_use += pool->melt_locked(nullptr, 0, payer);
    memory_.store().trim_all();
    if (need != 0) create_into(grant, asker, need);
  }
  // The limit that refused, then those above it: they may be full as well, of
  // what others hold.
  for (const Budget* level = refused; level != nullptr; level = level->parent()) {
    if (level->room() < want) memory_.store().trim_under(*level, level->lacking(want));
    for (const auto& pool : order) {
      if (pool->budget().stands_under(*level)) in_use += pool->melt_locked(level, want, payer);
    }
    // What melted but is still mapped elsewhere rests on a shelf.
    if (level->room() < want) memory_.store().trim_under(*level, level->lacking(want));
    if (level->room_for(payer) < std::max<std::size_t>(need, 1)) break;
  }
  const std::size_t room = std::min(payer.headroom(), want - std::min(want, grant.bytes()));
  if (room != 0 && payer.charge(room) == nullptr) grant.prepaid_bytes += room;
  return in_use;
}

// Makes chunks for the asker while nobody else can take the driver's memory.
void Ladder::create_into(Grant& grant, const Pool& asker, std::size_t want) {
  const std::size_t page = asker.page_size();
  const bool is_whole = asker.keeps_within_chunks();                     // pieces would be no use to it
  const bool is_small = asker.has_uniform_chunks() || asker.is_range();  // the only size that fits anywhere in it
  std::size_t size = is_small ? page : std::max(floor_power_of_two(std::max(want, page)), page);
  if (is_whole) size = align_up(want, page);
  while (grant.chunks.bytes() < want) {
    const std::size_t missing = want - grant.chunks.bytes();
    while (!is_whole && size > page && size > missing) size /= 2;
    Chunk* chunk = nullptr;
    Budget* refused = nullptr;
    if (memory_.store().create(memory_.store().spec(size), grant.payer(), &chunk, &refused).ok()) {
      grant.chunks.put(chunk);
    } else if (is_whole || refused != nullptr || size == page) {
      return;
    } else {
      size /= 2;
    }
  }
}

// ------------------------------------------------------------------ the rungs

bool Ladder::Climb::try_again(Grant* grant) {
  Shortage latest;
  Grant nothing(asker.store(), asker.group(), asker.budget());
  nothing.terms.fit = ChunkFit::filled;
  found = attempt(grant != nullptr ? grant : is_margin_open ? &nothing : nullptr, &latest);
  if (found == 0) shortage = latest;
  return found != 0;
}

bool Ladder::could_be_met(const Climb& climb) const {
  const std::size_t all = climb.beside.there + climb.bytes + climb.beside.to_come;
  return climb.bytes <= climb.asker.capacity() && memory_.could_hold(climb.asker.budget(), all);
}

void Ladder::give_shelves_back(Climb& climb, ReclaimStep* step) {
  if (!could_be_met(climb)) return;
  if (climb.shortage.no_address_space) {
    free_addresses(climb, step);
    return;
  }
  step->result = StepResult::nothing;
  if (!try_with_shelves(climb, step) || climb.found != 0) return;
  // Of what is mapped at former addresses nobody makes a tick for a few, where streams are many: somebody
  // would be asked, and a model evicted, for memory that nobody uses.
  if (memory_.settle_covered()) try_with_shelves(climb, step);
}

// The asker's own: former ones, and those where it has chunks idle between bare stretches, which are none
// for a block that lies across them.
void Ladder::free_addresses(Climb& climb, ReclaimStep* step) {
  Pool& asker = climb.asker;
  if (!asker.could_place(climb.bytes)) return;
  step->result = StepResult::nothing;
  const bool is_any_shed = asker.shed(0) != 0;
  if (!memory_.settle_covered() && !is_any_shed) return;
  step->result = StepResult::in_vain;
  climb.try_again(nullptr);
}

// Whether something stayed on shelves that might help: it is still mapped.
bool Ladder::try_with_shelves(Climb& climb, ReclaimStep* step) {
  const MutexLock lock(mutex_);
  // Whoever climbed meanwhile may have left what this one needs; or this one itself, the second time.
  const bool others_climbed = climbs_.fetch_add(1, std::memory_order_relaxed) != climb.climbs_before;
  ChunkStore& store = memory_.store();
  Pool& asker = climb.asker;
  const Budget* const& refused = climb.shortage.refused;  // by each attempt
  // A limit below the group carries nothing of its shelf.
  const auto may_help = [&] { return refused == nullptr || asker.group().stands_under(*refused); };
  const auto lacks = [&] {
    const std::size_t bytes = climb.shortage.bytes;
    const std::size_t beside = bytes - std::min(bytes, asker.budget().headroom());
    return refused == nullptr ? beside : std::max(beside, refused->lacking(bytes));
  };
  // First no more than the limit lacks: the rest may be what the request takes from the shelf.
  if (refused != nullptr && may_help()) {
    std::size_t some = 0;
    if (store.shelved_bytes(asker.group()) > lacks()) some = store.give_back(asker.group(), lacks());
    step->bytes += some;
    if (some != 0) step->result = StepResult::in_vain;
    if (some != 0 && climb.try_again(nullptr)) return false;
  }
  std::size_t all = 0;
  if (may_help()) {
    all += store.trim(asker.group(), 0);
    all += refused == nullptr ? store.trim_all() : store.trim_under(*refused, lacks());  // other groups'
    if (refused == &memory_.budget()) all += memory_.guests().trim();                    // nobody's here
  }
  step->bytes += all;
  if (all != 0 || others_climbed) {
    step->result = StepResult::in_vain;
    climb.try_again(nullptr);
  }
  return may_help() && (refused == nullptr ? store.all_shelved_bytes() : store.shelved_under(*refused)) != 0;
}

// Units are asked for first, and whoever is less important may have only other chunks: of what
// `pools`, in the order of yielding, have idle above their floors, those that it takes to come to
// `bytes`, with all of one priority; of the least important where it takes none, as only the margin is to stay.
void Ladder::drop_important(PoolList& pools, const Pool& asker, std::size_t bytes) {
  const auto priority = [](const std::shared_ptr<Pool>& pool) { return pool->budget().priority_in_all(); };
  if (pools.empty() || priority(pools.front()) == priority(pools.back())) return;
  std::size_t idle = 0;
  for (auto at = pools.begin(); at != pools.end(); ++at) {
    if (at != pools.begin() && idle >= bytes && priority(*at) != priority(*std::prev(at))) {
      pools.erase(at, pools.end());
      return;
    }
    idle += std::min((*at)->memory_stats().idle_bytes, (*at)->budget().above_floors(asker.budget()));
  }
}

// In the place of a chunk of which half or more would be left over, one of the size that is missing. Where
// queued work may still use it, it goes as it is: what is done by now is let go of, and no more waited for.
void Ladder::cut(Grant& grant, const Pool& asker, const WantedChunks& wanted, const PoolList& givers,
                 ReclaimStep* step) {
  const std::size_t least = align_up(wanted.bytes, std::max(wanted.unit, asker.page_size()));
  const std::size_t beyond = grant.chunks.bytes() - std::min(grant.chunks.bytes(), least);
  if (beyond < kMostLeftOver) return;
  // Who has one size of chunks takes no other: it would want a whole one again, and then that would be made.
  const auto wants_whole = [beyond](const auto& pool) {
    return pool->has_uniform_chunks() && pool->page_size() >= beyond;
  };
  if (std::any_of(givers.begin(), givers.end(), wants_whole)) return;
  const auto is_mapped = [](const Chunk& chunk) { return chunk.mappings.load(std::memory_order_acquire) != 0; };
  const auto is_large = [beyond](const Chunk& chunk) { return chunk.size >= beyond && chunk.size / 2 <= beyond; };
  // First: from here on nothing may fail with the chunk in nobody's hands.
  if (grant.chunks.bytes_if([&](const Chunk& chunk) { return is_large(chunk) && is_mapped(chunk); }) != 0) {
    memory_.clock().passes_at_once(memory_.clock().now());
    for (const auto& pool : givers) pool->settle();
  }
  Chunk* const large = grant.chunks.take_above(beyond - 1);
  if (large == nullptr) return;  // several are too many
  if (!is_large(*large) || is_mapped(*large) || !memory_.store().release(large).ok()) {
    grant.chunks.put(large);
    return;
  }
  step->bytes += beyond;
  create_into(grant, asker, least);
}

// What the limits still allow is created, only the rest is taken, and what else keeps the
// margin whole, though not from whom is more important.
void Ladder::gather(const Climb& climb, std::size_t unit, Grant& grant, ReclaimStep* step) {
  Pool& asker = climb.asker;
  const Shortage& lacks = climb.shortage;
  const std::size_t room = lacks.refused == nullptr ? 0 : asker.budget().headroom();
  Shortage kept = lacks;
  kept.bytes = 0;
  PoolList others;
  if (unit != 0 && lacks.refused != nullptr && asker.group().stands_under(*lacks.refused)) {
    const Budget& full = *lacks.refused;
    const std::size_t open = std::min(room, full.room_beside(GrowthPolicy::margin(full.limit()), asker.budget()));
    if (open != room) kept.bytes = lacks.bytes - std::min(lacks.bytes, open);
  }
  std::optional<Stream> stream;
  if (kept.bytes != 0) {  // in the order of before, so that who gives goes on giving
    stream = stream_of(climb);
    others = near_margin(asker, kept, stream);
  }
  const std::vector<DormantMappings::Dormant> returning = asker.dormant_of_others(lacks.returning_to);
  const std::size_t missing = lacks.bytes - std::min(lacks.bytes, room);
  PoolList from = victims(asker, lacks.refused);
  if (unit != 0) drop_important(from, asker, missing);
  gather_from(from, {missing, unit, kUnlimited, returning}, grant, step);
  cut(grant, asker, {missing, unit}, from, step);
  if (kept.bytes == 0) return;
  memory_.clock().poll();
  step->bytes += gather_to_keep(asker, kept, stream, others, {}, grant, step);
}

// Memory that has been used is no use to a graph.
void Ladder::take_from_others(Climb& climb, ReclaimStep* step) {
  Pool& asker = climb.asker;
  const Shortage& lacks = climb.shortage;
  if (lacks.no_address_space || lacks.wait_for != kLongAgo || asker.takes_fresh_only() || !could_be_met(climb)) return;
  step->result = StepResult::nothing;
  const auto is_over = [&climb] {
    return climb.found != 0 || climb.shortage.no_address_space || climb.shortage.wait_for != kLongAgo;
  };
  // What the shelf gave back may be room, but of the margin; and so may what is left to create.
  const auto keep = [&] {
    if (!lacks.is_margin) return;
    ask_for_margin(climb, step);
    if (step->bytes != 0) step->result = StepResult::in_vain;
  };
  keep();
  if (is_over()) return;
  while (lacks.bytes == 0 && lacks.refused != nullptr) {
    // It needs no memory, but a limit that was lowered is to be kept first, and then another above it.
    const std::size_t went = memory_.give_back_excess(*lacks.refused, /*wait=*/false);
    step->bytes += went;
    if (went == 0) return;
    step->result = StepResult::in_vain;
    climb.try_again(nullptr);
    if (is_over()) return;
  }
  if (asker.keeps_within_chunks() && asker.shed(0) != 0) {
    // Its own idle chunks do not fit, and are not put together.
    step->result = StepResult::in_vain;
    memory_.settle_covered();
    step->bytes += memory_.store().trim(asker.group(), 0);
    climb.try_again(nullptr);
    if (is_over()) return;
  }
  // Whole units first, where the request takes such; then chunks of any size, to the page.
  bool is_any_found = false;
  if (lacks.takes_units && lacks.unit != 0) {
    is_any_found = take_chunks(climb, lacks.unit, step);
    if (!is_over()) keep();
    if (is_over()) return;
  }
  is_any_found = take_chunks(climb, 0, step) || is_any_found;
  if (is_over() || !is_any_found || !asker.is_asleep()) return;
  // What wakes wants chunks of certain sizes: in the place of the others it makes its own. They can go
  // when they are mapped nowhere any more; for the few addresses that they leave nobody else makes a tick.
  memory_.settle_covered();
  if (memory_.store().trim(asker.group(), 0) != 0) climb.try_again(nullptr);
}

// Of others, units of `unit` bytes or (0) any, and the request once more with them. Whether there are any.
bool Ladder::take_chunks(Climb& climb, std::size_t unit, ReclaimStep* step) {
  Pool& asker = climb.asker;
  const MutexLock lock(mutex_);
  Grant grant(memory_.store(), asker.group(), asker.budget());
  grant.terms.fit = unit != 0 ? ChunkFit::filled : ChunkFit::any;
  grant.terms.keeps_margin = unit != 0 && !climb.is_margin_open;
  gather(climb, unit, grant, step);
  const Shortage& lacks = climb.shortage;
  // Its own of other sizes may do where nobody gave any.
  if (grant.bytes() == 0 && (unit != 0 || !lacks.is_particular)) {
    const bool has_come = lacks.refused != nullptr && !lacks.is_margin && asker.budget().headroom() >= lacks.bytes;
    if (unit == 0 && has_come) {
      // Nobody has to give any: another thread has trimmed, closed a pool, or raised the limit.
      step->result = StepResult::in_vain;
      climb.try_again(nullptr);
    }
    return false;
  }
  step->result = StepResult::in_vain;
  step->bytes += grant.bytes();
  climb.try_again(&grant);
  return true;
}

// A callback may free tensors, and even allocate: no lock is held. torch's ask for
// events, which ends a capture.
bool Ladder::call_back() { return memory_callback_ && !memory_.clock().is_capturing() && memory_callback_(); }

void Ladder::call_for_memory(Climb& climb, ReclaimStep* step) {
  if (climb.bytes > memory_.capabilities().total_memory) return;
  step->result = StepResult::nothing;
  const bool has_freed = call_back();
  if (!memory_.settle(/*wait=*/false) && !has_freed) return;
  step->result = StepResult::in_vain;
  climb.try_again(nullptr);
}

bool Ladder::relieve(Pool& asker, std::size_t bytes, ReclaimStep* step) {
  if (bytes > memory_.capabilities().total_memory) return false;  // whatever it frees
  if (NoRelief::is_on() || memory_.clock().is_capturing()) return false;
  const auto function = memory_.on_pressure_of(asker.group());
  if (function == nullptr) return false;
  const NoRelief of_its_own;
  if (step != nullptr && step->result == StepResult::passed_over) step->result = StepResult::nothing;
  return (*function)(bytes, asker.shared_model());
}

// What it frees is idle in whatever pool it was in, or waits for queued work there: that is
// waited for before more is asked of it.
void Ladder::call_for_relief(Climb& climb, ReclaimStep* step) {
  if (climb.bytes > climb.asker.capacity()) return;
  ChunkStore& store = memory_.store();
  const Budget& group = climb.asker.group();
  const auto held = [&] { return group.used() - std::min(group.used(), store.shelved_bytes(group)); };
  for (int round = 0; round < kMostReliefs; ++round) {
    const std::size_t before = held();
    if (!relieve(climb.asker, climb.bytes, step)) return;
    step->result = StepResult::in_vain;
    std::size_t came = before - std::min(before, held());  // of models that it put to sleep or trimmed
    step->bytes += came;
    for (const bool waits : {false, true}) {
      if (waits) memory_.wait_for(memory_.clock().now());
      memory_.settle(/*wait=*/false);
      if (climb.try_again(nullptr) || climb.shortage.is_sealed) return;
      for (const Step again : {&Ladder::give_shelves_back, &Ladder::take_from_others}) {
        ReclaimStep of_it;
        (this->*again)(climb, &of_it);
        step->bytes += of_it.bytes - std::min(of_it.bytes, came);
        came -= std::min(of_it.bytes, came);
        std::move(of_it.yielded.begin(), of_it.yielded.end(), std::back_inserter(step->yielded));
        if (climb.found != 0 || climb.shortage.is_sealed) return;
      }
    }
  }
}

void Ladder::borrow(Climb& climb, ReclaimStep* step) {
  if (!climb.stream.has_value() || !climb.asker.is_ordinary() || !lender_) return;
  step->result = StepResult::nothing;
  climb.found = lender_(climb.asker, climb.bytes, *climb.stream);
  if (climb.found != 0) step->bytes = climb.bytes;
}

void Ladder::wait_and_melt(Climb& climb, ReclaimStep* step) {
  if (!could_be_met(climb)) return;
  step->result = StepResult::in_vain;
  Pool& asker = climb.asker;
  // What wakes wants chunks of certain sizes, and makes them itself; and so does what a graph
  // uses, or a pool that nothing is split in: they take none that is there.
  const bool creates = !asker.is_asleep() && !asker.takes_fresh_only();
  const std::size_t room = asker.budget().headroom();  // is there, and nobody gives it
  std::size_t in_use = 0;
  for (int round = 0; round < kMostRounds; ++round) {
    const Budget* const refused = climb.shortage.refused;
    memory_.wait_for(memory_.clock().now());
    memory_.await_judges();
    memory_.settle(/*wait=*/false);
    {
      const MutexLock lock(mutex_);
      Grant grant(memory_.store(), asker.group(), asker.budget());
      in_use = 0;
      if (const Shortage& lacks = climb.shortage; !lacks.no_address_space) {
        const std::size_t page = asker.page_size();
        // A small block needs a whole slab, whatever the page.
        const std::size_t most = align_up(std::max(climb.bytes, lacks.bytes), page) + page;
        in_use = melt(asker, lacks.refused, creates ? lacks.bytes : 0, most, grant);
        step->bytes = lacks.refused == nullptr ? grant.chunks.bytes() : grant.bytes() - std::min(room, grant.bytes());
      }
      if (climb.try_again(&grant) || climb.shortage.is_sealed) return;
    }
    // Room under a limit may be what the device, or the next limit, lacks.
    const bool is_another = climb.shortage.refused != refused;
    if (in_use == 0 && climb.shortage.wait_for == kLongAgo && !is_another) break;
  }
  // A small block's slab is not put among large blocks as long as others have memory to give.
  if (climb.stream.has_value() && asker.is_ordinary() && memory_.debug_log() == nullptr) {
    climb.found = asker.try_allocate_within(climb.bytes, *climb.stream);
    if (climb.found != 0) return;
  }
  // What was created for it and did not suffice is nobody's: a library may need it.
  if (climb.shortage.refused == nullptr) memory_.store().trim_all();
}

// Not while something is captured: a graph's launches would go over the bus for ever. Nor in
// debug mode, which watches blocks of the pool that was asked.
void Ladder::spill(Climb& climb, ReclaimStep* step) {
  Pool& asker = climb.asker;
  if (!climb.stream.has_value() || !asker.is_ordinary() || !asker.model().spills()) return;
  if (climb.shortage.no_address_space) return;  // there may be memory enough: more capacity would do
  if (memory_.clock().is_capturing() || memory_.debug_log() != nullptr) return;
  step->result = StepResult::nothing;
  try {
    climb.found = memory_.allocate_spilled(asker, climb.bytes, *climb.stream);
  } catch (const OutOfMemoryError&) {
    return;  // no addresses are left: the request's own error says more
  }
  if (climb.found != 0) step->bytes = climb.bytes;
}

const std::array<Ladder::Step, kRungs> Ladder::kSteps = {&Ladder::give_shelves_back,
                                                         &Ladder::take_from_others,
                                                         &Ladder::call_for_memory,
                                                         &Ladder::call_for_relief,
                                                         &Ladder::borrow,
                                                         &Ladder::wait_and_melt,
                                                         &Ladder::spill};

void Ladder::note(const Pool& asker, ReclaimDecision decision) {
  const Pool& model = asker.model();
  if (ReclaimFeed::is_followed()) {
    ReclaimFeed::instance().put(decision, memory_.driver(), memory_.device());
  }
  log_.note(model.id(), std::move(decision));
  if (model.is_closed()) log_.forget(model.id());  // closed meanwhile: it may have been forgotten before
}

// By whom a request was met on that rung: where others gave nothing, the room that the shelf had
// made was enough, once they had been asked.
void Ladder::note_met(std::size_t rung, ReclaimDecision* decision) {
  ReclaimStep& shelf = decision->steps.at(static_cast<std::size_t>(Rung::store));
  ReclaimStep& step = decision->steps.at(rung);
  const bool is_by_shelf =
      rung == static_cast<std::size_t>(Rung::other_models) && step.bytes == 0 && shelf.result == StepResult::in_vain;
  (is_by_shelf ? shelf : step).result = StepResult::met;
}

Address Ladder::reach(Climb& climb) {
  climb.asker.count_retry();
  ReclaimDecision decision;
  decision.requested = climb.bytes;
  decision.asker = climb.asker.name();
  if (climb.shortage.refused != nullptr) decision.refused_by = climb.shortage.refused->name();
  for (std::size_t rung = 0; rung < kRungs && climb.found == 0 && !climb.shortage.is_sealed; ++rung) {
    ReclaimStep& step = decision.steps.at(rung);
    const auto began = std::chrono::steady_clock::now();
    (this->*kSteps.at(rung))(climb, &step);
    step.nanoseconds = std::chrono::nanoseconds(std::chrono::steady_clock::now() - began).count();
    if (climb.found != 0) note_met(rung, &decision);
    if (rung >= static_cast<std::size_t>(Rung::other_models)) climb.is_margin_open = true;
  }
  if (climb.found == 0 && climb.untold != nullptr) {
    climb.untold->emplace(std::move(decision));
  } else if (climb.found != 0 || !climb.shortage.is_sealed) {
    note(climb.asker, std::move(decision));
  }
  return climb.found;
}

}  // namespace vmm
