// A pool's addresses and the memory under them: which are free, which are taken and for
// whom, where queued work may still use what has left, and which chunk stands where. It
// finds a place for a request, backs it (chunks that were granted, its own idle ones, the
// group's shelf, new ones within the limits), and lets go of what is idle. What it cannot
// get by itself it asks nobody for: `shortage` says what was missing.
//
// Of tensors, slabs and threads' caches it knows what a request says and hands on, of explicit
// pages which blocks they are, and nothing of sleep: whoever takes a block of it knows what it
// is for. One occupancy map (`blocks()`) covers all of it. Its owner's lock guards it.
//
// placing.cpp finds the place, whole_chunks.cpp where chunks are borders of blocks;
// choosing.cpp finds the chunks and backing.cpp puts them there; idle.cpp knows what is idle,
// and lets go of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/function_ref.h"
#include "core/backing/idle_chunks.h"
#include "core/backing/pool_context.h"
#include "core/backing/shortage.h"
#include "core/backing/space_kind.h"
#include "core/backing/stream_table.h"
#include "core/blocks/block_heap.h"
#include "core/blocks/growth_policy.h"
#include "core/blocks/placement.h"
#include "core/blocks/retired_blocks.h"
#include "core/limits/budget.h"
#include "core/memory/mapped_range.h"

namespace vmm {

class Grant;

// What a space asks of whom it belongs to, and tells it; with its lock held.
class SpaceOwner {
 public:
  // All that could be free space is: frees that waited for work that has ended, and what is
  // kept empty.
  virtual void free_up_space() = 0;
  // The latter alone.
  virtual void give_up_spare_slabs() = 0;
  // Bytes: the most that was ever live at once, and what is live now, `bytes` more included.
  virtual std::size_t peak_with(std::size_t bytes) = 0;
  // A chunk stands there, for a request of that stream.
  virtual void mapped(const PlacedChunk& placement, Stream stream) = 0;
  // It has left; queued work may still use its addresses.
  virtual void unmapped(const PlacedChunk& placement) = 0;
  // Nobody uses them any more: something else may stand there next.
  virtual void addresses_go(ByteRange range) = 0;
  // They were to go, and the driver has refused that.
  virtual void addresses_stay(ByteRange range) = 0;

 protected:
  ~SpaceOwner() = default;
};

class BackedSpace {
 public:
  struct Belongs {
    SpaceOwner& owner;
    const std::string& name;  // for messages
    OwnerId id;               // of what is written there
    Budget& group;            // whose shelf
    Budget& budget;           // who pays
    BlockArena& arena;
    StreamTable& streams;
  };
  // `accessors` may access what it maps.
  BackedSpace(const PoolContext& context, const SpaceKind& kind, const Belongs& belongs,
              std::vector<Location> accessors);
  // All of it is bare. Throws std::bad_alloc.
  void prepare();
  // Its addresses begin at `base`. `may_return`: what leaves may be dormant here.
  void open(Address base, bool may_return);
  [[nodiscard]] bool is_open() const { return range_ != nullptr; }
  // REQUIRES: nothing is mapped, or the process ends.
  void close() { range_.reset(); }

  [[nodiscard]] const SpaceKind& kind() const { return kind_; }
  [[nodiscard]] BlockHeap& blocks() { return blocks_; }
  [[nodiscard]] const BlockHeap& blocks() const { return blocks_; }
  [[nodiscard]] Placement& placement() { return placement_; }
  [[nodiscard]] GrowthPolicy& growth() { return growth_; }
  [[nodiscard]] const GrowthPolicy& growth() const { return growth_; }
  // How many slabs a stream that has so many, all in use, has made at once.
  [[nodiscard]] std::size_t slabs_at_once(std::size_t slabs) const {
    if (kind_.no_split || kind_.keeps_within_chunks() || is_pinned_) return 1;
    return growth_.slabs_at_once(slabs, {range_->mapped_bytes(), budget_.headroom(), 0});
  }
  // What the chunks for a request of so many bytes are multiples of, where other models take
  // from the same limit (GrowthPolicy::unit()); 0 where none do, or they have a rule of their
  // own.
  [[nodiscard]] std::size_t unit_for(std::size_t bytes) const;
  // Something other than the growth policy says of what size its chunks are.
  [[nodiscard]] bool has_own_rule() const;
  // REQUIRES for both: is_open().
  [[nodiscard]] MappedRange& range() { return *range_; }
  [[nodiscard]] const MappedRange& range() const { return *range_; }

