// Private pools that graphs are captured into, and captures that fail.
#include <gtest/gtest.h>

#include <memory>
#include <thread>
#include <vector>

#include "cpp/private_pools_lab.h"

namespace vmm::testing {
namespace {

// --------------------------------------------------------------------- graphs

TEST_F(PrivatePoolsTest, ACapturePinsItsRegionUntilItsGraphIsGone) {
  const auto second = lab.pool("second");
  begin_capture(kGraph, a);
  EXPECT_TRUE(lab.memory().clock().is_capturing());
  captures[b] = captures.at(a);  // joined
  const Address one = allocate(4 * kMiB, a);
  const Address joined = allocate(4 * kMiB, b);
  const Address late = allocate(second, 4 * kMiB, a);
  EXPECT_TRUE(region_of(one) == kGraph);
  EXPECT_TRUE(region_of(joined) == kGraph);
  EXPECT_TRUE(region_of(allocate(kMiB)) == RegionId{}) << "of a stream that is not captured";
  EXPECT_TRUE(region_of(late, second.get()) == kGraph);
  EXPECT_TRUE(is_pinned(kGraph));
  end_capture(kGraph, a);
  EXPECT_FALSE(lab.memory().clock().is_capturing());
  lab.free(one);
  lab.free(joined);
  lab.free(late);
  pools.empty_cache(kGraph);
  lab.memory().empty_cache();
  EXPECT_EQ(mapped(kGraph), 12 * kMiB);
  pools.release(kGraph);
  EXPECT_EQ(mapped(kGraph), 0U);
  lab.memory().close_pool(*second, /*force=*/false);
}

TEST_F(PrivatePoolsTest, ACaptureInAMemPoolThatHasPartsAlreadyPinsThem) {
  pools.add_user(kOne);
  use(kOne, 4 * kMiB);
  EXPECT_FALSE(is_pinned(kOne));
  begin_capture(kOne, a);
  EXPECT_TRUE(is_pinned(kOne));
  end_capture(kOne, a);
  pools.release(kOne);
  EXPECT_FALSE(is_pinned(kOne));
  leave_mempool(kOne);
  expect_nothing_left();
}

TEST_F(PrivatePoolsTest, OneStreamsNextCaptureIsNotTheFormers) {
  begin_capture(kGraph, a);
  const Address first = allocate(kMiB, a);
  end_capture(kGraph, a);
  begin_capture(kOther, a);
  const Address second = allocate(kMiB, a);
  end_capture(kOther, a);
  EXPECT_TRUE(region_of(first) == kGraph);
  EXPECT_TRUE(region_of(second) == kOther);
  EXPECT_EQ(failures, 0);
}

TEST_F(PrivatePoolsTest, AnotherThreadWorksForTheCaptureAndDoesNotEndIt) {
  begin_capture(kGraph, a);
  std::thread([&] { EXPECT_NE(pools.route(model, a), nullptr); }).join();
  // It is over, but its route will end in a moment: only its own thread knows.
  captures.clear();
  std::thread([&] {
    EXPECT_EQ(pools.route(model, a), nullptr);
    pools.sweep();
  }).join();
  pools.end(kGraph);
  EXPECT_EQ(failures, 0);
  EXPECT_TRUE(is_pinned(kGraph));
  pools.release(kGraph);
  expect_nothing_left();
}

// Whatever a capture takes the graph uses at each replay; nobody tells when it goes.
TEST_F(PrivatePoolsTest, AThreadsPoolInsideACaptureIsNoCaptureAndStays) {
  begin_capture(kGraph, a);
  pools.add_user(kOne);
  const int users = pools.use_count(kOne);
  pools.begin(kOne, this_thread_only(), a);
  const Address taken = allocate(kMiB, a);
  EXPECT_TRUE(region_of(taken) == kOne);
  EXPECT_TRUE(is_pinned(kOne));
  pools.end(kOne);
  pools.release(kOne);
  EXPECT_EQ(pools.use_count(kOne), users) << "the graph is none";
  EXPECT_TRUE(is_pinned(kOne));
  EXPECT_TRUE(region_of(allocate(kMiB, a)) == kGraph);
  end_capture(kGraph, a);
  EXPECT_EQ(failures, 0);
}

// Serving engines let another pool serve a part of a capture, and go on with the
// capture's by a route of the thread.
TEST_F(PrivatePoolsTest, ACaptureThatAThreadsRouteGoesOnWithIsOneGraph) {
  const auto graph = begin_capture(kGraph, a);
  allocate(kMiB, a);
  pools.end(kGraph);
  pools.begin(kGraph, this_thread_only(), a);
  EXPECT_TRUE(region_of(allocate(3 * kMiB, a)) == kGraph);
  EXPECT_TRUE(lab.memory().clock().is_capturing());
  end_capture(kGraph, a);
  EXPECT_FALSE(lab.memory().clock().is_capturing());
  pools.sweep();
  EXPECT_TRUE(is_pinned(kGraph)) << "it did not fail";
  EXPECT_EQ(failures, 0);
}

// torch 2.12 and later, for a conditional node: the capture goes on, its route
// gives way to one for a child graph on a stream that nobody has told of.
TEST_F(PrivatePoolsTest, ACaptureWithAConditionalNodeStaysOneUser) {
  auto graph = begin_capture(kGraph, a);
  const Address before = allocate(kMiB, a);
  const std::uint64_t whole = graph->id;
  pools.end(kGraph);
  EXPECT_TRUE(is_pinned(kGraph));
  auto child = prepare(kGraph, a);
  child->id = captures[b] = ++last_capture;
  const Address inside = allocate(kMiB, b);
  EXPECT_TRUE(region_of(inside) == kGraph);
  EXPECT_TRUE(lab.memory().clock().is_capturing());
  captures.erase(b);
  pools.end(kGraph);
  const auto filter = [this, whole](Stream on) { return captures.count(on) != 0 && captures.at(on) == whole; };
  pools.begin(kGraph, filter, a);
  const Address after = allocate(kMiB, a);
  EXPECT_TRUE(region_of(before) == kGraph);
  EXPECT_TRUE(region_of(after) == kGraph);
  EXPECT_EQ(pools.use_count(kGraph), 1);
  end_capture(kGraph, a);
  EXPECT_FALSE(lab.memory().clock().is_capturing());
  EXPECT_EQ(failures, 0);
  for (const Address block : {before, inside, after}) lab.free(block);
  EXPECT_TRUE(is_pinned(kGraph));
  pools.release(kGraph);
  expect_nothing_left();
}

// The part of a part: torch goes on with the outer body's route before it ends the outer node.
TEST_F(PrivatePoolsTest, ConditionalNodesInOneAnotherAreOneGraph) {
  const auto filter_of = [this](std::uint64_t id) {
    return [this, id](Stream on) { return captures.count(on) != 0 && captures.at(on) == id; };
  };
  const Stream c = stream(0xC);
  std::vector<Address> blocks;
  const auto whole = begin_capture(kGraph, a);
  blocks.push_back(allocate(kMiB, a));
  pools.end(kGraph);
  const auto outer = prepare(kGraph, a);
  outer->id = captures[b] = ++last_capture;
  blocks.push_back(allocate(kMiB, b));
  pools.end(kGraph);
  const auto inner = prepare(kGraph, b);
  inner->id = captures[c] = ++last_capture;
  blocks.push_back(allocate(kMiB, c));
  captures.erase(c);
  pools.end(kGraph);
  pools.begin(kGraph, filter_of(outer->id), b);
  blocks.push_back(allocate(kMiB, b));
  EXPECT_TRUE(lab.memory().clock().is_capturing());
  captures.erase(b);
  pools.end(kGraph);
  EXPECT_TRUE(lab.memory().clock().is_capturing()) << "the whole goes on";
  pools.begin(kGraph, filter_of(whole->id), a);
  blocks.push_back(allocate(kMiB, a));
  for (const Address block : blocks) EXPECT_TRUE(region_of(block) == kGraph);
  EXPECT_EQ(pools.use_count(kGraph), 1);
  EXPECT_TRUE(lab.memory().clock().is_capturing());
  end_capture(kGraph, a);
  EXPECT_FALSE(lab.memory().clock().is_capturing());
  EXPECT_EQ(pools.use_count(kGraph), 1);
  EXPECT_EQ(failures, 0);
  for (const Address block : blocks) lab.free(block);
  pools.release(kGraph);
  expect_nothing_left();
}

// ------------------------------------------------------------ failed captures

TEST_F(PrivatePoolsTest, ACaptureThatFailedIsFoundByItsThreadsNextRequest) {
  {
    const auto graph = begin_capture(kGraph, a);
    lab.free(allocate(4 * kMiB, a));
    captures.clear();  // invalid, and ended with an error
  }
  EXPECT_TRUE(region_of(allocate(kMiB, a)) == RegionId{});
  EXPECT_EQ(failures, 1);
  EXPECT_FALSE(exists(kGraph));
  EXPECT_EQ(mapped(kGraph), 0U);
  EXPECT_FALSE(pools.any_route());
  EXPECT_FALSE(lab.memory().clock().is_capturing());
  EXPECT_THROW(pools.end(kGraph), InvalidArgumentError);
}

TEST_F(PrivatePoolsTest, ACaptureThatNeverBeganIsFoundToo) {
  prepare(kGraph, a);
  pools.sweep();
  EXPECT_EQ(failures, 1);
  EXPECT_FALSE(exists(kGraph));
  expect_nothing_left();
}

// torch ends the route of one that failed when its graph goes, and releases its region then.
class NewerTorch : public PrivatePoolsTest {
 protected:
  NewerTorch() : PrivatePoolsTest(/*failed_are_ended=*/true) {}
};

TEST_F(NewerTorch, ACaptureThatWasFoundToHaveFailedIsEndedLater) {
  begin_capture(kGraph, a);
  lab.free(allocate(4 * kMiB, a));
  captures.clear();
  EXPECT_TRUE(region_of(allocate(kMiB, a)) == RegionId{});
  EXPECT_FALSE(exists(kGraph));
  EXPECT_FALSE(lab.memory().clock().is_capturing());
  pools.end(kGraph);  // as torch does from a destructor
  pools.release(kGraph);
  EXPECT_FALSE(exists(kGraph));
  EXPECT_THROW(pools.end(kGraph), InvalidArgumentError) << "once";
}

TEST_F(NewerTorch, OneThatNobodyFoundIsEndedAsAny) {
  begin_capture(kGraph, a);
  captures.clear();
  pools.end(kGraph);
  EXPECT_FALSE(lab.memory().clock().is_capturing());
  pools.release(kGraph);
  EXPECT_FALSE(exists(kGraph));
}

TEST_F(NewerTorch, ALateEndOfAFailedCaptureLeavesOthersOfItsPoolAlone) {
  begin_capture(kOther, a);
  const Address kept = allocate(kMiB, a);
  end_capture(kOther, a);  // a healthy graph
  begin_capture(kOther, a);
  captures.clear();
  pools.sweep();
  const auto third = begin_capture(kOther, b);
  pools.end(kOther);  // the failed one's
  pools.release(kOther);
  EXPECT_TRUE(region_of(allocate(kMiB, b)) == kOther) << "the third goes on";
  EXPECT_EQ(pools.use_count(kOther), 2);
  end_capture(kOther, b);
  pools.release(kOther);
  EXPECT_TRUE(is_pinned(kOther)) << "the first";
  pools.release(kOther);
  EXPECT_FALSE(exists(kOther));
  lab.free(kept);
}

// What ends the route of a running capture may be the destructor of a failed one's graph, in the
// same pool, or torch, before it captures the body of a conditional node: the begin() behind it says.
TEST_F(NewerTorch, ARunningCapturesOwnEndIsNotThatOfOneThatFailed) {
  begin_capture(kOther, a);
  captures.clear();
  pools.sweep();  // the graph of the failed one still lives
  const auto whole = begin_capture(kOther, a);
  pools.end(kOther);
  const auto child = prepare(kOther, a);
  child->id = captures[b] = ++last_capture;
  const Address inside = allocate(kMiB, b);
  EXPECT_TRUE(region_of(inside) == kOther);
  captures.erase(b);
  pools.end(kOther);
  pools.begin(
      kOther, [this, id = whole->id](Stream on) { return captures.count(on) != 0 && captures.at(on) == id; }, a);
  EXPECT_TRUE(region_of(allocate(kMiB, a)) == kOther);
  end_capture(kOther, a);
  EXPECT_FALSE(lab.memory().clock().is_capturing());
  EXPECT_EQ(pools.use_count(kOther), 1);
  pools.end(kOther);  // now the failed one's goes
  pools.release(kOther);
  EXPECT_EQ(pools.use_count(kOther), 1);
  EXPECT_TRUE(is_pinned(kOther));
  pools.release(kOther);
  EXPECT_FALSE(exists(kOther));
  EXPECT_THROW(pools.end(kOther), InvalidArgumentError);
}

TEST_F(NewerTorch, ALateEndIsNoReasonToBeginTwice) {
  begin_capture(kOther, a);
  captures.clear();
  pools.sweep();
  begin_capture(kOther, a);
  pools.end(kOther);
  pools.release(kOther);
  EXPECT_THROW(prepare(kOther, a), InvalidArgumentError);
  end_capture(kOther, a);
  pools.release(kOther);
  expect_nothing_left();
}

// An exception between capture_begin() and capture_end(): CUDA's capture goes on, its graph goes.
TEST_F(NewerTorch, ACaptureThatNobodyEndedGoesWithItsGraph) {
  begin_capture(kGraph, a);
  lab.free(allocate(4 * kMiB, a));
  pools.end(kGraph);
  pools.release(kGraph);
  EXPECT_FALSE(exists(kGraph));
  EXPECT_FALSE(lab.memory().clock().is_capturing());
  captures.clear();  // by an illegal call
  pools.sweep();
  EXPECT_EQ(failures, 0);
  begin_capture(kGraph, b);
  EXPECT_TRUE(region_of(allocate(kMiB, b)) == kGraph);
  EXPECT_TRUE(is_pinned(kGraph));
  end_capture(kGraph, b);
  pools.release(kGraph);
  EXPECT_FALSE(exists(kGraph));
}

TEST_F(NewerTorch, ACaptureThatNobodyEndedLeavesTheOthersOfItsPool) {
  pools.add_user(kOne);
  begin_capture(kOne, a);
  const Address kept = allocate(kMiB, a);
  end_capture(kOne, a);  // a healthy graph
  begin_capture(kOne, b);
  pools.end(kOne);
  pools.release(kOne);
  captures.clear();
  pools.sweep();
  EXPECT_EQ(pools.use_count(kOne), 2);
  EXPECT_TRUE(is_pinned(kOne)) << "the healthy one's";
  pools.release(kOne);
  EXPECT_FALSE(is_pinned(kOne));
  lab.free(kept);
  leave_mempool(kOne);
  expect_nothing_left();
}

// Released by whoever happens to, while a program has paused its capture's pool.
TEST_F(NewerTorch, AnotherGraphsReleaseIsNotThatOfAPausedCapture) {
  begin_capture(kGraph, a);
  end_capture(kGraph, a);
  begin_capture(kGraph, a);
  allocate(kMiB, a);
  pools.end(kGraph);
  allocate(kMiB, b);  // of this thread: it goes on
  pools.release(kGraph);
  EXPECT_TRUE(lab.memory().clock().is_capturing());
  pools.begin(kGraph, this_thread_only(), a);
  EXPECT_TRUE(region_of(allocate(kMiB, a)) == kGraph);
  end_capture(kGraph, a);
  EXPECT_FALSE(lab.memory().clock().is_capturing());
}

TEST_F(NewerTorch, AThreadsRouteThatGoesOnWithAPausedCaptureEndsAndIsReleased) {
  begin_capture(kGraph, a);
  allocate(kMiB, a);
  pools.end(kGraph);
  pools.begin(kGraph, this_thread_only(), a);
  pools.end(kGraph);
  pools.release(kGraph);  // use_mem_pool() leaves
  EXPECT_TRUE(lab.memory().clock().is_capturing());
  EXPECT_TRUE(is_pinned(kGraph));
  EXPECT_EQ(pools.use_count(kGraph), 1);
}

TEST_F(NewerTorch, AMemPoolThatGoesWhileItsCaptureIsPausedIsNotThatsGraph) {
  pools.add_user(kOne);
  begin_capture(kOne, a);
  allocate(kMiB, a);
  pools.end(kOne);
  pools.set_use_on_oom(kOne, false);
  pools.release(kOne);
  EXPECT_TRUE(lab.memory().clock().is_capturing());
  EXPECT_TRUE(is_pinned(kOne));
  EXPECT_EQ(pools.use_count(kOne), 1);
}

TEST_F(PrivatePoolsTest, AnotherThreadMaySayForACaptureWhichPoolsItUses) {
  pools.add_user(kOne);
  begin_capture(kGraph, a);
  std::thread([&] {
    pools.add_user(kOne);
    pools.begin(kOne, this_thread_only(), a);
    (void)pools.route(model, a);
    pools.end(kOne);
    pools.release(kOne);
  }).join();
  end_capture(kGraph, a);
  EXPECT_TRUE(is_pinned(kOne));
  pools.release(kGraph);
  pools.release(kOne);
  EXPECT_FALSE(is_pinned(kOne)) << "not to the pool's end";
  leave_mempool(kOne);
  expect_nothing_left();
}

// One graph has said that it uses the pool, and another, whose stream joined its capture later, has not.
TEST_F(PrivatePoolsTest, WhatOneGraphRetainsIsKeptForAnother) {
  pools.add_user(kOne);
  begin_capture(kGraph, a);
  pools.add_user(kOne);
  end_capture(kGraph, a);
  begin_capture(kOther, a);
  pools.begin(kOne, this_thread_only(), b);
  captures[b] = captures.at(a);
  EXPECT_TRUE(region_of(allocate(kMiB, b)) == kOne);
  pools.end(kOne);
  pools.release(kOne);
  end_capture(kOther, a);
  pools.release(kGraph);
  pools.release(kOne);
  EXPECT_TRUE(is_pinned(kOne)) << "to the end of the pool, as nobody tells when the second graph goes";
  pools.release(kOther);
}

TEST_F(PrivatePoolsTest, AGraphThatSaysWhichPoolsItUsesIsNoMemPool) {
  pools.add_user(kOne);
  begin_capture(kOne, a);
  const Address kept = allocate(kMiB, a);
  end_capture(kOne, a);
  begin_capture(kGraph, a);
  pools.add_user(kOne);  // use_mem_pool() within it, which asks for nothing
  end_capture(kGraph, a);
  pools.release(kGraph);
  pools.release(kOne);
  EXPECT_TRUE(is_pinned(kOne)) << "the first graph's";
  EXPECT_EQ(pools.use_count(kOne), 2);
  pools.release(kOne);
  EXPECT_FALSE(is_pinned(kOne));
  lab.free(kept);
  leave_mempool(kOne);
  EXPECT_FALSE(exists(kOne));
}

TEST_F(PrivatePoolsTest, APoolThatAGraphSaysItUsesIsPinnedAsLongAsThatLives) {
  pools.add_user(kOne);
  begin_capture(kGraph, a);
  pools.add_user(kOne);
  pools.begin(kOne, this_thread_only(), a);
  lab.free(allocate(kMiB, a));
  pools.end(kOne);
  pools.release(kOne);
  end_capture(kGraph, a);
  EXPECT_TRUE(is_pinned(kOne));
  pools.release(kGraph);
  pools.release(kOne);
  EXPECT_EQ(pools.use_count(kOne), 1);
  EXPECT_FALSE(is_pinned(kOne)) << "not to the pool's end";
  leave_mempool(kOne);
  expect_nothing_left();
}

TEST_F(PrivatePoolsTest, ABlockOutlivesTheFailedCaptureThatMadeIt) {
  begin_capture(kGraph, a);
  const Address block = allocate(3 * kMiB, a);
  lab.fill(block, 3 * kMiB, 8);
  captures.clear();
  pools.empty_cache(kGraph);
  EXPECT_EQ(failures, 1);
  EXPECT_FALSE(exists(kGraph));
  EXPECT_TRUE(lab.holds(block, 3 * kMiB, 8));
  lab.free(block);
  expect_nothing_left();
}

TEST_F(PrivatePoolsTest, TheNextCaptureFindsTheFailedOneAndIsNotDisturbed) {
  begin_capture(kGraph, a);
  captures.clear();
  begin_capture(kGraph, a);  // into the same region, on the same stream
  EXPECT_EQ(failures, 0) << "torch has prepared the next capture already";
  EXPECT_EQ(pools.use_count(kGraph), 1);
  EXPECT_TRUE(region_of(allocate(kMiB, a)) == kGraph);
  end_capture(kGraph, a);
  EXPECT_EQ(failures, 0);
}

TEST_F(PrivatePoolsTest, AFailedCaptureLeavesARunningOneAndAHealthyGraphAlone) {
  begin_capture(kOther, a);
  end_capture(kOther, a);
  begin_capture(kGraph, a);
  const Address good = allocate(kMiB, a);
  {
    const auto bad = begin_capture(kOther, b);
    lab.free(allocate(4 * kMiB, b));
    captures.erase(b);
  }
  const Address more = allocate(kMiB, a);
  EXPECT_EQ(failures, 0) << "a capture is under way";
  EXPECT_TRUE(region_of(good) == kGraph);
  EXPECT_TRUE(region_of(more) == kGraph);
  EXPECT_EQ(pools.use_count(kOther), 1);
  EXPECT_TRUE(is_pinned(kOther)) << "the earlier graph lives";
  EXPECT_EQ(mapped(kOther), 4 * kMiB);
  EXPECT_TRUE(lab.memory().clock().is_capturing());
  end_capture(kGraph, a);
  EXPECT_FALSE(lab.memory().clock().is_capturing());
  pools.release(kOther);
  EXPECT_EQ(mapped(kOther), 0U);
}

TEST_F(PrivatePoolsTest, AFailedCaptureInAMemPoolLeavesTheMemPool) {
  pools.add_user(kOne);
  begin_capture(kOne, a);
  lab.free(allocate(4 * kMiB, a));
  captures.clear();
  pools.sweep();
  EXPECT_EQ(pools.use_count(kOne), 1);
  EXPECT_FALSE(is_pinned(kOne));
  leave_mempool(kOne);
  expect_nothing_left();
}

TEST_F(PrivatePoolsTest, AThreadThatEndedWithAFailedCaptureIsStoodInFor) {
  std::thread([&] {
    begin_capture(kGraph, a);
    lab.free(allocate(4 * kMiB, a));
  }).join();
  EXPECT_EQ(pools.route(model, b), nullptr);
  EXPECT_TRUE(exists(kGraph)) << "it is still under way: another thread may end it";
  captures.clear();
  EXPECT_EQ(pools.route(model, b), nullptr);
  EXPECT_FALSE(exists(kGraph));
  EXPECT_EQ(failures, 1);
  expect_nothing_left();
}

TEST_F(PrivatePoolsTest, ACaptureBegunWhereOneRunsFailsAndGoesWithIt) {
  const auto good = begin_capture(kGraph, a);
  const auto refused = prepare(kOther, a);
  EXPECT_TRUE(region_of(allocate(kMiB, a)) == kGraph);
  end_capture(kGraph, a);
  pools.sweep();
  EXPECT_FALSE(exists(kOther));
  EXPECT_TRUE(exists(kGraph));
}

}  // namespace
}  // namespace vmm::testing
