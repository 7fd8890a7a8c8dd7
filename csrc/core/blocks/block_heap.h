// Pure offsets: split, coalesce, best fit over one or several stretches of
// offsets, with holes. It never knows an address, a chunk or a lock.
//
// Free space carries a tag and coalesces only with its like. A pool's tags are
// the streams that used the memory last; neutral space (tag 0) is bare, with no
// memory under it. So whatever best_fit() finds for a stream has all its memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "base/units.h"
#include "core/blocks/block.h"
#include "core/blocks/block_arena.h"
#include "core/blocks/free_by_offset.h"
#include "core/blocks/size_bins.h"

namespace vmm {

// Free blocks by size, in bins with a bitmap: below 2 MiB one for every size, above
// 32 for every doubling. A large pair in an ordered set took 2.5 times as long.
class FreeIndex {
 public:
  // insert() asks for no memory from now on; of blocks below 2 MiB where they are `fine`.
  void prepare(bool fine) {
    ranges_.prepare();
    if (fine) exact_.prepare();
  }
  void insert(Block* block) { insert(block, block->size()); }
  // REQUIRES: it stands there.
  void erase(Block* block) { erase(block, block->size()); }
  // The same, of one with `size` bytes.
  [[gnu::always_inline]] void insert(Block* block, std::size_t size) {
    if (size < kLargeBytes) {
      exact_.insert(size / kBlockAlignment, block);
    } else {
      ranges_.insert(range_bin(size), block);
    }
  }
  [[gnu::always_inline]] void erase(Block* block, std::size_t size) {
    if (size < kLargeBytes) {
      exact_.erase(size / kBlockAlignment, block);
    } else {
      ranges_.erase(range_bin(size), block);
    }
  }
  // The smallest block of at least `size` bytes, lowest offset first, or nullptr.
  // From 2 MiB on where a bin holds more than kMostCompared: one that is larger by
  // a 32nd at the most than the smallest, if any is.
  [[nodiscard]] Block* best_fit(std::size_t size) const;
  // Calls `each(block)` for the blocks of 2 MiB and more, the largest first,
  // until it returns false. Of one bin they come in no order.
  template <typename Each>
  void for_largest(const Each& each) const;
  // The same for those of at least `size` bytes, the smallest first.
  template <typename Each>
  void for_smallest(std::size_t size, const Each& each) const;
  // Whether the block stands in its bin. Walks that.
  [[nodiscard]] bool holds(const Block* block) const;

 private:
  static constexpr std::size_t kLargeBytes = 2 * kMiB;
  static constexpr std::size_t kExactBins = kLargeBytes / kBlockAlignment;
  static constexpr std::size_t kStepsPerDoubling = 32;
  static constexpr std::size_t kDoublings = 27;  // 2 MiB to 2^48, the address space
  static constexpr std::size_t kRangeBins = kStepsPerDoubling * kDoublings;
  static constexpr std::size_t kBinOfLarge = 17 * kStepsPerDoubling;  // what it is of kLargeBytes, to begin at 0
  static constexpr int kMostCompared = 16;

  // The doubling and, as the highest six bits of the size are 32 to 63, the step within it.
  static std::size_t range_bin(std::size_t size) {
    const auto shift = static_cast<std::size_t>(58 - __builtin_clzll(size));
    return shift * kStepsPerDoubling + (size >> shift) - kBinOfLarge;
  }
  [[nodiscard]] Block* smallest_in(std::size_t bin, std::size_t size, int most_compared) const;

  SizeBins<kExactBins> exact_;
  SizeBins<kRangeBins> ranges_;
};

template <typename Each>
void FreeIndex::for_largest(const Each& each) const {
  for (std::size_t bin = ranges_.filled_below(kRangeBins); bin != kRangeBins; bin = ranges_.filled_below(bin)) {
    for (const Block* block = ranges_.first(bin); block != nullptr; block = block->bin_next) {
      if (!each(block)) return;
    }
  }
}

template <typename Each>
void FreeIndex::for_smallest(std::size_t size, const Each& each) const {
  std::size_t bin = ranges_.filled_from(range_bin(std::max(size, kLargeBytes)));
  for (; bin != kRangeBins; bin = ranges_.filled_from(bin + 1)) {
    for (const Block* block = ranges_.first(bin); block != nullptr; block = block->bin_next) {
      if (block->size() >= size && !each(block)) return;
    }
  }
}

class BlockHeap {
 public:
  explicit BlockHeap(BlockArena& arena) : arena_(arena) {}
  BlockHeap(const BlockHeap&) = delete;
  BlockHeap& operator=(const BlockHeap&) = delete;

  // Free blocks are found by their offsets, which are below `capacity`, from now on: what
  // asks for that below. REQUIRES: it has no stretch, and will have one. Throws std::bad_alloc.
  void keep_order(std::size_t capacity) { free_.emplace(capacity); }
  // Free space may have this tag from now on: free() asks for no memory, whose caller
  // could not do without. Throws std::bad_alloc.
  void prepare(StreamTag tag) {
    if (tag >= index_.size() || index_[tag] == nullptr) [[unlikely]]
      make_index(tag);
  }
  // Adds a stretch of free space; it never coalesces with another stretch.
  // Returns it.
  Block* donate(ByteRange range, StreamTag tag);
  // Takes a whole donated stretch out again. REQUIRES: `block` is free and has
  // no neighbours.
  void retract(Block* block);