  // -- Taking --------------------------------------------------------------------
  struct Request : SpaceRequest {
    // What threads keep has been taken back: only then is memory asked for.
    bool is_gathered = true;
  };
  // A block for the request, with its memory; nullptr, and why not.
  Block* place(const Request& request, Grant* grant, Shortage* shortage);
  // The same at `offset`. REQUIRES: everything is free there.
  Block* place_at(const Request& request, std::size_t offset, Grant* grant, Shortage* shortage);
  // Where blocks have chunks for themselves: a free one, or nullptr.
  Block* take_whole_chunk(const Request& request);
  // Throws InvalidRangeError where a block there would lie over the border of a chunk that is
  // registered.
  void require_within_chunk(ByteRange range) const;
  // What a taken range was before, for undoing.
  struct Piece {
    ByteRange range;
    StreamTag tag = kNeutral;
    Epoch epoch = kLongAgo;
  };
  // All of `range`, which is free, as one block. What it was made of is added to `pieces`.
  Block* take_range(ByteRange range, BlockState state, std::vector<Piece>* pieces);
  void untake(Block* block, std::span<const Piece> pieces);
  // Bare addresses, which stay so until free_bare(). REQUIRES: they are free, and bare.
  Block* take_bare(ByteRange range, BlockState state);
  void free_bare(Block* block);
  [[nodiscard]] std::size_t bare_bytes() const { return bare_bytes_; }
  [[nodiscard]] bool is_free(ByteRange range) const;
  // The newest moment at which anything in `range` was freed; what is neutral or not free
  // counts for nothing.
  [[nodiscard]] Epoch last_use_of(ByteRange range) const;

  // -- Memory under it -----------------------------------------------------------
  // The chunks that are to back a request: placements by offset, of which `moves` stand
  // elsewhere in this space now and the others were free.
  struct Backing {
    std::vector<PlacedChunk> placements;
    std::vector<IdleChunk> moves;
    [[nodiscard]] bool is_move(const Chunk* chunk) const;
  };
  // They go where they came from: to the grant, or the group's shelf.
  void put_back(const Backing& backing, Grant* grant);
  void put_back(Chunk* chunk, Grant* grant);
  // Who may access what is mapped.
  [[nodiscard]] const std::vector<Location>& accessors() const { return accessors_; }
  // `who` too, all that is mapped now and later.
  Status add_accessor(Location who);
  // Whether all who may access the mapping have that access, and no other.
  [[nodiscard]] bool allows(const LiveMapping& mapping, Access access) const;
  // The chunks that reach into `stretches` come back to no former place, through which a pool that
  // had them before could write to them; where the driver refuses, they may as before.
  Status leave_no_writable_place(const std::vector<ByteRange>& stretches);
  // They may.
  void may_return_again(const std::vector<ByteRange>& stretches);
  // Blocks lie within one chunk each from now on: who registers segments is told of no chunk
  // over whose borders live ones lie.
  void withhold_broken_chunks();

