// The small blocks of one stream: split and coalesced within slabs, best fit over all of
// them. A BlockHeap without what large blocks need (tags, borders, an order by offset): a
// small block that comes and goes took two fifths fewer instructions so.
//
// The block at the start of a slab is the same one for as long as the slab is cut: of two
// that become one the lower stays. So who knows the slab knows where to begin.
#pragma once

#include <algorithm>
#include <cstddef>

#include "base/check.h"
#include "core/blocks/block.h"
#include "core/blocks/block_arena.h"
#include "core/blocks/size_bins.h"

namespace vmm {

inline constexpr std::size_t kSlabBytes = 2 * kMiB;

class SmallHeap {
 public:
  // The blocks' tag.
  SmallHeap(BlockArena& arena, StreamTag tag) : arena_(arena), tag_(tag) {}
  SmallHeap(const SmallHeap&) = delete;
  SmallHeap& operator=(const SmallHeap&) = delete;

  // Blocks are cut from the slab at `offset` from now on. Returns its first: all of it, free.
  Block* donate(std::size_t offset);
  // The slab is somebody else's again. REQUIRES: `whole` is all of it, and free.
  void retract(Block* whole);
  [[nodiscard]] static bool is_whole(const Block& block) { return block.units() == kSlabBytes / kBlockAlignment; }

  // The smallest free block of `size` bytes or more, the one freed last among its equals;
  // or nullptr.
  [[nodiscard]] Block* best_fit(std::size_t size) const {
    const std::size_t bin = bins_.filled_from(bin_of(size));
    return bin == kBins ? nullptr : bins_.first(bin);
  }
  // Makes the first `size` bytes of a free block a block of their own, used.
  Block* cut(Block* free, std::size_t size) {
    VMM_CHECK(free->state == BlockState::free && size <= free->size(), "cutting ", size, " out of ", free->offset, "+",
              free->size());
    const auto units = static_cast<std::uint32_t>(size / kBlockAlignment);
    if (free->units() == units) {
      bins_.erase(bin_of(*free), free);
    } else {
      Block* const rest = split(free, units);
      bins_.insert(bin_of(*rest), rest);
    }
    --free_count_;
    free->requested = 0;
    free->state = BlockState::used;
    return free;
  }
  // The same from `offset` on. Throws std::bad_alloc, and nothing has changed.
  Block* cut_at(Block* free, std::size_t offset, std::size_t size);
  // Frees and coalesces; returns the free block that now holds it.
  Block* free(Block* block, Epoch epoch) {
    VMM_CHECK(block->state != BlockState::free && block->recorded == 0, "freeing the block at ", block->offset,
              ", which is free, or whose recorded uses have not ended");
    block->state = BlockState::free;
    block->epoch = epoch;
    ++free_count_;
    if (Block* const upper = block->next; upper != nullptr && upper->state == BlockState::free) {
      bins_.erase(bin_of(*upper), upper);
      absorb(block, upper);
    }
    if (Block* const lower = block->prev; lower != nullptr && lower->state == BlockState::free) {
      bins_.erase(bin_of(*lower), lower);
      absorb(lower, block);
      block = lower;
    }
    bins_.insert(bin_of(*block), block);
    return block;
  }

  [[nodiscard]] std::size_t free_count() const { return free_count_; }  // free blocks
  // Proves that the blocks from `first` on tile a slab and that the free ones can be
  // found. Walks it. Returns how many of them are free.
  std::size_t check(const Block* first) const;

 private:
  static constexpr std::size_t kBins = kSlabBytes / kBlockAlignment;  // one for every size
  static std::size_t bin_of(std::size_t size) { return size / kBlockAlignment - 1; }
  static std::size_t bin_of(const Block& block) { return block.units() - std::size_t{1}; }

  // Splits a free block behind its first `units`; returns the upper part. Neither
  // stands in a bin then. Throws std::bad_alloc, and nothing has changed.
  Block* split(Block* free, std::uint32_t units) {
    Block* const upper = arena_.make();
    bins_.erase(bin_of(*free), free);
    upper->offset = free->offset + units * kBlockAlignment;
    upper->set_units(free->units() - units);
    upper->epoch = free->epoch;
    upper->tag = tag_;
    upper->small = true;
    upper->prev = free;
    Block* const next = free->next;
    upper->next = next;
    if (next != nullptr) next->prev = upper;
    free->next = upper;
    free->set_units(units);
    ++free_count_;
    return upper;
  }
  // `upper`, which stands in no bin, becomes part of its neighbour.
  void absorb(Block* lower, Block* upper) {
    --free_count_;
    lower->set_units(lower->units() + upper->units());
    lower->epoch = std::max<Epoch>(lower->epoch, upper->epoch);
    Block* const next = upper->next;
    lower->next = next;
    if (next != nullptr) next->prev = lower;
    arena_.recycle(upper);
  }

  BlockArena& arena_;
  const StreamTag tag_;
  SizeBins<kBins> bins_;
  std::size_t free_count_ = 0;
};

}  // namespace vmm
