// A stretch of a pool's offsets: free, a tensor's, or what else it may be. A heap
// links it with its neighbours, a bin, or a thread's cache with others of its size.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/sync.h"
#include "base/units.h"
#include "core/blocks/block_space.h"
#include "core/streams/clock.h"

namespace vmm {

using StreamTag = std::uint16_t;
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
  watched,      // a tensor's, with guards on both sides (core/pool/watched.cpp)
  guard,        // beside a watched one: nobody's, with memory or without
};

struct Block;

// A pointer to a block in four bytes. To read and write it is an addition more.
class BlockLink {
 public:
  BlockLink() = default;
  BlockLink(Block* block) : units_(units_of(block)) {}  // NOLINT(google-explicit-constructor): it is one
  operator Block*() const { return block_at(units_); }  // NOLINT(google-explicit-constructor): it is one
  Block* operator->() const { return *this; }

  // How far behind the start of the BlockSpace it stands. 0: nullptr.
  static std::uint32_t units_of(const Block* block) {
    if (block == nullptr) return 0;
    const std::ptrdiff_t bytes = reinterpret_cast<const std::byte*>(block) - BlockSpace::begin();
    return static_cast<std::uint32_t>(static_cast<std::size_t>(bytes) / BlockSpace::kUnit);
  }
  static Block* block_at(std::uint32_t units) {
    return units == 0 ? nullptr
                      : reinterpret_cast<Block*>(BlockSpace::begin() + std::size_t{units} * BlockSpace::kUnit);
  }

 private:
  std::uint32_t units_;
};

// A free looks at `state` and then at `offset` of a block that may be another one by
// now, with no lock: so what becomes live has its offset before it has its state.
//
// 40 bytes. What shares its place is never needed at once; who changes the state
// writes what belongs to the new one.
struct Block {
  Relaxed<std::size_t> offset = 0;
  union {
    std::size_t requested = 0;  // while used, pending, or pages: bytes asked for
    Epoch epoch;                // while free or cached: when it was freed
  };
  BlockLink prev = nullptr;  // neighbours by offset within one donated stretch
  BlockLink next = nullptr;
  union {
    std::uint32_t recorded = 0;  // unless it stands in a bin: its RecordedUses
    BlockLink bin_prev;          // others in its bin of a FreeIndex
  };
  BlockLink bin_next = nullptr;  // the same; while kept by a thread: others that it keeps

  // Bytes, a multiple of kBlockAlignment.
  [[nodiscard]] std::size_t size() const { return (std::size_t{size_high_} << 32U | size_low_) * kBlockAlignment; }
  void set_size(std::size_t bytes) {
    const std::size_t units = bytes / kBlockAlignment;
    size_low_ = static_cast<std::uint32_t>(units);
    size_high_ = static_cast<std::uint8_t>(units >> 32U) & kHighest;
  }
  // The same of a block below 2 TiB, in units of kBlockAlignment: a small one.
  [[nodiscard]] std::uint32_t units() const { return size_low_; }
  void set_units(std::uint32_t units) { size_low_ = units; }
  // As it was made, but for its offset.
  void reset(std::size_t at) {
    offset = at;
    requested = 0;
    prev = nullptr;
    next = nullptr;
    recorded = 0;
    bin_next = nullptr;
    size_low_ = 0;
    size_high_ = 0;
    small = false;
    oversize = false;
    state = BlockState::free;
    tag = kNeutral;
  }
  [[nodiscard]] std::size_t end() const { return offset + size(); }
  [[nodiscard]] ByteRange range() const { return {offset, size()}; }
  // Whether it is a tensor's, and in the pool's directory.
  [[nodiscard]] bool is_live() const {
    const BlockState now = state;
    return now == BlockState::used || now == BlockState::watched;
  }
  // Whether somebody asked for it, and it counts as active to torch.
  [[nodiscard]] bool is_active() const {
    const BlockState now = state;
    return now == BlockState::used || now == BlockState::pending || now == BlockState::pages ||
           now == BlockState::watched;
  }
  // Free space, and what is beside a watched block: there may be memory under it or not.
  [[nodiscard]] bool is_nobodys() const {
    const BlockState now = state;
    return now == BlockState::free || now == BlockState::retired || now == BlockState::guard;
  }

 private:
  static constexpr std::uint8_t kHighest = 63;  // of 2^38 units: 2^47 bytes, all addresses that there are
  std::uint32_t size_low_ = 0;
  std::uint8_t size_high_ : 6 = 0;

 public:
  bool small : 1 = false;  // torch counts it with its small pool: it lives in a slab, or in a provider's small segment
  bool oversize : 1 = false;  // while live: was counted as torch's oversize ones
  Published<BlockState> state = BlockState::free;
  StreamTag tag = kNeutral;
};
static_assert(sizeof(Block) == 40 && alignof(Block) == BlockSpace::kUnit);

// Two lists of blocks by `bin_next`, each from its first (nullptr: empty): `rest` comes
// behind `first`. Walks `first`.
Block* join_lists(Block* first, Block* rest);

}  // namespace vmm
