// The id under which torch knows a private pool.
#pragma once

#include <cstdint>

namespace vmm {

// torch's MempoolId_t: of a CUDA graph or a torch.cuda.MemPool. {0, 0}: a model's own pool.
struct RegionId {
  std::uint64_t first = 0;
  std::uint64_t second = 0;
  friend bool operator==(const RegionId& a, const RegionId& b) { return a.first == b.first && a.second == b.second; }
  friend bool operator<(const RegionId& a, const RegionId& b) {
    return a.first != b.first ? a.first < b.first : a.second < b.second;
  }
};

}  // namespace vmm
