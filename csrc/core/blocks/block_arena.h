// Blocks without malloc, in segments of 64 KiB of the BlockSpace. What a segment held
// goes back to the kernel when all its blocks are recycled: a burst of small blocks
// leaves little behind. A heap's blocks and those of its slabs share one arena. It has no lock:
// its owner's guards it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/blocks/block.h"

namespace vmm {

class BlockArena {
 public:
  BlockArena() = default;
  BlockArena(const BlockArena&) = delete;
  BlockArena& operator=(const BlockArena&) = delete;
  ~BlockArena();

  // Throws std::bad_alloc.
  Block* make() {
    if (open_ == nullptr || open_->free == nullptr) [[unlikely]]
      return make_another();
    Segment& segment = *open_;
    Block* const block = segment.free;
    segment.free = block->next;
    block->next = nullptr;
    ++segment.used;
    if (is_full(segment)) [[unlikely]]
      unlink_open(&segment);
    return block;
  }
  // The block is nobody's from now on, but its memory stays readable: whoever frees
  // it twice may look at it meanwhile, and finds it free.
  void recycle(Block* block) {
    Segment* const segment = segment_of(block);
    const bool was_full = is_full(*segment);
    // A free that still knows it looks at its state and then for its offset: never one at
    // which a block may begin.
    block->reset(kNoOffset);
    block->next = segment->free;
    segment->free = block;
    if (was_full) [[unlikely]]
      push_open(segment);
    if (--segment->used == 0) [[unlikely]]
      empty(segment);
  }

  // Memory in use, that of recycled blocks included.
  [[nodiscard]] std::size_t bytes() const { return (in_use_ + empty_.size() - bare_) * kSegmentBytes; }

 private:
  static constexpr std::size_t kSegmentBytes = 64 * kKiB;
  // Stands at the start of its memory, which is zero before the first block is made.
  struct Segment {
    Segment* prev = nullptr;  // in the list of open ones
    Segment* next = nullptr;
    Block* free = nullptr;   // recycled ones, by their `next`
    std::uint32_t used = 0;  // blocks that somebody has
    std::uint32_t made = 0;  // blocks that were ever made: the rest is untouched
  };
  static constexpr std::size_t kFirst = 64;  // bytes before the first block: a cache line
  static constexpr std::uint32_t kBlocks = (kSegmentBytes - kFirst) / sizeof(Block);
  static_assert(sizeof(Segment) <= kFirst);

  static Segment* segment_of(Block* block) {
    return reinterpret_cast<Segment*>(reinterpret_cast<std::uintptr_t>(block) & ~(kSegmentBytes - 1));
  }
  // Segments begin elsewhere with their first block, and go round: where each began at
  // its start, the first blocks of a thousand pools shared two sets of a level 2 cache.
  static Block* block_at(std::byte* segment, std::uint32_t number) {
    const std::uintptr_t which = reinterpret_cast<std::uintptr_t>(segment) / kSegmentBytes;
    const auto first = static_cast<std::uint32_t>((which * 0x9E3779B97F4A7C15ULL >> 32U) % kBlocks);
    return reinterpret_cast<Block*>(segment + kFirst + (first + number) % kBlocks * sizeof(Block));
  }
  static constexpr std::size_t kNoOffset = ~std::size_t{0};
  static bool is_full(const Segment& segment) { return segment.free == nullptr && segment.made == kBlocks; }
  Block* make_another();  // where no recycled one is at hand
  void empty(Segment* segment);
  void open_another();
  void take_more();
  void push_open(Segment* segment);
  void unlink_open(Segment* segment);

  struct Region {
    void* begin = nullptr;
    std::size_t bytes = 0;
  };
  std::vector<Region> regions_;
  std::vector<Segment*> empty_;  // no block of theirs is in use
  std::size_t bare_ = 0;         // of these, the first so many have no memory
  std::size_t in_use_ = 0;       // segments with blocks in use
  Segment* open_ = nullptr;      // of these, those that have room, the latest first
};

}  // namespace vmm
