// Which explicit pages lie where: by offset, and against a plain list of blocks.
#include "core/blocks/explicit_pages.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <random>
#include <string>
#include <vector>

namespace vmm::testing {
namespace {

constexpr std::size_t kUnit = kBlockAlignment;

class Blocks {
 public:
  // At so many units, so many long.
  Block* at(std::size_t offset, std::size_t size) {
    Block& block = blocks_.emplace_back();
    block.reset(offset * kUnit);
    block.set_size(size * kUnit);
    return &block;
  }

 private:
  std::deque<Block> blocks_;  // they stand still
};

std::vector<const Block*> in(const ExplicitPages& pages, ByteRange range) {
  std::vector<const Block*> found;
  pages.for_each_in(range, [&found](const Block& block) { found.push_back(&block); });
  return found;
}

TEST(ExplicitPages, AreFoundByEachOfTheirBytes) {
  Blocks blocks;
  Block* const low = blocks.at(10, 2);
  Block* const high = blocks.at(12, 1);
  ExplicitPages pages;
  EXPECT_TRUE(pages.empty());
  EXPECT_EQ(pages.covering(0), nullptr);
  pages.add(high);
  pages.add(low);
  EXPECT_EQ(pages.size(), 2U);
  EXPECT_EQ(pages.covering(10 * kUnit - 1), nullptr);
  EXPECT_EQ(pages.covering(10 * kUnit), low);
  EXPECT_EQ(pages.covering(12 * kUnit - 1), low);
  EXPECT_EQ(pages.covering(12 * kUnit), high);
  EXPECT_EQ(pages.covering(13 * kUnit), nullptr);
}

TEST(ExplicitPages, ThoseThatReachIntoARangeAreTakenOutFromBelow) {
  Blocks blocks;
  Block* const low = blocks.at(0, 4);
  Block* const middle = blocks.at(4, 4);
  Block* const high = blocks.at(8, 4);
  ExplicitPages pages;
  for (Block* block : {high, low, middle}) pages.add(block);
  const ByteRange range{3 * kUnit, 2 * kUnit};
  EXPECT_EQ(in(pages, range), (std::vector<const Block*>{low, middle}));
  EXPECT_EQ(pages.take_first_in(range), low);
  EXPECT_EQ(pages.take_first_in(range), middle);
  EXPECT_EQ(pages.take_first_in(range), nullptr);
  EXPECT_EQ(pages.size(), 1U);
  EXPECT_EQ(pages.take_first_in({8 * kUnit, kUnit}), high);
}

TEST(ExplicitPages, OfARandomProgramAreThoseOfAPlainList) {
  for (unsigned seed = 1; seed <= 10; ++seed) {
    std::mt19937 random(seed);
    const auto any = [&random](std::size_t below) { return static_cast<std::size_t>(random()) % below; };
    Blocks blocks;
    ExplicitPages pages;
    std::vector<Block*> model;  // by offset
    const auto reaches = [](const Block* block, ByteRange range) {
      return block->offset < range.end() && range.offset < block->end();
    };
    for (int step = 0; step < 3000; ++step) {
      SCOPED_TRACE("seed " + std::to_string(seed) + ", step " + std::to_string(step));
      const std::size_t offset = any(60);
      const ByteRange range{offset * kUnit, (1 + any(6)) * kUnit};
      std::vector<const Block*> expected;
      for (Block* block : model) {
        if (reaches(block, range)) expected.push_back(block);
      }
      ASSERT_EQ(in(pages, range), expected);
      ASSERT_EQ(pages.size(), model.size());
      const auto covers = std::find_if(model.begin(), model.end(), [&](const Block* block) {
        return reaches(block, {range.offset, 1});
      });
      ASSERT_EQ(pages.covering(range.offset), covers == model.end() ? nullptr : *covers);
      if (expected.empty()) {
        Block* const made = blocks.at(offset, range.size / kUnit);
        pages.add(made);
        model.push_back(made);
        std::sort(model.begin(), model.end(), [](const Block* a, const Block* b) { return a->offset < b->offset; });
      } else if (any(2) == 0) {
        const Block* const taken = pages.take_first_in(range);
        ASSERT_EQ(taken, expected.front());
        std::erase(model, taken);
      }
    }
  }
}

}  // namespace
}  // namespace vmm::testing
