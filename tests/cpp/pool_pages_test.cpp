// The explicit face of a pool: allocate(offset, size) and its kind.
#include <gtest/gtest.h>

#include <tuple>

#include "cpp/lab.h"

namespace vmm::testing {
namespace {

const Stream kOne = stream(0x10);
const Stream kTwo = stream(0x20);

// A pool of 64 pages of 4 MiB.
class PoolPages : public ::testing::Test {
 protected:
  static constexpr std::size_t kP = 4 * kMiB;
  static LabSpec no_shelf() {
    LabSpec spec;
    spec.options.store_bytes = 0;  // what is freed goes back to the driver
    return spec;
  }
  static PoolSpec pages() {
    PoolSpec spec = Lab::spec("a");
    spec.capacity = 64 * kP;
    spec.page_size = kP;
    return spec;
  }
  Address allocate(std::size_t offset, std::size_t size, Stream on = nullptr) {
    const Address address = lab_.memory().allocate_pages(*pool_, offset, size, on);
    lab_.memory().check();
    return address;
  }
  void deallocate(std::size_t offset, std::size_t size) {
    lab_.memory().deallocate_pages(*pool_, offset, size);
    lab_.memory().check();
  }

  Lab lab_{no_shelf()};
  std::shared_ptr<Pool> pool_ = lab_.pool(pages());
};

TEST_F(PoolPages, BackExactlyTheAskedPages) {
  EXPECT_EQ(allocate(2 * kP, 3 * kP), pool_->base() + 2 * kP);
  EXPECT_EQ(pool_->physical_bytes(), 3 * kP);
  EXPECT_TRUE(pool_->is_mapped(2 * kP, 3 * kP));
  EXPECT_FALSE(pool_->is_mapped(kP, kP));
  EXPECT_FALSE(pool_->is_mapped(4 * kP, 2 * kP)) << "the second page is not";
  Lab::fill(pool_->base() + 2 * kP, 3 * kP, 1);
  EXPECT_TRUE(Lab::holds(pool_->base() + 2 * kP, 3 * kP, 1));
}

TEST_F(PoolPages, ChunksAreFoundBehindPagesThatHaveNone) {
  allocate(2 * kP, kP);
  allocate(4 * kP, kP);
  const auto found = [&](std::size_t offset, std::size_t size) {
    return pool_->chunks_under(pool_->base() + offset, size).size();
  };
  EXPECT_EQ(found(0, 64 * kP), 2U);
  EXPECT_EQ(found(3 * kP, 2 * kP), 1U);
  EXPECT_EQ(found(0, 2 * kP), 0U);
  EXPECT_EQ(found(5 * kP, kP), 0U);
}

TEST_F(PoolPages, UnalignedRequestsCoverWholePages) {
  EXPECT_EQ(allocate(kP + 100, 1), pool_->base() + kP + 100);
  EXPECT_EQ(pool_->physical_bytes(), kP);
  EXPECT_TRUE(pool_->is_mapped(kP, kP));
  EXPECT_EQ(allocate(3 * kP - 1, 2), pool_->base() + 3 * kP - 1) << "a byte on either side of a border";
  EXPECT_EQ(pool_->physical_bytes(), 3 * kP);
  deallocate(2 * kP + 5, kP);
  EXPECT_EQ(pool_->physical_bytes(), kP);
}

TEST_F(PoolPages, EveryPageUpToTheLastOneCanBeHad) {
  allocate(63 * kP, kP);
  allocate(0, 63 * kP);
  EXPECT_EQ(pool_->physical_bytes(), pool_->capacity());
  deallocate(0, 64 * kP);
  EXPECT_EQ(pool_->physical_bytes(), 0U);
}

TEST_F(PoolPages, RefuseRangesThatCannotBe) {
  for (const auto& [offset, size] : std::vector<std::pair<std::size_t, std::size_t>>{
           {0, 0}, {64 * kP, 1}, {63 * kP, kP + 1}, {kUnlimited, 2}, {kUnlimited - kP, kUnlimited}, {1, kUnlimited}}) {
    EXPECT_THROW(allocate(offset, size), InvalidRangeError) << offset << " " << size;
    EXPECT_THROW(deallocate(offset, size), InvalidRangeError) << offset << " " << size;
    EXPECT_THROW(static_cast<void>(pool_->is_mapped(offset, size)), InvalidRangeError) << offset << " " << size;
  }
  try {
    allocate(63 * kP, 2 * kP);
    FAIL();
  } catch (const InvalidRangeError& error) {
    EXPECT_EQ(error.offset, 63 * kP);
    EXPECT_EQ(error.size, 2 * kP);
    EXPECT_EQ(error.capacity, 64 * kP);
  }
  EXPECT_EQ(pool_->physical_bytes(), 0U);
}

TEST_F(PoolPages, NameTheFirstPageThatIsAlreadyMapped) {
  allocate(3 * kP, kP);
  allocate(5 * kP, kP);
  try {
    allocate(kP, 6 * kP);
    FAIL() << "over mapped pages";
  } catch (const AlreadyMappedError& error) {
    EXPECT_EQ(error.offset, 3 * kP);
    EXPECT_EQ(error.size, kP);
  }
  EXPECT_EQ(pool_->physical_bytes(), 2 * kP) << "nothing was mapped half-way";
}

TEST_F(PoolPages, NameTheFirstPageThatIsNotMapped) {
  allocate(kP, 2 * kP);
  try {
    deallocate(kP, 4 * kP);
    FAIL() << "beyond the mapped pages";
  } catch (const NotMappedError& error) {
    EXPECT_EQ(error.offset, 3 * kP);
    EXPECT_EQ(error.size, kP);
  }
  EXPECT_TRUE(pool_->is_mapped(kP, 2 * kP)) << "nothing was unmapped half-way";
  EXPECT_THROW(deallocate(0, kP), NotMappedError);
}

TEST_F(PoolPages, CanBeFreedInOtherPiecesThanTheyWereTaken) {
  allocate(0, 4 * kP);
  allocate(4 * kP, 4 * kP);
  Lab::fill(pool_->base(), 8 * kP, 9);
  deallocate(2 * kP, 4 * kP);
  EXPECT_TRUE(pool_->is_mapped(0, 2 * kP));
  EXPECT_FALSE(pool_->is_mapped(2 * kP, kP));
  EXPECT_TRUE(pool_->is_mapped(6 * kP, 2 * kP));
  EXPECT_EQ(pool_->physical_bytes(), 4 * kP) << "physical usage falls at deallocate";
  EXPECT_EQ(lab_.driver.live_chunk_bytes(), 4 * kP) << "and the driver has it back";
  EXPECT_EQ(Lab::first_wrong(pool_->base(), 2 * kP, 9), 2 * kP);
  deallocate(0, 2 * kP);
  deallocate(7 * kP, kP);
  deallocate(6 * kP, kP);
  EXPECT_EQ(pool_->statistics()[StatKind::allocated_bytes][0].current, 0);
}

TEST_F(PoolPages, AndTensorsNeverOverlap) {
  std::vector<std::pair<Address, std::size_t>> taken;
  const auto take = [&](Address at, std::size_t size) {
    for (const auto& [other, other_size] : taken) EXPECT_TRUE(at + size <= other || other + other_size <= at);
    Lab::fill(at, size, taken.size());
    taken.emplace_back(at, size);
  };
  for (int k = 0; k < 6; ++k) {
    take(lab_.allocate(*pool_, 3 * kMiB), 3 * kMiB);
    take(lab_.memory().allocate_first(*pool_, kP, nullptr), kP);
    take(lab_.allocate(*pool_, 1000), 1000);
  }
  // Page by page: what is free can be had, what is not is refused.
  for (std::size_t page = 0; page < 64; ++page) {
    if (pool_->is_mapped(page * kP, kP)) {
      EXPECT_THROW(allocate(page * kP, kP), AlreadyMappedError) << page;
    } else {
      take(allocate(page * kP, kP), kP);
    }
  }
  for (std::size_t k = 0; k < taken.size(); ++k) EXPECT_TRUE(Lab::holds(taken[k].first, taken[k].second, k)) << k;
  EXPECT_THROW(lab_.allocate(*pool_, 8 * kMiB), OutOfMemoryError) << "pages hold every address";
}

TEST_F(PoolPages, ATensorsPagesAreMappedAndCannotBeDeallocated) {
  const Address block = lab_.allocate(*pool_, 6 * kMiB);
  const std::size_t offset = block - pool_->base();
  EXPECT_TRUE(pool_->is_mapped(offset, 6 * kMiB));
  EXPECT_THROW(deallocate(offset, kP), NotMappedError);
  lab_.free(block);
  EXPECT_FALSE(pool_->is_mapped(offset, 6 * kMiB)) << "idle memory is nobody's";
}

TEST_F(PoolPages, AnEmptySlabIsNobodys) {
  const Address block = lab_.allocate(*pool_, 100);
  const std::size_t page = align_down(block - pool_->base(), kP);
  EXPECT_TRUE(pool_->is_mapped(page, kP));
  lab_.free(block);
  EXPECT_FALSE(pool_->is_mapped(page, kP));
  allocate(page, kP);
}

TEST_F(PoolPages, TheFirstFreeSpanIsTheLowestThatFits) {
  allocate(kP, kP);
  EXPECT_EQ(lab_.memory().allocate_first(*pool_, 2 * kP, nullptr), pool_->base() + 2 * kP);
  EXPECT_EQ(lab_.memory().allocate_first(*pool_, 100, nullptr), pool_->base());
  EXPECT_THROW(lab_.memory().allocate_first(*pool_, 62 * kP, nullptr), OutOfMemoryError);
  EXPECT_THROW(lab_.memory().allocate_first(*pool_, 0, nullptr), InvalidRangeError);
}

TEST_F(PoolPages, APendingFenceDoesNotBlockWhoDeallocates) {
  allocate(0, 4 * kP, kOne);
  lab_.meet(kTwo);
  lab_.driver.hold_fences(kTwo);  // a stream that nobody told the pool of
  lab_.driver.clear_calls();
  deallocate(0, 4 * kP);
  EXPECT_EQ(lab_.driver.count(Call::wait) + lab_.driver.count(Call::synchronize), 0U);
  EXPECT_EQ(lab_.driver.count(Call::unmap), 0U) << "kTwo may still use the addresses";
  EXPECT_EQ(pool_->physical_bytes(), 0U) << "but they count no more";
  EXPECT_FALSE(pool_->is_mapped(0, kP));
  // Other addresses of the pool can be had at once.
  allocate(8 * kP, kP, kOne);
  EXPECT_EQ(lab_.driver.count(Call::wait), 0U);
  lab_.driver.release_fences();
  pool_->settle();
  EXPECT_EQ(lab_.driver.live_mapped_bytes(), kP);
  allocate(0, 4 * kP, kOne);
}

TEST_F(PoolPages, TheSameAddressWaitsForItsFence) {
  allocate(0, kP, kOne);
  lab_.meet(kTwo);
  lab_.driver.hold_fences(kTwo);
  deallocate(0, kP);
  EXPECT_EQ(lab_.driver.count(Call::wait), 0U);
  EXPECT_EQ(allocate(0, kP, kOne), pool_->base()) << "the one address the caller wants";
  EXPECT_GT(lab_.driver.count(Call::wait), 0U);
}

TEST_F(PoolPages, MemoryHandedOnUnderAFenceIsOrderedBehindIt) {
  lab_.memory().set_limit(lab_.memory().budget(), 4 * kP);
  allocate(0, 4 * kP, kOne);
  lab_.meet(kTwo);
  lab_.driver.hold_fences(kTwo);
  deallocate(0, 4 * kP);
  lab_.driver.clear_calls();
  allocate(8 * kP, 4 * kP, kOne);
  EXPECT_EQ(lab_.driver.count(Call::wait), 0U);
  EXPECT_EQ(lab_.driver.count(Call::create), 0U);
  EXPECT_GE(lab_.driver.count(Call::stream_wait), 1U);
}

TEST_F(PoolPages, ThePoolsStreamIsNotHeldUpByPagesThatLeave) {
  allocate(0, kP, kOne);
  lab_.meet(kTwo);
  lab_.driver.hold_fences(kTwo);
  lab_.driver.clear_calls();
  deallocate(0, kP);
  EXPECT_EQ(lab_.driver.count(Call::stream_wait), 0U) << "nothing of it stays for kOne to reuse";
}

// ------------------------------------------------- pages that tensors show

TEST_F(PoolPages, WhatIsHeldCannotBeDeallocated) {
  allocate(0, 4 * kP);
  EXPECT_EQ(pool_->hold_pages(kP + 8, kP), pool_->base() + kP + 8);
  for (const auto& [offset, size, shown] :
       {std::tuple{kP, kP, kP - 8}, {2 * kP, kP, std::size_t{8}}, {std::size_t{0}, 4 * kP, kP}}) {
    try {
      deallocate(offset, size);
      FAIL() << "offset " << offset;
    } catch (const StillInUseError& error) {
      EXPECT_EQ(error.live_blocks, 1U);
      EXPECT_EQ(error.live_bytes, shown);
    }
  }
  EXPECT_EQ(pool_->physical_bytes(), 4 * kP) << "all or nothing";
  deallocate(3 * kP, kP);
  deallocate(0, kP);
  lab_.memory().unhold_pages(*pool_, kP + 8, kP);
  deallocate(kP, 2 * kP);
}

TEST_F(PoolPages, OnlyExplicitPagesAreHeld) {
  allocate(0, kP);
  EXPECT_THROW(pool_->hold_pages(0, 0), InvalidRangeError);
  EXPECT_THROW(pool_->hold_pages(64 * kP, 8), InvalidRangeError);
  try {
    pool_->hold_pages(kP - 8, 16);
    FAIL() << "the second page is not there";
  } catch (const NotMappedError& error) {
    EXPECT_EQ(error.offset, kP);
  }
  const Address block = lab_.allocate(*pool_, kMiB);
  EXPECT_THROW(pool_->hold_pages(block - pool_->base(), 16), NotMappedError)
      << "a tensor's block goes when it is freed";
}

TEST_F(PoolPages, AForcedCloseLeavesWhatIsHeldUntilItIsLetGo) {
  const auto neighbour = lab_.pool("b");
  allocate(0, 8 * kP);
  Lab::fill(pool_->base() + 2 * kP, 3 * kP, 5);
  pool_->hold_pages(2 * kP + 64, kP);  // pages 2 and 3
  pool_->hold_pages(3 * kP, 2 * kP);   // pages 3 and 4
  EXPECT_THROW(lab_.memory().close_pool(*pool_, /*force=*/false), StillInUseError);
  lab_.memory().close_pool(*pool_, /*force=*/true);
  lab_.memory().check();
  EXPECT_EQ(pool_->physical_bytes(), 3 * kP);
  EXPECT_EQ(lab_.memory().pools().size(), 2U);
  lab_.allocate(*neighbour, 64 * kMiB);  // takes whatever was given up
  EXPECT_TRUE(Lab::holds(pool_->base() + 2 * kP, 3 * kP, 5));
  EXPECT_THROW(pool_->hold_pages(2 * kP, 8), InvalidArgumentError) << "closed";
  EXPECT_THROW(deallocate(2 * kP, kP), InvalidArgumentError);

  lab_.memory().unhold_pages(*pool_, 2 * kP + 64, kP);
  lab_.memory().check();
  EXPECT_EQ(pool_->physical_bytes(), 2 * kP) << "page 3 is still shown by the other";
  lab_.memory().unhold_pages(*pool_, 3 * kP, 2 * kP);
  EXPECT_EQ(pool_->physical_bytes(), 0U);
  EXPECT_EQ(lab_.memory().pools().size(), 1U) << "it ended with the last of them";
}

TEST_F(PoolPages, APoolClosedByForceEndsWithTheLastOfItsTensorsAndPages) {
  allocate(0, kP);
  pool_->hold_pages(0, 8);
  const Address block = lab_.allocate(*pool_, kMiB);
  lab_.memory().close_pool(*pool_, /*force=*/true);
  lab_.memory().unhold_pages(*pool_, 0, 8);
  EXPECT_EQ(lab_.memory().pools().size(), 1U) << "a block lives";
  lab_.free(block);
  EXPECT_EQ(lab_.memory().pools().size(), 0U);
}

TEST(PoolPagesGrain, PartOfALargeChunkStaysUntilAllOfItIsFree) {
  Lab lab;
  const auto pool = lab.pool("a");  // chunk sizes by the request
  lab.memory().allocate_pages(*pool, 0, 64 * kMiB, kOne);
  lab.memory().deallocate_pages(*pool, 2 * kMiB, 2 * kMiB);
  lab.memory().check();
  EXPECT_FALSE(pool->is_mapped(2 * kMiB, 2 * kMiB));
  EXPECT_EQ(pool->memory_stats().stranded_bytes, 2 * kMiB);
  lab.memory().deallocate_pages(*pool, 0, 2 * kMiB);
  lab.memory().deallocate_pages(*pool, 4 * kMiB, 60 * kMiB);
  EXPECT_EQ(pool->physical_bytes(), 0U);
}

TEST(PoolPagesGrain, ARefusedAllocationLeavesNothingMapped) {
  Lab lab;
  const auto pool = lab.pool("a", 8 * kMiB);
  EXPECT_THROW(lab.memory().allocate_pages(*pool, 0, 10 * kMiB, nullptr), OutOfMemoryError);
  EXPECT_FALSE(pool->is_mapped(0, 1));
  lab.memory().check();
  lab.memory().allocate_pages(*pool, 0, 8 * kMiB, nullptr);
}

}  // namespace
}  // namespace vmm::testing
