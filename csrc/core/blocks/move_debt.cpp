#include "core/blocks/move_debt.h"

#include <algorithm>

#include "base/units.h"

namespace vmm {

namespace {

// A move takes 55 us of CPU. Work on a GPU of some TB/s touches what it allocates several
// times, 512 GiB in half a second and more: a program that goes on moving as it pays
// spends a ten thousandth of its time. At 64 GiB replayed programs ended the same.
constexpr std::size_t kPrice = 512 * kGiB;

}  // namespace

std::size_t MoveDebt::moves(std::size_t handed_out) {
  toward_next_ += handed_out - seen_;
  seen_ = handed_out;
  moves_ -= std::min(toward_next_ / kPrice, moves_);
  toward_next_ %= kPrice;
  return moves_;
}

}  // namespace vmm
