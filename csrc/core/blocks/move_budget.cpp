#include "core/blocks/move_budget.h"

#include <algorithm>

#include "base/units.h"

namespace vmm {

namespace {

// A move takes 55 us of CPU: 1350 of them 75 ms, which a run of requests may cost at
// once, and only programs that need them spend them. Caches of all sizes that come and
// go (4 GiB, in chunks of 8 MiB) ended 9 to 12 % above their peak at 1080, and 3 % at
// 1350; more saved nothing there. Work on a GPU of some TB/s touches what it allocates
// several times, so that a hundredth of its time buys a move for each 8 GiB.
constexpr std::size_t kMost = 1350;
constexpr std::size_t kLowestPrice = 8 * kGiB;
// Once spent it rests until a quarter has come back: meanwhile the pool grows, and
// what it has grown to may be all that it lacked. If not, the next round is rarer:
// a churn of 2 to 256 MiB made 1.2 moves for each 1000 blocks for ever where the
// price rose fourfold.
constexpr std::size_t kResume = kMost / 4;
constexpr std::size_t kPriceRise = 8;
constexpr std::size_t kHighestPrice = 64 * kLowestPrice;

}  // namespace

MoveBudget::MoveBudget() : left_(kMost), price_(kLowestPrice) {}

bool MoveBudget::may_move(std::size_t handed_out) {
  toward_next_ += handed_out - seen_;
  seen_ = handed_out;
  left_ = std::min(left_ + toward_next_ / price_, kMost);
  toward_next_ %= price_;
  if (left_ >= kResume) is_spent_ = false;
  return !is_spent_;
}

void MoveBudget::spend(std::size_t moves) {
  left_ -= std::min(moves, left_);
  if (left_ != 0 || is_spent_ || moves == 0) return;
  is_spent_ = true;
  price_ = std::min(price_ * kPriceRise, kHighestPrice);
}

}  // namespace vmm
