// What a pool's space is, for as long as it lives.
#pragma once

#include <atomic>
#include <cstddef>

namespace vmm {

struct SpaceKind {
  std::size_t page = 0;                    // bytes: what is backed is backed in multiples of it
  std::size_t capacity = 0;                // bytes of addresses
  bool is_uniform = false;                 // every chunk is exactly one page
  bool no_split = false;                   // a block has its chunks for itself
  bool is_mem_pool = false;                // libraries register what it holds, of before they came too
  bool is_range = false;                   // one tensor's addresses: its pages begin as zero, whoever had them
  bool is_spill = false;                   // its chunks are the host's
  bool is_ordinary = true;                 // a model's or a tag's: no graph uses it, and it is no range
  bool grows_freely = false;               // takes new memory rather than moves what is idle
  const std::atomic<bool>& within_chunks;  // see DeviceMemory::keep_blocks_within_chunks()

  // Whether each block is to lie within one chunk.
  [[nodiscard]] bool keeps_within_chunks() const {
    return !is_uniform && (is_mem_pool || within_chunks.load(std::memory_order_relaxed));
  }
};

}  // namespace vmm
