// In what chunks the memory of a model comes back.
#include <gtest/gtest.h>

#include <cstddef>
#include <memory>
#include <set>
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
    EXPECT_EQ(lab_.memory().committed_bytes(), had) << "what it had before is not kept";
    for (const Address each : blocks) EXPECT_TRUE(is_zero(each, kPage));
  }
  lab_.free(blocks[1]);  // it is idle memory as any
  lab_.allocate(*model, kBlock);
}

// Up to a 32nd of the model.
TEST_F(SleepChunks, SmallBlocksOfALargeModelShareOne) {
  const auto model = lab_.pool(Lab::spec("model"));
  const std::vector<Address> small = take(*model, 15, kPage);
  take(*model, 1, 832 * kMiB);
  ASSERT_EQ(chunks(*model, small, kPage), small.size());
  sleep(model, discard());
  wake(model);
  std::set<Address> found;
  for (const Address each : small) {
    for (const ChunkView& chunk : model->chunks_under(each, kPage)) {
      EXPECT_LE(chunk.size, 13 * kPage);  // of 26.9 MiB
      found.insert(chunk.address);
    }
  }
  EXPECT_EQ(found.size(), 2U);
  EXPECT_TRUE(is_zero(small.back(), kPage));
  for (const Address each : small) lab_.free(each);
  EXPECT_EQ(model->idle_bytes(), 15 * kPage);
}

// What is freed of it later goes to others, and what stands there then holds no more than it.
class SleepOfALargeBlock : public SleepChunks {
 protected:
  void expect_its_own_chunk(const Places& places) {
    const auto model = lab_.pool(Lab::spec("model"));
    const std::size_t small = 5 * kMiB;
    const std::size_t large = 24 * kMiB;
    const Address first = lab_.allocate(*model, small);
    const Address second = lab_.allocate(*model, large);
    const std::vector<Address> others = take(*model, 3, small);
    lab_.allocate(*model, 700 * kMiB);  // a 32nd of all is 23 MiB
    ASSERT_EQ(others.front() - first, small + large);
    for (int k = 0; k < 2; ++k) {
      sleep(model, places);
      wake(model);
      EXPECT_EQ(model->chunks_under(first, small).size(), 1U);
      EXPECT_LE(model->chunks_under(others[0], 3 * small).size(), 2U);
      // Its first bytes are in the page of those before it, its last in that of those behind.
      const std::vector<ChunkView> found = model->chunks_under(second, large);
      ASSERT_EQ(found.size(), 3U);
      EXPECT_EQ(found[1].address, first + 6 * kMiB);
      EXPECT_EQ(found[1].size, 22 * kMiB);
    }
    const std::size_t had = model->physical_bytes();
    lab_.free(second);
    lab_.memory().trim(*model, 0);
    EXPECT_EQ(model->physical_bytes(), had - 22 * kMiB);
  }
};

TEST_F(SleepOfALargeBlock, ItSharesNoneWhereItWasThrownAway) { expect_its_own_chunk(discard()); }
TEST_F(SleepOfALargeBlock, ItSharesNoneWhereItWasKept) { expect_its_own_chunk(host()); }

// Wherever it was kept meanwhile: what comes over the bus shares less, and is cut no smaller for it.
TEST_F(SleepChunks, WhatHasComeBackInFewDoesSoAgain) {
  const auto model = lab_.pool(Lab::spec("model"));
  for (int k = 0; k < 16; ++k) {
    lab_.allocate(*model, 9 * kMiB);
    lab_.allocate(*model, 3 * kMiB / 2);
  }
  lab_.allocate(*model, 700 * kMiB);
  const auto count = [&] { return model->chunks_under(model->base(), 868 * kMiB).size(); };
  std::set<std::size_t> counts;
  for (const Places& places : {discard(), host(), discard(), host(), host()}) {
    sleep(model, places);
    wake(model);
    counts.insert(count());
  }
  EXPECT_EQ(counts.size(), 1U) << *counts.begin() << " and " << *counts.rbegin();
}

// The page that two of them share is in a chunk of one of them, and none of its own.
TEST_F(SleepChunks, LargeBlocksSideBySideAreAChunkEach) {
  const auto model = lab_.pool(Lab::spec("model"));
  const std::size_t large = 33 * kMiB;
  const std::vector<Address> blocks = take(*model, 24, large);
  sleep(model, discard());
  wake(model);
  EXPECT_EQ(model->chunks_under(blocks.front(), 24 * large).size(), 24U);
}

