// The reclaim ladder: who yields when a request for a model's memory cannot be met. (For memory
// that has no model to climb for, what is idle yields in the same order: DeviceMemory::reclaim_for();
// host memory has rules of its own: spilling.cpp.)
//
//   -  the pool itself: its group's shelf, a new chunk within the limits, its own idle
//      chunks (allocating.cpp, BackedSpace::place)
//   -  before new memory comes of the margin, the last of a limit that models share, what
//      others have idle (keep_margin()); that is no rung, and no request climbs for it
//   *  store: of what rests on the group's shelf as much as the limit lacks goes back to the
//      driver, and where that will not do all of it, and then of what rests on others' under that
//      limit as much as it lacks still; all shelves' where the driver itself refused; nothing where
//      a limit of the model's own did
//   *  other models: idle chunks of other pools that stand under the limit that refused,
//      lowest priority first, then whoever is furthest above its floor; they
//      move by a second mapping, and no one waits for queued work. In the place of one of which
//      half or more would be left over comes a new one, unless queued work may still use it.
//      What came from the shelf is room of the margin, as long as others have not been asked
//   *  callbacks: torch's registered free-memory callbacks, and work that is done by now
//   *  on_pressure: the function that the shared pool's user gave for it: it evicts, trims
//      or frees; then store and other models again, for as long as it says that there is more
//   *  private pools: what is free inside those that said that they lend it
//   *  queued work: wait for all of it, with no lock held; then, with
//      every pool locked, give all idle memory above the floors back to the
//      driver and take the room. Whatever fits after that is granted; no other
//      thread can take it in between. Again while others had work queued since
//      that may still use idle memory
//   *  host memory: for models that ask for it (DeviceMemory::set_spills): the tensor stands
//      in the host's, counted and bounded apart (spilling.cpp)
//   -  an error that says who asked, for how much, every limit, who holds
//      what, and what would help (refusing.cpp)
//
// A rung says whether it has changed anything: what has not is not followed by another
// attempt. Where everything that all others have would not do, nobody gives anything: store,
// other models and queued work are passed over. A callback may raise a limit, so callbacks are
// passed over only where the device is too small, and on_pressure there and where the pool has
// no such addresses.
// One request at a time gathers what others have; requests that their own pool can meet never
// wait for it, but those that the margin is kept from do, while it is being gathered.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>

#include "base/function_ref.h"
#include "base/sync.h"
#include "core/backing/shortage.h"
#include "core/cache/block_caches.h"
#include "core/device/pool_registry.h"
#include "core/device/reclaim_log.h"
#include "core/memory/dormant_mappings.h"
#include "core/memory/grant.h"
#include "driver/driver.h"

namespace vmm {

class DeviceMemory;

class Ladder {
 public:
  // Asks the pool once more, with what was gathered for it: an address, or 0 and what is missing.
  using Attempt = FunctionRef<Address(Grant*, Shortage*)>;

  // What is asked for beside a request, all or none with it. Bytes.
  struct Beside {
    std::size_t there = 0;    // has been met
    std::size_t to_come = 0;  // is asked for next
  };
  // One request on its way up, and what it lacked at its latest attempt.
  struct Climb {
    Pool& asker;
    const std::size_t bytes;
    const std::optional<Stream> stream;  // none: not for a tensor, so nobody else's memory will do
    const Attempt& attempt;
    Shortage shortage;
    const std::uint64_t climbs_before;  // climbs() behind the first attempt
    const Beside beside;
    // nullptr: what became of it is noted. Else, of one in vain, it goes here: whoever asks
    // tells of it, or asks again.
    std::optional<ReclaimDecision>* untold = nullptr;
    Address found = 0;
    bool is_margin_open = false;  // others have been asked
    // Whether it has found an address now.
    bool try_again(Grant* grant);
  };

  Ladder(DeviceMemory& memory, BlockCaches& caches) : memory_(memory), caches_(caches) {}
  Ladder(const Ladder&) = delete;
  Ladder& operator=(const Ladder&) = delete;

  [[nodiscard]] std::uint64_t climbs() const { return climbs_.load(std::memory_order_relaxed); }
  // 0: no rung helped, or what the asker has is sealed meanwhile.
  Address reach(Climb& climb) VMM_EXCLUDES(mutex_);

  // For a request that lacks nothing but would take of the margin (Shortage::is_margin): what
  // others, of no higher priority, have idle is tried first, and then the margin. It waits for
  // no queued work, and counts as no retry. The address, or 0 and what is missing.
  Address keep_margin(Climb& climb) VMM_EXCLUDES(mutex_);

  // Who yields first: the lowest priority, then whoever is furthest above its floor.
  static PoolList in_order_of_yielding(PoolList pools);
  // Whether `pool` has the higher priority.
  static bool is_above(const Pool& pool, const Pool& asker);
  // Pools whose idle memory would help, in that order: those under the limit that refused, or
  // all of the device when the device itself has no more (nullptr).
  [[nodiscard]] PoolList victims(const Pool& asker, const Budget* refused) const;

