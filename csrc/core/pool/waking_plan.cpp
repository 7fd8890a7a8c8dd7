// Pool: what is to come back, and in what chunks.
#include <algorithm>
#include <iterator>
#include <map>
#include <utility>

#include "core/memory/backup.h"
#include "core/pool/asleep.h"
#include "core/pool/pool.h"

namespace vmm {

namespace {

// So many units come back as one chunk, and no more bytes than are on the bus at once: what of it
// is freed later goes to nobody while some of it is in use.
constexpr std::size_t kJoinedUnits = 4;
constexpr std::size_t kMostJoinedUnits = Backup::kPieceBytes;
// Of one block no more where contents come: whoever waits for it waits 5 ms for so much on the bus.
constexpr std::size_t kMostJoined = 256 * kMiB;
// Where none come. 16 GiB in 3157 tensors, thrown away, slept in 6.5 and woke in 11.5 ms on an H200 in
// the 160 chunks that 128 MiB of several and 256 of one made, in 3.6 and 6.5 in 80, in 2.3 and 5.2
// in 44: mapping costs 70 us a chunk while the GPU zeroes the one before, and zeroing all takes 4 ms.
constexpr std::size_t kMostJoinedEmpty = 512 * kMiB;
// A block of half of what several may share there, or more, is alone in its chunk: what stands in
// it later, once it has been freed, would hold the others' memory too.
constexpr std::size_t kAlonePerShared = 2;
// Less that is free stays in its chunk: a chunk costs 58 us, and a pool that goes on has use for it.
constexpr std::size_t kLeastCut = 8 * kMiB;

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

void Pool::cut_place(std::map<std::size_t, PlaceOfChunk>::iterator at, std::size_t offset) {
  PlaceOfChunk rest = at->second;
  rest.size = at->first + at->second.size - offset;
  asleep_->gone.emplace(offset, rest);  // first: there may be no memory to note it
  at->second.size = offset - at->first;
}

// Of what has free space in it those parts come back that hold something. What is of units goes
// by them.
void Pool::cut_free(std::size_t unit) {
  std::map<std::size_t, PlaceOfChunk>& gone = asleep_->gone;
  const Block* block = nullptr;
  for (auto at = gone.begin(); at != gone.end(); ++at) {
    const ByteRange place{at->first, at->second.size};
    const bool is_of_several = unit != 0 && is_of_units(place, unit);
    if (is_of_several && place.size == unit) continue;
    block = space_.blocks().covering_from(block, place.offset);
    for (const Block* each = block; each != nullptr && each->offset < place.end();) {
      const std::size_t begin = std::max(align_up(each->offset, kind_.page), place.offset);
      const Block* const first = each;
      while (each != nullptr && each->is_nobodys() && each->offset < place.end()) each = each->next;
      if (each == first) {
        each = each->next;
        continue;
      }
      if (is_of_several) {
        for (std::size_t last = place.end() - unit; last > place.offset; last -= unit) cut_place(at, last);
        break;
      }
      const std::size_t end =
          each == nullptr || each->offset > place.end() ? place.end() : align_down(each->offset, kind_.page);
      if (end < begin + kLeastCut) continue;
      if (end < place.end()) cut_place(at, end);  // and the rest is looked at next
      if (begin > place.offset) {
        cut_place(at, begin);
        ++at;
      }
      break;
    }
  }
}

// Where chunks stand for each other, those of a whole window become one, in every model that
// wakes alike. Two models of 16 GiB in turn moved 1024 units of 16 MiB each way, and an unmap
// waits for what the bus was given: a swap took 471 to 547 ms, and 350 to 450 with these. Not
// those of several blocks where blocks come and go, nor in a tag's space, as below.
void Pool::join_units(std::size_t unit) {
  std::map<std::size_t, PlaceOfChunk>& gone = asleep_->gone;
  const std::size_t window = std::min(unit * kJoinedUnits, kMostJoinedUnits);
  const bool joins_several = space_.growth().holds_what_stays() && !is_tag_space();
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
    while (block != nullptr && block->state == BlockState::used && block->end() < end && joins_several) {
      block = block->next;
    }
    if (block == nullptr || block->state != BlockState::used || block->end() < end) continue;
    at->second.size = window;
    gone.erase(std::next(at), last);
  }
}

// Where all of a chunk that is to come comes from; nullptr: it was thrown away.
const Backup* Pool::source_of(ByteRange place) const {
  const std::vector<KeptRange> kept = asleep_->kept.within(place);
  return kept.empty() ? nullptr : kept.front().backup.get();
}

// Chunks to which nothing comes begin and end with the whole pages of each block of at least
// `alone` bytes.
void Pool::cut_around_large(std::size_t alone) {
  std::map<std::size_t, PlaceOfChunk>& gone = asleep_->gone;
  const Block* block = nullptr;
  for (auto at = gone.begin(); at != gone.end(); ++at) {
    if (source_of({at->first, at->second.size}) != nullptr) continue;
    block = space_.blocks().covering_from(block, at->first);
    for (const Block* each = block; each != nullptr && each->offset < at->first + at->second.size; each = each->next) {
      if (each->state != BlockState::used || each->size() < alone) continue;
      for (const std::size_t border : {align_up(each->offset, kind_.page), align_down(each->end(), kind_.page)}) {
        if (border <= at->first || border >= at->first + at->second.size) continue;
        cut_place(at, border);
        ++at;
      }
    }
  }
}

// A model comes back in few chunks, as what unmaps and maps it costs by the chunk. A block that
// was live and is again stays, so those that are in it alone become one: 16 GiB in blocks of 256
// MiB are some 300 when they are loaded, and 64 once they have slept. Several blocks share one, of
// what stays, and where contents come no more than is copied at once; what is freed of it later
// goes to nobody while some of it is in use. In a tag's space each may be sealed and unsealed by
// itself, and none share.
void Pool::join_blocks() {
  std::map<std::size_t, PlaceOfChunk>& gone = asleep_->gone;
  const bool is_contested = group_.sharers() > 1;
  const auto most_of_several = [&](BlockState state, const Backup* source) VMM_REQUIRES(mutex_) {
    if (is_tag_space()) return std::size_t{0};
    const GrowthPolicy& growth = space_.growth();
    return std::min(state == BlockState::slab ? growth.slabs_of_what_stays(is_contested) * kSlabBytes
                                              : growth.shared_by_what_stays(is_contested),
                    source == nullptr ? kMostJoinedEmpty : source->piece_bytes());
  };
  const std::size_t alone = most_of_several(BlockState::used, nullptr) / kAlonePerShared;
  if (alone != 0) cut_around_large(alone);
  const Block* block = nullptr;
  for (auto at = gone.begin(); at != gone.end(); ++at) {
    auto next = std::next(at);
    if (next == gone.end() || next->first != at->first + at->second.size) continue;
    block = space_.blocks().covering_from(block, at->first);
    if (block == nullptr || (block->state != BlockState::used && block->state != BlockState::slab)) continue;
    const Block* const first = block;
    // What was sealed slice by slice may be unsealed so.
    if (at->second.is_read_only && !has_gone_read_only(first->range())) continue;
    const Backup* const source = source_of({at->first, at->second.size});
    const std::size_t most_of_one = source == nullptr ? kMostJoinedEmpty : kMostJoined;
    const auto is_alone_before = [&](std::size_t end, const Block& each) {
      return source == nullptr && each.state == BlockState::used && each.size() >= alone &&
             at->first < align_down(each.end(), kind_.page) && end > align_up(each.offset, kind_.page);
    };
    const std::size_t most = is_alone_before(next->first, *first) ? 0 : most_of_several(first->state, source);
    for (; next != gone.end() && next->first == at->first + at->second.size; next = gone.erase(next)) {
      const std::size_t joined = at->second.size + next->second.size;
      const std::size_t end = at->first + joined;
      const bool is_in_one = end <= first->end();
      if (joined > (is_in_one ? most_of_one : most)) break;
      if (!next->second.is_like(at->second) || source_of({next->first, next->second.size}) != source) break;
      const auto may_be_there = [&](const Block* each) {
        return each != nullptr && each->state == first->state && (is_in_one || !is_alone_before(end, *each));
      };
      while (block->end() < end && may_be_there(block->next)) block = block->next;
      if (block->end() < end || !may_be_there(block)) break;  // what is free in it would stay with what is not
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
std::vector<MovedChunk> slabs_in_turns(std::vector<MovedChunk> chunks, std::size_t slabs) {
  constexpr std::size_t kAtOnce = 16;
  if (slabs <= kAtOnce) return chunks;
  std::size_t total = 0;
  for (std::size_t k = slabs; k < chunks.size(); ++k) total += chunks[k].place.size;
  std::vector<MovedChunk> in_turns;
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
std::vector<MovedChunk> Pool::slabs_first(std::vector<MovedChunk> chunks, std::size_t* slabs) const {
  std::vector<MovedChunk> ordered;
  std::vector<MovedChunk> others;
  const Block* block = nullptr;
  for (MovedChunk& each : chunks) {
    block = space_.blocks().covering_from(block, each.offset);
    const bool is_of_slab = block != nullptr && block->state == BlockState::slab;
    (is_of_slab ? ordered : others).push_back(std::move(each));
  }
  *slabs = ordered.size();
  std::reverse(ordered.begin(), ordered.end());  // each stands below the one that was made before it
  std::move(others.begin(), others.end(), std::back_inserter(ordered));
  return ordered;
}

std::vector<MovedChunk> Pool::plan_wake(bool joins) {
  KeptRanges ended;  // their backups end with no lock held
  const MutexLock lock(mutex_);
  std::vector<MovedChunk> found;
  if (asleep_ == nullptr || !space_.is_open()) return found;
  settle_locked();
  joins = joins && !space_.has_own_rule();
  const std::size_t unit = joins ? space_.unit_for(0) : 0;
  if (!space_.is_pinned()) {
    give_up_spare_slabs();
    if (joins) cut_free(unit);
    forget_unused();
    // What has been freed does not come back.
    if (asleep_->kept.any() != nullptr) ended = asleep_->kept.cut_to(contents());
  }
  if (joins) unit != 0 ? join_units(unit) : join_blocks();
  const auto want = [&](std::size_t offset, const PlaceOfChunk& place, const Chunk* there) VMM_REQUIRES(mutex_) {
    MovedChunk chunk{offset, place, {}, {}, there != nullptr};
    for (const KeptRange& each : asleep_->kept.within(chunk.range())) chunk.kept.push_back({each.offset, each.size});
    if (there == nullptr || !chunk.kept.empty() || !is_blanked(*there)) found.push_back(std::move(chunk));
  };
  for (const auto& [offset, place] : asleep_->gone) want(offset, place, nullptr);
  // Those that the driver would not unmap again when a wake was stopped.
  for (const auto& [offset, mapping] : space_.range().live()) {
    const ByteRange range{offset, mapping.chunk->size};
    want(offset, {range.size, is_to_be_read_only(range, mapping)}, mapping.chunk);
  }
  std::size_t slabs = 0;
  std::vector<MovedChunk> wanted = slabs_first(std::move(found), &slabs);
  const KeptRange* const kept = asleep_->kept.any();
  if (kept == nullptr) {  // the GPU zeroes large chunks while the slabs' are mapped, which has nothing else to do
    std::rotate(wanted.begin(), wanted.begin() + static_cast<std::ptrdiff_t>(slabs), wanted.end());
    return wanted;
  }
  if (!kept->backup->is_mapped_beside_copies()) return wanted;
  return slabs_in_turns(std::move(wanted), slabs);
}

}  // namespace vmm
