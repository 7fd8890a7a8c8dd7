// The reclaim ladder: who yields when a request cannot be met.
//
//   0  the pool itself: its own idle chunks, its group's shelf, a new chunk
//      within the limits (allocating.cpp, Pool::place)
//   1  what rests on the group's shelf in sizes that did not fit, and on all
//      shelves where the driver itself refused, is given back to the driver
//   2  idle chunks of other pools that stand under the limit that refused,
//      lowest priority first, then whoever is furthest above its floor; they
//      move by a second mapping, and no one waits for the GPU
//   3  torch's registered free-memory callbacks, and work that is done by now
//   4  the function that the shared pool's user gave for it: it evicts, trims or
//      frees; then 1 and 2 again, for as long as it says that there is more
//   5  what is free inside private pools that said that they lend it
//   6  the last rung: wait for all queued work, with no lock held; then, with
//      every pool locked, give all idle memory above the floors back to the
//      driver and take the room. Whatever fits after that is granted; no other
//      thread can take it in between. Again while others had work queued since
//      that may still use idle memory
//   7  an error that says who asked, for how much, every limit, who holds
//      what, and what would help (refusing.cpp)
//
// A rung that has changed nothing is not followed by another attempt. Where everything that
// all others have would not do, nobody gives anything: rungs 1, 2 and 6 are passed over. A
// callback may raise a limit, so 3 is passed over only where the device is too small, and 4
// there and where the pool has no such addresses.
// One request at a time climbs; requests that their own pool can meet never
// wait for it.
#include <algorithm>
#include <array>
#include <tuple>

#include "base/errors.h"
#include "core/device/device_memory.h"
#include "core/memory/grant.h"

