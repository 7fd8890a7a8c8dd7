// Where former mappings stood: by any offset in them, and out again whole.
#include "core/blocks/retired_blocks.h"

#include <gtest/gtest.h>

#include <array>

namespace vmm::testing {
namespace {

TEST(RetiredBlocks, CoverEveryByteOfEachUntilItIsTakenOut) {
  constexpr std::size_t kUnit = kBlockAlignment;
  std::array<Block, 2> blocks;
  blocks[0].reset(10 * kUnit);
  blocks[0].set_size(2 * kUnit);
  blocks[1].reset(12 * kUnit);
  blocks[1].set_size(kUnit);
  RetiredBlocks retired;
  EXPECT_FALSE(retired.covers(0));
  for (Block& block : blocks) retired.add(&block);
  EXPECT_EQ(retired.size(), 2U);
  EXPECT_EQ(retired.bytes(), 3 * kUnit);
  EXPECT_FALSE(retired.covers(10 * kUnit - 1));
  EXPECT_TRUE(retired.covers(10 * kUnit));
  EXPECT_TRUE(retired.covers(12 * kUnit - 1));
  EXPECT_TRUE(retired.covers(12 * kUnit));
  EXPECT_FALSE(retired.covers(13 * kUnit));
  EXPECT_EQ(retired.take({12 * kUnit, kUnit}), &blocks[1]);
  EXPECT_TRUE(retired.covers(12 * kUnit - 1));
  EXPECT_FALSE(retired.covers(12 * kUnit));
  EXPECT_EQ(retired.bytes(), 2 * kUnit);
  EXPECT_EQ(retired.take({10 * kUnit, 2 * kUnit}), &blocks[0]);
  EXPECT_EQ(retired.size(), 0U);
  EXPECT_EQ(retired.bytes(), 0U);
}

TEST(RetiredBlocksDeathTest, OnlyAWholeOneIsTakenOut) {
  Block block;
  block.reset(0);
  block.set_size(2 * kBlockAlignment);
  RetiredBlocks retired;
  retired.add(&block);
  EXPECT_DEATH(retired.take({0, kBlockAlignment}), "retired block at 0");
  EXPECT_DEATH(retired.take({kBlockAlignment, kBlockAlignment}), "retired block at 512");
}

}  // namespace
}  // namespace vmm::testing
