// What one of many models costs: who is looked at, not how long it takes. To look
// at a pool is to lock it, and its lock counts.
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/faces/shared_memory_pool.h"
#include "core/faces/tensor_range.h"
#include "cpp/lab.h"
#include "support/resident_bytes.h"

namespace vmm::testing {
namespace {

constexpr int kModels = 40;

class Scaling : public ::testing::Test {
 protected:
  Scaling() {
    for (int k = 0; k < kModels; ++k) {
      ModelSpec spec;
      spec.virtual_capacity = kGiB;
      pools_.push_back(shared_.register_model(std::to_string(k), spec));
      blocks_.push_back(lab_.memory().allocate(*pools_.back(), 3 * kMiB, nullptr));
    }
  }
  ~Scaling() override {
    for (const Address block : blocks_) DeviceMemory::free(lab_.space, block);
    pools_.clear();
    shared_.close(/*force=*/true);
  }

  // Which of the pools were locked meanwhile.
  std::vector<std::size_t> locked_by(const std::function<void()>& work) {
    std::vector<std::uint64_t> before;
    before.reserve(pools_.size());
    for (const auto& pool : pools_) before.push_back(pool->times_locked());
    work();
    std::vector<std::size_t> locked;
    for (std::size_t k = 0; k < pools_.size(); ++k) {
      if (pools_[k]->times_locked() != before[k]) locked.push_back(k);
    }
    return locked;
  }
  // The same as group_stats(), by asking each pool.
  [[nodiscard]] MemoryStats sum() const {
    MemoryStats sum;
    for (const auto& pool : pools_) sum.add(pool->memory_stats());
    return sum;
  }
  static std::vector<std::size_t> only(std::size_t k) { return {k}; }

