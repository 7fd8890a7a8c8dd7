// Freed blocks that anybody may still use until an epoch has passed: explicit pages in
// chunks that have others. It asks no clock, and its owner's lock guards it.
#pragma once

#include <cstddef>
#include <iterator>
#include <map>
#include <set>
#include <utility>

#include "base/check.h"
#include "core/blocks/block.h"
#include "core/streams/clock.h"

namespace vmm {

class QuarantinedBlocks {
 public:
  struct Freed {
    Block* block = nullptr;
    Epoch epoch = kLongAgo;  // of the free
  };

  // Throws std::bad_alloc, and it is not here.
  void add(Freed freed) {
    const std::size_t offset = freed.block->offset;
    blocks_.emplace(offset, freed);
    try {
      until_.emplace(freed.epoch, offset);
    } catch (...) {
      blocks_.erase(offset);
      throw;
    }
    bytes_ += freed.block->size();
  }
  // REQUIRES: it is there.
  void remove(Freed freed) {  // a copy: what oldest() and at() answer goes
    const std::size_t offset = freed.block->offset;
    const std::size_t count = blocks_.erase(offset);
    VMM_CHECK(count == 1, "quarantined block at ", offset);
    until_.erase({freed.epoch, offset});
    bytes_ -= freed.block->size();
  }
  // The one that lies over `offset`, or nullptr.
  [[nodiscard]] const Freed* at(std::size_t offset) const {
    const auto after = blocks_.upper_bound(offset);
    if (after == blocks_.begin()) return nullptr;
    const Freed& freed = std::prev(after)->second;
    return freed.block->end() > offset ? &freed : nullptr;
  }
  // The one that was freed first, of several the lowest. REQUIRES for both: not empty.
  [[nodiscard]] const Freed& oldest() const { return blocks_.at(until_.begin()->second); }
  // When one was freed last.
  [[nodiscard]] Epoch newest() const { return until_.rbegin()->first; }
  [[nodiscard]] bool empty() const { return blocks_.empty(); }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }

 private:
  std::map<std::size_t, Freed> blocks_;            // by offset
  std::set<std::pair<Epoch, std::size_t>> until_;  // the same by epoch, then offset
  std::size_t bytes_ = 0;
};

}  // namespace vmm
