// Blocks come and go, each once, and what a burst of them took goes back.
#include "core/blocks/block_arena.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <new>
#include <random>
#include <set>
#include <vector>

#include "base/host_pages.h"
#include "cpp/lab.h"

namespace vmm::testing {
namespace {

TEST(HostPages, HoldZerosBeforeAndAfter) {
  auto* const bytes = static_cast<unsigned char*>(reserve_pages(512 * kKiB, 64 * kKiB));
  commit_pages(bytes, 256 * kKiB);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(bytes) % (64 * kKiB), 0U);
  const auto sum = [bytes] {
    std::size_t found = 0;
    for (std::size_t k = 0; k < 256 * kKiB; ++k) found += bytes[k];
    return found;
  };
  EXPECT_EQ(sum(), 0U);
  std::memset(bytes, 1, 256 * kKiB);
  discard(bytes + 100, 200 * kKiB);
  EXPECT_EQ(sum(), 56 * kKiB) << "neither less nor more than it was told";
  discard(bytes + 10, 20);
  EXPECT_EQ(sum(), 56 * kKiB - 20) << "less than a page";
  commit_pages(bytes + 256 * kKiB, 256 * kKiB);
  EXPECT_EQ(bytes[511 * kKiB] + bytes[256 * kKiB], 0);
}

TEST(BlockSpace, PiecesAreAlignedZeroedAndNobodyElses) {
  std::map<unsigned char*, std::size_t> taken;
  std::mt19937 random(2);
  for (int step = 0; step < 3000; ++step) {
    if (taken.size() > 20 && random() % 2 == 0) {
      const auto which = std::next(taken.begin(), random() % static_cast<unsigned>(taken.size()));
      BlockSpace::give(which->first, which->second);
      taken.erase(which);
      continue;
    }
    const std::size_t bytes = (4 * kKiB) << random() % 9;
    auto* const piece = static_cast<unsigned char*>(BlockSpace::take(bytes));
    ASSERT_EQ(reinterpret_cast<std::uintptr_t>(piece) % bytes, 0U);
    for (std::size_t k = 0; k < bytes; k += 512) ASSERT_EQ(piece[k], 0) << "byte " << k << " of " << bytes;
    std::memset(piece, 1, bytes);
    const auto [at, fresh] = taken.emplace(piece, bytes);
    ASSERT_TRUE(fresh);
    if (at != taken.begin()) {
      ASSERT_LE(std::prev(at)->first + std::prev(at)->second, piece);
    }
    if (std::next(at) != taken.end()) {
      ASSERT_LE(piece + bytes, std::next(at)->first);
    }
  }
  for (const auto& [piece, bytes] : taken) BlockSpace::give(piece, bytes);
}

// `holds` in a child that begins anew, as the space is reserved once, and that may have
// 4 GiB of addresses.
void expect_with_few_addresses(bool (*holds)()) {
#ifdef VMM_SANITIZED
  GTEST_SKIP() << "the sanitizers need more addresses themselves";
#endif
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto child = [holds] {
    const rlimit most{std::size_t{4} << 30U, std::size_t{4} << 30U};
    if (::setrlimit(RLIMIT_AS, &most) != 0) std::_Exit(1);
    std::_Exit(holds() ? 0 : 2);
  };
  EXPECT_EXIT(child(), ::testing::ExitedWithCode(0), "");
}

TEST(BlockSpace, FewerAddressesWhereTheProcessMayNotHaveMore) {
  expect_with_few_addresses([] {
    BlockArena arena;
    Block* const first = arena.make();
    Block* const second = arena.make();
    first->next = second;
    return first->next == second && first != second;
  });
}

TEST(BlockSpace, WhatCannotBeMadeLeavesThePoolWhole) {
  expect_with_few_addresses([] {
    Lab lab;
    const auto pool = lab.pool("a");
    std::vector<Address> live{lab.memory().allocate(*pool, 512, nullptr)};
    for (std::size_t piece = kMiB; piece >= 64 * kKiB; piece /= 2) {
      try {
        for (;;) (void)BlockSpace::take(piece);
      } catch (const std::bad_alloc&) {
      }
    }
    bool ran_out = false;
    for (int k = 0; k < 3000; ++k) {
      try {
        live.push_back(lab.memory().allocate(*pool, 512, nullptr));
      } catch (const std::bad_alloc&) {
        ran_out = true;
      }
    }
    lab.memory().check();
    for (const Address block : live) DeviceMemory::free(lab.space, block);
    lab.memory().empty_cache();
    lab.memory().check();
    return ran_out && pool->physical_bytes() == 0;
  });
}

TEST(Block, HoldsEverySizeThatThereIs) {
  BlockArena arena;
  Block* const block = arena.make();
  for (std::size_t size = kBlockAlignment; size < std::size_t{1} << 47U; size *= 2) {
    for (const std::size_t each : {size, size + kBlockAlignment, 2 * size - kBlockAlignment}) {
      block->set_size(each);
      EXPECT_EQ(block->size(), each);
    }
  }
  EXPECT_FALSE(block->small || block->oversize) << "what stands beside it";
  block->small = block->oversize = true;
  EXPECT_EQ(block->size(), (std::size_t{1} << 47U) - kBlockAlignment);
}

TEST(BlockArena, EachBlockIsSomebodysOnce) {
  BlockArena arena;
  std::mt19937 random(1);
  std::vector<Block*> live;
  std::set<Block*> known;
  for (int step = 0; step < 40'000; ++step) {
    const bool grows = (step / 8000) % 2 == 0;
    if (live.empty() || random() % 8 < (grows ? 6U : 2U)) {
      Block* block = arena.make();
      ASSERT_TRUE(known.insert(block).second) << "step " << step;
      EXPECT_EQ(block->size(), 0U);
      EXPECT_EQ(block->next, nullptr);
      EXPECT_EQ(block->recorded, 0U);
      block->requested = reinterpret_cast<std::uintptr_t>(block);
      block->prev = block;
      live.push_back(block);
      continue;
    }
    const std::size_t which = random() % live.size();
    Block* block = live[which];
    ASSERT_EQ(block->requested, reinterpret_cast<std::uintptr_t>(block)) << "somebody else wrote to it";
    ASSERT_EQ(block->prev, block);
    live[which] = live.back();
    live.pop_back();
    known.erase(block);
    arena.recycle(block);
    EXPECT_TRUE(block->state == BlockState::free) << "it can still be read";
  }
}

TEST(BlockArena, GivesBackWhatABurstTook) {
  BlockArena arena;
  std::vector<Block*> blocks;
  for (int k = 0; k < 100'000; ++k) blocks.push_back(arena.make());
  const std::size_t at_most = arena.bytes();
  EXPECT_LT(at_most, 100'000 * (sizeof(Block) + 2));
  for (Block* block : blocks) arena.recycle(block);
  EXPECT_LE(arena.bytes(), at_most / 50);
  for (Block*& block : blocks) block = arena.make();
  EXPECT_EQ(arena.bytes(), at_most) << "the same memory again";
}

TEST(BlockArena, TurnsOnTheEdgeOfASegmentWithoutAskingTheKernel) {
  BlockArena arena;
  std::vector<Block*> blocks;
  std::size_t before = 0;
  while (arena.bytes() == before || before == 0) {
    before = arena.bytes();
    blocks.push_back(arena.make());
  }
  const std::size_t both = arena.bytes();
  for (int turn = 0; turn < 3; ++turn) {
    arena.recycle(blocks.back());
    EXPECT_EQ(arena.bytes(), both);
    blocks.back() = arena.make();
  }
}

}  // namespace
}  // namespace vmm::testing