// Nor where something is free in it.
TEST_F(SleepChunks, LargeBlocksNearEachOtherAreAChunkEach) {
  const auto model = lab_.pool(Lab::spec("model"));
  const std::size_t large = 32 * kMiB + 300 * kKiB;
  const Address first = lab_.allocate(*model, large);
  const Address between = lab_.allocate(*model, kMiB + 100 * kKiB);
  const Address second = lab_.allocate(*model, large);
  take(*model, 1, 700 * kMiB);
  ASSERT_EQ((first + large - model->base()) / kPage, (second - model->base()) / kPage);
  lab_.free(between);
  sleep(model, discard());
  wake(model);
  EXPECT_GT(model->chunks_under(first + large, 1).front().size, kPage);
}

// What shares the last page of a large one beyond a gap has it, as without one.
TEST_F(SleepChunks, ALargeBlockBelowAGapSharesNone) {
  const auto model = lab_.pool(Lab::spec("model"));
  const std::size_t large = 32 * kMiB + 300 * kKiB;
  const Address first = lab_.allocate(*model, large);
  const Address between = lab_.allocate(*model, kMiB + 100 * kKiB);
  lab_.allocate(*model, 5 * kMiB);
  lab_.allocate(*model, 700 * kMiB);
  lab_.free(between);
  sleep(model, discard());
  wake(model);
  const std::size_t had = model->physical_bytes();
  lab_.free(first);
  lab_.memory().trim(*model, 0);
  EXPECT_EQ(model->physical_bytes(), had - 32 * kMiB);
}

// Slices of it are sealed by those.
TEST_F(SleepChunks, ALargeBlockOfATagHasSeveral) {
  const auto model = lab_.pool(Lab::spec("model"));
  const auto tag = lab_.memory().tagged(model, "weights");
  const Address block = lab_.allocate(*tag, 512 * kMiB);
  sleep(model, discard());
  wake(model);
  for (const ChunkView& chunk : tag->chunks_under(block, 512 * kMiB)) EXPECT_LE(chunk.size, 256 * kMiB);
}

// What another model may want of what is freed later is not held by the rest.
TEST_F(SleepChunks, WhatIsFreedLaterGoesToOthersAsBefore) {
  const auto model = lab_.pool(Lab::spec("model"));
  const auto other = lab_.pool(Lab::spec("other"));
  for (const bool has_slept : {false, true}) {
    const std::vector<Address> blocks = take(*model, 24, 8 * kMiB);
    if (has_slept) sleep(model, discard());
    if (has_slept) wake(model);
    for (std::size_t k = 0; k < blocks.size(); ++k) {
      if (k % 3 != 0) lab_.free(blocks[k]);
    }
    lab_.memory().trim(*model, 0);
    EXPECT_EQ(model->physical_bytes(), 8 * 8 * kMiB) << has_slept;
    for (std::size_t k = 0; k < blocks.size(); k += 3) lab_.free(blocks[k]);
    lab_.memory().empty_cache();
  }
}

// A model that frees what it makes is none of what stays.
TEST_F(SleepChunks, BlocksThatComeAndGoShareNone) {
  const auto model = lab_.pool(Lab::spec("model"));
  const std::vector<Address> small = take(*model, 15, kPage);
  lab_.free(lab_.allocate(*model, 832 * kMiB));
  for (int k = 0; k < 2; ++k) {
    sleep(model, discard());
    wake(model);
  }
  std::set<Address> found;
  for (const Address each : small) found.insert(model->chunks_under(each, kPage).front().address);
  EXPECT_EQ(found.size(), small.size());
}

