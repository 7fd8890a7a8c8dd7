// Freed blocks that wait: by any offset in them, and the one that was freed first.
#include "core/blocks/quarantined_blocks.h"

#include <gtest/gtest.h>

#include <array>

namespace vmm::testing {
namespace {

constexpr std::size_t kUnit = kBlockAlignment;

class Quarantined : public ::testing::Test {
 protected:
  // Three that touch, of one, two and three units.
  Quarantined() {
    std::size_t offset = 10 * kUnit;
    for (std::size_t k = 0; k < blocks_.size(); ++k) {
      blocks_[k].reset(offset);
      blocks_[k].set_size((k + 1) * kUnit);
      offset = blocks_[k].end();
    }
  }
  std::array<Block, 3> blocks_;
  QuarantinedBlocks quarantined_;
};

TEST_F(Quarantined, AreFoundByEveryByteOfThem) {
  EXPECT_EQ(quarantined_.at(0), nullptr);
  quarantined_.add({&blocks_[0], 7});
  quarantined_.add({&blocks_[2], 5});
  EXPECT_EQ(quarantined_.bytes(), 4 * kUnit);
  EXPECT_EQ(quarantined_.at(10 * kUnit - 1), nullptr);
  ASSERT_NE(quarantined_.at(11 * kUnit - 1), nullptr);
  EXPECT_EQ(quarantined_.at(11 * kUnit - 1)->block, &blocks_[0]);
  EXPECT_EQ(quarantined_.at(11 * kUnit - 1)->epoch, 7U);
  EXPECT_EQ(quarantined_.at(11 * kUnit), nullptr) << "the second is not here";
  ASSERT_NE(quarantined_.at(13 * kUnit), nullptr);
  EXPECT_EQ(quarantined_.at(13 * kUnit)->block, &blocks_[2]);
  EXPECT_EQ(quarantined_.at(16 * kUnit), nullptr);
}

TEST_F(Quarantined, LeaveByTheOrderInWhichTheyWereFreed) {
  EXPECT_TRUE(quarantined_.empty());
  quarantined_.add({&blocks_[0], 7});
  quarantined_.add({&blocks_[2], 5});
  quarantined_.add({&blocks_[1], 5});
  EXPECT_EQ(quarantined_.newest(), 7U);
  for (const std::size_t next : {1U, 2U, 0U}) {
    EXPECT_EQ(quarantined_.oldest().block, &blocks_[next]);
    quarantined_.remove(quarantined_.oldest());
    EXPECT_EQ(quarantined_.at(blocks_[next].offset), nullptr);
  }
  EXPECT_TRUE(quarantined_.empty());
  EXPECT_EQ(quarantined_.bytes(), 0U);
}

}  // namespace
}  // namespace vmm::testing
