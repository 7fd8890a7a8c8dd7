#include "core/blocks/block_heap.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace vmm {

namespace {

// Sizes that first_fit() remembers; a program asks for a few.
constexpr std::size_t kMostRemembered = 64;
// Blocks of other tags beside a freed one that are looked at; more are seldom.
constexpr int kMostBeside = 8;

// Where `size` bytes begin in free [begin, end), or `end`.
std::size_t place_in(std::size_t begin, std::size_t end, std::size_t size, std::size_t grain) {
  const std::size_t at = align_up(begin, grain);
  return at < end && end - at >= size ? at : end;
}

}  // namespace

// ---------------------------------------------------------------- FreeIndex

Block* FreeIndex::smallest_in(std::size_t bin, std::size_t size, int most_compared) const {
  Block* best = nullptr;
  for (Block* block = ranges_.first(bin); block != nullptr && most_compared-- != 0; block = block->bin_next) {
    if (block->size() < size) continue;
    if (best == nullptr || block->size() < best->size() ||
        (block->size() == best->size() && block->offset < best->offset)) {
      best = block;
    }
  }
  return best;
}

Block* FreeIndex::best_fit(std::size_t size) const {
  if (size < kLargeBytes) {
    const std::size_t bin = exact_.filled_from(size / kBlockAlignment);
    if (bin != kExactBins) return exact_.first(bin);
    size = kLargeBytes;
  }
  const std::size_t own = range_bin(size);
  std::size_t bin = ranges_.filled_from(own);
  if (bin == own) {
    if (Block* block = smallest_in(own, size, kMostCompared)) return block;
    bin = ranges_.filled_from(own + 1);
    if (bin == kRangeBins) return smallest_in(own, size, -1);
  }
  return bin == kRangeBins ? nullptr : smallest_in(bin, size, kMostCompared);
}

bool FreeIndex::holds(const Block* block) const {
  return block->size() < kLargeBytes ? exact_.holds(block->size() / kBlockAlignment, block)
                                     : ranges_.holds(range_bin(block->size()), block);
}

// ---------------------------------------------------------------- BlockHeap

void BlockHeap::make_index(StreamTag tag) {
  if (index_.size() <= tag) index_.resize(tag + std::size_t{1});
  auto fresh = std::make_unique<FreeIndex>();
  fresh->prepare(is_fine_);
  index_[tag] = std::move(fresh);
}

void BlockHeap::make_fine() {
  for (const auto& index : index_) {
    if (index != nullptr) index->prepare(/*fine=*/true);
  }
  is_fine_ = true;
}

void BlockHeap::set_free(Block* block, StreamTag tag, Epoch epoch) {
  block->state = BlockState::free;
  block->tag = tag;
  block->epoch = epoch;
  index_[tag]->insert(block);
  if (free_) free_->insert(block);
}

void BlockHeap::clear_free(Block* block) {
  index_[block->tag]->erase(block);
  if (free_) free_->erase(block);
}

// A free block's ends change: it keeps its place among the others.
void BlockHeap::resize(Block* free, ByteRange was, ByteRange now) {
  FreeIndex& bins = *index_[free->tag];
  bins.erase(free, was.size);
  free->offset = now.offset;
  free->set_size(now.size);
  bins.insert(free, now.size);
  if (free_) free_->moved(free, was.end(), now.end());
}

void BlockHeap::insert_after(Block* at, Block* fresh) {
  fresh->prev = at;
  fresh->next = at->next;
  if (fresh->next != nullptr) fresh->next->prev = fresh;
  at->next = fresh;
}

void BlockHeap::unlink(Block* block) {
  if (block->prev != nullptr) {
    block->prev->next = block->next;
  } else {
    // The first of its stretch: the stretch now begins with the next one.
    const auto at = std::find(stretches_.begin(), stretches_.end(), block);
    if (at != stretches_.end()) {
      if (block->next != nullptr) {
        *at = block->next;
      } else {
        stretches_.erase(at);
      }
    }
  }
  if (block->next != nullptr) block->next->prev = block->prev;
  arena_.recycle(block);
}

Block* BlockHeap::donate(ByteRange range, StreamTag tag) {
  prepare(tag);
  note_borders(range.offset | range.size);
  Block* block = arena_.make();
  block->offset = range.offset;
  block->set_size(range.size);
  const auto at = std::lower_bound(stretches_.begin(), stretches_.end(), range.offset,
                                   [](const Block* a, std::size_t offset) { return a->offset < offset; });
  stretches_.insert(at, block);
  set_free(block, tag, 0);
  none_below_.clear();
  return block;
}

void BlockHeap::retract(Block* block) {
  VMM_CHECK(block->state == BlockState::free && block->prev == nullptr && block->next == nullptr,
            "retracting a stretch in use at ", block->offset);
  clear_free(block);
  unlink(block);
}

