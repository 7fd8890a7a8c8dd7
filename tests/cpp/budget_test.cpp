#include "core/limits/budget.h"

#include <gtest/gtest.h>

#include <array>
#include <deque>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/errors.h"

namespace vmm::testing {
namespace {

class BudgetChain : public ::testing::Test {
 protected:
  Budget device_{"device", 100, nullptr};
  Budget group_{"group", 60, &device_};
  Budget model_{"model", 40, &group_};
  Budget other_{"other", 40, &group_};
  Budget outside_{"outside", kUnlimited, &device_};
};

TEST_F(BudgetChain, ChargesEveryLevelOrNone) {
  EXPECT_EQ(model_.charge(40), nullptr);
  EXPECT_EQ(model_.used(), 40U);
  EXPECT_EQ(group_.used(), 40U);
  EXPECT_EQ(device_.used(), 40U);
  EXPECT_EQ(other_.charge(21), &group_) << "it names who refused";
  EXPECT_EQ(other_.used(), 0U) << "and leaves no trace";
  EXPECT_EQ(group_.used(), 40U);
  EXPECT_EQ(device_.used(), 40U);
  model_.refund(40);
  EXPECT_EQ(device_.used(), 0U);
}

TEST_F(BudgetChain, AllowsTheLimitToTheByte) {
  EXPECT_EQ(model_.charge(41), &model_);
  EXPECT_EQ(model_.charge(40), nullptr);
  EXPECT_EQ(model_.charge(1), &model_);
  EXPECT_EQ(model_.charge(0), nullptr);
}

TEST_F(BudgetChain, HeadroomIsTheLeastOfTheChain) {
  EXPECT_EQ(model_.headroom(), 40U);
  ASSERT_EQ(other_.charge(30), nullptr);
  EXPECT_EQ(model_.headroom(), 30U) << "the group's";
  ASSERT_EQ(outside_.charge(65), nullptr);
  EXPECT_EQ(model_.headroom(), 5U) << "the device's";
  EXPECT_EQ(model_.room(), 40U) << "its own";
}

TEST_F(BudgetChain, AHugeChargeDoesNotWrapAround) {
  ASSERT_EQ(model_.charge(10), nullptr);
  EXPECT_EQ(model_.charge(kUnlimited), &model_);
  EXPECT_EQ(outside_.charge(kUnlimited), &device_);
  EXPECT_EQ(outside_.used(), 0U);
  Budget free_for_all("no limit", kUnlimited, nullptr);
  ASSERT_EQ(free_for_all.charge(10), nullptr);
  EXPECT_NE(free_for_all.charge(kUnlimited), nullptr);
}

TEST_F(BudgetChain, ALimitBelowUseRefusesUntilItFitsAgain) {
  ASSERT_EQ(model_.charge(30), nullptr);
  model_.set_limit(20);
  EXPECT_EQ(model_.room(), 0U);
  EXPECT_EQ(model_.headroom(), 0U);
  EXPECT_EQ(model_.charge(1), &model_);
  model_.refund(15);
  EXPECT_EQ(model_.charge(5), nullptr);
}

TEST_F(BudgetChain, ATransferKeepsTheChargeWhereBothStandUnder) {
  ASSERT_EQ(model_.charge(40), nullptr);
  ASSERT_EQ(outside_.charge(60), nullptr);  // the device is full
  EXPECT_EQ(Budget::transfer(model_, other_, 30), nullptr);
  EXPECT_EQ(model_.used(), 10U);
  EXPECT_EQ(other_.used(), 30U);
  EXPECT_EQ(group_.used(), 40U);
  EXPECT_EQ(device_.used(), 100U);
  other_.set_limit(35);
  EXPECT_EQ(Budget::transfer(model_, other_, 10), &other_) << "above its own limit";
  EXPECT_EQ(model_.used(), 10U);
}

TEST_F(BudgetChain, AShelfIsUsedAndNobodys) {
  ASSERT_EQ(model_.charge(20), nullptr);
  group_.shelve(model_, 20);
  EXPECT_EQ(model_.used(), 0U);
  EXPECT_EQ(group_.used(), 20U);
  EXPECT_EQ(other_.charge(41), &other_);
  EXPECT_EQ(group_.room(), 40U);
  EXPECT_EQ(group_.unshelve(other_, 20), nullptr);
  EXPECT_EQ(other_.used(), 20U);
  EXPECT_EQ(group_.used(), 20U);
  EXPECT_EQ(Budget::transfer(other_, outside_, 5), nullptr);  // into another group
  EXPECT_EQ(group_.used(), 15U);
  EXPECT_EQ(device_.used(), 20U);
  group_.shelve(other_, 15);
  group_.refund_shelved(15);
  EXPECT_EQ(group_.used(), 0U);
  EXPECT_EQ(device_.used(), 5U);
}

TEST_F(BudgetChain, KnowsWhoStandsUnderWhom) {
  EXPECT_TRUE(model_.stands_under(model_));
  EXPECT_TRUE(model_.stands_under(device_));
  EXPECT_FALSE(model_.stands_under(other_));
  EXPECT_FALSE(outside_.stands_under(group_));
  EXPECT_FALSE(group_.stands_under(model_));
}

TEST_F(BudgetChain, WhatRestsOnTheShelfIsRoomOnceItHasBeenGivenBack) {
  ASSERT_EQ(other_.charge(30), nullptr);
  group_.shelve(other_, 30);
  EXPECT_EQ(model_.headroom(), 30U);
  EXPECT_EQ(model_.headroom_without(10, group_), 40U);
  other_.set_floor(25);
  EXPECT_EQ(model_.headroom_without(30, group_), 35U) << "it makes no room in a floor";
  model_.set_limit(20);
  EXPECT_EQ(model_.headroom_without(30, group_), 20U) << "nor below the group";
  other_.set_floor(0);
  group_.set_limit(20);
  EXPECT_EQ(model_.headroom_without(20, group_), 10U) << "what is above the limit goes first";
}

// -- Floors: what is left of one is nobody else's

TEST_F(BudgetChain, OthersDoNotGrowIntoAFloor) {
  other_.set_floor(30);
  EXPECT_EQ(group_.reserved(), 30U);
  EXPECT_EQ(model_.headroom(), 30U);
  EXPECT_EQ(model_.charge(31), &group_);
  EXPECT_EQ(model_.charge(30), nullptr);
  EXPECT_EQ(model_.charge(1), &group_) << "30 are used, and 30 reserved";
  EXPECT_EQ(other_.headroom(), 30U);
  EXPECT_EQ(other_.charge(30), nullptr);
  EXPECT_EQ(group_.reserved(), 0U);
  EXPECT_EQ(other_.charge(1), &group_) << "beyond its floor it is as anybody";
}

TEST_F(BudgetChain, AFloorReservesOfEveryLimitAbove) {
  other_.set_floor(30);
  EXPECT_EQ(outside_.charge(71), &device_);
  EXPECT_EQ(outside_.charge(70), nullptr);
  EXPECT_EQ(model_.charge(1), &device_);
  EXPECT_EQ(other_.charge(30), nullptr);
}

TEST_F(BudgetChain, AGroupsFloorIsItsModels) {
  group_.set_floor(50);
  other_.set_floor(30);
  EXPECT_EQ(device_.floors(), 50U) << "the models' count within it";
  EXPECT_EQ(outside_.charge(51), &device_);
  EXPECT_EQ(outside_.charge(50), nullptr);
  EXPECT_EQ(model_.charge(20), nullptr);
  EXPECT_EQ(model_.charge(1), &device_) << "the rest of the group's floor is the other's";
  EXPECT_EQ(other_.charge(30), nullptr);
}

TEST_F(BudgetChain, WhatIsReservedForItIsOpenWhateverIsKept) {
  EXPECT_EQ(group_.room_beside(10, model_), 50U);
  EXPECT_EQ(group_.room_beside(70, model_), 0U);
  model_.set_floor(30);
  EXPECT_EQ(group_.room_beside(40, model_), 30U) << "its own";
  EXPECT_EQ(group_.room_beside(10, other_), 20U) << "another's is not";
  EXPECT_EQ(model_.charge(25), nullptr);
  EXPECT_EQ(group_.room_beside(40, model_), 5U) << "what is left of it";
  group_.set_floor(55);
  EXPECT_EQ(device_.room_beside(100, model_), 30U) << "its group's as well";
  group_.set_limit(27);
  EXPECT_EQ(group_.room_beside(5, model_), 2U) << "no more than there is";
}

TEST_F(BudgetChain, FloorsThatExceedALimitTogetherAreRefused) {
  model_.set_floor(40);
  try {
    other_.set_floor(21);
    FAIL();
  } catch (const InvalidArgumentError& error) {
    EXPECT_STREQ(error.what(),
                 "floor 21 B of other: with 40 B of other floors it is above the limit 60 B of group; lower a floor or "
                 "raise that limit");
  }
  EXPECT_EQ(other_.floor(), 0U);
  EXPECT_EQ(group_.floors(), 40U);
  EXPECT_THROW(other_.set_floor(41), InvalidArgumentError) << "above its own limit";
  other_.set_floor(20);
  EXPECT_THROW(outside_.set_floor(41), InvalidArgumentError) << "above the device's";
  outside_.set_floor(40);
  model_.set_floor(10);
  EXPECT_EQ(device_.floors(), 70U);
}

TEST_F(BudgetChain, AFloorThatOthersHoldComesAsTheyGive) {
  ASSERT_EQ(model_.charge(40), nullptr);
  other_.set_floor(30);
  EXPECT_EQ(group_.excess(), 0U);
  EXPECT_EQ(group_.excess_claims(), 10U);
  EXPECT_TRUE(group_.is_over());
  EXPECT_EQ(other_.charge(30), &group_) << "there is no memory for it yet";
  EXPECT_EQ(other_.charge(20), nullptr);
  model_.refund(5);
  EXPECT_EQ(model_.charge(1), &group_) << "what was given is the other's";
  model_.refund(5);
  EXPECT_FALSE(group_.is_over());
  EXPECT_EQ(other_.charge(10), nullptr);
}

TEST_F(BudgetChain, WhatRestsOnAShelfClaimsNothing) {
  other_.set_floor(30);
  ASSERT_EQ(other_.charge(30), nullptr);
  group_.shelve(other_, 30);
  EXPECT_FALSE(group_.is_over());
  EXPECT_EQ(group_.reserved(), 30U);
  EXPECT_EQ(group_.unshelve(model_, 30), nullptr) << "it is anybody's";
  EXPECT_EQ(other_.charge(30), nullptr) << "and the reservation stands";
}

TEST_F(BudgetChain, WhatIsTransferredIsTheOthersToClaim) {
  ASSERT_EQ(model_.charge(40), nullptr);
  other_.set_floor(20);
  ASSERT_EQ(model_.headroom(), 0U);
  EXPECT_EQ(model_.above_floors(other_), 40U);
  EXPECT_EQ(Budget::transfer(model_, other_, 30), nullptr);
  EXPECT_EQ(other_.above_floors(model_), 10U);
  group_.set_limit(40);
  EXPECT_EQ(Budget::transfer(other_, model_, 11), &group_);
  EXPECT_EQ(Budget::transfer(other_, model_, 10), nullptr);
  EXPECT_EQ(group_.used(), 40U);
}

TEST_F(BudgetChain, ALimitHasToRiseByNoneOfWhatAFloorHasReserved) {
  model_.set_floor(30);
  ASSERT_EQ(other_.charge(25), nullptr);
  EXPECT_EQ(group_.rise_for(model_, 35, 0), 0U) << "30 of them are claimed already";
  EXPECT_EQ(group_.rise_for(model_, 40, 0), 5U);
  EXPECT_EQ(group_.rise_for(other_, 10, 0), 5U) << "it is another's";
}

TEST_F(BudgetChain, ABudgetGivesWhatIsAboveTheFloorsThatTheOtherDoesNotStandUnder) {
  ASSERT_EQ(model_.charge(40), nullptr);
  group_.set_floor(35);
  EXPECT_EQ(model_.above_floors(other_), 40U);
  EXPECT_EQ(model_.above_floors(outside_), 5U);
  EXPECT_EQ(model_.above_floors(model_), kUnlimited);
}

TEST_F(BudgetChain, ALimitGoesBeforeTheFloorsBeneath) {
  model_.set_floor(30);
  other_.set_floor(30);
  group_.set_limit(40);
  EXPECT_EQ(model_.charge(30), nullptr) << "within its floor";
  EXPECT_EQ(other_.charge(11), &group_);
  EXPECT_EQ(other_.charge(10), nullptr);
  EXPECT_EQ(group_.used(), 40U);
  model_.set_limit(20);
  EXPECT_EQ(group_.reserved(), 20U) << "the other's: more than its limit a model does not claim";
}

TEST_F(BudgetChain, AFloorEndsWithItsBudget) {
  {
    Budget passing("passing", 40, &group_);
    passing.set_floor(40);
    EXPECT_EQ(model_.headroom(), 20U);
  }
  EXPECT_EQ(model_.headroom(), 40U);
  EXPECT_EQ(device_.floors(), 0U);
}

TEST_F(BudgetChain, CouldHoldWhatFitsBesideOthersFloors) {
  other_.set_floor(25);
  EXPECT_TRUE(model_.could_hold(35));
  EXPECT_FALSE(model_.could_hold(36));
  EXPECT_TRUE(other_.could_hold(40)) << "its own floor is no hindrance";
  other_.set_limit(10);
  EXPECT_TRUE(model_.could_hold(40)) << "more than its limit the other does not reserve";
  model_.set_floor(30);
  group_.set_limit(25);
  EXPECT_TRUE(model_.could_hold(25)) << "within its floor";
  EXPECT_FALSE(model_.could_hold(26));
}

TEST_F(BudgetChain, FloorsAboveALoweredLimitAreNoExcess) {
  model_.set_floor(30);
  other_.set_floor(20);
  group_.set_limit(40);
  EXPECT_FALSE(group_.is_over()) << "nobody holds anything that could be given";
  Budget third("third", 40, &group_);
  EXPECT_EQ(third.charge(1), &group_);
  EXPECT_THROW(model_.set_floor(31), InvalidArgumentError);
  model_.set_floor(25);
  EXPECT_EQ(group_.floors(), 45U) << "lower is always possible";
}

TEST_F(BudgetChain, PrioritiesAddUp) {
  model_.set_priority(3);
  group_.set_priority(-5);
  EXPECT_EQ(model_.priority_in_all(), -2);
  EXPECT_EQ(group_.priority_in_all(), -5);
  model_.set_priority(std::numeric_limits<int>::max());
  group_.set_priority(std::numeric_limits<int>::max());
  EXPECT_GT(model_.priority_in_all(), std::numeric_limits<int>::max());
}

// A random program against sums that are made anew after every step. What a budget grants
// and refuses is decided from those alone.
class PlainBudgets {
 public:
  static constexpr std::size_t kCount = 7;  // device; two groups; two models each
  static constexpr std::array<std::size_t, kCount> kParent = {0, 0, 0, 1, 1, 2, 2};

