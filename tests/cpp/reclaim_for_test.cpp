// Who yields for memory that has no model to climb for: pages by hand, other allocators', models
// that sleep here (DeviceMemory::reclaim_for()).
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>

#include "core/faces/virtual_memory_manager.h"
#include "cpp/reclaim_lab.h"

namespace vmm::testing {
namespace {

class ReclaimFor : public Reclaim {
 protected:
  // Whether `bytes` could be charged to the device after others had been asked.
  bool is_met(std::size_t bytes) {
    return lab_.memory().reclaim_for(device_, bytes, [&] {
      ++attempts_;
      if (device_.charge(bytes) != nullptr) return false;
      device_.refund(bytes);
      return true;
    });
  }
  Budget& device_ = lab_.memory().budget();
  int attempts_ = 0;
};

TEST_F(ReclaimFor, WhatTheLimitLacksGoesAndNoMore) {
  const auto a = model("a");
  lab_.leave_idle(*a, 20 * kMiB);
  lab_.memory().set_limit(device_, 24 * kMiB);
  EXPECT_TRUE(is_met(10 * kMiB));
  EXPECT_EQ(bytes(a), 14 * kMiB) << "4 MiB were open";
  EXPECT_EQ(attempts_, 1);
}

TEST_F(ReclaimFor, WhatRestsOnShelvesComesFirst) {
  const auto a = model("a");
  const auto b = model("b");
  lab_.leave_idle(*a, 8 * kMiB);
  lab_.leave_idle(*b, 8 * kMiB);
  a->shed(0);
  lab_.memory().set_limit(device_, 16 * kMiB);
  EXPECT_TRUE(is_met(6 * kMiB));
  EXPECT_EQ(bytes(b), 8 * kMiB);
}

TEST_F(ReclaimFor, TheLowestPriorityYieldsAndAFloorIsKept) {
  const auto a = model("a", kPage, /*priority=*/0);
  const auto b = model("b", kPage, /*priority=*/1);
  const auto c = model("c", kPage, /*priority=*/-1, /*floor=*/8 * kMiB);
  for (const auto& each : {a, b, c}) lab_.leave_idle(*each, 10 * kMiB);
  lab_.memory().set_limit(device_, 30 * kMiB);
  EXPECT_TRUE(is_met(6 * kMiB));
  EXPECT_EQ(bytes(c), 8 * kMiB) << "first, down to its floor";
  EXPECT_EQ(bytes(a), 6 * kMiB);
  EXPECT_EQ(bytes(b), 10 * kMiB);
  EXPECT_FALSE(is_met(24 * kMiB)) << "22 MiB are above the floor";
  EXPECT_EQ(bytes(c), 8 * kMiB);
}

TEST_F(ReclaimFor, WhereTheDriverRefusedAsMuchGoesAndThenAll) {
  const auto a = model("a");
  lab_.leave_idle(*a, 20 * kMiB);
  int refusals = 1;
  const auto attempt = [&] { return refusals-- == 0; };
  EXPECT_TRUE(lab_.memory().reclaim_for(device_, 6 * kMiB, attempt));
  EXPECT_EQ(bytes(a), 0U) << "6 MiB did not do";
  lab_.leave_idle(*a, 20 * kMiB);
  refusals = 0;
  EXPECT_TRUE(lab_.memory().reclaim_for(device_, 6 * kMiB, attempt));
  EXPECT_EQ(bytes(a), 14 * kMiB);
}

TEST_F(ReclaimFor, WhereNothingWouldDoNobodyGives) {
  const auto a = model("a");
  const auto b = model("b", kPage, 0, /*floor=*/8 * kMiB);
  lab_.leave_idle(*a, 20 * kMiB);
  lab_.memory().set_limit(device_, 32 * kMiB);
  EXPECT_FALSE(is_met(34 * kMiB));
  EXPECT_FALSE(is_met(26 * kMiB)) << "with the floor";
  EXPECT_EQ(bytes(a), 20 * kMiB);
  EXPECT_EQ(attempts_, 0);
}

TEST_F(ReclaimFor, WhatNobodyHasIsAskedForOnce) {
  const auto a = model("a");
  lab_.allocate(*a, 20 * kMiB);
  lab_.memory().set_limit(device_, 24 * kMiB);
  EXPECT_FALSE(is_met(10 * kMiB));
  EXPECT_EQ(attempts_, 1) << "queued work may have held it up";
}

TEST_F(ReclaimFor, QueuedWorkIsWaitedFor) {
  const auto a = model("a");
  const Address block = lab_.allocate(*a, 20 * kMiB, kOne);
  lab_.memory().set_limit(device_, 24 * kMiB);
  a->record_stream(block, kTwo);
  lab_.driver.hold_fences();
  lab_.free(block);
  lab_.driver.set_wait_on_held(ScriptedDriver::WaitOnHeld::pass);
  EXPECT_TRUE(is_met(10 * kMiB));
  EXPECT_EQ(bytes(a), 14 * kMiB);
}

TEST_F(ReclaimFor, PagesByHandTakeNothingBeneathAFloor) {
  const auto a = model("a", kPage, /*priority=*/1);
  const auto b = model("b", kPage, /*priority=*/0, /*floor=*/12 * kMiB);
  lab_.leave_idle(*a, 10 * kMiB);
  lab_.leave_idle(*b, 12 * kMiB);
  lab_.memory().set_limit(device_, 22 * kMiB);
  VirtualMemoryManager manager(lab_.memory());
  manager.alloc_physical(4 * kMiB, Location::on_device(0), false);
  EXPECT_EQ(bytes(a), 6 * kMiB);
  EXPECT_EQ(bytes(b), 12 * kMiB);
  EXPECT_THROW(manager.alloc_physical(8 * kMiB, Location::on_device(0), false), OutOfMemoryError);
  EXPECT_EQ(bytes(b), 12 * kMiB);
  manager.close();
}

}  // namespace
}  // namespace vmm::testing
