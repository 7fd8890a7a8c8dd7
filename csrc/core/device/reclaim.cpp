// The reclaim ladder: who yields when a request cannot be met.
//
//   0  the pool itself: its own idle chunks, its group's shelf, a new chunk
//      within the limits (Pool::place)
//   1  what rests on the group's shelf in sizes that did not fit is given back
//      to the driver, which makes room under the limit
//   2  idle chunks of other pools that stand under the limit that refused,
//      lowest priority first, then whoever is furthest above its floor; they
//      move by a second mapping, and no one waits for the GPU
//   3  torch's registered free-memory callbacks, and work that is done by now
//   4  what is free inside private pools that said that they lend it
//   5  the last rung: wait for all queued work, with no lock held; then, with
//      every pool locked, give all idle memory above the floors back to the
//      driver and take the room. Whatever fits after that is granted; no other
//      thread can take it in between. Again while others had work queued since
//      that may still use idle memory
//   6  an error that says who asked, for how much, every limit, who holds
//      what, and what would help
//
// A rung that has changed nothing is not followed by another attempt.
// One request at a time climbs; requests that their own pool can meet never
// wait for it.
#include <algorithm>
#include <array>
#include <set>
#include <tuple>

#include "base/errors.h"
#include "core/device/device_memory.h"

