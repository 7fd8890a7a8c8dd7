// The reclaim ladder: who yields when a request cannot be met, rung by rung
// and in order, and what of their memory the receiver sees.
#include <gtest/gtest.h>
#include <unistd.h>

#include <vector>

#include "cpp/reclaim_lab.h"

namespace vmm::testing {
namespace {

// ------------------------------------------------------------- rung by rung

TEST_F(Reclaim, TheOwnIdleMemoryComesFirst) {
  const auto a = model("a");
  const auto b = model("b");
  lab_.leave_idle(*b, 16 * kMiB);
  lab_.leave_idle(*a, 16 * kMiB);
  lab_.driver.clear_calls();
  lab_.allocate(*a, 12 * kMiB, kTwo);
  EXPECT_EQ(bytes(b), 16 * kMiB);
  EXPECT_EQ(lab_.driver.count(Call::create), 0U);
}

TEST_F(Reclaim, TheShelfComesBeforeAnyNewMemoryAndBeforeOtherModels) {
  const auto a = model("a");
  const auto b = model("b");
  const auto c = model("c");
  lab_.leave_idle(*b, 16 * kMiB);
  lab_.memory().allocate_pages(*c, 0, 8 * kMiB, nullptr);
  lab_.memory().deallocate_pages(*c, 0, 8 * kMiB);
  EXPECT_EQ(lab_.memory().store().shelved_bytes(group_), 8 * kMiB);
  lab_.driver.clear_calls();
  lab_.allocate(*a, 8 * kMiB);
  EXPECT_EQ(lab_.driver.count(Call::create), 0U) << "the shelf had it";
  EXPECT_EQ(bytes(b), 16 * kMiB);
  EXPECT_EQ(lab_.memory().store().shelved_bytes(group_), 0U);
}

TEST_F(Reclaim, AShelfOfOtherSizesIsGivenBackToMakeRoom) {
  const auto a = model("a", kPage);
  const auto b = model("b", 8 * kMiB);
  lab_.memory().allocate_pages(*b, 0, 32 * kMiB, nullptr);
  lab_.memory().deallocate_pages(*b, 0, 32 * kMiB);
  lab_.allocate(*a, 32 * kMiB);  // chunks of 2 MiB where 8 MiB ones rested
  EXPECT_EQ(lab_.driver.live_chunk_bytes(), 32 * kMiB);
}

TEST_F(Reclaim, OfAShelfOfOtherSizesNoMoreGoesThanIsLacking) {
  const auto a = model("a", kPage);
  const auto b = model("b", 8 * kMiB);
  lab_.memory().allocate_pages(*b, 0, 32 * kMiB, nullptr);
  lab_.memory().deallocate_pages(*b, 0, 32 * kMiB);
  lab_.allocate(*a, 12 * kMiB);
  EXPECT_EQ(lab_.memory().store().shelved_bytes(group_), 16 * kMiB) << "8 MiB and 8 MiB went for 12";
  EXPECT_EQ(lab_.driver.live_chunk_bytes(), 28 * kMiB);
}

// It carries nothing of what rests there.
TEST_F(Reclaim, WhereAModelsOwnLimitRefusesTheShelfStays) {
  PoolSpec spec = Lab::spec("a");
  spec.page_size = kPage;
  spec.physical_limit = 8 * kMiB;
  const auto a = lab_.pool(spec, &group_);
  const auto b = model("b");
  lab_.memory().allocate_pages(*b, 0, 8 * kMiB, nullptr);
  lab_.memory().deallocate_pages(*b, 0, 8 * kMiB);
  lab_.allocate(*a, 4 * kMiB);
  lab_.memory().allocate_pages(*b, 0, 8 * kMiB, nullptr);
  lab_.memory().deallocate_pages(*b, 0, 8 * kMiB);
  lab_.allocate(*a, 4 * kMiB);
  const std::size_t shelved = lab_.memory().store().shelved_bytes(group_);
  ASSERT_NE(shelved, 0U);
  EXPECT_THROW(lab_.allocate(*a, 4 * kMiB), OutOfMemoryError);
  EXPECT_EQ(lab_.memory().store().shelved_bytes(group_), shelved);
}

// What it gives up rests on its group's shelf, and that keeps no more than ever.
TEST(ReclaimShelf, ALoweredModelsLimitGoesBackToTheDriver) {
  Lab lab;
  const auto model = lab.pool("model");
  const auto shelved = [&] { return lab.memory().store().shelved_bytes(model->group()); };
  lab.leave_idle(*model, 700 * kMiB);
  lab.memory().set_limit(model->budget(), 64 * kMiB);
  EXPECT_LE(shelved(), 256 * kMiB);
  lab.memory().set_limit(model->budget(), kUnlimited);
  std::vector<Address> blocks;
  for (int k = 0; k < 35; ++k) blocks.push_back(lab.allocate(*model, 20 * kMiB));
  lab.memory().set_limit(model->budget(), 64 * kMiB);
  for (const Address each : blocks) lab.free(each);
  EXPECT_LE(shelved(), 256 * kMiB);
}

// Three groups on a device of 64 MiB: what is left of it is on a shelf of the
// first and idle in the second, and the third asks.
class ReclaimShelves : public ::testing::Test {
 protected:
  void SetUp() override {
    lab_.memory().allocate_pages(*shelved_, 0, 32 * kMiB, nullptr);
    lab_.memory().deallocate_pages(*shelved_, 0, 32 * kMiB);
    lab_.leave_idle(*idle_, 16 * kMiB);
    lab_.allocate(*asker_, 16 * kMiB);
    ASSERT_EQ(on_shelf(), 32 * kMiB);
  }
  std::shared_ptr<Pool> pool(Budget& group) {
    PoolSpec spec = Lab::spec(group.name());
    spec.page_size = kPage;
    return lab_.pool(spec, &group);
  }
  std::size_t on_shelf() { return lab_.memory().store().shelved_bytes(first_); }

