// Ladder: who is asked for idle memory, in what order, what of it is taken, and what is made of the
// room that it leaves. When that is done the rungs say (ladder.cpp), and for the margin margin.cpp.
#include <algorithm>
#include <iterator>
#include <optional>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "core/device/device_memory.h"
#include "core/device/ladder.h"
#include "core/memory/dormant_mappings.h"

namespace vmm {

namespace {

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

}  // namespace vmm
