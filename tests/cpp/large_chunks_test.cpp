// Where what others have idle is in chunks far larger than a request: what it would leave unused goes back
// to the driver.
#include <gtest/gtest.h>

#include <string>

#include "cpp/reclaim_lab.h"

namespace vmm::testing {
namespace {

constexpr std::size_t kLarge = 512 * kMiB;
constexpr std::size_t kLoaded = 20 * kLarge;  // of one block a load makes chunks of a 20th

LabSpec of_device(std::size_t bytes) {
  LabSpec spec;
  spec.device_bytes = bytes;
  return spec;
}

PoolSpec roomy(const std::string& name) {
  PoolSpec spec = Lab::spec(name);
  spec.capacity = 2 * kLoaded;
  return spec;
}

// One model has loaded a block that fills the limit, and freed it: 20 chunks, idle. Then there are others.
class LargeChunks : public ::testing::Test {
 protected:
  void SetUp() override {
    lab_.meet(kOne);
    lab_.meet(kTwo);
    lab_.leave_idle(*large_, kLoaded, kOne);
    small_ = lab_.pool(roomy("small"), group_.get());
    third_ = lab_.pool(roomy("third"), group_.get());
    lab_.driver.clear_calls();
  }
  std::size_t waits() const { return waits_of(lab_); }

