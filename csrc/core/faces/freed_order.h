// Which stretches of a range were freed before which. Pure pages; it never knows
// what was freed, nor whether it is in use again. No lock.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "base/units.h"

namespace vmm {

// A free writes its moment to the pages that it touches: to each, or once for a whole
// group of them. Moments only rise, so the latest that holds for a page is the greatest
// of the two, and nothing has to be cut or taken out. (A map of runs, which did both,
// took two thirds of a large block's allocation and free: 370 of 580 ns.)
class FreedOrder {
 public:
  explicit FreedOrder(std::size_t page_bytes) : page_(page_bytes) {}

  // All pages that the stretch touches count as freed now; as before where there is no
  // memory to say so. REQUIRES: not empty.
  void note(ByteRange freed) noexcept {
    ++latest_;
    for_parts(freed, [this](std::size_t leaf, std::size_t first, std::size_t end) {
      if (Leaf* const part = make(leaf)) part->note(first, end, latest_);
    });
  }
  // The latest of these moments; 0: nothing there was freed yet.
  [[nodiscard]] std::uint64_t newest(ByteRange range) const {
    std::uint64_t newest = 0;
    for_parts(range, [this, &newest](std::size_t leaf, std::size_t first, std::size_t end) {
      if (leaf < leaves_.size() && leaves_[leaf] != nullptr) {
        newest = std::max(newest, leaves_[leaf]->newest(first, end));
      }
    });
    return newest;
  }

 private:
  static constexpr std::size_t kPages = 512;
  static constexpr std::size_t kGroup = 16;

  // Of kPages pages in turn.
  class Leaf {
   public:
    void note(std::size_t first, std::size_t end, std::uint64_t when) {
      const std::size_t groups_begin = std::min(align_up(first, kGroup), end);
      const std::size_t groups_end = std::max(align_down(end, kGroup), groups_begin);
      std::fill(pages_.begin() + first, pages_.begin() + groups_begin, when);
      std::fill(groups_.begin() + groups_begin / kGroup, groups_.begin() + groups_end / kGroup, when);
      std::fill(pages_.begin() + groups_end, pages_.begin() + end, when);
    }
    [[nodiscard]] std::uint64_t newest(std::size_t first, std::size_t end) const {
      return std::max(*std::max_element(pages_.begin() + first, pages_.begin() + end),
                      *std::max_element(groups_.begin() + first / kGroup, groups_.begin() + (end - 1) / kGroup + 1));
    }

   private:
    std::array<std::uint64_t, kPages> pages_{};
    std::array<std::uint64_t, kPages / kGroup> groups_{};
  };

  // Calls part(leaf, first page of it, page behind its last) for all that the range touches.
  template <class Part>
  void for_parts(ByteRange range, const Part& part) const {
    const std::size_t end = (range.end() - 1) / page_ + 1;
    for (std::size_t at = range.offset / page_; at < end;) {
      const std::size_t leaf = at / kPages;
      const std::size_t until = std::min(end, (leaf + 1) * kPages);
      part(leaf, at - leaf * kPages, until - leaf * kPages);
      at = until;
    }
  }
  Leaf* make(std::size_t leaf) noexcept {
    if (leaf < leaves_.size() && leaves_[leaf] != nullptr) return leaves_[leaf].get();
    try {
      if (leaf >= leaves_.size()) leaves_.resize(leaf + 1);
      leaves_[leaf] = std::make_unique<Leaf>();
    } catch (const std::bad_alloc&) {
      return nullptr;
    }
    return leaves_[leaf].get();
  }

  std::size_t page_;
  std::uint64_t latest_ = 0;
  std::vector<std::unique_ptr<Leaf>> leaves_;  // where something was freed
};

}  // namespace vmm
