// In what chunks the memory of a model comes back whose contents were thrown away.
#include <gtest/gtest.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "cpp/sleep_lab.h"

namespace vmm::testing {
namespace {

class SleepChunks : public Sleep {
 protected:
  static constexpr std::size_t kBlock = 96 * kMiB;

  std::vector<Address> take(Pool& pool, int times, std::size_t bytes) {
    std::vector<Address> blocks;
    for (int k = 0; k < times; ++k) blocks.push_back(lab_.allocate(pool, bytes));
    return blocks;
  }
  static std::size_t chunks(const Pool& pool, const std::vector<Address>& blocks, std::size_t bytes) {
    std::size_t count = 0;
    for (const Address each : blocks) count += pool.chunks_under(each, bytes).size();
    return count;
  }
};

TEST_F(SleepChunks, WhatIsThrownAwayComesBackAChunkABlock) {
  const auto model = lab_.pool(Lab::spec("model"));
  const std::vector<Address> blocks = take(*model, 4, kBlock);
  ASSERT_GE(chunks(*model, blocks, kBlock), 12U) << "they were loaded in pieces";
  for (const Address each : blocks) Lab::fill(each, kPage, 1);
  const std::size_t had = model->physical_bytes();
  for (int k = 0; k < 2; ++k) {
    sleep(model, discard(), /*release=*/k == 1);
    wake(model);
    EXPECT_EQ(chunks(*model, blocks, kBlock), blocks.size());
    EXPECT_EQ(model->physical_bytes(), had);
    for (const Address each : blocks) EXPECT_TRUE(is_zero(each, kPage));
  }
  lab_.free(blocks[1]);  // it is idle memory as any
  lab_.allocate(*model, kBlock);
}

// Each may be sealed, or freed, by itself.
TEST_F(SleepChunks, BlocksShareNoChunkThatHadTheirOwn) {
  const auto model = lab_.pool(Lab::spec("model"));
  const std::vector<Address> blocks = take(*model, 8, 24 * kMiB);
  sleep(model, discard());
  wake(model);
  EXPECT_EQ(chunks(*model, blocks, 24 * kMiB), blocks.size());
  for (const Address each : blocks) lab_.free(each);
  EXPECT_EQ(model->idle_bytes(), model->physical_bytes());
}

TEST_F(SleepChunks, WhatIsKeptComesBackAsItWas) {
  const auto model = lab_.pool(Lab::spec("model"));
  const std::vector<Address> blocks = take(*model, 2, kBlock);
  const std::size_t before = chunks(*model, blocks, kBlock);
  for (const Address each : blocks) Lab::fill(each, kPage, 1);
  sleep(model, host());
  wake(model);
  EXPECT_EQ(chunks(*model, blocks, kBlock), before);
  for (const Address each : blocks) EXPECT_EQ(Lab::first_wrong(each, kPage, 1), kPage);
}

TEST_F(SleepChunks, PagesByHandGoOneByOneAsBefore) {
  const auto model = lab_.pool(Lab::spec("model"));
  for (std::size_t k = 0; k < 4; ++k) lab_.memory().allocate_pages(*model, k * 4 * kMiB, 4 * kMiB, nullptr);
  sleep(model, discard());
  wake(model);
  ASSERT_EQ(model->physical_bytes(), 16 * kMiB);
  lab_.memory().deallocate_pages(*model, 4 * kMiB, 4 * kMiB);
  lab_.memory().settle(/*wait=*/true);
  lab_.memory().trim(*model, 0);
  EXPECT_EQ(model->physical_bytes(), 12 * kMiB);
  model->drop_pages();
}

TEST_F(SleepChunks, UnitsStayWhatTheyAre) {
  const auto group = lab_.memory().create_group("shared", 512 * kMiB);
  const auto model = lab_.pool(Lab::spec("model"), group.get());
  const auto other = lab_.pool(Lab::spec("other"), group.get());
  lab_.allocate(*other, kBlock);
  const std::vector<Address> blocks = take(*model, 3, kBlock);
  const std::size_t before = chunks(*model, blocks, kBlock);
  sleep(model, discard());
  wake(model);
  EXPECT_EQ(chunks(*model, blocks, kBlock), before);
}

// Others took of the chunks meanwhile, and what is left under the limit is in smaller ones.
TEST_F(SleepChunks, WhereNoneIsSoLargeSeveralDo) {
  const auto group = lab_.memory().create_group("shared", 4 * kBlock);
  const auto model = lab_.pool(Lab::spec("model"), group.get());
  const std::vector<Address> blocks = take(*model, 4, kBlock);
  for (int k = 0; k < 3; ++k) {
    sleep(model, discard());
    wake(model);
    EXPECT_EQ(model->physical_bytes(), 4 * kBlock);
    EXPECT_LE(group->used(), 4 * kBlock);
    for (const Address each : blocks) EXPECT_TRUE(is_zero(each, kPage));
  }
  EXPECT_EQ(chunks(*model, blocks, kBlock), blocks.size());
}

}  // namespace
}  // namespace vmm::testing
