// The margin: the last 32nd of a limit that models share is taken once nobody has idle memory.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "lab.h"

namespace vmm::testing {
namespace {

class LimitMargin : public ::testing::Test {
 protected:
  // Units of 8 MiB, and of them 6.25 are the margin.
  static constexpr std::size_t kLimit = 200 * 8 * kMiB;
  static constexpr std::size_t kMargin = kLimit / 32;
  static constexpr std::size_t kLargeLimit = 16 * kGiB;

  std::shared_ptr<Pool> model(const std::string& name, int priority = 0, std::size_t floor = 0) {
    PoolSpec spec = Lab::spec(name);
    spec.capacity = 8 * kGiB;
    spec.priority = priority;
    spec.floor = floor;
    return lab_.pool(spec, group_.get());
  }
  // Eight, with a limit of 16 GiB: units are 16 MiB.
  std::vector<std::shared_ptr<Pool>> more_than_are_asked() {
    lab_.memory().set_limit(*group_, kLargeLimit);
    std::vector<std::shared_ptr<Pool>> models;
    for (int k = 0; k < 8; ++k) models.push_back(model("holed " + std::to_string(k)));
    return models;
  }
  // Without a check, which walks.
  Address allocate(Pool& pool, std::size_t bytes, Stream on = nullptr) {
    const Address address = lab_.memory().allocate(pool, bytes, on);
    lab_.adopt(address);
    return address;
  }
  // Takes `bytes` in blocks of 24 MiB.
  std::vector<Address> take(Pool& pool, std::size_t bytes) {
    std::vector<Address> blocks;
    for (std::size_t left = bytes; left >= 24 * kMiB; left -= 24 * kMiB) {
      blocks.push_back(lab_.allocate(pool, 24 * kMiB));
      most_used_ = std::max(most_used_, group_->used());
    }
    return blocks;
  }
  void take_up_to_margin(Pool& pool) { take(pool, kLimit - kMargin - group_->used()); }
  // In whole units.
  void fill_up_to_margin(Pool& pool) {
    take_up_to_margin(pool);
    lab_.allocate(pool, align_down(kLimit - kMargin - group_->used(), 8 * kMiB));
  }
  // So many times blocks of these sizes: without another model each has chunks of its own.
  std::vector<Address> take_each(Pool& pool, int times, const std::vector<std::size_t>& sizes, Stream on = nullptr) {
    std::vector<Address> blocks;
    for (int k = 0; k < times; ++k) {
      for (const std::size_t bytes : sizes) blocks.push_back(lab_.allocate(pool, bytes, on));
    }
    return blocks;
  }
  // How often `other` is looked through for so much of `pool`'s.
  std::size_t walks(Pool& other, Pool& pool, std::size_t bytes) {
    const std::size_t before = other.times_walked();
    allocate(pool, bytes);
    return other.times_walked() - before;
  }
  void free(const std::vector<Address>& blocks) {
    for (const Address block : blocks) lab_.free(block);
  }
  // Nobody but other models has been asked for memory.
  void expect_no_climb(Pool& pool) {
    EXPECT_EQ(pool.statistics().num_alloc_retries, 0);
    EXPECT_EQ(lab_.driver.count(Call::wait) + lab_.driver.count(Call::synchronize), 0U);
  }

