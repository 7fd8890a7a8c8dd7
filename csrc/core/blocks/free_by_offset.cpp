#include "core/blocks/free_by_offset.h"

#include <cstdlib>
#include <new>

namespace vmm {

namespace {

// The kernel gives pages as they are touched: of 320 GiB, 660 KiB, most are not.
void* allocate_zeroed(std::size_t bytes) {
  void* memory = std::calloc(1, bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

void FreeByOffset::Free::operator()(void* memory) const { std::free(memory); }

// The bitmaps first: they are words of eight bytes.
FreeByOffset::FreeByOffset(std::size_t capacity)
    : page_count_(align_up(capacity, kPageBytes) / kPageBytes),
      memory_(allocate_zeroed(BitTree::words_for(page_count_) * sizeof(std::uint64_t) +
                              page_count_ * sizeof(BlockLink))),
      firsts_(reinterpret_cast<BlockLink*>(static_cast<std::uint64_t*>(memory_.get()) +
                                           BitTree::words_for(page_count_))),
      pages_(static_cast<std::uint64_t*>(memory_.get()), page_count_) {}

void FreeByOffset::insert(Block* block) {
  ++size_;
  const std::size_t page = page_of(block->offset);
  BlockLink& first = firsts_[page];
  if (first == nullptr) pages_.insert(page);
  if (first == nullptr || first->offset > block->offset) first = block;
}

void FreeByOffset::erase_from(std::size_t page, const Block* block) {
  --size_;
  BlockLink& first = firsts_[page];
  if (first != block) return;
  first = next_in(page, block);
  if (first == nullptr) pages_.erase(page);
}

Block* FreeByOffset::next_in(std::size_t page, const Block* block) {
  for (Block* at = block->next; at != nullptr && page_of(at->offset) == page; at = at->next) {
    if (at->state == BlockState::free) return at;
  }
  return nullptr;
}

Block* FreeByOffset::last_of(std::size_t page) const {
  Block* last = first_of(page);
  if (last == nullptr) return nullptr;
  while (Block* behind = next_in(page, last)) last = behind;
  return last;
}

Block* FreeByOffset::next(const Block* block) const {
  const std::size_t page = page_of(block->offset);
  Block* const beside = next_in(page, block);
  return beside != nullptr ? beside : first_of(pages_.from(page + 1));
}

Block* FreeByOffset::prev(const Block* block) const {
  const std::size_t page = page_of(block->offset);
  for (Block* at = block->prev; at != nullptr && page_of(at->offset) == page; at = at->prev) {
    if (at->state == BlockState::free) return at;
  }
  return last_of(pages_.below(page));
}

Block* FreeByOffset::from(std::size_t offset) const {
  Block* at = first_of(pages_.from(page_of(offset)));
  while (at != nullptr && at->offset < offset) at = next(at);
  return at;
}

Block* FreeByOffset::until(std::size_t offset) const {
  const std::size_t page = page_of(offset);
  Block* last = nullptr;
  Block* at = page < page_count_ ? static_cast<Block*>(firsts_[page]) : nullptr;
  for (; at != nullptr && at->offset <= offset; at = next_in(page, at)) last = at;
  return last != nullptr ? last : last_of(pages_.below(page));
}

}  // namespace vmm