// In a chunk that has become one as well.
TEST_F(SleepChunks, WhatIsFreedOfAChunkDoesNotComeBack) {
  const auto model = lab_.pool(Lab::spec("model"));
  const Address block = take(*model, 1, kBlock).front();
  sleep(model, discard());
  wake(model);
  ASSERT_EQ(model->chunks_under(block, kBlock).size(), 1U);
  lab_.free(block);
  const Address first = lab_.allocate(*model, 12 * kMiB);
  const Address middle = lab_.allocate(*model, 44 * kMiB);
  const Address last = lab_.allocate(*model, 10 * kMiB);
  ASSERT_EQ(first, block);
  ASSERT_EQ(last, block + 56 * kMiB);
  Lab::fill(last, 10 * kMiB, 7);
  sleep(model, host());
  lab_.free(middle);
  wake(model);
  EXPECT_EQ(model->physical_bytes(), 22 * kMiB);
  EXPECT_TRUE(Lab::holds(last, 10 * kMiB, 7));
  EXPECT_EQ(lab_.allocate(*model, 44 * kMiB), middle);
}

// There each may be sealed by itself.
TEST_F(SleepChunks, BlocksOfATagShareNone) {
  const auto model = lab_.pool(Lab::spec("model"));
  const auto tag = lab_.memory().tagged(model, "weights");
  take(*tag, 1, kBlock);
  const std::vector<Address> blocks = take(*tag, 16, 6 * kMiB);
  sleep(model, discard());
  wake(model);
  std::set<Address> found;
  for (const Address each : blocks) {
    for (const ChunkView& chunk : tag->chunks_under(each, 6 * kMiB)) found.insert(chunk.address);
  }
  EXPECT_GE(found.size(), blocks.size());
}

// Each is unsealed by itself.
TEST_F(SleepChunks, BlocksThatAreSealedShareNone) {
  const auto model = lab_.pool(Lab::spec("model"));
  const auto tag = lab_.memory().tagged(model, "weights");
  const std::vector<Address> blocks = take(*tag, 2, kBlock);
  for (const Address each : blocks) seal_pages(lab_.memory(), *model, {{each, kBlock, true}});
  for (int k = 0; k < 2; ++k) {
    sleep(model, host());
    wake(model);
    EXPECT_EQ(chunks(*tag, blocks, kBlock), blocks.size());
    for (const Address each : blocks) EXPECT_TRUE(tag->is_read_only(each, kBlock));
  }
  unseal_pages(lab_.memory(), *model, {{blocks[0], kBlock, true}});
  EXPECT_FALSE(tag->has_read_only(blocks[0], kBlock));
  EXPECT_TRUE(tag->is_read_only(blocks[1], kBlock));
}

// What is free beside a block would stay with it.
TEST_F(SleepChunks, WhatIsFreeSharesNone) {
  const auto model = lab_.pool(Lab::spec("model"));
  const Address first = lab_.allocate(*model, 88 * kMiB);
  ASSERT_EQ(model->chunks_under(first, 88 * kMiB).size(), 11U) << "8 MiB each, in a small pool";
  lab_.allocate(*model, 24 * kMiB);
  lab_.free(first);
  ASSERT_EQ(lab_.allocate(*model, 8 * kMiB), first);
  ASSERT_EQ(lab_.allocate(*model, 12 * kMiB), first + 8 * kMiB);
  sleep(model, discard());
  wake(model);
  const std::vector<ChunkView> found = model->chunks_under(first, 20 * kMiB);
  ASSERT_EQ(found.size(), 3U);
  EXPECT_EQ(found[1].size, 8 * kMiB);
  EXPECT_EQ(found[2].size, 8 * kMiB) << "the half of which is free";
}

TEST_F(SleepChunks, WhatIsKeptComesBackInFewerToo) {
  constexpr std::size_t kLarge = 320 * kMiB;
  const auto model = lab_.pool(Lab::spec("model"));
  const std::vector<Address> blocks = take(*model, 2, kBlock);
  const std::vector<Address> large = take(*model, 1, kLarge);
  ASSERT_EQ(chunks(*model, blocks, kBlock), 8U);
  for (const Address each : blocks) Lab::fill(each, kPage, 1);
  for (int k = 0; k < 2; ++k) {
    sleep(model, host());
    wake(model);
    EXPECT_EQ(chunks(*model, blocks, kBlock), blocks.size());
    EXPECT_EQ(chunks(*model, large, kLarge), 2U) << "240 MiB and the rest";
    EXPECT_EQ(lab_.memory().committed_bytes(), model->physical_bytes()) << "what it had before is not kept";
    for (const Address each : blocks) EXPECT_EQ(Lab::first_wrong(each, kPage, 1), kPage);
  }
}

