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

}  // namespace

Address Ladder::keep_margin(Climb& climb) {
  Pool& asker = climb.asker;
  const Shortage lacks = climb.shortage;
  ReclaimDecision decision{climb.bytes, asker.name(), lacks.refused->name(), {}};
  ReclaimStep& step = decision.steps.at(static_cast<std::size_t>(Rung::other_models));
  const auto began = std::chrono::steady_clock::now();
  Grant grant(memory_.store(), asker.group(), asker.budget());
  grant.terms = {ChunkFit::filled, /*keeps_margin=*/true};
  const std::size_t unit = unit_of(lacks, asker);
  if (could_be_met(climb)) {
    const std::vector<DormantMappings::Dormant> returning = asker.dormant_of_others(lacks.returning_to);
    const MutexLock lock(mutex_);
    memory_.clock().poll();
    const PoolList others = near_margin(asker, lacks, unit);
    step.bytes = gather_to_keep(asker, lacks, others, returning, grant, &step);
  }
  step.bytes += grant.bytes();
  const auto is_in_vain = [&climb] { return climb.found == 0 && climb.shortage.is_margin; };
  // Where that is not enough its own of other sizes may do beside it.
  if (step.bytes >= lacks.bytes || grant.bytes() != 0) climb.try_again(&grant);
  if (is_in_vain()) {  // what did not fit together makes room instead
    Grant odd(memory_.store(), asker.group(), asker.budget());
    grant.chunks.move_no_units(unit, odd.chunks);
    if (give_back(odd, asker.group()) != 0) climb.try_again(&grant);
  }
  climb.is_margin_open = true;
  grant.terms.keeps_margin = false;
  if (is_in_vain()) {
    climb.try_again(&grant);
    grant.shelve();
    // As much of what rests on the shelf, which fits nowhere either, goes back.
    ChunkStore& store = memory_.store();
    const std::size_t shelved = store.shelved_bytes(asker.group());
    store.trim(asker.group(), shelved - std::min(shelved, lacks.bytes));
  }
  if (climb.found != 0 && !step.yielded.empty()) {
    step.result = StepResult::met;
    step.nanoseconds = std::chrono::nanoseconds(std::chrono::steady_clock::now() - began).count();
    note(asker, std::move(decision));
  }
  return climb.found;
}

// Who is asked before the margin is taken: few, and none that has less than a unit idle or, as
// far as is known, nothing that would do.
PoolList Ladder::near_margin(const Pool& asker, const Shortage& lacks, std::size_t unit) const {
  PoolList found = memory_.pools_under(*lacks.refused);
  const std::size_t whole = align_up(lacks.bytes, unit);
  // As gather_to_keep() asks: for units, where such are taken, and for chunks of other sizes.
  std::vector<WantedChunks> any_of;
  if (lacks.takes_units) any_of.push_back({0, unit, whole});
  any_of.push_back({0, 0, whole, {}, /*is_unused=*/lacks.takes_units});
  std::erase_if(found, [&asker, unit, &any_of](const auto& pool) {
    const bool is_passed_over = pool.get() == &asker || pool->budget().used() < unit || is_above(*pool, asker);
    return is_passed_over || !pool->may_have_idle(unit, any_of);
  });
  found = in_order_of_yielding(std::move(found));
  if (found.size() > kMostAsked) found.resize(kMostAsked);
  return found;
}

// To the driver, as far as nothing queued uses it: how many bytes.
std::size_t Ladder::give_back(Grant& grant, Budget& group) {
  const std::size_t shelved = memory_.store().shelved_bytes(group);
  grant.shelve();
  return memory_.store().trim(group, shelved);
}

// What `lacks`, a part of the margin, can be met with instead: units; then chunks of other
// sizes, beside which the pool's own may stand. What fits nowhere goes back to the driver and
// makes room: how many bytes. (A piece of a unit is missing where units end, and little
// blocks are of any size.) REQUIRES: the clock was polled just before.
std::size_t Ladder::gather_to_keep(Pool& asker, const Shortage& lacks, const PoolList& others,
                                   std::span<const DormantMappings::Dormant> returning, Grant& grant,
                                   ReclaimStep* step) {
  WantedChunks wanted{lacks.bytes, 0, 0, returning};
  wanted.is_at_a_glance = true;
  const std::size_t unit = unit_of(lacks, asker);
  const std::size_t whole = align_up(lacks.bytes, unit);
  if (lacks.takes_units) {
    wanted.unit = unit;
    wanted.most = whole;
    gather_from(others, wanted, grant, step);
    if (grant.bytes() >= lacks.bytes) return 0;
  }
  // What fills no place goes back to the driver, so it is nothing that queued work may use.
  const std::size_t missing = lacks.bytes - grant.bytes();
  wanted.unit = 0;
  wanted.most = std::min(missing, unit);
  wanted.is_unused = lacks.takes_units;
  gather_from(others, wanted, grant, step);
  if (grant.bytes() >= lacks.bytes) return 0;
  Grant odd(memory_.store(), asker.group(), asker.budget());
  wanted = {lacks.bytes - grant.bytes(), 0, whole, {}, /*is_unused=*/true, /*is_at_a_glance=*/true};
  gather_from(others, wanted, odd, step);
  return give_back(odd, asker.group());
}

}  // namespace vmm
