// In what chunks the memory of a pool that sleeps comes back: its places, cut where nothing of them
// is used, and joined as far as nobody wants their parts apart. It lives for one plan, under its
// owner's lock.
#pragma once

#include <cstddef>
#include <map>

#include "base/units.h"
#include "core/blocks/block.h"
#include "core/blocks/block_heap.h"
#include "core/blocks/growth_policy.h"
#include "core/pool/asleep.h"

namespace vmm {

class ComingChunks {
 public:
  // What the pool is.
  struct Kind {
    std::size_t page = 0;       // bytes
    bool is_of_tag = false;     // each block may be sealed and unsealed by itself
    bool is_contested = false;  // others take from the same limit
  };
  ComingChunks(Asleep& asleep, const BlockHeap& blocks, const GrowthPolicy& growth, const Kind& kind)
      : asleep_(asleep), blocks_(blocks), growth_(growth), kind_(kind) {}

  // Of what has free space in it those parts come back that hold something. What is of units goes
  // by them. 0: of any size.
  void cut_free(std::size_t unit);
  // Where chunks stand for each other, those of a whole window become one.
  void join_units(std::size_t unit);
  // Elsewhere those under one block, and those under several of what stays.
  void join_blocks();

 private:
  using Places = std::map<std::size_t, PlaceOfChunk>;
  void cut_place(Places::iterator at, std::size_t offset);
  [[nodiscard]] const Backup* source_of(Places::const_iterator at) const;
  [[nodiscard]] std::size_t most_of_several(BlockState state, const Backup* source) const;
  [[nodiscard]] std::size_t least_alone() const;
  [[nodiscard]] ByteRange own_pages(const Block& block) const;
  void cut_around_large();

  Asleep& asleep_;
  const BlockHeap& blocks_;
  const GrowthPolicy& growth_;
  const Kind kind_;
};

}  // namespace vmm