  Lab lab_{of_device(4 * kLoaded)};
  const std::shared_ptr<Budget> group_ = lab_.memory().create_group("the shared pool", kLoaded);
  const std::shared_ptr<Pool> large_ = lab_.pool(roomy("large"), group_.get());
  std::shared_ptr<Pool> small_, third_;
};

TEST_F(LargeChunks, ASmallRequestTakesNoMoreThanItLacks) {
  const Address block = lab_.allocate(*small_, 4 * kMiB);
  EXPECT_TRUE(Lab::is_zero(block, 4 * kMiB));
  EXPECT_LE(small_->physical_bytes(), 8 * kMiB);
  EXPECT_EQ(large_->physical_bytes(), kLoaded - kLarge);
  EXPECT_EQ(lab_.driver.count(Call::release), 1U);
  EXPECT_EQ(waits(), 0U);
  lab_.allocate(*third_, 400 * kMiB);
  EXPECT_EQ(large_->physical_bytes(), kLoaded - kLarge) << "the rest of that chunk was room";
}

TEST_F(LargeChunks, TheReportSaysWhatWentBack) {
  lab_.allocate(*small_, 4 * kMiB);
  const ReclaimStep step = latest_of(lab_, *small_).steps.at(static_cast<std::size_t>(Rung::other_models));
  EXPECT_EQ(step.result, StepResult::met);
  EXPECT_EQ(step.bytes, kLarge);
  ASSERT_EQ(step.yielded.size(), 1U);
  EXPECT_EQ(step.yielded.front().bytes, kLarge);
}

TEST_F(LargeChunks, SeveralRequestsShareWhatOneMadeRoom) {
  for (int k = 0; k < 16; ++k) lab_.allocate(*small_, 30 * kMiB);
  EXPECT_LE(lab_.driver.count(Call::release), 2U);
  EXPECT_LE(small_->physical_bytes(), kLarge + 64 * kMiB);
}

TEST_F(LargeChunks, OfSeveralTheLastIsCut) {
  lab_.allocate(*small_, kLarge + 88 * kMiB);
  EXPECT_LE(small_->physical_bytes(), kLarge + 128 * kMiB);
  EXPECT_EQ(lab_.driver.count(Call::release), 1U);
}

TEST_F(LargeChunks, WhatIsMostlyNeededGoesWhole) {
  lab_.allocate(*small_, 400 * kMiB);
  EXPECT_EQ(lab_.driver.count(Call::create), 0U);
  EXPECT_EQ(lab_.driver.count(Call::release), 0U);
}

TEST_F(LargeChunks, WhereLessThanHalfWouldBeLeftItGoesWhole) {
  lab_.allocate(*small_, 300 * kMiB);
  EXPECT_EQ(lab_.driver.count(Call::create), 0U);
  EXPECT_EQ(lab_.driver.count(Call::release), 0U);
}

// Who has units takes those chunks that are many of them, before anybody else is asked.
TEST_F(LargeChunks, AModelWithUnitsTakesNoMoreEither) {
  bool is_asked = false;
  lab_.memory().set_on_pressure(*group_, [&](std::size_t /*bytes*/, const std::shared_ptr<Pool>& /*asker*/) {
    is_asked = true;
    return false;
  });
  lab_.allocate(*large_, kLoaded - kLarge, kOne);  // one is left
  lab_.driver.clear_calls();
  lab_.allocate(*small_, 200 * kMiB);
  EXPECT_FALSE(is_asked);
  EXPECT_EQ(waits(), 0U);
  EXPECT_LE(small_->physical_bytes(), 232 * kMiB);
  EXPECT_EQ(lab_.driver.count(Call::release), 1U);
  lab_.memory().set_on_pressure(*group_, nullptr);
}

// No tick is made for one address where streams are many.
TEST_F(LargeChunks, WhatQueuedWorkHasDoneWithIsCutBesideManyStreams) {
  for (std::uintptr_t name = 1; name <= 16; ++name) lab_.meet(stream(0x1000 * name));
  lab_.allocate(*small_, 4 * kMiB);
  EXPECT_EQ(lab_.driver.count(Call::release), 1U);
  EXPECT_LE(small_->physical_bytes(), 8 * kMiB);
}

// Nobody waits for it.
TEST_F(LargeChunks, WhatQueuedWorkMayUseGoesWhole) {
  lab_.driver.hold_fences();
  const Address block = lab_.allocate(*large_, kLoaded, kOne);
  lab_.free(block);
  lab_.driver.clear_calls();
  lab_.allocate(*small_, 4 * kMiB, kTwo);
  EXPECT_EQ(lab_.driver.count(Call::release), 0U);
  EXPECT_EQ(waits(), 0U);
  EXPECT_EQ(small_->physical_bytes(), kLarge);
}

TEST_F(LargeChunks, WhereTheDriverKeepsItItGoesWhole) {
  lab_.driver.fail_nth(Call::release, 1, broken(), Repeat::from_then_on);
  lab_.allocate(*small_, 4 * kMiB);
  EXPECT_EQ(small_->physical_bytes(), kLarge);
}

// What it was released for is not lost: the request climbs on.
TEST_F(LargeChunks, WhereNoOtherCanBeMadeTheRequestClimbsOn) {
  lab_.driver.fail_nth(Call::create, 1, no_memory());
  const Address block = lab_.allocate(*small_, 4 * kMiB);
  Lab::fill(block, 4 * kMiB, 7);
  EXPECT_TRUE(Lab::holds(block, 4 * kMiB, 7));
  EXPECT_LE(small_->physical_bytes(), 8 * kMiB);
}

// Where the device is full, of another group's.
TEST(LargeChunksOfOthers, ASmallRequestTakesNoMoreThanItLacks) {
  Lab lab(of_device(kLoaded));
  const auto group = lab.memory().create_group("the shared pool", kUnlimited);
  lab.leave_idle(*lab.pool(roomy("large"), group.get()), kLoaded);
  const auto others = lab.memory().create_group("the other shared pool", kLarge);
  lab.allocate(*lab.pool(Lab::spec("first"), others.get()), 4 * kMiB);
  EXPECT_LE(others->used(), 8 * kMiB);
  lab.allocate(*lab.pool(Lab::spec("second"), others.get()), 400 * kMiB);
}

// Who has pages of that size wants a whole one again, and takes no other.
TEST(LargePages, GoWholeAndComeBackWhole) {
  Lab lab(of_device(4 * kLarge));
  const auto group = lab.memory().create_group("the shared pool", kLarge);
  PoolSpec spec = Lab::spec("large");
  spec.page_size = kLarge;
  const auto large = lab.pool(spec, group.get());
  const auto small = lab.pool(Lab::spec("small"), group.get());
  for (int turn = 0; turn < 3; ++turn) {
    lab.leave_idle(*large, kLarge);
    lab.leave_idle(*small, 4 * kMiB);
    if (turn == 0) lab.driver.clear_calls();
  }
  EXPECT_EQ(lab.driver.count(Call::create), 0U);
  EXPECT_EQ(lab.driver.count(Call::release), 0U);
}

}  // namespace
}  // namespace vmm::testing
