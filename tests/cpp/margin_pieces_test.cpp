// What a request at the margin of a limit stands on: units, what fills a part of one, and what makes
// room for it.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "margin_lab.h"

namespace vmm::testing {
namespace {

class MarginPieces : public MarginLab {};

// What fits nowhere goes back to the driver, and makes room: a place of 6 MiB between what a
// model took while it was alone and the next multiple of a unit.
TEST_F(MarginPieces, StaysWhereUnitsDoNotFit) {
  const auto a = model("a");
  const std::size_t left = fill_alone(*a, 68 * kMiB);
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

TEST_F(MarginPieces, StaysBesideSmallBlocksToo) {
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

// A block of 512 bytes costs another model no more than a unit, whatever its chunks are.
TEST_F(MarginPieces, LittleIsTakenForLittle) {
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

TEST_F(MarginPieces, StreamsOfLittleStrandNoUnitsOfOthers) {
  const auto a = model("a");
  const auto b = model("b");
  free(take(*a, kLimit / 2));
  take_up_to_margin(*b);
  const std::size_t before = b->physical_bytes();
  for (std::uintptr_t k = 1; k <= 16; ++k) lab_.allocate(*b, 512, stream(k));
  EXPECT_LE(b->physical_bytes(), before + 16 * kPage);
  take(*a, kLimit / 2 - 5 * 8 * kMiB);
}

// Chunks of other sizes stand side by side in the places of units: nothing is created, and
// nothing goes back to the driver, which would wait for what is queued.
TEST_F(MarginPieces, WhatIsNoUnitFillsPlacesUp) {
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

TEST_F(MarginPieces, SoDoItsOwn) {
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
TEST_F(MarginPieces, WhatFillsNoPlaceGoesBackToTheDriver) {
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

TEST_F(MarginPieces, SoDoesWhatIsLongerThanAUnit) {
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
TEST_F(MarginPieces, NothingInUseGoesBackToTheDriver) {
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

// What rests on the shelf and fits nowhere goes back, as much as is taken of the margin.
TEST_F(MarginPieces, AsMuchOfTheShelfGoesBack) {
  const auto a = model("a");
  const std::vector<Address> blocks = take_each(*a, 4, {6 * kMiB});
  const auto b = model("b");
  fill_up_to_margin(*b);
  free(blocks);
  a->shed(0);
  ASSERT_EQ(lab_.memory().store().shelved_bytes(*group_), 24 * kMiB);
  lab_.allocate(*b, 8 * kMiB);
  EXPECT_EQ(lab_.memory().store().shelved_bytes(*group_), 22 * kMiB);
  EXPECT_LE(group_->used(), kLimit - kMargin);
}

// Units that a little block cannot stand on are not lost for it.
TEST_F(MarginPieces, TheShelfKeepsWhatIsNotLacking) {
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
TEST_F(MarginPieces, OwnAndOthersFillAUnitTogether) {
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

// A part of a unit is missing, and others have nothing but units. Queued work uses those that come first.
TEST_F(MarginPieces, UnitsMakeRoomForAPartOfOne) {
  const auto a = model("a");
  const std::size_t left = fill_alone(*a, 96 * kMiB);
  const Address last = lab_.allocate(*a, left, kOfA);
  const auto b = model("b");
  const Address of_b = lab_.allocate(*b, 64 * kMiB, kOfA);
  const auto c = model("c");
  lab_.leave_idle(*c, 32 * kMiB);
  ASSERT_EQ(group_->used(), kLimit - kMargin);
  know_all_done();
  lab_.driver.hold_fences(kOfA);
  lab_.free(last);
  lab_.free(of_b);
  lab_.allocate(*a, left + 6 * kMiB, kOfA);
  EXPECT_EQ(group_->used(), kLimit - kMargin - 6 * kMiB);
  EXPECT_EQ(b->physical_bytes(), 48 * kMiB);
  EXPECT_EQ(c->physical_bytes(), 24 * kMiB);
  expect_no_climb(*a);
  lab_.driver.release_fences(kOfA);
}

// It uses all of them, so that none makes room.
TEST_F(MarginPieces, ARequestStandsOnUnitsAloneWhereTheGpuIsBehind) {
  const auto a = model("a");
  const std::size_t left = fill_alone(*a, 64 * kMiB);
  const Address last = lab_.allocate(*a, left, kOfA);
  const auto b = model("b");
  const Address of_b = lab_.allocate(*b, 64 * kMiB, kOfA);
  ASSERT_EQ(group_->used(), kLimit - kMargin);
  lab_.free(last);
  lab_.allocate(*a, left - 4 * kMiB, kOfA);
  lab_.driver.hold_fences(kOfA);
  lab_.free(of_b);
  lab_.allocate(*a, 10 * kMiB, kOfA);
  EXPECT_EQ(group_->used(), kLimit - kMargin);
  EXPECT_EQ(b->physical_bytes(), 48 * kMiB);
  expect_no_climb(*a);
  lab_.driver.release_fences(kOfA);
}

// All work is done, and c, which had b's units before and does nothing now, has not let go of its
// former mappings by itself.
TEST_F(MarginPieces, AFormerMappingOfAnIdleModelKeepsNoMemory) {
  const auto a = model("a");
  const std::size_t left = fill_alone(*a, 64 * kMiB);
  const Address last = lab_.allocate(*a, left, kOfA);
  const auto c = model("c");
  const auto b = model("b");
  const Address of_c = lab_.allocate(*c, 64 * kMiB, kOfA);
  ASSERT_EQ(group_->used(), kLimit - kMargin);
  lab_.driver.hold_fences(kOfA);
  lab_.free(of_c);
  const Address of_b = lab_.allocate(*b, 64 * kMiB, kOfA);  // handed on behind c's work
  lab_.driver.release_fences(kOfA);
  lab_.free(of_b);
  lab_.free(last);
  know_all_done();
  lab_.allocate(*a, left + 6 * kMiB, kOfA);
  EXPECT_LE(group_->used(), kLimit - kMargin);
  for (std::uintptr_t k = 40; k < 44; ++k) lab_.allocate(*a, 512, stream(k));  // slabs
  EXPECT_LE(group_->used(), kLimit - kMargin);
  EXPECT_GE(b->physical_bytes(), 32 * kMiB)
      << "taken in vain; on the shelf: " << lab_.memory().store().shelved_bytes(*group_) / kMiB << " MiB";
}

// Else what was needed of a larger one would be created anew.
TEST_F(MarginPieces, TheSmallestUnitOfAGrantGoesBack) {
  lab_.memory().set_limit(*group_, kUnlimited);
  const auto a = model("a");
  const std::size_t left = fill_alone(*a, 80 * kMiB);
  const Address last = lab_.allocate(*a, left);
  const auto b = model("b");
  lab_.leave_idle(*b, 64 * kMiB);  // in chunks of 16
  lab_.allocate(*b, 32 * kMiB);
  lab_.memory().set_limit(*group_, kLimit);
  const auto c = model("c");
  lab_.leave_idle(*c, 16 * kMiB);
  ASSERT_EQ(group_->used(), kLimit - kMargin);
  lab_.free(last);
  know_all_done();
  lab_.driver.clear_calls();
  lab_.allocate(*a, left + 34 * kMiB);  // 16 and 16 of b, 8 of c, 2 of which are used
  EXPECT_EQ(lab_.driver.count(Call::create), 1U) << "2 MiB";
  EXPECT_LE(group_->used(), kLimit - kMargin);
}

// Which only the asking stream's work still uses: they do as well as others'.
TEST_F(MarginPieces, ARequestStandsOnUnitsOfTheShelfToo) {
  const auto a = model("a");
  const std::size_t left = fill_alone(*a, 64 * kMiB);
  const Address last = lab_.allocate(*a, left, kOfA);
  const auto b = model("b");
  const Address of_b = lab_.allocate(*b, 64 * kMiB, kOfA);
  ASSERT_EQ(group_->used(), kLimit - kMargin);
  lab_.free(last);
  lab_.allocate(*a, left - 4 * kMiB, kOfA);
  lab_.driver.hold_fences(kOfA);
  lab_.free(of_b);
  b->shed(0);
  ASSERT_EQ(lab_.memory().store().shelved_bytes(*group_), 64 * kMiB);
  lab_.allocate(*a, 10 * kMiB, kOfA);
  EXPECT_EQ(group_->used(), kLimit - kMargin) << "shelf " << lab_.memory().store().shelved_bytes(*group_) / kMiB;
  lab_.driver.release_fences(kOfA);
}

}  // namespace
}  // namespace vmm::testing
