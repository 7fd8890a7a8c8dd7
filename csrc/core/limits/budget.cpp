#include "core/limits/budget.h"

#include <algorithm>

#include "base/check.h"

namespace vmm {

bool Budget::charge_here(std::size_t bytes) {
  std::size_t used = used_bytes_.load(std::memory_order_relaxed);
  do {
    const std::size_t most = limit();
    if (used > most || bytes > most - used) return false;
  } while (!used_bytes_.compare_exchange_weak(used, used + bytes, std::memory_order_relaxed));
  return true;
}

Budget* Budget::charge_below(std::size_t bytes, const Budget* end) {
  for (Budget* level = this; level != end; level = level->parent_) {
    if (level->charge_here(bytes)) continue;
    refund_below(bytes, level);
    return level;
  }
  return nullptr;
}

void Budget::refund_below(std::size_t bytes, const Budget* end) {
  for (Budget* level = this; level != end; level = level->parent_) {
    const std::size_t before = level->used_bytes_.fetch_sub(bytes, std::memory_order_relaxed);
    VMM_CHECK(before >= bytes, "budget ", level->name_, " refunded ", bytes, " of ", before);
  }
}

Budget* Budget::charge(std::size_t bytes) { return charge_below(bytes, nullptr); }

void Budget::refund(std::size_t bytes) { refund_below(bytes, nullptr); }

Budget* Budget::common_of(const Budget& from, Budget& to) {
  Budget* common = &to;
  while (common != nullptr && !from.stands_under(*common)) common = common->parent_;
  return common;
}

Budget* Budget::transfer(Budget& from, Budget& to, std::size_t bytes) {
  const Budget* const common = common_of(from, to);
  if (Budget* refused = to.charge_below(bytes, common)) return refused;
  from.refund_below(bytes, common);
  return nullptr;
}

void Budget::transfer_back(Budget& from, Budget& to, std::size_t bytes) {
  const Budget* const common = common_of(from, to);
  for (Budget* level = &from; level != common; level = level->parent_) {
    level->used_bytes_.fetch_add(bytes, std::memory_order_relaxed);
  }
  to.refund_below(bytes, common);
}

std::size_t Budget::headroom() const {
  std::size_t least = kUnlimited;
  for (const Budget* level = this; level != nullptr; level = level->parent_) {
    least = std::min(least, level->room());
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
