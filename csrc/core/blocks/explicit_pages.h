// The blocks that are explicit pages, by offset: a block is what one request took, or what
// is left of it. It knows neither memory nor who looks at pages (held_ranges), and its
// owner's lock guards it.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <iterator>
#include <map>
#include <utility>

#include "base/units.h"
#include "core/blocks/block.h"

namespace vmm {

class ExplicitPages {
 public:
  // Throws std::bad_alloc, but where there is room.
  void add(Block* block) {
    const auto spare = std::find_if(spare_.begin(), spare_.end(), [](const auto& node) { return !node.empty(); });
    if (spare == spare_.end()) {
      blocks_.emplace(block->offset, block);
      return;
    }
    spare->key() = block->offset;
    spare->mapped() = block;
    blocks_.insert(std::move(*spare));
  }
  // The next two are added without asking for memory. Throws std::bad_alloc.
  void make_room() {
    for (auto& node : spare_) {
      if (!node.empty()) continue;
      ByOffset fresh;
      fresh.emplace(0, nullptr);
      node = fresh.extract(fresh.begin());
    }
  }
  // The first that reaches into `range` is taken out; nullptr: none does.
  Block* take_first_in(ByteRange range) {
    const auto first = first_in(range);
    if (first == blocks_.end()) return nullptr;
    Block* const block = first->second;
    blocks_.erase(first);
    return block;
  }
  // The one that lies over `offset`, or nullptr.
  [[nodiscard]] const Block* covering(std::size_t offset) const {
    const auto found = first_in({offset, 1});
    return found == blocks_.end() ? nullptr : found->second;
  }
  // Calls `each(block)` for those that reach into `range`, by offset.
  template <typename Each>
  void for_each_in(ByteRange range, const Each& each) const {
    for (auto at = first_in(range); at != blocks_.end() && at->first < range.end(); ++at) each(*at->second);
  }
  [[nodiscard]] std::size_t size() const { return blocks_.size(); }
  [[nodiscard]] bool empty() const { return blocks_.empty(); }

 private:
  using ByOffset = std::map<std::size_t, Block*>;
  [[nodiscard]] ByOffset::const_iterator first_in(ByteRange range) const {
    auto at = blocks_.upper_bound(range.offset);
    if (at != blocks_.begin() && std::prev(at)->second->end() > range.offset) --at;
    return at != blocks_.end() && at->first < range.end() ? at : blocks_.end();
  }

  ByOffset blocks_;
  std::array<ByOffset::node_type, 2> spare_;
};

}  // namespace vmm
