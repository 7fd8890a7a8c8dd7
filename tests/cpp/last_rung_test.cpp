// The ladder's last rung, which waits for all queued work and gives idle memory back: from
// whom, how much, in pieces of which size, and what is left where that was in vain.
#include <gtest/gtest.h>

#include "cpp/lab.h"

namespace vmm::testing {
namespace {

TEST(LastRung, AFloorKeepsNothingFromItsOwnModel) {
  Lab lab;
  PoolSpec spec = Lab::spec("a", 64 * kMiB);
  spec.floor = 64 * kMiB;
  const auto model = lab.pool(spec);
  const auto part = lab.memory().create_part(model, {1, 0}, /*no_split=*/false);
  lab.leave_idle(*part, 48 * kMiB);
  lab.allocate(*model, 40 * kMiB);
  EXPECT_LE(model->budget().used(), 64 * kMiB);
}

// The device is as full as the model is, but what is idle elsewhere could not raise the
// model's own limit.
TEST(LastRung, WhereALimitStaysInTheWayNothingAboveItIsMelted) {
  Lab lab;
  lab.memory().set_limit(lab.memory().budget(), 48 * kMiB);
  const auto a = lab.pool("a", 32 * kMiB);
  const auto b = lab.pool("b");
  lab.leave_idle(*b, 16 * kMiB);
  lab.allocate(*a, 32 * kMiB);
  EXPECT_THROW(lab.allocate(*a, 8 * kMiB), OutOfMemoryError);
  EXPECT_EQ(b->physical_bytes(), 16 * kMiB);
}

// The shared limit refuses first. What melts under it makes room there, and then it is the
// device that has too little, of which a pool outside has some idle.
TEST(LastRung, WhatMakesRoomUnderALimitMayStillLackTheDevicesMemory) {
  Lab lab(LabSpec{40 * kMiB});
  const auto group = lab.memory().create_group("the shared pool", 32 * kMiB);
  PoolSpec spec = Lab::spec("a");
  spec.page_size = kPage;
  const auto a = lab.pool(spec, group.get());
  PoolSpec large = Lab::spec("b");
  large.page_size = 8 * kMiB;
  const auto b = lab.pool(large, group.get());
  large.name = "outside";
  large.page_size = 16 * kMiB;
  const auto outside = lab.pool(large);
  lab.allocate(*a, 16 * kMiB);
  lab.leave_idle(*b, 8 * kMiB);
  lab.leave_idle(*outside, 16 * kMiB);
  lab.allocate(*a, 16 * kMiB);
  EXPECT_EQ(a->physical_bytes(), 32 * kMiB);
}

TEST(LastRung, WhatIsMadeForARangeIsOfASizeThatFitsAnywhereInIt) {
  Lab lab(LabSpec{16 * kMiB});
  const auto model = lab.pool("a");
  PoolSpec large = Lab::spec("b");
  large.page_size = 16 * kMiB;
  const auto b = lab.pool(large);
  lab.leave_idle(*b, 16 * kMiB);
  const auto range = lab.memory().create_range(model, "tensor", 64 * kMiB, 0);
  lab.memory().allocate_pages(*range, 0, 16 * kMiB, nullptr);
  EXPECT_EQ(range->physical_bytes(), 16 * kMiB);
  EXPECT_EQ(range->chunks_under(range->base(), 16 * kMiB).front().size, kPage);
}

TEST(LastRung, WhatWasMadeInVainRestsOnNoShelf) {
  Lab lab(LabSpec{64 * kMiB});
  const auto a = lab.pool("a");
  lab.allocate(*a, 32 * kMiB);
  EXPECT_THROW(lab.allocate(*a, 48 * kMiB), OutOfMemoryError);
  EXPECT_EQ(lab.memory().store().all_shelved_bytes(), 0U);
  EXPECT_EQ(lab.memory().committed_bytes(), 32 * kMiB);
}

}  // namespace
}  // namespace vmm::testing
