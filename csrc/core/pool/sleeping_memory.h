// What of a pool's memory is elsewhere, and its ways there and back: which chunks stood where,
// which bytes of them are kept in a backup, and, once it is awake, which of these nobody has been
// able to write to since. Addresses and blocks stay; chunks leave for the group's shelf, and others
// come to the same offsets. Whoever moves their contents, and waits for what is queued, is
// core/sleep.
//
// It knows a pool's space, and which of its blocks live: nothing of requests, threads' caches and
// numbers. going_to_sleep.cpp is the way there, waking.cpp the way back, and waking_plan.cpp says
// what comes back and in what order.
//
// Its owner's lock guards it. What a backup may end with is handed to the caller, who lets go of it
// with no lock held.
#pragma once

#include <cstddef>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/backing/backed_space.h"
#include "core/backing/pool_context.h"
#include "core/backing/shortage.h"
#include "core/blocks/slabs.h"
#include "core/limits/budget.h"
#include "core/pool/asleep.h"
#include "core/streams/clock.h"

namespace vmm {

class SleepingMemory {
 public:
  struct Belongs {
    SpaceOwner& owner;
    const std::string& name;  // for messages
    OwnerId id;               // of what is written there
    Budget& group;            // whose shelf
    Budget& budget;           // who pays
    bool is_of_tag;           // each block may be sealed and unsealed by itself
  };
  SleepingMemory(const PoolContext& context, const Belongs& belongs, BackedSpace& space, const Slabs& slabs)
      : context_(context),
        owner_(belongs.owner),
        name_(belongs.name),
        id_(belongs.id),
        group_(belongs.group),
        budget_(belongs.budget),
        is_of_tag_(belongs.is_of_tag),
        space_(space),
        slabs_(slabs) {}

  [[nodiscard]] bool is_asleep() const { return asleep_ != nullptr; }
  // A transfer to sleep begins, and no memory leaves from now on but by let_go(). REQUIRES: it is
  // awake, and the space is open.
  void begin();

  // -- Unchanged, of one that is awake too ---------------------------------------
  // What lies in `range` may be written to.
  [[nodiscard]] Unchanged take_unchanged(ByteRange range) { return unchanged_.take(range); }
  [[nodiscard]] Unchanged take_all_unchanged() { return std::exchange(unchanged_, {}); }

  // -- REQUIRES from here on: is_asleep() ------------------------------------------
  // A transfer is on its way.
  [[nodiscard]] bool is_busy() const { return asleep_->is_busy; }
  // `is_going`: to sleep; what is mapped still goes too. REQUIRES: none is on its way.
  void begin_transfer(bool is_going);
  void end_transfer() { asleep_->is_busy = asleep_->is_going = false; }
  // As before begin(). `goes_on`: it may sleep again, and what is read-only need not be copied
  // then; `former` is what need not be until now. REQUIRES: nothing is missing.
  [[nodiscard]] std::unique_ptr<Asleep> end(bool goes_on, Unchanged* former);
  // The same of one without blocks, whose contents nobody wants.
  [[nodiscard]] std::unique_ptr<Asleep> drop();

  // -- There: REQUIRES that the space is open, as do the next ones -----------------
  // What is to leave, by offset. Gives what is idle to the group's shelf. `keeps_unchanged`: what
  // is in a backup already is not copied again. Chunks under `staying` stay.
  std::vector<MovedChunk> plan_to_go(bool keeps_unchanged, std::span<const ByteRange> staying);
  // The chunk goes to the group's shelf, and `kept` of it are in the backup. One that others have
  // mapped meanwhile stays. Where the driver refuses, nothing has changed. REQUIRES: no queued work
  // uses it.
  Status let_go(const MovedChunk& leaving, std::span<const KeptRange> kept, Unchanged* ended);
  // Undoes map_collected(), as far as the driver lets it. REQUIRES: nothing uses it.
  Status let_go_again(const MovedChunk& place);

