#include "core/fences.h"

#include <gtest/gtest.h>

#include <optional>

#include "cpp/lab.h"

namespace vmm::testing {
namespace {

const Stream kOne = stream(0x10);
const Stream kTwo = stream(0x20);

class Fences : public ::testing::Test {
 protected:
  Fences() { driver_.set_wait_on_held(ScriptedDriver::WaitOnHeld::pass); }
  ~Fences() override {
    pool_.reset();
    EXPECT_EQ(driver_.leaks(), "");
  }
  HostDriver host_{HostDriverOptions{kPage, kGiB, 1}};
  ScriptedDriver driver_{host_};
  std::optional<FencePool> pool_{std::in_place, driver_, 0};
};

TEST_F(Fences, APointPassesWhenTheWorkBeforeItIsDone) {
  driver_.hold_fences(kOne);
  const FencePointPtr held = pool_->record(kOne);
  const FencePointPtr free = pool_->record(kTwo);
  EXPECT_FALSE(held->passed());
  EXPECT_TRUE(free->passed());
  driver_.release_fences(kOne);
  EXPECT_TRUE(held->passed());
}

TEST_F(Fences, APassedPointAsksTheDriverNoMore) {
  const FencePointPtr point = pool_->record(kOne);
  EXPECT_TRUE(point->passed());
  const std::uint64_t queries = driver_.count(Call::query);
  EXPECT_TRUE(point->passed());
  EXPECT_EQ(driver_.count(Call::query), queries);
}

TEST_F(Fences, APointOfAllStreamsWaitsForEachOfThem) {
  driver_.hold_fences(kTwo);
  const FencePointPtr point = pool_->record_all();
  EXPECT_FALSE(point->passed());
  driver_.release_fences();
  EXPECT_TRUE(point->passed());
}

TEST_F(Fences, FencesAreUsedAgain) {
  for (int k = 0; k < 20; ++k) pool_->record(kOne).reset();
  EXPECT_EQ(driver_.count(Call::create_fence), 1U);
  EXPECT_EQ(driver_.live_fences(), 1U);
}

TEST_F(Fences, OrderMakesAStreamsOwnPointFree) {
  driver_.hold_fences();
  const FencePointPtr point = pool_->record(kOne);
  EXPECT_TRUE(point->order_before(kOne).ok());
  EXPECT_EQ(driver_.count(Call::stream_wait), 0U);
  EXPECT_TRUE(point->order_before(kTwo).ok());
  EXPECT_EQ(driver_.count(Call::stream_wait), 1U);
  EXPECT_TRUE(pool_->record_all()->order_before(kOne).ok());
  EXPECT_EQ(driver_.count(Call::stream_wait), 2U) << "other streams' work is in it";
  EXPECT_EQ(driver_.count(Call::wait), 0U);
}

TEST_F(Fences, APassedPointOrdersNothing) {
  EXPECT_TRUE(pool_->record(kOne)->order_before(kTwo).ok());
  EXPECT_EQ(driver_.count(Call::stream_wait), 0U);
}

TEST_F(Fences, AStreamThatIsNoMoreFallsBackToAllStreams) {
  driver_.fail_nth(Call::record, 1, {StatusCode::invalid_argument, "record"});
  driver_.hold_fences(kTwo);
  EXPECT_FALSE(pool_->record(kOne)->passed()) << "after all work of the device";
  EXPECT_EQ(driver_.count(Call::record_all), 1U);
}

TEST_F(Fences, WithoutAnyFenceTheDeviceIsWaitedFor) {
  driver_.fail_nth(Call::create_fence, 1, no_memory(), Repeat::from_then_on);
  EXPECT_TRUE(pool_->record(kOne)->passed());
  EXPECT_EQ(driver_.count(Call::synchronize), 1U);
  driver_.clear_failures();
}

TEST_F(Fences, AFailingQueryIsNoPass) {
  driver_.hold_fences(kOne);
  const FencePointPtr point = pool_->record(kOne);
  driver_.fail_nth(Call::query, 1, broken());
  EXPECT_FALSE(point->passed()) << "memory must not leave under queued work";
  EXPECT_FALSE(point->passed());
}

TEST_F(Fences, AFailingWaitWaitsForTheWholeDevice) {
  driver_.hold_fences(kOne);
  const FencePointPtr point = pool_->record(kOne);
  driver_.fail_nth(Call::wait, 1, broken());
  point->wait();
  EXPECT_EQ(driver_.count(Call::synchronize), 1U);
  EXPECT_TRUE(point->passed());
}

TEST_F(Fences, ASetPassesWithItsLastPoint) {
  FenceSet set;
  EXPECT_TRUE(set.passed()) << "nothing to wait for";
  driver_.hold_fences(kOne);
  driver_.hold_fences(kTwo);
  const FencePointPtr shared = pool_->record(kOne);
  set.add(shared);
  set.add(shared);
  FenceSet more;
  more.add(pool_->record(kTwo));
  set.add_all(more);
  EXPECT_TRUE(set.order_before(kOne).ok());
  EXPECT_EQ(driver_.count(Call::stream_wait), 1U) << "kTwo's only, and each once";
  driver_.release_fences(kTwo);
  EXPECT_FALSE(set.passed());
  driver_.release_fences(kOne);
  EXPECT_TRUE(set.passed());
  EXPECT_TRUE(set.empty());
}

TEST_F(Fences, ASetWaitsForAllItsPoints) {
  driver_.hold_fences();
  FenceSet set;
  set.add(pool_->record(kOne));
  set.add(pool_->record(kTwo));
  set.wait();
  EXPECT_TRUE(set.empty());
  EXPECT_EQ(driver_.count(Call::wait), 2U);
}

TEST_F(Fences, NothingIsWaitedForOnceTheDriverHasGone) {
  driver_.hold_fences();
  const FencePointPtr point = pool_->record(kOne);
  host_.destroy_fence(nullptr).ignore();
  driver_.fail_nth(Call::query, 1, {StatusCode::driver_gone, "query"});
  EXPECT_TRUE(point->passed());
}

}  // namespace
}  // namespace vmm::testing
