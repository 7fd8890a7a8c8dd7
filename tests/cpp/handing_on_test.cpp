// Blocks on their way from threads that free them to threads that want their size.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "core/blocks/block_arena.h"
#include "core/cache/depot.h"
#include "cpp/lab.h"
#include "cpp/turns.h"

namespace vmm::testing {
namespace {

std::vector<Address> allocate_many(Lab& lab, Pool& pool, std::size_t count, std::size_t bytes, Stream on = nullptr) {
  std::vector<Address> blocks(count);
  for (Address& block : blocks) block = lab.memory().allocate(pool, bytes, on);
  return blocks;
}

void free_all(Lab& lab, const std::vector<Address>& blocks) {
  for (const Address block : blocks) ASSERT_TRUE(DeviceMemory::free(lab.space, block));
}

TEST(Depot, HandsOnByStreamAndSizeAndReturnsWhatIsTooFewOrTooMuch) {
  BlockArena arena;
  const auto chain = [&](std::size_t count, std::size_t size, StreamTag tag, Block* rest = nullptr) {
    for (std::size_t k = 0; k < count; ++k) {
      Block* const block = arena.make();
      block->set_size(size);
      block->tag = tag;
      block->bin_next = rest;
      rest = block;
    }
    return rest;
  };
  const auto length = [](const Block* first) {
    std::size_t count = 0;
    for (; first != nullptr; first = first->bin_next) ++count;
    return count;
  };
  Depot depot;
  // Three sizes in one chain, of which one is too few for a batch.
  Block* const rest = depot.put(chain(20, 512, 1, chain(3, 1024, 1, chain(30, 2048, 1))));
  EXPECT_EQ(length(rest), 3U);
  EXPECT_EQ(rest->size(), 1024U);
  EXPECT_EQ(depot.blocks(), 50U);
  EXPECT_EQ(depot.put(chain(10, 512, 2)), nullptr);
  EXPECT_EQ(depot.take(1, 1024).first, nullptr);
  EXPECT_EQ(depot.take(3, 512).first, nullptr);
  const Depot::Batch batch = depot.take(2, 512);
  EXPECT_EQ(batch.count, 10U);
  EXPECT_EQ(length(batch.first), 10U);
  EXPECT_EQ(batch.first->tag, 2U);
  EXPECT_EQ(depot.take(2, 512).first, nullptr) << "once";
  EXPECT_EQ(length(depot.take_all()), 50U);
  EXPECT_TRUE(depot.is_empty());
  // 8 MiB, and 32 batches.
  EXPECT_EQ(depot.put(chain(8, kMiB, 1)), nullptr);
  EXPECT_EQ(length(depot.put(chain(8, 512, 1))), 8U);
  (void)depot.take_all();
  for (int k = 0; k < 32; ++k) EXPECT_EQ(depot.put(chain(8, 512, 1)), nullptr);
  EXPECT_EQ(length(depot.put(chain(8, 512, 1))), 8U);
  EXPECT_EQ(length(depot.take_all()), 32U * 8);
}

TEST(HandingOn, WhatOneThreadFreesAnotherGets) {
  Lab lab;
  const auto pool = lab.pool("a");
  Turns turns;
  constexpr std::size_t kCount = 512;
  std::vector<Address> first;
  turns.on(0, [&] {
    warm(lab, *pool, 4096);
    first = allocate_many(lab, *pool, kCount, 4096);
  });
  turns.on(1, [&] { free_all(lab, first); });
  ASSERT_GT(pool->depot().blocks(), kCount / 2);
  std::sort(first.begin(), first.end());
  std::size_t handed_on = 0;
  turns.on(0, [&] {
    const std::vector<Address> again = allocate_many(lab, *pool, kCount, 4096);
    for (const Address block : again) handed_on += std::binary_search(first.begin(), first.end(), block) ? 1U : 0U;
    EXPECT_EQ(pool->depot().blocks(), 0U);
    EXPECT_EQ(pool->live_blocks(), kCount);
    free_all(lab, again);
  });
  EXPECT_GT(handed_on, kCount / 2);
  lab.memory().check();
  EXPECT_EQ(pool->live_bytes(), 0U);
}

TEST(HandingOn, WhatIsHandedOnIsThePoolsWhereverItIsNeeded) {
  Lab lab;
  Turns turns;
  const auto fill = [&](Pool& pool) {
    std::vector<Address> blocks;
    turns.on(0, [&] { blocks = allocate_many(lab, pool, 512, 2048); });
    turns.on(1, [&] { free_all(lab, blocks); });
    ASSERT_FALSE(pool.depot().is_empty());
  };
  const auto pool = lab.pool("a");
  fill(*pool);
  EXPECT_EQ(pool->memory_stats().allocated_bytes, 0U);
  EXPECT_TRUE(pool->depot().is_empty()) << "whoever asks for numbers sees the pool as it is";
  fill(*pool);
  lab.memory().empty_cache();
  EXPECT_EQ(pool->statistics()[StatKind::reserved_bytes][0].current, 0);
  fill(*pool);
  turns.end(0);
  turns.end(1);
  EXPECT_TRUE(pool->depot().is_empty()) << "no thread is left that could want them";
  fill(*pool);
  pool->pin();
  EXPECT_TRUE(pool->depot().is_empty());
  pool->unpin();
  const auto other = lab.pool("b");
  fill(*other);
  lab.memory().close_pool(*other, /*force=*/false);
  EXPECT_TRUE(other->depot().is_empty());
}

// Sizes and streams of their own, and more of a size than is handed on at a time.
TEST(HandingOn, NoBlockIsGivenTwiceWhileSomeThreadsAllocateAndOthersFree) {
  Lab lab;
  const auto pool = lab.pool("a");
  constexpr int kPairs = 2;
  constexpr std::uint64_t kSteps = 3000;
  std::atomic<bool> stop{false};
  std::thread gatherer([&] {
    for (int round = 0; !stop.load(); ++round) {
      round % 2 == 0 ? (void)pool->memory_stats() : (void)pool->shed(0);
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  });
  struct Ring {
    std::array<std::atomic<Address>, 200> blocks{};
  };
  std::array<Ring, kPairs> rings;
  const auto seed_of = [](int pair, std::uint64_t step) { return step * 7919 + static_cast<std::uint64_t>(pair) + 1; };
  std::vector<std::thread> crew;
  for (int pair = 0; pair < kPairs; ++pair) {
    auto& blocks = rings.at(static_cast<std::size_t>(pair)).blocks;
    crew.emplace_back([&, pair] {
      for (std::uint64_t step = 0; step < kSteps; ++step) {
        const std::size_t bytes = step / 500 % 2 == 0 ? 512 : 1536;
        const Address block = lab.memory().allocate(*pool, bytes, stream(step / 750 % 2));
        *reinterpret_cast<std::uint64_t*>(block) = seed_of(pair, step);
        auto& slot = blocks.at(step % blocks.size());
        while (slot.load(std::memory_order_acquire) != 0) std::this_thread::yield();
        slot.store(block, std::memory_order_release);
      }
    });
    crew.emplace_back([&, pair] {
      for (std::uint64_t step = 0; step < kSteps; ++step) {
        auto& slot = blocks.at(step % blocks.size());
        Address block = 0;
        while ((block = slot.load(std::memory_order_acquire)) == 0) std::this_thread::yield();
        ASSERT_EQ(*reinterpret_cast<const std::uint64_t*>(block), seed_of(pair, step)) << "given twice";
        slot.store(0, std::memory_order_release);
        ASSERT_TRUE(DeviceMemory::free(lab.space, block));
      }
    });
  }
  for (std::thread& thread : crew) thread.join();
  stop = true;
  gatherer.join();
  lab.memory().check();
  EXPECT_EQ(pool->live_blocks(), 0U);
  EXPECT_EQ(pool->live_bytes(), 0U);
}

// Of one size that it also asks for a thread may free more than it should keep.
TEST(HandingOn, AThreadThatFreesManyLetsGoOfAPartAtATime) {
  constexpr std::size_t kCount = 40'000;  // 20 MiB
  for (const bool is_alone : {true, false}) {
    Lab lab;
    const auto pool = lab.pool("a");
    Turns turns;
    if (!is_alone) turns.on(1, [&] { warm(lab, *pool, 4096); });
    turns.on(0, [&] {
      std::vector<Address> blocks = allocate_many(lab, *pool, kCount, 512);
      std::size_t most_let_go = 0;
      for (const Address block : blocks) {
        const std::size_t before = pool->directory().size();
        ASSERT_TRUE(DeviceMemory::free(lab.space, block));
        const std::size_t let_go = before - pool->directory().size();
        most_let_go = std::max(most_let_go, let_go);
      }
      EXPECT_GT(most_let_go, 0U) << "it does not keep them all";
      // An eighth of 8 MiB in blocks of 512 bytes; where others could want them half of it
      // goes into the depot, a batch of at most 8 MiB, and then to the pool.
      EXPECT_LE(most_let_go, is_alone ? 2049U : 8193U);
      EXPECT_EQ(pool->depot().is_empty(), is_alone);
    });
    lab.memory().check();
    EXPECT_EQ(pool->live_bytes(), 0U);
  }
}

}  // namespace
}  // namespace vmm::testing
