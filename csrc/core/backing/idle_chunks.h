// Which of a pool's idle chunks is taken next: by size, or as the one that a request
// makes the most use of. It moves nothing.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <vector>

#include "core/memory/chunk.h"

namespace vmm {

// Where it stands, in a free stretch of how many bytes, and whether the asking stream
// may use it at once, without a wait on the GPU.
struct IdleChunk {
  Chunk* chunk = nullptr;
  std::size_t offset = 0;
  std::size_t stretch = 0;
  bool at_once = false;
};

// By size; of one size the last that was added is taken first.
class IdleChunks {
 public:
  IdleChunks() = default;
  explicit IdleChunks(const std::vector<IdleChunk>& idle) {
    for (const IdleChunk& each : idle) add(each);
  }
  void add(const IdleChunk& idle);
  [[nodiscard]] std::size_t bytes() const { return bytes_; }
  // The largest of at most so many bytes, or else the smallest above.
  std::optional<IdleChunk> take_nearest(std::size_t bytes);
  // What of `size` bytes stays empty where the largest that fit are put side by side.
  [[nodiscard]] std::size_t left_of(std::size_t size) const;

 private:
  using BySize = std::map<std::size_t, std::vector<IdleChunk>>;
  IdleChunk take_last(BySize::iterator of_size);

  BySize by_size_;
  std::size_t bytes_ = 0;
};

// Those that are no units (GrowthPolicy::unit()), by the place of a unit that each stands in:
// where all of it is idle they fill another such place together.
class UnitPlaces {
 public:
  explicit UnitPlaces(std::size_t unit) : unit_(unit) {}
  // Whether all of its place is idle now.
  bool add(const IdleChunk& idle);
  // Whether take() would find one.
  [[nodiscard]] bool has_whole() const;
  // All of one place, or nothing.
  std::vector<IdleChunk> take();

 private:
  struct Place {
    std::vector<IdleChunk> chunks;
    std::size_t bytes = 0;
  };
  const std::size_t unit_;  // bytes; 0: there are no such places
  std::map<std::size_t, Place> places_;
};

// To be moved under a request: chosen by what the request uses of one and by what the free
// space that it leaves loses. A choice looks at one chunk of each size: where it looked at
// all, each of ten thousand took 37 us, and a move takes 70.
class IdleMoves {
 public:
  IdleMoves() = default;
  // Of sizes that are multiples of `page`; 0: what remains need not be filled to the byte.
  explicit IdleMoves(std::vector<IdleChunk> chunks, std::size_t page = 0);
  [[nodiscard]] bool empty() const { return chunks_.empty(); }
  // The last one, for chunks of one size. REQUIRES: not empty.
  IdleChunk take_last();
  // Of those of at most `room` bytes the one that a request makes the most use of and that
  // breaks up the least free space. `remaining`: what the request still lacks, of `total`;
  // of what lies beyond it uses nothing. Where the room ends with what remains and some of
  // them fill it to the byte, one is taken beside which others fill the rest.
  std::optional<IdleChunk> take_most_useful(std::size_t remaining, std::size_t room, std::size_t total);

 private:
  // A chunk by its place in the list, and how long its free stretch is.
  struct Entry {
    std::size_t stretch = 0;
    std::size_t place = 0;
  };
  // The shortest stretch first and, of these, the first in the list. What names a place
  // beyond the list's end has been taken, or stands at another one now.
  using Heap = std::vector<Entry>;
  struct OfSize {
    Heap heap;
    std::size_t count = 0;  // that are left
  };
  using BySize = std::map<std::size_t, OfSize>;
  static bool comes_later(const Entry& a, const Entry& b);
  bool drop_stale(Heap& heap) const;
  BySize::iterator most_useful(std::size_t remaining, std::size_t room, std::size_t total,
                               const std::vector<std::size_t>& but);
  [[nodiscard]] bool fill(std::size_t bytes) const;

  std::vector<IdleChunk> chunks_;
  std::size_t page_ = 0;
  BySize by_size_;
};

}  // namespace vmm
