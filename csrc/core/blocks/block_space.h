// The addresses in which all blocks of the process stand: reserved once, so that a link
// from one block to another is four bytes (BlockLink) and a block is 40 instead of 80.
//
// One lock for the process, a leaf. Not for a forked child: another thread may have held it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace vmm {

class BlockSpace {
 public:
  // What a link counts in: blocks are aligned to it.
  static constexpr std::size_t kUnit = 8;  // bytes

  // A piece of zeroed memory, aligned to its size: what that skips is lost, but the pieces
  // that an arena takes only grow. `bytes`: a power of two of whole pages, up to 1 MiB.
  // Throws std::bad_alloc.
  static void* take(std::size_t bytes);
  // Somebody else's from now on; its memory goes back to the kernel.
  static void give(void* piece, std::size_t bytes);

  // Where it begins; no block stands there. nullptr before the first take().
  static std::byte* begin() { return begin_; }

 private:
  static constinit inline std::byte* begin_ = nullptr;
};

}  // namespace vmm
