// Pool: on its way back: what is to come, chunks for it, and each place as it is filled.
#include <algorithm>
#include <iterator>
#include <map>
#include <span>
#include <utility>

#include "base/check.h"
#include "core/memory/backup.h"
#include "core/memory/chunk_store.h"
#include "core/memory/grant.h"
#include "core/options.h"
#include "core/pool/asleep.h"
#include "core/pool/pool.h"

namespace vmm {

namespace {

// So many units come back as one chunk, and no more bytes than are on the bus at once: what of it
// is freed later goes to nobody while some of it is in use.
constexpr std::size_t kJoinedUnits = 4;
constexpr std::size_t kMostJoinedUnits = Backup::kPieceBytes;
// Of one block no more: where contents come, whoever waits for it waits 5 ms for so much on the
// bus; and what stands in it later, once it has been freed, holds all of its chunk.
constexpr std::size_t kMostJoined = 256 * kMiB;

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

// Of what was joined of units, and of which something has been freed since, those come back that
// hold something still.
void Pool::cut_to_units(std::size_t unit) {
  std::map<std::size_t, PlaceOfChunk>& gone = asleep_->gone;
  const Block* block = nullptr;
  for (auto at = gone.begin(); at != gone.end(); ++at) {
    const std::size_t end = at->first + at->second.size;
    if (at->second.size <= unit || !is_of_units({at->first, at->second.size}, unit)) continue;
    block = space_.blocks().covering_from(block, at->first);
    const Block* each = block;
    while (each != nullptr && !each->is_nobodys() && each->end() < end) each = each->next;
    if (each == nullptr || !each->is_nobodys()) continue;
    PlaceOfChunk rest = at->second;
    rest.size -= unit;
    gone.emplace(at->first + unit, rest);  // first: there may be no memory to note it
    at->second.size = unit;
  }
}

// Where chunks stand for each other, those of a whole window become one, in every model that
// wakes alike. Two models of 16 GiB in turn moved 1024 units of 16 MiB each way, and an unmap
// waits for what the bus was given: a swap took 471 to 547 ms, and 350 to 450 with these. In a
// tag's space not those of several blocks, as below.
void Pool::join_units(std::size_t unit) {
  std::map<std::size_t, PlaceOfChunk>& gone = asleep_->gone;
  const std::size_t window = std::min(unit * kJoinedUnits, kMostJoinedUnits);
  const Block* block = nullptr;
  for (auto at = gone.begin(); at != gone.end(); ++at) {
    if (!is_aligned(at->first, window) || at->second.size >= window) continue;
    const std::size_t window_end = at->first + window;
    std::size_t end = at->first;
    auto last = at;
    while (last != gone.end() && last->first == end && !last->second.is_read_only && last->second.is_like(at->second) &&
           end < window_end) {
      end += last->second.size;
      ++last;
    }
    if (end != window_end) continue;
    // What is free in it would stay with what is not.
    block = space_.blocks().covering_from(block, at->first);
    while (block != nullptr && block->state == BlockState::used && block->end() < end && !is_tag_space()) {
      block = block->next;
    }
    if (block == nullptr || block->state != BlockState::used || block->end() < end) continue;
    at->second.size = window;
    gone.erase(std::next(at), last);
  }
}

// A model comes back in few chunks, as what unmaps and maps it costs by the chunk. A block that
// was live and is again stays, so those that are in it alone become one: 16 GiB in blocks of 256
// MiB are some 300 when they are loaded, and 64 once they have slept. So do those of several, up
// to the size that they would be loaded in, and where contents come to what is copied at once;
// but not in a tag's space, where each may be sealed and unsealed by itself. Of 3157 tensors,
// 16 GiB, there were 190, and on the link to another GPU each came behind the last copy.
void Pool::join_blocks() {
  std::map<std::size_t, PlaceOfChunk>& gone = asleep_->gone;
  const std::size_t most_of_any = is_tag_space() ? 0 : std::min(space_.growth().size_of_what_stays(), kMostJoined);
  // All of it comes from there; nullptr: it was thrown away.
  const auto source = [this](const auto& place) VMM_REQUIRES(mutex_) -> const Backup* {
    const std::vector<KeptRange> kept = asleep_->kept.within({place.first, place.second.size});
    return kept.empty() ? nullptr : kept.front().backup.get();
  };
  const Block* block = nullptr;
  for (auto at = gone.begin(); at != gone.end(); ++at) {
    auto next = std::next(at);
    if (next == gone.end() || next->first != at->first + at->second.size) continue;
    block = space_.blocks().covering_from(block, at->first);
    if (block == nullptr || (block->state != BlockState::used && block->state != BlockState::slab)) continue;
    const Block* const first = block;
    // What was sealed slice by slice may be unsealed so.
    if (at->second.is_read_only && !has_gone_read_only(first->range())) continue;
    const Backup* const backup = source(*at);
    const std::size_t most_of_several = backup == nullptr ? most_of_any : std::min(most_of_any, backup->piece_bytes());
    for (; next != gone.end() && next->first == at->first + at->second.size; next = gone.erase(next)) {
      const std::size_t joined = at->second.size + next->second.size;
      const std::size_t end = at->first + joined;
      if (joined > (end <= first->end() ? kMostJoined : most_of_several)) break;
      if (!next->second.is_like(at->second) || source(*next) != backup) break;
      while (block->end() < end && block->next != nullptr && block->next->state == first->state) block = block->next;
      if (block->end() < end) break;  // what is free in it would stay with what is not
      at->second.size = joined;
    }
  }
}

bool Pool::may_join() const {
  const bool has_own_rule = !kind_.is_ordinary || kind_.is_uniform || kind_.no_split || kind_.is_spill;
  return !has_own_rule && !keeps_within_chunks() && !space_.is_pinned();
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

std::vector<LeavingChunk> Pool::plan_wake(bool joins) {
  KeptRanges ended;  // their backups end with no lock held
  const MutexLock lock(mutex_);
  std::vector<LeavingChunk> found;
  if (asleep_ == nullptr || !space_.is_open()) return found;
  settle_locked();
  joins = joins && may_join();
  const std::size_t unit = joins ? space_.unit_for(0) : 0;
  if (unit != 0) cut_to_units(unit);
  if (!space_.is_pinned()) {
    give_up_spare_slabs();
    forget_unused();
    ended = asleep_->kept.cut_to(contents());  // what has been freed does not come back
  }
  if (joins) unit != 0 ? join_units(unit) : join_blocks();
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

// A chunk for each place, of its size: granted, or on the shelf; else made, in exchange for
// others of the shelf. Several that are smaller would do, and cost less (58 us each; some 46 to
// make one and 40 a 64 MiB to give others back), but that at every sleep and wake from then on:
// 300 of 2 MiB for 13 made a wake take 0.9 s for 0.4.
bool Pool::collect_to_wake(std::span<const LeavingChunk> places, Grant* grant, Backing* backing, Shortage* shortage) {
  Budget* full = nullptr;
  std::vector<PlacedChunk>& placements = backing->placements;
  std::size_t missing = 0;
  placements.reserve(places.size());
  for (const LeavingChunk& each : places) {
    const std::size_t size = each.place.size;
    placements.push_back({each.offset, nullptr});  // first: what is taken has its place
    Chunk*& chunk = placements.back().chunk;
    if (grant != nullptr) chunk = grant->chunks.take_at_most(size, /*exact=*/true);
    if (chunk == nullptr && full == nullptr) {
      chunk = context_.store.take_at_most(group_, budget_, size, /*exact=*/true, &full);
    }
    if (chunk == nullptr) missing += size;
  }
  const std::size_t prepaid = grant == nullptr ? 0 : std::min(grant->prepaid_bytes, missing);
  Budget* refused = budget_.charge(missing - prepaid);
  std::size_t given_back = 0;
  if (refused != nullptr && group_.stands_under(*refused)) {  // which pays for its shelf
    given_back = exchange_shelved(missing - prepaid, missing);
    if (given_back != 0) refused = budget_.charge(missing - prepaid);
  }
  if (refused != nullptr) {
    *shortage = {missing - prepaid, refused, {}};
    return false;
  }
  if (grant != nullptr) grant->prepaid_bytes -= prepaid;
  // Also where there is room for both: else who has just left it there would hold twice its memory.
  if (given_back < missing) exchange_shelved(0, missing - given_back);
  for (std::size_t k = 0; k < places.size(); ++k) {
    Chunk*& chunk = placements[k].chunk;
    if (chunk != nullptr) continue;
    const std::size_t size = places[k].place.size;
    Status status;
    try {
      status = make_prepaid(size, &chunk);
    } catch (...) {
      budget_.refund(missing);
      throw;
    }
    if (!status.ok()) {
      budget_.refund(missing);
      *shortage = Shortage::of_driver(missing, status);
      return false;
    }
    missing -= size;
  }
  return true;
}

// Where the driver has no more, others of the shelf go first, if that is enough.
Status Pool::make_prepaid(std::size_t size, Chunk** chunk) {
  ChunkStore& store = context_.store;
  const Status status = store.create_prepaid(store.spec(size), budget_, chunk);
  if (status.code() != StatusCode::out_of_memory) return status;
  const std::size_t shelved = store.shelved_bytes(group_);
  MemoryInfo memory;
  if (!context_.driver.memory_info(context_.device, &memory).ok() || memory.free + shelved < size) return status;
  if (shelved == 0 || store.trim(group_, shelved - std::min(shelved, size)) == 0) return status;
  return store.create_prepaid(store.spec(size), budget_, chunk);
}

// Of what still rests on the group's shelf, in sizes that fit no place that was asked for, `bytes`
// go back to the driver, as so much is made in their stead. None where `charge`, for which it is
// done, would not fit with all of them. Returns how many went.
std::size_t Pool::exchange_shelved(std::size_t charge, std::size_t bytes) {
  const std::size_t shelved = context_.store.shelved_bytes(group_);
  const std::size_t lacks = charge - std::min(charge, budget_.headroom());
  if (shelved == 0 || shelved < lacks) return 0;
  return context_.store.trim(group_, shelved - std::min(shelved, bytes));
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
  const auto collected = asleep_->collected.find(place.offset);
  if (collected == asleep_->collected.end()) return {};
  const PlacedChunk placed{collected->first, collected->second};
  *wait_for = placed.chunk->last_use;
  // The GPU waits, where it can be made to.
  if (!context_.clock.order_before(filled_by, *wait_for).ok()) return {};
  *wait_for = kLongAgo;
  asleep_->to_seal.reserve(asleep_->to_seal.size() + 1);
  const std::vector<PlacedChunk> placements{placed};
  Status status = space_.range().map(placements, space_.accessors());
  if (status.ok()) status = blank(placed, place.place.is_poisoned, filled_by.stream);
  // What is mapped is the pool's, also where that failed: whoever asked undoes it.
  if (space_.range().live().count(placed.offset) == 0) return status;
  const PlaceOfChunk as_it_was = asleep_->gone.at(placed.offset);  // others may have registered it since it was planned
  asleep_->collected.erase(placed.offset);
  asleep_->gone.erase(placed.offset);
  if (status.ok()) placed.chunk->content.store(id_, std::memory_order_relaxed);  // else it is as it was
  placed.chunk->last_use = kLongAgo;
  if (as_it_was.is_withheld) space_.range().withhold(placed.offset);
  if (as_it_was.is_read_only) asleep_->to_seal.push_back(place.range());
  mapped(placed, filled_by.stream);
  return status;
}

// Memory that wakes reads as zero, or as poison, where no content comes to it: nobody else's is
// seen, nor what was thrown away.
Status Pool::blank(const PlacedChunk& placed, bool is_poisoned, Stream stream) {
  const OwnerId content = placed.chunk->content.load(std::memory_order_relaxed);
  const bool may_stay = !asleep_->is_discarded && !kind_.is_range && (content == id_ || !context_.options.scrub);
  if (!is_poisoned && (content == kNobody || may_stay)) return {};
  const std::uint8_t byte = is_poisoned ? kPoisonByte : 0;
  return context_.driver.fill_async(context_.device, base_ + placed.offset, byte, placed.chunk->size, stream);
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
