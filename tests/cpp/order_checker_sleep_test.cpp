// The checker itself: of pools that sleep, and of contents, each rule of order_checker.h broken
// and kept.
#include <gtest/gtest.h>

#include <vector>

#include "cpp/order_checker_lab.h"

namespace vmm::testing {
namespace {

class OrderCheckerSleepTest : public OrderCheckerTest {
 protected:
  static constexpr std::size_t kBytes = 4096;

  OrderCheckerSleepTest() : backup_(kBytes) {
    driver.hand_out(base, kBytes, kA, kPool);
    driver.use(kA, base, kBytes, Use::write);
  }
  void save(StreamRef by) {
    EXPECT_TRUE(driver.copy_async(0, reinterpret_cast<Address>(backup_.data()), base, kBytes, by.handle).ok());
  }
  void load(StreamRef by) {
    EXPECT_TRUE(driver.copy_async(0, base, reinterpret_cast<Address>(backup_.data()), kBytes, by.handle).ok());
  }
  void unmap() { EXPECT_TRUE(driver.unmap(base, kChunk).ok()); }
  // As it should be done: behind the work that was queued, and not before the copy is done.
  void go_to_sleep() {
    host_waits_for(kA);
    driver.asleep(kPool);
    save(kB);
    host_waits_for(kB);
    unmap();
  }
  // Other memory comes to stand there.
  void map_anew() {
    EXPECT_TRUE(driver.create({kChunk, Location::on_device(0)}, &chunk).ok());
    map(base);
  }

