// What a pool's memory is made of: which chunks it takes, when it grows and when it moves
// what it has, and where requests stand. The policy alone is growth_policy_test's.
#include <gtest/gtest.h>

#include <chrono>
#include <random>
#include <vector>

#include "cpp/lab.h"

namespace vmm::testing {
namespace {

TEST(PoolChunks, TwentyGigabytesCostAFewDriverCalls) {
  // Nothing is touched, so no memory is used.
  Lab lab(LabSpec{64 * kGiB});
  PoolSpec spec = Lab::spec("a");
  spec.capacity = 64 * kGiB;
  const auto pool = lab.pool(spec);
  lab.driver.clear_calls();
  lab.allocate(*pool, 20 * kGiB);
  EXPECT_LE(lab.driver.count(Call::create), 24U);
  EXPECT_LE(lab.driver.count(), 72U) << lab.driver.transcript();
  EXPECT_EQ(lab.memory().committed_bytes(), 20 * kGiB) << "and not a byte more than asked";
}

TEST(PoolChunks, AnIdleChunkBelowA1024thOfTheRequestIsNotWorthAMove) {
  constexpr std::size_t kIdle = 32;  // more than the pool would grow by instead
  for (const std::size_t pages : {1024U, 1025U}) {
    Lab lab(LabSpec{8 * kGiB});
    PoolSpec spec = Lab::spec("a");
    spec.capacity = 8 * kGiB;
    const auto pool = lab.pool(spec);
    // Idle chunks of a page each, with a live page behind: no request of more stands there.
    std::vector<Address> idle;
    for (std::size_t k = 0; k < kIdle; ++k) {
      idle.push_back(lab.allocate(*pool, kPage));
      lab.allocate(*pool, kPage);
    }
    for (const Address block : idle) lab.free(block);
    const std::size_t before = lab.driver.live_chunk_bytes();
    lab.allocate(*pool, pages * kPage);
    const std::size_t fresh = lab.driver.live_chunk_bytes() - before;
    EXPECT_EQ(fresh, (pages == 1024 ? 1024 - kIdle : 1025) * kPage);
  }
}

// A pool that has been loaded with 1 GiB, and then takes blocks of half a slab.
struct Loaded {
  static constexpr std::size_t kSmall = kMiB;
  static PoolSpec spec(std::size_t limit) {
    PoolSpec spec = Lab::spec("a", limit);
    spec.capacity = 8 * kGiB;
    return spec;
  }
  explicit Loaded(std::size_t limit = kUnlimited) : lab(LabSpec{8 * kGiB}), pool(lab.pool(spec(limit))) {
    lab.allocate(*pool, kGiB);
    lab.driver.clear_calls();
  }
  void take(std::size_t slabs) {
    for (std::size_t k = 0; k < 2 * slabs; ++k) blocks.push_back(lab.allocate(*pool, kSmall));
  }
  std::size_t small_bytes() const { return pool->physical_bytes() - kGiB; }
  Lab lab;
  std::shared_ptr<Pool> pool;
  std::vector<Address> blocks;
};

TEST(PoolChunks, ManySlabsOfALoadedPoolStandOnFewChunks) {
  Loaded loaded;
  loaded.take(64);
  EXPECT_EQ(loaded.lab.driver.count(Call::create), 22U) << "1 up to 8, 2 up to 16, 3 up to 25 and so on";
  EXPECT_EQ(loaded.small_bytes(), 64 * kSlabBytes) << "all of them are used";
  loaded.take(1);
  EXPECT_EQ(loaded.small_bytes(), 72 * kSlabBytes);
  loaded.pool->check();
  const std::size_t creates = loaded.lab.driver.count(Call::create);
  loaded.take(7);
  EXPECT_EQ(loaded.lab.driver.count(Call::create), creates) << "those that were made with it";
}

TEST(PoolChunks, EmptySlabsAreForSmallBlocksUntilMemoryLacks) {
  Loaded loaded;
  loaded.take(65);
  const std::size_t mapped = loaded.pool->physical_bytes();
  const Address large = loaded.lab.allocate(*loaded.pool, 2 * kMiB);
  EXPECT_GT(loaded.pool->physical_bytes(), mapped) << "it stands beside them";
  loaded.lab.free(large);
  for (const Address block : loaded.blocks) loaded.lab.free(block);
  loaded.pool->shed(0);
  EXPECT_EQ(loaded.small_bytes(), 0U);
  loaded.pool->check();
}

TEST(PoolChunks, AtALimitASlabIsMadeAlone) {
  Loaded loaded(kGiB + 65 * kSlabBytes);
  loaded.take(65);
  EXPECT_EQ(loaded.small_bytes(), 65 * kSlabBytes);
  loaded.pool->check();
}

TEST(PoolChunks, WhereSeveralSlabsCannotBeHadOneIs) {
  Loaded loaded;
  loaded.take(64);
  loaded.lab.driver.fail_if([](const CallRecord& call) { return call.call == Call::create && call.a > kSlabBytes; },
                            Status(StatusCode::out_of_memory, "create"));
  loaded.take(1);
  EXPECT_EQ(loaded.small_bytes(), 65 * kSlabBytes);
  loaded.pool->check();
}

// A pool with 16 blocks of 24 MiB, of which every other has been freed: what is
// larger fits none of the holes.
struct Holes {
  static constexpr std::size_t kBlock = 24 * kMiB;
  static PoolSpec spec(std::size_t limit) {
    PoolSpec spec = Lab::spec("a", limit);
    spec.capacity = 64 * kGiB;
    return spec;
  }
  explicit Holes(std::size_t limit = kUnlimited) : lab(LabSpec{32 * kGiB}), pool(lab.pool(spec(limit))) {
    for (std::size_t k = 0; k < 16; ++k) blocks.push_back(lab.allocate(*pool, kBlock));
    for (std::size_t k = 0; k < 16; k += 2) lab.free(blocks[k]);
    lab.driver.clear_calls();
  }
  Lab lab;
  std::shared_ptr<Pool> pool;
  std::vector<Address> blocks;
};

TEST(PoolGrowth, APoolAboveItsPeakMovesIdleChunksInsteadOfGrowing) {
  Holes holes;
  const std::size_t before = holes.pool->physical_bytes();
  holes.lab.allocate(*holes.pool, 2 * Holes::kBlock);
  EXPECT_EQ(holes.lab.driver.count(Call::create), 0U) << holes.lab.driver.transcript();
  EXPECT_EQ(holes.pool->physical_bytes(), before);
}

TEST(PoolGrowth, A73rdAboveThePeakIsHadWithoutAMove) {
  for (const std::size_t missing : {2U, 3U}) {  // pages
    // The peak is 16 blocks, 192 pages, of which a 73rd is less than three pages.
    Holes holes;
    holes.lab.free(holes.blocks[15]);  // with its neighbour two blocks, and bare space behind
    holes.lab.driver.clear_calls();
    const std::size_t before = holes.pool->physical_bytes();
    holes.lab.allocate(*holes.pool, 2 * Holes::kBlock + missing * kPage);
    EXPECT_EQ(holes.lab.driver.count(Call::create), missing == 2 ? 1U : 0U) << holes.lab.driver.transcript();
    EXPECT_EQ(holes.pool->physical_bytes(), before + (missing == 2 ? 2 * kPage : 0));
  }
}

TEST(PoolGrowth, WhatItGoesByIsNotResetWithThePeak) {
  constexpr std::size_t kBlock = 64 * kMiB;
  Lab lab;
  const auto pool = lab.pool("a");
  lab.driver.hold_fences();  // each stream has memory of its own
  for (const std::uintptr_t name : {1U, 2U}) lab.leave_idle(*pool, kBlock, stream(name));
  const Address one = lab.allocate(*pool, kBlock, stream(1));
  const Address two = lab.allocate(*pool, kBlock, stream(2));  // the peak, and the pool has not grown for it
  lab.free(one);
  lab.free(two);
  lab.driver.release_fences();
  lab.memory().empty_cache();
  pool->reset_peaks();
  for (const std::uintptr_t name : {1U, 2U}) {
    lab.leave_idle(*pool, kBlock, stream(name));
    lab.memory().settle(/*wait=*/true);
  }
  EXPECT_EQ(pool->physical_bytes(), 2 * kBlock);
}

TEST(PoolGrowth, AnIdleChunkMayReachBeyondTheRequestIntoBareSpace) {
  Holes holes;
  holes.lab.allocate(*holes.pool, 44 * kMiB);
  EXPECT_EQ(holes.lab.driver.count(Call::map), 2U) << holes.lab.driver.transcript();
  holes.lab.driver.clear_calls();
  holes.lab.allocate(*holes.pool, 4 * kMiB);
  EXPECT_EQ(holes.lab.driver.count(Call::map), 0U) << "the rest of the second chunk is free memory";
}

TEST(PoolGrowth, WhatAMoveReachedIntoIsBareAgainWhenItFails) {
  Holes holes;
  const std::size_t before = holes.pool->physical_bytes();
  holes.lab.driver.fail_nth(Call::set_access, 1, {StatusCode::not_supported, "scripted", 801, "SCRIPTED_CAPTURE"});
  holes.lab.allocate(*holes.pool, 44 * kMiB);  // proves at its end that free blocks are bare or backed
  EXPECT_EQ(holes.lab.driver.failures(), 1U);
  EXPECT_EQ(holes.pool->physical_bytes(), before + 44 * kMiB) << "new memory alone";
}

// Random blocks come and go, each step after so much time, which nothing can hold for long without slack.
std::size_t moved_by_a_churn(Lab& lab, Pool& pool, int steps, std::chrono::nanoseconds step_takes = {}) {
  std::mt19937 random(5);
  std::vector<Address> live(64, 0);
  lab.driver.clear_calls();
  std::size_t unmapped = 0;
  for (int step = 0; step < steps; ++step) {
    lab.driver.pass_time(step_takes);
    Address& block = live[random() % live.size()];
    if (block != 0) DeviceMemory::free(lab.space, block);
    block = lab.memory().allocate(pool, kPage * (1 + random() % 64) + random() % kPage, nullptr);
    unmapped += lab.driver.count(Call::unmap);
    lab.driver.clear_calls();
  }
  for (const Address block : live) lab.adopt(block);
  lab.memory().check();
  return unmapped;
}

TEST(PoolGrowth, AProgramThatNeverSettlesEndsWithoutMoves) {
  Lab lab(LabSpec{32 * kGiB});
  const auto pool = lab.pool(Holes::spec(kUnlimited));
  EXPECT_LE(moved_by_a_churn(lab, *pool, 20000), 2000U + 256U)
      << "what brings it to a quarter more, and a few requests'";
  lab.driver.clear_calls();
  const Statistics statistics = pool->statistics();
  const auto peak = static_cast<std::size_t>(statistics[StatKind::allocated_bytes][0].peak);
  EXPECT_LE(pool->physical_bytes(), peak + peak / 4);
}

TEST(PoolGrowth, WhereTimePaysForMovesAPoolNeedsNoMore) {
  Lab lab(LabSpec{32 * kGiB});
  const auto pool = lab.pool(Holes::spec(kUnlimited));
  EXPECT_GT(moved_by_a_churn(lab, *pool, 20000, std::chrono::seconds(1)), 2000U + 256U)
      << "as many as it takes, as they have been paid for before the next";
  const Statistics statistics = pool->statistics();
  const auto peak = static_cast<std::size_t>(statistics[StatKind::allocated_bytes][0].peak);
  EXPECT_LE(pool->physical_bytes(), peak + peak / 16);
}

TEST(PoolGrowth, AtItsLimitAPoolMovesWhateverItHasMovedBefore) {
  Holes holes(16 * Holes::kBlock);
  for (int round = 0; round < 100; ++round) {
    // 8 blocks' worth of holes serve a large block, and the small ones again.
    const Address large = holes.lab.allocate(*holes.pool, 8 * Holes::kBlock);
    holes.lab.free(large);
    std::vector<Address> small;
    for (int k = 0; k < 8; ++k) small.push_back(holes.lab.allocate(*holes.pool, Holes::kBlock));
    std::shuffle(small.begin(), small.end(), std::mt19937(static_cast<unsigned>(round)));
    for (const Address block : small) holes.lab.free(block);
  }
  EXPECT_LE(holes.pool->physical_bytes(), 16 * Holes::kBlock);
}

// A uniform pool whose free space is as told: each stretch is so many pages with
// memory, so many bare ones, and so many with memory again; a live page behind.
struct Stretch {
  std::size_t backed = 0;
  std::size_t bare = 0;
  std::size_t backed_above = 0;
};
struct Stretches {
  Stretches(Lab& lab, const std::vector<Stretch>& stretches) {
    PoolSpec spec = Lab::spec("a");
    spec.page_size = kPage;
    pool = lab.pool(spec);
    Address at = pool->base();
    std::vector<Address> freed;
    const auto take = [&](std::size_t pages) {
      if (pages != 0) lab.adopt(lab.memory().allocate_at(*pool, at, pages * kPage, nullptr));
      if (pages != 0) freed.push_back(at);
      at += pages * kPage;
    };
    for (const auto& [backed, bare, backed_above] : stretches) {
      starts.push_back(at);
      take(backed);
      at += bare * kPage;
      take(backed_above);
      lab.adopt(lab.memory().allocate_at(*pool, at, kPage, nullptr));
      at += kPage;
    }
    for (const Address address : freed) lab.free(address);
    lab.driver.clear_calls();
  }
  std::shared_ptr<Pool> pool;
  std::vector<Address> starts;
};

TEST(PoolPlacement, WhatHasAllItsMemoryComesFirstHoweverManySmallerSpansLackSome) {
  Lab lab;
  std::vector<Stretch> pages(20, {1, 7});
  pages.push_back({9, 0});
  const Stretches stretches(lab, pages);
  EXPECT_EQ(lab.allocate(*stretches.pool, 8 * kPage), stretches.starts.back());
  EXPECT_EQ(lab.driver.count(), 0U) << lab.driver.transcript();
}

TEST(PoolPlacement, OtherwiseARequestStandsWhereTheLeastIsMissing) {
  struct Case {
    const char* what;
    std::vector<Stretch> stretches;
    std::size_t wanted;         // pages
    std::size_t page, missing;  // of the second stretch, where it is to stand
  };
  const std::vector<Case> cases = {
      {"upwards over bare space", {{3, 10}, {5, 10}, {4, 10}}, 8, 0, 3},
      {"downwards", {{3, 10}, {0, 5, 5}, {4, 10}}, 8, 2, 3},
      {"across a hole", {{5, 10}, {4, 2, 4}}, 10, 0, 2},
  };
  for (const Case& c : cases) {
    Lab lab;
    const Stretches stretches(lab, c.stretches);
    EXPECT_EQ(lab.allocate(*stretches.pool, c.wanted * kPage), stretches.starts[1] + c.page * kPage) << c.what;
    EXPECT_EQ(lab.driver.count(Call::map), c.missing) << c.what << lab.driver.transcript();
  }
}

TEST(PoolChunks, AGivenPageSizeIsTheSizeOfEveryChunk) {
  Lab lab;
  PoolSpec spec = Lab::spec("a");
  spec.page_size = 8 * kMiB;
  const auto pool = lab.pool(spec);
  EXPECT_EQ(pool->page_size(), 8 * kMiB);
  for (const std::size_t bytes : {std::size_t{10}, 3 * kMiB, 64 * kMiB}) lab.allocate(*pool, bytes);
  for (const CallRecord& call : lab.driver.calls(Call::create)) EXPECT_EQ(call.a, 8 * kMiB);
}

TEST(PoolChunks, ScatteredIdleChunksMoveTogetherInsteadOfNewOnes) {
  Lab lab;
  PoolSpec spec = Lab::spec("a", 64 * kMiB);
  spec.page_size = kPage;
  const auto pool = lab.pool(spec);
  std::vector<Address> blocks;
  for (std::uint64_t k = 0; k < 32; ++k) {
    blocks.push_back(lab.allocate(*pool, kPage));
    Lab::fill(blocks.back(), kPage, k);
  }
  for (std::size_t k = 0; k < 32; k += 2) lab.free(blocks[k]);
  lab.driver.clear_calls();
  const Address big = lab.allocate(*pool, 32 * kMiB);  // half of the memory, in 16 holes
  EXPECT_EQ(lab.driver.count(Call::create), 0U);
  EXPECT_EQ(pool->physical_bytes(), 64 * kMiB);
  Lab::fill(big, 32 * kMiB, 1000);
  for (std::uint64_t k = 1; k < 32; k += 2) EXPECT_TRUE(Lab::holds(blocks[k], kPage, k)) << k;
  EXPECT_TRUE(Lab::holds(big, 32 * kMiB, 1000));
}

TEST(PoolChunks, TheSpareSlabGivesWayToALargeRequest) {
  Lab lab;
  PoolSpec spec = Lab::spec("a");
  spec.capacity = 2 * kPage;
  const auto pool = lab.pool(spec);
  lab.leave_idle(*pool, 100);  // leaves one empty slab behind
  EXPECT_NO_THROW(lab.free(lab.allocate(*pool, 2 * kPage))) << "the whole capacity is free";
}

}  // namespace
}  // namespace vmm::testing
