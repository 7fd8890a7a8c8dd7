#include "core/blocks/slabs.h"

#include <algorithm>
#include <iterator>

#include "base/check.h"

namespace vmm {

Slabs::OfTag& Slabs::make_of(StreamTag tag) {
  if (tag >= tags_.size()) tags_.resize(tag + std::size_t{1});
  tags_[tag].small = std::make_unique<SmallHeap>(arena_, tag);
  return tags_[tag];
}

Block* Slabs::take_at(std::size_t offset, std::size_t size, StreamTag tag) {
  if (slabs_.upper_bound(offset) == slabs_.begin()) return nullptr;
  const Block& slab = slab_around(offset);
  if (slab.tag != tag || slab.end() < offset + size) return nullptr;
  OfTag& of_tag = of(tag);
  Block* const at = piece_at(slab, offset);
  if (at == nullptr || at->state != BlockState::free || at->end() < offset + size) return nullptr;
  Block* const block = of_tag.small->cut_at(at, offset, size);
  if (at == of_tag.spare) of_tag.spare = nullptr;
  return block;
}

Block* Slabs::piece_at(const Block& slab, std::size_t offset) const {
  Block* at = slabs_.at(slab.offset).first;
  while (at != nullptr && at->end() <= offset) at = at->next;
  return at;
}

void Slabs::donate(Block* slab) {
  OfTag& of_tag = of(slab->tag);
  auto& added = slabs_[slab->offset];
  try {
    added = {slab, of_tag.small->donate(slab->offset)};
    // Until a block is cut from it: there may be no memory for one.
    if (of_tag.spare == nullptr) of_tag.spare = added.first;
  } catch (...) {
    slabs_.erase(slab->offset);
    throw;
  }
}

// `whole`: a slab that is free from end to end.
std::optional<Slabs::Emptied> Slabs::emptied(OfTag& of_tag, Block* whole) {
  if (of_tag.spare != nullptr) return retract(of_tag, whole);
  of_tag.spare = whole;
  return std::nullopt;
}

std::vector<Slabs::Emptied> Slabs::give_up_spares() {
  std::vector<Emptied> all;
  // First: a slab that could not be told of would be lost, and its tag would go on with it.
  all.reserve(static_cast<std::size_t>(
      std::count_if(tags_.begin(), tags_.end(), [](const OfTag& of_tag) { return of_tag.spare != nullptr; })));
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
  const Emptied emptied{at->second.slab, whole->epoch};
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

const Block* Slabs::first_piece(const Block& slab) const { return slabs_.at(slab.offset).first; }

std::size_t Slabs::check() const {
  std::size_t stranded = 0;
  std::vector<std::size_t> free(tags_.size());
  for (const auto& [offset, cut] : slabs_) {
    const OfTag& of_tag = tags_.at(cut.slab->tag);
    VMM_CHECK(cut.slab->offset == offset && cut.first->offset == offset, "the slab at ", offset, " is listed at ",
              cut.slab->offset, ", its first block at ", cut.first->offset);
    free.at(cut.slab->tag) += of_tag.small->check(cut.first);
    for (const Block* block = cut.first; block != nullptr; block = block->next) {
      if (block->state == BlockState::free && block != of_tag.spare) stranded += block->size();
    }
  }
  for (std::size_t tag = 0; tag < tags_.size(); ++tag) {
    if (tags_[tag].small == nullptr) continue;
    VMM_CHECK(free[tag] == tags_[tag].small->free_count(), "free blocks of tag ", tag, ": walked ", free[tag],
              ", counted ", tags_[tag].small->free_count());
  }
  return stranded;
}

}  // namespace vmm
