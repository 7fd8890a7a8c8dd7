// Where chunks stood that have left: the block of each former mapping, which nobody is
// given until that mapping has been dropped. It knows no mapping and no clock, and its
// owner's lock guards it.
#pragma once

#include <cstddef>
#include <iterator>
#include <map>

#include "base/check.h"
#include "base/units.h"
#include "core/blocks/block.h"

namespace vmm {

class RetiredBlocks {
 public:
  void add(Block* block) {
    blocks_.emplace(block->offset, block);
    bytes_ += block->size();
  }
  // The block of the former mapping that stood at `range`. REQUIRES: there is one.
  Block* take(ByteRange range) {
    const auto found = blocks_.find(range.offset);
    VMM_CHECK(found != blocks_.end() && found->second->range() == range, "retired block at ", range.offset);
    Block* const block = found->second;
    blocks_.erase(found);
    bytes_ -= range.size;
    return block;
  }
  // Whether one lies over `offset`.
  [[nodiscard]] bool covers(std::size_t offset) const {
    const auto after = blocks_.upper_bound(offset);
    return after != blocks_.begin() && std::prev(after)->second->end() > offset;
  }
  [[nodiscard]] std::size_t size() const { return blocks_.size(); }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }

 private:
  std::map<std::size_t, Block*> blocks_;  // by offset
  std::size_t bytes_ = 0;
};

}  // namespace vmm
