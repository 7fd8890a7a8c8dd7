// The checker itself: each rule of order_checker.h broken, and kept.
#include <gtest/gtest.h>

#include <thread>

#include "cpp/order_checker_lab.h"

namespace vmm::testing {
namespace {

// -- Rule 1: unmapping, and taking access away

TEST_F(OrderCheckerTest, AnAddressIsUnmappedWhenTheHostKnowsThatItsUsesAreDone) {
  driver.use(kA, base, 512, Use::read);
  host_waits_for(kA);
  EXPECT_TRUE(driver.unmap(base, kChunk).ok());
  expect_kept();
}

TEST_F(OrderCheckerTest, UnmappingUnderQueuedWorkIsFound) {
  driver.at("step 7");
  driver.use(kA, base + 1024, 512, Use::read);
  EXPECT_TRUE(driver.unmap(base, kChunk).ok());
  expect_broken("use 1 of stream 'A' (read of [" + format_hex(base + 1024) + ", 512 bytes], queued at step 7)");
}

TEST_F(OrderCheckerTest, WorkThatIsDoneIsNotKnownToBeUntilSomebodyAsks) {
  driver.use(kA, base, 512, Use::read);
  EXPECT_TRUE(driver.record(fence, kA.handle).ok());
  EXPECT_EQ(driver.query(fence).code(), StatusCode::not_ready);
  driver.run_all();
  EXPECT_TRUE(driver.unmap(base, kChunk).ok());
  expect_broken("unmap");
}

TEST_F(OrderCheckerTest, AQueryThatAnswersOkIsKnowledge) {
  driver.use(kA, base, 512, Use::read);
  EXPECT_TRUE(driver.record(fence, kA.handle).ok());
  driver.run(kA, 1);
  EXPECT_TRUE(driver.query(fence).ok());
  EXPECT_TRUE(driver.unmap(base, kChunk).ok());
  expect_kept();
}

TEST_F(OrderCheckerTest, AnEventOfAnotherStreamSaysNothing) {
  driver.use(kA, base, 512, Use::read);
  host_waits_for(kB);
  EXPECT_TRUE(driver.unmap(base, kChunk).ok());
  expect_broken("stream 'A'");
}

TEST_F(OrderCheckerTest, OnlyUsesThroughTheAddressHoldItsUnmapping) {
  map(base + kChunk);
  driver.use(kA, base, 512, Use::read);
  EXPECT_TRUE(driver.unmap(base + kChunk, kChunk).ok());
  expect_kept();
}

TEST_F(OrderCheckerTest, AFailedUnmapCountsForNothing) {
  driver.use(kA, base, 512, Use::read);
  scripted.fail_nth(Call::unmap, 1, Status(StatusCode::driver_error, "scripted"));
  EXPECT_FALSE(driver.unmap(base, kChunk).ok());
  expect_kept();
}

TEST_F(OrderCheckerTest, TakingAccessAwayWaitsForTheDevicesOwnWork) {
  driver.use(kOfPeer, base, 512, Use::read);
  EXPECT_TRUE(driver.set_access(base, kChunk, Location::on_device(0), Access::none).ok());
  expect_kept();
  EXPECT_TRUE(driver.set_access(base, kChunk, Location::on_device(1), Access::read).ok());
  expect_kept();
  EXPECT_TRUE(driver.set_access(base, kChunk, Location::on_device(1), Access::none).ok());
  expect_broken("set_access takes");
}

// -- Rule 2: fills

TEST_F(OrderCheckerTest, AFillComesAfterEveryUse) {
  leave_a_reader_on_b();
  order(kB, kA);
  fill(base, kA);
  expect_kept();
}

TEST_F(OrderCheckerTest, AFillUnderAReaderIsFoundOnTheOwnersStreamToo) {
  leave_a_reader_on_b();
  fill(base, kA);
  expect_broken("allocator's fill");
}

TEST_F(OrderCheckerTest, AFillThroughAnotherAddressOfTheChunkIsTheSameBytes) {
  leave_a_reader_on_b();
  map(base + kChunk);
  fill(base + kChunk, kA);
  expect_broken("use 1 of stream 'B'");
}

TEST_F(OrderCheckerTest, AFailedFillMayHaveBegun) {
  scripted.fail_nth(Call::fill_async, 1, Status(StatusCode::driver_error, "scripted"));
  EXPECT_FALSE(driver.fill_async(0, base, 0, kChunk, kA.handle).ok());
  EXPECT_TRUE(driver.unmap(base, kChunk).ok());
  expect_broken("allocator's fill");
}

TEST_F(OrderCheckerTest, WhoeverGetsFilledMemoryComesAfterTheFill) {
  fill(base, kB);
  driver.hand_out(base, 512, kA, kPool);
  expect_broken("allocator's fill");
}

TEST_F(OrderCheckerTest, ACopyReadsWhatWasWrittenBefore) {
  map(base + kChunk);
  driver.use(kA, base, 512, Use::write);
  order(kA, kB);
  EXPECT_TRUE(driver.copy_async(0, base + 8192, base, 512, kB.handle).ok());
  expect_kept();
  driver.use(kA, base + 512, 512, Use::write);
  EXPECT_TRUE(driver.copy_async(0, base + 8192, base + 512, 512, kB.handle).ok());
  expect_broken("use 2 of stream 'A'");
}

// -- Rule 3: handing out

TEST_F(OrderCheckerTest, ItsOwnPoolAndStreamGetMemoryAtOnce) {
  leave_a_reader_on_b();
  driver.hand_out(base, 4096, kA, kPool);
  expect_kept();
  driver.wait(kA, driver.point(kB));  // the late wait
  driver.use(kA, base, 4096, Use::write);
  expect_kept();
  EXPECT_EQ(driver.counts().reused, 1U);
}

TEST_F(OrderCheckerTest, AnotherStreamGetsItBehindTheReadersToo) {
  leave_a_reader_on_b();
  const StreamRef c{reinterpret_cast<Stream>(0x50), 0};
  driver.add_stream({c.handle, 0, false, "C"});
  order(kA, c);  // the owner's stream is not enough
  driver.hand_out(base, 512, c, kPool);
  expect_broken("use 1 of stream 'B'");
}

TEST_F(OrderCheckerTest, AnotherStreamMayHaveItBehindEveryUse) {
  leave_a_reader_on_b();
  order(kA, kB);
  driver.hand_out(base + 512, 512, kB, kPool);
  expect_kept();
  EXPECT_EQ(driver.counts().moved, 1U);
}

TEST_F(OrderCheckerTest, AnotherPoolGetsItBehindTheReadersToo) {
  leave_a_reader_on_b();
  driver.hand_out(base, 512, kA, kOtherPool);
  expect_broken("last of pool 1 on 'A'");
}

TEST_F(OrderCheckerTest, ThroughAnotherAddressItIsTheSameMemory) {
  leave_a_reader_on_b();
  map(base + kChunk);
  driver.hand_out(base + kChunk, 512, kA, kOtherPool);
  expect_broken("use 1 of stream 'B'");
}

TEST_F(OrderCheckerTest, OtherBytesOfTheChunkAreOtherMemory) {
  leave_a_reader_on_b();
  driver.hand_out(base + 4096, 4096, kB, kOtherPool);
  expect_kept();
}

TEST_F(OrderCheckerTest, ARecordedStreamBindsTheOwnerToo) {
  driver.hand_out(base, 512, kA, kPool);
  driver.use(kB, base, 512, Use::read);
  driver.record_stream(base, kB);
  driver.take_back(base);
  driver.hand_out(base, 512, kA, kPool);
  expect_broken("last of the same");
}

TEST_F(OrderCheckerTest, ARecordedStreamsWorkMayBeOrderedOrDone) {
  driver.hand_out(base, 512, kA, kPool);
  driver.use(kB, base, 512, Use::read);
  driver.record_stream(base, kB);
  driver.take_back(base);
  host_waits_for(kB);
  driver.hand_out(base, 512, kA, kPool);
  expect_kept();
}

TEST_F(OrderCheckerTest, ARecordedPerThreadStreamIsThatOfTheThreadThatFrees) {
  driver.hand_out(base, 512, kA, kPool);
  driver.use(kThread, base, 512, Use::read);
  driver.record_stream(base, kThread);
  std::thread([&] { driver.take_back(base); }).join();
  driver.hand_out(base, 512, kA, kPool);
  expect_kept();
  driver.record_stream(base, kThread);
  driver.use(kThread, base, 512, Use::read);
  driver.take_back(base);
  driver.hand_out(base, 512, kA, kPool);
  expect_broken("per-thread");
}

TEST_F(OrderCheckerTest, AllUsesOfExplicitPagesBindEveryone) {
  driver.hand_out_pages(base, kChunk, kA, kPool);
  driver.use(kB, base + 4096, 512, Use::read);
  driver.take_back_pages(base, 8192);
  driver.hand_out(base, 512, kA, kPool);  // nobody used these
  expect_kept();
  driver.hand_out(base + 4096, 512, kA, kPool);
  expect_broken("use 1 of stream 'B'");
  driver.hand_out(base + 16384, 512, kA, kPool);
  expect_broken("overlaps a block that nobody gave back");
}

TEST_F(OrderCheckerTest, InAGraphsOwnPoolOnlyWhatTheHostKnowsCounts) {
  leave_a_reader_on_b();
  order(kB, kA);
  fill(base, kA);
  order(kA, kB);
  driver.pin(kOtherPool);
  const CaptureId capture = driver.begin_capture(kA);
  driver.hand_out(base, 512, kA, kOtherPool);
  expect_broken("in a capture");
  driver.take_back(base);
  EXPECT_TRUE(driver.synchronize(0).ok());
  driver.hand_out(base, 512, kA, kOtherPool);
  expect_kept();
  driver.end_capture(capture);
}

TEST_F(OrderCheckerTest, InACaptureThatNobodyAnnouncedItsStreamsEarlierWorkCounts) {
  leave_a_reader_on_b();
  order(kB, kA);
  fill(base, kA);
  const CaptureId capture = driver.begin_capture(kA);
  driver.hand_out(base, 512, kA, kOtherPool);
  expect_kept();
  driver.hand_out(base + 512, 512, kBlocking, kOtherPool);
  expect_broken("stream 'A'");
  driver.end_capture(capture);
}

// -- Rule 4: first use

TEST_F(OrderCheckerTest, TheFirstUseComesAfterEveryUseFromBefore) {
  leave_a_reader_on_b();
  driver.hand_out(base, 4096, kA, kPool);
  driver.use(kA, base, 4096, Use::write);  // without the late wait
  expect_broken("first use of");
}

TEST_F(OrderCheckerTest, AUserOnAnotherStreamIsOrderedByTheOwners) {
  leave_a_reader_on_b();
  const StreamRef c{reinterpret_cast<Stream>(0x50), 0};
  driver.add_stream({c.handle, 0, false, "C"});
  driver.hand_out(base, 4096, kA, kPool);
  driver.wait(kA, driver.point(kB));
  driver.wait(c, driver.point(kA));
  driver.use(c, base, 4096, Use::write);
  expect_kept();
}

// -- Rule 5: what is handed out is there, and stays

TEST_F(OrderCheckerTest, WhatIsHandedOutIsMappedAndNobodyElses) {
  driver.hand_out(base + kChunk, 512, kA, kPool);
  expect_broken("is not mapped for its device");
  driver.hand_out(base, 1024, kA, kPool);
  driver.hand_out(base + 512, 512, kA, kPool);
  expect_broken("overlaps a block");
  map(base + 2 * kChunk);
  driver.hand_out(base + 2 * kChunk, 512, kA, kPool);
  expect_broken("through another address");
}

TEST_F(OrderCheckerTest, MemoryStaysWhileItIsHeld) {
  driver.hand_out(base + 8192, 512, kA, kPool);
  EXPECT_TRUE(driver.unmap(base, kChunk).ok());
  expect_broken("takes [" + format_hex(base + 8192));
}

TEST_F(OrderCheckerTest, OtherMemoryUnderABlockIsFound) {
  driver.hand_out(base, 512, kA, kPool);
  EXPECT_TRUE(driver.unmap(base, kChunk).ok());
  expect_broken("away");
  EXPECT_TRUE(driver.release(chunk).ok());
  EXPECT_TRUE(driver.create({kChunk, Location::on_device(0)}, &chunk).ok());
  map(base);
  driver.use(kA, base, 512, Use::read);
  expect_broken("finds other memory under its block");
}

TEST_F(OrderCheckerTest, AProgramThatUsesWhatItGaveBackIsTold) {
  leave_a_reader_on_b();
  driver.use(kA, base, 512, Use::read);
  expect_broken("The program: ");
}

// -- What the host reads

TEST_F(OrderCheckerTest, TheHostReadsBehindWhatItKnowsToBeDone) {
  std::uint8_t byte = 0;
  fill(base, kA);
  host_waits_for(kA);
  EXPECT_TRUE(driver.read(0, &byte, base, 1).ok());
  expect_kept();
  fill(base, kA);
  EXPECT_TRUE(driver.read(0, &byte, base, 1).ok());
  expect_broken("a read of ");
}

// -- Rule 6: streams that are no more

TEST_F(OrderCheckerTest, NoCallNamesADestroyedStream) {
  driver.destroy_stream(kB.handle);
  EXPECT_FALSE(driver.record(fence, kB.handle).ok());
  expect_broken("record() names stream 0x20");
  EXPECT_FALSE(driver.stream_wait(0, kB.handle, fence).ok());
  expect_broken("stream_wait()");
  EXPECT_FALSE(driver.fill_async(0, base, 0, kChunk, kB.handle).ok());
  expect_broken("fill_async()");
  EXPECT_FALSE(driver.is_blocking(kB));
  expect_broken("is_blocking()");
}

TEST_F(OrderCheckerTest, AHandleThatIsGivenOutAgainIsAnotherStream) {
  driver.use(kB, base, 512, Use::read);
  driver.destroy_stream(kB.handle);
  driver.add_stream({kB.handle, 0, false, "B again"});
  host_waits_for(kB);
  EXPECT_TRUE(driver.unmap(base, kChunk).ok());
  expect_broken("stream 'B (destroyed)'");
}

TEST_F(OrderCheckerTest, SynchronizeCoversStreamsThatAreNoMore) {
  driver.use(kB, base, 512, Use::read);
  driver.destroy_stream(kB.handle);
  EXPECT_TRUE(driver.synchronize(0).ok());
  EXPECT_TRUE(driver.unmap(base, kChunk).ok());
  expect_kept();
}

// -- Rule 7: captures

TEST_F(OrderCheckerTest, NothingThatIsCapturedCanBeRecordedOrMadeToWait) {
  const CaptureId capture = driver.begin_capture(kA);
  EXPECT_EQ(driver.record(fence, kA.handle).code(), StatusCode::not_supported);
  EXPECT_EQ(driver.stream_wait(0, kA.handle, fence).code(), StatusCode::not_supported);
  EXPECT_EQ(driver.fill_async(0, base, 0, kChunk, kA.handle).code(), StatusCode::not_supported);
  EXPECT_TRUE(driver.record(fence, kB.handle).ok());
  EXPECT_TRUE(driver.record(fence, nullptr).ok()) << "a non-blocking stream's capture";
  EXPECT_TRUE(driver.synchronize(0).ok());
  driver.end_capture(capture);
  EXPECT_TRUE(driver.record(fence, kA.handle).ok());
  expect_kept();
}

TEST_F(OrderCheckerTest, TheDefaultStreamStandsBeforeTheCaptureOfABlockingOne) {
  for (const StreamRef captured : {kBlocking, kThread}) {
    const CaptureId capture = driver.begin_capture(captured);
    EXPECT_EQ(driver.record(fence, nullptr).code(), StatusCode::not_supported);
    EXPECT_TRUE(driver.is_blocked(kDefault));
    EXPECT_FALSE(driver.is_blocked(kA));
    driver.end_capture(capture);
    EXPECT_TRUE(driver.record(fence, nullptr).ok());
  }
  expect_kept();
}

// -- Graphs

TEST_F(OrderCheckerTest, CapturedWorkIsDoneWhereTheGraphIsLaunched) {
  driver.hand_out(base, 512, kA, kPool);
  const CaptureId capture = driver.begin_capture(kA);
  driver.use(kA, base, 512, Use::write);
  const CapturedGraph graph = driver.end_capture(capture);
  ASSERT_EQ(graph.nodes.size(), 1U);
  driver.launch(graph, kB);
  driver.take_back(base);
  driver.hand_out(base, 512, kA, kOtherPool);
  expect_broken("use 1 of stream 'B' (launch");
}

TEST_F(OrderCheckerTest, AGraphHasItsPoolsFreedMemoryWhileItIsPinned) {
  driver.pin(kPool);
  driver.hand_out(base, 512, kA, kPool);
  const CaptureId capture = driver.begin_capture(kA);
  driver.use(kA, base, 512, Use::write);
  const CapturedGraph graph = driver.end_capture(capture);
  driver.take_back(base);
  driver.launch(graph, kB);
  expect_kept();
  driver.hand_out(base, 512, kA, kPool);  // graphs of one pool take turns: the program's affair
  driver.take_back(base);
  expect_kept();
  driver.unpin(kPool);
  driver.hand_out(base, 512, kA, kPool);
  expect_broken("last of the same");
  driver.take_back(base);
  driver.launch(graph, kB);
  expect_broken("belongs to pool 1");
}

TEST_F(OrderCheckerTest, WhatACheckpointMakesItsOwnersAgainIsTheProgramsAffair) {
  leave_a_reader_on_b();
  driver.use(kA, base + 8192, 512, Use::read);
  driver.hand_out_pages(base, kChunk, kA, kPool);
  driver.use(kB, base, 512, Use::read);
  driver.take_back_pages(base, kChunk);
  driver.hand_out_again(base, 4096, kA, kPool);
  expect_kept();
  driver.take_back(base);
  driver.hand_out_again(base, 4096, kB, kPool);
  expect_kept();
  driver.use(kB, base, 512, Use::write);
  driver.take_back(base);
  driver.hand_out_again(base, 4096, kA, kPool);
  expect_broken("comes without order after");
}

TEST_F(OrderCheckerTest, AGraphWhoseMemoryWentElsewhereIsFound) {
  driver.pin(kPool);
  driver.hand_out(base, 512, kA, kPool);
  const CaptureId capture = driver.begin_capture(kA);
  driver.use(kA, base, 512, Use::write);
  const CapturedGraph graph = driver.end_capture(capture);
  driver.take_back(base);
  driver.hand_out(base, 512, kA, kOtherPool);
  expect_kept();
  driver.launch(graph, kB);
  expect_broken("belongs to pool 2");
}

// -- What comes after what (work_order.h)

TEST_F(OrderCheckerTest, AnEventOnTheDefaultStreamCoversBlockingAndPerThreadStreams) {
  driver.use(kBlocking, base, 512, Use::read);
  driver.use(kThread, base, 512, Use::read);
  std::thread([&] { driver.use(kThread, base, 512, Use::read); }).join();
  host_waits_for(kDefault);
  EXPECT_TRUE(driver.unmap(base, kChunk).ok());
  expect_kept();
}

TEST_F(OrderCheckerTest, AnEventOnTheDefaultStreamCoversNoNonBlockingStream) {
  driver.use(kA, base, 512, Use::read);
  host_waits_for(kDefault);
  EXPECT_TRUE(driver.unmap(base, kChunk).ok());
  expect_broken("stream 'A'");
}

TEST_F(OrderCheckerTest, ABlockingStreamComesAfterTheDefaultStream) {
  driver.use(kDefault, base, 512, Use::read);
  host_waits_for(kBlocking);
  EXPECT_TRUE(driver.unmap(base, kChunk).ok());
  expect_kept();
}

TEST_F(OrderCheckerTest, EachDeviceHasADefaultStreamOfItsOwn) {
  driver.use({nullptr, 1}, base, 512, Use::read);
  host_waits_for(kDefault);
  EXPECT_TRUE(driver.unmap(base, kChunk).ok());
  expect_broken("default of device 1");
}

TEST_F(OrderCheckerTest, EachThreadHasAPerThreadStreamOfItsOwn) {
  driver.use(kThread, base, 512, Use::read);
  std::thread([&] { host_waits_for(kThread); }).join();
  EXPECT_TRUE(driver.unmap(base, kChunk).ok());
  expect_broken("per-thread 1");
}

TEST_F(OrderCheckerTest, WaitsAreTransitive) {
  driver.use(kA, base, 512, Use::read);
  order(kA, kB);
  order(kB, kBlocking);
  host_waits_for(kBlocking);
  EXPECT_TRUE(driver.unmap(base, kChunk).ok());
  expect_kept();
}

TEST_F(OrderCheckerTest, TheNewestRecordOfAFenceCounts) {
  driver.use(kA, base, 512, Use::read);
  EXPECT_TRUE(driver.record(fence, kA.handle).ok());
  EXPECT_TRUE(driver.record(fence, kB.handle).ok());
  EXPECT_TRUE(driver.query(fence).ok());
  EXPECT_TRUE(driver.unmap(base, kChunk).ok());
  expect_broken("stream 'A'");
}

TEST_F(OrderCheckerTest, WorkIsDoneInOrderAndNeverBeforeWhatItComesAfter) {
  driver.use(kA, base, 512, Use::read);
  driver.wait(kB, driver.point(kA));
  driver.use(kB, base, 512, Use::read);
  EXPECT_TRUE(driver.record(fence, kB.handle).ok());
  driver.run(kB, 1);
  EXPECT_EQ(driver.query(fence).code(), StatusCode::not_ready) << "A's comes first";
  driver.run(kA, 1);
  driver.run(kB, 1);
  EXPECT_TRUE(driver.query(fence).ok());
}

TEST_F(OrderCheckerTest, DriftFinishesWorkButNoLongKernel) {
  driver.use(kA, base, 512, Use::read, /*is_long=*/true);
  driver.use(kB, base, 512, Use::read);
  Fence other = nullptr;
  EXPECT_TRUE(driver.create_fence(0, &other).ok());
  EXPECT_TRUE(driver.record(fence, kA.handle).ok());
  EXPECT_TRUE(driver.record(other, kB.handle).ok());
  driver.drift(1);
  for (int k = 0; k < 100; ++k) static_cast<void>(driver.query(other));
  EXPECT_TRUE(driver.query(other).ok());
  EXPECT_FALSE(driver.query(fence).ok());
}

}  // namespace
}  // namespace vmm::testing