  // Called, with no lock held, when a request found nothing: frees what it can
  // (torch's registered free-memory callbacks); true if it did anything.
  void set_memory_callback(std::function<bool()> callback) { memory_callback_ = std::move(callback); }
  // Called, with no lock held, before a model's request for a tensor waits: an
  // address out of memory that is free elsewhere and may be had for it, or 0.
  using Lender = std::function<Address(const Pool& model, std::size_t bytes, Stream stream)>;
  void set_lender(Lender lender) { lender_ = std::move(lender); }
  // Whether that has freed anything.
  bool call_back();
  // Calls the group's function (DeviceMemory::set_on_pressure) for a request of `asker` that
  // found nothing. True: trying again may help.
  // `step` (nullptr: nobody asks) is told that it was asked, whatever it answers.
  bool relieve(Pool& asker, std::size_t bytes, ReclaimStep* step = nullptr);
  // While one lives, no request of the thread calls it: what it asks for itself, and where
  // nobody else's code may run.
  class NoRelief {
   public:
    NoRelief() : was_on_(is_on_) { is_on_ = true; }
    NoRelief(const NoRelief&) = delete;
    NoRelief& operator=(const NoRelief&) = delete;
    ~NoRelief() { is_on_ = was_on_; }
    static bool is_on() { return is_on_; }

   private:
    const bool was_on_;
    inline static thread_local bool is_on_ = false;
  };
  // How many pools are asked before the margin is taken. A pool that has nothing is walked
  // once, until something of it comes or goes: 20 us where 400 blocks of it are free. Fewer
  // than would make threads give back what they keep of all.
  static constexpr std::size_t kMostAsked = 7;
  // What stands apart leaves the place that it would have completed as it is, so no more than
  // two units do.
  static constexpr std::size_t kMostUnitsApart = 2;
  // How often a request asks a function that always says that there is more.
  static constexpr int kMostReliefs = 64;

  // What became of a request of `asker`, of which nobody has been told.
  void note(const Pool& asker, ReclaimDecision decision);
  // What became of the requests of a model and its parts.
  [[nodiscard]] ReclaimLog& log() { return log_; }

 private:
  // A rung. It tries the request again where it has changed something, and says so.
  using Step = void (Ladder::*)(Climb&, ReclaimStep*);
  static const std::array<Step, kRungs> kSteps;  // by Rung

  [[nodiscard]] bool could_be_met(const Climb& climb) const;
  void give_shelves_back(Climb& climb, ReclaimStep* step) VMM_EXCLUDES(mutex_);
  void take_from_others(Climb& climb, ReclaimStep* step) VMM_EXCLUDES(mutex_);
  void call_for_memory(Climb& climb, ReclaimStep* step) VMM_EXCLUDES(mutex_);
  void call_for_relief(Climb& climb, ReclaimStep* step) VMM_EXCLUDES(mutex_);
  void borrow(Climb& climb, ReclaimStep* step) VMM_EXCLUDES(mutex_);
  void wait_and_melt(Climb& climb, ReclaimStep* step) VMM_EXCLUDES(mutex_);
  void spill(Climb& climb, ReclaimStep* step) VMM_EXCLUDES(mutex_);

  bool try_with_shelves(Climb& climb, ReclaimStep* step) VMM_EXCLUDES(mutex_);
  void free_addresses(Climb& climb, ReclaimStep* step) VMM_EXCLUDES(mutex_);
  bool take_chunks(Climb& climb, std::size_t unit, ReclaimStep* step) VMM_EXCLUDES(mutex_);
  static void note_met(std::size_t rung, ReclaimDecision* decision);
  // gathering.cpp
  static void drop_important(PoolList& pools, const Pool& asker, std::size_t bytes);
  void gather(const Climb& climb, std::size_t unit, Grant& grant, ReclaimStep* step) VMM_REQUIRES(mutex_);
  void gather_from(const PoolList& pools, const WantedChunks& wanted, Grant& grant, ReclaimStep* step)
      VMM_REQUIRES(mutex_);
  void cut(Grant& grant, const Pool& asker, const WantedChunks& wanted, const PoolList& givers, ReclaimStep* step)
      VMM_REQUIRES(mutex_);
  std::size_t melt(Pool& asker, const Budget* refused, std::size_t need, std::size_t want,
                   Grant& grant) VMM_NO_THREAD_SAFETY_ANALYSIS;
  void create_into(Grant& grant, const Pool& asker, std::size_t want);
  // margin.cpp
  void ask_for_margin(Climb& climb, ReclaimStep* step) VMM_EXCLUDES(mutex_);
  std::size_t make_room_of_units(const Climb& climb, const Shortage& lacks, Grant& grant, ReclaimStep* step)
      VMM_EXCLUDES(mutex_);
  void stand_apart(Climb& climb, const Shortage& lacks, Grant& grant, ReclaimStep* step) VMM_EXCLUDES(mutex_);
  std::size_t gather_to_keep(Pool& asker, const Shortage& lacks, std::optional<Stream> stream, const PoolList& others,
                             std::span<const DormantMappings::Dormant> returning, Grant& grant, ReclaimStep* step)
      VMM_REQUIRES(mutex_);
  [[nodiscard]] PoolList near_margin(const Pool& asker, const Shortage& lacks, std::optional<Stream> stream) const;
  [[nodiscard]] std::optional<Stream> stream_of(const Climb& climb) const;
  std::size_t give_back(Grant& grant, Budget& group);

  DeviceMemory& memory_;
  BlockCaches& caches_;
  std::function<bool()> memory_callback_;
  Lender lender_;
  std::atomic<std::uint64_t> climbs_{0};
  ReclaimLog log_;
  Mutex mutex_;  // one request at a time gathers what others have
};

}  // namespace vmm
