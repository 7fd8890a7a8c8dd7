// The function that a shared pool's user gives for requests that find no memory, as a rung.
#include <gtest/gtest.h>

#include <memory>
#include <utility>
#include <vector>

#include "cpp/reclaim_lab.h"

namespace vmm::testing {
namespace {

class Pressure : public Reclaim {
 protected:
  // What is called from now on, and noted: for how much, and whose.
  void relieve_by(const std::function<bool()>& what) {
    lab_.memory().set_on_pressure(group_, [this, what](std::size_t bytes, const std::shared_ptr<Pool>& model) {
      calls_.emplace_back(bytes, model);
      return what();
    });
  }
  std::vector<std::pair<std::size_t, std::shared_ptr<Pool>>> calls_;
};

TEST_F(Pressure, WhatItFreesElsewhereIsTaken) {
  const auto a = model("a");
  const auto b = model("b");
  std::vector<Address> kept;
  for (int k = 0; k < 4; ++k) kept.push_back(lab_.allocate(*a, 8 * kMiB));
  relieve_by([&] {
    if (kept.empty()) return false;
    lab_.free(kept.back());
    kept.pop_back();
    return true;
  });
  lab_.allocate(*b, 12 * kMiB);
  EXPECT_EQ(calls_.size(), 2U);
  EXPECT_EQ(calls_.front(), std::make_pair(12 * kMiB, b));
  EXPECT_EQ(kept.size(), 2U);
}

TEST_F(Pressure, IsNotCalledWhereIdleMemoryDoes) {
  const auto a = model("a");
  const auto b = model("b");
  lab_.leave_idle(*a, 32 * kMiB);
  relieve_by([] { return true; });
  lab_.allocate(*b, 12 * kMiB);
  EXPECT_TRUE(calls_.empty());
}

TEST_F(Pressure, ComesBeforeTheWait) {
  const auto a = model("a");
  const auto b = model("b");
  const Address busy = lab_.allocate(*a, 16 * kMiB, kOne);
  const Address idle = lab_.allocate(*a, 16 * kMiB, kOne);
  a->record_stream(busy, kTwo);
  lab_.driver.hold_fences(kTwo);
  lab_.free(busy);
  lab_.driver.clear_calls();
  relieve_by([&] {
    lab_.free(idle);
    return true;
  });
  lab_.allocate(*b, 16 * kMiB);
  EXPECT_EQ(calls_.size(), 1U);
  EXPECT_EQ(waits(), 0U);
  lab_.driver.release_fences();
}

// What the driver lacked for a moment is there when the shelves are looked at once more.
TEST_F(Pressure, ARequestThatHasClimbedIsTriedAgainBeforeAnyWait) {
  const auto graphs = lab_.memory().create_part(model("a"), {1, 1}, /*no_split=*/true);  // asks the driver once
  lab_.allocate(*graphs, 32 * kMiB);
  lab_.driver.hold_fences();
  relieve_by([&] {
    lab_.memory().set_limit(group_, 40 * kMiB);
    lab_.driver.fail_nth(Call::create, 1, no_memory());
    return true;
  });
  lab_.allocate(*graphs, 8 * kMiB);
  EXPECT_EQ(lab_.driver.failures(), 1U);
  EXPECT_EQ(waits(), 0U);
}

// What it has freed waits for queued work: that is waited for before more is evicted.
TEST_F(Pressure, WaitsForWhatItFreedBeforeItAsksForMore) {
  const auto a = model("a");
  const auto b = model("b");
  std::vector<Address> kept;
  for (int k = 0; k < 4; ++k) {
    kept.push_back(lab_.allocate(*a, 8 * kMiB, kOne));
    a->record_stream(kept.back(), kTwo);
  }
  lab_.driver.hold_fences(kTwo);
  relieve_by([&] {
    lab_.free(kept.back());
    kept.pop_back();
    return true;
  });
  lab_.allocate(*b, 8 * kMiB);
  EXPECT_EQ(calls_.size(), 1U);
  lab_.driver.release_fences();
}

TEST_F(Pressure, MayEndTheVeryModelThatAsks) {
  const auto a = model("a");
  const auto b = model("b");
  lab_.allocate(*b, 32 * kMiB);
  relieve_by([&] {
    lab_.memory().close_pool(*a, /*force=*/true);
    return true;
  });
  EXPECT_THROW(lab_.allocate(*a, 2 * kMiB), VmmError);
  EXPECT_EQ(calls_.size(), 1U);
}

TEST_F(Pressure, IsNotCalledWhileItMayNotBe) {
  const auto a = model("a");
  relieve_by([] { return true; });
  {
    const Ladder::NoRelief now;
    EXPECT_THROW(lab_.allocate(*a, 34 * kMiB), OutOfMemoryError);
  }
  EXPECT_TRUE(calls_.empty());
}

TEST_F(Pressure, IsNotCalledForWhatThePoolHasNoAddressesFor) {
  PoolSpec spec = Lab::spec("small");
  spec.capacity = 8 * kMiB;
  const auto a = lab_.pool(spec, &group_);
  relieve_by([] { return true; });
  EXPECT_THROW(lab_.allocate(*a, 16 * kMiB), OutOfMemoryError);
  EXPECT_TRUE(calls_.empty());
}

TEST_F(Pressure, IsNotCalledForWhatTheDeviceCannotHold) {
  const auto a = model("a");
  relieve_by([] { return true; });
  EXPECT_THROW(lab_.allocate(*a, std::size_t{1} << 40U), OutOfMemoryError);
  EXPECT_TRUE(calls_.empty());
}

TEST_F(Pressure, MayRaiseTheLimitThatRefused) {
  const auto a = model("a");
  relieve_by([&] {
    lab_.memory().set_limit(group_, 48 * kMiB);
    return true;
  });
  lab_.allocate(*a, 40 * kMiB);
  EXPECT_EQ(calls_.size(), 1U);
}

TEST_F(Pressure, ItsOwnRequestsDoNotCallItAgain) {
  const auto a = model("a");
  const Address kept = lab_.allocate(*a, 32 * kMiB);
  relieve_by([&] {
    EXPECT_THROW(lab_.allocate(*a, 2 * kMiB), OutOfMemoryError);
    if (calls_.size() == 1) lab_.free(kept);
    return calls_.size() == 1;
  });
  lab_.allocate(*a, 30 * kMiB);
  EXPECT_EQ(calls_.size(), 1U);
}

TEST_F(Pressure, AsksOftenAndNotForEver) {
  const auto a = model("a");
  lab_.allocate(*a, 32 * kMiB);
  relieve_by([] { return true; });
  EXPECT_THROW(lab_.allocate(*a, 2 * kMiB), OutOfMemoryError);
  EXPECT_EQ(calls_.size(), std::size_t{Ladder::kMostReliefs});
  relieve_by([] { return false; });
  calls_.clear();
  EXPECT_THROW(lab_.allocate(*a, 2 * kMiB), OutOfMemoryError);
  EXPECT_EQ(calls_.size(), 1U);
}

TEST_F(Pressure, OnlyModelsOfItsGroupCallIt) {
  const auto a = model("a");
  const auto beside = lab_.pool("beside", 4 * kMiB);
  relieve_by([] { return true; });
  EXPECT_THROW(lab_.allocate(*beside, 8 * kMiB), OutOfMemoryError);
  EXPECT_TRUE(calls_.empty());
  lab_.memory().set_on_pressure(group_, nullptr);
  EXPECT_THROW(lab_.allocate(*a, 34 * kMiB), OutOfMemoryError);
  EXPECT_TRUE(calls_.empty());
}

TEST_F(Pressure, APartsRequestIsItsModels) {
  const auto a = model("a");
  const auto part = lab_.memory().create_part(a, {1, 1}, /*no_split=*/false);
  relieve_by([] { return false; });
  EXPECT_THROW(lab_.allocate(*part, 34 * kMiB), OutOfMemoryError);
  ASSERT_EQ(calls_.size(), 1U);
  EXPECT_EQ(calls_.front().second, a);
}

TEST_F(Pressure, MayEndTheVeryModelThatHasTheMemory) {
  const auto a = model("a");
  const auto b = model("b");
  const Address kept = lab_.allocate(*a, 32 * kMiB);
  relieve_by([&] {
    lab_.free(kept);
    lab_.memory().close_pool(*a, /*force=*/false);
    return true;
  });
  lab_.allocate(*b, 32 * kMiB);
  EXPECT_EQ(calls_.size(), 1U);
}

}  // namespace
}  // namespace vmm::testing