// The chunks that have gone are there, whatever the driver has.
TEST_F(SleepChunks, ASleepThatIsStoppedAsksTheDriverForNothing) {
  const auto model = lab_.pool(Lab::spec("model"));
  const std::vector<Address> blocks = take(*model, 4, kBlock);
  for (const Address each : blocks) Lab::fill(each, kPage, each);
  lab_.driver.fail_nth(Call::create, 1, no_memory(), Repeat::from_then_on);
  for (int at = 2; at < 12; ++at) {
    EXPECT_THROW(go(*going({model}, host()), stops_at(at)), VmmError);
    ASSERT_FALSE(model->is_asleep()) << at;
    for (const Address each : blocks) EXPECT_TRUE(Lab::holds(each, kPage, each));
  }
  lab_.driver.clear_failures();
}

// What rests there for another model stays for it.
TEST_F(SleepChunks, NoMoreIsExchangedThanIsMade) {
  const auto limit = lab_.memory().create_group("g", 2 * kBlock);
  const auto a = lab_.pool(Lab::spec("a"), limit.get());
  const auto b = lab_.pool(Lab::spec("b"), limit.get());
  for (const auto& model : {a, b}) {
    ASSERT_GE(chunks(*model, take(*model, 1, kBlock), kBlock), 3U) << "other sizes than it comes back in";
    ASSERT_EQ(model->physical_bytes(), kBlock);
  }
  for (const auto& model : {a, b}) sleep(model, discard());
  wake(a);
  EXPECT_EQ(lab_.memory().committed_bytes(), 2 * kBlock);
  wake(b);
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

// Others took of the chunks meanwhile, and what is left under the limit is in smaller ones.
TEST_F(SleepChunks, WhereNoneIsSoLargeOneIsMadeOfThem) {
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

// Two models in turn under a limit that makes units of 4 MiB.
class SleepUnits : public SleepChunks {
 protected:
  static constexpr std::size_t kUnit = 4 * kMiB;
  static constexpr std::size_t kWindow = 4 * kUnit;

  SleepUnits() { lab_.allocate(*other_, kPage); }
  static std::size_t windows(const Pool& pool, Address begin, std::size_t bytes) {
    std::size_t count = 0;
    for (const ChunkView& chunk : pool.chunks_under(begin, bytes)) count += chunk.size == kWindow ? 1 : 0;
    return count;
  }
  static std::size_t windows(const Pool& pool, const std::vector<Address>& blocks, std::size_t bytes) {
    return windows(pool, blocks.front(), blocks.back() + bytes - blocks.front());
  }

  const std::shared_ptr<Budget> group_ = lab_.memory().create_group("shared", 512 * kMiB);
  const std::shared_ptr<Pool> model_ = lab_.pool(Lab::spec("model"), group_.get());
  const std::shared_ptr<Pool> other_ = lab_.pool(Lab::spec("other"), group_.get());
};

TEST_F(SleepUnits, ThoseOfAWholeWindowComeBackAsOne) {
  const std::vector<Address> blocks = take(*model_, 3, kBlock);
  ASSERT_EQ(windows(*model_, blocks, kBlock), 0U);
  const std::size_t had = model_->physical_bytes();
  for (const Places& where : {host(), discard()}) {
    for (const Address each : blocks) Lab::fill(each, kPage, 1);
    sleep(model_, where);
    wake(model_);
    EXPECT_EQ(windows(*model_, blocks, kBlock), 3 * kBlock / kWindow);
    EXPECT_EQ(model_->physical_bytes(), had);
    const bool is_kept = where.front().kind == Place::Kind::host;
    for (const Address each : blocks) EXPECT_TRUE(is_kept ? Lab::holds(each, kPage, 1) : is_zero(each, kPage));
  }
}

// What is free in one would stay with what is not.
TEST_F(SleepUnits, NotThoseInWhichSomethingIsFree) {
  const std::vector<Address> blocks = take(*model_, 3, kBlock);
  lab_.free(blocks[1]);
  const Address rest = lab_.allocate(*model_, kBlock - kPage);
  ASSERT_EQ(rest, blocks[1]);
  sleep(model_, host());
  wake(model_);
  EXPECT_EQ(windows(*model_, blocks, kBlock), 3 * kBlock / kWindow - 1);
}

TEST_F(SleepUnits, NotThoseThatAreSealedApart) {
  const auto weights = lab_.memory().tagged(model_, "weights");
  const std::vector<Address> blocks = take(*weights, 3, kWindow);
  const std::size_t before = chunks(*weights, blocks, kWindow);
  seal_pages(lab_.memory(), *model_, {{blocks[1], kWindow, true}});
  sleep(model_, host());
  wake(model_);
  EXPECT_EQ(windows(*weights, blocks, kWindow), 2U);
  EXPECT_EQ(weights->chunks_under(blocks[1], kWindow).size(), before / 3);
  unseal_pages(lab_.memory(), *model_, {{blocks[1], kWindow, true}});
}

// Whatever its blocks are, each model wants chunks that the other one has left.
TEST_F(SleepUnits, ModelsInTurnPassThemOn) {
  const std::vector<Address> large = take(*model_, 3, 128 * kMiB);
  for (const Address each : large) Lab::fill(each, kPage, each);
  sleep(model_, host());
  const std::vector<Address> small = take(*other_, 16, 24 * kMiB);
  for (const Address each : small) Lab::fill(each, kPage, each);
  std::uint64_t created = 0;
  for (int turn = 0; turn < 6; ++turn) {
    if (turn == 2) created = lab_.driver.count(Call::create);
    const std::uint64_t mapped = lab_.driver.count(Call::map);
    turn % 2 == 0 ? go(*swapping(other_, model_, host())) : go(*swapping(model_, other_, host()));
    lab_.memory().check();
    EXPECT_LE(group_->used(), 512 * kMiB);
    EXPECT_LE(lab_.driver.count(Call::map) - mapped, 40U) << "turn " << turn;  // of 96 units
  }
  EXPECT_LE(lab_.driver.count(Call::create) - created, 16U) << "in four swaps: where units end";
  for (const Address each : small) EXPECT_TRUE(Lab::holds(each, kPage, each));
  go(*swapping(other_, model_, host()));
  for (const Address each : large) {
    EXPECT_TRUE(Lab::holds(each, kPage, each));
    lab_.free(each);
  }
  wake(other_);
}

// Nor what is freed while it sleeps.
TEST_F(SleepUnits, WhatIsFreedMeanwhileDoesNotComeBack) {
  const std::vector<Address> blocks = take(*model_, 64, kUnit);
  sleep(model_, host());
  wake(model_);
  ASSERT_EQ(windows(*model_, blocks, kUnit), 64 * kUnit / kWindow);
  sleep(model_, host());
  for (std::size_t k = 0; k < blocks.size(); ++k) {
    if (k % 4 != 1) lab_.free(blocks[k]);
  }
  wake(model_);
  EXPECT_EQ(model_->physical_bytes(), 16 * kUnit);
}

// There each may be sealed by itself.
TEST_F(SleepUnits, ThoseOfATagsBlocksStayApart) {
  const auto weights = lab_.memory().tagged(model_, "weights");
  const std::vector<Address> blocks = take(*weights, 8, 2 * kUnit);
  sleep(model_, host());
  wake(model_);
  seal_pages(lab_.memory(), *model_, {{blocks[1], 2 * kUnit, true}});
  EXPECT_FALSE(weights->has_read_only(blocks[0], 2 * kUnit));
  unseal_pages(lab_.memory(), *model_, {{blocks[1], 2 * kUnit, true}});
}

// Idle memory of others is in units: enough of it makes a window.
TEST_F(SleepUnits, WhatOthersHaveIdleMakesRoomForThem) {
  const std::vector<Address> blocks = take(*model_, 3, kBlock);
  for (const Address each : blocks) Lab::fill(each, kPage, each);
  sleep(model_, host());
  const auto third = lab_.pool(Lab::spec("third"), group_.get());
  for (Pool* pool : {other_.get(), third.get()}) {
    std::vector<Address> idle = take(*pool, 60, 4 * kMiB);
    for (const Address each : idle) lab_.free(each);
  }
  ASSERT_LT(group_->room(), 3 * kBlock);
  wake(model_);
  for (const Address each : blocks) EXPECT_TRUE(Lab::holds(each, kPage, each));
  EXPECT_LE(group_->used(), 512 * kMiB);
}

}  // namespace
}  // namespace vmm::testing
