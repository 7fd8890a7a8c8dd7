// The live blocks of a pool at one moment (checkpoint.cpp).
#pragma once

#include <cstddef>
#include <vector>

#include "driver/driver.h"

namespace vmm {

struct PoolCheckpoint {
  struct Entry {
    std::size_t offset = 0;
    std::size_t size = 0;       // bytes
    std::size_t requested = 0;  // bytes asked for
    Stream stream = nullptr;
    friend bool operator==(const Entry&, const Entry&) = default;
  };
  std::vector<Entry> slabs;  // that hold live blocks
  std::vector<Entry> small;
  std::vector<Entry> large;
  friend bool operator==(const PoolCheckpoint&, const PoolCheckpoint&) = default;
};

}  // namespace vmm