  // -- Idle, and letting go ----------------------------------------------------------
  // While pinned, no memory moves within it or leaves it, and it grows by fresh chunks only.
  void pin(bool is_pinned) { is_pinned_ = is_pinned; }
  [[nodiscard]] bool is_pinned() const { return is_pinned_; }
  // While held, no chunk counts as idle.
  void hold(bool is_held) { is_held_ = is_held; }
  [[nodiscard]] bool may_move() const { return !is_pinned_ && !is_held_; }
  // To move elsewhere, or also to be given back: what was exported moves nowhere.
  enum class Idle : std::uint8_t { movable, all };
  // Every chunk that stands wholly in free space, by offset; what queued work may still use
  // comes first, but for the tag's own. `bare_bytes` of what is taken have no memory yet.
  // Walks all free blocks.
  std::vector<IdleChunk> all_idle(StreamTag tag, Idle which, std::size_t bare_bytes = 0);
  // Those of them that no queued work may use, so that the driver could have them at once.
  // Without a tick that covers their last use nobody knows, so one is made, and asked after.
  // `but_by`: whose own queued work may, none: nobody's.
  [[nodiscard]] std::vector<IdleChunk> unused_of(std::vector<IdleChunk> idle, std::optional<Stream> but_by);
  // When something in a stretch was freed last, in any unit that rises.
  using FreedAt = FunctionRef<std::uint64_t(ByteRange)>;
  // Of one age the highest first: low addresses stay whole.
  std::vector<IdleChunk> idle_by_age(const FreedAt& freed_at);
  // Those that reach into `ranges`; looks at no others. None while none is idle.
  [[nodiscard]] IdleChunks idle_in(std::span<const ByteRange> ranges) const;
  // Memory under free addresses: what is mapped, less what is taken, of which `bare_bytes`
  // have no memory yet.
  [[nodiscard]] std::size_t free_mapped_bytes(std::size_t bare_bytes = 0) const {
    return range_->mapped_bytes() - (blocks_.taken_bytes() - retired_.bytes() - bare_bytes_ - bare_bytes);
  }
  // Takes the chunk at `offset`, whose addresses are free, out. They are handed to no one
  // until the old mapping has been dropped.
  Chunk* detach(std::size_t offset, MappedRange::Fate fate = MappedRange::Fate::leaves);
  // To the group's shelf. Returns its bytes.
  std::size_t shelve(const IdleChunk& idle);
  // Until `want` bytes have been, the largest first. `beneath`: none that one of the floors
  // beneath it keeps, but one that is larger than what it lacks, where no smaller one did: what
  // a floor keeps of that stays reserved. Returns the bytes moved.
  std::size_t shelve_largest(IdleChunks idle, std::size_t want, const Budget* beneath);
  // What is idle of the chunks that reach into `range`; looks at those only.
  void shelve_idle_chunks(ByteRange range);
  // The same of one that is held.
  void shelve_idle_in(ByteRange range);

  // -- Former mappings ---------------------------------------------------------------
  // What was mapped for a request that failed after that. Its chunks have gone back to where
  // they came from. Throws std::bad_alloc, and what is left is for the next call.
  void retire_in_vain();
  // Drops those whose last use has passed. Returns whether there were any.
  bool drop_retired();
  // They stand in the way, and queued work may still use them: the caller waits for it. False
  // where nothing uses them any more, and the driver refuses to drop them.
  bool must_wait_for_retired(Shortage* shortage);
  // The same for one address: true where it is free now. Throws DriverError where the driver
  // refuses.
  bool make_way_of_retired(std::size_t offset, Shortage* shortage);
  [[nodiscard]] const RetiredBlocks& retired() const { return retired_; }
  [[nodiscard]] bool has_any_in_vain() const { return !in_vain_.empty(); }

  // How often all free blocks have been looked through.
  [[nodiscard]] std::size_t walks() const { return walks_; }
  void note_walk() const { ++walks_; }

 private:
  // Which memory may back a request, in the order in which it is tried.
  enum class Source : std::uint8_t {
    grown,    // the shelf and new chunks: the pool grows
    at_once,  // anything that the stream may use without a wait on the GPU
    any,      // also what the stream has to wait for
    fresh,    // new chunks only: the stream is being captured, or the pool pinned
  };
  struct Choice;  // what collect() has chosen so far
  // What is taken for a request while it is being backed: a block that is no longer free,
  // what it was made of, and the part of it that lacks memory.
  struct Extent {
    Block* block = nullptr;
    std::vector<Piece> pieces;
    std::vector<ByteRange> gaps;
    std::size_t unit = 0;                  // of the chunks that back it
    std::size_t unused_from = kUnlimited;  // once it is backed: what lies above nobody has ever used
    [[nodiscard]] std::size_t missing() const;
  };
  // By which rule a request is placed; whoever guards a block chooses its place.
  enum class PlacingRule : std::uint8_t { best_fit, within_chunk, unsplit };

  // Whether what backs the request is to be one chunk. Explicit pages are announced to
  // nobody, and may lie over any.
  [[nodiscard]] bool is_whole(const Request& request) const {
    return kind_.no_split || (kind_.keeps_within_chunks() && request.state != BlockState::pages);
  }
  // Whether those who register segments are told of what is mapped for a request:
  // blocks lie over the borders of uniform pages, and explicit pages over any.
  [[nodiscard]] bool announces(const Request& request) const {
    const bool may_break = kind_.is_uniform || request.state == BlockState::pages;
    return !may_break || !kind_.within_chunks.load(std::memory_order_relaxed);
  }

