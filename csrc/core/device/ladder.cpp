#include "core/device/ladder.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <optional>
#include <utility>

#include "base/errors.h"
#include "core/device/device_memory.h"
#include "core/device/reclaim_feed.h"

namespace vmm {

namespace {

// How often the last rung is tried again because other threads, meanwhile, have
// queued work on memory that they then freed. Each round waits for that work.
constexpr int kMostRounds = 16;

}  // namespace

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
  }
  step->bytes += all;
  if (all != 0 || others_climbed) {
    step->result = StepResult::in_vain;
    climb.try_again(nullptr);
  }
  return may_help() && (refused == nullptr ? store.all_shelved_bytes() : store.shelved_under(*refused)) != 0;
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
