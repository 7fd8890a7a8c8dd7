// The free blocks of a heap by offset: for each 2 MiB the first that ends there. From it
// the others of those 2 MiB are found by their neighbours; large blocks leave room for two
// or three. A balanced tree was an eighth of a large block's allocation and free, and
// could run out of the host's memory. By their ends, as most are taken from at their begin.
// Where blocks are small (named addresses, debug mode's canaries) it walks at most the 4096
// that 2 MiB hold: 4 us among 10^4 of 512 bytes, where a tree took 0.04.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/host_pages.h"
#include "base/units.h"
#include "core/blocks/bit_tree.h"
#include "core/blocks/block.h"

namespace vmm {

class FreeByOffset {
 public:
  // Of blocks below `capacity` bytes. Throws std::bad_alloc.
  explicit FreeByOffset(std::size_t capacity);

  // REQUIRES: it is linked with its neighbours, as is whatever ends in the same 2 MiB: of
  // two stretches that share them one would not be found.
  void insert(Block* block) { insert_into(page_of(block->end()), block); }
  void erase(const Block* block) { erase_from(page_of(block->end()), block); }
  // It ended at `was`, ends at `now` and has not passed another free block.
  void moved(Block* block, std::size_t was, std::size_t now) {
    if (page_of(was) == page_of(now)) return;
    erase_from(page_of(was), block);
    insert_into(page_of(now), block);
  }

  [[nodiscard]] std::size_t size() const { return size_; }
  // nullptr: there is none.
  [[nodiscard]] Block* first() const { return first_of(pages_.from(0)); }
  [[nodiscard]] Block* last() const { return last_of(pages_.below(BitTree::kNone)); }
  [[nodiscard]] Block* next(const Block* block) const;
  [[nodiscard]] Block* prev(const Block* block) const;
  // The first that ends above `offset`: it covers that, or stands above.
  [[nodiscard]] Block* from(std::size_t offset) const;
  // The last that ends there or below.
  [[nodiscard]] Block* below(std::size_t offset) const;

  class Iterator {
   public:
    Iterator(const FreeByOffset& all, Block* at) : all_(all), at_(at) {}
    Block* operator*() const { return at_; }
    Iterator& operator++() {
      at_ = all_.next(at_);
      return *this;
    }
    friend bool operator!=(const Iterator& a, const Iterator& b) { return a.at_ != b.at_; }

   private:
    const FreeByOffset& all_;
    Block* at_;
  };
  [[nodiscard]] Iterator begin() const { return {*this, first()}; }
  [[nodiscard]] Iterator end() const { return {*this, nullptr}; }

 private:
  static constexpr std::size_t kPageBytes = 2 * kMiB;
  static std::size_t page_of(std::size_t end) { return (end - 1) / kPageBytes; }
  // The next free one behind `block` that ends in that page.
  static Block* next_in(std::size_t page, const Block* block);
  // Of a page that has one; of BitTree::kNone none.
  [[nodiscard]] Block* first_of(std::size_t page) const { return page == BitTree::kNone ? nullptr : firsts_[page]; }
  [[nodiscard]] Block* last_of(std::size_t page) const;
  void insert_into(std::size_t page, Block* block);
  void erase_from(std::size_t page, const Block* block);

  const std::size_t page_count_;
  const ZeroPages memory_;   // of both
  BlockLink* const firsts_;  // by page
  BitTree pages_;            // that have one
  std::size_t size_ = 0;
};

}  // namespace vmm
