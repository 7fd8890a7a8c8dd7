// What one tensor covers, to be made read-only or writable.
#pragma once

#include <cstddef>

#include "base/units.h"

namespace vmm {

struct SealedPiece {
  Address address = 0;
  std::size_t size = 0;  // bytes
  bool is_last = true;   // the tensor's memory ends with it, and not somewhere behind
};

}  // namespace vmm