  Lab lab_;
  SharedMemoryPool shared_{lab_.memory(), 256 * kMiB};
  std::vector<std::shared_ptr<Pool>> pools_;
  std::vector<Address> blocks_;
};

TEST_F(Scaling, UnregisteringLooksAtThatModelOnly) {
  DeviceMemory::free(lab_.space, blocks_[7]);
  EXPECT_EQ(locked_by([&] { shared_.unregister_model("7", false); }), only(7));
  EXPECT_EQ(lab_.memory().pools().size(), kModels - 1U);
  EXPECT_EQ(locked_by([&] { shared_.unregister_model("8", true); }), only(8));
  EXPECT_EQ(locked_by([&] { DeviceMemory::free(lab_.space, blocks_[8]); }), only(8));
  EXPECT_EQ(lab_.memory().pools().size(), kModels - 2U);
}

TEST_F(Scaling, TheNumbersOfAModelLookAtItAndItsPartsOnly) {
  const auto part = lab_.memory().create_part(pools_[3], {1, 0}, false);
  pools_.push_back(part);
  EXPECT_EQ(locked_by([&] { (void)lab_.memory().memory_stats_of(*pools_[3]); }),
            (std::vector<std::size_t>{3, kModels}));
  pools_.pop_back();
  lab_.memory().close_pools({part}, true);
}

// A cache of 64 layers for 64 requests is 8192 parts of one model.
TEST_F(Scaling, TheEndOfATensorsAddressesLooksAtNoOtherPartOfItsModel) {
  const auto tagged = lab_.memory().tagged(pools_[3], "t");
  pools_.push_back(tagged);
  std::vector<std::unique_ptr<TensorRange>> ranges;
  for (int k = 0; k < 4; ++k) {
    ranges.push_back(std::make_unique<TensorRange>(lab_.memory(), k < 3 ? pools_[3] : tagged,
                                                   TensorRangeSpec{"elastic tensor", 64 * kMiB, 0}));
    ranges.back()->commit({{0, 4 * kMiB}}, nullptr);
    pools_.push_back(ranges.back()->part());
  }
  // What a thread keeps of the model stays with it.
  DeviceMemory::free(lab_.space, lab_.memory().allocate(*pools_[3], kKiB, nullptr));
  const std::size_t kept = lab_.memory().kept_blocks(*pools_[3]);
  EXPECT_GT(kept, 0U);
  // The model is looked at for what its part had counted.
  EXPECT_EQ(locked_by([&] { ranges[1].reset(); }), (std::vector<std::size_t>{3, kModels + 2}));
  EXPECT_EQ(locked_by([&] { ranges[3].reset(); }), (std::vector<std::size_t>{3, kModels + 4}));
  EXPECT_EQ(lab_.memory().kept_blocks(*pools_[3]), kept);
  EXPECT_EQ(lab_.memory().family(*pools_[3]).size(), 4U) << "the model, its tag and two tensors";
  pools_.resize(kModels);
  ranges.clear();
}

TEST_F(Scaling, AnAddressIsFoundWithoutALookAtOthers) {
  EXPECT_EQ(locked_by([&] { EXPECT_EQ(lab_.memory().pool_at(blocks_[5] + kMiB), pools_[5]); }).size(), 0U);
  EXPECT_EQ(lab_.memory().pool_at(pools_[5]->base() + pools_[5]->capacity()) == pools_[5], false);
  EXPECT_EQ(lab_.memory().pool_at(1), nullptr);
}

TEST_F(Scaling, TheGroupsNumbersLookAtWhatHasChangedOnly) {
  (void)shared_.global_stats();
  GlobalMemoryStats stats;
  const auto ask = [&] { stats = shared_.global_stats(); };
  EXPECT_EQ(locked_by(ask).size(), 0U);
  EXPECT_EQ(stats.allocated_bytes, std::size_t{kModels} * 3 * kMiB);
  DeviceMemory::free(lab_.space, lab_.memory().allocate(*pools_[9], 8 * kMiB, nullptr));
  DeviceMemory::free(lab_.space, blocks_[4]);
  EXPECT_EQ(locked_by(ask), (std::vector<std::size_t>{4, 9}));
  const MemoryStats all = sum();
  EXPECT_EQ(stats.allocated_bytes, all.allocated_bytes);
  EXPECT_EQ(stats.idle_bytes, all.idle_bytes);
  EXPECT_EQ(stats.stranded_bytes, all.stranded_bytes);
  EXPECT_EQ(stats.physical_usage, all.physical_usage + stats.store_bytes);
}

TEST_F(Scaling, TheGroupsNumbersFollowModelsThatComeAndGo) {
  (void)shared_.global_stats();
  shared_.unregister_model("0", true);
  const std::size_t closed = shared_.global_stats().allocated_bytes;
  EXPECT_EQ(closed, std::size_t{kModels} * 3 * kMiB) << "its tensor lives on";
  DeviceMemory::free(lab_.space, blocks_[0]);
  EXPECT_EQ(shared_.global_stats().allocated_bytes, closed - 3 * kMiB);
  ModelSpec spec;
  spec.virtual_capacity = kGiB;
  const auto late = shared_.register_model("late", spec);
  EXPECT_EQ(shared_.global_stats().num_models, static_cast<std::size_t>(kModels));
  const Address block = lab_.memory().allocate(*late, 5 * kMiB, nullptr);
  EXPECT_EQ(shared_.global_stats().allocated_bytes, closed + 2 * kMiB);
  DeviceMemory::free(lab_.space, block);
}

// What waits for queued work comes free without a call on its pool.
TEST_F(Scaling, TheGroupsNumbersAskAgainWhatChangesByItself) {
  const Address block = lab_.memory().allocate(*pools_[2], 3 * kMiB, stream(1));
  pools_[2]->record_stream(block, stream(2));
  lab_.driver.hold_fences();
  DeviceMemory::free(lab_.space, block);
  EXPECT_EQ(shared_.global_stats().quarantined_bytes, 3 * kMiB);
  EXPECT_EQ(shared_.global_stats().quarantined_bytes, 3 * kMiB);
  lab_.driver.release_fences();
  EXPECT_EQ(shared_.global_stats().quarantined_bytes, 0U);
}

TEST_F(Scaling, AFreeOverALimitLooksAtItsPoolOnly) {
  shared_.set_physical_limit(kPage);
  EXPECT_EQ(locked_by([&] { DeviceMemory::free(lab_.space, blocks_[6]); }), only(6));
  EXPECT_EQ(pools_[6]->physical_bytes(), 0U) << "what it left idle has gone back";
  shared_.set_physical_limit(256 * kMiB);
}

// Queued work held it up when it was freed. Frees elsewhere find it in the end.
TEST_F(Scaling, WhatQueuedWorkHeldUpOverALimitIsFoundByLaterFrees) {
  const auto other = lab_.pool("other");
  shared_.set_physical_limit(kPage);
  lab_.driver.hold_fences();
  for (const Address block : blocks_) DeviceMemory::free(lab_.space, block);
  blocks_.clear();
  const std::size_t held = shared_.global_stats().physical_usage;
  EXPECT_GT(held, kPage);
  lab_.driver.release_fences();
  for (int k = 0; k < 64 + kModels; ++k) {
    DeviceMemory::free(lab_.space, lab_.memory().allocate(*other, 512, nullptr));
  }
  EXPECT_LE(shared_.global_stats().physical_usage, kPage);
}

// Work that no fence covers: what closed pools left waits until somebody waits for the device.
TEST_F(Scaling, ARequestLooksSeldomAtClosedPoolsThatQueuedWorkHoldsUp) {
  const auto open = lab_.pool("open");
  lab_.driver.hold_fences();
  for (const Address block : blocks_) DeviceMemory::free(lab_.space, block);
  blocks_.clear();
  for (int k = 0; k < kModels; ++k) shared_.unregister_model(std::to_string(k), false);
  ASSERT_GT(lab_.memory().pools().size(), std::size_t{kModels}) << "they wait";
  const auto looks = [&] {
    std::uint64_t all = 0;
    for (const auto& pool : pools_) all += pool->times_locked();
    return all;
  };
  const auto request = [&] { DeviceMemory::free(lab_.space, lab_.memory().allocate(*open, 512, nullptr)); };
  for (int k = 0; k < 64; ++k) request();
  constexpr int kRequests = 64 * kModels;
  const std::uint64_t before = looks();
  for (int k = 0; k < kRequests; ++k) request();
  EXPECT_GT(looks(), before);
  EXPECT_LT(looks() - before, kRequests / 2);
  lab_.driver.release_fences();
  request();
  EXPECT_EQ(lab_.memory().pools().size(), 1U);
}

TEST_F(Scaling, InactiveSplitIsWorkedOutAnewWhenSomethingHasChanged) {
  Pool& pool = *pools_[1];
  const auto split = [&] {
    pool.refresh_numbers();
    return pool.statistics()[StatKind::inactive_split_bytes][0].current;
  };
  const std::int64_t before = split();
  EXPECT_EQ(split(), before);
  const Address small = lab_.memory().allocate(pool, 512, nullptr);
  EXPECT_EQ(split(), before + static_cast<std::int64_t>(2 * kMiB - 512));
  DeviceMemory::free(lab_.space, small);
  EXPECT_EQ(split(), before);
}

// -- Memory of our own

TEST(OwnMemory, AMillionSmallBlocksTakeAtMost48BytesEachAndLeaveATenth) {
#ifdef VMM_SANITIZED
  GTEST_SKIP() << "the sanitizers have memory of their own for each of ours";
#endif
  constexpr std::size_t kCount = 1'000'000;
  Lab lab(LabSpec{2 * kGiB});  // nobody touches the blocks
  const auto pool = lab.pool("a");
  std::vector<Address> blocks(kCount, 1);  // touched before anything is measured
  const std::size_t before = resident_bytes();
  for (Address& block : blocks) block = lab.memory().allocate(*pool, 512, nullptr);
  const std::size_t taken = resident_bytes() - before;
  EXPECT_LE(taken, kCount * 48) << static_cast<double>(taken) / kCount << " bytes a block";
  for (const Address block : blocks) DeviceMemory::free(lab.space, block);
  lab.memory().empty_cache();
  EXPECT_LE(resident_bytes() - before, taken / 10) << "of " << taken;
}

// Their tables are megabytes of which a page or two is touched, each time anew.
TEST(OwnMemory, PoolsThatCameAndWentLeaveNothing) {
#ifdef VMM_SANITIZED
  GTEST_SKIP() << "the sanitizers have memory of their own for each of ours";
#endif
  constexpr std::size_t kPools = 200;
  Lab lab;
  const auto come_and_go = [&] {
    const std::size_t before = resident_bytes();
    std::vector<std::shared_ptr<Pool>> pools;
    pools.reserve(kPools);
    for (std::size_t k = 0; k < kPools; ++k) {
      PoolSpec spec;
      spec.name = std::to_string(k);
      spec.capacity = 64 * kGiB;
      pools.push_back(lab.memory().create_pool(spec, nullptr));
    }
    return resident_bytes() - before;
  };
  come_and_go();
  EXPECT_LE(come_and_go(), kPools * 64 * kKiB);
}

// For what it could give, for what waits in it (at two rungs), with all others at the last one,
// and once for what it holds and has idle; to give back what threads keep takes its lock too.
TEST_F(Scaling, ARefusedRequestLooksAtEachModelAFewTimes) {
  std::vector<std::uint64_t> before;
  for (const auto& pool : pools_) before.push_back(pool->times_locked());
  EXPECT_THROW(lab_.memory().allocate(*pools_[0], 200 * kMiB, nullptr), OutOfMemoryError);
  for (std::size_t k = 1; k < pools_.size(); ++k) EXPECT_LE(pools_[k]->times_locked() - before[k], 7U) << k;
}

// A GPU that is far behind: what leaves meanwhile.
class ScalingBehind : public ::testing::Test {
 protected:
  static constexpr std::size_t kStreams = 128;
  static constexpr std::size_t kCount = 400;
  ScalingBehind() {
    for (std::size_t k = 0; k < kStreams; ++k) lab_.meet(stream(0x1000 + k));
    PoolSpec spec = Lab::spec("pages");
    spec.capacity = kGiB;
    spec.page_size = kPage;
    pool_ = lab_.pool(spec);
    lab_.memory().allocate_pages(*pool_, 0, kCount * kPage, stream(0x1000));
    lab_.driver.hold_fences();
    lab_.driver.clear_calls();
  }
  ~ScalingBehind() override { lab_.driver.release_fences(); }