namespace vmm {

namespace {

// How often the last rung is tried again because other threads, meanwhile, have
// queued work on memory that they then freed. Each round waits for that work.
constexpr int kMostRounds = 16;

}  // namespace

// Who yields first: the lowest priority, then whoever is furthest above its floor.
PoolList DeviceMemory::in_order_of_yielding(PoolList pools) {
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

// Pools whose idle memory would help: those under the limit that refused, or
// all of the device when the device itself has no more.
PoolList DeviceMemory::victims(const Pool& asker, const Budget* refused) const {
  PoolList found = refused == nullptr ? pools() : pools_under(*refused);
  std::erase_if(found, [&](const auto& pool) { return pool.get() == &asker; });
  return in_order_of_yielding(std::move(found));
}

// Among those of one priority, what was at the very place before comes first.
void DeviceMemory::take_from(const PoolList& pools, std::span<const DormantMappings::Dormant> wanted, std::size_t want,
                             Grant& grant) {
  Budget* refused = nullptr;  // then the asker may take no more
  const auto has_wanted = [wanted](const Pool& pool) {
    return std::any_of(wanted.begin(), wanted.end(),
                       [&pool](const DormantMappings::Dormant& chunk) { return chunk.holder == pool.id(); });
  };
  for (auto first = pools.begin(); first != pools.end();) {
    const std::int64_t priority = (*first)->budget().priority_in_all();
    // From the next on: it may be given another priority meanwhile.
    const auto last = std::find_if(std::next(first), pools.end(), [priority](const auto& pool) {
      return pool->budget().priority_in_all() != priority;
    });
    for (auto at = first; at != last && refused == nullptr && grant.bytes() < want; ++at) {
      if (has_wanted(**at)) (*at)->surrender(0, wanted, grant, &refused);
    }
    for (auto at = first; at != last && refused == nullptr && grant.bytes() < want; ++at) {
      (*at)->surrender(want - grant.bytes(), {}, grant, &refused);
    }
    if (refused != nullptr || grant.bytes() >= want) return;
    first = last;
  }
}

// With every pool locked: gives idle memory back until the asker has room for
// `want` bytes (`need` at the least), and takes them for it before anyone else
// can. Returns the idle bytes that could not be had, as queued work may still
// use them.
std::size_t DeviceMemory::melt(Pool& asker, const Budget* refused, std::size_t need, std::size_t want, Grant& grant) {
  const PoolList all = pools();
  const BlockCaches::Still still(caches_, BlockCaches::Kept::back);
  const AllLocked locked(all);
  const PoolList order = in_order_of_yielding(all);
  Budget& payer = asker.budget();
  std::size_t in_use = 0;
  if (refused == nullptr) {
    // The device itself has run out: every shelf and pool may hold what the
    // driver needs, whatever the limits say.
    for (const auto& pool : order) in_use += pool->melt_locked(nullptr, 0, payer);
    store_.trim_all();
    create_into(grant, asker, need);
  }
  // The limit that refused, then those above it: they may be full as well, of
  // what others hold.
  for (const Budget* level = refused; level != nullptr; level = level->parent()) {
    if (level->room() < want) store_.trim_under(*level, want - level->room());
    for (const auto& pool : order) {
      if (pool->budget().stands_under(*level)) in_use += pool->melt_locked(level, want, payer);
    }
    // What melted but is still mapped elsewhere rests on a shelf.
    if (level->room() < want) store_.trim_under(*level, want - level->room());
    if (level->room_for(payer) < need) break;
  }
  const std::size_t room = std::min(payer.headroom(), want - std::min(want, grant.bytes()));
  if (room != 0 && payer.charge(room) == nullptr) grant.prepaid_bytes += room;
  return in_use;
}

// Makes chunks for the asker while nobody else can take the driver's memory.
void DeviceMemory::create_into(Grant& grant, const Pool& asker, std::size_t want) {
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
    if (store_.create(store_.spec(size), grant.payer(), &chunk, &refused).ok()) {
      grant.chunks.put(chunk);
    } else if (is_whole || refused != nullptr || size == page) {
      return;
    } else {
      size /= 2;
    }
  }
}

// ------------------------------------------------------------------ the rungs

Address DeviceMemory::Climb::again(Grant* grant) {
  Shortage latest;
  const Address address = attempt(grant, &latest);
  if (address == 0) shortage = latest;
  return address;
}

bool DeviceMemory::could_hold(const Budget& payer, std::size_t bytes) const {
  return bytes <= capabilities_.total_memory && payer.could_hold(bytes);
}

bool DeviceMemory::could_be_met(const Climb& climb) const {
  return climb.bytes <= climb.asker.capacity() && could_hold(climb.asker.budget(), climb.bytes);
}

Address DeviceMemory::try_again(Climb& climb) { return climb.again(nullptr); }

Address DeviceMemory::give_shelves_back(Climb& climb) {
  if (climb.shortage.no_address_space || !could_be_met(climb)) return 0;
  const MutexLock lock(reclaim_mutex_);
  // Whoever climbed meanwhile may have left what this one needs.
  const bool others_climbed = climbs_.fetch_add(1, std::memory_order_relaxed) != climb.climbs_before;
  std::size_t given_back = store_.trim(climb.asker.group(), 0);
  if (climb.shortage.refused == nullptr) given_back += store_.trim_all();
  return given_back != 0 || others_climbed ? climb.again(nullptr) : 0;
}

// What the limits still allow is created, only the rest is taken. Memory that has
// been used is no use to a graph.
Address DeviceMemory::take_from_others(Climb& climb) {
  Pool& asker = climb.asker;
  const Shortage& lacks = climb.shortage;
  if (lacks.no_address_space || lacks.wait_for != kLongAgo || asker.is_pinned() || !could_be_met(climb)) return 0;
  const MutexLock lock(reclaim_mutex_);
  if (asker.keeps_within_chunks() && asker.shed(0) != 0) {
    // Its own idle chunks do not fit, and are not put together.
    store_.trim(asker.group(), 0);
    if (const Address address = climb.again(nullptr)) return address;
    if (lacks.no_address_space || lacks.wait_for != kLongAgo) return 0;
  }
  Grant grant(store_, asker.group(), asker.budget());
  const std::size_t room = lacks.refused == nullptr ? 0 : asker.budget().headroom();
  take_from(victims(asker, lacks.refused), asker.dormant_of_others(lacks.returning_to),
            lacks.bytes - std::min(lacks.bytes, room), grant);
  return grant.bytes() != 0 ? climb.again(&grant) : 0;
}

// A callback may free tensors, and even allocate: no lock is held. torch's ask for
// events, which ends a capture.
Address DeviceMemory::call_for_memory(Climb& climb) {
  if (climb.bytes > capabilities_.total_memory) return 0;
  const bool has_freed = memory_callback_ && !clock_.is_capturing() && memory_callback_();
  return settle(/*wait=*/false) || has_freed ? climb.again(nullptr) : 0;
}

bool DeviceMemory::relieve(Pool& asker, std::size_t bytes) {
  if (bytes > capabilities_.total_memory || bytes > asker.capacity()) return false;  // whatever it frees
  if (NoRelief::is_on() || clock_.is_capturing()) return false;
  std::shared_ptr<const OnPressure> function;
  {
    const MutexLock lock(registry_mutex_);
    const auto group = groups_.find(&asker.group());
    if (group != groups_.end()) function = group->second.on_pressure;
  }
  if (function == nullptr) return false;
  const NoRelief of_its_own;
  return (*function)(bytes, asker.is_part() ? asker.owner() : asker.shared_from_this());
}

// What it frees is idle in whatever pool it was in, or waits for queued work there: that is
// waited for before more is asked of it.
Address DeviceMemory::call_for_relief(Climb& climb) {
  for (int round = 0; round < kMostReliefs && relieve(climb.asker, climb.bytes); ++round) {
    for (const bool waits : {false, true}) {
      if (waits) wait_for(clock_.now());
      settle(/*wait=*/false);
      for (const Rung rung :
           {&DeviceMemory::try_again, &DeviceMemory::give_shelves_back, &DeviceMemory::take_from_others}) {
        const Address address = (this->*rung)(climb);
        if (address != 0 || climb.shortage.is_sealed) return address;
      }
    }
  }
  return 0;
}

Address DeviceMemory::borrow(Climb& climb) {
  if (!climb.stream.has_value() || !climb.asker.is_ordinary() || !lender_) return 0;
  return lender_(climb.asker, climb.bytes, *climb.stream);
}

Address DeviceMemory::wait_and_melt(Climb& climb) {
  if (!could_be_met(climb)) return 0;
  Pool& asker = climb.asker;
  std::size_t in_use = 0;
  for (int round = 0; round < kMostRounds; ++round) {
    const Budget* const refused = climb.shortage.refused;
    wait_for(clock_.now());
    await_judges();
    settle(/*wait=*/false);
    {
      const MutexLock lock(reclaim_mutex_);
      Grant grant(store_, asker.group(), asker.budget());
      in_use = 0;
      if (const Shortage& lacks = climb.shortage; !lacks.no_address_space) {
        const std::size_t page = asker.page_size();
        // A small block needs a whole slab, whatever the page.
        const std::size_t most = align_up(std::max(climb.bytes, lacks.bytes), page) + page;
        in_use = melt(asker, lacks.refused, lacks.bytes, most, grant);
      }
      if (const Address address = climb.again(&grant)) return address;
      if (climb.shortage.is_sealed) return 0;
    }
    // Room under a limit may be what the device, or the next limit, lacks.
    const bool is_another = climb.shortage.refused != refused;
    if (in_use == 0 && climb.shortage.wait_for == kLongAgo && !is_another) break;
  }
  // What was created for it and did not suffice is nobody's: a library may need it.
  if (climb.shortage.refused == nullptr) store_.trim_all();
  return 0;
}

Address DeviceMemory::reach(Climb& climb) {
  constexpr std::array<Rung, 6> kRungs = {
      &DeviceMemory::give_shelves_back, &DeviceMemory::take_from_others, &DeviceMemory::call_for_memory,
      &DeviceMemory::call_for_relief,   &DeviceMemory::borrow,           &DeviceMemory::wait_and_melt};
  climb.asker.count_retry();
  for (const Rung rung : kRungs) {
    const Address address = (this->*rung)(climb);
    if (address != 0 || climb.shortage.is_sealed) return address;
  }
  return 0;
}

}  // namespace vmm
