#include "core/blocks/free_by_offset.h"

namespace vmm {

// The bitmaps first: they are words of eight bytes. Of 320 GiB 660 KiB, of which most are
// never touched.
FreeByOffset::FreeByOffset(std::size_t capacity)
    : page_count_(align_up(capacity, kPageBytes) / kPageBytes),
      memory_(BitTree::words_for(page_count_) * sizeof(std::uint64_t) + page_count_ * sizeof(BlockLink)),
      firsts_(reinterpret_cast<BlockLink*>(reinterpret_cast<std::uint64_t*>(memory_.begin()) +
                                           BitTree::words_for(page_count_))),
      pages_(reinterpret_cast<std::uint64_t*>(memory_.begin()), page_count_) {}

void FreeByOffset::insert_into(std::size_t page, Block* block) {
  ++size_;
  Block* const first = firsts_[page];
  if (first == nullptr) {
    pages_.insert(page);
  } else if (first->offset < block->offset) {
    return;
  }
  firsts_[page] = block;
}

void FreeByOffset::erase_from(std::size_t page, const Block* block) {
  --size_;
  if (firsts_[page] != block) return;
  Block* const behind = next_in(page, block);
  firsts_[page] = behind;
  if (behind == nullptr) pages_.erase(page);
}

Block* FreeByOffset::next_in(std::size_t page, const Block* block) {
  for (Block* at = block->next; at != nullptr && page_of(at->end()) == page; at = at->next) {
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
  const std::size_t page = page_of(block->end());
  Block* const beside = next_in(page, block);
  return beside != nullptr ? beside : first_of(pages_.from(page + 1));
}

Block* FreeByOffset::prev(const Block* block) const {
  const std::size_t page = page_of(block->end());
  for (Block* at = block->prev; at != nullptr && page_of(at->end()) == page; at = at->prev) {
    if (at->state == BlockState::free) return at;
  }
  return last_of(pages_.below(page));
}

Block* FreeByOffset::from(std::size_t offset) const {
  Block* at = first_of(pages_.from(page_of(offset + 1)));
  while (at != nullptr && at->end() <= offset) at = next(at);
  return at;
}

Block* FreeByOffset::below(std::size_t offset) const {
  Block* const above = from(offset);
  return above == nullptr ? last() : prev(above);
}

}  // namespace vmm
