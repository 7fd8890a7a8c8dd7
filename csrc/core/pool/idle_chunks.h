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
  std::optional<IdleChunk> take_largest();
  // The largest of at most so many bytes, or else the smallest above.
  std::optional<IdleChunk> take_nearest(std::size_t bytes);

 private:
  using BySize = std::map<std::size_t, std::vector<IdleChunk>>;
  IdleChunk take_last(BySize::iterator of_size);

  BySize by_size_;
  std::size_t bytes_ = 0;
};

// Of those of at most `room` bytes the one that a request makes the most use of and that
// breaks up the least free space. `remaining`: what the request still lacks, of `total`;
// of what lies beyond it uses nothing.
std::optional<IdleChunk> take_most_useful(std::vector<IdleChunk>* idle, std::size_t remaining, std::size_t room,
                                          std::size_t total);

}  // namespace vmm
