// Whom a request asks before it takes of the margin of a limit: few, none that cannot give, and
// nobody twice for nothing.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "margin_lab.h"

namespace vmm::testing {
namespace {

class MarginAsked : public MarginLab {};

// Few are asked, but those who have something.
TEST_F(MarginAsked, TheNinthOfTenModelsIsAsked) {
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
TEST_F(MarginAsked, NobodyIsLookedThroughTwiceForNothing) {
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

// A look tells what sizes there are, and holds until something is freed.
TEST_F(MarginAsked, WhatDoesNotSuitIsLookedForOnce) {
  const auto a = model("a");
  lab_.leave_idle(*a, 400 * kMiB);  // alone: large chunks
  const auto b = model("b");
  fill_up_to_margin(*b);
  walks(*a, *b, 8 * kMiB);
  EXPECT_EQ(walks(*a, *b, 8 * kMiB), 0U);
  EXPECT_EQ(walks(*a, *b, 2 * kMiB), 0U);
}

// So its owner has it again at once, on its own stream.
TEST_F(MarginAsked, WhatIsInUseIsNotTakenForNothing) {
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

TEST_F(MarginAsked, WhatIsInUseHidesNothingElse) {
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
TEST_F(MarginAsked, WhatIsInUseIsAskedAfterOnce) {
  const auto a = model("a");
  const std::vector<Address> blocks = take_each(*a, 30, {12 * kMiB}, stream(7));
  const auto b = model("b");
  fill_up_to_margin(*b);
  lab_.driver.hold_fences(stream(7));
  free(blocks);
  for (int k = 0; k < 5; ++k) {
    lab_.driver.clear_calls();
    const std::size_t before = a->times_walked();
    get(*b, 8 * kMiB, stream(8));
    EXPECT_LE(lab_.driver.count(Call::query), 8U);
    EXPECT_LE(a->times_walked() - before, k < 3 ? 3U : 0U);
  }
  lab_.driver.release_fences(stream(7));
}

// No other model can help whom a limit of its own refuses.
TEST_F(MarginAsked, NobodyIsAskedForWhatAnotherLimitRefuses) {
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

// Once the work that was queued has passed.
TEST_F(MarginAsked, WhatWasInUseIsTakenAfterIt) {
  const auto a = model("a");
  const std::vector<Address> blocks = take_each(*a, 30, {12 * kMiB}, stream(7));
  const auto b = model("b");
  fill_up_to_margin(*b);
  lab_.driver.hold_fences(stream(7));
  free(blocks);
  for (int k = 0; k < 4; ++k) get(*b, 8 * kMiB, stream(8));
  lab_.driver.release_fences(stream(7));
  const std::size_t of_a = a->physical_bytes();
  get(*b, 8 * kMiB, stream(8));
  EXPECT_LT(a->physical_bytes(), of_a);
}

// Nor are those of which queued work uses all that would do.
TEST_F(MarginAsked, NobodyWhoseMemoryIsInUseTakesThePlaceOfWhoHas) {
  const std::vector<std::shared_ptr<Pool>> holed = more_than_are_asked();
  const auto idle = model("idle");
  const auto b = model("b");
  std::vector<Address> freed;
  for (const auto& each : holed) {
    get(*each, 1000 * kMiB, stream(7));
    for (int k = 0; k < 60; ++k) {
      const Address block = get(*each, 3 * kMiB, stream(7));
      if (k % 3 != 0) freed.push_back(block);
    }
  }
  lab_.leave_idle(*idle, 480 * kMiB);
  const std::size_t had = idle->physical_bytes();
  get(*b, kLargeLimit - kLargeLimit / 32 - group_->used(), stream(8));
  Clock& clock = lab_.memory().clock();
  clock.cover(clock.now());  // that nobody uses what is idle is known before
  clock.poll();
  lab_.driver.hold_fences(stream(7));
  free(freed);
  const std::size_t used = group_->used();
  for (int k = 0; k < 10; ++k) get(*b, 16 * kMiB, stream(8));
  EXPECT_GE(had - idle->physical_bytes(), 8 * 16 * kMiB);
  EXPECT_LE(group_->used(), used + 2 * 16 * kMiB);
  lab_.driver.release_fences(stream(7));
}

// Those that were seen to have nothing are not among the few that are asked.
TEST_F(MarginAsked, NobodyWithoutAnythingTakesThePlaceOfWhoHas) {
  const std::vector<std::shared_ptr<Pool>> holed = more_than_are_asked();
  const auto idle = model("idle");
  const auto b = model("b");
  for (const auto& each : holed) {
    std::vector<Address> freed;
    get(*each, 64 * kMiB);
    for (int k = 0; k < 64; ++k) {
      get(*each, 9 * kMiB);
      freed.push_back(get(*each, 7 * kMiB));
    }
    free(freed);
    while (each->idle_bytes() != 0) get(*each, each->idle_bytes());
  }
  lab_.leave_idle(*idle, 640 * kMiB);
  const std::size_t had = idle->physical_bytes();
  get(*b, kLargeLimit - kLargeLimit / 32 - group_->used());
  for (int k = 0; k < 10; ++k) get(*b, 16 * kMiB);
  EXPECT_LE(idle->physical_bytes(), had - 8 * 16 * kMiB);
}

TEST_F(MarginAsked, WhoMayNotGiveTakesNobodysSeat) {
  lab_.memory().set_limit(*group_, kLargeLimit);
  std::vector<std::shared_ptr<Pool>> floored;
  for (int k = 0; k < 7; ++k) floored.push_back(model("floored " + std::to_string(k), 0, 64 * kMiB));
  const auto idle = model("idle", 1);
  const auto b = model("b", 1);
  for (const auto& each : floored) lab_.leave_idle(*each, 64 * kMiB);
  lab_.leave_idle(*idle, 800 * kMiB);
  const std::size_t had = idle->physical_bytes();
  fill(*b, *group_);
  const std::size_t before = walks(floored);
  for (int k = 0; k < 10; ++k) get(*b, 16 * kMiB);
  EXPECT_GE(had - idle->physical_bytes(), 9 * 16 * kMiB);
  EXPECT_EQ(walks(floored), before);
}

TEST_F(MarginAsked, AFloorOfTheirSharedPoolCountsAsTheirs) {
  Budget& device = lab_.memory().budget();
  lab_.memory().set_limit(device, kLargeLimit);
  lab_.memory().set_limit(*group_, kUnlimited);
  const auto other = lab_.memory().create_group("other", kUnlimited);
  lab_.memory().set_floor(*other, 9 * 256 * kMiB);
  std::vector<std::shared_ptr<Pool>> floored;
  for (int k = 0; k < 8; ++k) {
    PoolSpec spec = Lab::spec("floored " + std::to_string(k));
    spec.capacity = 8 * kGiB;
    floored.push_back(lab_.pool(spec, other.get()));
    lab_.leave_idle(*floored.back(), 288 * kMiB);
  }
  const auto idle = model("idle");
  const auto b = model("b");
  lab_.leave_idle(*idle, 256 * kMiB);
  const std::size_t had = idle->physical_bytes();
  fill(*b, device);
  for (int k = 0; k < 10; ++k) get(*b, 16 * kMiB);
  EXPECT_GE(had - idle->physical_bytes(), 9 * 16 * kMiB);
  EXPECT_EQ(other->used(), 8 * 288 * kMiB);
}

TEST_F(MarginAsked, WhatAFloorKeepsIsLookedThroughOnce) {
  lab_.memory().set_limit(*group_, kLargeLimit);
  const auto a = model("a", 0, 2 * kGiB - 32 * kMiB, 64 * kMiB);  // 32 above it, of which no chunk is
  const auto b = model("b");
  lab_.leave_idle(*a, 2 * kGiB);
  fill(*b, *group_);
  get(*b, 64 * kMiB);
  const std::size_t before = a->times_walked();
  for (int k = 0; k < 5; ++k) get(*b, 64 * kMiB);
  EXPECT_EQ(a->times_walked(), before);
  EXPECT_EQ(a->physical_bytes(), 2 * kGiB);
}

TEST_F(MarginAsked, AnEmptiedPoolIsLookedThroughAnew) {
  const auto a = model("a");
  const auto b = model("b");
  get(*b, 32 * kMiB);
  std::vector<Address> live;
  std::vector<Address> freed;
  live.push_back(get(*a, 64 * kMiB));
  std::size_t of_live = 64 * kMiB;
  for (int k = 0; k < 16; ++k) {
    live.push_back(get(*a, 9 * kMiB));
    freed.push_back(get(*a, 7 * kMiB));
    of_live += 9 * kMiB;
  }
  const std::size_t of_freed = 16 * 7 * kMiB;
  for (const Address each : freed) drop(each);
  while (const std::size_t left = a->idle_bytes()) {
    live.push_back(get(*a, left));
    of_live += left;
  }
  get(*b, align_down(kLimit - kMargin - group_->used(), 8 * kMiB));
  const Address probe = get(*b, 8 * kMiB);
  for (const Address each : live) drop(each);
  lab_.memory().trim(*a, 0);
  ASSERT_EQ(a->physical_bytes(), 0U);
  drop(probe);
  // As much was freed and is live as at the latest look, and much is idle now.
  get(*a, of_live);
  lab_.leave_idle(*a, of_freed);
  for (int k = 0; k < 4; ++k) get(*b, 24 * kMiB);
  EXPECT_LE(group_->used(), kLimit - kMargin);
}

TEST_F(MarginAsked, WhatAThreadKeepsSinceALookIsAskedFor) {
  const auto a = model("a");
  const auto b = model("b");
  get(*b, 32 * kMiB);
  std::vector<Address> freed;
  get(*a, 64 * kMiB);
  for (int k = 0; k < 16; ++k) {  // holes that hold no chunk
    get(*a, 9 * kMiB);
    freed.push_back(get(*a, 7 * kMiB));
  }
  for (const Address each : freed) drop(each);
  get(*a, 8 * kMiB);
  while (a->idle_bytes() >= 8 * kMiB) get(*a, a->idle_bytes());
  get(*b, align_down(kLimit - kMargin - group_->used(), 8 * kMiB));
  const std::size_t before = a->times_walked();
  get(*b, 8 * kMiB);
  ASSERT_GT(a->times_walked(), before) << "no look";
  lab_.memory().set_limit(*group_, kLimit + 40 * 8 * kMiB);
  drop(get(*a, 64 * kMiB));  // as much is live as before, and as much came back
  const std::size_t open = group_->limit() - group_->limit() / 32;
  get(*b, align_down(open - group_->used(), 8 * kMiB));
  for (int k = 0; k < 4; ++k) get(*b, 8 * kMiB);
  EXPECT_LE(group_->used(), open);
}

TEST_F(MarginAsked, WhatARecordedStreamHasDoneWithIsAskedFor) {
  lab_.meet(kOfB);
  const auto a = model("a");
  const auto b = model("b");
  get(*b, 32 * kMiB, kOfA);
  get(*a, 64 * kMiB, kOfA);
  const Address block = get(*a, 64 * kMiB, kOfA);
  get(*b, align_down(kLimit - kMargin - group_->used(), 8 * kMiB), kOfA);
  lab_.driver.hold_fences(kOfB);
  a->record_stream(block, kOfB, nullptr);
  drop(block);
  get(*b, 8 * kMiB, kOfA);  // nothing is idle yet
  lab_.driver.release_fences(kOfB);
  const std::size_t had = a->physical_bytes();
  for (int k = 0; k < 4; ++k) get(*b, 8 * kMiB, kOfA);
  EXPECT_LE(a->physical_bytes() + 32 * kMiB, had);
}

}  // namespace
}  // namespace vmm::testing
