// Offset -> block, open addressing with linear probing: the one look-up on the
// way of every free. std::unordered_map costs a malloc and a cache miss more
// for each block (about 45 ns a pair here, against 8).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace vmm {

template <typename Value>
class OffsetMap {
 public:
  OffsetMap() : entries_(kFirstSize) {}

  void insert(std::size_t offset, Value* value) {
    if ((count_ + 1) * 2 > entries_.size()) grow();
    std::size_t at = home(offset);
    while (entries_[at].value != nullptr) at = next(at);
    entries_[at] = {offset, value};
    ++count_;
  }

  [[nodiscard]] Value* find(std::size_t offset) const {
    for (std::size_t at = home(offset); entries_[at].value != nullptr; at = next(at)) {
      if (entries_[at].offset == offset) return entries_[at].value;
    }
    return nullptr;
  }

  // Removes and returns what stands at `offset`, or nullptr.
  Value* take(std::size_t offset) {
    std::size_t at = home(offset);
    while (entries_[at].value != nullptr && entries_[at].offset != offset) at = next(at);
    Value* value = entries_[at].value;
    if (value == nullptr) return nullptr;
    --count_;
    // Backward shift instead of tombstones: look-ups stay short for ever.
    std::size_t hole = at;
    for (std::size_t scan = next(at); entries_[scan].value != nullptr; scan = next(scan)) {
      const std::size_t want = home(entries_[scan].offset);
      const bool stays = hole <= scan ? (hole < want && want <= scan) : (hole < want || want <= scan);
      if (stays) continue;
      entries_[hole] = entries_[scan];
      hole = scan;
    }
    entries_[hole] = {};
    return value;
  }

  [[nodiscard]] std::size_t size() const { return count_; }

  template <typename Each>
  void for_each(const Each& each) const {
    for (const Entry& entry : entries_) {
      if (entry.value != nullptr) each(entry.offset, entry.value);
    }
  }

 private:
  struct Entry {
    std::size_t offset = 0;
    Value* value = nullptr;
  };
  static constexpr std::size_t kFirstSize = 256;

  [[nodiscard]] std::size_t home(std::size_t offset) const {
    // Offsets are multiples of 512; Fibonacci hashing spreads them.
    const std::uint64_t mixed = (static_cast<std::uint64_t>(offset) >> 9U) * 0x9E3779B97F4A7C15ULL;
    return static_cast<std::size_t>(mixed >> 20U) & (entries_.size() - 1);
  }
  [[nodiscard]] std::size_t next(std::size_t at) const { return (at + 1) & (entries_.size() - 1); }

  void grow() {
    std::vector<Entry> old(entries_.size() * 2);
    old.swap(entries_);
    for (const Entry& entry : old) {
      if (entry.value == nullptr) continue;
      std::size_t at = home(entry.offset);
      while (entries_[at].value != nullptr) at = next(at);
      entries_[at] = entry;
    }
  }

  std::vector<Entry> entries_;
  std::size_t count_ = 0;
};

}  // namespace vmm
