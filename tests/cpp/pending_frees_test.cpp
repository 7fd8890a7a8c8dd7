// Frees that wait for recorded streams, through a pool: in which order they
// end, and what asking for them costs.
#include "core/streams/pending_frees.h"

#include <gtest/gtest.h>

#include <vector>

#include "cpp/lab.h"

namespace vmm::testing {
namespace {

const Stream kOwner = stream(0x10);
const Stream kOne = stream(0x20);
const Stream kTwo = stream(0x30);

class Pending : public ::testing::Test {
 protected:
  Pending() : pool_(lab_.pool("a", kGiB)) {
    for (const Stream each : {kOwner, kOne, kTwo}) lab_.meet(each);
  }
  // A block that these streams read when it is freed.
  void free_while_read(std::size_t bytes, const std::vector<Stream>& readers) {
    const Address block = lab_.allocate(*pool_, bytes, kOwner);
    for (const Stream reader : readers) pool_->record_stream(block, reader);
    lab_.free(block);
  }
  std::size_t waiting() {
    pool_->settle();
    return pool_->memory_stats().quarantined_bytes;
  }

  Lab lab_;
  std::shared_ptr<Pool> pool_;
};

TEST_F(Pending, AStreamThatIsBehindHoldsUpNoOthers) {
  lab_.driver.hold_fences(kOne);
  free_while_read(2 * kMiB, {kOne, kTwo});
  free_while_read(4 * kMiB, {kTwo});
  free_while_read(8 * kMiB, {kOne});
  EXPECT_EQ(waiting(), 10 * kMiB);
  lab_.driver.release_fences();
  EXPECT_EQ(waiting(), 0U);
  pool_->check();
}

TEST_F(Pending, OfAStreamTheyEndUpToTheFirstThatIsStillRead) {
  free_while_read(2 * kMiB, {kOne});
  free_while_read(4 * kMiB, {kOne, kTwo});
  lab_.driver.hold_fences(kOne);
  free_while_read(8 * kMiB, {kOne});
  free_while_read(16 * kMiB, {kOne});
  EXPECT_EQ(waiting(), 24 * kMiB);
  lab_.driver.release_fences();
  EXPECT_EQ(waiting(), 0U);
}

TEST_F(Pending, TenThousandCostWhatOneCosts) {
  lab_.driver.hold_fences(kOne);
  // Without the bench, which checks everything after each step.
  const auto pair = [&](std::size_t bytes, Stream reader) {
    const Address block = lab_.memory().allocate(*pool_, bytes, kOwner);
    if (reader != nullptr) pool_->record_stream(block, reader);
    DeviceMemory::free(lab_.space, block);
  };
  for (int k = 0; k < 10'000; ++k) pair(512, kOne);
  const std::uint64_t before = lab_.driver.count(Call::query);
  for (int k = 0; k < 1000; ++k) pair(1024, nullptr);
  EXPECT_LE(lab_.driver.count(Call::query) - before, 1000U) << "a thousand allocations, one stream";
  lab_.driver.release_fences();
  pair(1024, nullptr);
  EXPECT_EQ(pool_->memory_stats().quarantined_bytes, 0U) << "the next allocation finds all of them";
  pool_->check();
}

}  // namespace
}  // namespace vmm::testing
