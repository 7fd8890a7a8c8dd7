// Ladder: the margin of a limit that models share (GrowthPolicy::margin). Before new memory comes
// of it others are asked for what they have idle, and less of them than on a rung: nothing waits.
#include <algorithm>
#include <chrono>
#include <vector>

#include "core/device/device_memory.h"
#include "core/device/ladder.h"

namespace vmm {

namespace {

// Bytes; a page, where the other models have closed since.
std::size_t unit_of(const Shortage& lacks, const Pool& asker) { return std::max(lacks.unit, asker.page_size()); }

// Units that nobody else still uses: models that run beside each other, on streams of their
// own, would have to wait for each other although both fit. Where the GPU is behind, models
// that take turns on one stream hand on what its work still uses, or they end at their limit
// (1.06 of their peak instead of 1.03). `lacks.bytes` of them.
WantedChunks units_for(const Shortage& lacks, std::size_t unit, std::optional<Stream> stream) {
  WantedChunks wanted{lacks.bytes, unit, align_up(lacks.bytes, unit)};
  wanted.is_at_a_glance = true;
  wanted.is_unused = true;
  wanted.but_by = stream;
  return wanted;
}

// Chunks of other sizes. What fills no place goes back to the driver, so where units are
// taken it is nothing that queued work may use.
WantedChunks others_for(const Shortage& lacks, std::size_t unit, std::optional<Stream> stream) {
  WantedChunks wanted = units_for(lacks, unit, stream);
  wanted.unit = 0;
  if (lacks.takes_units) wanted.but_by.reset();
  return wanted;
}

}  // namespace

Address Ladder::keep_margin(Climb& climb) {
  ReclaimDecision decision{climb.bytes, climb.asker.name(), climb.shortage.refused->name(), {}};
  ReclaimStep& step = decision.steps.at(static_cast<std::size_t>(Rung::other_models));
  const auto began = std::chrono::steady_clock::now();
  ask_for_margin(climb, &step);
  if (climb.found != 0 && !step.yielded.empty()) {
    step.result = StepResult::met;
    step.nanoseconds = std::chrono::nanoseconds(std::chrono::steady_clock::now() - began).count();
    note(climb.asker, std::move(decision));
  }
  return climb.found;
}

// What others have idle, and then the margin.
void Ladder::ask_for_margin(Climb& climb, ReclaimStep* step) {
  Pool& asker = climb.asker;
  const Shortage lacks = climb.shortage;
  const std::optional<Stream> stream = stream_of(climb);
  Grant grant(memory_.store(), asker.group(), asker.budget());
  grant.terms = {ChunkFit::filled, /*keeps_margin=*/true};
  const std::size_t unit = unit_of(lacks, asker);
  std::size_t had = 0;
  if (could_be_met(climb)) {
    const std::vector<DormantMappings::Dormant> returning = asker.dormant_of_others(lacks.returning_to);
    const MutexLock lock(mutex_);
    memory_.clock().poll();
    const PoolList others = near_margin(asker, lacks, stream);
    had = gather_to_keep(asker, lacks, stream, others, returning, grant, step);
  }
  had += grant.bytes();
  step->bytes += had;
  const auto is_in_vain = [&climb] { return climb.found == 0 && climb.shortage.is_margin; };
  // Where that is not enough its own of other sizes may do beside it.
  if (had >= lacks.bytes || grant.bytes() != 0) climb.try_again(&grant);
  if (is_in_vain()) {  // what did not fit together makes room instead
    Grant odd(memory_.store(), asker.group(), asker.budget());
    grant.chunks.move_no_units(unit, odd.chunks);
    if (give_back(odd, asker.group()) != 0) climb.try_again(&grant);
  }
  if (is_in_vain() && make_room_of_units(climb, lacks, grant, step) != 0) climb.try_again(&grant);
  if (is_in_vain() && climb.bytes <= unit * kMostUnitsApart) stand_apart(climb, lacks, grant, step);
  climb.is_margin_open = true;
  grant.terms.keeps_margin = false;
  if (is_in_vain()) {
    climb.try_again(&grant);
    grant.shelve();
    // As much of what rests on the shelf, which fits nowhere either, goes back.
    memory_.store().give_back(asker.group(), lacks.bytes);
  }
}

// What is missing is a part of a unit, and nobody has chunks that fill it: units go back to the
// driver and make room, of those that were granted what the request has no use for, and of
// others'. How many bytes.
std::size_t Ladder::make_room_of_units(const Climb& climb, const Shortage& lacks, Grant& grant, ReclaimStep* step) {
  Pool& asker = climb.asker;
  const std::size_t unit = unit_of(lacks, asker);
  const std::size_t missing = climb.shortage.bytes;
  const std::size_t used = lacks.bytes - std::min(lacks.bytes, missing);  // of the grant, had that been enough
  Grant units(memory_.store(), asker.group(), asker.budget());
  ChunkShelf in_use;
  while (units.bytes() < missing && grant.bytes() >= used + unit) {
    Chunk* const chunk = grant.chunks.take_above(unit - 1);  // the smallest
    if (chunk == nullptr) break;
    (memory_.clock().has_passed(chunk->last_use) ? units.chunks : in_use).put(chunk);
  }
  while (Chunk* const chunk = in_use.take_any()) grant.chunks.put(chunk);
  const std::size_t of_grant = give_back(units, asker.group());
  std::size_t made = of_grant;
  if (made < missing) {
    Shortage rest = lacks;
    rest.bytes = missing - made;
    rest.takes_units = true;
    const MutexLock lock(mutex_);
    memory_.clock().poll();
    gather_from(near_margin(asker, rest, std::nullopt), units_for(rest, unit, std::nullopt), units, step);
    made += give_back(units, asker.group());
  }
  step->bytes += made - of_grant;
  return made;
}

// Queued work uses all units that there are, so none makes room. But one that only the asking
// stream's own uses is as good as new to it: the request stands on such alone, elsewhere.
void Ladder::stand_apart(Climb& climb, const Shortage& lacks, Grant& grant, ReclaimStep* step) {
  const std::size_t unit = unit_of(lacks, climb.asker);
  const std::size_t wanted = align_up(climb.bytes, unit);
  Budget* refused = nullptr;
  while (grant.bytes() < wanted && refused == nullptr) {
    const std::size_t lacking = wanted - grant.bytes();
    Pool& asker = climb.asker;
    Chunk* const shelved =
        memory_.store().take_at_most(asker.group(), asker.budget(), lacking, /*exact=*/false, &refused, unit);
    if (shelved == nullptr) break;
    grant.chunks.put(shelved);
  }
  const std::size_t granted = grant.bytes();
  if (granted < wanted && lacks.takes_units) {
    const std::optional<Stream> stream = stream_of(climb);
    Shortage rest = lacks;
    rest.bytes = wanted - granted;
    WantedChunks units = units_for(rest, unit, stream);
    units.bytes = wanted;
    const MutexLock lock(mutex_);
    gather_from(near_margin(climb.asker, rest, stream), units, grant, step);
    step->bytes += grant.bytes() - granted;
  }
  if (grant.bytes() < wanted) return;
  grant.terms.fit = ChunkFit::apart;
  climb.try_again(&grant);
  grant.terms.fit = ChunkFit::filled;
}

// None that could not come behind its own queued work: beside a capture it could not.
std::optional<Stream> Ladder::stream_of(const Climb& climb) const {
  const Clock& clock = memory_.clock();
  return clock.is_capturing() || clock.is_without_fence() ? std::nullopt : climb.stream;
}

// Who is asked before the margin is taken: few, and none that has less than a unit idle or, as
// far as is known, nothing that would do.
PoolList Ladder::near_margin(const Pool& asker, const Shortage& lacks, std::optional<Stream> stream) const {
  PoolList found = memory_.pools_under(*lacks.refused);
  const std::size_t unit = unit_of(lacks, asker);
  // As gather_to_keep() asks: for units, where such are taken, and for chunks of other sizes.
  std::vector<WantedChunks> any_of;
  if (lacks.takes_units) any_of.push_back(units_for(lacks, unit, stream));
  any_of.push_back(others_for(lacks, unit, stream));
  std::erase_if(found, [&asker, unit, &any_of](const auto& pool) {
    return pool.get() == &asker || is_above(*pool, asker) || !pool->may_give(asker.budget(), unit, any_of);
  });
  found = in_order_of_yielding(std::move(found));
  if (found.size() > kMostAsked) found.resize(kMostAsked);
  return found;
}

// To the driver, as far as nothing queued uses it: how many bytes. A pool that has had a chunk,
// and does nothing since, may not have let go of its former address.
std::size_t Ladder::give_back(Grant& grant, Budget& group) {
  const std::size_t wanted = grant.bytes();
  const std::size_t shelved = memory_.store().shelved_bytes(group);
  grant.shelve();
  const std::size_t gone = memory_.store().trim(group, shelved);
  if (gone >= wanted) return gone;
  for (const auto& pool : memory_.pools_under(group)) pool->settle();
  return gone + memory_.store().trim(group, shelved);
}

// What `lacks`, a part of the margin, can be met with instead: units; then chunks of other
// sizes, beside which the pool's own may stand. What fits nowhere goes back to the driver and
// makes room: how many bytes. (A piece of a unit is missing where units end, and little
// blocks are of any size.) REQUIRES: the clock was polled just before.
std::size_t Ladder::gather_to_keep(Pool& asker, const Shortage& lacks, std::optional<Stream> stream,
                                   const PoolList& others, std::span<const DormantMappings::Dormant> returning,
                                   Grant& grant, ReclaimStep* step) {
  const std::size_t unit = unit_of(lacks, asker);
  if (lacks.takes_units) {
    WantedChunks units = units_for(lacks, unit, stream);
    units.first = returning;
    gather_from(others, units, grant, step);
    if (grant.bytes() >= lacks.bytes) return 0;
  }
  WantedChunks smaller = others_for(lacks, unit, stream);
  smaller.first = returning;
  smaller.most = std::min(lacks.bytes - grant.bytes(), unit);
  gather_from(others, smaller, grant, step);
  if (grant.bytes() >= lacks.bytes) return 0;
  Grant odd(memory_.store(), asker.group(), asker.budget());
  WantedChunks unused = others_for(lacks, unit, stream);
  unused.bytes = lacks.bytes - grant.bytes();
  unused.but_by.reset();
  gather_from(others, unused, odd, step);
  return give_back(odd, asker.group());
}

}  // namespace vmm
