#include "core/blocks/move_debt.h"

namespace vmm {

namespace {

// A move takes some 70 us of CPU: a program that goes on moving as it pays spends a
// fortieth of its time so. Six times a recorded program whose caches are of all sizes
// (own_continuous, 300 steps behind) ends at 1.045 of what it used at most; where a move
// was paid by 512 GiB handed out, which that program takes two seconds for, it ended at
// 1.25, for half of the driver calls: a hundredth of its time. At 6 ms it is 1.11.
constexpr std::chrono::nanoseconds kPrice = std::chrono::milliseconds(3);

}  // namespace

std::size_t MoveDebt::moves(std::chrono::nanoseconds now) {
  const auto paid = static_cast<std::size_t>((now - paid_until_) / kPrice);
  if (paid >= moves_) {  // what is left over is no credit
    moves_ = 0;
    paid_until_ = now;
  } else {
    moves_ -= paid;
    paid_until_ += static_cast<std::chrono::nanoseconds::rep>(paid) * kPrice;
  }
  return moves_;
}

}  // namespace vmm
