// How many chunks a pool may move about instead of growing, so that a program
// that never settles pays for it once and not for ever. Counted in bytes handed
// out, not in time: the same program decides the same in every run. It never
// knows a chunk.
#pragma once

#include <cstddef>

namespace vmm {

class MoveBudget {
 public:
  MoveBudget();
  // Whether a move may be made now. `handed_out`: bytes of large blocks, slabs and
  // pages that the pool has handed out so far; never less than before.
  [[nodiscard]] bool may_move(std::size_t handed_out);
  void spend(std::size_t moves);

 private:
  std::size_t left_;             // moves
  std::size_t price_;            // bytes handed out for each move
  std::size_t toward_next_ = 0;  // bytes
  std::size_t seen_ = 0;         // bytes
  bool is_spent_ = false;
};

}  // namespace vmm
