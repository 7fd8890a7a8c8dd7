// A set of numbers below a bound fixed at the start, as a bitmap under bitmaps of which
// words are not empty: the next one up or down is found in a look or two a level, of which
// a million million numbers need seven. Nothing here allocates, so nothing throws.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/units.h"

namespace vmm {

class BitTree {
 public:
  static constexpr std::size_t kNone = kUnlimited;

  // Words of memory for numbers below `bound`.
  static constexpr std::size_t words_for(std::size_t bound) {
    std::size_t all = 0;
    for (std::size_t words = words_of(bound);; words = words_of(words)) {
      all += words;
      if (words == 1) return all;
    }
  }
  // `words`: words_for(bound) zeros, which it does not own.
  BitTree(std::uint64_t* words, std::size_t bound) {
    for (std::size_t bits = bound;; bits = words_of(bits)) {
      levels_.at(height_++) = {words, words_of(bits)};
      words += words_of(bits);
      if (words_of(bits) == 1) return;
    }
  }

  // REQUIRES: k < bound, of both.
  void insert(std::size_t k) {
    for (std::size_t level = 0; level < height_; ++level, k /= kBits) {
      std::uint64_t& word = levels_[level].words[k / kBits];
      const bool was_empty = word == 0;
      word |= bit(k);
      if (!was_empty) return;
    }
  }
  void erase(std::size_t k) {
    for (std::size_t level = 0; level < height_; ++level, k /= kBits) {
      std::uint64_t& word = levels_[level].words[k / kBits];
      word &= ~bit(k);
      if (word != 0) return;
    }
  }
  // The lowest from k on, or kNone.
  [[nodiscard]] std::size_t from(std::size_t k) const {
    for (std::size_t level = 0; level < height_; ++level) {
      const std::size_t at = k / kBits;
      if (at >= levels_[level].count) return kNone;
      const std::uint64_t bits = levels_[level].words[at] & (~std::uint64_t{0} << (k % kBits));
      if (bits != 0) return descend(level, at * kBits + lowest(bits), lowest);
      k = at + 1;
    }
    return kNone;
  }
  // The highest below k, which may be beyond the bound, or kNone.
  [[nodiscard]] std::size_t below(std::size_t k) const {
    if (k > levels_[0].count * kBits) k = levels_[0].count * kBits;
    for (std::size_t level = 0; level < height_ && k != 0; ++level) {
      const std::size_t at = (k - 1) / kBits;
      const std::uint64_t bits = levels_[level].words[at] & (~std::uint64_t{0} >> (kBits - 1 - (k - 1) % kBits));
      if (bits != 0) return descend(level, at * kBits + highest(bits), highest);
      k = at;
    }
    return kNone;
  }

 private:
  static constexpr std::size_t kBits = 64;
  static constexpr std::size_t words_of(std::size_t bits) { return bits <= kBits ? 1 : (bits + kBits - 1) / kBits; }
  static std::uint64_t bit(std::size_t k) { return std::uint64_t{1} << (k % kBits); }
  static std::size_t lowest(std::uint64_t bits) { return static_cast<std::size_t>(__builtin_ctzll(bits)); }
  static std::size_t highest(std::uint64_t bits) { return static_cast<std::size_t>(63 - __builtin_clzll(bits)); }
  // From a bit of that level to the first, or last, number under it.
  std::size_t descend(std::size_t level, std::size_t k, std::size_t (*which)(std::uint64_t)) const {
    while (level-- != 0) k = k * kBits + which(levels_[level].words[k]);
    return k;
  }

  struct Level {
    std::uint64_t* words = nullptr;
    std::size_t count = 0;
  };
  static constexpr std::size_t kMostLevels = 11;  // of 2^64 numbers
  std::array<Level, kMostLevels> levels_{};
  std::size_t height_ = 0;
};

}  // namespace vmm