Block* BlockHeap::carve(Block* free, std::size_t offset, std::size_t size, BlockState state) {
  const ByteRange whole = free->range();
  VMM_CHECK(free->state == BlockState::free && whole.offset <= offset && offset + size <= whole.end(), "carving ",
            offset, "+", size, " out of ", whole.offset, "+", whole.size);
  const StreamTag tag = free->tag;
  const Epoch epoch = free->epoch;
  const std::size_t above = whole.end() - (offset + size);
  const bool is_lowest = offset == whole.offset;
  // Whatever is to be made is made before anything changes: there may be no memory for it.
  note_borders(offset | size);
  const bool stays_free = !is_lowest || above != 0;
  Block* block = stays_free ? arena_.make() : free;
  Block* rest = nullptr;
  if (above != 0 && !is_lowest) {
    try {
      rest = arena_.make();
    } catch (...) {
      arena_.recycle(block);
      throw;
    }
  }
  if (!stays_free) {
    clear_free(free);
  } else if (!is_lowest) {
    resize(free, whole, {whole.offset, offset - whole.offset});
    insert_after(free, block);
  } else {
    resize(free, whole, {offset + size, above});
    if (free->prev != nullptr) {
      insert_after(free->prev, block);
    } else {
      *std::find(stretches_.begin(), stretches_.end(), free) = block;
      block->next = free;
      free->prev = block;
    }
  }
  block->offset = offset;
  block->set_size(size);
  block->requested = 0;
  block->state = state;
  block->tag = tag;
  taken_bytes_ += size;
  if (rest != nullptr) {
    rest->offset = offset + size;
    rest->set_size(above);
    insert_after(block, rest);
    set_free(rest, tag, epoch);
  }
  return block;
}

Block* BlockHeap::split(Block* block, std::size_t offset) {
  VMM_CHECK(block->state != BlockState::free && block->offset < offset && offset < block->end(), "split at ", offset);
  note_borders(offset);
  Block* upper = arena_.make();
  upper->offset = offset;
  upper->set_size(block->end() - offset);
  upper->state = BlockState(block->state);
  upper->tag = block->tag;
  block->set_size(offset - block->offset);
  insert_after(block, upper);
  return upper;
}

void BlockHeap::prepare_splits(std::size_t offsets) {
  note_borders(offsets);
  Block* const one = arena_.make();
  Block* two = nullptr;
  try {
    two = arena_.make();
  } catch (...) {
    arena_.recycle(one);
    throw;
  }
  arena_.recycle(two);
  arena_.recycle(one);
}

void BlockHeap::join(Block* lower, Block* upper) {
  VMM_CHECK(lower->next == upper && lower->state != BlockState::free && upper->state != BlockState::free, "joining ",
            lower->offset, " and ", upper->offset);
  lower->set_size(lower->size() + upper->size());
  unlink(upper);
}

bool BlockHeap::is_border(std::size_t offset) const { return borders_.count(offset) != 0; }

void BlockHeap::add_border(std::size_t offset) {
  Block* lower = free_covering(offset);
  const bool splits = lower != nullptr && lower->offset != offset;
  note_borders(offset);
  Block* upper = splits ? arena_.make() : nullptr;
  borders_.insert(offset);
  if (!splits) return;
  const ByteRange whole = lower->range();
  upper->offset = offset;
  upper->set_size(whole.end() - offset);
  resize(lower, whole, {whole.offset, offset - whole.offset});
  insert_after(lower, upper);
  set_free(upper, lower->tag, lower->epoch);
}

Block* BlockHeap::free(Block* block, StreamTag tag, Epoch epoch) {
  VMM_CHECK(block->state != BlockState::free && block->recorded == 0, "freeing the block at ", block->offset,
            ", which is free, or whose recorded uses have not ended");
  prepare(tag);
  ByteRange joined = block->range();
  taken_bytes_ -= joined.size;
  Block* const lower = coalesces(block->prev, tag, joined.offset) ? block->prev : nullptr;
  Block* const upper = coalesces(block->next, tag, joined.end()) ? block->next : nullptr;
  Block* stays = block;
  if (lower == nullptr && upper == nullptr) {
    set_free(block, tag, epoch);
  } else {
    // Whose end stays where it is keeps its place in the order.
    stays = upper != nullptr ? upper : lower;
    const ByteRange was = stays->range();
    joined = {std::min(was.offset, joined.offset), was.size + joined.size};
    if (lower != nullptr && upper != nullptr) {
      joined = {lower->offset, lower->size() + joined.size};
      epoch = std::max<Epoch>(epoch, lower->epoch);
      clear_free(lower);
      unlink(lower);
    }
    stays->epoch = std::max<Epoch>(stays->epoch, epoch);
    resize(stays, was, joined);
    block->state = BlockState::free;
    unlink(block);
  }
  if (!none_below_.empty()) note_run(stays);
  return stays;
}

// A run of free blocks has come to be, or has grown: what it can hold begins there.
void BlockHeap::note_run(const Block* block) {
  std::size_t begin = block->offset;
  std::size_t end = block->end();
  int beside = 0;
  for (const Block* at = block->prev; at != nullptr && at->state == BlockState::free; at = at->prev) {
    begin = at->offset;
    if (++beside > kMostBeside) begin = 0;
    if (begin == 0) break;
  }
  for (const Block* at = block->next; at != nullptr && at->state == BlockState::free; at = at->next) {
    end = at->end();
    if (++beside > kMostBeside) end = kUnlimited;
    if (end == kUnlimited) break;
  }
  for (auto& [size, none_below] : none_below_) {
    if (size > end - begin) break;
    none_below = std::min(none_below, begin);
  }
}

