// Beginnings and ends of pools, groups and captures, also while other threads
// go on: closed or not, empty or not, is decided in one step.
#include <gtest/gtest.h>

#include <vector>

#include "core/device/private_pools.h"
#include "core/faces/shared_memory_pool.h"
#include "cpp/lab.h"
#include "support/at_one_moment.h"

namespace vmm::testing {
namespace {

const Stream kOne = stream(0x10);
const Stream kTwo = stream(0x20);

// A thread allocates and frees until the pool is closed under it.
template <typename Close>
void allocate_while(Lab& lab, Pool& pool, std::size_t bytes, int delay, const Close& close) {
  const auto allocate = [&] {
    try {
      for (int k = 0; k < 50; ++k) DeviceMemory::free(lab.space, lab.memory().allocate(pool, bytes, kOne));
    } catch (const InvalidArgumentError&) {  // NOLINT(bugprone-empty-catch): closed, which is what is tested
    }
  };
  at_one_moment(allocate, [&] {
    spin(delay);
    close();
  });
}

TEST(Closing, AllocatingMeanwhileSucceedsOrIsRefused) {
  Lab lab;
  for (int round = 0; round < 1500; ++round) {
    const auto pool = lab.pool("a");
    allocate_while(lab, *pool, round % 2 == 0 ? 3 * kMiB : 4096, round * 37 % 20000,
                   [&] { lab.memory().close_pool(*pool, /*force=*/true); });
  }
  EXPECT_EQ(lab.memory().pools().size(), 0U);
}

TEST(Closing, UnregisteringMeanwhileToo) {
  Lab lab;
  SharedMemoryPool shared(lab.memory(), 512 * kMiB);
  ModelSpec spec;
  spec.virtual_capacity = kGiB;
  for (int round = 0; round < 1500; ++round) {
    const auto pool = shared.register_model("m", spec);
    allocate_while(lab, *pool, 4096, round * 37 % 20000, [&] { shared.unregister_model("m", /*force=*/true); });
  }
}

TEST(Closing, WithoutForceNeverTakesAPoolFromWhoHasJustAllocated) {
  Lab lab;
  for (int round = 0; round < 1500; ++round) {
    const auto pool = lab.pool("a");
    Address got = 0;
    const auto allocate = [&] {
      spin(round * 13 % 4000);
      try {
        got = lab.memory().allocate(*pool, 4096, kOne);
      } catch (const InvalidArgumentError&) {  // NOLINT(bugprone-empty-catch): closed before
      }
    };
    bool closed = true;
    at_one_moment(allocate, [&] {
      try {
        lab.memory().close_pool(*pool, /*force=*/false);
      } catch (const StillInUseError&) {
        closed = false;
      }
    });
    EXPECT_FALSE(closed && got != 0) << "closed with a live block";
    if (got != 0) DeviceMemory::free(lab.space, got);
    if (!closed) lab.memory().close_pool(*pool, /*force=*/true);
  }
}

TEST(Closing, SeveralPoolsCloseAllOrNone) {
  Lab lab;
  SharedMemoryPool shared(lab.memory(), 64 * kMiB);
  ModelSpec spec;
  spec.virtual_capacity = kGiB;
  const auto a = shared.register_model("a", spec);
  const auto b = shared.register_model("b", spec);
  const Address block = lab.allocate(*b, 512);
  EXPECT_THROW(shared.close(/*force=*/false), StillInUseError);
  lab.allocate(*a, 512);
  EXPECT_FALSE(a->is_closed());
  lab.free(block);
}

TEST(Closing, AnEndedPartHasNoCheckpoint) {
  Lab lab;
  const auto model = lab.pool("m");
  const auto part = lab.memory().create_part(model, {1, 2}, false);
  lab.leave_idle(*part, kMiB);
  const PoolCheckpoint earlier = part->checkpoint();
  lab.memory().close_pool(*part, /*force=*/true);
  EXPECT_THROW(static_cast<void>(part->checkpoint()), VmmError);
  std::vector<Address> freed;
  std::vector<Address> allocated;
  EXPECT_THROW(part->restore(earlier, &freed, &allocated), VmmError);
  EXPECT_TRUE(freed.empty() && allocated.empty());
}

// ---------------------------------------------------------- what closed pools leave

TEST(Closing, MemoryThatQueuedWorkStillUsedComesBackWithLaterAllocations) {
  Lab lab;
  const auto a = lab.pool("a");
  const auto b = lab.pool("b");
  lab.allocate(*b, 512);
  const Address big = lab.allocate(*a, 600 * kMiB, kOne);
  lab.driver.hold_fences();
  lab.free(big);
  lab.memory().close_pool(*a, /*force=*/false);
  lab.driver.release_fences();
  for (int k = 0; k < 200; ++k) DeviceMemory::free(lab.space, lab.memory().allocate(*b, 3 * kMiB, nullptr));
  EXPECT_LE(lab.driver.live_chunk_bytes(), LabSpec::plain_options().store_bytes + 16 * kMiB);
  EXPECT_EQ(lab.memory().pools().size(), 1U);
}

TEST(Closing, APendingFreeHoldsUpItsOwnMemoryOnly) {
  Lab lab;
  const auto a = lab.pool("a");
  const auto b = lab.pool("b");
  lab.allocate(*b, 512);
  const Address big = lab.allocate(*a, 512 * kMiB, kOne);
  const Address read = lab.allocate(*a, 3 * kMiB, kOne);
  a->record_stream(read, kTwo);
  lab.driver.hold_fences(kTwo);
  lab.free(big);
  lab.free(read);
  lab.memory().close_pool(*a, /*force=*/true);
  EXPECT_LE(a->physical_bytes(), 8 * kMiB) << "what nobody recorded is on the shelf at once";
  lab.driver.release_fences();
  for (int k = 0; k < 200; ++k) DeviceMemory::free(lab.space, lab.memory().allocate(*b, 3 * kMiB, nullptr));
  EXPECT_LE(lab.driver.live_chunk_bytes(), LabSpec::plain_options().store_bytes + 16 * kMiB);
  EXPECT_EQ(lab.memory().pools().size(), 1U);
}

TEST(Closing, AClosedSharedPoolLeavesNoBudgetAndNoShelf) {
  Lab lab;
  for (int round = 0; round < 20; ++round) {
    SharedMemoryPool shared(lab.memory(), 64 * kMiB);
    ModelSpec spec;
    spec.virtual_capacity = kGiB;
    lab.leave_idle(*shared.register_model("m", spec), 8 * kMiB);
    shared.close(/*force=*/false);
    EXPECT_EQ(lab.memory().groups(), 0U);
    EXPECT_EQ(lab.memory().store().shelves(), 0U);
  }
  EXPECT_EQ(lab.driver.live_chunk_bytes(), 0U);
}

TEST(PoolLifetimes, ALastSmallBlockKeepsNothingElseOfAClosedPool) {
  Lab lab;
  const auto pool = lab.pool("a");
  lab.allocate(*pool, 512, kOne);
  lab.leave_idle(*pool, 64 * kMiB, kOne);
  lab.memory().close_pool(*pool, /*force=*/true);
  EXPECT_EQ(pool->physical_bytes(), kPage) << "the rest is on the shelf";
}

// A block of 8 MiB whose shared pool has been closed by force.
Address left_in_a_closed_group(Lab& lab) {
  SharedMemoryPool shared(lab.memory(), 64 * kMiB);
  ModelSpec spec;
  spec.virtual_capacity = kGiB;
  const Address block = lab.allocate(*shared.register_model("m", spec), 8 * kMiB);
  shared.close(/*force=*/true);
  return block;
}

TEST(Closing, AGroupStaysUntilItsLastTensorHasGone) {
  Lab lab;
  const Address block = left_in_a_closed_group(lab);
  EXPECT_EQ(lab.memory().groups(), 1U);
  lab.free(block);
  EXPECT_EQ(lab.memory().groups(), 0U);
  EXPECT_EQ(lab.driver.live_chunk_bytes(), 0U);
}

TEST(Closing, ATensorOfAClosedGroupCostsOthersNothing) {
  Lab lab;
  const auto other = lab.pool("other");
  lab.free(lab.allocate(*other, 4096));
  lab.free(lab.allocate(*other, 4096));
  const Address block = left_in_a_closed_group(lab);
  const std::uint64_t locked = other->times_locked();
  for (int k = 0; k < 100; ++k) DeviceMemory::free(lab.space, lab.memory().allocate(*other, 4096, nullptr));
  EXPECT_EQ(other->times_locked(), locked) << "its thread keeps the block, whatever others have closed";
  lab.free(block);
}

// ------------------------------------------------------------------------- captures

class Suspended : public ::testing::Test {
 protected:
  void begin() {
    pools_.begin(
        kRegion, [this](Stream on) { return running_ != 0 && on == kOne; }, kOne);
  }
  CaptureHooks hooks() {
    return {[this](Stream on) { return on == kOne ? running_ : 0; }, nullptr};
  }
  static constexpr RegionId kRegion{0, 1};
  Lab lab_;
  std::uint64_t running_ = 0;
  std::shared_ptr<Pool> model_ = lab_.pool("m");
  PrivatePools pools_{lab_.memory(), hooks()};
};

TEST_F(Suspended, ACaptureThatFailsWhileItsRouteIsSuspendedIsForgotten) {
  begin();
  running_ = 7;
  ASSERT_NE(pools_.route(model_, kOne), nullptr);
  pools_.end(kRegion);  // for a conditional node, which then throws
  EXPECT_TRUE(lab_.memory().clock().is_capturing());
  running_ = 0;
  pools_.sweep();
  EXPECT_FALSE(lab_.memory().clock().is_capturing());
  pools_.release(kRegion);
  EXPECT_THROW(static_cast<void>(pools_.use_count(kRegion)), VmmError);
}

TEST_F(Suspended, AnEarlyConditionalNodeCountsOnce) {
  begin();
  running_ = 7;  // nothing is allocated before the node
  pools_.end(kRegion);
  EXPECT_TRUE(lab_.memory().clock().is_capturing());
  begin();
  EXPECT_EQ(pools_.use_count(kRegion), 1);
  running_ = 0;
  pools_.end(kRegion);
  EXPECT_FALSE(lab_.memory().clock().is_capturing());
  pools_.release(kRegion);
  EXPECT_THROW(static_cast<void>(pools_.use_count(kRegion)), VmmError) << "the region is gone";
}

TEST_F(Suspended, WhileItIsSuspendedACaptureGoesOn) {
  begin();
  running_ = 7;
  const auto part = pools_.route(model_, kOne);
  ASSERT_NE(part, nullptr);
  pools_.end(kRegion);
  pools_.sweep();
  EXPECT_TRUE(part->is_pinned());
  begin();
  EXPECT_EQ(pools_.route(model_, kOne), part);
  running_ = 0;
  pools_.end(kRegion);
  pools_.release(kRegion);
}

}  // namespace
}  // namespace vmm::testing
