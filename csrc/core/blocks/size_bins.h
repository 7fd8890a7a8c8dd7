// Free blocks in lists, one a bin, under a bitmap of two levels: the next filled bin is
// found in two looks, however many there are. Which sizes share a bin is its owner's to say.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/blocks/block.h"

namespace vmm {

template <std::size_t kCount>
class SizeBins {
 public:
  // What insert() does otherwise the first time: it may throw std::bad_alloc.
  void prepare() {
    if (heads_ == nullptr) [[unlikely]]
      heads_ = std::make_unique<Heads>();
  }
  void insert(std::size_t bin, Block* block) {
    prepare();
    BlockLink& head = (*heads_)[bin];
    Block* const first = head;
    block->bin_prev = nullptr;
    block->bin_next = first;
    if (first != nullptr) first->bin_prev = block;
    head = block;
    filled_[bin / 64] |= bit(bin);
    words_filled_ |= bit(bin / 64);
  }
  // REQUIRES: it stands there.
  void erase(std::size_t bin, Block* block) {
    Block* const next = block->bin_next;
    Block* const prev = block->bin_prev;
    if (next != nullptr) next->bin_prev = prev;
    if (prev != nullptr) {
      prev->bin_next = next;
    } else {
      (*heads_)[bin] = next;
      if (next == nullptr) empty(bin);
    }
    block->recorded = 0;  // where bin_prev was
    block->bin_next = nullptr;
  }
  [[nodiscard]] Block* first(std::size_t bin) const { return heads_ == nullptr ? nullptr : (*heads_)[bin]; }
  // The lowest filled bin from `bin` on, or kCount.
  [[nodiscard]] std::size_t filled_from(std::size_t bin) const {
    if (bin >= kCount) return kCount;
    const std::size_t word = bin / 64;
    const std::uint64_t bits = filled_[word] & (~std::uint64_t{0} << (bin % 64));
    if (bits != 0) return word * 64 + static_cast<std::size_t>(__builtin_ctzll(bits));
    const std::uint64_t later = word == 63 ? 0 : words_filled_ & (~std::uint64_t{0} << (word + 1));
    if (later == 0) return kCount;
    const auto found = static_cast<std::size_t>(__builtin_ctzll(later));
    return found * 64 + static_cast<std::size_t>(__builtin_ctzll(filled_[found]));
  }
  // The highest filled bin below `bin`, or kCount.
  [[nodiscard]] std::size_t filled_below(std::size_t bin) const {
    const auto highest = [](std::uint64_t bits) { return static_cast<std::size_t>(63 - __builtin_clzll(bits)); };
    const std::size_t word = bin / 64;
    if (bin % 64 != 0) {
      const std::uint64_t bits = filled_[word] & ~(~std::uint64_t{0} << (bin % 64));
      if (bits != 0) return word * 64 + highest(bits);
    }
    const std::uint64_t earlier = word == 64 ? words_filled_ : words_filled_ & ~(~std::uint64_t{0} << word);
    if (earlier == 0) return kCount;
    return highest(earlier) * 64 + highest(filled_[highest(earlier)]);
  }
  // Whether the block stands in that bin. Walks it.
  [[nodiscard]] bool holds(std::size_t bin, const Block* block) const {
    const Block* at = first(bin);
    while (at != nullptr && at != block) at = at->bin_next;
    return at == block;
  }

 private:
  static constexpr std::size_t kWords = (kCount + 63) / 64;
  static_assert(kWords <= 64, "one summary word must cover the bitmap");
  using Heads = std::array<BlockLink, kCount>;

  static std::uint64_t bit(std::size_t k) { return std::uint64_t{1} << (k % 64); }
  void empty(std::size_t bin) {
    filled_[bin / 64] &= ~bit(bin);
    if (filled_[bin / 64] == 0) words_filled_ &= ~bit(bin / 64);
  }

  std::unique_ptr<Heads> heads_;  // made when the first block comes
  std::array<std::uint64_t, kWords> filled_{};
  std::uint64_t words_filled_ = 0;  // bit w: filled_[w] != 0
};

}  // namespace vmm
