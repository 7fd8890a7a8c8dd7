// Which requests private pools serve, who uses them, and when they let go.
#include "core/device/private_pools.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <thread>
#include <unordered_set>
#include <vector>

#include "cpp/private_pools_lab.h"

namespace vmm::testing {
namespace {

// -------------------------------------------------------------------- routes

// What stands at addresses of its own: a tensor's range, say.
TEST_F(PrivatePoolsTest, WhatACaptureHasBesideBlocksGoesWithItsRegion) {
  int ended = 0;
  const auto make = [&] {
    // Whoever ends it comes back here: no lock is held.
    return std::shared_ptr<const void>(nullptr, [&](const void*) {
      pools.sweep();
      EXPECT_FALSE(exists(kGraph));
      ++ended;
    });
  };
  pools.keep_for_capture(kCaptured, make());
  EXPECT_EQ(ended, 1) << "no capture, nobody who keeps it";
  ended = 0;
  const auto graph = begin_capture(kGraph, kCaptured);
  pools.keep_for_capture(nullptr, std::shared_ptr<const void>(nullptr, [&](const void*) { ++ended; }));
  EXPECT_EQ(ended, 1) << "of another stream, which is not captured";
  auto kept = make();
  pools.keep_for_capture(kCaptured, kept);
  pools.keep_for_capture(kCaptured, kept);
  EXPECT_EQ(kept.use_count(), 2) << "once is enough";
  pools.keep_for_capture(kCaptured, make());
  kept.reset();
  end_capture(kGraph, kCaptured);
  EXPECT_EQ(ended, 1);
  pools.release(kGraph);
  EXPECT_EQ(ended, 3);
}

TEST_F(PrivatePoolsTest, NobodyIsRoutedUntilSomebodyBegins) {
  pools.add_user(kOne);
  EXPECT_FALSE(pools.any_route());
  EXPECT_EQ(pools.route(model, a), nullptr);
  pools.begin(kOne, only(a), a);
  EXPECT_TRUE(pools.any_route());
  const Address inside = allocate(3 * kMiB, a);
  const Address outside = allocate(3 * kMiB, b);
  EXPECT_TRUE(region_of(inside) == kOne);
  EXPECT_TRUE(region_of(outside) == RegionId{});
  EXPECT_FALSE(is_pinned(kOne));
  EXPECT_FALSE(lab.memory().clock().is_capturing());
  pools.end(kOne);
  EXPECT_FALSE(pools.any_route());
  EXPECT_TRUE(region_of(allocate(kMiB, a)) == RegionId{});
}

TEST_F(PrivatePoolsTest, TheLatestRouteWins) {
  pools.begin(kOne, everywhere(), a);
  pools.begin(kOther, only(a), a);
  EXPECT_TRUE(region_of(allocate(kMiB, a)) == kOther);
  EXPECT_TRUE(region_of(allocate(kMiB, b)) == kOne);
  pools.end(kOther);
  EXPECT_TRUE(region_of(allocate(kMiB, a)) == kOne);
  pools.end(kOne);
}

TEST_F(PrivatePoolsTest, ARouteOfAThreadIsItsOwn) {
  pools.begin(kOne, this_thread_only(), a);
  std::thread([&] { EXPECT_EQ(pools.route(model, a), nullptr); }).join();
  EXPECT_NE(pools.route(model, a), nullptr);
  pools.end(kOne);
}

TEST_F(PrivatePoolsTest, ARegionIsRecordedOnceAtATime) {
  pools.add_user(kOne);
  pools.begin(kOne, everywhere(), a);
  try {
    pools.begin(kOne, everywhere(), a);
    FAIL();
  } catch (const InvalidArgumentError& error) {
    EXPECT_STREQ(error.what(), "beginAllocateToPool: already recording to mempool_id");
  }
  EXPECT_EQ(pools.use_count(kOne), 2) << "what was refused counts";
  pools.end(kOne);
  EXPECT_THROW(pools.end(kOne), InvalidArgumentError);
  EXPECT_THROW(pools.end(kOther), InvalidArgumentError);
  EXPECT_THROW((void)pools.use_count(kOther), InvalidArgumentError);
  EXPECT_THROW((void)pools.checkpoint(kOther), InvalidArgumentError);
}

TEST_F(PrivatePoolsTest, EachModelHasAPartOfItsOwn) {
  const auto second = lab.pool("second");
  pools.add_user(kOne);
  pools.begin(kOne, everywhere(), a);
  const Address one = allocate(model, 4 * kMiB);
  const Address other = allocate(second, 4 * kMiB);
  pools.end(kOne);
  pools.release(kOne);
  EXPECT_TRUE(region_of(one) == kOne);
  EXPECT_TRUE(region_of(other, second.get()) == kOne);
  EXPECT_EQ(pools.parts(kOne).size(), 2U);
  EXPECT_EQ(lab.memory().statistics_of(*second)[StatKind::allocated_bytes][0].current, 4 * kMiB);
  lab.free(one);
  lab.free(other);
  pools.empty_cache(kOne);
  EXPECT_EQ(mapped(kOne), 0U);
  leave_mempool(kOne);
  lab.memory().close_pool(*second, /*force=*/false);
  expect_nothing_left();
}

TEST_F(PrivatePoolsTest, AClosedModelRefusesInARegionToo) {
  const auto second = lab.pool("second");
  pools.begin(kOne, everywhere(), a);
  const Address kept = allocate(second, kMiB);
  lab.memory().close_pool(*second, /*force=*/true);
  EXPECT_THROW(allocate(second, kMiB), InvalidArgumentError);
  EXPECT_TRUE(region_of(allocate(kMiB)) == kOne);
  lab.free(kept);
  pools.end(kOne);
}

// ------------------------------------------------------------ users, releases

TEST_F(PrivatePoolsTest, UsersAreCountedAsTorchCountsThem) {
  pools.add_user(kOne);
  EXPECT_EQ(pools.use_count(kOne), 1);
  pools.begin(kOne, everywhere(), a);
  EXPECT_EQ(pools.use_count(kOne), 2);
  pools.end(kOne);
  EXPECT_EQ(pools.use_count(kOne), 2) << "the release is due";
  pools.release(kOne);
  EXPECT_EQ(pools.use_count(kOne), 1);
  begin_capture(kOne, a);
  end_capture(kOne, a);
  begin_capture(kOne, a);
  end_capture(kOne, a);
  EXPECT_EQ(pools.use_count(kOne), 3);
  pools.release(kOne);
  pools.release(kOne);
  EXPECT_EQ(pools.use_count(kOne), 1);
  leave_mempool(kOne);
  EXPECT_FALSE(exists(kOne));
  pools.release(kOne);
  pools.set_use_on_oom(kOne, false);
  pools.set_no_split(kOne);
  pools.empty_cache(kOne);
  EXPECT_FALSE(exists(kOne)) << "what nobody knows is ignored";
}

TEST_F(PrivatePoolsTest, WhatIsFreeInALivingMemPoolGoesBack) {
  pools.add_user(kOne);
  use(kOne, 8 * kMiB);
  EXPECT_EQ(mapped(kOne), 8 * kMiB);
  pools.empty_cache(kOther);
  EXPECT_EQ(mapped(kOne), 8 * kMiB);
  pools.empty_cache(kOne);
  EXPECT_EQ(mapped(kOne), 0U);
  leave_mempool(kOne);
  expect_nothing_left();
}

TEST_F(PrivatePoolsTest, WithTheLastUserTheMemoryGoesAtOnce) {
  pools.add_user(kOne);
  use(kOne, 8 * kMiB);
  pools.set_use_on_oom(kOne, false);
  pools.release(kOne);
  EXPECT_EQ(mapped(kOne), 0U);
  expect_nothing_left();
}

TEST_F(PrivatePoolsTest, AMemPoolAndItsGraphsGoInAnyOrder) {
  enum class User { mempool, first_graph, second_graph, block };
  std::vector<User> order = {User::mempool, User::first_graph, User::second_graph, User::block};
  do {
    pools.add_user(kOne);
    for (int graph = 0; graph < 2; ++graph) {
      begin_capture(kOne, a);
      lab.free(allocate(4 * kMiB, a));
      end_capture(kOne, a);
    }
    pools.begin(kOne, everywhere(), nullptr);
    const Address block = allocate(3 * kMiB);
    lab.fill(block, 3 * kMiB, 5);
    pools.end(kOne);
    pools.release(kOne);
    int graphs = 2;
    int users = 3;
    bool live = true;
    for (const User user : order) {
      if (user == User::block) {
        EXPECT_TRUE(lab.holds(block, 3 * kMiB, 5));
        lab.free(block);
        live = false;
      } else if (user == User::mempool) {
        leave_mempool(kOne);
        --users;
      } else {
        pools.release(kOne);
        --graphs;
        --users;
      }
      lab.memory().empty_cache();
      lab.memory().check();
      if (users > 0) {
        EXPECT_EQ(pools.use_count(kOne), users);
        EXPECT_EQ(is_pinned(kOne), graphs > 0);
      }
      EXPECT_EQ(exists(kOne), users > 0);
      if (graphs == 0) {
        EXPECT_LE(mapped(kOne), live ? 4 * kMiB : 0U);
      } else {
        EXPECT_GE(mapped(kOne), 4 * kMiB);
      }
    }
    expect_nothing_left();
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST_F(PrivatePoolsTest, AGraphThatEndsWhileAThreadIsInItsPoolIsTheOneReleased) {
  pools.add_user(kOne);
  begin_capture(kOne, a);
  lab.free(allocate(4 * kMiB, a));
  end_capture(kOne, a);
  pools.begin(kOne, everywhere(), nullptr);
  EXPECT_TRUE(is_pinned(kOne));
  pools.release(kOne);
  EXPECT_FALSE(is_pinned(kOne));
  EXPECT_EQ(pools.use_count(kOne), 2);
  pools.end(kOne);
  pools.release(kOne);
  leave_mempool(kOne);
  expect_nothing_left();
}

// -------------------------------------------------------------------- rescue

TEST_F(PrivatePoolsTest, OnlyWillingRegionsRescue) {
  pools.add_user(kOne);
  use(kOne, 8 * kMiB);
  EXPECT_EQ(pools.lend(*model, 4 * kMiB, nullptr), 0U);
  pools.set_use_on_oom(kOne, true);
  EXPECT_EQ(pools.lend(*model, 16 * kMiB, nullptr), 0U);
  EXPECT_EQ(pools.lend(*lab.pool("stranger"), 4 * kMiB, nullptr), 0U);
  const Address found = pools.lend(*model, 4 * kMiB, nullptr);
  ASSERT_NE(found, 0U);
  EXPECT_TRUE(region_of(found) == kOne);
  EXPECT_EQ(mapped(kOne), 8 * kMiB);
  EXPECT_TRUE(DeviceMemory::free(lab.space, found));
  begin_capture(kOne, a);
  end_capture(kOne, a);
  EXPECT_EQ(pools.lend(*model, 4 * kMiB, nullptr), 0U) << "it is a graph's";
  pools.release(kOne);
  EXPECT_EQ(pools.use_count(kOne), 1);
  leave_mempool(kOne);
}

// As natively, which asks such a pool before it counts an error or gives anything up.
TEST_F(PrivatePoolsTest, WhatIsLentIsNoOutOfMemory) {
  pools.add_user(kOne);
  use(kOne, 16 * kMiB);
  pools.begin(kOne, everywhere(), nullptr);
  const Address kept = allocate(3 * kMiB);
  pools.end(kOne);
  pools.release(kOne);
  ASSERT_EQ(mapped(kOne), 16 * kMiB) << "in the middle of its one chunk, whose rest is nobody's to take";
  lab.memory().set_limit(model->budget(), 16 * kMiB);
  EXPECT_THROW(lab.allocate(*model, 8 * kMiB), OutOfMemoryError);
  EXPECT_EQ(model->statistics().num_ooms, 1);
  pools.set_use_on_oom(kOne, true);
  const auto waits = lab.driver.count(Call::synchronize);
  const Address lent = lab.allocate(*model, 8 * kMiB);
  EXPECT_TRUE(region_of(lent) == kOne);
  EXPECT_EQ(model->statistics().num_ooms, 1);
  EXPECT_EQ(lab.driver.count(Call::synchronize), waits);
  EXPECT_THROW(lab.memory().allocate_first(*model, 8 * kMiB, nullptr), OutOfMemoryError) << "pages are its own";
  lab.free(lent);
  lab.free(kept);
  leave_mempool(kOne);
}

TEST_F(PrivatePoolsTest, WithoutSplittingABlockHasItsChunksForItself) {
  pools.add_user(kOne);
  pools.set_no_split(kOne);
  use(kOne, 12 * kMiB);
  pools.begin(kOne, everywhere(), nullptr);
  const Address first = allocate(3 * kMiB);
  const Address second = allocate(3 * kMiB);
  const std::shared_ptr<Pool> part = pools.parts(kOne).front();
  const std::vector<ChunkView> under_first = part->chunks_under(first, 3 * kMiB);
  const std::vector<ChunkView> under_second = part->chunks_under(second, 3 * kMiB);
  ASSERT_EQ(under_first.size(), 1U);
  ASSERT_EQ(under_second.size(), 1U);
  EXPECT_NE(under_first[0].handle, under_second[0].handle);
  pools.end(kOne);
}

// --------------------------------------------------------------- checkpoints

TEST_F(PrivatePoolsTest, ACheckpointBringsBackTheBlocksOfAllParts) {
  const auto second = lab.pool("second");
  const auto late = lab.pool("late");
  begin_capture(kGraph, a);
  const Address kept = allocate(model, 3 * kMiB, a);
  const Address other = allocate(second, 1000, a);
  const Address dropped = allocate(model, 5 * kMiB, a);
  lab.free(dropped);
  lab.fill(kept, 3 * kMiB, 1);
  lab.fill(other, 1000, 2);
  end_capture(kGraph, a);
  EXPECT_EQ(pools.live_addresses(kGraph), (std::unordered_set<Address>{kept, other}));
  const RegionCheckpoint checkpoint = pools.checkpoint(kGraph);

  begin_capture(kGraph, a);
  const Address newer = lab.memory().allocate(*pools.route(model, a), 4 * kMiB, a);
  const Address stranger = lab.memory().allocate(*pools.route(late, a), kMiB, a);
  end_capture(kGraph, a);
  lab.free(other);
  std::vector<Address> freed;
  std::vector<Address> allocated;
  pools.restore(checkpoint, &freed, &allocated);
  lab.memory().check();
  EXPECT_EQ(std::unordered_set<Address>(freed.begin(), freed.end()),
            (std::unordered_set<Address>{kept, newer, stranger}));
  EXPECT_EQ(std::unordered_set<Address>(allocated.begin(), allocated.end()),
            (std::unordered_set<Address>{kept, other}));
  EXPECT_EQ(pools.live_addresses(kGraph), (std::unordered_set<Address>{kept, other}));
  EXPECT_TRUE(lab.holds(kept, 3 * kMiB, 1));
  EXPECT_TRUE(lab.holds(other, 1000, 2));
  EXPECT_TRUE(DeviceMemory::free(lab.space, other));
  lab.free(kept);
  pools.release(kGraph);
  pools.release(kGraph);
  EXPECT_FALSE(exists(kGraph));
  EXPECT_EQ(mapped(kGraph), 0U);
}

// What a capture recorded on another stream and freed: that stream has other work by its end.
TEST_F(PrivatePoolsTest, ACheckpointWaitsForWhatACaptureRecorded) {
  const Stream side = stream(0x51DE);
  begin_capture(kGraph, a);
  const Address kept = allocate(model, 3 * kMiB, a);
  const auto use_beside = [&] {
    const Address used = allocate(model, 5 * kMiB, a);
    lab.space.find(used)->record_stream(used, side);
    lab.driver.begin_capture(side);
    lab.free(used);
    lab.driver.end_capture(side);
    lab.driver.hold_fences(side);
  };
  use_beside();
  end_capture(kGraph, a);
  const RegionCheckpoint checkpoint = pools.checkpoint(kGraph);
  EXPECT_EQ(pools.live_addresses(kGraph), (std::unordered_set<Address>{kept}));
  begin_capture(kGraph, a);
  use_beside();
  end_capture(kGraph, a);
  std::vector<Address> freed;
  std::vector<Address> allocated;
  pools.restore(checkpoint, &freed, &allocated);
  EXPECT_EQ(freed, std::vector<Address>{kept});
  EXPECT_EQ(allocated, std::vector<Address>{kept});
  lab.memory().check();
  lab.free(kept);
  pools.release(kGraph);
  pools.release(kGraph);
}

// A part that has what no checkpoint knows: no other part is changed either.
TEST_F(PrivatePoolsTest, ACheckpointThatOnePartCannotRestoreChangesNone) {
  const auto second = lab.pool("second");
  pools.add_user(kOne);
  pools.begin(kOne, everywhere(), nullptr);
  const Address first = allocate(model, 3 * kMiB);
  const Address other = allocate(second, 3 * kMiB);
  const RegionCheckpoint checkpoint = pools.checkpoint(kOne);
  const Address later = lab.memory().allocate(*pools.route(model, nullptr), kMiB, nullptr);
  const PoolList parts = pools.parts(kOne);
  const auto of_second =
      std::find_if(parts.begin(), parts.end(), [&](const auto& part) { return &part->model() == second.get(); });
  const ByteRange page{(*of_second)->capacity() - 2 * kMiB, 2 * kMiB};
  lab.memory().allocate_pages(**of_second, page.offset, page.size, nullptr);
  std::vector<Address> freed;
  std::vector<Address> allocated;
  EXPECT_THROW(pools.restore(checkpoint, &freed, &allocated), VmmError);
  EXPECT_TRUE(freed.empty());
  EXPECT_TRUE(allocated.empty());
  EXPECT_EQ(pools.live_addresses(kOne), (std::unordered_set<Address>{first, other, later}));
  (*of_second)->deallocate_pages(page.offset, page.size);
  pools.restore(checkpoint, &freed, &allocated);
  EXPECT_EQ(pools.live_addresses(kOne), (std::unordered_set<Address>{first, other}));
  for (const Address block : {first, other}) lab.free(block);
  pools.end(kOne);
  pools.release(kOne);
}

// ------------------------------------------------------------- foreign memory

struct Foreign final : ForeignMemory {
  void set_pinned(bool value) noexcept override { pinned = value; }
  void close() noexcept override { closed = true; }
  void set_no_split() noexcept override { no_split = true; }
  Address allocate(std::size_t /*bytes*/, Stream /*stream*/) override { return 0; }
  Address try_allocate_within(std::size_t bytes, Stream /*stream*/) override { return bytes <= unused ? 512 : 0; }
  bool pinned = false;
  bool closed = false;
  bool no_split = false;
  std::size_t unused = 0;
};

TEST_F(PrivatePoolsTest, ForeignMemoryServesWhatFoundNoneWhereItMay) {
  const auto foreign = std::make_shared<Foreign>();
  foreign->unused = 1000;
  pools.add_user(kOne, foreign);
  EXPECT_EQ(pools.lend(*model, 1000, a), 0U) << "nobody said that it may";
  pools.set_use_on_oom(kOne, true);
  EXPECT_EQ(pools.lend(*model, 1000, a), 512U);
  EXPECT_EQ(pools.lend(*model, 1001, a), 0U);
  begin_capture(kOne, a);
  EXPECT_EQ(pools.lend(*model, 1000, a), 0U) << "a graph's";
  end_capture(kOne, a);
  pools.release(kOne);
  EXPECT_FALSE(foreign->no_split);
  pools.set_no_split(kOne);
  EXPECT_TRUE(foreign->no_split);
  leave_mempool(kOne);
}

TEST_F(PrivatePoolsTest, ForeignMemoryFollowsItsRegion) {
  const auto foreign = std::make_shared<Foreign>();
  pools.add_user(kOne, foreign);
  pools.begin(kOne, everywhere(), a);
  std::shared_ptr<ForeignMemory> found;
  EXPECT_EQ(pools.route(model, a, &found), nullptr);
  EXPECT_EQ(found, foreign);
  pools.begin(kOther, everywhere(), a);
  found = nullptr;
  EXPECT_NE(pools.route(model, a, &found), nullptr);
  EXPECT_EQ(found, nullptr);
  pools.end(kOther);
  pools.end(kOne);
  pools.release(kOne);
  begin_capture(kOne, a);
  EXPECT_TRUE(foreign->pinned);
  end_capture(kOne, a);
  pools.release(kOne);
  EXPECT_FALSE(foreign->pinned);
  pools.empty_cache(kOne);
  EXPECT_FALSE(foreign->closed);
  leave_mempool(kOne);
  EXPECT_TRUE(foreign->closed);
}

// -------------------------------------------------------------------- threads

TEST_F(PrivatePoolsTest, ThreadsComeAndGoAtOnce) {
  const auto work = [&](std::uint64_t number) {
    for (int turn = 0; turn < 50; ++turn) {
      const RegionId region{0, 100 + number * 100 + static_cast<std::uint64_t>(turn)};
      pools.add_user(region);
      pools.begin(region, this_thread_only(), a);
      const std::shared_ptr<Pool> part = pools.route(model, stream(number));
      ASSERT_NE(part, nullptr);
      ASSERT_TRUE(part->region() == region);
      const Address block = lab.memory().allocate(*part, 100'000, stream(number));
      pools.end(region);
      pools.release(region);
      pools.set_use_on_oom(region, false);
      pools.release(region);
      ASSERT_TRUE(DeviceMemory::free(lab.space, block));
    }
  };
  std::vector<std::thread> threads;
  threads.reserve(4);
  for (std::uint64_t number = 1; number <= 4; ++number) threads.emplace_back(work, number);
  for (auto& thread : threads) thread.join();
  expect_nothing_left();
}

}  // namespace
}  // namespace vmm::testing
