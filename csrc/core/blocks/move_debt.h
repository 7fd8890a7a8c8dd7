// How many chunks a pool has moved about instead of growing that time has not paid for.
// What the pool may hold beyond its peak rises with it (growth_policy): so moves take a
// small share of a program's time and no more, and what never settles pays for a while
// and not for ever. It is told the time, and never knows a chunk.
#pragma once

#include <chrono>
#include <cstddef>

namespace vmm {

class MoveDebt {
 public:
  // `now`: of a clock that never goes back.
  [[nodiscard]] std::size_t moves(std::chrono::nanoseconds now);
  // REQUIRES: moves() was asked just before.
  void add(std::size_t moves) { moves_ += moves; }

 private:
  std::size_t moves_ = 0;
  std::chrono::nanoseconds paid_until_{0};
};

}  // namespace vmm
