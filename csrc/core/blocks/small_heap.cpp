#include "core/blocks/small_heap.h"

namespace vmm {

Block* SmallHeap::donate(std::size_t offset) {
  bins_.prepare();
  Block* const whole = arena_.make();
  whole->offset = offset;
  whole->set_size(kSlabBytes);
  whole->epoch = kLongAgo;
  whole->tag = tag_;
  whole->small = true;
  bins_.insert(bin_of(kSlabBytes), whole);
  ++free_count_;
  return whole;
}

void SmallHeap::retract(Block* whole) {
  VMM_CHECK(whole->state == BlockState::free && is_whole(*whole), "retracting a slab in use at ", whole->offset);
  bins_.erase(bin_of(kSlabBytes), whole);
  --free_count_;
  arena_.recycle(whole);
}

Block* SmallHeap::cut_at(Block* free, std::size_t offset, std::size_t size) {
  if (offset == free->offset) return cut(free, size);
  Block* const upper = split(free, static_cast<std::uint32_t>((offset - free->offset) / kBlockAlignment));
  bins_.insert(bin_of(*free), free);
  bins_.insert(bin_of(*upper), upper);
  try {
    return cut(upper, size);
  } catch (...) {
    bins_.erase(bin_of(*free), free);
    bins_.erase(bin_of(*upper), upper);
    absorb(free, upper);
    bins_.insert(bin_of(*free), free);
    throw;
  }
}

std::size_t SmallHeap::check(const Block* first) const {
  const std::size_t end = first->offset + kSlabBytes;
  VMM_CHECK(first->prev == nullptr, "a block below the slab at ", first->offset);
  std::size_t free = 0;
  std::size_t at = first->offset;
  for (const Block* block = first; block != nullptr; at = block->end(), block = block->next) {
    VMM_CHECK(block->offset == at && block->size() != 0 && block->end() <= end && block->small && block->tag == tag_,
              "a small block at ", block->offset, "+", block->size(), " of tag ", block->tag, ", expected at ", at);
    VMM_CHECK(block->next == nullptr || block->next->prev == block, "neighbours of the block at ", block->offset);
    if (block->state != BlockState::free) continue;
    ++free;
    VMM_CHECK(block->next == nullptr || block->next->state != BlockState::free, "not coalesced at ", block->end());
    VMM_CHECK(bins_.holds(bin_of(block->size()), block), "the free block at ", block->offset, " is in no bin");
    const Block* fit = best_fit(block->size());
    VMM_CHECK(fit != nullptr && fit->size() == block->size(), "best fit misses ", block->offset);
  }
  VMM_CHECK(at == end, "the blocks of the slab that ends at ", end, " end at ", at);
  return free;
}

}  // namespace vmm
