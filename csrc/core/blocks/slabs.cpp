#include "core/blocks/slabs.h"

#include <algorithm>
#include <numeric>

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
  const bool is_spare = SmallHeap::is_whole(*at);
  Block* const block = of_tag.small->cut_at(at, offset, size);
  if (is_spare) std::erase(of_tag.spares, at);
  return block;
}

Block* Slabs::take_spare(OfTag& of_tag, Block* free, std::size_t size) {
  Block* const block = of_tag.small->cut(free, size);
  std::erase(of_tag.spares, free);
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
    // For all that the stream has: what is freed keeps its place without asking for memory.
    of_tag.spares.reserve(of_tag.spares.size() + 1);
    added = {slab, of_tag.small->donate(slab->offset)};
    of_tag.spares.push_back(added.first);  // until a block is cut from it: there may be no memory for one
    ++of_tag.slabs;
  } catch (...) {
    slabs_.erase(slab->offset);
    throw;
  }
}

// `whole`: a slab that is free from end to end.
std::optional<Slabs::Emptied> Slabs::emptied(OfTag& of_tag, Block* whole) {
  if (!of_tag.spares.empty()) return retract(of_tag, whole);
  of_tag.spares.push_back(whole);  // it has had room for one since the first was donated
  return std::nullopt;
}

std::vector<Slabs::Emptied> Slabs::give_up_spares() {
  std::vector<Emptied> all;
  // First: a slab that could not be told of would be lost, and its tag would go on with it.
  all.reserve(std::accumulate(tags_.begin(), tags_.end(), std::size_t{0},
                              [](std::size_t sum, const OfTag& of_tag) { return sum + of_tag.spares.size(); }));
  for (OfTag& of_tag : tags_) {
    for (Block* const spare : of_tag.spares) all.push_back(retract(of_tag, spare));
    of_tag.spares.clear();
  }
  return all;
}

Slabs::Emptied Slabs::retract(OfTag& of_tag, Block* whole) {
  const auto at = slabs_.find(whole->offset);
  VMM_CHECK(at != slabs_.end(), "no slab at ", whole->offset);
  const Emptied emptied{at->second.slab, whole->epoch};
  of_tag.small->retract(whole);
  slabs_.erase(at);
  --of_tag.slabs;
  return emptied;
}

std::size_t Slabs::stranded_pieces() const {
  std::size_t pieces = 0;
  for (const OfTag& of_tag : tags_) {
    if (of_tag.small == nullptr) continue;
    pieces += of_tag.small->free_count() - of_tag.spares.size();
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
  std::vector<std::size_t> slabs(tags_.size());
  std::vector<std::size_t> spares(tags_.size());
  for (const auto& [offset, cut] : slabs_) {
    const OfTag& of_tag = tags_.at(cut.slab->tag);
    VMM_CHECK(cut.slab->offset == offset && cut.first->offset == offset, "the slab at ", offset, " is listed at ",
              cut.slab->offset, ", its first block at ", cut.first->offset);
    free.at(cut.slab->tag) += of_tag.small->check(cut.first);
    ++slabs.at(cut.slab->tag);
    for (const Block* block = cut.first; block != nullptr; block = block->next) {
      if (block->state != BlockState::free) continue;
      if (!SmallHeap::is_whole(*block)) {
        stranded += block->size();
        continue;
      }
      VMM_CHECK(std::count(of_tag.spares.begin(), of_tag.spares.end(), block) == 1, "the empty slab at ", offset,
                " is not listed once");
      ++spares.at(cut.slab->tag);
    }
  }
  for (std::size_t tag = 0; tag < tags_.size(); ++tag) {
    if (tags_[tag].small == nullptr) continue;
    VMM_CHECK(free[tag] == tags_[tag].small->free_count(), "free blocks of tag ", tag, ": walked ", free[tag],
              ", counted ", tags_[tag].small->free_count());
    VMM_CHECK(slabs[tag] == tags_[tag].slabs && spares[tag] == tags_[tag].spares.size(), "slabs of tag ", tag,
              ": walked ", slabs[tag], ", ", spares[tag], " of them empty, counted ", tags_[tag].slabs, " and ",
              tags_[tag].spares.size());
  }
  return stranded;
}

}  // namespace vmm
