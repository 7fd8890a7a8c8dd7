// Chunks that somebody else owns, which are about to be mapped again: each counts those
// mappings already, so that it is not released meanwhile. It never knows whose they are.
#pragma once

#include <atomic>
#include <span>
#include <utility>
#include <vector>

#include "core/memory/chunk.h"

namespace vmm {

class SharedChunks {
 public:
  // `copies`: mappings more that each chunk counts.
  explicit SharedChunks(int copies) : copies_(copies) {}
  SharedChunks(const SharedChunks&) = delete;
  SharedChunks& operator=(const SharedChunks&) = delete;
  // What nobody has taken over counts them no more.
  ~SharedChunks() {
    for (Chunk* chunk : chunks_) chunk->note_unmapped(copies_);
  }

  // All, or none where there is no room to note them. REQUIRES: their owner's lock is held.
  void add(std::span<Chunk* const> chunks) {
    chunks_.insert(chunks_.end(), chunks.begin(), chunks.end());
    for (Chunk* chunk : chunks) chunk->note_mapped(copies_);
  }
  // In the order in which they came; whoever asks takes the mappings back.
  [[nodiscard]] std::vector<Chunk*> release() noexcept { return std::exchange(chunks_, {}); }

 private:
  const int copies_;
  std::vector<Chunk*> chunks_;
};

}  // namespace vmm
