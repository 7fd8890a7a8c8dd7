// Pool: while its memory is elsewhere. Addresses, blocks and their numbers stay; chunks
// leave for the group's shelf, and others come to the same offsets. Whoever moves their
// contents, and waits for what is queued, is core/sleep.
#include "core/pool/asleep.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <span>
#include <utility>

#include "base/check.h"
#include "base/errors.h"
#include "core/memory/chunk_store.h"
#include "core/memory/grant.h"
#include "core/options.h"
#include "core/pool/pool.h"

namespace vmm {

namespace {

// What is free between two kept ranges is copied with them: a copy costs some 2 us, in which
// the bus moves as much.
constexpr std::size_t kCopiedAlong = 64 * kKiB;
// Chunks that may stand where one stood.
constexpr std::size_t kMostPieces = 4;

}  // namespace

// ----------------------------------------------------------------- going to sleep

SleepBegun Pool::begin_sleep() {
  const StillLock lock(*this, BlockCaches::Kept::gone);
  if (!space_.is_open() || kind_.is_spill) return SleepBegun::never;  // it holds none of the device's memory
  if (asleep_ != nullptr) {
    begin_transfer_locked();
    return SleepBegun::again;
  }
  if (context_.log != nullptr) {
    throw NotAvailableError("pool '" + name_ + "' cannot sleep in debug mode, which watches what its memory holds; " +
                            "unset TORCH_VMM_DEBUG");
  }
  asleep_ = std::make_unique<Asleep>();
  space_.hold(true);
  is_cached_.store(false, std::memory_order_relaxed);
  if (!is_retired()) life_.store(Life::asleep, std::memory_order_release);
  count_slabs(SizeClass::small_pool, SizeClass::large_pool);
  set_inactive_split({});
  return SleepBegun::anew;
}

bool Pool::begin_transfer() {
  const MutexLock lock(mutex_);
  if (asleep_ == nullptr) return false;
  begin_transfer_locked();
  return true;
}

void Pool::begin_transfer_locked() {
  if (asleep_->is_busy) {
    throw VmmError("model '" + model().name() + "' is on its way to sleep or back: wait() for that first");
  }
  asleep_->is_busy = true;
}

void Pool::end_transfer() {
  const MutexLock lock(mutex_);
  if (asleep_ != nullptr) asleep_->is_busy = false;
}

// Slabs are counted with the large ones' memory while there may be none under them.
void Pool::count_slabs(SizeClass from, SizeClass to) {
  for (const Block* block = space_.blocks().stretches().front(); block != nullptr; block = block->next) {
    if (block->state == BlockState::slab && slabs_.holds(*block)) count_slab(*block, from, to);
  }
}

// What has to be there again when it wakes, by offset: what somebody still uses, and all of
// a graph's memory, which may use any of it whenever it is launched.
std::vector<ByteRange> Pool::contents() const {
  std::vector<ByteRange> found;
  const auto add = [&found](ByteRange range) {
    if (!found.empty() && range.offset - found.back().end() <= kCopiedAlong) {
      found.back().size = range.end() - found.back().offset;
    } else {
      found.push_back(range);
    }
  };
  if (space_.is_pinned()) {
    for (const auto& [offset, mapping] : space_.range().live()) add({offset, mapping.chunk->size});
    return found;
  }
  for (const Block* block = space_.blocks().stretches().front(); block != nullptr; block = block->next) {
    if (block->state != BlockState::slab) {
      if (block->is_live() || block->state == BlockState::pages) add(block->range());
      continue;
    }
    for (const Block* piece = slabs_.first_piece(*block); piece != nullptr; piece = piece->next) {
      if (piece->is_live()) add(piece->range());
    }
  }
  return found;
}

// For everybody, now or once its contents are there.
bool Pool::is_to_be_read_only(ByteRange range, const LiveMapping& mapping) const {
  const std::vector<ByteRange>& to_seal = asleep_->to_seal;
  return space_.allows(mapping, Access::read) || std::find(to_seal.begin(), to_seal.end(), range) != to_seal.end();
}

std::vector<LeavingChunk> Pool::plan_sleep(bool keeps_unchanged, std::span<const Address> everybodys) {
  const MutexLock lock(mutex_);
  std::vector<LeavingChunk> plan;
  if (!space_.is_open() || asleep_ == nullptr) return plan;
  settle_locked();
  if (!space_.is_pinned()) {
    give_up_spare_slabs();
    space_.shelve_idle_in({0, kind_.capacity});
    space_.drop_retired();
  }
  const std::vector<ByteRange> kept = contents();
  auto next = kept.begin();
  std::set<std::size_t> staying;  // chunks, by offset
  for (const Address address : everybodys) {
    const Block* const block = live_around(address);  // torch may have cut its own out of ours
    if (block == nullptr) continue;
    for (auto at = space_.range().covering(block->offset);
         at != space_.range().live().end() && at->first < block->end(); ++at) {
      staying.insert(at->first);
    }
  }
  for (const auto& [offset, mapping] : space_.range().live()) {
    const Chunk& chunk = *mapping.chunk;
    if (staying.count(offset) != 0) continue;
    // What others have mapped as well stays as it is: they would go on with the chunk that
    // the pool had.
    if (chunk.exported || chunk.mappings.load(std::memory_order_acquire) != 1) continue;
    LeavingChunk leaving;
    leaving.offset = offset;
    leaving.place.size = chunk.size;
    const ByteRange range{offset, chunk.size};
    leaving.place.is_read_only = is_to_be_read_only(range, mapping);
    leaving.place.is_withheld = mapping.is_withheld;
    const std::size_t end = range.end();
    while (next != kept.end() && next->end() <= offset) ++next;
    for (auto live = next; live != kept.end() && live->offset < end; ++live) {
      const std::size_t begin = std::max(live->offset, offset);
      // What a wake that was stopped has left is kept already.
      for (const ByteRange& part : asleep_->kept.missing({begin, std::min(live->end(), end) - begin})) {
        KeptRanges unchanged;
        if (keeps_unchanged) {
          for (const KeptRange& each : unchanged_.within(part, offset, mapping)) {
            unchanged.add(each);
            leaving.unchanged.push_back(each);
          }
        }
        for (const ByteRange& rest : unchanged.missing(part)) leaving.kept.push_back(rest);
      }
    }
    plan.push_back(std::move(leaving));
  }
  return plan;
}

Status Pool::let_go(const LeavingChunk& leaving, std::span<const KeptRange> kept) {
  Unchanged ended;  // its backup ends with no lock held
  const MutexLock lock(mutex_);
  const auto found = space_.range().live().find(leaving.offset);
  VMM_CHECK(asleep_ != nullptr && found != space_.range().live().end(), "no chunk at ", leaving.offset);
  const Chunk& chunk = *found->second.chunk;
  if (chunk.exported || chunk.mappings.load(std::memory_order_acquire) != 1) return {};  // of somebody else's too, now
  const ByteRange range = leaving.range();
  const auto undo = [&]() VMM_REQUIRES(mutex_) {
    for (const KeptRange& each : kept) asleep_->kept.remove({each.offset, each.size});
    for (const KeptRange& each : leaving.unchanged) asleep_->kept.remove({each.offset, each.size});
  };
  const bool is_discarded = kept.empty() && !leaving.kept.empty();
  Status status;
  try {
    for (const KeptRange& each : kept) asleep_->kept.add(each);
    for (const KeptRange& each : leaving.unchanged) asleep_->kept.add(each);
    status = send_away(range, leaving.place.is_poisoned && is_discarded);
  } catch (...) {
    undo();
    throw;
  }
  if (!status.ok()) {
    undo();
    return status;
  }
  ended = unchanged_.take(range);  // what of it was used is among what is kept
  asleep_->is_discarded = asleep_->is_discarded || is_discarded;
  return status;
}

// The chunk leaves for the group's shelf, or stays where the driver refuses. What is noted of
// its place is what holds now: others may have registered or unsealed it since it was planned.
// REQUIRES: nothing uses it.
Status Pool::send_away(ByteRange range, bool is_poisoned) {
  const LiveMapping& mapping = space_.range().live().at(range.offset);
  Chunk* const chunk = mapping.chunk;
  const PlaceOfChunk place{range.size, is_to_be_read_only(range, mapping), mapping.is_withheld, is_poisoned};
  const bool was_sealed = !space_.allows(mapping, Access::read_write);
  const bool is_told = !mapping.is_withheld || mapping.is_told;
  const auto gone = asleep_->gone.emplace(range.offset, place).first;  // first: there may be no memory to note it
  // Before it goes, for whoever registered it.
  if (is_told) tell(PoolEvent::segment_free, range.offset, range.size, nullptr);
  if (const Status status = space_.range().unmap(range); !status.ok()) {
    if (is_told) tell(PoolEvent::segment_alloc, range.offset, range.size, nullptr);
    asleep_->gone.erase(gone);
    return status;
  }
  std::erase(asleep_->to_seal, range);
  if (was_sealed) context_.store.dormant().allow(chunk);
  unmapped({range.offset, chunk});
  chunk->last_use = kLongAgo;  // whoever asked has waited for all that is queued
  context_.store.put(group_, chunk);
  return {};
}

// --------------------------------------------------------------------------- waking

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

// Where a chunk came back as several it is wanted whole again, as soon as all of them have
// gone: else a model that takes turns would have ever more, ever smaller ones.
void Pool::join_broken_up() {
  std::map<std::size_t, PlaceOfChunk>& gone = asleep_->gone;
  for (auto at = broken_up_.begin(); at != broken_up_.end();) {
    const ByteRange whole{at->first, at->second};
    const auto first = gone.find(whole.offset);
    auto last = first;  // behind those that lie side by side from there on
    std::size_t end = whole.offset;
    for (; last != gone.end() && last->first == end && end < whole.end(); ++last) {
      if (!last->second.is_like(first->second)) break;
      end += last->second.size;
    }
    if (end == whole.end()) {
      gone.erase(std::next(first), last);
      first->second.size = whole.size;
    } else if (space_.range().covering(end) != space_.range().live().end()) {
      ++at;  // some of it is still there, as a sleep or a wake was stopped
      continue;
    }
    at = broken_up_.erase(at);
  }
}

std::vector<LeavingChunk> Pool::plan_wake() {
  KeptRanges ended;  // their backups end with no lock held
  const MutexLock lock(mutex_);
  std::vector<LeavingChunk> wanted;
  if (asleep_ == nullptr || !space_.is_open()) return wanted;
  settle_locked();
  if (!space_.is_pinned()) {
    give_up_spare_slabs();
    forget_unused();
    ended = asleep_->kept.cut_to(contents());  // what has been freed does not come back
  }
  join_broken_up();
  const auto want = [&](std::size_t offset, const PlaceOfChunk& place, bool is_there) VMM_REQUIRES(mutex_) {
    LeavingChunk chunk{offset, place, {}, {}, is_there};
    for (const KeptRange& each : asleep_->kept.within(chunk.range())) chunk.kept.push_back({each.offset, each.size});
    if (!is_there || !chunk.kept.empty()) wanted.push_back(std::move(chunk));
  };
  for (const auto& [offset, place] : asleep_->gone) want(offset, place, false);
  // Those that the driver would not unmap again when a wake was stopped.
  for (const auto& [offset, mapping] : space_.range().live()) {
    const ByteRange range{offset, mapping.chunk->size};
    want(offset, {range.size, is_to_be_read_only(range, mapping), mapping.is_withheld}, true);
  }
  const auto is_of_slab = [this](const LeavingChunk& chunk) VMM_REQUIRES(mutex_) {
    const Block* const block = space_.blocks().covering(chunk.offset);
    return block != nullptr && block->state == BlockState::slab;
  };
  std::stable_partition(wanted.begin(), wanted.end(), is_of_slab);
  return wanted;
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
// or up to kMostPieces that are smaller where blocks may lie over their borders: each costs a
// mapping at every wake, and 300 of 2 MiB for 13 made one of discarded contents take 0.9 s for 0.4.
bool Pool::collect_to_wake(std::span<const LeavingChunk> places, Grant* grant, Backing* backing, Shortage* shortage) {
  const bool is_exact = kind_.is_uniform || kind_.no_split || keeps_within_chunks();
  Budget* full = nullptr;
  std::vector<PlacedChunk>& placements = backing->placements;
  std::size_t size_of_place = 0;
  const auto take = [&](std::size_t offset, std::size_t size, bool exact) VMM_REQUIRES(mutex_) -> std::size_t {
    placements.push_back({offset, nullptr});  // first: what is taken has its place
    Chunk*& chunk = placements.back().chunk;
    if (grant != nullptr) chunk = grant->chunks.take_at_most(size, exact);
    if (chunk == nullptr && full == nullptr) chunk = context_.store.take_at_most(group_, budget_, size, exact, &full);
    if (chunk != nullptr && chunk->size * kMostPieces >= size_of_place) return chunk->size;
    if (chunk != nullptr) space_.put_back(chunk, grant);
    placements.pop_back();
    return 0;
  };
  std::vector<ByteRange> unmet;
  for (const LeavingChunk& each : places) {
    size_of_place = each.place.size;
    if (take(each.offset, each.place.size, /*exact=*/true) == 0) unmet.push_back({each.offset, each.place.size});
  }
  std::size_t missing = 0;
  for (ByteRange& place : unmet) {
    size_of_place = place.size;
    for (std::size_t took = 1; !is_exact && took != 0 && place.size != 0;) {
      took = take(place.offset, place.size, /*exact=*/false);
      place = {place.offset + took, place.size - took};
    }
    missing += place.size;
  }
  placements.reserve(placements.size() + unmet.size());
  const std::size_t prepaid = grant == nullptr ? 0 : std::min(grant->prepaid_bytes, missing);
  if (Budget* const refused = budget_.charge(missing - prepaid)) {
    *shortage = {missing - prepaid, refused, {}};
    return false;
  }
  if (grant != nullptr) grant->prepaid_bytes -= prepaid;
  Status status;
  for (const ByteRange& each : unmet) {
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
  if (is_broken_up) broken_up_.insert_or_assign(place.offset, place.place.size);
  // Each chunk is gone by itself from now on: the place may be several's.
  for (const PlacedChunk& each : placements) {
    PlaceOfChunk of_chunk = asleep_->place_at(each.offset);  // others may have registered it since it was planned
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
  if (status.ok()) status = empty(placements, place.place.is_poisoned, filled_by.stream);
  // What is mapped is the pool's, also where that failed: whoever asked undoes it.
  for (const auto& [offset, chunk] : placements) {
    if (space_.range().live().count(offset) == 0) continue;
    const PlaceOfChunk as_it_was = asleep_->place_at(offset);
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
Status Pool::empty(std::span<const PlacedChunk> placements, bool is_poisoned, Stream stream) {
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

// What is read-only from now on need not be copied again.
Unchanged Pool::unchanged_now() const {
  if (!space_.is_open() || is_retired()) return {};
  Unchanged unchanged = unchanged_.proved_by(space_.range().live());
  for (const auto& [offset, mapping] : space_.range().live()) {
    if (!space_.allows(mapping, Access::read)) continue;
    std::vector<KeptRange> kept = asleep_->kept.within({offset, mapping.chunk->size});
    std::erase_if(kept, [](const KeptRange& each) { return !each.backup->may_be_kept(); });
    if (!kept.empty()) unchanged.add(offset, mapping, kept);
  }
  return unchanged;
}

bool Pool::forget_unchanged() {
  Unchanged ended;  // its backup ends with no lock held
  const MutexLock lock(mutex_);
  std::swap(ended, unchanged_);
  return !ended.empty();
}

void Pool::require_awake() const {
  if (asleep_ != nullptr) throw AsleepError(model().name());
}

void Pool::require_taking() const {
  const MutexLock lock(mutex_);
  require_awake();
}

void Pool::require_there(Address address, std::size_t bytes) const {
  const MutexLock lock(mutex_);
  if (asleep_ == nullptr) return;
  const std::size_t end = address - base_ + bytes;
  auto place = asleep_->gone.lower_bound(end);
  if (place == asleep_->gone.begin()) return;
  --place;
  if (place->first + place->second.size > address - base_) require_awake();
}

bool Pool::has_gone_read_only(ByteRange range) const {
  std::size_t at = range.offset;
  auto place = asleep_->gone.upper_bound(at);
  if (place == asleep_->gone.begin()) return false;
  for (--place; place != asleep_->gone.end() && place->first <= at && at < range.end(); ++place) {
    if (!place->second.is_read_only) return false;
    at = place->first + place->second.size;
  }
  return at >= range.end();
}

// Of chunks that have gone, those over whose borders the block lies.
void Pool::withhold_gone(ByteRange of_block, bool are_pages) {
  auto at = asleep_->gone.upper_bound(of_block.offset);
  if (at != asleep_->gone.begin() && std::prev(at)->first + std::prev(at)->second.size > of_block.offset) --at;
  for (; at != asleep_->gone.end() && at->first < of_block.end(); ++at) {
    const bool is_whole = at->first <= of_block.offset && at->first + at->second.size >= of_block.end();
    if (!is_whole || are_pages) at->second.is_withheld = true;
  }
}

void Pool::withhold_broken_chunks() {
  const MutexLock lock(mutex_);
  if (!space_.is_open()) return;
  space_.withhold_broken_chunks();
  broken_up_.clear();  // what they are joined to would have no borders
  if (asleep_ == nullptr) return;
  const bool is_uniform = kind_.is_uniform;
  if (!is_uniform) {
    for (const auto& [offset, chunk] : asleep_->collected) space_.blocks().add_border(offset);
  }
  for (auto& [offset, place] : asleep_->gone) {
    place.is_withheld = place.is_withheld || is_uniform || space_.is_pinned();
    if (!is_uniform) space_.blocks().add_border(offset);
  }
  for (const Block* block = space_.blocks().stretches().front(); block != nullptr; block = block->next) {
    if (!block->is_nobodys()) withhold_gone(block->range(), block->state == BlockState::pages);
  }
}

// ----------------------------------------------------------------------------- told

std::size_t Pool::live_elsewhere() const {
  const std::size_t live = live_bytes_locked();
  return live - std::min(live, space_.range().mapped_bytes());
}

bool Pool::is_asleep() const {
  const MutexLock lock(mutex_);
  return asleep_ != nullptr;
}

bool Pool::read_kept(Address address, std::size_t size, std::byte* to) {
  const ByteRange range{address - base_, size};
  std::vector<KeptRange> kept;  // and their backups, which nobody writes to any more
  {
    const MutexLock lock(mutex_);
    if (asleep_ == nullptr || asleep_->is_busy || !asleep_->kept.missing(range).empty()) return false;
    kept = asleep_->kept.within(range);
  }
  // Takes its time, and no lock: others read meanwhile, and the model may wake.
  for (const KeptRange& each : kept) each.backup->read(each.at, to + (each.offset - range.offset), each.size);
  return true;
}

void Pool::note_place(const std::string& place) {
  const MutexLock lock(mutex_);
  if (asleep_ != nullptr) asleep_->place = place;
}

std::set<std::string> Pool::places_of_backups() const {
  const MutexLock lock(mutex_);
  return asleep_ == nullptr ? std::set<std::string>() : asleep_->kept.places();
}

std::string Pool::asleep_where() const {
  const MutexLock lock(mutex_);
  return asleep_ == nullptr || (asleep_->gone.empty() && asleep_->kept.any() == nullptr) ? "" : asleep_->place;
}

}  // namespace vmm
