#include "core/pool/coming_chunks.h"

#include <algorithm>
#include <iterator>

#include "core/blocks/small_heap.h"
#include "core/memory/backup.h"

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
// A block that would leave less than a quarter of such a chunk to others is alone, wherever it comes
// from: they would save few chunks, and what stands in it later, once it has been freed, would hold
// their memory too.
constexpr std::size_t kSharedPerOthers = 4;
// Less that is free stays in its chunk: a chunk costs 58 us, and a pool that goes on has use for it.
constexpr std::size_t kLeastCut = 8 * kMiB;

}  // namespace

void ComingChunks::cut_place(Places::iterator at, std::size_t offset) {
  PlaceOfChunk rest = at->second;
  rest.size = at->first + at->second.size - offset;
  asleep_.gone.emplace(offset, rest);  // first: there may be no memory to note it
  at->second.size = offset - at->first;
}

void ComingChunks::cut_free(std::size_t unit) {
  Places& gone = asleep_.gone;
  const Block* block = nullptr;
  for (auto at = gone.begin(); at != gone.end(); ++at) {
    const ByteRange place{at->first, at->second.size};
    const bool is_of_several = unit != 0 && is_of_units(place, unit);
    if (is_of_several && place.size == unit) continue;
    block = blocks_.covering_from(block, place.offset);
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

// In every model that wakes alike. Two models of 16 GiB in turn moved 1024 units of 16 MiB each way, and an unmap
// waits for what the bus was given: a swap took 471 to 547 ms, and 350 to 450 with these. Not
// those of several blocks where blocks come and go, nor in a tag's space.
void ComingChunks::join_units(std::size_t unit) {
  Places& gone = asleep_.gone;
  const std::size_t window = std::min(unit * kJoinedUnits, kMostJoinedUnits);
  const bool joins_several = growth_.holds_what_stays() && !kind_.is_of_tag;
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
    block = blocks_.covering_from(block, at->first);
    while (block != nullptr && block->state == BlockState::used && block->end() < end && joins_several) {
      block = block->next;
    }
    if (block == nullptr || block->state != BlockState::used || block->end() < end) continue;
    at->second.size = window;
    gone.erase(std::next(at), last);
  }
}

// Where all of a chunk that is to come comes from; nullptr: it was thrown away.
const Backup* ComingChunks::source_of(Places::const_iterator at) const {
  const std::vector<KeptRange> kept = asleep_.kept.within({at->first, at->second.size});
  return kept.empty() ? nullptr : kept.front().backup.get();
}

// So many bytes of several blocks share one chunk: of what stays, and where contents come no more
// than is copied at once. What is freed of it later goes to nobody while some of it is in use.
std::size_t ComingChunks::most_of_several(BlockState state, const Backup* source) const {
  if (kind_.is_of_tag) return 0;
  const bool is_kept = source != nullptr;
  const std::size_t shared = state == BlockState::slab ? growth_.slabs_of_what_stays(kind_.is_contested) * kSlabBytes
                                                       : growth_.shared_by_what_stays(kind_.is_contested, is_kept);
  return std::min(shared, source == nullptr ? kMostJoinedEmpty : source->piece_bytes());
}

// 0: none is.
std::size_t ComingChunks::least_alone() const {
  const std::size_t shared = most_of_several(BlockState::used, nullptr);
  return shared - shared / kSharedPerOthers;
}

// The pages of a block that is alone, but those that it shares: with a small one they are in that
// one's chunk, with a large one in the lower one's, which goes once both are free (by themselves
// they would be up to a chunk more for each). Empty: of a small one.
ByteRange ComingChunks::own_pages(const Block& block) const {
  const std::size_t alone = least_alone();
  const auto is_used = [](const Block* each) { return each != nullptr && each->state == BlockState::used; };
  const auto is_large = [alone](const Block& each) { return alone != 0 && each.size() >= alone; };
  if (!is_used(&block) || !is_large(block)) return {block.offset, 0};
  const Block* before = block.prev;
  while (before != nullptr && before->is_nobodys()) before = before->prev;
  const Block* after = block.next;
  while (after != nullptr && after->is_nobodys()) after = after->next;
  const std::size_t first_page = align_down(block.offset, kind_.page);
  const std::size_t last_end = align_up(block.end(), kind_.page);
  const bool shares_first = is_used(before) && before->end() > first_page;
  const bool shares_last = is_used(after) && !is_large(*after) && after->offset < last_end;
  const std::size_t begin = shares_first ? align_up(block.offset, kind_.page) : first_page;
  const std::size_t end = shares_last ? align_down(block.end(), kind_.page) : last_end;
  return {begin, end - std::min(begin, end)};
}

// Where such pages begin and end, chunks do.
void ComingChunks::cut_around_large() {
  if (least_alone() == 0) return;
  const Block* block = nullptr;
  for (auto at = asleep_.gone.begin(); at != asleep_.gone.end(); ++at) {
    block = blocks_.covering_from(block, at->first);
    for (const Block* each = block; each != nullptr && each->offset < at->first + at->second.size; each = each->next) {
      const ByteRange own = own_pages(*each);
      if (own.size == 0) continue;
      for (const std::size_t border : {own.offset, own.end()}) {
        if (border <= at->first || border >= at->first + at->second.size) continue;
        cut_place(at, border);
        ++at;
      }
    }
  }
}

// A model comes back in few chunks, as what unmaps and maps it costs by the chunk. A block that
// was live and is again stays, so those that are in it alone become one: 16 GiB in blocks of 256
// MiB are some 300 when they are loaded, and 64 once they have slept. So do those of several, as
// far as they may share one. (What has come back so stays so: it is cut where it is free.)
void ComingChunks::join_blocks() {
  cut_around_large();
  Places& gone = asleep_.gone;
  const Block* block = nullptr;
  for (auto at = gone.begin(); at != gone.end(); ++at) {
    auto next = std::next(at);
    if (next == gone.end() || next->first != at->first + at->second.size) continue;
    block = blocks_.covering_from(block, at->first);
    if (block == nullptr || (block->state != BlockState::used && block->state != BlockState::slab)) continue;
    const Block* const first = block;
    // What was sealed slice by slice may be unsealed so.
    if (at->second.is_read_only && !asleep_.has_gone_read_only(first->range())) continue;
    const Backup* const source = source_of(at);
    const bool is_empty = source == nullptr && !kind_.is_of_tag && !kind_.is_contested;
    const std::size_t most_of_one = is_empty ? kMostJoinedEmpty : kMostJoined;
    const std::size_t most = most_of_several(first->state, source);
    const std::size_t end_of_first = std::max(first->end(), own_pages(*first).end());
    const auto is_alone_before = [&](std::size_t end, const Block& each) {
      const ByteRange own = own_pages(each);
      return own.size != 0 && at->first < own.end() && end > own.offset;
    };
    for (; next != gone.end() && next->first == at->first + at->second.size; next = gone.erase(next)) {
      const std::size_t joined = at->second.size + next->second.size;
      const std::size_t end = at->first + joined;
      const bool is_in_one = end <= end_of_first;
      if (joined > (is_in_one ? most_of_one : most) || (!is_in_one && is_alone_before(end, *first))) break;
      if (!next->second.is_like(at->second) || source_of(next) != source) break;
      const auto may_be_there = [&](const Block* each) {
        return each != nullptr && each->state == first->state && (is_in_one || !is_alone_before(end, *each));
      };
      while (block->end() < end && may_be_there(block->next)) block = block->next;
      if (block->end() < end || !may_be_there(block)) break;  // what is free in it would stay with what is not
      at->second.size = joined;
    }
  }
}

}  // namespace vmm
