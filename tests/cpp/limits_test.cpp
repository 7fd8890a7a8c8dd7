// Which limit refuses, from whom that takes, and limits that are lowered.
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <thread>

#include "cpp/reclaim_lab.h"

namespace vmm::testing {
namespace {

// ---------------------------------------------------------- under which limit

TEST_F(Reclaim, AModelsOwnLimitTakesNothingFromOthers) {
  PoolSpec spec = Lab::spec("a", 8 * kMiB);
  const auto a = lab_.pool(spec, &group_);
  const auto b = model("b");
  lab_.leave_idle(*b, 16 * kMiB);
  const Address held = lab_.allocate(*a, 4 * kMiB);
  try {
    lab_.allocate(*a, 6 * kMiB);
    FAIL() << "above its own limit";
  } catch (const OutOfMemoryError& error) {
    EXPECT_EQ(error.limit, 8 * kMiB);
    EXPECT_EQ(error.requested, 6 * kMiB);
    EXPECT_EQ(error.pool, "a");
  }
  EXPECT_EQ(bytes(b), 16 * kMiB);
  lab_.free(held);
  lab_.allocate(*a, 8 * kMiB);
}

TEST_F(Reclaim, TheSharedLimitTakesNothingFromPoolsOutside) {
  const auto a = model("a");
  const auto outside = lab_.pool("outside");
  lab_.leave_idle(*outside, 64 * kMiB);
  lab_.allocate(*a, 16 * kMiB);
  EXPECT_THROW(lab_.allocate(*a, 24 * kMiB), OutOfMemoryError);
  EXPECT_EQ(bytes(outside), 64 * kMiB);
}

TEST_F(Reclaim, TheDevicesLimitTakesFromEveryGroup) {
  lab_.memory().set_limit(lab_.memory().budget(), 48 * kMiB);
  const auto a = model("a");
  const auto outside = lab_.pool("outside");
  lab_.leave_idle(*outside, 48 * kMiB);
  lab_.allocate(*a, 30 * kMiB);
  EXPECT_LE(lab_.memory().committed_bytes(), 48 * kMiB);
  EXPECT_LE(bytes(outside), 18 * kMiB);
}

TEST_F(Reclaim, TwoLimitsAtOnceAreBothClimbed) {
  // The shared limit refuses first, and what melts under it is not enough for
  // the device's: that one is full of idle memory outside.
  lab_.memory().set_limit(lab_.memory().budget(), 40 * kMiB);
  const auto a = model("a", kPage);
  const auto b = model("b", 8 * kMiB);
  lab_.leave_idle(*b, 8 * kMiB);
  lab_.allocate(*a, 16 * kMiB);
  PoolSpec spec = Lab::spec("outside");
  spec.page_size = 16 * kMiB;
  const auto outside = lab_.pool(spec);
  lab_.leave_idle(*outside, 16 * kMiB);
  lab_.allocate(*a, 16 * kMiB);
  EXPECT_EQ(bytes(a), 32 * kMiB);
}

TEST(ReclaimDriver, ADeviceThatIsFullTakesFromEveryone) {
  Lab lab(LabSpec{32 * kMiB});
  const auto a = lab.pool("a");
  const auto b = lab.pool("b");
  lab.leave_idle(*b, 32 * kMiB);
  lab.allocate(*a, 30 * kMiB);
  try {
    lab.allocate(*a, 4 * kMiB);
    FAIL() << "the device has no more";
  } catch (const OutOfMemoryError& error) {
    EXPECT_EQ(error.limit, 32 * kMiB) << "the device's memory";
    EXPECT_NE(std::string(error.what()).find("driver refused"), std::string::npos) << error.what();
  }
}

TEST(ReclaimDriver, SmallGranulesMeltEnoughForASlab) {
  Lab lab(LabSpec{64 * kMiB, 1, 64 * kKiB});
  PoolSpec spec = Lab::spec("b");
  spec.page_size = 128 * kKiB;
  const auto b = lab.pool(spec);
  lab.memory().set_limit(lab.memory().budget(), 4 * kMiB);
  PoolSpec small = Lab::spec("a");
  small.page_size = 64 * kKiB;
  const auto a = lab.pool(small);
  lab.leave_idle(*b, 4 * kMiB);
  lab.allocate(*a, 512);
}

// ------------------------------------------------------------- set_limit

TEST_F(Reclaim, ALowerLimitGivesIdleMemoryBackAndLeavesTheRest) {
  const auto a = model("a");
  const auto b = model("b");
  const Address block = lab_.allocate(*a, 16 * kMiB);
  Lab::fill(block, 16 * kMiB, 1);
  lab_.leave_idle(*b, 16 * kMiB);
  EXPECT_EQ(lab_.memory().set_limit(group_, 8 * kMiB), 16 * kMiB);
  EXPECT_EQ(group_.used(), 16 * kMiB) << "what is in use stays";
  EXPECT_TRUE(Lab::holds(block, 16 * kMiB, 1));
  EXPECT_THROW(lab_.allocate(*b, kMiB), OutOfMemoryError);
  EXPECT_THROW(lab_.allocate(*a, 4 * kMiB), OutOfMemoryError);
  lab_.free(block);
  lab_.allocate(*b, 8 * kMiB);
  EXPECT_LE(group_.used(), 8 * kMiB) << "nothing new until it fits, and then no more than the limit";
}

TEST_F(Reclaim, ALimitLoweredWhileAnotherIsEnforcedIsNotForgotten) {
  const auto other = lab_.memory().create_group("the other", 32 * kMiB);
  const auto a = model("a");
  const auto b = lab_.pool(Lab::spec("b"), other.get());
  const Address first = lab_.memory().allocate(*a, 16 * kMiB, nullptr);
  const Address second = lab_.memory().allocate(*b, 16 * kMiB, nullptr);
  lab_.memory().set_limit(group_, kPage);
  lab_.driver.delay(Call::release, std::chrono::milliseconds(20));
  std::thread slow([&] { DeviceMemory::free(lab_.space, first); });
  std::this_thread::sleep_for(std::chrono::milliseconds(25));
  lab_.memory().set_limit(*other, kPage);
  slow.join();
  lab_.driver.delay(Call::release, {});
  DeviceMemory::free(lab_.space, second);
  EXPECT_LE(other->used(), kPage);
}

TEST_F(Reclaim, PagesThatAreFreedAboveALoweredLimitGoBackAtOnce) {
  const auto a = model("a");
  lab_.memory().allocate_pages(*a, 0, 16 * kMiB, nullptr);
  lab_.memory().set_limit(group_, 4 * kMiB);
  EXPECT_EQ(group_.used(), 16 * kMiB);
  lab_.memory().deallocate_pages(*a, 0, 8 * kMiB);
  EXPECT_EQ(group_.used(), 8 * kMiB) << "no shelf keeps them";
}

}  // namespace
}  // namespace vmm::testing
