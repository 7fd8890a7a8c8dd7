// Small blocks: cut from slabs, large blocks of 2 MiB, one set of them a stream. Each
// stream keeps one slab that is empty, so that a lone small tensor that comes and goes
// costs no large block each time; it may have been donated several, and uses them before
// it wants another. It knows neither memory nor how a slab was placed:
// whoever donates one gets it back, empty.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "core/blocks/small_heap.h"

namespace vmm {

class Slabs {
 public:
  explicit Slabs(BlockArena& arena) : arena_(arena) {}

  // A block of `size` bytes for the tag, used; nullptr: its slabs have none.
  Block* take(std::size_t size, StreamTag tag) {
    OfTag& of_tag = of(tag);
    Block* const free = of_tag.small->best_fit(size);
    if (free == nullptr) return nullptr;
    if (SmallHeap::is_whole(*free)) [[unlikely]]
      return take_spare(of_tag, free, size);
    return of_tag.small->cut(free, size);
  }
  // The same at `offset`. nullptr: it lies in none of its slabs, or is not free there.
  Block* take_at(std::size_t offset, std::size_t size, StreamTag tag);
  // Small blocks for the slab's tag are cut from it from now on.
  void donate(Block* slab);
  // A slab that holds no small blocks any more, and when the last of them was freed.
  struct Emptied {
    Block* slab = nullptr;
    Epoch epoch = kLongAgo;
  };
  // Frees a small block. What it returns is the donor's again.
  std::optional<Emptied> free(Block* block, Epoch epoch) {
    OfTag& of_tag = of(block->tag);
    Block* const free = of_tag.small->free(block, epoch);
    if (!SmallHeap::is_whole(*free)) [[likely]]
      return std::nullopt;
    return emptied(of_tag, free);
  }
  // All empty slabs of all streams: the donor's again.
  std::vector<Emptied> give_up_spares();

  // Free pieces in slabs that are partly used, and the bytes of the slabs kept empty.
  [[nodiscard]] std::size_t stranded_pieces() const;
  [[nodiscard]] std::size_t spare_bytes() const;
  // Calls `each(block)` with the one free block of every slab that is kept empty.
  template <typename Each>
  void for_each_spare(const Each& each) const {
    for (const OfTag& of_tag : tags_) {
      for (const Block* const spare : of_tag.spares) each(*spare);
    }
  }
  // Whether a block is cut into small ones: not yet while it is being made.
  [[nodiscard]] bool holds(const Block& slab) const { return slabs_.count(slab.offset) != 0; }
  // The slab around `offset`. REQUIRES: there is one.
  [[nodiscard]] const Block& slab_around(std::size_t offset) const {
    return *std::prev(slabs_.upper_bound(offset))->second.slab;
  }
  // The one of these that covers `offset`. REQUIRES: it lies in the slab.
  [[nodiscard]] Block* piece_at(const Block& slab, std::size_t offset) const;
  // The lowest of the blocks that the slab is cut into, others behind it by `next`.
  [[nodiscard]] const Block* first_piece(const Block& slab) const;
  [[nodiscard]] std::size_t size() const { return slabs_.size(); }
  [[nodiscard]] std::size_t size(StreamTag tag) const { return tag < tags_.size() ? tags_[tag].slabs : 0; }
  [[nodiscard]] std::size_t bytes() const { return slabs_.size() * kSlabBytes; }
  // Proves that the blocks of every slab tile it. Walks everything. Returns the
  // bytes of the free pieces in slabs that are partly used.
  std::size_t check() const;

 private:
  struct OfTag {
    std::unique_ptr<SmallHeap> small;
    std::vector<Block*> spares;  // of each slab that is empty, its one free block
    std::size_t slabs = 0;
  };
  struct Slab {
    Block* slab = nullptr;   // the large block
    Block* first = nullptr;  // of those that it is cut into
  };
  OfTag& of(StreamTag tag) {
    if (tag < tags_.size() && tags_[tag].small != nullptr) [[likely]]
      return tags_[tag];
    return make_of(tag);
  }
  OfTag& make_of(StreamTag tag);
  Block* take_spare(OfTag& of_tag, Block* free, std::size_t size);
  std::optional<Emptied> emptied(OfTag& of_tag, Block* whole);
  Emptied retract(OfTag& of_tag, Block* whole);

  BlockArena& arena_;
  std::vector<OfTag> tags_;
  std::map<std::size_t, Slab> slabs_;  // by offset
};

}  // namespace vmm
