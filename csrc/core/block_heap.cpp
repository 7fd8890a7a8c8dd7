#include "core/block_heap.h"

#include <algorithm>

#include "base/check.h"

namespace vmm {

Block* BlockArena::make() {
  if (free_.empty()) return &blocks_.emplace_back();
  Block* block = free_.back();
  free_.pop_back();
  return block;
}

void BlockArena::recycle(Block* block) {
  *block = Block();
  free_.push_back(block);
}

// ---------------------------------------------------------------- FreeIndex

void FreeIndex::insert(Block* block) {
  const std::size_t bin = block->size / kBlockAlignment;
  if (bin >= kBins) {
    large_nodes_.insert(large_, block);
    return;
  }
  if (bins_ == nullptr) bins_ = std::make_unique<Bins>();
  Block*& first = (*bins_)[bin];
  block->bin_prev = nullptr;
  block->bin_next = first;
  if (first != nullptr) first->bin_prev = block;
  first = block;
  filled_[bin / 64] |= std::uint64_t{1} << (bin % 64);
  words_filled_ |= std::uint64_t{1} << (bin / 64);
}

void FreeIndex::erase(Block* block) {
  const std::size_t bin = block->size / kBlockAlignment;
  if (bin >= kBins) {
    large_nodes_.erase(large_, block);
    return;
  }
  if (block->bin_next != nullptr) block->bin_next->bin_prev = block->bin_prev;
  if (block->bin_prev != nullptr) {
    block->bin_prev->bin_next = block->bin_next;
  } else {
    (*bins_)[bin] = block->bin_next;
    if ((*bins_)[bin] == nullptr) {
      filled_[bin / 64] &= ~(std::uint64_t{1} << (bin % 64));
      if (filled_[bin / 64] == 0) words_filled_ &= ~(std::uint64_t{1} << (bin / 64));
    }
  }
  block->bin_prev = block->bin_next = nullptr;
}

Block* FreeIndex::best_fit(std::size_t size) const {
  static_assert(kWords <= 64, "one summary word must cover the bitmap");
  const std::size_t bin = size / kBlockAlignment;
  if (bin < kBins) {
    const std::size_t word = bin / 64;
    std::uint64_t bits = filled_[word] & (~std::uint64_t{0} << (bin % 64));
    if (bits != 0) return (*bins_)[word * 64 + static_cast<std::size_t>(__builtin_ctzll(bits))];
    const std::uint64_t later = word == 63 ? 0 : words_filled_ & (~std::uint64_t{0} << (word + 1));
    if (later != 0) {
      const auto found = static_cast<std::size_t>(__builtin_ctzll(later));
      return (*bins_)[found * 64 + static_cast<std::size_t>(__builtin_ctzll(filled_[found]))];
    }
  }
  Block key;
  key.size = size;
  const auto at = large_.lower_bound(&key);
  return at == large_.end() ? nullptr : *at;
}

// ---------------------------------------------------------------- BlockHeap

FreeIndex& BlockHeap::index(StreamTag tag) {
  if (index_.size() <= tag) index_.resize(tag + std::size_t{1});
  if (index_[tag] == nullptr) index_[tag] = std::make_unique<FreeIndex>();
  return *index_[tag];
}

void BlockHeap::set_free(Block* block, StreamTag tag, Epoch epoch) {
  block->state = BlockState::free;
  block->tag = tag;
  block->epoch = epoch;
  block->requested = 0;
  ++free_count_;
  index(tag).insert(block);
  if (by_offset_) free_nodes_.insert(free_, block);
}

void BlockHeap::clear_free(Block* block) {
  --free_count_;
  index(block->tag).erase(block);
  if (by_offset_) free_nodes_.erase(free_, block);
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
  Block* block = arena_.make();
  block->offset = range.offset;
  block->size = range.size;
  const auto at = std::lower_bound(stretches_.begin(), stretches_.end(), range.offset,
                                   [](const Block* a, std::size_t offset) { return a->offset < offset; });
  stretches_.insert(at, block);
  set_free(block, tag, 0);
  return block;
}

void BlockHeap::retract(Block* block) {
  VMM_CHECK(block->state == BlockState::free && block->prev == nullptr && block->next == nullptr,
            "retracting a stretch in use at ", block->offset);
  clear_free(block);
  unlink(block);
}

Block* BlockHeap::best_fit(std::size_t size, StreamTag tag) const {
  return tag < index_.size() && index_[tag] != nullptr ? index_[tag]->best_fit(size) : nullptr;
}

Block* BlockHeap::carve(Block* free, std::size_t offset, std::size_t size, BlockState state) {
  VMM_CHECK(free->state == BlockState::free && free->offset <= offset && offset + size <= free->end(), "carving ",
            offset, "+", size, " out of ", free->offset, "+", free->size);
  const StreamTag tag = free->tag;
  const Epoch epoch = free->epoch;
  clear_free(free);
  if (const std::size_t above = free->end() - (offset + size); above != 0) {
    Block* rest = arena_.make();
    rest->offset = offset + size;
    rest->size = above;
    rest->small = free->small;
    insert_after(free, rest);
    set_free(rest, tag, epoch);
    free->size -= above;
  }
  Block* block = free;
  if (offset != free->offset) {
    block = arena_.make();
    block->offset = offset;
    block->size = size;
    block->small = free->small;
    insert_after(free, block);
    free->size = offset - free->offset;
    set_free(free, tag, epoch);
  }
  block->state = state;
  block->tag = tag;
  block->epoch = epoch;
  taken_bytes_ += size;
  return block;
}

Block* BlockHeap::split(Block* block, std::size_t offset) {
  VMM_CHECK(block->state != BlockState::free && block->offset < offset && offset < block->end(), "split at ", offset);
  Block* upper = arena_.make();
  upper->offset = offset;
  upper->size = block->end() - offset;
  upper->state = block->state;
  upper->tag = block->tag;
  upper->epoch = block->epoch;
  upper->small = block->small;
  block->size = offset - block->offset;
  insert_after(block, upper);
  return upper;
}

void BlockHeap::join(Block* lower, Block* upper) {
  VMM_CHECK(lower->next == upper && lower->state != BlockState::free && upper->state != BlockState::free, "joining ",
            lower->offset, " and ", upper->offset);
  lower->size += upper->size;
  lower->epoch = std::max(lower->epoch, upper->epoch);
  unlink(upper);
}

bool BlockHeap::coalesces(const Block* a, const Block* b) {
  return a != nullptr && b != nullptr && a->state == BlockState::free && b->state == BlockState::free &&
         a->tag == b->tag;
}

Block* BlockHeap::free(Block* block, StreamTag tag, Epoch epoch) {
  taken_bytes_ -= block->size;
  VMM_CHECK(block->state != BlockState::free, "freeing free block at ", block->offset);
  block->state = BlockState::free;
  block->tag = tag;
  block->epoch = epoch;
  const auto absorb = [this](Block* lower, Block* upper) {
    lower->size += upper->size;
    lower->epoch = std::max(lower->epoch, upper->epoch);
    unlink(upper);
  };
  if (coalesces(block->prev, block)) {
    Block* lower = block->prev;
    clear_free(lower);
    absorb(lower, block);
    block = lower;
  }
  if (coalesces(block, block->next)) {
    clear_free(block->next);
    absorb(block, block->next);
  }
  set_free(block, block->tag, block->epoch);
  return block;
}

void BlockHeap::retag(StreamTag tag) {
  std::vector<Block*> others;
  for (Block* block : free_) {
    if (block->tag != tag && block->tag != kNeutral) others.push_back(block);
  }
  // One that has got its tag may be absorbed by the next; one that still waits
  // for it never is.
  for (Block* block : others) {
    clear_free(block);
    block->state = BlockState::used;
    taken_bytes_ += block->size;
    free(block, tag, block->epoch);
  }
}

Block* BlockHeap::free_covering(std::size_t offset) const {
  auto at = free_.upper_bound(offset);
  if (at == free_.begin()) return nullptr;
  --at;
  return (*at)->end() > offset ? *at : nullptr;
}

void BlockHeap::check() const {
  std::size_t free_seen = 0;
  std::size_t taken = 0;
  std::size_t last_end = 0;
  for (Block* first : stretches_) {
    VMM_CHECK(first->prev == nullptr && first->offset >= last_end, "stretch at ", first->offset);
    for (const Block* block = first; block != nullptr; block = block->next) {
      VMM_CHECK(block->size != 0 && block->size % kBlockAlignment == 0, "block at ", block->offset);
      if (block->next != nullptr) {
        VMM_CHECK(block->next->prev == block && block->next->offset == block->end(), "gap after ", block->offset);
        VMM_CHECK(!coalesces(block, block->next), "not coalesced at ", block->offset);
      }
      last_end = block->end();
      if (block->state != BlockState::free) {
        taken += block->size;
        continue;
      }
      ++free_seen;
      VMM_CHECK(!by_offset_ || free_covering(block->offset) == block, "free block at ", block->offset,
                " is not indexed");
      Block* fit = best_fit(block->size, block->tag);
      VMM_CHECK(fit != nullptr && fit->size == block->size, "best fit misses ", block->offset);
    }
  }
  VMM_CHECK(free_seen == free_count_ && (!by_offset_ || free_seen == free_.size()), "free blocks: walked ", free_seen,
            ", counted ", free_count_, ", indexed ", free_.size());
  VMM_CHECK(taken == taken_bytes_, "taken: walked ", taken, ", counted ", taken_bytes_);
}

}  // namespace vmm
