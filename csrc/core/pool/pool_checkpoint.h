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
  };
  std::vector<Entry> slabs;  // that hold live blocks
  std::vector<Entry> small;
  std::vector<Entry> large;
};

}  // namespace vmm