  // backed_space.cpp
  using EachChunk = FunctionRef<void(Chunk*)>;
  void for_each_chunk_under(const std::vector<ByteRange>& stretches, const EachChunk& each) const;

  // idle.cpp
  [[nodiscard]] Epoch last_use_beside(StreamTag tag, const IdleChunk& idle) const;

  // placing.cpp
  [[nodiscard]] PlacingRule placing_rule(const Request& request) const;
  [[nodiscard]] static bool fills_units(const Request& request, std::size_t unit);
  Block* place_best_fit(const Request& request, Grant* grant, Shortage* shortage);
  void widen(Extent* extent) const;
  Block* place_apart(const Request& request, std::size_t unit, Grant* grant, Shortage* shortage);
  Block* place_over(Extent extent, const Request& request, std::size_t offset, Grant* grant, Shortage* shortage);
  // A place with its memory: where one may be used at once, and whether it was other streams';
  // and what has to pass before there is one.
  struct Finished {
    std::optional<std::size_t> offset;
    bool is_others = false;
    std::optional<Epoch> passes;
    std::size_t looked_at = 0;  // free blocks
  };
  [[nodiscard]] Finished find_finished(const Request& request) const;
  [[nodiscard]] Finished find_for_slab(const Request& request) const;
  Block* place_without_growing(const Request& request, const Grant* grant, Shortage* shortage);
  bool adopt_free_space(StreamTag tag, Shortage* shortage);
  Block* place_on_whole_chunks(const Request& request, Grant* grant);
  std::size_t collect_whole(std::size_t wanted, StreamTag tag, Grant* grant, Backing* backing);
  Block* trim_to_request(Block* block, const Request& request, std::size_t offset,
                         std::size_t unused_from = kUnlimited);

  // whole_chunks.cpp
  Block* place_unsplit(Request request, Grant* grant, Shortage* shortage);
  Block* place_within_chunk(const Request& request, Grant* grant, Shortage* shortage);

  // backing.cpp
  bool back(Extent* extent, const Request& request, Grant* grant, Shortage* shortage);
  void cover(Extent* extent, const Backing& backing, BlockState state);
  void uncover(Extent* extent, std::size_t end);
  Status install(const Backing& backing, const Request& request);
  Status scrub(const std::vector<PlacedChunk>& placements, StreamTag tag);

  // choosing.cpp
  bool collect(const Extent& extent, const Request& request, Source source, Grant* grant, Backing* backing,
               Shortage* shortage);
  ByteRange take_returning(const Extent& extent, std::size_t bare_behind, Grant* grant, Backing* backing);
  void note_units(const Extent& extent, Shortage* shortage) const;
  [[nodiscard]] std::size_t bare_behind(const Extent& extent) const;
  Chunk* choose_chunk(ByteRange part, std::size_t beyond, Choice& choice);
  Chunk* choose_to_fill(ByteRange part, Choice& choice);
  void fill_gap(ByteRange gap, std::size_t beyond, Choice& choice);
  [[nodiscard]] std::size_t into_margin(const Choice& choice, Budget** level) const;
  [[nodiscard]] std::size_t ahead_of(const Extent& extent, const Choice& choice) const;
  void create_chunks(const Extent& extent, Choice& choice, Shortage* shortage);
  Status create_charged(Choice& choice, std::size_t ahead);
  void send_home(const Extent& extent, Choice& choice);

  // idle.cpp
  std::vector<IdleChunk> idle_at_once(StreamTag tag, std::size_t at_least);
  void retire_mapping(std::size_t offset, Epoch last_use, MappedRange::Fate fate);

  const PoolContext& context_;
  const SpaceKind kind_;
  SpaceOwner& owner_;
  const std::string& name_;
  const OwnerId id_;
  Budget& group_;
  Budget& budget_;
  StreamTable& streams_;
  std::vector<Location> accessors_;
  Address base_ = 0;
  std::unique_ptr<MappedRange> range_;
  BlockHeap blocks_;
  Placement placement_;
  RetiredBlocks retired_;  // one for each former mapping
  GrowthPolicy growth_;
  bool is_pinned_ = false;
  bool is_held_ = false;
  std::size_t bare_bytes_ = 0;        // of what take_bare() took
  std::vector<std::size_t> in_vain_;  // offsets mapped for a request that failed after that
  mutable std::size_t walks_ = 0;     // over all free blocks
};

}  // namespace vmm
