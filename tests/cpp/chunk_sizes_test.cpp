// Of what size the chunks are that a pool grows by.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "lab.h"

namespace vmm::testing {
namespace {

TEST(ChunkSizes, FollowTheRequest) {
  Lab lab;
  const auto pool = lab.pool("a");
  const auto largest_created_for = [&](std::size_t bytes) {
    lab.driver.clear_calls();
    lab.allocate(*pool, bytes);
    std::size_t largest = 0;
    for (const CallRecord& call : lab.driver.calls(Call::create)) largest = std::max<std::size_t>(largest, call.a);
    return largest;
  };
  EXPECT_EQ(largest_created_for(100), kPage) << "a slab";
  EXPECT_EQ(largest_created_for(6 * kMiB), kPage) << "small requests pay for no big chunk";
  EXPECT_EQ(largest_created_for(240 * kMiB), 24 * kMiB);
  EXPECT_EQ(largest_created_for(720 * kMiB), 36 * kMiB) << "a 20th";
}

// Sizes of the chunks that the request makes.
std::vector<std::size_t> created_for(Lab& lab, Pool& pool, std::size_t bytes) {
  lab.driver.clear_calls();
  lab.allocate(pool, bytes);
  std::vector<std::size_t> sizes;
  for (const CallRecord& call : lab.driver.calls(Call::create)) sizes.push_back(call.a);
  return sizes;
}

PoolSpec large_spec() {
  PoolSpec spec = Lab::spec("a");
  spec.capacity = 32 * kGiB;
  return spec;
}

using Sizes = std::vector<std::size_t>;

TEST(ChunkSizes, WhatLastsHasFewChunksAndNotAByteMore) {
  const auto created = [](std::size_t bytes) {
    Lab lab(LabSpec{64 * kGiB});
    return created_for(lab, *lab.pool(large_spec()), bytes);
  };
  EXPECT_EQ(created(96 * kMiB), Sizes(4, 24 * kMiB));
  EXPECT_EQ(created(88 * kMiB), Sizes(11, 8 * kMiB)) << "but not in a small pool";
  EXPECT_EQ(created(20 * kGiB), Sizes(20, kGiB)) << "a 20th of the request";
  EXPECT_EQ(created(26 * kGiB), Sizes(26, kGiB)) << "and never more than that";
}

// What the request makes after a block of `freed` bytes came and went, beside a page that stays.
Sizes created_after(std::size_t freed, std::size_t bytes, bool is_alone = true) {
  Lab lab(LabSpec{64 * kGiB});
  const auto other = is_alone ? nullptr : lab.pool("other");
  const auto pool = lab.pool(large_spec());
  lab.allocate(*pool, kPage);
  lab.free(lab.allocate(*pool, freed));
  lab.memory().empty_cache();
  return created_for(lab, *pool, bytes);
}

TEST(ChunkSizes, WhatComesAndGoesIsBackedWithSmallEvenPieces) {
  // A pool that was never larger grows in quarters of its peak, up to 8 MiB.
  EXPECT_EQ(created_after(8 * kMiB, 16 * kMiB), Sizes(4, 4 * kMiB)) << "a quarter of 18 MiB, in whole pages";
  EXPECT_EQ(created_after(kGiB, 24 * kMiB), Sizes(3, 8 * kMiB));
  Sizes sizes(13, 8 * kMiB);
  sizes.push_back(6 * kMiB);
  EXPECT_EQ(created_after(kGiB, 110 * kMiB), sizes);
  EXPECT_EQ(created_after(kGiB, 12 * kGiB), Sizes(48, 256 * kMiB)) << "a 48th of the request";
  EXPECT_EQ(created_after(20 * kGiB, 90 * kMiB), Sizes({24 * kMiB, 22 * kMiB, 22 * kMiB, 22 * kMiB}))
      << "about a 900th of the peak, which is 22.8 MiB";
  EXPECT_EQ(created_after(20 * kGiB, 6 * kMiB), Sizes(1, 6 * kMiB)) << "no more than is needed";
}

TEST(ChunkSizes, WhatGoesFromModelToModelIsBackedWithFewerPieces) {
  EXPECT_EQ(created_after(kGiB, 96 * kMiB, /*is_alone=*/false), Sizes(4, 24 * kMiB));
  EXPECT_EQ(created_after(kGiB, 12 * kGiB, /*is_alone=*/false), Sizes(48, 256 * kMiB)) << "a 48th of the request";
  EXPECT_EQ(created_after(20 * kGiB, 100 * kMiB, /*is_alone=*/false), Sizes({34 * kMiB, 34 * kMiB, 32 * kMiB}))
      << "about a 600th of the peak, which is 34.1 MiB";
}

TEST(ChunkSizes, WhatLastsIsWhereLessThanA64thOfWhatWasHandedOutCameBack) {
  for (const std::size_t mib : {16U, 20U}) {
    Lab lab(LabSpec{64 * kGiB});
    const auto pool = lab.pool(large_spec());
    lab.allocate(*pool, kGiB - mib * kMiB);
    lab.free(lab.allocate(*pool, mib * kMiB));
    lab.memory().empty_cache();
    EXPECT_EQ(created_for(lab, *pool, 24 * kMiB).size(), mib == 16 ? 1U : 3U);
  }
}

TEST(ChunkSizes, SlabsThatComeAndGoDoNotLast) {
  Lab lab(LabSpec{64 * kGiB});
  const auto pool = lab.pool(large_spec());
  lab.allocate(*pool, 128 * kMiB);
  std::vector<Address> small(64);
  for (Address& block : small) block = lab.allocate(*pool, kMiB);
  for (const Address block : small) lab.free(block);
  lab.memory().empty_cache();
  EXPECT_EQ(created_for(lab, *pool, 24 * kMiB), Sizes(3, 8 * kMiB));
}

TEST(ChunkSizes, APoolThatHoldsNothingBeginsAnew) {
  Lab lab(LabSpec{64 * kGiB});
  const auto pool = lab.pool(large_spec());
  lab.free(lab.allocate(*pool, kGiB));
  lab.memory().empty_cache();
  EXPECT_EQ(created_for(lab, *pool, 24 * kMiB), Sizes(1, 24 * kMiB));
}

// ----------------------------------------------------------- ahead of the request

// Blocks of `bytes` until the pool holds `total`; returns how many chunks they took.
std::size_t load(Lab& lab, Pool& pool, std::size_t bytes, std::size_t total) {
  lab.driver.clear_calls();
  for (std::size_t held = 0; held < total; held += bytes) lab.allocate(pool, bytes);
  return lab.driver.count(Call::create);
}

TEST(ChunkSizes, GrowWithWhatIsBeingLoaded) {
  Lab lab(LabSpec{64 * kGiB});
  const auto pool = lab.pool(large_spec());
  EXPECT_LE(load(lab, *pool, 24 * kMiB, 3 * kGiB), 135U) << "up to 3 GiB a 128th is less than a block";
  EXPECT_LE(load(lab, *pool, 24 * kMiB, 17 * kGiB), 250U) << "not 725";
  EXPECT_LE(pool->physical_bytes(), pool->live_bytes() + pool->live_bytes() / 128);
}

TEST(ChunkSizes, GrowAheadOnlyWhereNobodyElseWantsTheMemory) {
  Lab lab(LabSpec{64 * kGiB});
  const auto other = lab.pool("other");
  const auto pool = lab.pool(large_spec());
  load(lab, *pool, 6 * kMiB, 2 * kGiB);
  EXPECT_EQ(pool->physical_bytes(), pool->live_bytes());
}

TEST(ChunkSizes, GrowAheadOnlyWhileLittleComesBack) {
  Lab lab(LabSpec{64 * kGiB});
  const auto pool = lab.pool(large_spec());
  lab.allocate(*pool, 2 * kGiB);
  lab.free(lab.allocate(*pool, kGiB));
  lab.memory().empty_cache();
  EXPECT_EQ(created_for(lab, *pool, 6 * kMiB), Sizes(1, 6 * kMiB));
}

TEST(ChunkSizes, GrowAheadUpToTheLimitAndThenByTheRequestAlone) {
  Lab lab(LabSpec{64 * kGiB});
  PoolSpec spec = large_spec();
  spec.physical_limit = 2 * kGiB + 10 * kMiB;  // what is asked for, to the byte
  const auto pool = lab.pool(spec);
  lab.allocate(*pool, 2 * kGiB);
  for (int k = 0; k < 5; ++k) lab.allocate(*pool, 2 * kMiB);
  EXPECT_EQ(pool->physical_bytes(), spec.physical_limit);
}

TEST(ChunkSizes, WhereTheDriverHasNotSoMuchTheyAreTheRequestAgain) {
  Lab lab(LabSpec{64 * kGiB});
  const auto pool = lab.pool(large_spec());
  lab.allocate(*pool, 2 * kGiB);
  lab.driver.fail_nth(Call::create, 1, no_memory());
  EXPECT_EQ(created_for(lab, *pool, 2 * kMiB), Sizes({16 * kMiB, 2 * kMiB}));
  EXPECT_EQ(pool->physical_bytes(), pool->live_bytes());
  EXPECT_EQ(pool->budget().used(), pool->live_bytes());
}

// What lies unused beside a live block cannot be had by the model's other parts.
TEST(ChunkSizes, GrowAheadNotIntoTheLastOfALimit) {
  Lab lab(LabSpec{64 * kGiB});
  PoolSpec spec = large_spec();
  spec.physical_limit = 302 * kPage;
  const auto model = lab.pool(spec);
  for (int k = 0; k < 301; ++k) lab.allocate(*model, kPage);
  EXPECT_EQ(model->physical_bytes(), 301 * kPage);
  lab.allocate(*lab.memory().tagged(model, "kv_cache"), kPage);
}

TEST(ChunkSizes, ExplicitPagesHaveNoMoreThanTheyAskFor) {
  Lab lab(LabSpec{64 * kGiB});
  const auto pool = lab.pool(large_spec());
  lab.allocate(*pool, 700 * kMiB);
  lab.memory().allocate_pages(*pool, 900 * kMiB, kPage, nullptr);
  EXPECT_EQ(pool->physical_bytes(), 700 * kMiB + kPage);
  pool->deallocate_pages(900 * kMiB, kPage);
}

TEST(ChunkSizes, BlocksOfLittleMoreThanHalfAPageShareTheirs) {
  for (const std::size_t bytes : {kMiB + 512, kMiB + 100 * kKiB, 2 * kMiB - 512}) {
    Lab lab(LabSpec{64 * kGiB});
    const auto pool = lab.pool(large_spec());
    for (int k = 0; k < 330; ++k) lab.allocate(*pool, bytes);
    EXPECT_LE(pool->physical_bytes(), pool->live_bytes() + pool->live_bytes() / 50) << bytes;
  }
}

}  // namespace
}  // namespace vmm::testing
