// Which limit refuses, from whom that takes, and limits that are lowered.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "cpp/reclaim_lab.h"

namespace vmm::testing {
namespace {

// ------------------------------------------------ lowered, while the GPU is busy

TEST_F(Reclaim, WhatALoweredLimitHadToWaitForMakesRoomLater) {
  const auto a = model("a");
  lab_.memory().set_limit(group_, 128 * kMiB);
  std::vector<Address> blocks;
  for (int k = 0; k < 8; ++k) blocks.push_back(lab_.allocate(*a, 16 * kMiB));
  lab_.memory().set_limit(group_, 32 * kMiB);
  lab_.driver.hold_fences();
  for (const Address block : blocks) lab_.free(block);
  lab_.driver.release_fences();
  EXPECT_EQ(group_.used(), 128 * kMiB) << "queued work held all of it up";
  lab_.allocate(*a, kMiB);
  EXPECT_LE(group_.used(), 32 * kMiB);
}

TEST(LoweredLimits, WhatRestsOnAnothersShelfIsGivenBackForARequest) {
  Lab lab;
  const auto first = lab.memory().create_group("first", kUnlimited);
  const auto second = lab.memory().create_group("second", kUnlimited);
  const auto a = lab.pool(Lab::spec("a"), first.get());
  const auto b = lab.pool(Lab::spec("b"), second.get());
  std::vector<Address> blocks;
  for (int k = 0; k < 8; ++k) blocks.push_back(lab.allocate(*a, 16 * kMiB));
  lab.memory().set_limit(lab.memory().budget(), 64 * kMiB);
  lab.driver.hold_fences();
  for (const Address block : blocks) lab.free(block);
  lab.driver.release_fences();
  int asked = 0;
  lab.memory().set_on_pressure(*second, [&](std::size_t, const std::shared_ptr<Pool>&) {
    ++asked;
    return false;
  });
  lab.allocate(*b, 16 * kMiB);
  EXPECT_EQ(asked, 0);
  EXPECT_LE(lab.memory().committed_bytes(), 64 * kMiB);
  lab.memory().set_on_pressure(*second, {});
}

TEST(Shelves, WhatIsAboveTheirBoundGoesWhenQueuedWorkIsDone) {
  LabSpec spec;
  spec.options.store_bytes = 8 * kMiB;
  Lab lab(spec);
  const auto group = lab.memory().create_group("group", kUnlimited);
  const auto a = lab.pool(Lab::spec("a"), group.get());
  lab.memory().allocate_pages(*a, 0, 256 * kMiB, nullptr);
  lab.driver.hold_fences();
  lab.memory().deallocate_pages(*a, 0, 256 * kMiB);
  EXPECT_EQ(group->used(), 256 * kMiB);
  lab.driver.release_fences();
  for (int k = 0; k < 3; ++k) lab.free(lab.allocate(*a, 3 * kMiB));
  EXPECT_LE(group->used(), 8 * kMiB + 2 * kPage);
}

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

// Blocks that share chunks: what is freed of them leaves space that needs no new memory.
TEST_F(Reclaim, AboveALoweredLimitNothingIsHandedOutUntilItFits) {
  for (const std::size_t bytes : {5 * kKiB, 300 * kKiB, 3 * kMiB}) {
    for (const bool is_models_own : {true, false}) {
      const auto a = model("a " + format_bytes(bytes) + (is_models_own ? "" : " with others"));
      Budget& lowered = is_models_own ? a->budget() : group_;
      const std::size_t before = lowered.limit();
      std::vector<Address> blocks;
      while (a->physical_bytes() < 24 * kMiB) blocks.push_back(lab_.allocate(*a, bytes));
      std::vector<Address> kept;
      for (std::size_t k = 0; k < blocks.size(); ++k) {
        if (k % 4 != 0) {
          lab_.free(blocks[k]);
        } else {
          kept.push_back(blocks[k]);
        }
      }
      kept.push_back(lab_.allocate(*a, bytes));  // there is room
      lab_.memory().set_limit(lowered, 8 * kMiB);
      ASSERT_GT(lowered.used(), 8 * kMiB) << "or the test is about nothing";
      EXPECT_THROW(lab_.allocate(*a, bytes), OutOfMemoryError);
      EXPECT_THROW(lab_.allocate(*a, 512), OutOfMemoryError);
      lab_.memory().check();
      if (is_models_own) {
        const auto b = model("b beside " + a->name());
        lab_.free(lab_.allocate(*b, bytes));  // which has a limit of its own
        lab_.memory().close_pool(*b, /*force=*/false);
      }
      while (lowered.used() > 8 * kMiB) {
        ASSERT_FALSE(kept.empty());
        if (kept.size() % 16 == 0) {
          EXPECT_THROW(lab_.allocate(*a, bytes), OutOfMemoryError);
        }
        lab_.free(kept.back());
        kept.pop_back();
      }
      for (int more = 0; more < 2 && !kept.empty(); ++more, kept.pop_back()) lab_.free(kept.back());
      kept.push_back(lab_.allocate(*a, 512));
      lab_.memory().set_limit(lowered, before);
      kept.push_back(lab_.allocate(*a, 20 * kMiB));
      for (const Address block : kept) lab_.free(block);
      lab_.memory().close_pool(*a, /*force=*/false);
    }
  }
}

// Which the others' idle memory makes up for: nobody is asked to evict a model.
TEST_F(Reclaim, AboveALoweredLimitOthersGiveWhatHasComeToBeIdle) {
  const auto a = model("a");
  const auto b = model("b");
  const Address mine = lab_.allocate(*a, 3 * kMiB);
  const Address theirs = lab_.allocate(*b, 16 * kMiB);
  lab_.driver.hold_fences();
  lab_.free(theirs);
  lab_.memory().set_limit(group_, 8 * kMiB);
  lab_.driver.release_fences();
  int asked = 0;
  lab_.memory().set_on_pressure(group_, [&](std::size_t, const std::shared_ptr<Pool>&) {
    ++asked;
    return false;
  });
  lab_.free(lab_.allocate(*a, 512 * kKiB));
  EXPECT_EQ(asked, 0);
  EXPECT_LE(group_.used(), 8 * kMiB);
  lab_.memory().set_on_pressure(group_, {});
  lab_.free(mine);
}

TEST_F(Reclaim, AGraphsMemoryIsHandedOutAboveALimitToo) {
  const auto graphs = model("a graph's");
  lab_.free(lab_.allocate(*graphs, 4 * kMiB));
  graphs->pin();
  const auto b = model("b");
  const Address theirs = lab_.allocate(*b, 16 * kMiB);
  lab_.memory().set_limit(group_, 8 * kMiB);
  const Address captured = lab_.allocate(*graphs, 4 * kMiB);
  EXPECT_NE(captured, 0U);
  EXPECT_THROW(lab_.allocate(*b, 512), OutOfMemoryError);
  lab_.free(captured);
  lab_.free(theirs);
}

TEST_F(Reclaim, AboveALoweredLimitNothingIsHandedOutWhileOthersLowerTheirs) {
  const auto a = model("a");
  const Address block = lab_.allocate(*a, 3 * kMiB);
  lab_.memory().set_limit(a->budget(), 2 * kMiB);
  std::atomic<bool> ends{false};
  std::thread others([&] {
    const auto b = model("b");
    while (!ends.load()) {
      lab_.memory().set_limit(b->budget(), 8 * kMiB);
      lab_.free(lab_.allocate(*b, kMiB));
      lab_.memory().set_limit(b->budget(), kUnlimited);
    }
  });
  int met = 0;
  for (int k = 0; k < 2000; ++k) {
    try {
      lab_.free(lab_.allocate(*a, 512 * kKiB));
      ++met;
    } catch (const OutOfMemoryError&) {
    }
  }
  ends = true;
  others.join();
  EXPECT_EQ(met, 0);
  lab_.free(block);
}

TEST_F(Reclaim, AboveTheDevicesLimitOnlyNewMemoryIsRefused) {
  const auto a = model("a");
  const Address first = lab_.allocate(*a, 1000);
  lab_.memory().set_limit(lab_.memory().budget(), 0);
  lab_.free(lab_.allocate(*a, 512));
  EXPECT_THROW(lab_.allocate(*a, 64 * kMiB), OutOfMemoryError);
  lab_.memory().set_limit(lab_.memory().budget(), kUnlimited);
  lab_.free(first);
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

// ---------------------------------------------------- frees over a lowered limit

// Of two blocks in each chunk one is free, and the pool is above its limit.
class OverItsLimit : public ::testing::Test {
 protected:
  static constexpr std::size_t kBlock = 4 * kMiB;

  void SetUp() override {
    std::vector<Address> first;
    for (int k = 0; k < 60; ++k) (k % 2 == 0 ? first : kept_).push_back(lab_.allocate(*pool_, kBlock));
    for (const Address address : first) lab_.free(address);
    lab_.memory().set_limit(pool_->budget(), kPage);
    ASSERT_EQ(bytes_over(), 60 * kBlock - kPage) << "each chunk has something that lives";
    walked_ = pool_->times_walked();
  }
  void free(Address address) {
    lab_.forget(address);
    EXPECT_TRUE(DeviceMemory::free(lab_.space, address));
  }
  [[nodiscard]] std::size_t bytes_over() const { return pool_->budget().excess(); }
  [[nodiscard]] std::size_t walks() const { return pool_->times_walked() - walked_; }

  static PoolSpec spec() {
    PoolSpec spec = Lab::spec("a");
    spec.page_size = 2 * kBlock;
    return spec;
  }
  Lab lab_;
  const std::shared_ptr<Pool> pool_ = lab_.pool(spec());
  std::vector<Address> kept_;
  std::size_t walked_ = 0;
};

TEST_F(OverItsLimit, AFreeGivesItsChunkBackAndLooksAtNoOtherFreeBlock) {
  for (const Address address : kept_) {
    const std::size_t before = bytes_over();
    free(address);
    EXPECT_EQ(bytes_over(), before - std::min(before, 2 * kBlock));
  }
  EXPECT_EQ(walks(), 0U);
  EXPECT_EQ(pool_->physical_bytes(), 0U);
}

TEST_F(OverItsLimit, WhatWaitedForAStreamGoesWithTheFreeThatComesAfter) {
  lab_.driver.hold_fences();
  for (const Address address : {kept_[0], kept_[1], kept_[2], kept_[3]}) {
    pool_->record_stream(address, kTwo);
    free(address);
  }
  lab_.driver.release_fences();
  const std::size_t before = bytes_over();
  free(kept_[4]);
  EXPECT_EQ(bytes_over(), before - 5 * 2 * kBlock);
  EXPECT_EQ(walks(), 0U);
}

TEST(OverItsLimitInSmallPages, SlabsGoWholeWithTheirLastBlocks) {
  Lab lab(LabSpec{64 * kMiB, 1, 64 * kKiB});
  PoolSpec spec = Lab::spec("a");
  spec.page_size = 64 * kKiB;
  const auto pool = lab.pool(spec);
  const Address block = lab.allocate(*pool, 4 * kMiB);
  const std::vector<Address> in_two_slabs = {lab.allocate(*pool, kMiB), lab.allocate(*pool, kMiB),
                                             lab.allocate(*pool, kMiB)};
  const Address other = lab.allocate(*pool, 2 * kMiB);
  ASSERT_EQ(pool->physical_bytes(), 10 * kMiB);
  lab.memory().set_limit(pool->budget(), kMiB);
  lab.driver.hold_fences();
  for (const Address address : in_two_slabs) {
    pool->record_stream(address, kTwo);
    lab.free(address);
  }
  lab.driver.release_fences();
  lab.free(other);
  EXPECT_EQ(pool->physical_bytes(), 4 * kMiB);
  lab.free(block);
  EXPECT_EQ(pool->physical_bytes(), kMiB);
}

}  // namespace
}  // namespace vmm::testing
