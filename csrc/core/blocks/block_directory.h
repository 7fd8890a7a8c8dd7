// Offset -> the live block that begins there, found without a lock: a free has
// to know its block before it knows whose lock it would need.
//
// One word for each 2 MiB of the pool's addresses: nothing, the one block that
// begins there, a handful of large ones, or (under a slab) a table with four bytes
// for each 512, 16 KiB. Only the words of addresses in use are ever
// touched. A hash table took 32 to 64 bytes a block and could not be read while
// it grew or closed a gap.
//
// insert() and remove() are one thread's at a time (the pool's lock). find() may be
// called by any thread; it is right for whoever owns the block it asks for: that
// one's entry stands still. For an address at which no block begins it answers
// nullptr, or a block that begins elsewhere or is no longer live.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/host_pages.h"
#include "base/units.h"
#include "core/blocks/block.h"

namespace vmm {

class BlockDirectory {
 public:
  explicit BlockDirectory(std::size_t capacity);  // bytes of addresses
  BlockDirectory(const BlockDirectory&) = delete;
  BlockDirectory& operator=(const BlockDirectory&) = delete;
  ~BlockDirectory() = default;

  void insert(Block* block) {
    const std::size_t page = block->offset / kPageBytes;
    const std::uintptr_t word = page < page_count_ ? pages_[page].load(std::memory_order_relaxed) : 0;
    if ((word & kKindMask) == kTable) [[likely]] {
      put_in(*as<Table>(word), block);
    } else if (word == 0 && page < pages_end_ && !block->small) {
      become(page, reinterpret_cast<std::uintptr_t>(block));
    } else {
      return insert_beside_others(block);
    }
    ++size_;
  }
  [[nodiscard]] Block* find(std::size_t offset) const {
    const std::size_t page = offset / kPageBytes;
    if (page >= page_count_) return nullptr;
    const std::uintptr_t word = pages_[page].load(std::memory_order_acquire);
    if ((word & kKindMask) == kTable) [[likely]] {
      return BlockLink::block_at(as<Table>(word)->links[unit_of(offset)].load(std::memory_order_acquire));
    }
    if (word == 0) return nullptr;
    if ((word & kKindMask) == kSingle) return as<Block>(word);
    return find_among_few(*as<Few>(word), unit_of(offset));
  }
  // Removes the block. REQUIRES: it is here.
  void remove(const Block* block) {
    const std::size_t page = block->offset / kPageBytes;
    const std::uintptr_t word = pages_[page].load(std::memory_order_relaxed);
    if ((word & kKindMask) == kTable && as<Table>(word)->count != 1) [[likely]] {
      take_out_of(*as<Table>(word), block);
    } else if ((word & kKindMask) == kSingle) {
      become(page, 0);
    } else {
      remove_beside_others(block);
    }
    --size_;
  }

  // What is kept for blocks to come goes back to the kernel. Until then a table that
  // empties keeps its memory, at most 0.8 % of a slab's: to drop 16 KiB and touch them
  // again costs some microseconds, and where 300 slabs came and went at every turn, a
  // quarter to two thirds of all the time.
  void trim();

  [[nodiscard]] std::size_t size() const { return size_; }
  // Each block, by offset.
  template <typename Each>
  void for_each(const Each& each) const {
    for (std::size_t page = 0; page < pages_end_; ++page) {
      const std::uintptr_t word = pages_[page].load(std::memory_order_relaxed);
      if (word == 0) continue;
      for (Block* block : blocks_of(word)) each(block);
    }
  }

 private:
  static constexpr std::size_t kPageBytes = 2 * kMiB;
  static constexpr std::size_t kUnits = kPageBytes / kBlockAlignment;
  // Blocks above 1 MiB: two can begin in one page, more where addresses are named.
  static constexpr std::size_t kFew = 4;
  struct Table {
    std::array<std::atomic<std::uint32_t>, kUnits> links{};  // BlockLink::units_of()
    std::size_t count = 0;
  };
  struct Few {
    std::array<std::atomic<std::uint32_t>, kFew> units{};
    std::array<std::atomic<Block*>, kFew> blocks{};
    std::size_t count = 0;
  };
  enum Kind : std::uintptr_t { kSingle = 0, kFewBlocks = 1, kTable = 2, kKindMask = 3 };
  template <typename T>
  static T* as(std::uintptr_t word) {
    return reinterpret_cast<T*>(word & ~static_cast<std::uintptr_t>(kKindMask));
  }
  static std::uint32_t unit_of(std::size_t offset) {
    return static_cast<std::uint32_t>(offset % kPageBytes / kBlockAlignment);
  }
  static void put_in(Table& table, Block* block) {
    table.links[unit_of(block->offset)].store(BlockLink::units_of(block), std::memory_order_release);
    ++table.count;
  }
  static void take_out_of(Table& table, const Block* block) {
    table.links[unit_of(block->offset)].store(0, std::memory_order_relaxed);
    --table.count;
  }
  // Where neither a table has room nor the page is empty; with what that takes away.
  void insert_beside_others(Block* block);
  void remove_beside_others(const Block* block);  // the last of a table, or of a few
  static Block* find_among_few(const Few& few, std::uint32_t unit);
  static std::vector<Block*> blocks_of(std::uintptr_t word);
  void become(std::size_t page, std::uintptr_t word) { pages_[page].store(word, std::memory_order_release); }
  Few* new_few();
  Table* new_table();

  const std::size_t page_count_;
  const ZeroPages memory_;  // of pages_
  std::atomic<std::uintptr_t>* const pages_;
  std::size_t pages_end_ = 0;  // behind the last that ever held anything
  std::size_t size_ = 0;
  // Kept for the next: whoever frees a block twice may still look at one.
  std::vector<std::unique_ptr<Few>> few_;
  std::vector<std::unique_ptr<std::byte[]>> tables_;
  std::vector<Few*> free_few_;
  std::vector<Table*> free_tables_;
  std::size_t bare_tables_ = 0;  // of these, the first so many have no memory
};

}  // namespace vmm
