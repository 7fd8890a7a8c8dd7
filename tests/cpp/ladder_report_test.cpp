// What the ladder tells of itself: which rung met a request, which could not have helped,
// which changed nothing, who yielded how much.
#include <gtest/gtest.h>

#include "cpp/reclaim_lab.h"

namespace vmm::testing {
namespace {

class LadderReport : public Reclaim {
 protected:
  ReclaimReport report(const Pool& pool) { return lab_.memory().ladder().log().report_of(pool.id()); }
  const RungCounts& counts(const ReclaimReport& report, Rung rung) {
    return report.rungs.at(static_cast<std::size_t>(rung));
  }

  const std::shared_ptr<Pool> a_ = model("a", kPage);
  const std::shared_ptr<Pool> b_ = model("b", kPage);
};

TEST_F(LadderReport, WhatThePoolHasByItselfClimbsNothing) {
  lab_.leave_idle(*a_, 16 * kMiB);
  lab_.allocate(*a_, 16 * kMiB);
  EXPECT_EQ(report(*a_).requests, 0U);
  EXPECT_TRUE(report(*a_).latest.empty());
}

TEST_F(LadderReport, TheStoresChunksOfOtherSizesGoBack) {
  const auto large = model("large", 8 * kMiB);
  lab_.memory().allocate_pages(*large, 0, 32 * kMiB, nullptr);
  lab_.memory().deallocate_pages(*large, 0, 32 * kMiB);
  lab_.allocate(*a_, 32 * kMiB);
  EXPECT_EQ(steps(*a_), "mpppppp");
  EXPECT_EQ(latest(*a_).steps[0].bytes, 32 * kMiB);
}

TEST_F(LadderReport, WhoYieldedIsNamed) {
  lab_.leave_idle(*b_, 32 * kMiB);
  lab_.allocate(*a_, 20 * kMiB);
  EXPECT_EQ(steps(*a_), "nmppppp");
  const ReclaimDecision decision = latest(*a_);
  EXPECT_EQ(decision.requested, 20 * kMiB);
  EXPECT_EQ(decision.asker, "a");
  EXPECT_EQ(decision.refused_by, "the shared pool");
  EXPECT_TRUE(decision.is_met());
  ASSERT_EQ(decision.steps[1].yielded.size(), 1U);
  EXPECT_EQ(decision.steps[1].yielded[0].pool, "b");
  EXPECT_EQ(decision.steps[1].yielded[0].bytes, 20 * kMiB);
  EXPECT_EQ(report(*b_).requests, 0U) << "it asked for nothing";
}

TEST_F(LadderReport, AClosedModelIsForgotten) {
  const auto gone = model("gone", kPage);
  lab_.leave_idle(*b_, 32 * kMiB);
  lab_.free(lab_.allocate(*gone, 20 * kMiB));
  ASSERT_EQ(report(*gone).requests, 1U);
  lab_.memory().close_pool(*gone, /*force=*/false);
  EXPECT_EQ(report(*gone).requests, 0U) << "the log would grow for ever";
}

TEST_F(LadderReport, ACallbackThatFreesMeetsIt) {
  Address held = lab_.allocate(*a_, 32 * kMiB);
  lab_.memory().ladder().set_memory_callback([&] {
    lab_.free(held);
    return true;
  });
  lab_.allocate(*a_, 32 * kMiB);
  EXPECT_EQ(steps(*a_), "nnmpppp");
  lab_.memory().ladder().set_memory_callback(nullptr);
}

TEST_F(LadderReport, TheUsersFunctionMeetsIt) {
  Address held = lab_.allocate(*b_, 32 * kMiB);
  lab_.memory().set_on_pressure(group_, [&](std::size_t, const std::shared_ptr<Pool>&) {
    lab_.free(held);
    return true;
  });
  lab_.allocate(*a_, 32 * kMiB);
  EXPECT_EQ(steps(*a_), "nnnmppp");
  ASSERT_EQ(latest(*a_).steps[3].yielded.size(), 1U) << "what it left idle was taken from its model";
  lab_.memory().set_on_pressure(group_, nullptr);
}

TEST_F(LadderReport, ALenderMeetsItBeforeAnyWait) {
  const Address lent = lab_.allocate(*b_, 32 * kMiB);
  lab_.memory().ladder().set_lender([&](const Pool&, std::size_t, Stream) { return lent; });
  EXPECT_EQ(lab_.memory().allocate(*a_, 2 * kMiB, nullptr), lent);
  EXPECT_EQ(steps(*a_), "nnnpmpp") << "without a function there is nobody to be asked";
  EXPECT_EQ(waits(), 0U);
  lab_.memory().ladder().set_lender(nullptr);
}

TEST_F(LadderReport, OnTheLastRungQueuedWorkIsWaitedFor) {
  const Address block = lab_.allocate(*a_, 32 * kMiB, kOne);
  a_->record_stream(block, kTwo);
  lab_.driver.hold_fences(kTwo);
  lab_.free(block);
  lab_.allocate(*a_, 32 * kMiB, kOne);
  EXPECT_EQ(steps(*a_), "nnnppmp");
}

TEST_F(LadderReport, ARefusalShowsWhatWasTried) {
  lab_.allocate(*b_, 28 * kMiB);
  EXPECT_THROW(lab_.memory().allocate(*a_, 8 * kMiB, nullptr), OutOfMemoryError);
  EXPECT_EQ(steps(*a_), "nnnppip");
  EXPECT_FALSE(latest(*a_).is_met());
  EXPECT_EQ(report(*a_).refused, 1U);
}

TEST_F(LadderReport, AClosedPoolThatKeepsItsTensorsChangesNothing) {
  const auto closed = lab_.pool("closed");
  const Address tensor = lab_.allocate(*closed, 4 * kMiB);
  lab_.memory().close_pools({closed}, /*force=*/true);
  lab_.allocate(*b_, 28 * kMiB);
  EXPECT_THROW(lab_.memory().allocate(*a_, 8 * kMiB, nullptr), OutOfMemoryError);
  EXPECT_EQ(steps(*a_), "nnnppip") << "nobody is asked again for nothing";
  EXPECT_FALSE(lab_.memory().settle(/*wait=*/false));
  lab_.free(tensor);
}

TEST_F(LadderReport, WhatCouldNeverBeMetPassesOverWhoeverWouldGiveInVain) {
  lab_.leave_idle(*b_, 32 * kMiB);
  EXPECT_THROW(lab_.memory().allocate(*a_, 40 * kMiB, nullptr), OutOfMemoryError);
  EXPECT_EQ(steps(*a_), "ppnpppp");
  EXPECT_EQ(bytes(b_), 32 * kMiB);
}

TEST_F(LadderReport, CountsAreOfAllAndDecisionsOfTheLatest) {
  constexpr std::size_t kTimes = ReclaimLog::kLatest + 8;
  for (std::size_t time = 0; time < kTimes; ++time) {
    lab_.leave_idle(*b_, 32 * kMiB);
    lab_.leave_idle(*a_, 32 * kMiB);
  }
  const ReclaimReport found = report(*a_);
  EXPECT_EQ(found.requests, kTimes);
  EXPECT_EQ(counts(found, Rung::other_models).met, kTimes);
  EXPECT_EQ(counts(found, Rung::other_models).bytes, kTimes * 32 * kMiB);
  EXPECT_EQ(counts(found, Rung::store).changed, 0U);
  EXPECT_EQ(counts(found, Rung::queued_work).tried, 0U);
  EXPECT_EQ(found.latest.size(), ReclaimLog::kLatest);
}

TEST_F(LadderReport, APartsRequestsAreItsModels) {
  lab_.leave_idle(*b_, 32 * kMiB);
  const auto weights = lab_.memory().tagged(a_, "weights");
  lab_.allocate(*weights, 20 * kMiB);
  EXPECT_EQ(report(*a_).requests, 1U);
  EXPECT_EQ(latest(*a_).asker, "a (weights)");
}

TEST_F(LadderReport, EndsWithItsModel) {
  lab_.leave_idle(*b_, 32 * kMiB);
  lab_.leave_idle(*a_, 32 * kMiB);
  ASSERT_EQ(report(*a_).requests, 1U);
  lab_.memory().close_pool(*a_, /*force=*/false);
  lab_.memory().settle(/*wait=*/true);
  EXPECT_EQ(report(*a_).requests, 0U);
}

}  // namespace
}  // namespace vmm::testing
