// The margin: the last 32nd of a limit that models share is taken once nobody has idle memory.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "margin_lab.h"

namespace vmm::testing {
namespace {

class LimitMargin : public MarginLab {};

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

// No more than that is created, though the pool had more before and may grow.
TEST_F(LimitMargin, IsTakenForWhatIsMissingAlone) {
  const auto a = model("a");
  const auto b = model("b");
  free(take(*b, 240 * kMiB));
  lab_.memory().trim(*b, 0);
  const std::vector<Address> blocks = take_each(*b, 1, {24 * kMiB, 8 * kMiB, 16 * kMiB, 8 * kMiB});
  fill_up_to_margin(*a);
  free({blocks[0], blocks[2]});
  const std::size_t used = group_->used();
  lab_.allocate(*b, 48 * kMiB);
  EXPECT_EQ(group_->used(), used + 8 * kMiB);
}

// Where a request climbs, and what the shelf gives back makes room for it, that is room of the margin.
TEST_F(LimitMargin, StaysWhereTheShelfMakesRoom) {
  const auto a = model("a");
  const std::vector<Address> blocks = take_each(*a, 4, {6 * kMiB});
  const auto b = model("b");
  const auto c = model("c");
  lab_.leave_idle(*c, 128 * kMiB);
  fill_up_to_margin(*b);
  free(blocks);
  a->shed(0);
  ASSERT_EQ(lab_.memory().store().shelved_bytes(*group_), 24 * kMiB);
  lab_.allocate(*b, 64 * kMiB);
  EXPECT_LE(group_->used(), kLimit - kMargin);
  EXPECT_EQ(b->statistics().num_alloc_retries, 1);
  EXPECT_EQ(lab_.memory().ladder().log().report_of(b->id()).refused, 0U);
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

// Others' units make room for it there too.
TEST_F(LimitMargin, StaysWhereARequestClimbsForAPartOfAUnit) {
  const auto a = model("a");
  const std::size_t left = fill_alone(*a, 96 * kMiB);
  const Address last = lab_.allocate(*a, left);
  const auto b = model("b");
  lab_.leave_idle(*b, 96 * kMiB);
  ASSERT_EQ(group_->used(), kLimit - kMargin);
  lab_.free(last);
  know_all_done();
  lab_.allocate(*a, left + 66 * kMiB);  // 50 MiB are open
  EXPECT_LE(group_->used(), kLimit - kMargin)
      << "b has " << b->physical_bytes() / kMiB << ", shelf " << lab_.memory().store().shelved_bytes(*group_) / kMiB;
}

// Nobody yields: the shelf makes room, and the margin is taken.
TEST_F(LimitMargin, TheReportSaysThatTheShelfMadeRoom) {
  const auto a = model("a");
  const std::vector<Address> blocks = take_each(*a, 4, {6 * kMiB});
  const auto b = model("b");
  fill_up_to_margin(*b);
  free(blocks);
  a->shed(0);
  lab_.allocate(*b, 64 * kMiB);
  const ReclaimReport report = lab_.memory().ladder().log().report_of(b->id());
  ASSERT_FALSE(report.latest.empty());
  const ReclaimDecision& latest = report.latest.back();
  const ReclaimStep& others = latest.steps.at(static_cast<std::size_t>(Rung::other_models));
  EXPECT_TRUE(others.yielded.empty());
  EXPECT_NE(others.result, StepResult::met) << "no model gave anything";
  EXPECT_EQ(latest.steps.at(static_cast<std::size_t>(Rung::store)).result, StepResult::met);
}

// What was mapped in vain is retired, and the request is not placed there a second time, to the page.
TEST_F(LimitMargin, AFillThatFailsEndsNoProcess) {
  const auto a = model("a");
  const auto b = model("b");
  const std::vector<Address> blocks = take_each(*a, 20, {24 * kMiB});
  lab_.allocate(*b, kLimit - group_->used());
  free(blocks);
  know_all_done();
  lab_.driver.fail_nth(Call::fill_async, 1, broken(), Repeat::from_then_on);
  try {
    lab_.adopt(lab_.memory().allocate(*b, 24 * kMiB, kOfA));
  } catch (const OutOfMemoryError&) {  // it may be refused
  }
  lab_.driver.clear_failures();
  lab_.memory().check();
  lab_.allocate(*b, 24 * kMiB, kOfA);
}

// Nor does one that cannot be queued beside a capture.
TEST_F(LimitMargin, NorACapture) {
  const auto a = model("a");
  const auto b = model("b");
  const std::vector<Address> blocks = take_each(*a, 20, {24 * kMiB});
  lab_.allocate(*b, kLimit - group_->used());
  free(blocks);
  know_all_done();
  lab_.meet(stream(7));
  lab_.driver.begin_capture(stream(7));
  const Status captured{StatusCode::not_supported, "fill_async on a capturing stream"};  // as CudaDriver answers
  lab_.driver.fail_nth(Call::fill_async, 1, captured, Repeat::from_then_on);
  try {
    lab_.adopt(lab_.memory().allocate(*b, 24 * kMiB, stream(7)));
  } catch (const OutOfMemoryError&) {  // it may be refused
  }
  lab_.driver.clear_failures();
  lab_.driver.end_capture(stream(7));
  lab_.memory().check();
}

}  // namespace
}  // namespace vmm::testing
