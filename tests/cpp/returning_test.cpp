// Chunks that go back and forth between models: what a chunk left stays mapped, and costs
// nothing when it comes back; and when it must not stay.
#include <gtest/gtest.h>

#include <array>
#include <thread>
#include <vector>

#include "core/faces/seals.h"
#include "cpp/lab.h"

namespace vmm::testing {
namespace {

const Stream kOne = stream(0x10);
const Stream kTwo = stream(0x20);
constexpr std::size_t kBlock = 8 * kMiB;

// Models under one limit of 32 MiB, of which each wants all in turn.
class Returning : public ::testing::Test {
 protected:
  std::shared_ptr<Pool> model(const std::string& name, int priority = 0, std::size_t floor = 0) {
    PoolSpec spec = Lab::spec(name);
    spec.priority = priority;
    spec.floor = floor;
    return lab_.pool(spec, group_.get());
  }
  std::vector<std::shared_ptr<Pool>> several(std::size_t count) {
    std::vector<std::shared_ptr<Pool>> models(count);
    for (std::size_t k = 0; k < count; ++k) models[k] = model("model " + std::to_string(k));
    return models;
  }
  // Nothing is in use any more: what is retired goes, or is dormant.
  void settle() { lab_.memory().settle(/*wait=*/true); }
  void take(Pool& pool, std::size_t bytes, Stream on = nullptr) {
    lab_.leave_idle(pool, bytes, on);
    settle();
  }
  // A turn: blocks are written to, and freed with what was written. All that the limit allows
  // were another model's before, so they are zero at first.
  void turn(Pool& pool, std::uint64_t seed, std::size_t blocks = 4) {
    std::vector<Address> held;
    for (std::size_t k = 0; k < blocks; ++k) {
      held.push_back(lab_.allocate(pool, kBlock, kOne));
      EXPECT_TRUE(blocks != 4 || Lab::is_zero(held.back(), kBlock)) << "another model's content";
      Lab::fill(held.back(), kBlock, seed + k);
    }
    for (std::size_t k = 0; k < blocks; ++k) EXPECT_TRUE(Lab::holds(held[k], kBlock, seed + k));
    for (const Address block : held) lab_.free(block);
    settle();
  }
  std::uint64_t mapping_calls() const {
    std::uint64_t calls = 0;
    for (const Call call : {Call::create, Call::release, Call::map, Call::unmap, Call::set_access}) {
      calls += lab_.driver.count(call);
    }
    return calls;
  }
  std::size_t dormant() { return lab_.memory().store().dormant().size(); }
  static std::size_t bytes(const std::shared_ptr<Pool>& pool) { return pool->physical_bytes(); }

