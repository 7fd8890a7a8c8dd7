#include "core/limits/budget.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

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
  EXPECT_EQ(Budget::transfer(model_, other_, 11), &other_) << "above its own limit";
  EXPECT_EQ(model_.used(), 10U);
}

TEST_F(BudgetChain, ATransferUpAndDownTheChain) {
  ASSERT_EQ(model_.charge(20), nullptr);
  EXPECT_EQ(Budget::transfer(model_, group_, 20), nullptr);  // onto the shelf
  EXPECT_EQ(model_.used(), 0U);
  EXPECT_EQ(group_.used(), 20U);
  EXPECT_EQ(Budget::transfer(group_, other_, 20), nullptr);  // and off it
  EXPECT_EQ(other_.used(), 20U);
  EXPECT_EQ(group_.used(), 20U);
  EXPECT_EQ(Budget::transfer(other_, outside_, 5), nullptr);  // into another group
  EXPECT_EQ(group_.used(), 15U);
  EXPECT_EQ(device_.used(), 20U);
}

TEST_F(BudgetChain, KnowsWhoStandsUnderWhom) {
  EXPECT_TRUE(model_.stands_under(model_));
  EXPECT_TRUE(model_.stands_under(device_));
  EXPECT_FALSE(model_.stands_under(other_));
  EXPECT_FALSE(outside_.stands_under(group_));
  EXPECT_FALSE(group_.stands_under(model_));
}

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

}  // namespace
}  // namespace vmm::testing