  // The smallest free block with this tag that has `size` bytes, or nullptr.
  [[nodiscard]] Block* best_fit(std::size_t size, StreamTag tag) const {
    return tag < index_.size() && index_[tag] != nullptr ? index_[tag]->best_fit(size) : nullptr;
  }
  // Calls `each(block)` for the free blocks of 2 MiB and more with this tag, the
  // largest first, until it returns false.
  template <typename Each>
  void for_largest(StreamTag tag, const Each& each) const {
    if (tag < index_.size() && index_[tag] != nullptr) index_[tag]->for_largest(each);
  }
  // The same for those of at least `size` bytes, the smallest first.
  template <typename Each>
  void for_smallest(std::size_t size, StreamTag tag, const Each& each) const {
    if (tag < index_.size() && index_[tag] != nullptr) index_[tag]->for_smallest(size, each);
  }
  // Makes [offset, offset + size) of a free block a block of its own in
  // `state`; what is left on either side stays free with its tag and epoch.
  Block* carve(Block* free, std::size_t offset, std::size_t size, BlockState state);
  // Splits a block that is not free at `offset`; returns the upper part.
  Block* split(Block* block, std::size_t offset);
  // The next two splits, at any of these offsets (all their bits), ask for no memory. Throws
  // std::bad_alloc.
  void prepare_splits(std::size_t offsets);
  // Joins `upper` (not free) into its lower neighbour `lower` (not free).
  void join(Block* lower, Block* upper);
  // Frees and coalesces; returns the free block that now holds it. Without prepare(tag) it may
  // throw std::bad_alloc, and nothing has changed.
  Block* free(Block* block, StreamTag tag, Epoch epoch);

  // -- REQUIRES: keep_order() ------------------------------------------------
  // No free block lies over `offset` from now on, and none coalesces there; until
  // remove_border().
  void add_border(std::size_t offset);
  void remove_border(std::size_t offset) { borders_.erase(offset); }

  // The lowest multiple of `grain` from which `size` bytes are free, whatever their
  // tags, or none. It remembers, for each size asked for, below where nothing fits, and
  // goes on from there: among ten thousand scattered pages a walk from the lowest took
  // 0.3 ms. REQUIRES: one grain for all calls.
  [[nodiscard]] std::optional<std::size_t> first_fit(std::size_t size, std::size_t grain);

  // Gives all free space, neutral space apart, this tag; it keeps its epochs.
  void retag(StreamTag tag);

  // The free block that covers `offset`, or nullptr.
  [[nodiscard]] Block* free_covering(std::size_t offset) const;
  // The block that does, free or not. Walks from the nearest free one below.
  [[nodiscard]] Block* covering(std::size_t offset) const;
  // The same for offsets that rise: from `at`, where the last one was (nullptr: this is the first).
  [[nodiscard]] const Block* covering_from(const Block* at, std::size_t offset) const;
  // All free blocks by offset.
  [[nodiscard]] const FreeByOffset& free_blocks() const { return *free_; }

  // -- Of any ------------------------------------------------------------------
  // Bytes of blocks that are not free.
  [[nodiscard]] std::size_t taken_bytes() const { return taken_bytes_; }
  // First blocks of the donated stretches, by offset.
  [[nodiscard]] const std::vector<Block*>& stretches() const { return stretches_; }
  // Checks neighbours, tiling, tags and indexes; throws nothing, aborts on a
  // broken invariant. Walks everything.
  void check() const;

 private:
  void make_index(StreamTag tag);
  // A block is about to begin or end there; of several offsets or sizes, all their bits.
  void note_borders(std::size_t offsets) {
    if (!is_fine_ && offsets % kGrain != 0) [[unlikely]]
      make_fine();
  }
  // Blocks may begin and end between two multiples of kGrain from now on.
  void make_fine();
  void set_free(Block* block, StreamTag tag, Epoch epoch);
  void clear_free(Block* block);
  void unlink(Block* block);
  void resize(Block* free, ByteRange was, ByteRange now);
  void insert_after(Block* at, Block* fresh);
  // Whether free space of that tag which meets `beside` at `offset` becomes one with it.
  [[nodiscard]] [[gnu::always_inline]] bool coalesces(const Block* beside, StreamTag tag, std::size_t offset) const {
    return beside != nullptr && beside->state == BlockState::free && beside->tag == tag &&
           (borders_.empty() || !is_border(offset));
  }
  [[nodiscard]] bool is_border(std::size_t offset) const;
  void note_run(const Block* block);
  static const Block* last_of_run(const Block* first);

  // While all blocks begin and end at multiples of it, no index needs bins for smaller ones
  // (16 KiB a tag): a model's small tensors alone need none.
  static constexpr std::size_t kGrain = 2 * kMiB;

  BlockArena& arena_;
  std::vector<std::unique_ptr<FreeIndex>> index_;  // by tag
  bool is_fine_ = false;
  std::size_t taken_bytes_ = 0;
  std::optional<FreeByOffset> free_;               // where their order is kept
  std::map<std::size_t, std::size_t> none_below_;  // size -> no run of free blocks that begins below this holds it
  std::size_t grain_ = kBlockAlignment;            // of first_fit()
  std::vector<Block*> stretches_;
  std::set<std::size_t> borders_;
};

}  // namespace vmm
