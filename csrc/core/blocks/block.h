// A stretch of a pool's offsets: free, a tensor's, or what else it may be. A heap
// links it with its neighbours, a bin, or a thread's cache with others of its size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/sync.h"
#include "base/units.h"
#include "core/streams/clock.h"

namespace vmm {

using StreamTag = std::uint32_t;
inline constexpr StreamTag kNeutral = 0;
inline constexpr std::size_t kBlockAlignment = 512;  // torch's own

enum class BlockState : std::uint8_t {
  free,
  used,         // a tensor's
  pages,        // held by the explicit allocate(offset, size)
  slab,         // carved into small blocks by another heap
  pending,      // freed, but a recorded stream may still use it
  retired,      // an address whose former mapping may still be in use
  cached,       // freed, and kept by a thread for its next request of that size
  quarantined,  // freed pages in a chunk that has others; anybody may still use them
};

// A free looks at `state` and then at `offset` of a block that may be another one by
// now, with no lock: so what becomes live has its offset before it has its state.
struct Block {
  Relaxed<std::size_t> offset = 0;
  std::size_t size = 0;       // bytes, a multiple of kBlockAlignment
  std::size_t requested = 0;  // bytes asked for, while used
  Epoch epoch = kLongAgo;     // while free: when it was freed
  Block* prev = nullptr;      // neighbours by offset within one donated stretch
  Block* next = nullptr;
  Block* bin_prev = nullptr;  // while free: others in its bin of a FreeIndex
  Block* bin_next = nullptr;  // the same; while kept by a thread: others that it keeps
  StreamTag tag = kNeutral;
  Published<BlockState> state = BlockState::free;
  bool small = false;                            // lives in a slab
  bool oversize = false;                         // while live: was counted as torch's oversize ones
  std::unique_ptr<std::vector<StreamUse>> uses;  // record_stream()

  [[nodiscard]] std::size_t end() const { return offset + size; }
  [[nodiscard]] ByteRange range() const { return {offset, size}; }
};

}  // namespace vmm