// The last of the neighbours from `first` on that are free, of whatever tags.
const Block* BlockHeap::last_of_run(const Block* first) {
  while (first->next != nullptr && first->next->state == BlockState::free) first = first->next;
  return first;
}

std::optional<std::size_t> BlockHeap::first_fit(std::size_t size, std::size_t grain) {
  grain_ = grain;
  if (none_below_.size() >= kMostRemembered && none_below_.count(size) == 0) none_below_.clear();
  std::size_t& none_below = none_below_[size];
  const Block* first = free_->from(none_below);
  while (first != nullptr) {
    const Block* const last = last_of_run(first);
    const std::size_t end = last->end();
    const std::size_t at = place_in(first->offset, end, size, grain);
    if (at != end) {
      none_below = first->offset;
      return at;
    }
    first = free_->next(last);
  }
  none_below = kUnlimited;
  return std::nullopt;
}

void BlockHeap::retag(StreamTag tag) {
  std::vector<Block*> others;
  for (Block* block : *free_) {
    if (block->tag != tag && block->tag != kNeutral) others.push_back(block);
  }
  // One that has got its tag may be absorbed by the next; one that still waits
  // for it never is.
  for (Block* block : others) {
    const Epoch epoch = block->epoch;
    clear_free(block);
    block->state = BlockState::used;
    taken_bytes_ += block->size();
    free(block, tag, epoch);
  }
}

Block* BlockHeap::free_covering(std::size_t offset) const {
  Block* const at = free_->from(offset);
  return at != nullptr && at->offset <= offset ? at : nullptr;
}

Block* BlockHeap::covering(std::size_t offset) const {
  Block* at = nullptr;
  for (Block* stretch : stretches_) {
    if (stretch->offset <= offset) at = stretch;
  }
  Block* const below = free_->below(offset);
  if (at != nullptr && below != nullptr && below->offset > at->offset) at = below;
  while (at != nullptr && at->end() <= offset) at = at->next;
  return at;
}

const Block* BlockHeap::covering_from(const Block* at, std::size_t offset) const {
  if (at == nullptr || at->offset > offset) return covering(offset);
  while (at != nullptr && at->end() <= offset) at = at->next;
  return at != nullptr ? at : covering(offset);  // in another stretch
}

void BlockHeap::check() const {
  std::size_t free_seen = 0;
  std::size_t taken = 0;
  std::size_t last_end = 0;
  const Block* last_free = nullptr;
  for (Block* first : stretches_) {
    VMM_CHECK(first->prev == nullptr && first->offset >= last_end, "stretch at ", first->offset);
    for (const Block* block = first; block != nullptr; block = block->next) {
      VMM_CHECK(block->size() != 0 && block->size() % kBlockAlignment == 0, "block at ", block->offset);
      if (block->next != nullptr) {
        VMM_CHECK(block->next->prev == block && block->next->offset == block->end(), "gap after ", block->offset);
        VMM_CHECK(block->state != BlockState::free || !coalesces(block->next, block->tag, block->end()),
                  "not coalesced at ", block->offset);
      }
      last_end = block->end();
      if (block->state != BlockState::free) {
        taken += block->size();
        continue;
      }
      ++free_seen;
      VMM_CHECK(!free_ || free_covering(block->offset) == block, "free block at ", block->offset, " is not found");
      VMM_CHECK(!free_ || free_->prev(block) == last_free, "out of order at ", block->offset);
      VMM_CHECK(!free_ || last_free == nullptr || free_->next(last_free) == block, "out of order at ", block->offset);
      last_free = block;
      Block* fit = best_fit(block->size(), block->tag);
      VMM_CHECK(index_[block->tag]->holds(block), "the free block at ", block->offset, " is in no bin");
      VMM_CHECK(fit != nullptr && fit->size() >= block->size() && fit->size() - block->size() <= block->size() / 16,
                "best fit misses ", block->offset);
    }
  }
  VMM_CHECK(!free_ || free_seen == free_->size(), "free blocks: walked ", free_seen);
  VMM_CHECK(!free_ || (free_->last() == last_free && free_->below(kUnlimited - 1) == last_free), "the last free block");
  VMM_CHECK(taken == taken_bytes_, "taken: walked ", taken, ", counted ", taken_bytes_);
  for (const auto& [size, none_below] : none_below_) {
    for (const Block* first = free_->first(); first != nullptr && first->offset < none_below;) {
      const Block* const last = last_of_run(first);
      VMM_CHECK(place_in(first->offset, last->end(), size, grain_) == last->end(), size, " bytes fit at ",
                first->offset, ", below ", none_below);
      first = free_->next(last);
    }
  }
}

}  // namespace vmm
