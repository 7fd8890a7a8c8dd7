#include "core/limits/budget.h"

#include <algorithm>
#include <array>

#include "base/check.h"
#include "base/errors.h"

namespace vmm {

namespace {

bool fits(std::size_t more, std::size_t taken, std::size_t most) { return taken <= most && more <= most - taken; }

}  // namespace

// --------------------------------------------------------- under the tree's lock

Budget* Budget::take(std::size_t bytes, const Budget* end, bool has_limits) {
  std::size_t claim_bytes = bytes;
  bool is_used = true;
  for (Budget* level = this; level != nullptr; level = level->parent_) {
    is_used = is_used && level != end;
    const bool is_full = is_used && !fits(bytes, level->used_bytes_, level->limit_bytes_);
    const bool is_claimed = claim_bytes != 0 && !fits(claim_bytes, level->claimed_bytes_, level->limit_bytes_);
    if (has_limits && (is_full || is_claimed)) {
      give(bytes, end, level);
      return level;
    }
    const std::size_t before = level->claim();
    if (is_used) level->used_bytes_ = level->used_bytes_ + bytes;
    level->claimed_bytes_ = level->claimed_bytes_ + claim_bytes;
    claim_bytes = level->claim() - before;
  }
  return nullptr;
}

void Budget::give(std::size_t bytes, const Budget* end, const Budget* stop) {
  std::size_t claim_bytes = bytes;
  bool is_used = true;
  for (Budget* level = this; level != stop; level = level->parent_) {
    is_used = is_used && level != end;
    VMM_CHECK(!is_used || level->used_bytes_ >= bytes, "budget ", level->name_, " refunded ", bytes, " of ",
              std::size_t{level->used_bytes_});
    VMM_CHECK(level->claimed_bytes_ >= claim_bytes, "budget ", level->name_, " claims ",
              std::size_t{level->claimed_bytes_}, ", less ", claim_bytes);
    const std::size_t before = level->claim();
    if (is_used) level->used_bytes_ = level->used_bytes_ - bytes;
    level->claimed_bytes_ = level->claimed_bytes_ - claim_bytes;
    claim_bytes = before - level->claim();
  }
}

void Budget::take_back(std::size_t bytes, const Budget* end) {
  const Budget* const refused = take(bytes, end, /*has_limits=*/false);
  VMM_CHECK(refused == nullptr, "budget ", name_, " does not get back what it gave");
}

void Budget::change(const FunctionRef<void()>& change) {
  // Modulo 2^64: it may be less.
  const auto sums = [](const Budget& of) { return std::array{of.claim(), of.least_claim(), of.promised()}; };
  auto before = sums(*this);
  change();
  for (Budget* level = this; level->parent_ != nullptr; level = level->parent_) {
    Budget& above = *level->parent_;
    const auto [claim, least, promised] = sums(*level);
    const auto [claim_was, least_was, promised_was] = before;
    before = sums(above);
    above.claimed_bytes_ = above.claimed_bytes_ + (claim - claim_was);
    above.reservations_bytes_ = above.reservations_bytes_ + (least - least_was);
    above.floors_bytes_ = above.floors_bytes_ + (promised - promised_was);
  }
}

// ------------------------------------------------------------------ charging

Budget* Budget::charge(std::size_t bytes) {
  const MutexLock lock(mutex_);
  return take(bytes, nullptr);
}

void Budget::refund(std::size_t bytes) {
  const MutexLock lock(mutex_);
  give(bytes, nullptr);
}

Budget* Budget::common_of(const Budget& from, Budget& to) {
  Budget* common = &to;
  while (common != nullptr && !from.stands_under(*common)) common = common->parent_;
  return common;
}

Budget* Budget::transfer(Budget& from, Budget& to, std::size_t bytes) {
  const Budget* const common = common_of(from, to);
  const MutexLock lock(from.mutex_);
  // First: what it claims there is what the other may claim.
  from.give(bytes, common);
  Budget* const refused = to.take(bytes, common);
  if (refused != nullptr) from.take_back(bytes, common);
  return refused;
}

void Budget::transfer_back(Budget& from, Budget& to, std::size_t bytes) {
  const Budget* const common = common_of(from, to);
  const MutexLock lock(from.mutex_);
  to.give(bytes, common);
  from.take_back(bytes, common);
}

void Budget::shelve(Budget& from, std::size_t bytes) {
  VMM_CHECK(from.stands_under(*this), "budget ", from.name_, " does not stand under ", name_);
  const MutexLock lock(mutex_);
  from.give(bytes, this);
  for (Budget* level = this; level != nullptr; level = level->parent_) {
    level->shelved_bytes_ = level->shelved_bytes_ + bytes;
  }
}

Budget* Budget::unshelve(Budget& to, std::size_t bytes) {
  VMM_CHECK(to.stands_under(*this), "budget ", to.name_, " does not stand under ", name_);
  const MutexLock lock(mutex_);
  if (Budget* const refused = to.take(bytes, this)) return refused;
  for (Budget* level = this; level != nullptr; level = level->parent_) {
    level->shelved_bytes_ = level->shelved_bytes_ - bytes;
  }
  return nullptr;
}

void Budget::refund_shelved(std::size_t bytes) {
  const MutexLock lock(mutex_);
  for (Budget* level = this; level != nullptr; level = level->parent_) {
    VMM_CHECK(level->shelved_bytes_ >= bytes, "budget ", level->name_, " refunded ", bytes, " of a shelf of ",
              std::size_t{level->shelved_bytes_});
    level->used_bytes_ = level->used_bytes_ - bytes;
    level->shelved_bytes_ = level->shelved_bytes_ - bytes;
  }
}

// ---------------------------------------------------------- limits and floors

void Budget::set_limit(std::size_t limit_bytes) {
  const MutexLock lock(mutex_);
  change([&] { limit_bytes_ = limit_bytes; });
}

void Budget::set_floor(std::size_t floor_bytes) {
  const MutexLock lock(mutex_);
  if (floor_bytes == floor_bytes_) return;
  if (floor_bytes > std::max<std::size_t>(limit_bytes_, floor_bytes_)) {
    throw InvalidArgumentError("floor " + format_bytes(floor_bytes) + " is above the limit " +
                               format_bytes(limit_bytes_) + " of " + name_);
  }
  std::size_t before = promised();
  std::size_t after = std::max<std::size_t>(floor_bytes, floors_bytes_);
  for (const Budget* level = parent_; level != nullptr && after > before; level = level->parent_) {
    const std::size_t others = level->floors_bytes_ - before;
    if (!fits(after, others, level->limit_bytes_)) {
      throw InvalidArgumentError("floor " + format_bytes(floor_bytes) + " of " + name_ + ": " +
                                 (others == 0 ? "it" : "with " + format_bytes(others) + " of other floors it") +
                                 " is above the limit " + format_bytes(level->limit_bytes_) + " of " + level->name_ +
                                 "; lower a floor or raise that limit");
    }
    before = level->promised();
    after = std::max<std::size_t>(level->floor_bytes_, others + after);
  }
  change([&] { floor_bytes_ = floor_bytes; });
}

std::size_t Budget::reserved() const { return left(claimed_bytes_ + shelved_bytes_, used_bytes_); }

std::size_t Budget::above_floors(const Budget& other) const {
  std::size_t least = kUnlimited;
  for (const Budget* level = this; level != nullptr && !other.stands_under(*level); level = level->parent_) {
    least = std::min(least, left(level->used_bytes_, level->reservation()));
  }
  return least;
}

std::int64_t Budget::priority_in_all() const {
  std::int64_t sum = 0;
  for (const Budget* level = this; level != nullptr; level = level->parent_) sum += level->priority_;
  return sum;
}

std::size_t Budget::unclaimed_of(const Budget& payer) const {
  std::size_t free = 0;
  for (const Budget* level = &payer; level != this && level != nullptr; level = level->parent_) {
    free += left(level->reservation(), level->claimed_bytes_);
  }
  return free;
}

std::size_t Budget::rise_for(const Budget& payer, std::size_t bytes, std::size_t shelved) const {
  const std::size_t used = left(left(used_bytes_, shelved) + bytes, limit_bytes_);
  const std::size_t claimed = left(bytes, unclaimed_of(payer));
  return claimed == 0 ? used : std::max(used, left(claimed_bytes_ + claimed, limit_bytes_));
}

std::size_t Budget::claimable_for(const Budget& payer) const {
  const std::size_t free = unclaimed_of(payer);
  const std::size_t unclaimed = left(limit_bytes_, claimed_bytes_);
  return unclaimed > kUnlimited - free ? kUnlimited : unclaimed + free;
}

std::size_t Budget::room_for(const Budget& payer) const { return std::min(room(), claimable_for(payer)); }

std::size_t Budget::room_beside(std::size_t kept, const Budget& payer) const {
  std::size_t own = 0;
  for (const Budget* level = &payer; level != this; level = level->parent_) own += level->reserved_here();
  const std::size_t room = room_for(payer);
  return std::max(std::min(own, room), left(room, kept));
}

bool Budget::could_hold(std::size_t bytes) const {
  std::size_t claim_bytes = bytes;  // as take() does it, on an empty tree
  for (const Budget* level = this; level != nullptr; level = level->parent_) {
    if (bytes > level->limit_bytes_) return false;
    const std::size_t others = level->reservations_bytes_;
    if (claim_bytes != 0 && !fits(claim_bytes, others, level->limit_bytes_)) return false;
    claim_bytes = std::max(others + claim_bytes, level->reservation()) - level->least_claim();
  }
  return true;
}

std::size_t Budget::headroom() const { return headroom_without(0, *this); }

std::size_t Budget::headroom_without(std::size_t shelved, const Budget& group) const {
  std::size_t least = kUnlimited;
  bool carries_it = false;
  for (const Budget* level = this; level != nullptr; level = level->parent_) {
    carries_it = carries_it || level == &group;
    const std::size_t used = level->used_bytes_;
    const std::size_t room = left(level->limit_bytes_, used - (carries_it ? std::min(used, shelved) : 0));
    least = std::min({least, room, level->claimable_for(*this)});
  }
  return least;
}

bool Budget::stands_under(const Budget& other) const {
  for (const Budget* level = this; level != nullptr; level = level->parent_) {
    if (level == &other) return true;
  }
  return false;
}

}  // namespace vmm
