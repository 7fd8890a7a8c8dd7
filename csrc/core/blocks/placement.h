// Where in a pool's free space a request should stand: best fit. Free space that has all
// its memory comes first; then what lacks the least, over the bare space beside it; then
// bare space alone. It looks, and takes nothing but what is wholly backed; it knows no
// chunk.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/blocks/block_heap.h"

namespace vmm {

// A request for space, in all its kinds.
struct SpaceRequest {
  std::size_t size = 0;  // bytes
  enum class Where : std::uint8_t {
    best_fit,
    high,          // slabs: below one another from the top, so that they pin no large chunk
    beside_slabs,  // what would break up the places of larger blocks: up there too, close together
    at,            // exactly at `offset`
  } where = Where::best_fit;
  std::size_t offset = 0;
  StreamTag tag = kNeutral;
  BlockState state = BlockState::used;
};

class Placement {
 public:
  // `page`, in bytes: what is backed is backed in multiples of it.
  Placement(BlockHeap& heap, std::size_t page) : heap_(heap), page_(page) {}

  // Blocks of fewer bytes are those that go beside slabs (SpaceRequest::Where).
  void place_beside_slabs_below(std::size_t bytes) { beside_slabs_below_ = bytes; }
  // A block of free space of the tag, which has all its memory; nullptr:
  // none is long enough. The common case.
  Block* take_backed(std::size_t size, StreamTag tag, BlockState state = BlockState::used);
  // Where it should stand otherwise: `offset`, if there is any place. What is free
  // there is the tag's or bare. On bare space alone at a multiple of `unit` bytes, where it
  // can.
  bool find_spot(const SpaceRequest& request, std::size_t unit, std::size_t* offset) const;
  // Bare addresses, for whole chunks: no memory is there that queued work could
  // still touch. At a multiple of `unit` bytes, where it can. `high`: the highest.
  bool find_bare(std::size_t size, std::size_t unit, bool high, std::size_t* offset) const;

 private:
  bool find_high(const SpaceRequest& request, std::size_t* offset) const;
  bool find_beside_slabs(const SpaceRequest& request, std::size_t* offset) const;
  bool find_least_missing(const SpaceRequest& request, std::size_t* offset) const;
  [[nodiscard]] std::size_t missing_beside(const Block* from, std::size_t size, StreamTag tag, bool down) const;

  BlockHeap& heap_;
  std::size_t page_;
  std::size_t beside_slabs_below_ = 0;
};

}  // namespace vmm
