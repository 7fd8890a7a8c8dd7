// A limit as a counter that is charged before memory is asked for. Budgets
// form a tree (device -> shared pool -> model): the model's limit, the limit
// that models share and torch's per-process fraction are this one mechanism.
// Charging is all or nothing and never overshoots, by any number of threads.
//
// A floor is a reservation. Two counters keep it: what is *used*, in bytes of memory, and
// what is *claimed*, in which each budget counts with its floor at least. Both fit under
// the limit, so what is left of a floor is nobody else's, and growing into one's own claims
// nothing new. Memory that rests on a shelf is used, and nobody's claim: it goes back to
// whoever asks. A limit that is lowered, or a floor that is raised while others hold the
// memory, leaves a budget above its limit: then nobody's claim grows until it fits again.
//
// One lock for a tree: charges come with calls of the driver (microseconds).
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "base/function_ref.h"
#include "base/sync.h"
#include "base/units.h"

namespace vmm {

// Owned by shared pointers where others stand under it: they keep it.
class Budget : public std::enable_shared_from_this<Budget> {
 public:
  Budget(std::string name, std::size_t limit_bytes, Budget* parent)
      : name_(std::move(name)),
        parent_(parent),
        mutex_(parent == nullptr ? mutex_of_root_ : parent->mutex_),
        limit_bytes_(limit_bytes) {}
  Budget(const Budget&) = delete;
  Budget& operator=(const Budget&) = delete;
  ~Budget() {
    if (floor_bytes_ != 0) set_floor(0);  // else those above may have gone
  }

  // Adds `bytes` here and in every parent, or nowhere. Returns nullptr, or the
  // budget that refused.
  [[nodiscard]] Budget* charge(std::size_t bytes) VMM_EXCLUDES(mutex_);
  void refund(std::size_t bytes) VMM_EXCLUDES(mutex_);
  // Moves a charge of `bytes` from `from` to `to` without letting go of it in
  // the budgets that both stand under. Returns nullptr, or who refused.
  [[nodiscard]] static Budget* transfer(Budget& from, Budget& to, std::size_t bytes);
  // Undoes such a transfer, though another charge may have taken its place: `from` is above
  // its limit then.
  static void transfer_back(Budget& from, Budget& to, std::size_t bytes);

  // Memory that rests on a shelf of this budget.
  // REQUIRES: `from` is this or stands under it.
  void shelve(Budget& from, std::size_t bytes) VMM_EXCLUDES(mutex_);
  // The same way back: nullptr, or who refused `to`.
  [[nodiscard]] Budget* unshelve(Budget& to, std::size_t bytes) VMM_EXCLUDES(mutex_);
  void refund_shelved(std::size_t bytes) VMM_EXCLUDES(mutex_);

  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] Budget* parent() const { return parent_; }
  [[nodiscard]] std::size_t used() const { return used_bytes_; }
  [[nodiscard]] std::size_t limit() const { return limit_bytes_; }
  // May be below used(): then every charge is refused until it fits again.
  void set_limit(std::size_t limit_bytes) VMM_EXCLUDES(mutex_);

  [[nodiscard]] std::size_t floor() const { return floor_bytes_; }
  // Throws InvalidArgumentError, and nothing has changed, where it is above the budget's own
  // limit or, together with the other floors there, above that of a budget higher up.
  void set_floor(std::size_t floor_bytes) VMM_EXCLUDES(mutex_);
  // All floors beneath this budget, in bytes.
  [[nodiscard]] std::size_t floors() const { return floors_bytes_; }
  // What is left of them: bytes under this limit that only those have who reserved them.
  [[nodiscard]] std::size_t reserved() const;
  // What is left of this budget's own.
  [[nodiscard]] std::size_t reserved_here() const { return left(reservation(), claimed_bytes_); }
  // Bytes that this budget and those above it could give to `other` without going below
  // their floors. Those that `other` stands under as well give it nothing.
  [[nodiscard]] std::size_t above_floors(const Budget& other) const;

  // When memory is short, who has a higher one gives later. It adds to those of the budgets
  // above.
  [[nodiscard]] int priority() const { return priority_; }
  void set_priority(int priority) { priority_ = priority; }
  [[nodiscard]] std::int64_t priority_in_all() const;