namespace vmm {

namespace {

// How often the last rung is tried again because other threads, meanwhile, have
// queued work on memory that they then freed. Each round waits for that work.
constexpr int kMostRounds = 16;

}  // namespace

Address DeviceMemory::allocate(Pool& pool, std::size_t bytes, std::optional<Stream> stream, const Attempt& attempt) {
  tend_if_any_wait();
  Shortage shortage;
  if (const Address address = attempt(nullptr, &shortage)) return address;
  return go_on(pool, bytes, stream, attempt, shortage);
}

// After an attempt in vain: waits for what is only held up, then climbs.
Address DeviceMemory::go_on(Pool& pool, std::size_t bytes, std::optional<Stream> stream, const Attempt& attempt,
                            Shortage shortage) {
  while (!shortage.is_sealed && shortage.wait_for != kLongAgo) {
    wait_for(shortage.wait_for);
    shortage = {};
    if (const Address address = attempt(nullptr, &shortage)) return address;
  }
  if (shortage.is_sealed) return allocate_in_another_space(pool, bytes, *stream);
  Climb climb{pool, bytes, stream, attempt, shortage, climbs_.load(std::memory_order_relaxed)};
  return reach(climb);
}

// A tag's space that takes no requests, as some of its memory is read-only.
Address DeviceMemory::allocate_in_another_space(Pool& sealed, std::size_t bytes, Stream stream) {
  const std::shared_ptr<Pool> space = tagged(sealed.owner(), sealed.tag());
  return allocate(*space, bytes, stream);
}

void DeviceMemory::wait_for(Epoch epoch) {
  throw_if_failed(clock_.wait(epoch), "waiting for queued work that may use the memory");
}

Address DeviceMemory::allocate(Pool& pool, std::size_t bytes, Stream stream) {
  if (const unsigned beside = beside_.load(std::memory_order_relaxed); beside != 0) [[unlikely]] {
    if ((beside & kDebugMode) != 0) return allocate_in_debug_mode(pool, bytes, stream);
    tend();
  }
  if (const Address kept = caches_.take(pool, bytes, stream); kept != 0) [[likely]]
    return kept;
  // As above, but no closure is made where the pool can by itself: 40 of 1900 instructions.
  Shortage shortage;
  if (const Address address = pool.try_allocate(bytes, stream, nullptr, &shortage)) return address;
  return go_on(
      pool, bytes, stream,
      [&](Grant* grant, Shortage* lacks) { return pool.try_allocate(bytes, stream, grant, lacks); }, shortage);
}

Address DeviceMemory::allocate_at(Pool& pool, Address address, std::size_t bytes, Stream stream) {
  settle_watched(pool);
  return allocate(pool, bytes, std::nullopt, [&](Grant* grant, Shortage* shortage) {
    return pool.try_allocate_at(address, bytes, stream, grant, shortage);
  });
}

Address DeviceMemory::allocate_pages(Pool& pool, std::size_t offset, std::size_t size, Stream stream) {
  settle_watched(pool);
  return allocate(pool, size, std::nullopt, [&](Grant* grant, Shortage* shortage) {
    return pool.try_allocate_pages(offset, size, stream, grant, shortage);
  });
}

Address DeviceMemory::allocate_first(Pool& pool, std::size_t size, Stream stream) {
  return allocate(pool, size, std::nullopt, [&](Grant* grant, Shortage* shortage) {
    return pool.try_allocate_first(size, stream, grant, shortage);
  });
}

// Who yields first: the lowest priority, then whoever is furthest above its floor.
PoolList DeviceMemory::in_order_of_yielding(PoolList pools) {
  std::vector<std::tuple<int, std::size_t, std::shared_ptr<Pool>>> keyed;
  for (auto& pool : pools) {
    keyed.emplace_back(pool->priority(), pool->bytes_above_floor(), pool);
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
    const int priority = (*first)->priority();
    const auto last =
        std::find_if(first, pools.end(), [priority](const auto& pool) { return pool->priority() != priority; });
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
  const auto is_own = [&asker](const Pool& pool) { return &pool.model() == &asker.model(); };
  std::size_t in_use = 0;
  if (refused == nullptr) {
    // The device itself has run out: every shelf and pool may hold what the
    // driver needs, whatever the limits say.
    for (const auto& pool : order) in_use += pool->melt_locked(nullptr, 0, is_own(*pool));
    store_.trim_all();
    create_into(grant, asker, need);
  }
  // The limit that refused, then those above it: they may be full as well, of
  // what others hold.
  for (const Budget* level = refused; level != nullptr; level = level->parent()) {
    if (level->room() < want) store_.trim_under(*level, want - level->room());
    for (const auto& pool : order) {
      if (pool->budget().stands_under(*level)) in_use += pool->melt_locked(level, want, is_own(*pool));
    }
    // What melted but is still mapped elsewhere rests on a shelf.
    if (level->room() < want) store_.trim_under(*level, want - level->room());
    if (level->room() < need) break;
  }
  Budget& payer = asker.budget();
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

Address DeviceMemory::give_shelves_back(Climb& climb) {
  if (climb.shortage.no_address_space) return 0;
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
  if (lacks.no_address_space || lacks.wait_for != kLongAgo || asker.is_pinned()) return 0;
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
  const bool has_freed = memory_callback_ && !clock_.is_capturing() && memory_callback_();
  return settle(/*wait=*/false) || has_freed ? climb.again(nullptr) : 0;
}

Address DeviceMemory::borrow(Climb& climb) {
  if (!climb.stream.has_value() || !climb.asker.is_ordinary() || !lender_) return 0;
  return lender_(climb.asker, climb.bytes, *climb.stream);
}

Address DeviceMemory::wait_and_melt(Climb& climb) {
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
  using Rung = Address (DeviceMemory::*)(Climb&);
  constexpr std::array<Rung, 5> kRungs = {&DeviceMemory::give_shelves_back, &DeviceMemory::take_from_others,
                                          &DeviceMemory::call_for_memory, &DeviceMemory::borrow,
                                          &DeviceMemory::wait_and_melt};
  Pool& asker = climb.asker;
  asker.count_retry();
  for (const Rung rung : kRungs) {
    if (const Address address = (this->*rung)(climb)) return address;
    if (climb.shortage.is_sealed) return allocate_in_another_space(asker, climb.bytes, *climb.stream);
  }
  const Shortage& lacks = climb.shortage;
  const bool driver_failed = lacks.refused == nullptr && !lacks.no_address_space;
  if (driver_failed && lacks.status.code() != StatusCode::out_of_memory) {
    throw_if_failed(lacks.status, "pool '" + asker.name() + "': " + format_bytes(climb.bytes) + " asked");
  }
  asker.count_oom();
  if (on_out_of_memory_) on_out_of_memory_(asker, climb.bytes, climb.stream.value_or(nullptr));
  throw_out_of_memory(asker, climb.bytes, lacks);
}

// -------------------------------------------------------------------- the error

// Who holds memory that counts under `refused` (nullptr: the device), whoever
// holds most first. What is idle and still there now is what floors keep.
std::vector<Holder> DeviceMemory::holders_under(const Budget* refused, const Pool& asker) const {
  std::vector<Holder> holders;
  std::size_t in_pools = 0;
  const PoolList all = refused == nullptr ? pools() : pools_under(*refused);
  std::set<const Pool*> there;
  for (const auto& pool : all) there.insert(pool.get());
  for (const auto& pool : all) {
    // Its model's, unless that was closed and a tensor of it lives on.
    if (pool->is_part() && there.count(&pool->model()) != 0) continue;
    const MemoryStats stats = memory_stats_of(*pool);
    in_pools += stats.physical_usage;
    if (stats.physical_usage == 0) continue;
    Holder holder{pool->name() + (pool->model().is_retired() ? " (closed)" : ""), stats.allocated_bytes,
                  stats.idle_bytes, stats.stranded_bytes, stats.quarantined_bytes};
    if (holder.idle != 0 && &pool->model() != &asker.model()) holder.floor = pool->floor();
    holders.push_back(std::move(holder));
  }
  if (refused == nullptr || refused == &budget_) {
    const std::size_t foreign = foreign_budget_.used();
    if (foreign != 0) holders.push_back({"MemPools of other allocators", foreign});
    const std::size_t zeros = zero_budget_.used();
    if (zeros != 0) holders.push_back({"pages that read as zero", zeros});
    const std::size_t accounted = in_pools + foreign + zeros + store_.all_shelved_bytes();
    const std::size_t by_hand = budget_.used() - std::min(accounted, budget_.used());
    if (by_hand != 0) holders.push_back({"VirtualMemoryManager", by_hand});
  }
  std::stable_sort(holders.begin(), holders.end(), [](const auto& a, const auto& b) { return a.held() > b.held(); });
  return holders;
}

void DeviceMemory::throw_out_of_memory(Pool& asker, std::size_t bytes, const Shortage& shortage) {
  Refusal refusal;
  RefusalCause cause;
  refusal.requested = bytes;
  refusal.pool = asker.is_tag_space() ? asker.model().name() : asker.name();
  refusal.limit = asker.budget().limit();
  cause.no_addresses = shortage.no_address_space;
  cause.takes_whole_pages = options_.debug.kind == DebugMode::Kind::guard;
  cause.capacity = asker.capacity();
  for (const Budget* level = &asker.budget(); level != nullptr; level = level->parent()) {
    if (level == &budget_ && level->limit() == kUnlimited) continue;
    cause.limits += "; " + level->name() + ": ";
    if (level->limit() != kUnlimited) cause.limits += "limit " + format_bytes(level->limit()) + ", ";
    cause.limits += "mapped " + format_bytes(level->used());
  }
  MemoryInfo info;
  const bool known = driver_.memory_info(device_, &info).ok();
  if (known) {
    cause.device_total = info.total;
    cause.device_free = info.free;
    const std::size_t taken = info.total - std::min(info.free, info.total);
    cause.outside = taken - std::min(budget_.used(), taken);
  }
  if (cause.no_addresses) {
    refusal.limit = cause.capacity;
    refusal.holders = holders_under(&asker.model().budget(), asker);
  } else {
    refusal.holders = holders_under(shortage.refused, asker);
    if (shortage.refused != nullptr) {
      refusal.limit = shortage.refused->limit();
      cause.limit_name = shortage.refused->name();
    } else {
      cause.driver_said = shortage.status.text();
      if (known && shortage.status.code() == StatusCode::out_of_memory) refusal.limit = info.total;
    }
  }
  const std::size_t headroom = asker.budget().headroom();
  refusal.available =
      std::min(known ? std::min(headroom, info.free) : headroom, asker.capacity()) + asker.memory_stats().idle_bytes;
  refusal.advice = advice_for(refusal, cause);
  {
    const MutexLock lock(refusal_mutex_);
    last_refusal_ = refusal;
  }
  OutOfMemoryError error(text_of(refusal, cause), refusal.requested, refusal.available, refusal.limit, refusal.pool);
  error.is_told = true;
  throw error;
}

std::optional<Refusal> DeviceMemory::last_refusal() const {
  const MutexLock lock(refusal_mutex_);
  return last_refusal_;
}

}  // namespace vmm
