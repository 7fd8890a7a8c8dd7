#include "core/blocks/slabs.h"

#include <algorithm>
#include <iterator>

#include "base/check.h"

namespace vmm {

namespace {

Block* head_of(const BlockHeap& small, std::size_t offset) {
  const auto& heads = small.stretches();
  const auto at = std::lower_bound(heads.begin(), heads.end(), offset,
                                   [](const Block* head, std::size_t wanted) { return head->offset < wanted; });
  VMM_CHECK(at != heads.end() && (*at)->offset == offset, "no blocks for the slab at ", offset);
  return *at;
}

}  // namespace

Slabs::OfTag& Slabs::make_of(StreamTag tag) {
  if (tag >= tags_.size()) tags_.resize(tag + std::size_t{1});
  tags_[tag].small = std::make_unique<BlockHeap>(arena_, /*by_offset=*/false);
  return tags_[tag];
}

Block* Slabs::cut(OfTag& of_tag, Block* free, std::size_t offset, std::size_t size) {
  if (free == of_tag.spare) of_tag.spare = nullptr;
  return of_tag.small->carve(free, offset, size, BlockState::used);
}

Block* Slabs::take(std::size_t size, StreamTag tag) {
  OfTag& of_tag = of(tag);
  Block* free = of_tag.small->best_fit(size, tag);
  return free == nullptr ? nullptr : cut(of_tag, free, free->offset, size);
}

Block* Slabs::take_at(std::size_t offset, std::size_t size, StreamTag tag) {
  if (slabs_.upper_bound(offset) == slabs_.begin()) return nullptr;
  const Block& slab = slab_around(offset);
  if (slab.tag != tag || slab.end() < offset + size) return nullptr;
  OfTag& of_tag = of(tag);
  Block* at = head_of(*of_tag.small, slab.offset);
  while (at != nullptr && at->end() <= offset) at = at->next;
  if (at == nullptr || at->state != BlockState::free || at->end() < offset + size) return nullptr;
  return cut(of_tag, at, offset, size);
}

void Slabs::donate(Block* slab) {
  slabs_.emplace(slab->offset, slab);
  of(slab->tag).small->donate(slab->range(), slab->tag)->small = true;
}

std::optional<Slabs::Emptied> Slabs::free(Block* block, Epoch epoch) {
  OfTag& of_tag = of(block->tag);
  Block* free = of_tag.small->free(block, block->tag, epoch);
  if (free->prev != nullptr || free->next != nullptr) return std::nullopt;
  // The whole slab is free.
  if (of_tag.spare != nullptr) return retract(of_tag, free);
  of_tag.spare = free;
  return std::nullopt;
}

std::vector<Slabs::Emptied> Slabs::give_up_spares() {
  std::vector<Emptied> all;
  for (OfTag& of_tag : tags_) {
    if (of_tag.spare == nullptr) continue;
    all.push_back(retract(of_tag, of_tag.spare));
    of_tag.spare = nullptr;
  }
  return all;
}

Slabs::Emptied Slabs::retract(OfTag& of_tag, Block* whole) {
  const auto at = slabs_.find(whole->offset);
  VMM_CHECK(at != slabs_.end(), "no slab at ", whole->offset);
  const Emptied emptied{at->second, whole->epoch};
  of_tag.small->retract(whole);
  slabs_.erase(at);
  return emptied;
}

std::size_t Slabs::stranded_pieces() const {
  std::size_t pieces = 0;
  for (const OfTag& of_tag : tags_) {
    if (of_tag.small == nullptr) continue;
    pieces += of_tag.small->free_count() - (of_tag.spare == nullptr ? 0 : 1);
  }
  return pieces;
}

std::size_t Slabs::spare_bytes() const {
  std::size_t bytes = 0;
  for_each_spare([&bytes](const Block& spare) { bytes += spare.size(); });
  return bytes;
}

const Block* Slabs::first_piece(const Block& slab) const { return head_of(*tags_.at(slab.tag).small, slab.offset); }

std::size_t Slabs::check() const {
  std::size_t stranded = 0;
  std::size_t stretches = 0;
  for (const OfTag& of_tag : tags_) {
    if (of_tag.small == nullptr) continue;
    of_tag.small->check();
    stretches += of_tag.small->stretches().size();
    for (const Block* block : of_tag.small->stretches()) {
      VMM_CHECK(slabs_.count(block->offset) == 1, "small blocks at ", block->offset, ", which is no slab");
      for (; block != nullptr; block = block->next) {
        if (block->state == BlockState::free && block != of_tag.spare) stranded += block->size();
      }
    }
  }
  VMM_CHECK(stretches == slabs_.size(), "slabs: cut ", stretches, ", listed ", slabs_.size());
  return stranded;
}

}  // namespace vmm
