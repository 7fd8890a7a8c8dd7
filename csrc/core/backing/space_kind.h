// What a pool's space is, for as long as it lives.
#pragma once

#include <atomic>
#include <cstddef>

#include "core/backing/pool_kind.h"

namespace vmm {

struct SpaceKind {
  PoolKind kind = PoolKind::model;
  std::size_t page = 0;                    // bytes: what is backed is backed in multiples of it
  std::size_t capacity = 0;                // bytes of addresses
  bool is_uniform = false;                 // every chunk is exactly one page
  bool no_split = false;                   // a block has its chunks for itself
  bool grows_freely = false;               // takes new memory rather than moves what is idle
  const std::atomic<bool>& within_chunks;  // see DeviceMemory::keep_blocks_within_chunks()

  [[nodiscard]] bool is_range() const { return kind == PoolKind::range; }
  [[nodiscard]] bool is_spill() const { return kind == PoolKind::spill; }
  // Where tensors are made as a program makes them: no graph uses it, and nothing else is it for.
  [[nodiscard]] bool is_ordinary() const { return kind == PoolKind::model || kind == PoolKind::tag; }
  // Whether each block is to lie within one chunk.
  [[nodiscard]] bool keeps_within_chunks() const {
    return !is_uniform && (kind == PoolKind::mem_pool || within_chunks.load(std::memory_order_relaxed));
  }
};

}  // namespace vmm
