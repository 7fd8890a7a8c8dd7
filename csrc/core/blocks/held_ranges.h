// Stretches of one range of bytes that somebody outside looks at (a tensor over
// explicit memory), and how many look at each: what they cover must stay. Pure
// offsets: it knows no pages and no memory, and its owner's lock guards it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/units.h"

namespace vmm {

class HeldRanges {
 public:
  // Throws std::bad_alloc, and nothing has changed.
  void hold(ByteRange range) {
    const auto [held, is_new] = holds_.try_emplace({range.offset, range.size}, 0);
    if (is_new) {
      try {
        ++sizes_[range.size];
      } catch (...) {
        holds_.erase(held);
        throw;
      }
    }
    ++held->second;
  }
  // REQUIRES: the same stretch was held and not yet let go of.
  void unhold(ByteRange range) {
    const auto found = holds_.find({range.offset, range.size});
    VMM_CHECK(found != holds_.end(), "nobody holds offset ", range.offset, ", size ", range.size);
    if (--found->second != 0) return;
    holds_.erase(found);
    if (const auto size = sizes_.find(range.size); --size->second == 0) sizes_.erase(size);
  }
  [[nodiscard]] bool empty() const { return holds_.empty(); }
  // How far below a range a look at it begins: the longest that is held, in bytes.
  [[nodiscard]] std::size_t reach() const { return sizes_.empty() ? 0 : sizes_.rbegin()->first; }

  // Who looks at anything of `range`: how many, and how many of its bytes they cover.
  struct Held {
    std::size_t count = 0;
    std::size_t bytes = 0;
    // What a refusal says of them, once it has named them.
    [[nodiscard]] std::string still_show(const std::string& what) const {
      return std::string(" still ") + (count == 1 ? "shows " : "show ") + format_bytes(bytes) + " of " + what +
             "; drop " + (count == 1 ? "that" : "them") + " first";
    }
  };
  [[nodiscard]] Held in(ByteRange range) const {
    Held held;
    std::size_t covered = range.offset;  // up to here the bytes are counted
    for_each(range, [&](ByteRange hold, std::size_t count) {
      held.count += count;
      const std::size_t end = std::min(hold.end(), range.end());
      const std::size_t begin = std::max(hold.offset, covered);
      if (end > begin) held.bytes += end - begin;
      covered = std::max(covered, end);
    });
    return held;
  }
  // The stretches of `range` that nobody looks at, in whole multiples of
  // `grain`, by offset. REQUIRES: `range` is aligned to `grain`.
  [[nodiscard]] std::vector<ByteRange> free_parts(ByteRange range, std::size_t grain) const {
    std::vector<ByteRange> parts;
    std::size_t at = range.offset;
    for_each(range, [&](ByteRange hold, std::size_t) {
      const std::size_t begin = align_down(hold.offset, grain);
      if (begin > at) parts.push_back({at, begin - at});
      at = std::max(at, align_up(hold.end(), grain));
    });
    if (at < range.end()) parts.push_back({at, range.end() - at});
    return parts;
  }

 private:
  // Every hold that touches `range`, by offset.
  template <typename Each>
  void for_each(ByteRange range, const Each& each) const {
    // None is longer than the longest, so none that begins earlier reaches in.
    const std::size_t first = range.offset - std::min(range.offset, reach());
    for (auto it = holds_.lower_bound({first, 0}); it != holds_.end() && it->first.first < range.end(); ++it) {
      const ByteRange hold{it->first.first, it->first.second};
      if (hold.end() > range.offset) each(hold, it->second);
    }
  }

  std::map<std::pair<std::size_t, std::size_t>, std::size_t> holds_;  // (offset, size) -> how many
  std::map<std::size_t, std::size_t> sizes_;                          // size -> how many of these stretches
};

}  // namespace vmm