  Lab lab_;
  std::shared_ptr<Pool> pool_;
};

TEST_F(ScalingBehind, AddressesThatLeaveMakeAFewTicks) {
  for (std::size_t k = 0; k < kCount; ++k) lab_.memory().deallocate_pages(*pool_, k * kPage, kPage);
  EXPECT_LE(lab_.memory().clock().ticks_under_way(), 4U);
  EXPECT_LE(lab_.driver.live_fences(), 5 * (kStreams + 1));
  lab_.driver.release_fences();
  for (int k = 0; k < 8 && pool_->memory_stats().quarantined_bytes != 0; ++k) pool_->settle();
  EXPECT_EQ(pool_->memory_stats().quarantined_bytes, 0U) << "they go without a wait, once somebody comes by";
  lab_.memory().empty_cache();
  EXPECT_EQ(lab_.driver.live_fences(), 0U);
}

TEST_F(ScalingBehind, WhatLeavesBesidePoolsMakesAFewTicks) {
  std::size_t gone = 0;
  for (std::size_t k = 0; k < kCount; ++k) {
    lab_.memory().once_passed([&gone] {
      ++gone;
      return true;
    });
  }
  EXPECT_LE(lab_.memory().clock().ticks_under_way(), 4U);
  EXPECT_EQ(gone, 0U);
  lab_.driver.release_fences();
  const auto pool = lab_.pool("a");
  for (int k = 0; k < 8; ++k) lab_.leave_idle(*pool, 2 * kMiB, nullptr);  // whoever comes by
  EXPECT_EQ(gone, kCount);
}

TEST(ScalingShelf, OneOfWhichNothingCanGoIsLookedAtOnce) {
  HostDriver host{HostDriverOptions{4 * kKiB, kGiB, 1}};
  ScriptedDriver driver{host};
  ChunkStore store{driver, Location::on_device(0), 4 * kKiB, false};
  const auto group = std::make_shared<Budget>("group", kUnlimited, nullptr);
  std::vector<Chunk*> chunks(100);
  Budget* refused = nullptr;
  for (Chunk*& chunk : chunks) {
    ASSERT_TRUE(store.create(store.spec(4 * kKiB), *group, &chunk, &refused).ok());
    chunk->note_mapped();
    store.put(*group, chunk);
  }
  EXPECT_EQ(store.trim(*group, 0), 0U);
  // Not seen, so not looked at: what changed told nobody.
  chunks[0]->mappings.store(0);
  EXPECT_EQ(store.trim(*group, 0), 0U);
  chunks[0]->mappings.store(1);
  chunks[1]->note_unmapped();
  EXPECT_EQ(store.trim(*group, 0), 4 * kKiB);
  // One that comes unmapped is seen, and one that the driver keeps is asked for again.
  Chunk* another = nullptr;
  ASSERT_TRUE(store.create(store.spec(4 * kKiB), *group, &another, &refused).ok());
  store.put(*group, another);
  driver.fail_nth(Call::release, 1, broken());
  EXPECT_EQ(store.trim(*group, 0), 0U);
  EXPECT_EQ(store.trim(*group, 0), 4 * kKiB);
  for (std::size_t k = 0; k < chunks.size(); ++k) {
    if (k != 1) chunks[k]->note_unmapped();
  }
  EXPECT_EQ(store.trim(*group, 0), 99 * 4 * kKiB);
}

TEST(ScalingGroups, TheEndOfOneLooksAtNoOther) {
  Lab lab;
  std::vector<std::shared_ptr<Budget>> groups;
  std::vector<std::shared_ptr<Pool>> pools;
  std::vector<Address> live;
  for (std::size_t k = 0; k < 3; ++k) {
    groups.push_back(lab.memory().create_group("group", kUnlimited));
    pools.push_back(lab.pool(Lab::spec("a"), groups.back().get()));
    live.push_back(lab.memory().allocate(*pools.back(), 512, nullptr));
    lab.memory().close_pools({pools.back()}, /*force=*/true);
    lab.memory().end_group(*groups.back());
  }
  EXPECT_EQ(lab.memory().groups(), 3U);
  for (std::size_t k = 0; k < 3; ++k) {
    EXPECT_TRUE(DeviceMemory::free(lab.space, live[k]));
    EXPECT_EQ(lab.memory().groups(), 2 - k);
  }
}

}  // namespace
}  // namespace vmm::testing
