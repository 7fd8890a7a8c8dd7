// Blocks come and go, each once, and what a burst of them took goes back.
#include "core/blocks/block_arena.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <set>
#include <vector>

#include "base/host_pages.h"
#include "cpp/lab.h"

namespace vmm::testing {
namespace {

TEST(HostPages, HoldZerosBeforeAndAfter) {
  auto* const bytes = static_cast<unsigned char*>(map_zeroed(256 * kKiB, 64 * kKiB));
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
  unmap(bytes, 256 * kKiB);
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
      EXPECT_EQ(block->size, 0U);
      EXPECT_EQ(block->next, nullptr);
      EXPECT_EQ(block->uses, nullptr);
      block->size = reinterpret_cast<std::uintptr_t>(block);
      if (step % 16 == 0) block->uses = std::make_unique<std::vector<StreamUse>>(3);
      live.push_back(block);
      continue;
    }
    const std::size_t which = random() % live.size();
    Block* block = live[which];
    ASSERT_EQ(block->size, reinterpret_cast<std::uintptr_t>(block)) << "somebody else wrote to it";
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
