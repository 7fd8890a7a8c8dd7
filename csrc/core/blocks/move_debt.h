// How many chunks a pool has moved about instead of growing that its program's work has not
// paid for. What the pool may hold beyond its peak rises with it (growth_policy), so that a
// program that never settles pays for a while and not for ever. Counted in bytes handed
// out, not in time: the same program decides the same in every run. It never knows a
// chunk.
#pragma once

#include <cstddef>

namespace vmm {

class MoveDebt {
 public:
  // `handed_out`: bytes of large blocks, slabs and pages that the pool has handed out so
  // far; never less than before.
  [[nodiscard]] std::size_t moves(std::size_t handed_out);
  void add(std::size_t moves) { moves_ += moves; }

 private:
  std::size_t moves_ = 0;
  std::size_t toward_next_ = 0;  // bytes
  std::size_t seen_ = 0;         // bytes
};

}  // namespace vmm
