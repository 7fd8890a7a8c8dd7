#include "core/streams/clock.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "core/streams/device_streams.h"
#include "core/streams/stream_point.h"
#include "cpp/lab.h"

namespace vmm::testing {
namespace {

const Stream kOne = stream(0x10);
const Stream kTwo = stream(0x20);
const Stream kForeign = stream(0x30);

// Two devices with their streams and the clock of the first.
class Streams : public ::testing::Test {
 public:
  ~Streams() override {
    clock_.reset();
    streams_.reset();
    others_.reset();
    EXPECT_EQ(driver_.leaks(), "");
  }

 protected:
  Streams() { driver_.set_wait_on_held(ScriptedDriver::WaitOnHeld::pass); }
  StreamUse use(Stream stream) { return {&*streams_, stream, streams_->meet(stream)}; }
  // As torch has it: kOne and kTwo are permanent, whatever else comes is not.
  void take_census(bool foreign_is_blocking) {
    streams_->set_census({[](std::vector<Stream>* out) {
                            *out = {kOne, kTwo};
                          },
                          [foreign_is_blocking](Stream) { return foreign_is_blocking; }});
    if (foreign_is_blocking) driver_.make_blocking(kForeign);
  }

  HostDriver host_{HostDriverOptions{kPage, kGiB, 2}};
  ScriptedDriver driver_{host_};
  std::optional<DeviceStreams> streams_{std::in_place, driver_, 0};
  std::optional<DeviceStreams> others_{std::in_place, driver_, 1};
  std::optional<Clock> clock_{std::in_place, *streams_};
};

// ---------------------------------------------------------------- which streams

TEST_F(Streams, WithoutACensusWhatIsMetIsPermanent) {
  EXPECT_EQ(streams_->to_record(), (std::vector<Stream>{nullptr}));
  EXPECT_EQ(streams_->meet(kOne), StreamKind::permanent);
  EXPECT_EQ(streams_->meet(kOne), StreamKind::permanent);
  EXPECT_EQ(streams_->to_record(), (std::vector<Stream>{nullptr, kOne}));
  EXPECT_EQ(streams_->count(), 2U);
}

// A server on the host may give each request a number of its own.
TEST_F(Streams, OfManyThatAreMetTheFirstArePermanent) {
  StreamCensus few;
  few.most_met = 3;
  streams_->set_census(few);
  for (std::uintptr_t k = 1; k <= 100; ++k) {
    EXPECT_EQ(streams_->meet(stream(k * 16)), k <= 3 ? StreamKind::permanent : StreamKind::blocking);
  }
  EXPECT_EQ(streams_->to_record().size(), 4U);
  EXPECT_EQ(streams_->meet(stream(16)), StreamKind::permanent);
}

TEST_F(Streams, TheDefaultStreamIsAlwaysThere) {
  EXPECT_EQ(streams_->meet(nullptr), StreamKind::default_stream);
  EXPECT_EQ(streams_->meet(kLegacyStream), StreamKind::default_stream);
  EXPECT_EQ(streams_->to_record().size(), 1U);
}

TEST_F(Streams, APermanentStreamCountsAlthoughNoPoolHasMetIt) {
  take_census(false);
  EXPECT_EQ(streams_->to_record(), (std::vector<Stream>{nullptr, kOne, kTwo}));
}

TEST_F(Streams, AForeignStreamIsNeverRecordedByItsHandle) {
  take_census(true);
  EXPECT_EQ(streams_->meet(kForeign), StreamKind::blocking);
  EXPECT_FALSE(streams_->has_unreachable());
  EXPECT_EQ(streams_->to_record().size(), 3U);
  take_census(false);
  EXPECT_EQ(streams_->meet(kForeign), StreamKind::unreachable) << "asked again: the handle may be another stream's";
  EXPECT_TRUE(streams_->has_unreachable());
  EXPECT_EQ(streams_->to_record().size(), 3U);
}

// ------------------------------------------------------------ points of streams

TEST_F(Streams, APointPassesWhenTheWorkBeforeItIsDone) {
  driver_.hold_fences(kOne);
  StreamPoint held({use(kOne)});
  StreamPoint free({use(kTwo)});
  EXPECT_FALSE(held.passed());
  EXPECT_TRUE(free.passed());
  driver_.release_fences(kOne);
  EXPECT_TRUE(held.passed());
}

TEST_F(Streams, APassedPointAsksTheDriverNoMore) {
  StreamPoint point({use(kOne)});
  EXPECT_TRUE(point.passed());
  const std::uint64_t queries = driver_.count(Call::query);
  EXPECT_TRUE(point.passed());
  EXPECT_EQ(driver_.count(Call::query), queries);
}

TEST_F(Streams, FencesAreUsedAgain) {
  for (int k = 0; k < 20; ++k) StreamPoint({use(kOne)});
  EXPECT_EQ(driver_.count(Call::create_fence), 1U);
}

TEST_F(Streams, BlockingAndPerThreadStreamsAreCoveredByTheDefaultOne) {
  take_census(true);
  for (const Stream blocking : {kForeign, kPerThreadStream}) {
    driver_.hold_fences(blocking);
    driver_.clear_calls();
    StreamPoint point({use(blocking)});
    EXPECT_FALSE(point.passed());
    for (const CallRecord& call : driver_.calls(Call::record)) EXPECT_EQ(call.b, number(nullptr)) << call.text();
    driver_.release_fences();
    EXPECT_TRUE(point.passed());
  }
}

TEST_F(Streams, AnUnreachableStreamIsRecordedWhileItMustBeAliveAndNeverAgain) {
  take_census(false);
  driver_.hold_fences(kForeign);
  StreamPoint recorded({use(kForeign)});
  EXPECT_FALSE(recorded.passed());
  driver_.fail_nth(Call::record, 1, broken());
  StreamPoint failed({use(kForeign)});
  driver_.clear_failures();
  driver_.clear_calls();
  EXPECT_FALSE(failed.passed());
  EXPECT_EQ(driver_.count(Call::record), 0U) << "its handle may be dead by now";
  EXPECT_TRUE(failed.passed(/*queued_is_done=*/true));
  driver_.release_fences();
  EXPECT_TRUE(recorded.passed());
}

TEST_F(Streams, WhatIsCapturedIsRecordedWhenTheCaptureIsOver) {
  driver_.begin_capture(kOne);
  StreamPoint point({use(kOne)});
  EXPECT_FALSE(point.passed());
  EXPECT_FALSE(point.passed(/*queued_is_done=*/true)) << "what uses it runs at the replay";
  driver_.hold_fences(kOne);
  driver_.end_capture(kOne);
  EXPECT_FALSE(point.passed());
  driver_.release_fences();
  EXPECT_TRUE(point.passed());
}

TEST_F(Streams, AFailingQueryIsNoPass) {
  driver_.hold_fences(kOne);
  StreamPoint point({use(kOne)});
  driver_.fail_nth(Call::query, 1, broken());
  EXPECT_FALSE(point.passed()) << "memory must not leave under queued work";
  EXPECT_FALSE(point.passed());
}

TEST_F(Streams, AFailingRecordIsTriedAgain) {
  driver_.fail_nth(Call::record, 1, broken());
  StreamPoint point({use(kOne)});
  EXPECT_EQ(driver_.count(Call::record), 1U);
  EXPECT_TRUE(point.passed());
  EXPECT_EQ(driver_.count(Call::record), 2U);
}

TEST_F(Streams, OrderMakesAStreamsOwnPointFree) {
  driver_.hold_fences();
  StreamPoint point({use(kOne)});
  EXPECT_TRUE(point.order_before(use(kOne)).ok());
  EXPECT_EQ(driver_.count(Call::stream_wait), 0U);
  EXPECT_TRUE(point.order_before(use(kTwo)).ok());
  EXPECT_TRUE(point.order_before(use(kTwo)).ok());
  EXPECT_EQ(driver_.count(Call::stream_wait), 1U) << "a permanent stream waits once";
  EXPECT_EQ(driver_.count(Call::wait), 0U);
}

TEST_F(Streams, AStreamWithAReusableHandleWaitsEachTime) {
  take_census(true);
  driver_.hold_fences();
  StreamPoint point({use(kOne)});
  EXPECT_TRUE(point.order_before(use(kForeign)).ok());
  EXPECT_TRUE(point.order_before(use(kForeign)).ok());
  EXPECT_EQ(driver_.count(Call::stream_wait), 2U);
}

TEST_F(Streams, WaitingFallsBackToTheWholeDevice) {
  driver_.hold_fences(kOne);
  StreamPoint point({use(kOne)});
  driver_.fail_nth(Call::wait, 1, broken());
  EXPECT_TRUE(point.wait().ok());
  EXPECT_EQ(driver_.count(Call::synchronize), 1U);
  EXPECT_TRUE(point.passed());
}

TEST_F(Streams, AWaitThatTheDriverRefusesSaysSo) {
  driver_.hold_fences(kOne);
  StreamPoint point({use(kOne)});
  driver_.fail_nth(Call::wait, 1, broken());
  driver_.fail_nth(Call::synchronize, 1, broken());
  EXPECT_EQ(point.wait().code(), StatusCode::driver_error);
  EXPECT_FALSE(point.passed());
}

TEST_F(Streams, WithoutAnyFenceTheDeviceIsWaitedFor) {
  driver_.fail_nth(Call::create_fence, 1, no_memory(), Repeat::from_then_on);
  StreamPoint point({use(kOne)});
  EXPECT_FALSE(point.passed());
  EXPECT_TRUE(point.wait().ok());
  EXPECT_TRUE(point.passed());
  driver_.clear_failures();
}

TEST_F(Streams, NothingIsWaitedForOnceTheDriverHasGone) {
  driver_.hold_fences(kOne);
  auto point = std::make_unique<StreamPoint>(std::vector<StreamUse>{use(kOne)});
  EXPECT_FALSE(point->passed());
  point.reset();
  ScriptedDriver gone(host_);
  DeviceStreams streams(gone, 0);
  gone.hold_fences();
  StreamPoint left({{&streams, kOne, StreamKind::permanent}});
  EXPECT_FALSE(left.passed());
  gone.go_away();
  EXPECT_TRUE(left.passed());
}

// ---------------------------------------------------------------------- the clock

TEST_F(Streams, WhatIsFreedPassesWithTheTickThatCoversIt) {
  streams_->meet(kOne);
  streams_->meet(kTwo);
  const Epoch freed = clock_->now();
  EXPECT_TRUE(clock_->has_passed(kLongAgo));
  EXPECT_FALSE(clock_->has_passed(freed));
  EXPECT_FALSE(clock_->poll()) << "no tick";
  driver_.hold_fences(kTwo);
  clock_->cover(freed);
  EXPECT_EQ(driver_.count(Call::record), 3U) << "on every stream";
  EXPECT_GT(clock_->now(), freed);
  EXPECT_FALSE(clock_->poll());
  driver_.release_fences();
  EXPECT_TRUE(clock_->poll());
  EXPECT_TRUE(clock_->has_passed(freed));
  EXPECT_FALSE(clock_->has_passed(clock_->now()));
  EXPECT_EQ(clock_->ticks_under_way(), 0U);
}

TEST_F(Streams, OneTickServesAllThatWasFreedBefore) {
  streams_->meet(kOne);
  driver_.hold_fences();
  const Epoch first = clock_->now();
  clock_->cover(first);
  const Epoch second = clock_->now();
  EXPECT_NE(first, second);
  for (int k = 0; k < 10; ++k) clock_->cover(first);
  EXPECT_EQ(clock_->ticks_under_way(), 1U);
  for (int k = 0; k < 10; ++k) clock_->cover(second);
  EXPECT_EQ(clock_->ticks_under_way(), 2U);
  driver_.release_fences();
  EXPECT_TRUE(clock_->poll());
  EXPECT_TRUE(clock_->has_passed(second));
}

TEST_F(Streams, TicksThatHavePassedDoNotGatherWhereNobodyAsks) {
  streams_->meet(kOne);
  for (int k = 0; k < 10; ++k) clock_->cover(clock_->now());
  EXPECT_EQ(clock_->ticks_under_way(), 1U);
}

TEST_F(Streams, TheGpuWaitsForTheOldestTickThatServes) {
  streams_->meet(kOne);
  streams_->meet(kTwo);
  const Epoch early = clock_->now();
  driver_.hold_fences(kOne);
  clock_->cover(early);
  driver_.hold_fences(kTwo);  // work of later
  clock_->cover(clock_->now());
  EXPECT_TRUE(clock_->order_before(use(nullptr), early).ok());
  const Fence on_default = [&] {
    Fence fence = nullptr;
    EXPECT_TRUE(driver_.create_fence(0, &fence).ok());
    EXPECT_TRUE(driver_.record(fence, nullptr).ok());
    return fence;
  }();
  EXPECT_EQ(driver_.query(on_default).code(), StatusCode::not_ready);
  driver_.release_fences(kOne);
  EXPECT_TRUE(driver_.query(on_default).ok()) << "the later work is not waited for";
  EXPECT_TRUE(driver_.destroy_fence(on_default).ok());
  driver_.release_fences();
}

TEST_F(Streams, OrderingWhatHasPassedCostsNothing) {
  EXPECT_TRUE(clock_->order_before(use(kOne), kLongAgo).ok());
  const Epoch freed = clock_->now();
  clock_->cover(freed);
  EXPECT_TRUE(clock_->poll());
  driver_.clear_calls();
  EXPECT_TRUE(clock_->order_before(use(kOne), freed).ok());
  EXPECT_EQ(driver_.count(), 0U);
}

TEST_F(Streams, AWaitPassesAllThatWasFreedBefore) {
  streams_->meet(kOne);
  driver_.hold_fences(kOne);
  const Epoch first = clock_->now();
  clock_->cover(first);
  const Epoch second = clock_->now();
  EXPECT_TRUE(clock_->wait(second).ok());
  EXPECT_TRUE(clock_->has_passed(first) && clock_->has_passed(second));
  EXPECT_EQ(clock_->ticks_under_way(), 0U);
}

TEST_F(Streams, StreamsOfAPeerAreCoveredOnceTheyMayReachTheMemory) {
  others_->meet(kTwo);
  driver_.hold_fences(kTwo);
  clock_->cover(clock_->now());
  EXPECT_TRUE(clock_->poll()) << "not a peer yet";
  clock_->add_peer(*others_);
  clock_->add_peer(*others_);
  const Epoch freed = clock_->now();
  clock_->cover(freed);
  EXPECT_FALSE(clock_->poll());
  EXPECT_TRUE(clock_->wait(freed).ok());
  EXPECT_TRUE(clock_->has_passed(freed));
  driver_.release_fences();
}

TEST_F(Streams, TheDefaultStreamOfEachDeviceIsAnother) {
  Clock theirs(*others_);
  theirs.add_peer(*streams_);
  driver_.hold_fences();
  const StreamUse their_default{&*others_, nullptr, StreamKind::default_stream};
  EXPECT_TRUE(theirs.order_before(their_default, theirs.now()).ok());
  ASSERT_EQ(driver_.count(Call::stream_wait), 1U) << "for our default stream, which has the same handle";
  EXPECT_EQ(driver_.calls(Call::stream_wait).front().c, 1U) << "and it is the other device's that waits";
  driver_.release_fences();
}

TEST_F(Streams, ACaptureIsNeverEndedAndItsStreamsEarlierWorkIsCoveredAfterIt) {
  streams_->meet(kOne);
  driver_.hold_fences(kOne);  // queued before the capture
  driver_.begin_capture(kOne);
  const Epoch freed = clock_->now();
  EXPECT_EQ(clock_->order_before(use(kTwo), freed).code(), StatusCode::not_supported);
  EXPECT_FALSE(clock_->poll());
  driver_.end_capture(kOne);
  EXPECT_FALSE(clock_->poll()) << "the earlier work still runs";
  driver_.release_fences();
  EXPECT_TRUE(clock_->poll());
  EXPECT_TRUE(clock_->has_passed(freed));
}

TEST_F(Streams, NoTicksPileUpWhileACaptureIsInTheWay) {
  streams_->meet(kOne);
  driver_.begin_capture(kOne);
  for (int k = 0; k < 10; ++k) {
    clock_->cover(clock_->now());
    EXPECT_FALSE(clock_->order_before(use(kTwo), clock_->now()).ok());
  }
  EXPECT_EQ(clock_->ticks_under_way(), 1U);
  driver_.end_capture(kOne);
  clock_->cover(clock_->now());
  EXPECT_TRUE(clock_->poll());
}

TEST_F(Streams, WaitingIsPossibleDuringACapture) {
  streams_->meet(kOne);
  driver_.hold_fences(kOne);
  driver_.begin_capture(kOne);
  const Epoch freed = clock_->now();
  EXPECT_TRUE(clock_->wait(freed).ok());
  EXPECT_GT(driver_.count(Call::synchronize), 0U);
  EXPECT_TRUE(clock_->has_passed(freed));
  driver_.end_capture(kOne);
}

TEST_F(Streams, WhatWasFreedBeforeAnAnnouncedCapturePassesWhileItRuns) {
  streams_->meet(kOne);
  const Epoch freed = clock_->now();
  clock_->begin_capture();
  driver_.begin_capture(kOne);
  EXPECT_TRUE(clock_->is_capturing());
  EXPECT_TRUE(clock_->poll());
  EXPECT_TRUE(clock_->has_passed(freed));
  driver_.end_capture(kOne);
  clock_->end_capture();
  EXPECT_FALSE(clock_->is_capturing());
}

TEST_F(Streams, AnUnreachableStreamIsWaitedForOnlyWithTheWholeDevice) {
  take_census(false);
  streams_->meet(kForeign);
  driver_.clear_calls();
  const Epoch freed = clock_->now();
  clock_->cover(freed);
  EXPECT_FALSE(clock_->poll());
  EXPECT_FALSE(clock_->order_before(use(kOne), freed).ok());
  EXPECT_TRUE(clock_->wait(freed).ok());
  EXPECT_EQ(driver_.count(Call::synchronize), 1U);
  EXPECT_TRUE(clock_->has_passed(freed));
  for (const CallRecord& call : driver_.calls(Call::record)) EXPECT_NE(call.b, number(kForeign)) << call.text();
}

TEST_F(Streams, TicksAheadOfNeedComeAfterMemoryWasWantedTooEarlyAndEnd) {
  streams_->meet(kOne);
  for (int k = 0; k < 100; ++k) clock_->freed(64 * kMiB);
  EXPECT_EQ(driver_.count(Call::record), 0U) << "nobody ever needed the clock";
  EXPECT_TRUE(clock_->order_before(use(kTwo), clock_->now()).ok());
  driver_.clear_calls();
  for (int k = 0; k < 1000; ++k) clock_->freed(64 * kMiB);
  const std::uint64_t ticks = driver_.count(Call::record) / streams_->count();
  EXPECT_GT(ticks, 1U);
  EXPECT_LE(ticks, 8U) << "and not for ever";
}

TEST_F(Streams, NoTicksAreMadeAheadOfNeedBesideACapture) {
  streams_->meet(kOne);
  EXPECT_TRUE(clock_->order_before(use(kTwo), clock_->now()).ok());
  driver_.begin_capture(kOne);
  for (int k = 0; k < 100; ++k) clock_->freed(64 * kMiB);
  EXPECT_EQ(clock_->ticks_under_way(), 1U);
  driver_.end_capture(kOne);
}

TEST_F(Streams, EpochsPassInOrderWhateverThreadsDo) {
  streams_->meet(kOne);
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  threads.reserve(4);
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      Epoch last = kLongAgo;
      while (!stop.load()) {
        const Epoch freed = clock_->now();
        if (t == 0) {
          clock_->cover(freed);
        } else if (t == 1) {
          EXPECT_TRUE(clock_->wait(freed).ok());
          EXPECT_TRUE(clock_->has_passed(freed));
        } else {
          clock_->poll();
        }
        const Epoch passed = clock_->passed();
        EXPECT_GE(passed, last);
        EXPECT_LT(passed, clock_->now());
        last = passed;
      }
    });
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  stop = true;
  for (auto& thread : threads) thread.join();
}

}  // namespace
}  // namespace vmm::testing