  std::vector<std::byte> backup_;
};

// -- Going

TEST_F(OrderCheckerSleepTest, WhatSleepsAndComesBackIsKept) {
  go_to_sleep();
  map_anew();
  load(kB);
  host_waits_for(kB);
  driver.awake(kPool);
  driver.use(kBlocking, base, kBytes, Use::read);
  expect_kept();
  EXPECT_EQ(driver.counts().came, 1U);
}

TEST_F(OrderCheckerSleepTest, MemoryThatLeavesUnderAPoolThatIsAwakeIsFound) {
  host_waits_for(kA);
  unmap();
  expect_broken("away from pool 1");
}

TEST_F(OrderCheckerSleepTest, WorkThatWasQueuedBeforeHoldsTheMemory) {
  driver.asleep(kPool);
  unmap();
  expect_broken("under use 1 of stream 'A' (write");
}

TEST_F(OrderCheckerSleepTest, ACopyThatComesBeforeWorkThatWasQueuedIsFound) {
  driver.asleep(kPool);
  save(kB);
  expect_broken("allocator's copy");
}

TEST_F(OrderCheckerSleepTest, UnmappingBeforeTheCopyIsDoneIsFound) {
  host_waits_for(kA);
  driver.asleep(kPool);
  save(kB);
  unmap();
  expect_broken("allocator's copy");
}

TEST_F(OrderCheckerSleepTest, AProgramThatUsesWhatSleepsIsWrong) {
  driver.asleep(kPool);
  driver.use(kA, base, kBytes, Use::read);
  expect_broken("The program:");
}

TEST_F(OrderCheckerSleepTest, NobodyCopiesIntoWhatIsHeld) {
  host_waits_for(kA);
  load(kB);
  expect_broken("held by pool 1");
}

// -- Coming

TEST_F(OrderCheckerSleepTest, AwakeWithoutMemoryIsFound) {
  go_to_sleep();
  driver.awake(kPool);
  expect_broken("is not mapped");
}

TEST_F(OrderCheckerSleepTest, AwakeBeforeTheCopyBackIsDoneIsFound) {
  go_to_sleep();
  map_anew();
  load(kB);
  driver.awake(kPool);
  expect_broken("the host does not know to be done use 2 of stream 'B'");
}

TEST_F(OrderCheckerSleepTest, OfWhatStayedTheCopyOutIsDoneToo) {
  host_waits_for(kA);
  driver.asleep(kPool);
  save(kB);
  driver.awake(kPool);
  expect_broken("the host does not know to be done");
}

TEST_F(OrderCheckerSleepTest, WhatStayedMayHaveTheProgramsOwnWorkQueued) {
  driver.asleep(kPool);
  driver.awake(kPool);
  driver.use(kA, base, kBytes, Use::read);
  expect_kept();
}

TEST_F(OrderCheckerSleepTest, MemoryThatSomebodyElseHoldsDoesNotComeBack) {
  go_to_sleep();
  map(base + kChunk);
  fill(base + kChunk, kB);
  host_waits_for(kB);
  driver.hand_out(base + kChunk, kBytes, kB, kOtherPool);
  map(base);
  driver.awake(kPool);
  expect_broken("is held by pool 2");
}

// -- Contents

TEST_F(OrderCheckerSleepTest, LostContentsAreFound) {
  go_to_sleep();
  map_anew();
  driver.awake(kPool);
  expect_broken("stands zero, and not write 1 of pool 1");
}

TEST_F(OrderCheckerSleepTest, AFormersBytesAreFoundInMemoryThatIsHandedOut) {
  go_to_sleep();
  map(base + kChunk);
  driver.hand_out(base + kChunk, kBytes, kB, kOtherPool);
  expect_broken("stands write 1 of pool 1, and not zero or what pool 2 wrote");
}

TEST_F(OrderCheckerSleepTest, ItsOwnBytesMayBeHandedOutAgain) {
  host_waits_for(kA);
  driver.take_back(base);
  driver.hand_out(base, kBytes, kA, kPool);
  expect_kept();
}

TEST_F(OrderCheckerSleepTest, WhatWasThrownAwayIsZero) {
  host_waits_for(kA);
  driver.asleep(kPool);
  driver.throw_away(kPool, /*surely=*/true);
  driver.awake(kPool);
  expect_broken("stands write 1 of pool 1, and not zero");
}

TEST_F(OrderCheckerSleepTest, WhatMayHaveBeenThrownAwayIsZeroOrNot) {
  host_waits_for(kA);
  driver.asleep(kPool);
  driver.throw_away(kPool, /*surely=*/false);
  driver.awake(kPool);
  expect_kept();
  driver.asleep(kPool);
  fill(base, kA);
  host_waits_for(kA);
  driver.awake(kPool);
  expect_kept();
  driver.use(kA, base, kBytes, Use::write);
  driver.use(kA, base, kBytes, Use::read);
  expect_kept();
}

TEST_F(OrderCheckerSleepTest, AGraphFindsWhatItLeftInFreedMemoryOfItsPool) {
  host_waits_for(kA);
  driver.pin(kPool);
  const CaptureId capture = driver.begin_capture(kA);
  driver.use(kA, base, kBytes, Use::read);
  const CapturedGraph graph = driver.end_capture(capture);
  driver.take_back(base);
  driver.asleep(kPool);
  unmap();
  map_anew();
  driver.awake(kPool);
  expect_kept();
  EXPECT_FALSE(driver.is_asleep(graph));
  driver.launch(graph, kB);
  expect_broken("stands zero, and not write 1 of pool 1");
}

// -- Who waits for copies

TEST_F(OrderCheckerSleepTest, WhoWaitsForACopyIsCounted) {
  host_waits_for(kA);
  driver.asleep(kPool);
  host_waits_for(kB);
  order(kB, kBlocking);
  EXPECT_EQ(driver.counts().host_waits_for_copies + driver.counts().stream_waits_for_copies, 0U);
  save(kB);
  order(kB, kBlocking);
  EXPECT_EQ(driver.counts().stream_waits_for_copies, 1U);
  host_waits_for(kA);
  EXPECT_EQ(driver.counts().host_waits_for_copies, 0U);
  host_waits_for(kBlocking);
  host_waits_for(kB);
  EXPECT_EQ(driver.counts().host_waits_for_copies, 1U) << "the second wait finds it done";
}

}  // namespace
}  // namespace vmm::testing
