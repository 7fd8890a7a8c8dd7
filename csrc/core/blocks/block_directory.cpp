#include "core/blocks/block_directory.h"

#include <algorithm>
#include <new>

#include "base/check.h"

namespace vmm {

namespace {

// Pools are alike: what the directories of a thousand have in use would lie at one
// offset within a page, in a handful of the CPU's cache sets. Each begins some lines
// further on than the one before.
constexpr std::size_t kLine = 64;
constexpr std::size_t kColours = 61;

// Room for all that there are: what comes back to `free` needs no memory.
template <typename T>
void make_room(std::vector<T*>& free, std::size_t all) {
  if (free.capacity() < all) free.reserve(std::max(all, 2 * free.capacity()));
}

std::size_t next_colour() {
  static std::atomic<std::size_t> next{0};
  return next.fetch_add(1, std::memory_order_relaxed) % kColours * kLine;
}

}  // namespace

BlockDirectory::BlockDirectory(std::size_t capacity)
    : page_count_(align_up(capacity, kPageBytes) / kPageBytes),
      // A pool of 320 GiB has 1.3 MiB of words, and a thousand such pools none but those in use.
      memory_(page_count_ * sizeof(std::atomic<std::uintptr_t>) + kColours * kLine),
      pages_(reinterpret_cast<std::atomic<std::uintptr_t>*>(memory_.begin() + next_colour())) {}

Block* BlockDirectory::find_among_few(const Few& few, std::uint32_t unit) {
  for (std::size_t k = 0; k < kFew; ++k) {
    if (few.units.at(k).load(std::memory_order_relaxed) != unit) continue;
    if (Block* block = few.blocks.at(k).load(std::memory_order_acquire)) return block;
  }
  return nullptr;
}

std::vector<Block*> BlockDirectory::blocks_of(std::uintptr_t word) {
  std::vector<Block*> found;
  if ((word & kKindMask) == kTable) {
    for (const auto& link : as<Table>(word)->links) {
      if (Block* block = BlockLink::block_at(link.load(std::memory_order_relaxed))) found.push_back(block);
    }
  } else if ((word & kKindMask) == kFewBlocks) {
    for (const auto& slot : as<Few>(word)->blocks) {
      if (Block* block = slot.load(std::memory_order_relaxed)) found.push_back(block);
    }
    std::sort(found.begin(), found.end(), [](const Block* a, const Block* b) { return a->offset < b->offset; });
  } else {
    found.push_back(as<Block>(word));
  }
  return found;
}

BlockDirectory::Few* BlockDirectory::new_few() {
  if (free_few_.empty()) {
    make_room(free_few_, few_.size() + 1);
    few_.push_back(std::make_unique<Few>());
    free_few_.push_back(few_.back().get());
  }
  Few* few = free_few_.back();
  free_few_.pop_back();
  return few;
}

BlockDirectory::Table* BlockDirectory::new_table() {
  if (free_tables_.empty()) {
    make_room(free_tables_, tables_.size() + 1);
    tables_.push_back(std::make_unique<std::byte[]>(sizeof(Table) + kColours * kLine));
    free_tables_.push_back(new (tables_.back().get() + next_colour()) Table);
  }
  Table* table = free_tables_.back();
  free_tables_.pop_back();
  bare_tables_ = std::min(bare_tables_, free_tables_.size());
  return table;
}

void BlockDirectory::insert_beside_others(Block* block) {
  static_assert(alignof(Block) > kKindMask && alignof(Few) > kKindMask && alignof(Table) > kKindMask);
  const std::size_t page = block->offset / kPageBytes;
  VMM_CHECK(page < page_count_, "a block at ", block->offset, " beyond the pool");
  const auto put_in_few = [](Few& few, Block* added) {
    std::size_t slot = 0;
    while (few.blocks.at(slot).load(std::memory_order_relaxed) != nullptr) ++slot;
    few.units.at(slot).store(unit_of(added->offset), std::memory_order_relaxed);
    few.blocks.at(slot).store(added, std::memory_order_release);
    ++few.count;
  };
  const std::uintptr_t word = pages_[page].load(std::memory_order_relaxed);
  const bool fits_in_few = !block->small && (word == 0 || (word & kKindMask) == kSingle || as<Few>(word)->count < kFew);
  if (word == 0 && !block->small) {
    become(page, reinterpret_cast<std::uintptr_t>(block));
  } else if (fits_in_few && (word & kKindMask) == kFewBlocks) {
    put_in_few(*as<Few>(word), block);
  } else if (fits_in_few) {
    Few* few = new_few();
    put_in_few(*few, as<Block>(word));
    put_in_few(*few, block);
    become(page, reinterpret_cast<std::uintptr_t>(few) | kFewBlocks);
  } else {
    // A slab's page, or more than a few.
    const std::vector<Block*> others = word == 0 ? std::vector<Block*>() : blocks_of(word);
    Table* table = new_table();
    for (Block* other : others) put_in(*table, other);
    put_in(*table, block);
    become(page, reinterpret_cast<std::uintptr_t>(table) | kTable);
    if ((word & kKindMask) == kFewBlocks) {
      Few* few = as<Few>(word);
      for (auto& slot : few->blocks) slot.store(nullptr, std::memory_order_relaxed);
      few->count = 0;
      free_few_.push_back(few);
    }
  }
  pages_end_ = std::max(pages_end_, page + 1);  // counted last: there may have been no memory
  ++size_;
}

void BlockDirectory::trim() {
  while (bare_tables_ < free_tables_.size()) discard(free_tables_[bare_tables_++], sizeof(Table));
}

void BlockDirectory::remove_beside_others(const Block* block) {
  const std::size_t page = block->offset / kPageBytes;
  const std::uintptr_t word = pages_[page].load(std::memory_order_relaxed);
  if ((word & kKindMask) == kTable) {
    Table* table = as<Table>(word);
    take_out_of(*table, block);
    become(page, 0);
    free_tables_.push_back(table);
    return;
  }
  Few* few = as<Few>(word);
  for (auto& slot : few->blocks) {
    if (slot.load(std::memory_order_relaxed) == block) slot.store(nullptr, std::memory_order_relaxed);
  }
  if (--few->count == 0) {
    become(page, 0);
    free_few_.push_back(few);
  }
}

}  // namespace vmm
