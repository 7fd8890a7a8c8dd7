// Which addresses are allocated, and how many bytes each: a table with open
// addressing, since a node for each (std::unordered_map) takes as long as a tenth of
// what the driver takes. It never knows whose addresses they are. No lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/units.h"

namespace vmm {

class LiveAddresses {
 public:
  struct Entry {
    Address address = 0;  // 0: none, which no allocation has
    std::size_t bytes = 0;
  };

  // REQUIRES: not 0, and not there. Throws std::bad_alloc; then it is not there.
  void add(Address address, std::size_t bytes) {
    if ((size_ + 1) * 2 > slots_.size()) grow();
    put({address, bytes});
    ++size_;
  }
  // Takes it out; false: it is not there.
  bool take(Address address, std::size_t* bytes) {
    if (size_ == 0 || address == 0) return false;
    std::size_t at = home_of(address);
    while (slots_[at].address != address) {
      if (slots_[at].address == 0) return false;
      at = next(at);
    }
    *bytes = slots_[at].bytes;
    // What follows without a gap moves up, where this one was in its way: there are
    // no tombstones, so the table stays as fast as it was.
    for (std::size_t from = next(at); slots_[from].address != 0; from = next(from)) {
      const std::size_t home = home_of(slots_[from].address);
      if (((from - home) & mask()) < ((from - at) & mask())) continue;
      slots_[at] = slots_[from];
      at = from;
    }
    slots_[at] = {};
    --size_;
    return true;
  }
  [[nodiscard]] std::size_t size() const { return size_; }
  // In no particular order.
  [[nodiscard]] std::vector<Entry> all() const {
    std::vector<Entry> entries;
    entries.reserve(size_);
    for (const Entry& entry : slots_) {
      if (entry.address != 0) entries.push_back(entry);
    }
    return entries;
  }

 private:
  static constexpr std::size_t kLeast = 64;  // slots; a power of two, as ever

  [[nodiscard]] std::size_t mask() const { return slots_.size() - 1; }
  [[nodiscard]] std::size_t next(std::size_t at) const { return (at + 1) & mask(); }
  // Addresses are multiples of 512: the upper bits of the product hold what tells them apart.
  [[nodiscard]] std::size_t home_of(Address address) const {
    return static_cast<std::size_t>((address * 0x9E3779B97F4A7C15ULL) >> 32) & mask();
  }
  void put(const Entry& entry) {
    std::size_t at = home_of(entry.address);
    while (slots_[at].address != 0) at = next(at);
    slots_[at] = entry;
  }
  void grow() {
    std::vector<Entry> former(slots_.empty() ? kLeast : slots_.size() * 2);
    former.swap(slots_);
    for (const Entry& entry : former) {
      if (entry.address != 0) put(entry);
    }
  }

  std::vector<Entry> slots_;
  std::size_t size_ = 0;
};

}  // namespace vmm