  // Bytes of memory that this budget alone would still allow, whoever has claims.
  [[nodiscard]] std::size_t room() const { return left(limit_bytes_, used_bytes_); }
  // Bytes that `payer`, which stands under it, may still claim, whatever rests on shelves.
  [[nodiscard]] std::size_t claimable_for(const Budget& payer) const;
  // Bytes that this budget alone would still allow `payer`, which stands under it.
  [[nodiscard]] std::size_t room_for(const Budget& payer) const;
  // The same while `kept` bytes of it stay; what floors beneath reserved for `payer` does not.
  [[nodiscard]] std::size_t room_beside(std::size_t kept, const Budget& payer) const;
  // Whether `bytes` could be charged if nothing were used.
  [[nodiscard]] bool could_hold(std::size_t bytes) const;
  // Bytes that could be charged now, over the whole chain.
  [[nodiscard]] std::size_t headroom() const;
  // The same once `shelved` bytes of what rests on the shelf of `group`, above it, have been given back.
  [[nodiscard]] std::size_t headroom_without(std::size_t shelved, const Budget& group) const;
  // Bytes that are used above the limit; and those that are claimed, but for what the floors
  // beneath come to by themselves, which nobody could give back.
  [[nodiscard]] std::size_t excess() const { return left(used_bytes_, limit_bytes_); }
  // Bytes that must go before `bytes` more can be used here: where it is over its limit, what is
  // over as well.
  [[nodiscard]] std::size_t lacking(std::size_t bytes) const {
    const std::size_t room = this->room();
    return room == 0 ? excess() + bytes : bytes - std::min(bytes, room);
  }
  [[nodiscard]] std::size_t excess_claims() const {
    return left(claimed_bytes_, std::max<std::size_t>(limit_bytes_, reservations_bytes_));
  }
  // Bytes by which the limit would have to be higher for `payer` to have `bytes`, once `shelved`
  // bytes of what rests on shelves beneath have been given back: what is used then, or claimed.
  [[nodiscard]] std::size_t rise_for(const Budget& payer, std::size_t bytes, std::size_t shelved) const;
  [[nodiscard]] bool is_over() const { return excess() != 0 || excess_claims() != 0; }

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
  [[nodiscard]] static std::size_t left(std::size_t most, std::size_t taken) { return most > taken ? most - taken : 0; }
  // The lowest that both stand under, or nullptr.
  [[nodiscard]] static Budget* common_of(const Budget& from, Budget& to);
  // More than its limit it could not use.
  [[nodiscard]] std::size_t reservation() const { return std::min<std::size_t>(floor_bytes_, limit_bytes_); }
  // What the floors here and beneath take of the parent's limit.
  [[nodiscard]] std::size_t promised() const { return std::max<std::size_t>(floor_bytes_, floors_bytes_); }
  // What of the parent's limit is this budget's.
  [[nodiscard]] std::size_t claim() const { return std::max<std::size_t>(claimed_bytes_, reservation()); }
  // Beneath `end` bytes are used, above it they are claimed only. take() returns nullptr, or
  // who refused; give() goes as far as `stop`; take_back() undoes one. Under the lock of the
  // tree.
  [[nodiscard]] Budget* take(std::size_t bytes, const Budget* end, bool has_limits = true);
  void give(std::size_t bytes, const Budget* end, const Budget* stop = nullptr);
  void take_back(std::size_t bytes, const Budget* end);
  // What `payer`'s claims and those between have reserved, and do not use: it claims nothing new here.
  [[nodiscard]] std::size_t unclaimed_of(const Budget& payer) const;
  // What it claims if nothing is used.
  [[nodiscard]] std::size_t least_claim() const { return std::max<std::size_t>(reservations_bytes_, reservation()); }
  // `change` alters its limit or floor; what those above it know of its claims follows.
  void change(const FunctionRef<void()>& change);

  const std::string name_;
  Budget* const parent_;
  Mutex mutex_of_root_;
  Mutex& mutex_;  // of the tree
  // Written under it and read by anybody.
  Relaxed<std::size_t> limit_bytes_;
  Relaxed<std::size_t> used_bytes_{0};
  Relaxed<std::size_t> claimed_bytes_{0};  // without what rests on shelves
  Relaxed<std::size_t> shelved_bytes_{0};  // here and beneath
  Relaxed<std::size_t> floor_bytes_{0};
  Relaxed<std::size_t> floors_bytes_{0};
  Relaxed<std::size_t> reservations_bytes_{0};  // what is claimed here if nothing is used
  Relaxed<int> priority_{0};
  std::atomic<int> sharers_{0};
};

}  // namespace vmm