  Lab lab_;
  const std::shared_ptr<Budget> group_ = lab_.memory().create_group("group", 32 * kMiB);
};

TEST_F(Returning, ModelsInTurnAskNothingOfTheDriver) {
  for (const std::size_t models : {2U, 3U}) {
    SCOPED_TRACE(models);
    const std::vector<std::shared_ptr<Pool>> pools = several(models);
    std::vector<std::uint64_t> calls;
    for (std::uint64_t round = 0; round < 8; ++round) {
      lab_.driver.clear_calls();
      for (std::size_t k = 0; k < models; ++k) turn(*pools[k], 1 + round * 100 + k * 10);
      calls.push_back(mapping_calls());
      EXPECT_EQ(lab_.driver.live_chunk_bytes(), 32 * kMiB);
    }
    EXPECT_GT(calls.front(), 0U);
    for (std::size_t round = 5; round < calls.size(); ++round) EXPECT_EQ(calls[round], 0U) << "round " << round;
    EXPECT_LE(lab_.driver.live_mapped_bytes(), models * 32 * kMiB);
    // All that is given back is unmapped everywhere.
    lab_.memory().empty_cache();
    EXPECT_EQ(dormant(), 0U);
    EXPECT_EQ(lab_.driver.live_mapped_bytes(), 0U);
    EXPECT_EQ(lab_.driver.live_chunk_bytes(), 0U);
    for (const auto& pool : pools) lab_.memory().close_pool(*pool, /*force=*/false);
  }
}

// It is better used elsewhere.
TEST_F(Returning, AChunkOfWhichLessThanAQuarterIsWantedStaysOnTheShelf) {
  for (const std::size_t wanted : {4 * kMiB, 6 * kMiB}) {
    const auto group = lab_.memory().create_group("large", 96 * kMiB);
    const auto a = lab_.pool(Lab::spec("a"), group.get());
    const auto b = lab_.pool(Lab::spec("b"), group.get());
    take(*a, 96 * kMiB);
    take(*b, 96 * kMiB);
    b->shed(0);
    settle();
    ASSERT_EQ(dormant(), 4U) << "where they were in a";
    lab_.memory().set_limit(*group, 120 * kMiB);
    lab_.allocate(*a, wanted);
    EXPECT_EQ(bytes(a), wanted == 4 * kMiB ? wanted : 24 * kMiB);
    lab_.memory().close_pools({a, b}, /*force=*/true);
    lab_.memory().empty_cache();
  }
}

// A chunk that is given back while the other model has its neighbours.
TEST_F(Returning, WhatIsGivenBackHasNoMappingLeft) {
  const auto a = model("a");
  const auto b = model("b");
  for (const std::uint64_t seed : {1U, 2U}) {
    turn(*a, seed);
    turn(*b, seed);
  }
  ASSERT_GT(dormant(), 0U);
  const Address held = lab_.allocate(*b, kBlock, kOne);
  Lab::fill(held, kBlock, 5);
  lab_.memory().trim(*b, 0);
  EXPECT_EQ(lab_.driver.live_chunk_bytes(), bytes(b));
  const std::size_t left = lab_.driver.live_mapped_bytes();
  EXPECT_LE(left, 2 * bytes(b)) << "what b has, and where that was in a";
  EXPECT_TRUE(Lab::holds(held, kBlock, 5));
}

TEST_F(Returning, WhatTheDriverKeepsMappedIsNotGivenBack) {
  const auto a = model("a");
  const auto b = model("b");
  take(*a, 24 * kMiB);
  take(*b, 24 * kMiB);
  b->shed(0);
  settle();
  lab_.driver.fail_if([&](const CallRecord& call) { return call.call == Call::unmap && a->contains(call.a); },
                      broken());
  const std::size_t mapped = lab_.driver.live_mapped_bytes();
  ASSERT_GT(mapped, 0U);
  lab_.memory().store().trim_all();
  ASSERT_GT(lab_.driver.failures(), 0U);
  EXPECT_EQ(lab_.driver.live_mapped_bytes(), mapped);
  EXPECT_GE(lab_.driver.live_chunk_bytes(), mapped);
  EXPECT_EQ(lab_.driver.live_chunk_bytes(), group_->used()) << "it counts as long as it is there";
  lab_.driver.clear_failures();
  take(*a, 24 * kMiB);
  EXPECT_LE(lab_.driver.live_chunk_bytes(), 32 * kMiB);
}

TEST_F(Returning, LowerPriorityYieldsFirstAllTheSame) {
  const auto a = model("a", -1);
  const auto low = model("low", 0);
  const auto high = model("high", 1);
  take(*a, 16 * kMiB);
  take(*low, 16 * kMiB);
  take(*high, 16 * kMiB);
  ASSERT_EQ(bytes(a), 0U) << "its chunks are high's";
  ASSERT_GT(dormant(), 0U);
  take(*a, 16 * kMiB);
  EXPECT_EQ(bytes(high), 16 * kMiB);
  EXPECT_EQ(bytes(low), 0U);
}

TEST_F(Returning, WhoeverIsMuchFurtherAboveItsFloorComesFirstAllTheSame) {
  for (const bool is_far : {true, false}) {
    const auto a = model("a", -1);
    const auto b = model("b", 0, 2 * kMiB);
    const auto c = model("c", 0, is_far ? 4 * kMiB : 22 * kMiB);
    take(*a, 4 * kMiB);
    take(*c, 26 * kMiB);
    take(*b, 6 * kMiB);
    ASSERT_EQ(bytes(a), 0U) << "its chunks are b's";
    take(*a, 4 * kMiB);
    EXPECT_EQ(bytes(b), is_far ? 6 * kMiB : 2 * kMiB);
    EXPECT_EQ(bytes(c) == 26 * kMiB, !is_far);
    for (const auto& pool : {a, b, c}) lab_.memory().close_pool(*pool, /*force=*/false);
  }
}

TEST_F(Returning, AmongEqualsWhoeverHasWhatWasHereComesFirst) {
  const auto a = model("a", -1);
  const auto b = model("b");
  const auto c = model("c");
  take(*a, 12 * kMiB);
  take(*c, 20 * kMiB);
  take(*b, 12 * kMiB);
  ASSERT_EQ(bytes(a), 0U) << "its chunks are b's";
  lab_.driver.clear_calls();
  take(*a, 12 * kMiB);
  EXPECT_EQ(bytes(b), 0U);
  EXPECT_EQ(bytes(c), 20 * kMiB) << "which holds more";
  EXPECT_EQ(mapping_calls(), 0U);
}

TEST_F(Returning, FloorsHold) {
  const auto a = model("a", -1);
  const auto b = model("b", 0, 12 * kMiB);
  const auto c = model("c");
  take(*a, 12 * kMiB);
  take(*c, 20 * kMiB);
  take(*b, 12 * kMiB);
  ASSERT_EQ(bytes(a), 0U) << "its chunks are b's";
  take(*a, 12 * kMiB);
  EXPECT_EQ(bytes(b), 12 * kMiB);
  EXPECT_EQ(bytes(c), 8 * kMiB);
}

TEST_F(Returning, AChunkWithinAnotherLimitIsNotTaken) {
  // The wanted chunk is in a pool of another group: it does not stand under the limit.
  const auto a = model("a");
  take(*a, 16 * kMiB);
  a->shed(0);
  const auto other = lab_.pool("other");
  const auto b = model("b");
  take(*b, 32 * kMiB);
  take(*other, 16 * kMiB);
  take(*a, 16 * kMiB);
  EXPECT_EQ(bytes(other), 16 * kMiB);
  EXPECT_EQ(bytes(b), 16 * kMiB);
}

TEST_F(Returning, APoolThatEndsLeavesNoMapping) {
  const auto a = model("a");
  auto b = model("b");
  turn(*a, 1);
  turn(*b, 2);
  turn(*a, 3);
  const Address held = lab_.allocate(*a, 2 * kBlock, kOne);
  Lab::fill(held, 2 * kBlock, 9);
  ASSERT_GT(lab_.driver.live_mapped_bytes(), bytes(a)) << "some are b's former ones";
  // The driver refuses at first: the pool stays until another time.
  const std::size_t reservations = lab_.driver.live_reservations();
  lab_.driver.fail_nth(Call::unmap, 1, broken());
  lab_.memory().close_pool(*b, /*force=*/false);
  EXPECT_GT(lab_.driver.failures(), 0U);
  b.reset();
  settle();
  EXPECT_EQ(lab_.driver.live_reservations(), reservations - 1);
  EXPECT_EQ(lab_.driver.live_mapped_bytes(), bytes(a));
  EXPECT_TRUE(Lab::holds(held, 2 * kBlock, 9));
  take(*a, 32 * kMiB - 2 * kBlock);
}

TEST_F(Returning, TheCountsAreTheDriversOverAWholeLife) {
  for (const std::size_t models : {2U, 3U}) {
    const std::vector<std::shared_ptr<Pool>> pools = several(models);
    for (std::uint64_t round = 0; round < 4; ++round) {
      for (std::size_t k = 0; k < models; ++k) turn(*pools[(k + round) % models], 1 + round * 100 + k * 10, 2 + k % 3);
      if (round == 2) lab_.memory().trim(*pools[0], 0);
      const Statistics now = lab_.memory().statistics();
      EXPECT_EQ(static_cast<std::uint64_t>(now.num_device_alloc), lab_.driver.count(Call::map));
      EXPECT_EQ(static_cast<std::uint64_t>(now.num_device_free), lab_.driver.count(Call::unmap));
    }
    for (const auto& pool : pools) lab_.memory().close_pool(*pool, /*force=*/false);
  }
  lab_.memory().empty_cache();
  const Statistics all = lab_.memory().statistics();
  EXPECT_EQ(static_cast<std::uint64_t>(all.num_device_alloc), lab_.driver.count(Call::map));
  EXPECT_EQ(static_cast<std::uint64_t>(all.num_device_free), lab_.driver.count(Call::unmap));
  EXPECT_EQ(all.num_device_alloc, all.num_device_free);
}

TEST(ReturningInDebugMode, NothingStaysMapped) {
  LabSpec spec;
  spec.options.debug = parse_debug_mode("canary");
  Lab lab(spec);
  const auto group = lab.memory().create_group("group", 32 * kMiB);
  for (int round = 0; round < 2; ++round) {
    for (const char* name : {"a", "b"}) {
      lab.leave_idle(*lab.pool(Lab::spec(name), group.get()), 24 * kMiB);
      lab.memory().settle(/*wait=*/true);
      EXPECT_EQ(lab.memory().store().dormant().size(), 0U) << "a use after free is to fault";
    }
  }
}

TEST(ReturningToPeers, GivingOneAccessUnmapsWhatNobodyUses) {
  LabSpec spec;
  spec.device_count = 2;
  Lab lab(spec);
  const auto group = lab.memory().create_group("group", 32 * kMiB);
  const auto a = lab.pool(Lab::spec("a"), group.get());
  const auto b = lab.pool(Lab::spec("b"), group.get());
  lab.leave_idle(*a, 24 * kMiB, kOne);
  lab.leave_idle(*b, 24 * kMiB, kOne);
  lab.memory().settle(/*wait=*/true);
  ASSERT_GT(lab.memory().store().dormant().size(), 0U);
  lab.driver.hold_fences();
  lab.leave_idle(*a, 24 * kMiB, kTwo);  // b's wait for the fence
  ASSERT_TRUE(lab.memory().add_accessor(Location::on_device(1)).ok());
  EXPECT_EQ(lab.memory().store().dormant().size(), 0U);
  lab.driver.release_fences();
  lab.memory().settle(/*wait=*/true);
  EXPECT_EQ(lab.memory().store().dormant().size(), 0U) << "which the other device cannot access";
  // What comes from then on is accessible to both, and may return.
  lab.leave_idle(*b, 24 * kMiB, kOne);
  lab.memory().settle(/*wait=*/true);
  EXPECT_GT(lab.memory().store().dormant().size(), 0U);
  lab.driver.clear_calls();
  lab.leave_idle(*a, 24 * kMiB, kOne);
  EXPECT_EQ(lab.driver.count(Call::set_access), 2 * lab.driver.count(Call::map)) << lab.driver.transcript();
}

// ---------------------------------------------------------------------- seals

// A model whose tensors under a tag stand where another model's did.
class ReturningSeals : public Returning {
 protected:
  // Memory that `b_` had before; its former mapping waits where fences are held.
  Address take_over() {
    take(*b_, 24 * kMiB, kOne);
    const Address block = lab_.allocate(*weights_, 24 * kMiB, kTwo);
    Lab::fill(block, 24 * kMiB, 4);
    return block;
  }
  // All that leaves b stays mapped there.
  void expect_that_b_may_have_it_back() {
    const std::size_t before = lab_.driver.live_mapped_bytes();
    take(*a_, 30 * kMiB);
    EXPECT_GE(lab_.driver.live_mapped_bytes(), before + 24 * kMiB);
  }
  static std::vector<SealedPiece> piece(Address address) { return {{address, 24 * kMiB}}; }