  Lab lab_{LabSpec{64 * kMiB}};
  Budget& first_ = *lab_.memory().create_group("first", kUnlimited);
  Budget& second_ = *lab_.memory().create_group("second", kUnlimited);
  Budget& third_ = *lab_.memory().create_group("third", 24 * kMiB);
  std::shared_ptr<Pool> shelved_ = pool(first_);
  std::shared_ptr<Pool> idle_ = pool(second_);
  std::shared_ptr<Pool> asker_ = pool(third_);
};

TEST_F(ReclaimShelves, OfAllGroupsAreGivenBackWhenTheDeviceIsFull) {
  lab_.allocate(*asker_, 8 * kMiB);
  EXPECT_EQ(on_shelf(), 0U);
  EXPECT_EQ(idle_->idle_bytes(), 16 * kMiB) << "before any pool gives up memory";
}

TEST_F(ReclaimShelves, OfOtherGroupsComeBeforeIdleMemoryAtTheDevicesLimit) {
  lab_.memory().set_limit(lab_.memory().budget(), 64 * kMiB);
  lab_.allocate(*asker_, 8 * kMiB);
  EXPECT_LE(on_shelf(), 24 * kMiB);
  EXPECT_EQ(idle_->idle_bytes(), 16 * kMiB);
}

TEST_F(ReclaimShelves, OfOtherGroupsStayWhenALimitRefuses) {
  EXPECT_THROW(lab_.allocate(*asker_, 10 * kMiB), OutOfMemoryError);
  EXPECT_EQ(on_shelf(), 32 * kMiB) << "they would not help";
  EXPECT_EQ(idle_->idle_bytes(), 16 * kMiB);
}

TEST_F(Reclaim, IdleMemoryOfAnotherModelMovesHere) {
  const auto a = model("a");
  const auto b = model("b");
  lab_.leave_idle(*b, 32 * kMiB);
  lab_.driver.clear_calls();
  const Address block = lab_.allocate(*a, 20 * kMiB);
  EXPECT_EQ(lab_.driver.count(Call::create), 0U) << "chunks move, none is made";
  EXPECT_EQ(bytes(a), 20 * kMiB);
  EXPECT_EQ(bytes(b), 12 * kMiB) << "and no more than was asked for";
  Lab::fill(block, 20 * kMiB, 1);
  EXPECT_TRUE(Lab::holds(block, 20 * kMiB, 1));
}

TEST_F(Reclaim, TheMemoryCallbackIsAskedOnlyWhenNothingIsIdle) {
  const auto a = model("a");
  const auto b = model("b");
  Address cache = lab_.allocate(*b, 16 * kMiB);
  int asked = 0;
  lab_.memory().ladder().set_memory_callback([&] {
    ++asked;
    // No lock is held: it may free, and even allocate.
    if (cache != 0) lab_.free(cache);
    cache = 0;
    lab_.leave_idle(*b, 4096);
    return true;
  });
  lab_.leave_idle(*a, 16 * kMiB);
  lab_.allocate(*a, 16 * kMiB);
  EXPECT_EQ(asked, 0);
  lab_.allocate(*a, 14 * kMiB);
  EXPECT_EQ(asked, 1);
  lab_.memory().ladder().set_memory_callback(nullptr);
}

// torch's callbacks ask for events, which ends a capture.
TEST_F(Reclaim, TheMemoryCallbackIsNotAskedWhileACaptureRuns) {
  const auto a = model("a");
  lab_.allocate(*a, 32 * kMiB);
  int asked = 0;
  lab_.memory().ladder().set_memory_callback([&] {
    ++asked;
    return false;
  });
  lab_.memory().clock().begin_capture();
  EXPECT_THROW(lab_.allocate(*a, 2 * kMiB), OutOfMemoryError);
  EXPECT_EQ(asked, 0);
  lab_.memory().clock().end_capture();
  EXPECT_THROW(lab_.allocate(*a, 2 * kMiB), OutOfMemoryError);
  EXPECT_EQ(asked, 1);
  lab_.memory().ladder().set_memory_callback(nullptr);
}

TEST_F(Reclaim, FencesAreWaitedForOnlyWhenTheAlternativeIsAnError) {
  const auto a = model("a");
  const Address block = lab_.allocate(*a, 32 * kMiB, kOne);
  a->record_stream(block, kTwo);
  lab_.driver.hold_fences(kTwo);
  lab_.free(block);
  EXPECT_EQ(waits(), 0U);
  lab_.allocate(*a, 32 * kMiB, kOne);
  EXPECT_GT(waits(), 0U) << "everything waits for kTwo";
}

TEST_F(Reclaim, ChunksOfOtherSizesMeltIntoOnesThatFit) {
  const auto a = model("a", kPage);
  const auto b = model("b", 16 * kMiB);
  lab_.leave_idle(*b, 32 * kMiB);
  const Address block = lab_.allocate(*a, 14 * kMiB);
  EXPECT_EQ(bytes(b), 16 * kMiB) << "no more than needed";
  EXPECT_TRUE(Lab::is_zero(block, 14 * kMiB));
  lab_.allocate(*a, 16 * kMiB);
  EXPECT_EQ(bytes(b), 0U);
  EXPECT_THROW(lab_.allocate(*a, 4 * kMiB), OutOfMemoryError);
}

TEST_F(Reclaim, ARequestThatFitsSucceedsFromAnyMixOfIdleMemory) {
  const auto a = model("a", 0);
  const auto b = model("b", 4 * kMiB);
  const auto c = model("c", 0);
  for (int round = 0; round < 5; ++round) {
    lab_.leave_idle(*b, 8 * kMiB);
    lab_.leave_idle(*c, 16 * kMiB);
    lab_.leave_idle(*a, 6 * kMiB);
    lab_.leave_idle(*a, 32 * kMiB);
    lab_.leave_idle(*b, 32 * kMiB, kTwo);
    lab_.leave_idle(*c, 30 * kMiB, kOne);
    EXPECT_LE(group_.used(), 32 * kMiB);
  }
}

// Two blocks of 6 MiB on chunks of 16 leave 4 stranded in the asker; nobody has anything else.
TEST_F(Reclaim, AtALimitSmallBlocksHaveWhatLargeOnesLeft) {
  const auto a = model("a", 0);
  const auto b = model("b", 0);
  std::vector<Address> theirs;
  for (int k = 0; k < 2; ++k) theirs.push_back(lab_.allocate(*b, 16 * kMiB));
  lab_.free(theirs.back());
  lab_.allocate(*a, 6 * kMiB);
  lab_.allocate(*a, 6 * kMiB);
  ASSERT_EQ(group_.used(), 32 * kMiB);
  std::vector<Address> small;
  for (int k = 0; k < 40; ++k) {
    small.push_back(lab_.allocate(*a, 64 * kKiB));
    Lab::fill(small.back(), 64 * kKiB, 3);
  }
  for (const Address each : small) {
    EXPECT_TRUE(Lab::holds(each, 64 * kKiB, 3));
    lab_.free(each);
  }
  lab_.memory().check();
}

// ----------------------------------------------------- who yields, and how far

TEST_F(Reclaim, TheLowestPriorityYieldsFirst) {
  const auto asker = model("asker");
  const auto dear = model("dear", kPage, /*priority=*/2);
  const auto cheap = model("cheap", kPage, /*priority=*/-1);
  lab_.leave_idle(*dear, 20 * kMiB);
  lab_.leave_idle(*cheap, 12 * kMiB);
  lab_.allocate(*asker, 10 * kMiB);
  EXPECT_EQ(bytes(cheap), 2 * kMiB);
  EXPECT_EQ(bytes(dear), 20 * kMiB);
  lab_.allocate(*asker, 10 * kMiB);
  EXPECT_EQ(bytes(cheap), 0U);
  EXPECT_EQ(bytes(dear), 12 * kMiB);
}

TEST_F(Reclaim, OfEqualPriorityTheFurthestAboveItsFloorYieldsFirst) {
  const auto asker = model("asker");
  const auto near = model("near", kPage, 0, /*floor=*/16 * kMiB);
  const auto far = model("far", kPage, 0);
  lab_.leave_idle(*near, 20 * kMiB);
  lab_.leave_idle(*far, 12 * kMiB);
  lab_.allocate(*asker, 10 * kMiB);
  EXPECT_EQ(bytes(near), 20 * kMiB);
  EXPECT_EQ(bytes(far), 2 * kMiB);
}

TEST_F(Reclaim, NoOneIsTakenBelowItsFloor) {
  const auto asker = model("asker");
  const auto b = model("b", kPage, 0, /*floor=*/20 * kMiB);
  lab_.leave_idle(*b, 32 * kMiB);
  EXPECT_THROW(lab_.allocate(*asker, 14 * kMiB), OutOfMemoryError);
  EXPECT_GE(bytes(b), 20 * kMiB);
  lab_.allocate(*asker, 12 * kMiB);
  EXPECT_EQ(bytes(b), 20 * kMiB);
}

TEST_F(Reclaim, AFloorHoldsOnTheLastRungToo) {
  const auto asker = model("asker", kPage);
  const auto b = model("b", 8 * kMiB, 0, /*floor=*/20 * kMiB);
  lab_.leave_idle(*b, 32 * kMiB);
  lab_.allocate(*asker, 6 * kMiB);  // melts one chunk of 8 MiB
  EXPECT_EQ(bytes(b), 24 * kMiB);
  lab_.allocate(*asker, 4 * kMiB);  // one that lies half beneath the floor, of which that half stays reserved
  EXPECT_EQ(bytes(b), 16 * kMiB);
  EXPECT_THROW(lab_.allocate(*asker, 4 * kMiB), OutOfMemoryError);
  EXPECT_EQ(bytes(b), 16 * kMiB);
  lab_.allocate(*b, 16 * kMiB);  // in pages of 8
}

// ----------------------------------------------------- hand-over without waits

TEST_F(Reclaim, AHandOverUnderHeldFencesWaitsForNothing) {
  const auto a = model("a");
  const auto b = model("b");
  const Address old = lab_.allocate(*a, 32 * kMiB, kOne);
  Lab::fill(old, 32 * kMiB, 1);
  lab_.driver.hold_fences(kOne);
  lab_.free(old);
  lab_.driver.clear_calls();
  const Address block = lab_.allocate(*b, 32 * kMiB, kTwo);
  EXPECT_EQ(waits(), 0U);
  EXPECT_EQ(lab_.driver.count(Call::create), 0U);
  EXPECT_EQ(lab_.driver.count(Call::unmap), 0U) << "kOne may still write through the old addresses";
  // Before b's work may touch it: kTwo comes after kOne, then it is zeroed.
  std::uint64_t ordered = 0;
  std::uint64_t mapped = 0;
  std::size_t filled = 0;
  for (const CallRecord& call : lab_.driver.calls()) {
    if (call.call == Call::stream_wait && ordered == 0) {
      EXPECT_EQ(call.a, number(kTwo));
      ordered = call.number;
    }
    if (call.call == Call::set_access) mapped = call.number;
    if (call.call == Call::fill_async) {
      EXPECT_NE(ordered, 0U);
      EXPECT_NE(mapped, 0U);
      filled += call.c;
    }
  }
  EXPECT_EQ(filled, 32 * kMiB) << "all of it";
  EXPECT_TRUE(Lab::is_zero(block, 32 * kMiB));
  // The numbers know where it is: in b; a's former addresses hold nothing.
  EXPECT_EQ(bytes(a), 0U);
  EXPECT_EQ(bytes(b), 32 * kMiB);
  lab_.driver.release_fences();
  a->settle();
  EXPECT_EQ(lab_.driver.live_mapped_bytes(), 64 * kMiB) << "in case they come back";
  lab_.free(block);
  lab_.memory().empty_cache();
  EXPECT_EQ(lab_.driver.live_mapped_bytes(), 0U);
}

TEST_F(Reclaim, AddressesThatWaitForTheirFenceAreHandedToNoOne) {
  const auto a = model("a");
  const auto b = model("b");
  const Address old = lab_.allocate(*a, 16 * kMiB, kOne);
  lab_.driver.hold_fences(kOne);
  lab_.free(old);
  lab_.allocate(*b, 32 * kMiB, kTwo);
  lab_.memory().set_limit(group_, 64 * kMiB);
  const Address fresh = lab_.allocate(*a, 16 * kMiB, kTwo);
  EXPECT_TRUE(fresh + 16 * kMiB <= old || old + 16 * kMiB <= fresh);
}

TEST_F(Reclaim, MemoryThatChangesItsModelIsZeroed) {
  const auto a = model("a");
  const auto b = model("b");
  const Address block = lab_.allocate(*a, 32 * kMiB);
  Lab::fill(block, 32 * kMiB, 1);
  lab_.free(block);
  EXPECT_TRUE(Lab::is_zero(lab_.allocate(*b, 32 * kMiB), 32 * kMiB));
}

TEST_F(Reclaim, MemoryThatComesBackByTheShelfIsZeroedForOthersOnly) {
  const auto a = model("a");
  const auto b = model("b");
  const Address pages = lab_.memory().allocate_pages(*a, 0, 8 * kMiB, kOne);
  Lab::fill(pages, 8 * kMiB, 1);
  lab_.memory().deallocate_pages(*a, 0, 8 * kMiB);
  lab_.memory().allocate_pages(*a, 8 * kMiB, 4 * kMiB, kOne);
  EXPECT_EQ(lab_.driver.count(Call::fill_async), 0U) << "its own data is no secret to it";
  EXPECT_TRUE(Lab::is_zero(lab_.allocate(*b, 4 * kMiB, kTwo), 4 * kMiB));
  EXPECT_EQ(lab_.driver.count(Call::create), 4U) << "the shelf's chunks";
}

TEST(ReclaimScrub, CanBeTurnedOff) {
  LabSpec spec;
  spec.options.scrub = false;
  Lab lab(spec);
  const auto owned = lab.memory().create_group("shared", 8 * kMiB);
  Budget& group = *owned;
  const auto a = lab.pool(Lab::spec("a"), &group);
  const auto b = lab.pool(Lab::spec("b"), &group);
  lab.leave_idle(*a, 8 * kMiB);
  lab.allocate(*b, 8 * kMiB);
  EXPECT_EQ(lab.driver.count(Call::fill_async), 0U);
}

TEST(HalfDone, AScrubThatFailsTogetherWithEveryUnmapLeavesOneOwner) {
  Lab lab;
  const auto group = lab.memory().create_group("group", 8 * kMiB);
  const auto a = lab.pool(Lab::spec("a"), group.get());
  const auto b = lab.pool(Lab::spec("b"), group.get());
  const Address mine = lab.allocate(*a, 8 * kMiB);
  Lab::fill(mine, 8 * kMiB, 3);
  lab.free(mine);
  lab.driver.fail_nth(Call::fill_async, 1, broken(), Repeat::from_then_on);
  lab.driver.fail_nth(Call::unmap, 1, broken(), Repeat::from_then_on);
  EXPECT_THROW(lab.memory().allocate(*b, 8 * kMiB, nullptr), VmmError);
  lab.memory().check();
  lab.driver.clear_failures();
  const Address theirs = lab.allocate(*b, 8 * kMiB);
  EXPECT_TRUE(Lab::is_zero(theirs, 8 * kMiB));
  lab.memory().settle(/*wait=*/true);
  lab.memory().check();
}

// ------------------------------------------------------------ exported memory

LabSpec exportable() {
  LabSpec spec;
  spec.options.exportable = true;
  return spec;
}

TEST(Exported, MemoryThatAnotherProcessHasHadServesNoOtherModel) {
  Lab lab(exportable());
  const auto group = lab.memory().create_group("group", 8 * kMiB);
  const auto a = lab.pool(Lab::spec("a"), group.get());
  const auto b = lab.pool(Lab::spec("b"), group.get());
  const Address block = lab.allocate(*a, 4 * kMiB);
  Lab::fill(block, 4 * kMiB, 1);
  const auto views = a->chunks_to_export(block, 4 * kMiB);
  ASSERT_FALSE(views.empty());
  std::vector<int> fds;
  for (const ChunkView& view : views) {
    int fd = -1;
    ASSERT_TRUE(lab.driver.export_chunk(view.handle, &fd).ok());
    fds.push_back(fd);
  }
  lab.free(block);
  EXPECT_EQ(a->memory_stats().idle_bytes, 4 * kMiB);
  EXPECT_EQ(lab.allocate(*a, 4 * kMiB), block) << "its own model uses it where it stands";
  lab.free(block);
  for (int round = 0; round < 2; ++round) {
    const Address other = lab.allocate(*b, 8 * kMiB);
    EXPECT_TRUE(Lab::is_zero(other, 8 * kMiB));
    for (const ChunkView& mine : b->chunks_under(other, 8 * kMiB)) {
      for (const ChunkView& exported : views) EXPECT_NE(mine.handle, exported.handle);
    }
    lab.free(other);
  }
  for (const int fd : fds) ::close(fd);
}

TEST(Exported, MemoryMovesNowhere) {
  Lab lab(exportable());
  const auto group = lab.memory().create_group("group", 12 * kMiB);
  const auto pool = lab.pool(Lab::spec("a"), group.get());
  const Address exported = lab.allocate(*pool, 4 * kMiB);
  lab.allocate(*pool, 4 * kMiB);
  const Address other = lab.allocate(*pool, 4 * kMiB);
  const auto views = pool->chunks_to_export(exported, 4 * kMiB);
  ASSERT_FALSE(views.empty());
  lab.free(exported);
  lab.free(other);
  const Address both = lab.allocate(*pool, 8 * kMiB);  // which stand apart, and there is no more
  for (const ChunkView& under : pool->chunks_under(both, 8 * kMiB)) {
    for (const ChunkView& view : views) EXPECT_NE(under.number, view.number);
  }
}

TEST(Exported, MemoryIsReleasedRatherThanShelved) {
  for (const bool late : {false, true}) {
    Lab lab(exportable());
    const auto pool = lab.pool("a");
    const Address block = lab.allocate(*pool, 4 * kMiB, kOne);
    static_cast<void>(pool->chunks_to_export(block, 4 * kMiB));
    if (late) lab.driver.hold_fences(kOne);
    lab.free(block);
    pool->shed(0);
    lab.memory().store().trim(pool->group(), kUnlimited);  // may keep all there is
    EXPECT_EQ(lab.driver.live_chunk_bytes(), late ? 4 * kMiB : 0U);
    lab.driver.clear_calls();
    const Address other = lab.allocate(*pool, 4 * kMiB, kOne);
    EXPECT_GT(lab.driver.count(Call::create), 0U);
    lab.driver.release_fences();
    lab.free(other);
    lab.memory().empty_cache();
    EXPECT_EQ(lab.driver.live_chunk_bytes(), 0U);
  }
}

}  // namespace
}  // namespace vmm::testing
