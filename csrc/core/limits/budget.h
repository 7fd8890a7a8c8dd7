// A limit as a counter that is charged before memory is asked for. Budgets
// form a chain (model -> shared pool -> device): the model's limit, the limit
// that models share and torch's per-process fraction are this one mechanism.
// Charging is all or nothing and never overshoots, by any number of threads.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include "base/units.h"

namespace vmm {

// Owned by shared pointers where others stand under it: they keep it.
class Budget : public std::enable_shared_from_this<Budget> {
 public:
  Budget(std::string name, std::size_t limit_bytes, Budget* parent)
      : name_(std::move(name)), limit_bytes_(limit_bytes), parent_(parent) {}
  Budget(const Budget&) = delete;
  Budget& operator=(const Budget&) = delete;

  // Adds `bytes` here and in every parent, or nowhere. Returns nullptr, or the
  // budget that refused.
  [[nodiscard]] Budget* charge(std::size_t bytes);
  void refund(std::size_t bytes);
  // Moves a charge of `bytes` from `from` to `to` without letting go of it in
  // the budgets that both stand under. Returns nullptr, or who refused.
  [[nodiscard]] static Budget* transfer(Budget& from, Budget& to, std::size_t bytes);
  // Undoes such a transfer, though another charge may have taken its place: `from` is above
  // its limit then.
  static void transfer_back(Budget& from, Budget& to, std::size_t bytes);

  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] Budget* parent() const { return parent_; }
  [[nodiscard]] std::size_t used() const { return used_bytes_.load(std::memory_order_relaxed); }
  [[nodiscard]] std::size_t limit() const { return limit_bytes_.load(std::memory_order_relaxed); }
  // May be below used(): then every charge is refused until it fits again.
  void set_limit(std::size_t limit_bytes) { limit_bytes_.store(limit_bytes, std::memory_order_relaxed); }
  // Bytes that this budget alone would still allow.
  [[nodiscard]] std::size_t room() const {
    const std::size_t most = limit();
    const std::size_t taken = used();
    return most > taken ? most - taken : 0;
  }
  // Bytes that are charged above the limit.
  [[nodiscard]] std::size_t excess() const {
    const std::size_t most = limit();
    const std::size_t taken = used();
    return taken > most ? taken - most : 0;
  }
  // Bytes that could be charged now, over the whole chain.
  [[nodiscard]] std::size_t headroom() const;
  // Models that share it, and every budget above.
  [[nodiscard]] int sharers() const { return sharers_.load(std::memory_order_relaxed); }
  // One of them, for as long as it lives. `budget`: nullptr for none.
  class Sharer {
   public:
    explicit Sharer(Budget* budget) : budget_(budget) { count(1); }
    Sharer(const Sharer&) = delete;
    Sharer& operator=(const Sharer&) = delete;
    ~Sharer() { count(-1); }

   private:
    void count(int change) {
      for (Budget* level = budget_; level != nullptr; level = level->parent_) {
        level->sharers_.fetch_add(change, std::memory_order_relaxed);
      }
    }
    Budget* const budget_;
  };
  // True when `other` is this budget or one of its parents.
  [[nodiscard]] bool stands_under(const Budget& other) const;

 private:
  // The lowest that both stand under, or nullptr.
  [[nodiscard]] static Budget* common_of(const Budget& from, Budget& to);
  [[nodiscard]] bool charge_here(std::size_t bytes);
  // Charges from here up to, not including, `end`.
  [[nodiscard]] Budget* charge_below(std::size_t bytes, const Budget* end);
  void refund_below(std::size_t bytes, const Budget* end);

  std::string name_;
  std::atomic<std::size_t> limit_bytes_;
  std::atomic<std::size_t> used_bytes_{0};
  std::atomic<int> sharers_{0};
  Budget* parent_;
};

}  // namespace vmm