  const std::shared_ptr<Pool> a_ = model("a");
  const std::shared_ptr<Pool> b_ = model("b");
  const std::shared_ptr<Pool> weights_ = lab_.memory().tagged(a_, "weights");
};

TEST_F(ReturningSeals, ReadOnlyMemoryIsNowhereWritable) {
  const Address block = take_over();
  settle();
  const std::size_t before = dormant();
  ASSERT_GT(before, 0U);
  seal_pages(lab_.memory(), *a_, piece(block));
  EXPECT_EQ(lab_.driver.live_mapped_bytes(), bytes(weights_) + bytes(b_));
  EXPECT_EQ(dormant(), 0U);
  EXPECT_TRUE(Lab::holds(block, 24 * kMiB, 4));
}

TEST_F(ReturningSeals, AFormerMappingThatWaitedIsNotKept) {
  lab_.driver.hold_fences();
  lab_.leave_idle(*b_, 24 * kMiB, kOne);
  const Address block = lab_.allocate(*weights_, 24 * kMiB, kTwo);
  Lab::fill(block, 24 * kMiB, 4);
  EXPECT_EQ(dormant(), 0U);
  const std::size_t mapped = lab_.driver.live_mapped_bytes();
  EXPECT_GT(mapped, bytes(weights_) + bytes(b_));
  seal_pages(lab_.memory(), *a_, piece(block));
  EXPECT_EQ(lab_.driver.live_mapped_bytes(), mapped) << "b has not looked yet whether it may go";
  lab_.driver.release_fences();
  settle();
  EXPECT_EQ(dormant(), 0U);
  EXPECT_EQ(lab_.driver.live_mapped_bytes(), bytes(weights_) + bytes(b_));
}

TEST_F(ReturningSeals, ARefusedUnmapSealsNothing) {
  const Address block = take_over();
  settle();
  lab_.driver.fail_nth(Call::unmap, 2, broken());
  EXPECT_THROW(seal_pages(lab_.memory(), *a_, piece(block)), DriverError);
  EXPECT_FALSE(weights_->has_read_only(block, 24 * kMiB));
  Lab::fill(block, 24 * kMiB, 5);
  // What it had banned may stay again.
  lab_.free(block);
  take(*b_, 30 * kMiB);
  expect_that_b_may_have_it_back();
}

TEST_F(ReturningSeals, WhatIsWritableAgainMayStay) {
  for (const bool freed_sealed : {false, true}) {
    SCOPED_TRACE(freed_sealed);
    const Address block = take_over();
    settle();
    seal_pages(lab_.memory(), *a_, piece(block));
    ASSERT_EQ(dormant(), 0U);
    if (!freed_sealed) unseal_pages(lab_.memory(), *a_, piece(block));
    lab_.free(block);
    take(*b_, 30 * kMiB);
    expect_that_b_may_have_it_back();
    lab_.memory().empty_cache();
    EXPECT_EQ(lab_.driver.live_mapped_bytes(), 0U);
  }
}

// ------------------------------------------------------------------- threads

TEST(ReturningThreads, HandChunksBackAndForth) {
  Lab lab;
  const auto group = lab.memory().create_group("group", 24 * kMiB);
  std::array<std::shared_ptr<Pool>, 4> pools;
  std::array<std::thread, 4> threads;
  for (std::size_t k = 0; k < 4; ++k) pools.at(k) = lab.pool(Lab::spec("model " + std::to_string(k)), group.get());
  for (std::size_t number = 0; number < 4; ++number) {
    threads.at(number) = std::thread([&, number] {
      for (std::uint64_t round = 0; round < 60; ++round) {
        Pool& pool = *pools.at((number + round / 8) % pools.size());
        const std::size_t size = (round % 3 + 1) * kPage;
        const Stream on = stream(0x10 * (1 + number));
        const Address block = lab.memory().allocate(pool, size, on);
        EXPECT_TRUE(block != 0);
        Lab::fill(block, 4096, number * 1000 + round);
        Lab::fill(block + size - 4096, 4096, number * 1000 + round);
        if (round % 16 == 0) lab.memory().settle(/*wait=*/false);
        EXPECT_TRUE(Lab::holds(block, 4096, number * 1000 + round));
        EXPECT_TRUE(Lab::holds(block + size - 4096, 4096, number * 1000 + round));
        EXPECT_TRUE(DeviceMemory::free(lab.space, block));
        if (round % 20 == number) lab.memory().empty_cache();
        if (round % 10 == number) {
          const auto passing = lab.pool(Lab::spec("passing"), group.get());
          EXPECT_TRUE(DeviceMemory::free(lab.space, lab.memory().allocate(*passing, kPage, on)));
          lab.memory().close_pool(*passing, /*force=*/false);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  lab.memory().check();
  lab.memory().empty_cache();
  EXPECT_EQ(lab.memory().store().dormant().size(), 0U);
  const Statistics all = lab.memory().statistics();
  EXPECT_EQ(static_cast<std::uint64_t>(all.num_device_alloc), lab.driver.count(Call::map));
  EXPECT_EQ(static_cast<std::uint64_t>(all.num_device_free), lab.driver.count(Call::unmap));
}

}  // namespace
}  // namespace vmm::testing