  Lab lab_{LabSpec{64 * kGiB}};
  const std::shared_ptr<Budget> group_ = lab_.memory().create_group("shared", kLimit);
  std::size_t most_used_ = 0;
};

TEST_F(LimitMargin, StaysWhileOthersHaveIdleMemory) {
  const auto a = model("a");
  const auto b = model("b");
  for (int turn = 0; turn < 4; ++turn) free(take(turn % 2 == 0 ? *a : *b, kLimit * 3 / 4));
  EXPECT_LE(most_used_, kLimit - kMargin);
  EXPECT_GE(most_used_, kLimit - kMargin - 24 * kMiB) << "and no more than that stays";
  expect_no_climb(*a);
  expect_no_climb(*b);
}

TEST_F(LimitMargin, IsTheirsWhenNobodyHas) {
  const auto a = model("a");
  const auto b = model("b");
  take(*a, kLimit / 2);
  lab_.allocate(*b, 32 * kMiB);
  int called = 0;
  lab_.memory().set_on_pressure(*group_, [&](std::size_t /*bytes*/, const std::shared_ptr<Pool>& /*asker*/) {
    ++called;
    return false;
  });
  take(*b, kLimit - group_->used());
  EXPECT_GT(group_->used(), kLimit - 24 * kMiB);
  EXPECT_EQ(called, 0);
  expect_no_climb(*b);
  EXPECT_EQ(lab_.memory().ladder().log().report_of(b->id()).requests, 0U);
  lab_.memory().set_on_pressure(*group_, nullptr);
}

// What fits nowhere goes back to the driver, and makes room: a place of 6 MiB between what a
// model took while it was alone and the next multiple of a unit.
TEST_F(LimitMargin, StaysWhereUnitsDoNotFit) {
  const auto a = model("a");
  std::size_t left = kLimit - kMargin - 68 * kMiB;
  for (; left >= 68 * kMiB; left -= 34 * kMiB) lab_.allocate(*a, 34 * kMiB);
  const Address last = lab_.allocate(*a, left);
  const auto b = model("b");
  lab_.allocate(*b, 4 * kMiB);
  lab_.leave_idle(*b, 64 * kMiB);
  ASSERT_EQ(group_->used(), kLimit - kMargin);
  lab_.free(last);
  lab_.allocate(*a, left + 6 * kMiB);
  EXPECT_EQ(a->physical_bytes(), kLimit - kMargin - 62 * kMiB);
  EXPECT_EQ(b->physical_bytes(), 60 * kMiB);
  EXPECT_EQ(group_->used(), kLimit - kMargin - 2 * kMiB);
  expect_no_climb(*a);
}

TEST_F(LimitMargin, StaysBesideSmallBlocksToo) {
  const auto a = model("a");
  const auto b = model("b");
  free(take(*a, kLimit / 2));
  take_up_to_margin(*b);
  const std::size_t of_a = a->physical_bytes();
  for (int k = 0; k < 40; ++k) {
    lab_.allocate(*b, 1900 * kKiB);
    EXPECT_LE(group_->used(), kLimit - kMargin);
  }
  EXPECT_LT(a->physical_bytes(), of_a);
  EXPECT_GE(a->physical_bytes(), of_a - 12 * 8 * kMiB);
  expect_no_climb(*b);
}

TEST_F(LimitMargin, NothingIsTakenFromAHigherPriority) {
  const auto important = model("important", 1);
  const auto b = model("b");
  free(take(*important, kLimit / 2));
  const std::size_t idle = important->physical_bytes();
  take(*b, kLimit - group_->used());
  EXPECT_EQ(important->physical_bytes(), idle);
  EXPECT_GT(group_->used(), kLimit - 24 * kMiB);
}

TEST_F(LimitMargin, WhatAFloorReservedIsHadWithoutAQuestion) {
  const auto a = model("a");
  const auto b = model("b", 0, kLimit / 2);
  free(take(*a, kLimit / 2));
  const std::size_t idle = a->physical_bytes();
  take(*b, kLimit / 2);
  EXPECT_EQ(a->physical_bytes(), idle);
}

TEST_F(LimitMargin, NorFromBeneathAFloor) {
  const auto a = model("a", 0, kLimit / 2);
  const auto b = model("b");
  free(take(*a, kLimit / 2));
  const std::size_t idle = a->physical_bytes();
  take(*b, kLimit - group_->used());
  EXPECT_EQ(a->physical_bytes(), idle);
}

TEST_F(LimitMargin, NothingIsTakenForWhatCannotBeMet) {
  const auto a = model("a");
  const auto b = model("b");
  free(take(*a, kLimit / 2));
  lab_.allocate(*b, 64 * kMiB);
  const std::size_t idle = a->physical_bytes();
  EXPECT_THROW(lab_.allocate(*b, kLimit + kPage), OutOfMemoryError);
  EXPECT_EQ(a->physical_bytes(), idle);
}

// Idle memory that queued work may still use is not waited for.
TEST_F(LimitMargin, NobodyWaitsForTheGpu) {
  const auto a = model("a");
  const auto b = model("b");
  std::vector<Address> blocks;
  for (std::size_t left = kLimit / 2; left >= 24 * kMiB; left -= 24 * kMiB) {
    blocks.push_back(lab_.allocate(*a, 24 * kMiB, stream(1)));
    a->record_stream(blocks.back(), stream(2));
  }
  lab_.driver.hold_fences(stream(2));
  free(blocks);
  take(*b, kLimit - group_->used());
  EXPECT_GT(group_->used(), kLimit - 24 * kMiB);
  expect_no_climb(*b);
}

TEST_F(LimitMargin, TheReportSaysWhoYielded) {
  const auto a = model("a");
  const auto b = model("b");
  free(take(*a, kLimit * 3 / 4));
  take(*b, kLimit / 4);
  const ReclaimReport report = lab_.memory().ladder().log().report_of(b->id());
  ASSERT_FALSE(report.latest.empty());
  const ReclaimDecision& latest = report.latest.back();
  const ReclaimStep& step = latest.steps.at(static_cast<std::size_t>(Rung::other_models));
  EXPECT_EQ(step.result, StepResult::met);
  ASSERT_EQ(step.yielded.size(), 1U);
  EXPECT_EQ(step.yielded.front().pool, "a");
  EXPECT_EQ(latest.refused_by, "shared");
  EXPECT_EQ(latest.asker, "b");
}

TEST_F(LimitMargin, ATagHasItsModelsFloorWithoutAQuestionToo) {
  const auto a = model("a");
  const auto b = model("b", 0, kLimit / 2);
  const auto tag = lab_.memory().tagged(b, "weights");
  free(take(*a, kLimit / 2));
  const std::size_t idle = a->physical_bytes();
  take(*tag, kLimit / 2);
  EXPECT_EQ(a->physical_bytes(), idle);
}

// A block of 512 bytes costs another model no more than a unit, whatever its chunks are.
TEST_F(LimitMargin, LittleIsTakenForLittle) {
  const auto a = model("a");
  lab_.leave_idle(*a, 400 * kMiB);  // alone: large chunks
  const auto b = model("b");
  take_up_to_margin(*b);
  const std::size_t of_a = a->physical_bytes();
  for (const std::size_t bytes : {std::size_t{512}, 2 * kMiB, 8 * kMiB}) lab_.allocate(*b, bytes);
  lab_.memory().allocate_pages(*b, 4 * kGiB, kPage, nullptr);
  EXPECT_EQ(a->physical_bytes(), of_a) << "none of its chunks is that small";
  EXPECT_LE(group_->used(), kLimit - kMargin + 24 * kMiB);
  expect_no_climb(*b);
  b->drop_pages();
}

TEST_F(LimitMargin, StreamsOfLittleStrandNoUnitsOfOthers) {
  const auto a = model("a");
  const auto b = model("b");
  free(take(*a, kLimit / 2));
  take_up_to_margin(*b);
  const std::size_t before = b->physical_bytes();
  for (std::uintptr_t k = 1; k <= 16; ++k) lab_.allocate(*b, 512, stream(k));
  EXPECT_LE(b->physical_bytes(), before + 16 * kPage);
  take(*a, kLimit / 2 - 5 * 8 * kMiB);
}

// Once others have been asked the margin is open for every rung: nobody is called for more
// than there is.
TEST_F(LimitMargin, NobodyIsCalledForItAfterARefusal) {
  const auto a = model("a");
  const auto b = model("b");
  lab_.allocate(*b, 32 * kMiB);
  std::vector<Address> blocks = take(*a, kLimit - group_->used());
  int called = 0;
  lab_.memory().set_on_pressure(*group_, [&](std::size_t /*bytes*/, const std::shared_ptr<Pool>& /*asker*/) {
    ++called;
    lab_.free(blocks.back());
    blocks.pop_back();
    lab_.memory().trim(*a, 0);
    return true;
  });
  lab_.allocate(*b, kLimit - group_->used() + 16 * kMiB);
  EXPECT_EQ(called, 1) << "a unit";
  lab_.allocate(*b, 512);
  lab_.allocate(*b, 1900 * kKiB);
  EXPECT_EQ(called, 1) << "there is room";
  lab_.allocate(*b, kLimit - group_->used());
  called = 0;
  lab_.allocate(*b, 512, stream(7));
  EXPECT_EQ(called, 1) << "a slab";
  lab_.free(blocks.back());
  blocks.pop_back();
  a->shed(0);
  called = 0;
  for (std::uintptr_t k = 8; k < 12; ++k) lab_.allocate(*b, 512, stream(k));
  EXPECT_EQ(called, 0) << "what rests on the shelf makes room";
  lab_.memory().set_on_pressure(*group_, nullptr);
}

// Where there is not even the margin what others have is handed over, as ever.
TEST_F(LimitMargin, NothingIsCreatedWhereOthersHaveAll) {
  const std::size_t limit = 8 * kGiB;
  lab_.memory().set_limit(*group_, limit);
  std::vector<std::shared_ptr<Pool>> others;
  std::vector<Address> idle;
  for (int k = 0; k < 12; ++k) others.push_back(model("other " + std::to_string(k)));
  const auto b = model("b");
  for (const auto& other : others) {
    lab_.allocate(*other, 512 * kMiB);
    idle.push_back(lab_.allocate(*other, 24 * kMiB));
  }
  lab_.allocate(*b, limit - group_->used());
  free(idle);
  lab_.driver.clear_calls();
  lab_.allocate(*b, 30 * 8 * kMiB);
  EXPECT_EQ(lab_.driver.count(Call::create) + lab_.driver.count(Call::release), 0U);
}

// Few are asked, but those who have something.
TEST_F(LimitMargin, TheNinthOfTenModelsIsAsked) {
  lab_.memory().set_limit(*group_, 16 * kGiB);  // units of 16 MiB
  std::vector<std::shared_ptr<Pool>> full;
  for (int k = 0; k < 8; ++k) full.push_back(model("full " + std::to_string(k)));
  const auto idle = model("idle");
  const auto b = model("b");
  for (const auto& each : full) lab_.allocate(*each, 1008 * kMiB);
  lab_.leave_idle(*idle, 800 * kMiB);
  const std::size_t had = idle->physical_bytes();
  lab_.allocate(*b, 16 * kGiB - 16 * kGiB / 32 - group_->used());
  for (int k = 0; k < 10; ++k) lab_.allocate(*b, 16 * kMiB);
  EXPECT_LE(idle->physical_bytes(), had - 9 * 16 * kMiB);
}

// Who had nothing idle is not looked through again until something is freed there.
TEST_F(LimitMargin, NobodyIsLookedThroughTwiceForNothing) {
  const auto a = model("a");
  const auto b = model("b");
  const std::vector<Address> blocks = take(*a, kLimit / 2);
  free(blocks);
  std::vector<Address> live;
  std::vector<Address> freed;
  for (std::size_t k = 0; k < kLimit / 2 / (4 * kMiB); ++k)
    (k % 2 == 0 ? live : freed).push_back(lab_.allocate(*a, 4 * kMiB));
  free(freed);
  ASSERT_EQ(a->idle_bytes(), 0U);
  take(*b, kLimit - 2 * kMargin - group_->used());
  lab_.allocate(*b, align_down(kLimit - kMargin - group_->used(), 8 * kMiB));
  EXPECT_GE(walks(*a, *b, 8 * kMiB), 1U);
  EXPECT_EQ(walks(*a, *b, 8 * kMiB), 0U);
  lab_.free(live.back());
  EXPECT_GE(walks(*a, *b, 8 * kMiB), 1U) << "or it would not know";
}

// Chunks of other sizes stand side by side in the places of units: nothing is created, and
// nothing goes back to the driver, which would wait for what is queued.
TEST_F(LimitMargin, WhatIsNoUnitFillsPlacesUp) {
  const auto a = model("a");
  const std::vector<Address> blocks = take_each(*a, 20, {6 * kMiB, 2 * kMiB});
  const auto b = model("b");
  fill_up_to_margin(*b);
  free(blocks);
  const std::size_t used = group_->used();
  const std::size_t of_a = a->physical_bytes();
  lab_.driver.clear_calls();
  for (int k = 0; k < 3; ++k) lab_.allocate(*b, 24 * kMiB);
  EXPECT_EQ(lab_.driver.count(Call::create) + lab_.driver.count(Call::release), 0U);
  EXPECT_EQ(group_->used(), used);
  EXPECT_EQ(a->physical_bytes(), of_a - 72 * kMiB);
  expect_no_climb(*b);
}

TEST_F(LimitMargin, SoDoItsOwn) {
  const auto b = model("b");
  const std::vector<Address> blocks = take_each(*b, 20, {6 * kMiB, 2 * kMiB});
  const auto a = model("a");
  fill_up_to_margin(*a);
  for (std::size_t k = 0; k < blocks.size(); ++k) {
    if (k % 8 < 6) lab_.free(blocks[k]);  // three units long: 32 MiB are nowhere free
  }
  const std::size_t used = group_->used();
  lab_.driver.clear_calls();
  for (int k = 0; k < 3; ++k) lab_.allocate(*b, 32 * kMiB);
  EXPECT_EQ(lab_.driver.count(Call::create) + lab_.driver.count(Call::release), 0U);
  EXPECT_EQ(group_->used(), used);
}

// Those that do not fill a place whole make room for units instead.
TEST_F(LimitMargin, WhatFillsNoPlaceGoesBackToTheDriver) {
  const auto a = model("a");
  const std::vector<Address> blocks = take_each(*a, 40, {6 * kMiB});
  const auto b = model("b");
  fill_up_to_margin(*b);
  free(blocks);
  const std::size_t of_a = a->physical_bytes();
  for (int k = 0; k < 6; ++k) {
    lab_.allocate(*b, 24 * kMiB);
    EXPECT_LE(group_->used(), kLimit - kMargin);
  }
  EXPECT_EQ(a->physical_bytes(), of_a - 23 * 6 * kMiB);
  expect_no_climb(*b);
}

TEST_F(LimitMargin, SoDoesWhatIsLongerThanAUnit) {
  const auto a = model("a");
  const std::vector<Address> blocks = take_each(*a, 20, {12 * kMiB});
  const auto b = model("b");
  fill_up_to_margin(*b);
  free(blocks);
  for (int k = 0; k < 6; ++k) {
    lab_.allocate(*b, 24 * kMiB);
    EXPECT_LE(group_->used(), kLimit - kMargin);
  }
  expect_no_climb(*b);
}

// But not while queued work may use it: then no room would come of it yet.
TEST_F(LimitMargin, NothingInUseGoesBackToTheDriver) {
  const auto a = model("a");
  const std::vector<Address> blocks = take_each(*a, 20, {12 * kMiB}, stream(7));
  const auto b = model("b");
  take_up_to_margin(*b);
  lab_.driver.hold_fences(stream(7));
  free(blocks);
  lab_.driver.clear_calls();
  lab_.allocate(*b, 40 * kMiB);
  EXPECT_EQ(lab_.driver.count(Call::release), 0U);
  expect_no_climb(*b);
  lab_.driver.release_fences(stream(7));
}

// A look tells what sizes there are, and holds until something is freed.
TEST_F(LimitMargin, WhatDoesNotSuitIsLookedForOnce) {
  const auto a = model("a");
  lab_.leave_idle(*a, 400 * kMiB);  // alone: large chunks
  const auto b = model("b");
  fill_up_to_margin(*b);
  walks(*a, *b, 8 * kMiB);
  EXPECT_EQ(walks(*a, *b, 8 * kMiB), 0U);
  EXPECT_EQ(walks(*a, *b, 2 * kMiB), 0U);
}

// So its owner has it again at once, on its own stream.
TEST_F(LimitMargin, WhatIsInUseIsNotTakenForNothing) {
  const auto a = model("a");
  const std::vector<Address> blocks = take_each(*a, 14, {6 * kMiB}, stream(7));
  const auto b = model("b");
  fill_up_to_margin(*b);
  lab_.driver.hold_fences(stream(7));
  free(blocks);
  const std::size_t of_a = a->physical_bytes();
  for (int k = 0; k < 5; ++k) lab_.allocate(*b, 8 * kMiB, stream(8));
  EXPECT_EQ(a->physical_bytes(), of_a);
  EXPECT_EQ(lab_.memory().store().shelved_bytes(*group_), 0U);
  const std::size_t used = group_->used();
  lab_.driver.clear_calls();
  for (int k = 0; k < 14; ++k) lab_.allocate(*a, 6 * kMiB, stream(7));
  EXPECT_EQ(group_->used(), used);
  EXPECT_EQ(lab_.driver.count(), 0U);
  lab_.driver.release_fences(stream(7));
}

TEST_F(LimitMargin, WhatIsInUseHidesNothingElse) {
  const auto a = model("a");
  const std::vector<Address> used = take_each(*a, 14, {6 * kMiB}, stream(7));
  const std::vector<Address> unused = take_each(*a, 14, {12 * kMiB}, stream(8));
  const auto b = model("b");
  fill_up_to_margin(*b);
  free(unused);
  lab_.memory().wait_for(lab_.memory().clock().now());
  lab_.driver.hold_fences(stream(7));
  free(used);
  for (int k = 0; k < 3; ++k) {
    lab_.allocate(*b, 32 * kMiB, stream(9));
    EXPECT_LE(group_->used(), kLimit - kMargin);
  }
  lab_.driver.release_fences(stream(7));
}

// One question for all that is in use, and none until something has passed since.
TEST_F(LimitMargin, WhatIsInUseIsAskedAfterOnce) {
  const auto a = model("a");
  const std::vector<Address> blocks = take_each(*a, 30, {12 * kMiB}, stream(7));
  const auto b = model("b");
  fill_up_to_margin(*b);
  lab_.driver.hold_fences(stream(7));
  free(blocks);
  for (int k = 0; k < 5; ++k) {
    lab_.driver.clear_calls();
    const std::size_t before = a->times_walked();
    allocate(*b, 8 * kMiB, stream(8));
    EXPECT_LE(lab_.driver.count(Call::query), 8U);
    EXPECT_LE(a->times_walked() - before, k < 3 ? 3U : 0U);
  }
  lab_.driver.release_fences(stream(7));
}

// What rests on the shelf and fits nowhere goes back, as much as is taken of the margin.
TEST_F(LimitMargin, AsMuchOfTheShelfGoesBack) {
  const auto a = model("a");
  const std::vector<Address> blocks = take_each(*a, 4, {6 * kMiB});
  const auto b = model("b");
  fill_up_to_margin(*b);
  free(blocks);
  a->shed(0);
  ASSERT_EQ(lab_.memory().store().shelved_bytes(*group_), 24 * kMiB);
  lab_.allocate(*b, 8 * kMiB);
  EXPECT_EQ(lab_.memory().store().shelved_bytes(*group_), 18 * kMiB);
  EXPECT_LE(group_->used(), kLimit - kMargin);
}

// Units that a little block cannot stand on are not lost for it.
TEST_F(LimitMargin, TheShelfKeepsWhatIsNotLacking) {
  const auto a = model("a");
  const auto b = model("b");
  const std::vector<Address> blocks = take(*a, 384 * kMiB);
  fill_up_to_margin(*b);
  free(blocks);
  a->shed(0);
  for (std::uintptr_t k = 20; k < 23; ++k) lab_.allocate(*b, 512, stream(k));
  const std::size_t before = lab_.memory().store().shelved_bytes(*group_);
  lab_.allocate(*b, 512, stream(23));
  EXPECT_GE(lab_.memory().store().shelved_bytes(*group_), before - 8 * kMiB);
  EXPECT_LE(group_->used(), kLimit - kMargin);
}

// A little of the pool's own and a little of another's fill a unit.
TEST_F(LimitMargin, OwnAndOthersFillAUnitTogether) {
  const auto b = model("b");
  const std::vector<Address> blocks = take_each(*b, 20, {6 * kMiB, 2 * kMiB});
  const auto a = model("a");
  const Address little = lab_.allocate(*a, 512, stream(12));
  for (std::uintptr_t k = 31; k < 34; ++k) lab_.allocate(*a, 20 * kMiB, stream(k));
  fill_up_to_margin(*a);
  take_each(*a, 3, {1900 * kKiB}, stream(11));
  for (std::size_t k = 30; k < blocks.size(); k += 2) lab_.free(blocks[k]);
  lab_.free(little);
  const std::size_t used = group_->used();
  lab_.driver.clear_calls();
  lab_.allocate(*b, 8 * kMiB);
  EXPECT_EQ(lab_.driver.count(Call::create), 0U);
  EXPECT_EQ(lab_.driver.count(Call::release), 0U);
  EXPECT_EQ(group_->used(), used);
}

// No other model can help whom a limit of its own refuses.
TEST_F(LimitMargin, NobodyIsAskedForWhatAnotherLimitRefuses) {
  const auto a = model("a");
  PoolSpec spec = Lab::spec("b", 1160 * kMiB);
  spec.capacity = 8 * kGiB;
  const auto b = lab_.pool(spec, group_.get());
  const std::vector<Address> blocks = take(*a, 384 * kMiB);
  lab_.allocate(*b, 1158 * kMiB);
  free(blocks);
  const std::size_t before = a->times_walked();
  EXPECT_THROW(lab_.memory().allocate(*b, 24 * kMiB, nullptr), OutOfMemoryError);
  EXPECT_EQ(a->times_walked(), before);
}

TEST_F(LimitMargin, StaysWhereARequestClimbs) {
  const auto a = model("a");
  const auto b = model("b");
  free(take(*a, kLimit / 2));
  take(*b, kLimit / 2 - 40 * kMiB);
  lab_.allocate(*b, 120 * kMiB);
  EXPECT_LE(group_->used(), kLimit - kMargin);
}

TEST_F(LimitMargin, IsTakenWhereARequestClimbsBeforeMoreOfAnImportantModelIs) {
  const auto important = model("important", 1);
  const auto b = model("b");
  free(take(*important, kLimit / 2));
  take(*b, kLimit / 2 - 40 * kMiB);
  const std::size_t room = kLimit - group_->used();
  const std::size_t idle = important->physical_bytes();
  ASSERT_EQ(room, 64 * kMiB);
  lab_.allocate(*b, room + 16 * kMiB);
  EXPECT_EQ(idle - important->physical_bytes(), 16 * kMiB);
}

// Once the work that was queued has passed.
TEST_F(LimitMargin, WhatWasInUseIsTakenAfterIt) {
  const auto a = model("a");
  const std::vector<Address> blocks = take_each(*a, 30, {12 * kMiB}, stream(7));
  const auto b = model("b");
  fill_up_to_margin(*b);
  lab_.driver.hold_fences(stream(7));
  free(blocks);
  for (int k = 0; k < 4; ++k) allocate(*b, 8 * kMiB, stream(8));
  lab_.driver.release_fences(stream(7));
  const std::size_t of_a = a->physical_bytes();
  allocate(*b, 8 * kMiB, stream(8));
  EXPECT_LT(a->physical_bytes(), of_a);
}

// Nor are those of which queued work uses all that would do.
TEST_F(LimitMargin, NobodyWhoseMemoryIsInUseTakesThePlaceOfWhoHas) {
  const std::vector<std::shared_ptr<Pool>> holed = more_than_are_asked();
  const auto idle = model("idle");
  const auto b = model("b");
  std::vector<Address> freed;
  for (const auto& each : holed) {
    allocate(*each, 1000 * kMiB, stream(7));
    for (int k = 0; k < 60; ++k) {
      const Address block = allocate(*each, 3 * kMiB, stream(7));
      if (k % 3 != 0) freed.push_back(block);
    }
  }
  lab_.leave_idle(*idle, 480 * kMiB);
  const std::size_t had = idle->physical_bytes();
  allocate(*b, kLargeLimit - kLargeLimit / 32 - group_->used(), stream(8));
  Clock& clock = lab_.memory().clock();
  clock.cover(clock.now());  // that nobody uses what is idle is known before
  clock.poll();
  lab_.driver.hold_fences(stream(7));
  free(freed);
  const std::size_t used = group_->used();
  for (int k = 0; k < 10; ++k) allocate(*b, 16 * kMiB, stream(8));
  EXPECT_GE(had - idle->physical_bytes(), 8 * 16 * kMiB);
  EXPECT_LE(group_->used(), used + 2 * 16 * kMiB);
  lab_.driver.release_fences(stream(7));
}

// Those that were seen to have nothing are not among the few that are asked.
TEST_F(LimitMargin, NobodyWithoutAnythingTakesThePlaceOfWhoHas) {
  const std::vector<std::shared_ptr<Pool>> holed = more_than_are_asked();
  const auto idle = model("idle");
  const auto b = model("b");
  for (const auto& each : holed) {
    std::vector<Address> freed;
    allocate(*each, 64 * kMiB);
    for (int k = 0; k < 64; ++k) {
      allocate(*each, 9 * kMiB);
      freed.push_back(allocate(*each, 7 * kMiB));
    }
    free(freed);
    while (each->idle_bytes() != 0) allocate(*each, each->idle_bytes());
  }
  lab_.leave_idle(*idle, 640 * kMiB);
  const std::size_t had = idle->physical_bytes();
  allocate(*b, kLargeLimit - kLargeLimit / 32 - group_->used());
  for (int k = 0; k < 10; ++k) allocate(*b, 16 * kMiB);
  EXPECT_LE(idle->physical_bytes(), had - 8 * 16 * kMiB);
}

TEST_F(LimitMargin, OfALimitFurtherUpToo) {
  const auto a = model("a");
  const auto b = model("b");
  const std::size_t limit = 1200 * kMiB;
  lab_.memory().set_limit(lab_.memory().budget(), limit);
  for (int turn = 0; turn < 4; ++turn) free(take(turn % 2 == 0 ? *a : *b, limit * 3 / 4));
  EXPECT_LE(most_used_, limit - limit / 32);
}

// Nobody shares it.
TEST_F(LimitMargin, AModelByItselfHasAllOfIt) {
  const auto a = model("a");
  take(*a, kLimit);
  EXPECT_GT(group_->used(), kLimit - 24 * kMiB);
  expect_no_climb(*a);
}

}  // namespace
}  // namespace vmm::testing
