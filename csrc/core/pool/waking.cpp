// Pool: on its way back: what is to come, chunks for it, and each place as it is filled.
#include <algorithm>
#include <iterator>
#include <map>
#include <span>
#include <utility>

#include "base/check.h"
#include "core/memory/chunk_store.h"
#include "core/memory/grant.h"
#include "core/options.h"
#include "core/pool/asleep.h"
#include "core/pool/pool.h"

namespace vmm {

namespace {

// Of what a place lacks, one of several chunks that come to stand there is at least such a part.
constexpr std::size_t kLeastShare = 4;
// And where nothing is kept: there a third costs more than to give it back and make a whole one
// (33 us; 46 and up to 65), as it does whenever the model sleeps and wakes. Where contents come,
// they take longer than either.
constexpr std::size_t kLeastBlankShare = 2;

}  // namespace

// Chunks of which nothing is used any more need not come back: their addresses are bare.
void Pool::forget_unused() {
  for (auto at = asleep_->gone.begin(); at != asleep_->gone.end();) {
    const ByteRange range{at->first, at->second.size};
    if (!space_.is_free(range)) {
      ++at;
      continue;
    }
    std::vector<Piece> pieces;
    Block* const bare = space_.take_range(range, BlockState::retired, &pieces);
    space_.blocks().remove_border(range.offset);  // first: it is one with the bare space below it
    space_.blocks().free(bare, kNeutral, kLongAgo);
    at = asleep_->gone.erase(at);
  }
}

// What was thrown away comes back in few chunks, as what unmaps and maps a model costs by the
// chunk: a block that was live and is again stays, so those that are in it alone become one.
// 16 GiB in blocks of 256 MiB are some 300 when they are loaded, and 64 where none of them is on
// the shelf still (kLeastBlankShare). Not those of several blocks: each may be sealed, or freed,
// by itself.
void Pool::join_thrown_away() {
  const bool has_own_rule = !kind_.is_ordinary || kind_.is_uniform || kind_.no_split || kind_.is_spill;
  if (has_own_rule || keeps_within_chunks() || space_.is_pinned() || space_.unit_for(0) != 0) return;
  std::map<std::size_t, PlaceOfChunk>& gone = asleep_->gone;
  const auto is_blank = [this](const auto& place) VMM_REQUIRES(mutex_) {
    return !place.second.is_read_only && asleep_->kept.within({place.first, place.second.size}).empty();
  };
  const Block* block = nullptr;
  for (auto at = gone.begin(); at != gone.end(); ++at) {
    auto next = std::next(at);
    if (next == gone.end() || next->first != at->first + at->second.size || !is_blank(*at)) continue;
    // It covers the border between them.
    block = space_.blocks().covering_from(block, next->first);
    const bool is_live = block != nullptr && block->state == BlockState::used;
    if (!is_live || block->offset > at->first) continue;
    for (; next != gone.end() && next->first == at->first + at->second.size; next = gone.erase(next)) {
      const std::size_t joined = at->second.size + next->second.size;
      if (at->first + joined > block->end() || joined > GrowthPolicy::largest_chunk()) break;
      if (!next->second.is_like(at->second) || !is_blank(*next)) break;
      at->second.size = joined;
    }
  }
}

namespace {

// The first `slabs` of them twice as fast as the rest, as small tensors are wanted with the
// large ones beside which they were made; but a few at once. A slab costs a mapping as any
// chunk, and the link next to nothing: of 16 GiB in 3157 tensors on another GPU all slabs at
// once took 10 ms more, 44 without them. Not on the host's bus: beside copies from there a
// mapping takes up to 1 ms and 26 us otherwise, and half of those tensors woke in 218 ms now
// and then, for 160.
std::vector<LeavingChunk> slabs_in_turns(std::vector<LeavingChunk> chunks, std::size_t slabs) {
  constexpr std::size_t kAtOnce = 16;
  if (slabs <= kAtOnce) return chunks;
  std::size_t total = 0;
  for (std::size_t k = slabs; k < chunks.size(); ++k) total += chunks[k].place.size;
  std::vector<LeavingChunk> in_turns;
  in_turns.reserve(chunks.size());
  std::size_t next = 0;
  std::size_t done = 0;
  for (std::size_t k = slabs; k < chunks.size(); ++k) {
    const auto is_due = [&] { return next < kAtOnce || next * (total / kMiB) <= 2 * slabs * (done / kMiB); };
    while (next < slabs && is_due()) in_turns.push_back(std::move(chunks[next++]));
    done += chunks[k].place.size;
    in_turns.push_back(std::move(chunks[k]));
  }
  while (next < slabs) in_turns.push_back(std::move(chunks[next++]));
  return in_turns;
}

}  // namespace

// The blocks are walked once: for each of 177 chunks of 3157 tensors it would be 0.3 million steps.
std::vector<LeavingChunk> Pool::slabs_first(std::vector<LeavingChunk> chunks, std::size_t* slabs) const {
  std::vector<LeavingChunk> ordered;
  std::vector<LeavingChunk> others;
  const Block* block = nullptr;
  for (LeavingChunk& each : chunks) {
    block = space_.blocks().covering_from(block, each.offset);
    const bool is_of_slab = block != nullptr && block->state == BlockState::slab;
    (is_of_slab ? ordered : others).push_back(std::move(each));
  }
  *slabs = ordered.size();
  std::reverse(ordered.begin(), ordered.end());  // each stands below the one that was made before it
  std::move(others.begin(), others.end(), std::back_inserter(ordered));
  return ordered;
}

std::vector<LeavingChunk> Pool::plan_wake() {
  KeptRanges ended;  // their backups end with no lock held
  const MutexLock lock(mutex_);
  std::vector<LeavingChunk> found;
  if (asleep_ == nullptr || !space_.is_open()) return found;
  settle_locked();
  if (!space_.is_pinned()) {
    give_up_spare_slabs();
    forget_unused();
    ended = asleep_->kept.cut_to(contents());  // what has been freed does not come back
  }
  broken_up_.join(&asleep_->gone, space_.range());
  join_thrown_away();
  const auto want = [&](std::size_t offset, const PlaceOfChunk& place, bool is_there) VMM_REQUIRES(mutex_) {
    LeavingChunk chunk{offset, place, {}, {}, is_there};
    for (const KeptRange& each : asleep_->kept.within(chunk.range())) chunk.kept.push_back({each.offset, each.size});
    if (!is_there || !chunk.kept.empty()) found.push_back(std::move(chunk));
  };
  for (const auto& [offset, place] : asleep_->gone) want(offset, place, false);
  // Those that the driver would not unmap again when a wake was stopped.
  for (const auto& [offset, mapping] : space_.range().live()) {
    const ByteRange range{offset, mapping.chunk->size};
    want(offset, {range.size, is_to_be_read_only(range, mapping)}, true);
  }
  std::size_t slabs = 0;
  std::vector<LeavingChunk> wanted = slabs_first(std::move(found), &slabs);
  const KeptRange* const kept = asleep_->kept.any();
  if (kept == nullptr || !kept->backup->is_mapped_beside_copies()) return wanted;
  return slabs_in_turns(std::move(wanted), slabs);
}

Status Pool::let_go_again(const LeavingChunk& place) {
  const MutexLock lock(mutex_);
  if (!space_.is_open() || asleep_ == nullptr) return {};
  Status first;
  for (auto at = space_.range().from(place.offset);
       at != space_.range().live().end() && at->first < place.range().end();) {
    const ByteRange range{at->first, at->second.chunk->size};
    ++at;  // before it is taken out
    const Status status = send_away(range, place.place.is_poisoned);
    if (!status.ok() && first.ok()) first = status;
  }
  return first;
}

// A chunk for each place: of its size where there is one, granted or on the shelf; else made,
// or several that are smaller where blocks may lie over their borders. None of these is below a
// quarter of what the place still lacks: 300 of 2 MiB for 13 made a wake of discarded contents
// take 0.9 s for 0.4.
bool Pool::collect_to_wake(std::span<const LeavingChunk> places, Grant* grant, Backing* backing, Shortage* shortage) {
  const bool is_exact = kind_.is_uniform || kind_.no_split || keeps_within_chunks();
  Budget* full = nullptr;
  std::vector<PlacedChunk>& placements = backing->placements;
  std::size_t share = 1;
  const auto is_of_use = [&share](const Chunk* chunk, std::size_t lacks) {
    return chunk != nullptr && chunk->size * share >= lacks;
  };
  const auto take = [&](std::size_t offset, std::size_t size, bool exact) VMM_REQUIRES(mutex_) -> std::size_t {
    placements.push_back({offset, nullptr});  // first: what is taken has its place
    Chunk*& chunk = placements.back().chunk;
    if (grant != nullptr) {
      chunk = grant->chunks.take_at_most(size, exact);
      if (is_of_use(chunk, size)) return chunk->size;
      if (chunk != nullptr) grant->chunks.put(std::exchange(chunk, nullptr));
    }
    if (full == nullptr) chunk = context_.store.take_at_most(group_, budget_, size, exact, &full);
    if (is_of_use(chunk, size)) return chunk->size;
    if (chunk != nullptr) context_.store.put(group_, chunk);
    placements.pop_back();
    return 0;
  };
  struct Unmet {
    ByteRange place;
    std::size_t share;
  };
  std::vector<Unmet> unmet;
  for (const LeavingChunk& each : places) {
    if (take(each.offset, each.place.size, /*exact=*/true) != 0) continue;
    unmet.push_back({each.range(), each.kept.empty() ? kLeastBlankShare : kLeastShare});
  }
  std::size_t missing = 0;
  for (auto& [place, least_share] : unmet) {
    share = least_share;
    for (std::size_t took = 1; !is_exact && took != 0 && place.size != 0;) {
      took = take(place.offset, place.size, /*exact=*/false);
      place = {place.offset + took, place.size - took};
    }
    missing += place.size;
  }
  placements.reserve(placements.size() + unmet.size());
  const std::size_t prepaid = grant == nullptr ? 0 : std::min(grant->prepaid_bytes, missing);
  Budget* refused = budget_.charge(missing - prepaid);
  const bool is_of_group = refused != nullptr && group_.stands_under(*refused);  // which pays for its shelf
  if (is_of_group && exchange_shelved(missing - prepaid)) refused = budget_.charge(missing - prepaid);
  if (refused != nullptr) {
    *shortage = {missing - prepaid, refused, {}};
    return false;
  }
  if (grant != nullptr) grant->prepaid_bytes -= prepaid;
  Status status;
  for (const auto& [each, least_share] : unmet) {
    if (each.size == 0) continue;
    placements.push_back({each.offset, nullptr});
    try {
      status = context_.store.create_prepaid(context_.store.spec(each.size), budget_, &placements.back().chunk);
    } catch (...) {
      budget_.refund(missing);
      throw;
    }
    if (!status.ok()) {
      budget_.refund(missing);
      *shortage = Shortage::of_driver(missing, status);
      return false;
    }
    missing -= each.size;
  }
  return true;
}

// Of what still rests on the group's shelf, in sizes that fit no place that was asked for, so
// much goes back to the driver that `bytes` may be made in its stead. False: it has less.
bool Pool::exchange_shelved(std::size_t bytes) {
  const std::size_t lacks = bytes - std::min(bytes, budget_.headroom());
  const std::size_t shelved = context_.store.shelved_bytes(group_);
  return shelved >= lacks && context_.store.trim(group_, shelved - lacks) != 0;
}

Address Pool::try_collect(std::span<const LeavingChunk> places, Grant* grant, Shortage* shortage) {
  const MutexLock lock(mutex_);
  if (!space_.is_open() || asleep_ == nullptr) return base_;
  Backing backing;
  try {
    if (collect_to_wake(places, grant, &backing, shortage)) {
      for (const PlacedChunk& each : backing.placements) asleep_->collected.emplace(each.offset, each.chunk);
      return base_;
    }
  } catch (...) {
    for (const PlacedChunk& each : backing.placements) asleep_->collected.erase(each.offset);
    space_.put_back(backing, grant);
    throw;
  }
  space_.put_back(backing, grant);
  return 0;
}

void Pool::put_back_collected() {
  const MutexLock lock(mutex_);
  if (asleep_ == nullptr) return;
  for (const auto& [offset, chunk] : asleep_->collected) context_.store.put(group_, chunk);
  asleep_->collected.clear();
}

Status Pool::map_collected(const LeavingChunk& place, const StreamUse& filled_by, Epoch* wait_for) {
  const MutexLock lock(mutex_);
  if (!space_.is_open() || asleep_ == nullptr) return {};
  if (place.is_there) {  // it may have lost its rights when it was not unmapped
    std::vector<ByteRange>& to_seal = asleep_->to_seal;
    const bool is_noted = std::find(to_seal.begin(), to_seal.end(), place.range()) != to_seal.end();
    if (place.place.is_read_only && !is_noted) to_seal.push_back(place.range());
    for (const Location& who : space_.accessors()) {
      if (const Status status = space_.range().set_access(place.range(), who, Access::read_write); !status.ok())
        return status;
    }
    return {};
  }
  std::vector<PlacedChunk> placements;
  const auto end = asleep_->collected.lower_bound(place.range().end());
  for (auto at = asleep_->collected.lower_bound(place.offset); at != end; ++at) {
    placements.push_back({at->first, at->second});
    *wait_for = std::max(*wait_for, at->second->last_use);
  }
  // The GPU waits, where it can be made to.
  if (!context_.clock.order_before(filled_by, *wait_for).ok()) return {};
  *wait_for = kLongAgo;
  asleep_->to_seal.reserve(asleep_->to_seal.size() + placements.size());
  const bool is_broken_up = placements.size() > 1;
  const bool keeps_within = keeps_within_chunks();
  if (is_broken_up && !keeps_within) broken_up_.note(place.range());
  // Each chunk is gone by itself from now on: the place may be several's.
  for (const PlacedChunk& each : placements) {
    PlaceOfChunk of_chunk = asleep_->place_around(each.offset);  // others may have registered it since it was planned
    // Blocks lie over the borders that there were none of.
    of_chunk.is_withheld = of_chunk.is_withheld || (is_broken_up && keeps_within);
    const ByteRange rest{each.offset + each.chunk->size, of_chunk.size - each.chunk->size};
    of_chunk.size = each.chunk->size;
    if (rest.size != 0) {
      PlaceOfChunk of_rest = of_chunk;
      of_rest.size = rest.size;
      asleep_->gone.insert_or_assign(rest.offset, of_rest);
    }
    asleep_->gone.insert_or_assign(each.offset, of_chunk);
    if (keeps_within) space_.blocks().add_border(each.offset);
  }
  Status status = space_.range().map(placements, space_.accessors());
  if (status.ok()) status = blank(placements, place.place.is_poisoned, filled_by.stream);
  // What is mapped is the pool's, also where that failed: whoever asked undoes it.
  for (const auto& [offset, chunk] : placements) {
    if (space_.range().live().count(offset) == 0) continue;
    const PlaceOfChunk as_it_was = asleep_->place_around(offset);
    asleep_->collected.erase(offset);
    asleep_->gone.erase(offset);
    chunk->content.store(id_, std::memory_order_relaxed);
    chunk->last_use = kLongAgo;
    if (as_it_was.is_withheld) space_.range().withhold(offset);
    if (as_it_was.is_read_only) asleep_->to_seal.push_back({offset, chunk->size});
    mapped({offset, chunk}, filled_by.stream);
  }
  return status;
}

// Memory that wakes reads as zero, or as poison, where no content comes to it: nobody else's is
// seen, nor what was thrown away.
Status Pool::blank(std::span<const PlacedChunk> placements, bool is_poisoned, Stream stream) {
  for (const auto& [offset, chunk] : placements) {
    const OwnerId content = chunk->content.load(std::memory_order_relaxed);
    const bool may_stay = !asleep_->is_discarded && !kind_.is_range && (content == id_ || !context_.options.scrub);
    if (!is_poisoned && (content == kNobody || may_stay)) continue;
    const std::uint8_t byte = is_poisoned ? kPoisonByte : 0;
    if (const Status status = context_.driver.fill_async(context_.device, base_ + offset, byte, chunk->size, stream);
        !status.ok()) {
      return status;
    }
  }
  return {};
}

std::vector<KeptRange> Pool::kept_in(ByteRange range) const {
  const MutexLock lock(mutex_);
  return asleep_ == nullptr ? std::vector<KeptRange>() : asleep_->kept.within(range);
}

Status Pool::arrived(const LeavingChunk& chunk) {
  const MutexLock lock(mutex_);
  if (asleep_ == nullptr || !space_.is_open()) return {};
  for (auto at = asleep_->to_seal.begin(); at != asleep_->to_seal.end();) {
    if (at->offset < chunk.offset || at->end() > chunk.range().end()) {
      ++at;
      continue;
    }
    if (const Status status = leave_no_writable_place({*at}); !status.ok()) return status;
    for (const Location& who : space_.accessors()) {
      if (const Status status = space_.range().set_access(*at, who, Access::read); !status.ok()) return status;
    }
    at = asleep_->to_seal.erase(at);
  }
  return {};
}

void Pool::end_sleep() {
  std::unique_ptr<Asleep> ended;  // backups end with no lock held
  Unchanged former;
  const MutexLock lock(mutex_);
  if (asleep_ == nullptr) return;
  Unchanged unchanged = unchanged_now();
  former = std::exchange(unchanged_, std::move(unchanged));
  VMM_CHECK(asleep_->gone.empty() && asleep_->collected.empty(), "pool '", name_, "' wakes without ",
            asleep_->gone.size(), " chunks");
  count_slabs(SizeClass::large_pool, SizeClass::small_pool);
  ended = std::move(asleep_);
  space_.hold(false);
  if (!space_.is_open() || is_retired()) return;
  life_.store(Life::open, std::memory_order_release);
  note_sealed();
}

}  // namespace vmm