  std::array<std::size_t, kCount> limit{}, floor{}, held{}, shelf{};

  [[nodiscard]] std::size_t used(std::size_t at) const {
    std::size_t sum = held[at] + shelf[at];
    for (std::size_t k = at + 1; k < kCount; ++k) sum += kParent[k] == at ? used(k) : 0;
    return sum;
  }
  // Without its floor.
  [[nodiscard]] std::size_t claimed(std::size_t at) const {
    std::size_t sum = held[at];
    for (std::size_t k = at + 1; k < kCount; ++k) sum += kParent[k] == at ? claim(k) : 0;
    return sum;
  }
  [[nodiscard]] std::size_t claim(std::size_t at) const {
    return std::max(claimed(at), std::min(floor[at], limit[at]));
  }
  [[nodiscard]] std::size_t floors(std::size_t at) const {
    std::size_t sum = 0;
    for (std::size_t k = at + 1; k < kCount; ++k) sum += kParent[k] == at ? std::max(floor[k], floors(k)) : 0;
    return sum;
  }
  // Claimed if nothing were held.
  [[nodiscard]] std::size_t reservations(std::size_t at) const {
    PlainBudgets empty = *this;
    empty.held = {};
    return empty.claimed(at);
  }
  // The lowest that has no room for what has just been done at `at`, when it was `before`.
  [[nodiscard]] std::optional<std::size_t> refusing(std::size_t at, const PlainBudgets& before) const {
    for (std::size_t level = at;; level = kParent[level]) {
      if (used(level) > before.used(level) && used(level) > limit[level]) return level;
      if (claimed(level) > before.claimed(level) && claimed(level) > limit[level]) return level;
      if (level == 0) return std::nullopt;
    }
  }
};

TEST(BudgetProgram, KeepsLimitsAndFloorsAsPlainSumsDo) {
  using Plain = PlainBudgets;
  std::mt19937 random(7);
  const auto any = [&random](std::size_t below) {
    return std::uniform_int_distribution<std::size_t>(0, below - 1)(random);
  };
  for (int turn = 0; turn < 20; ++turn) {
    Plain plain;
    std::deque<Budget> budgets;
    for (std::size_t k = 0; k < Plain::kCount; ++k) {
      plain.limit[k] = k == 0 ? 300 : 200;
      budgets.emplace_back("budget " + std::to_string(k), plain.limit[k],
                           k == 0 ? nullptr : &budgets[Plain::kParent[k]]);
    }
    const auto index = [&](const Budget* budget) -> std::optional<std::size_t> {
      for (std::size_t k = 0; k < Plain::kCount; ++k) {
        if (&budgets[k] == budget) return k;
      }
      return std::nullopt;
    };
    for (int step = 0; step < 2000; ++step) {
      const std::size_t at = 3 + any(4);
      const std::size_t to = 3 + any(4);
      const std::size_t bytes = 1 + any(60);
      const Plain before = plain;
      std::optional<std::size_t> refused;
      switch (any(8)) {
        case 0:
        case 1:
          plain.held[at] += bytes;
          refused = index(budgets[at].charge(bytes));
          ASSERT_EQ(refused, plain.refusing(at, before)) << "charge at step " << step;
          break;
        case 2:
          if (plain.held[at] < bytes) continue;
          plain.held[at] -= bytes;
          budgets[at].refund(bytes);
          break;
        case 3: {
          if (plain.held[at] < bytes) continue;
          plain.held[at] -= bytes;
          const Plain without = plain;
          plain.held[to] += bytes;
          // What both stand under goes on holding it.
          std::optional<std::size_t> expected;
          for (std::size_t level = to; !expected.has_value(); level = Plain::kParent[level]) {
            const bool is_common = plain.used(level) == before.used(level);
            const bool is_full = !is_common && plain.used(level) > plain.limit[level];
            const bool claims = plain.claimed(level) > without.claimed(level);
            if (is_full || (claims && plain.claimed(level) > plain.limit[level])) expected = level;
            if (level == 0) break;
          }
          refused = index(Budget::transfer(budgets[at], budgets[to], bytes));
          if (at != to) {
            ASSERT_EQ(refused, expected) << "transfer at step " << step;
          }
          break;
        }
        case 4: {
          const std::size_t group = Plain::kParent[at];
          if (plain.held[at] < bytes) continue;
          plain.held[at] -= bytes;
          plain.shelf[group] += bytes;
          budgets[group].shelve(budgets[at], bytes);
          break;
        }
        case 5: {
          const std::size_t group = Plain::kParent[at];
          if (plain.shelf[group] < bytes) continue;
          plain.shelf[group] -= bytes;
          if (any(2) == 0) {
            budgets[group].refund_shelved(bytes);
            break;
          }
          plain.held[at] += bytes;
          refused = index(budgets[group].unshelve(budgets[at], bytes));
          ASSERT_EQ(refused, plain.refusing(at, before)) << "unshelve at step " << step;
          break;
        }
        case 6: {
          const std::size_t of = 1 + any(6);
          const std::size_t floor = any(3) == 0 ? 0 : any(120);
          plain.floor[of] = floor;
          bool is_possible = floor <= plain.limit[of] || floor <= before.floor[of];
          for (std::size_t level = of; level != 0;) {
            level = Plain::kParent[level];
            if (plain.floors(level) > before.floors(level) && plain.floors(level) > plain.limit[level])
              is_possible = false;
          }
          bool is_done = true;
          try {
            budgets[of].set_floor(floor);
          } catch (const InvalidArgumentError&) {
            is_done = false;
          }
          ASSERT_EQ(is_done, is_possible) << "floor at step " << step;
          if (!is_done) plain = before;
          break;
        }
        default: {
          const std::size_t of = any(Plain::kCount);
          plain.limit[of] = 50 + any(200);
          budgets[of].set_limit(plain.limit[of]);
        }
      }
      if (refused.has_value()) plain = before;
      for (std::size_t k = 0; k < Plain::kCount; ++k) {
        ASSERT_EQ(budgets[k].used(), plain.used(k)) << k << " at step " << step;
        ASSERT_EQ(budgets[k].floors(), plain.floors(k)) << k << " at step " << step;
        const std::size_t claimed = plain.claimed(k);
        const std::size_t most = std::max(plain.limit[k], plain.reservations(k));
        ASSERT_EQ(budgets[k].excess_claims(), claimed > most ? claimed - most : 0) << k << " at step " << step;
      }
      // Whether it could hold so much: on the same tree with nothing in it.
      Plain empty = plain;
      empty.held = empty.shelf = {};
      Plain tried = empty;
      tried.held[at] = 4 * bytes;
      ASSERT_EQ(budgets[at].could_hold(4 * bytes), !tried.refusing(at, empty).has_value()) << "at step " << step;
      // What is said to fit does, and a byte more does not.
      const std::size_t headroom = budgets[at].headroom();
      ASSERT_NE(budgets[at].charge(headroom + 1), nullptr) << "headroom at step " << step;
      if (headroom == 0) continue;
      ASSERT_EQ(budgets[at].charge(headroom), nullptr) << "headroom at step " << step;
      budgets[at].refund(headroom);
    }
  }
}

// -- Threads

TEST_F(BudgetChain, NeverOvershootsByAnyNumberOfThreads) {
  std::atomic<std::size_t> most{0};
  std::vector<std::thread> threads;
  for (int k = 0; k < 8; ++k) {
    threads.emplace_back([&, k] {
      Budget& mine = k % 2 == 0 ? model_ : other_;
      for (int step = 0; step < 5000; ++step) {
        if (mine.charge(7) != nullptr) continue;
        std::size_t seen = group_.used();
        std::size_t highest = most.load();
        while (seen > highest && !most.compare_exchange_weak(highest, seen)) {
        }
        mine.refund(7);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_LE(most, 60U);
  EXPECT_EQ(device_.used(), 0U);
}

TEST_F(BudgetChain, AFloorIsThereWheneverItIsWantedWhateverOthersDo) {
  other_.set_floor(30);
  std::atomic<bool> ends{false};
  std::vector<std::thread> threads;
  for (Budget* budget : {&model_, &outside_, &model_}) {
    threads.emplace_back([budget, &ends] {
      while (!ends) {
        for (const std::size_t bytes : {7U, 3U, 1U}) {
          if (budget->charge(bytes) == nullptr) budget->refund(bytes);
        }
      }
    });
  }
  for (int step = 0; step < 20000; ++step) {
    ASSERT_EQ(other_.charge(30), nullptr) << step;
    other_.refund(30);
  }
  ends = true;
  for (auto& thread : threads) thread.join();
}

}  // namespace
}  // namespace vmm::testing