  // -- And back ----------------------------------------------------------------------
  // What is to come: slabs first, as they were made, and the rest by offset; where nothing is used
  // any more, nothing does. `joins`: in fewer chunks than it left in, where it may.
  std::vector<MovedChunk> plan_to_come(bool joins, KeptRanges* ended);
  // Chunks for these places, all or none; false, and why not.
  bool collect(std::span<const MovedChunk> places, Grant* grant, Shortage* shortage);
  // Those that have not been mapped are the group's again.
  void put_back_collected();
  // Maps what was collected for it, emptied on the stream where no content comes to it. With
  // `wait_for` set nothing has been done: the caller waits, and asks again. Where it fails some may
  // be mapped: see let_go_again().
  Status map_collected(const MovedChunk& place, const StreamUse& filled_by, Epoch* wait_for);
  // They have come: what was read-only is so again.
  Status arrived(const MovedChunk& chunk);

  // -- Rights, and who registers segments ---------------------------------------------
  // Of what is mapped: for everybody, now or once its contents are there.
  [[nodiscard]] bool is_to_be_read_only(ByteRange chunk, const LiveMapping& mapping) const;
  // Where the chunk over `offset` ends that has gone, read-only; 0: none has.
  [[nodiscard]] std::size_t end_of_gone_read_only(std::size_t offset) const {
    return asleep_->end_of_gone_read_only(offset);
  }
  // Chunks in `range`, and those that it is a part of, are not to be read-only when they come back.
  void let_write(ByteRange range) { asleep_->let_write(range); }
  // As BackedSpace's, of what is elsewhere.
  void withhold_broken_chunks();

  // -- Told ------------------------------------------------------------------------------
  // Whether any of `range` has no memory, or is about to lose it.
  [[nodiscard]] bool is_missing(ByteRange range) const;
  // Bytes: of `live`, which are all that live in it, those that have no memory.
  [[nodiscard]] std::size_t elsewhere_of(std::size_t live) const;
  // Whether all of `range` is in backups, and the parts of it that are, by offset.
  [[nodiscard]] bool keeps(ByteRange range) const { return asleep_->kept.missing(range).empty(); }
  [[nodiscard]] std::vector<KeptRange> kept_within(ByteRange range) const { return asleep_->kept.within(range); }
  // Where what goes now will be, in words. `falls_asleep`: all of it was awake before.
  void note_place(const std::string& place, bool falls_asleep);
  [[nodiscard]] AsleepWhere where() const;
  // Of the backups that contents of it are in, or, while it is on its way, go to.
  [[nodiscard]] std::set<std::string> places_of_backups() const;
  // Backup::forget_name() of these.
  void forget_names_of_backups() const noexcept { asleep_->kept.forget_names(); }

 private:
  using Backing = BackedSpace::Backing;

  // sleeping_memory.cpp
  [[nodiscard]] Unchanged unchanged_now() const;
  void withhold_gone(ByteRange of_block, bool are_pages);
  [[nodiscard]] std::size_t live_in(ByteRange range) const;
  // Nothing of anybody else's is seen in it.
  [[nodiscard]] bool is_blanked(const Chunk& chunk) const {
    return chunk.content.load(std::memory_order_relaxed) == id_;
  }

  // going_to_sleep.cpp
  [[nodiscard]] std::vector<ByteRange> contents() const;
  Status send_away(ByteRange range, bool is_poisoned);

  // waking.cpp
  bool collect_into(Backing* backing, std::span<const MovedChunk> places, Grant* grant, Shortage* shortage);
  Status make_prepaid(std::size_t size, Chunk** chunk);
  std::size_t exchange_shelved(std::size_t charge, std::size_t bytes);
  Status blank(const PlacedChunk& placed, bool is_poisoned, Stream stream);

  // waking_plan.cpp
  void forget_unused();
  std::vector<MovedChunk> slabs_first(std::vector<MovedChunk> chunks, std::size_t* slabs) const;

  const PoolContext& context_;
  SpaceOwner& owner_;
  const std::string& name_;
  const OwnerId id_;
  Budget& group_;
  Budget& budget_;
  const bool is_of_tag_;
  BackedSpace& space_;
  const Slabs& slabs_;
  std::unique_ptr<Asleep> asleep_;  // nullptr: it is awake
  Unchanged unchanged_;             // of one that was asleep
};

}  // namespace vmm
