// Memory that another allocator gives: what it is asked for and when, which blocks are cut
// from it, when its segments go back, and the numbers of it.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "base/sync.h"
#include "core/device/private_pools.h"
#include "core/device/provided_memory.h"
#include "core/device/provided_segments.h"
#include "core/device/segment_provider.h"
#include "cpp/provided_memory_lab.h"
#include "support/at_one_moment.h"

namespace vmm::testing {
namespace {

// ----------------------------------------------------------------- allocation

TEST_F(ProvidedMemoryTest, SegmentsHaveNativesSizes) {
  const std::vector<std::pair<std::size_t, std::size_t>> sizes = {
      {0, 2 * kMiB},          {1, 2 * kMiB},
      {kMiB, 2 * kMiB},       {kMiB + 1, 20 * kMiB},
      {9 * kMiB, 20 * kMiB},  {10 * kMiB - 512, 20 * kMiB},
      {10 * kMiB, 10 * kMiB}, {10 * kMiB + 1, 12 * kMiB},
      {31 * kMiB, 32 * kMiB},
  };
  std::vector<std::size_t> wanted;
  std::uintptr_t name = 100;
  for (const auto& [bytes, segment] : sizes) {
    allocate(bytes, stream(++name));  // each stream has its own
    wanted.push_back(segment);
  }
  EXPECT_EQ(books.all_asked(), wanted);
}

TEST_F(ProvidedMemoryTest, BlocksOfOneStreamAndSizeClassShareSegments) {
  const Address first = allocate(3 * kMiB);
  EXPECT_EQ(allocate(100), first + 20 * kMiB) << "small ones have segments of their own";
  EXPECT_EQ(allocate(3 * kMiB - 1), first + 3 * kMiB);
  const Address others = allocate(3 * kMiB, kTwo);
  EXPECT_EQ(others, first + 22 * kMiB) << "another stream shares none";
  EXPECT_EQ(books.all_asked().size(), 3U);
  free(first);
  EXPECT_EQ(memory->try_allocate_within(18 * kMiB, kTwo), 0U);
  EXPECT_EQ(allocate(3 * kMiB), first) << "what was freed is used again, at once";
  EXPECT_EQ(books.all_asked().size(), 3U);
}

// What others may borrow is asked for by streams without end.
TEST_F(ProvidedMemoryTest, AStreamThatHasNoSegmentIsNotRemembered) {
  for (std::uintptr_t name = 1; name < 70000; ++name) EXPECT_EQ(memory->try_allocate_within(100, stream(name)), 0U);
  EXPECT_NE(allocate(100, stream(70000)), 0U);
}

TEST_F(ProvidedMemoryTest, ABlockIsFoundByItsAddressAlone) {
  EXPECT_EQ(ProvidedMemory::block_size(Address{1} << 46), 0U);
  const Address block = allocate(3 * kMiB + 1);
  const Address next = allocate(kMiB + 512);
  EXPECT_EQ(ProvidedMemory::block_size(block), 3 * kMiB + 512);
  EXPECT_EQ(ProvidedMemory::segment_at(next), (ByteRange{block, 20 * kMiB}));
  EXPECT_EQ(ProvidedSegments::instance().segment_at(block + 20 * kMiB - 1), (ByteRange{block, 20 * kMiB}));
  EXPECT_EQ(ProvidedSegments::instance().segment_at(block + 20 * kMiB), std::nullopt);
  for (const Address none : {block + 512, block - 512, block + 20 * kMiB}) {
    EXPECT_EQ(ProvidedMemory::block_size(none), 0U);
    EXPECT_EQ(ProvidedMemory::segment_at(none), std::nullopt);
    EXPECT_FALSE(ProvidedMemory::free(none));
    EXPECT_FALSE(ProvidedMemory::record_stream(none, kTwo, lab.memory().streams()));
  }
  free(next);
  EXPECT_FALSE(ProvidedMemory::free(next)) << "it has been freed";
}

TEST_F(ProvidedMemoryTest, WithNoSplitABlockHasItsSegmentForItself) {
  const Address before = allocate(3 * kMiB);
  memory->set_no_split();
  const Address whole = allocate(3 * kMiB, kTwo);
  EXPECT_EQ(ProvidedMemory::block_size(before), 3 * kMiB);
  EXPECT_EQ(ProvidedMemory::block_size(whole), 20 * kMiB);
  EXPECT_NE(allocate(3 * kMiB, kTwo), whole);
  EXPECT_EQ(books.all_asked().size(), 3U);
}

TEST_F(ProvidedMemoryTest, TheProviderIsCalledWithNoLockHeld) {
  std::vector<std::future<bool>> answers;  // their ends wait: after the lock, if one is held
  const Address block = allocate(100);
  // Another thread, as Python's may be: whoever waits for it has let go of everything.
  const auto another_thread_comes = [&] {
    answers.push_back(std::async(std::launch::async, [&] {
      const Address more = memory->try_allocate_within(100, kOne);
      return ProvidedMemory::block_size(block) == 512 && more != 0 && ProvidedMemory::free(more) &&
             ProvidedMemory::snapshot(lab.memory()).size() >= 1 && provided().num_device_alloc >= 1;
    }));
    EXPECT_EQ(answers.back().wait_for(std::chrono::seconds(10)), std::future_status::ready);
  };
  books.in_take = another_thread_comes;
  const Address large = allocate(3 * kMiB);
  books.in_give_back = another_thread_comes;
  free(large);
  memory->close();
  finish(/*wait=*/true);
  ASSERT_EQ(answers.size(), 2U);
  for (auto& answer : answers) EXPECT_TRUE(answer.get());
}

// -------------------------------------------------------------------- refusals

TEST_F(ProvidedMemoryTest, ARefusalHasTheProvidersWords) {
  books.refusals = 2;
  books.words = "closed for today";
  EXPECT_EQ(refusal(3 * kMiB),
            "MemPool (0, 7) got no segment of 20 MiB: the allocator that it was made with says: closed for today");
  EXPECT_EQ(lab.memory().foreign_budget().used(), 0U) << "what was not given is not charged";
  books.refusals = 2;
  books.words = "";
  EXPECT_EQ(refusal(3 * kMiB), "MemPool (0, 7) got no segment of 20 MiB: the allocator that it was made with has none");
  EXPECT_EQ(books.all_asked().size(), 4U) << "twice each";
  EXPECT_EQ(provided().num_ooms, 2);
  EXPECT_EQ(provided().num_alloc_retries, 2);
  allocate(3 * kMiB);
}

TEST_F(ProvidedMemoryTest, AboveTheDevicesLimitNobodyIsAsked) {
  const auto pool = lab.pool("a");
  lab.leave_idle(*pool, 4 * kMiB);
  lab.memory().set_limit(lab.memory().budget(), 19 * kMiB);
  const std::string said = refusal(3 * kMiB);
  EXPECT_NE(said.find(": the limit of the " + lab.memory().budget().name() + " is 19 MiB, and 4 MiB are in use"),
            std::string::npos)
      << said;
  EXPECT_EQ(books.all_asked(), std::vector<std::size_t>{});
  EXPECT_EQ(pool->idle_bytes(), 4 * kMiB) << "nobody's memory would have done";
}

TEST_F(ProvidedMemoryTest, WhatOthersHoldUnusedIsGivenBackBeforeASecondTry) {
  const auto pool = lab.pool("a");
  lab.leave_idle(*pool, 30 * kMiB);
  const auto gone = make({0, 8});
  const Address last = allocate(*gone, 3 * kMiB, kTwo);
  lab.driver.hold_fences();
  free(last);
  gone->close();
  books.refusals = 1;
  allocate(3 * kMiB);
  EXPECT_EQ(books.all_asked(), (std::vector<std::size_t>{20 * kMiB, 20 * kMiB, 20 * kMiB}));
  EXPECT_EQ(books.bytes_out(), 20 * kMiB) << "a pool that is gone has left nothing";
  EXPECT_LE(pool->physical_bytes(), 10 * kMiB);
  EXPECT_GT(pool->physical_bytes(), 0U) << "no more than it lacked";
  EXPECT_EQ(lab.memory().committed_bytes(), 20 * kMiB + pool->physical_bytes());
  EXPECT_EQ(provided().num_alloc_retries, 1);
  EXPECT_EQ(provided().num_ooms, 0);
}

TEST_F(ProvidedMemoryTest, InACaptureThereIsNoSecondTry) {
  const auto pool = lab.pool("a");
  lab.leave_idle(*pool, 30 * kMiB);
  lab.memory().clock().begin_capture();
  books.refusals = 1;
  EXPECT_NE(refusal(3 * kMiB), "");
  EXPECT_EQ(books.all_asked().size(), 1U);
  EXPECT_EQ(pool->idle_bytes(), 30 * kMiB);
  lab.memory().clock().end_capture();
}

// --------------------------------------------------------------------- streams

TEST_F(ProvidedMemoryTest, ABlockWaitsForTheStreamsThatWereRecorded) {
  const Address block = allocate(20 * kMiB);
  EXPECT_TRUE(ProvidedMemory::record_stream(block, kTwo, lab.memory().streams()));
  lab.driver.hold_fences(kTwo);
  free(block);
  EXPECT_TRUE(ProvidedMemory::any_unfinished());
  EXPECT_EQ(memory->try_allocate_within(20 * kMiB, kOne), 0U);
  EXPECT_EQ(provided()[StatKind::allocated_bytes][0].current, 0);
  EXPECT_EQ(provided()[StatKind::active_bytes][0].current, static_cast<std::int64_t>(20 * kMiB));
  lab.driver.release_fences();
  EXPECT_EQ(allocate(20 * kMiB), block);
  EXPECT_FALSE(ProvidedMemory::any_unfinished());
}

// Nobody uses this pool again: what waits in it is not to keep everybody from the fast way.
TEST_F(ProvidedMemoryTest, WhatWaitedInAnOpenPoolIsSettledByWhoeverComes) {
  const Address block = allocate(20 * kMiB);
  EXPECT_TRUE(ProvidedMemory::record_stream(block, kTwo, lab.memory().streams()));
  lab.driver.hold_fences(kTwo);
  free(block);
  finish();
  EXPECT_TRUE(ProvidedMemory::any_unfinished());
  lab.driver.release_fences();
  finish();
  EXPECT_FALSE(ProvidedMemory::any_unfinished());
  EXPECT_EQ(provided()[StatKind::active_bytes][0].current, 0);
  EXPECT_EQ(books.bytes_out(), 20 * kMiB) << "the pool keeps it";
}

TEST_F(ProvidedMemoryTest, ABlocksOwnStreamNeedsNoRecord) {
  const Address block = allocate(20 * kMiB);
  EXPECT_TRUE(ProvidedMemory::record_stream(block, kOne, lab.memory().streams()));
  lab.driver.hold_fences();
  free(block);
  EXPECT_FALSE(ProvidedMemory::any_unfinished());
  EXPECT_EQ(allocate(20 * kMiB), block);
}

// ----------------------------------------------------------------- giving back

TEST_F(ProvidedMemoryTest, SegmentsStayWithAPoolThatLives) {
  free(allocate(3 * kMiB));
  const auto gone = make({0, 8});
  const Address last = allocate(*gone, 30 * kMiB, kOne);
  lab.driver.hold_fences();
  free(last);
  gone->close();
  EXPECT_EQ(books.bytes_out(), 50 * kMiB);
  finish(/*wait=*/true);
  EXPECT_EQ(books.bytes_out(), 20 * kMiB) << "those of the other one alone";
}

TEST_F(ProvidedMemoryTest, SegmentsOfAPoolThatIsGoneWaitForQueuedWork) {
  lab.meet(kTwo);
  const Address block = allocate(3 * kMiB);
  lab.driver.hold_fences(kTwo);  // nobody told us that it reads the block
  free(block);
  memory->close();
  EXPECT_TRUE(ProvidedMemory::any_unfinished());
  finish();
  finish();
  EXPECT_EQ(books.bytes_out(), 20 * kMiB);
  EXPECT_EQ(lab.memory().foreign_budget().used(), 20 * kMiB);
  EXPECT_EQ(memory->try_allocate_within(100 * kKiB, kOne), 0U) << "a segment that leaves serves nobody";
  lab.driver.release_fences();
  finish();
  EXPECT_EQ(books.bytes_out(), 0U);
  EXPECT_EQ(lab.memory().foreign_budget().used(), 0U);
}

TEST_F(ProvidedMemoryTest, EachGoesBackOnceItsOwnWorkAndThatBeforeHasPassed) {
  std::vector<Address> blocks;
  for (int k = 0; k < 4; ++k) blocks.push_back(allocate(30 * kMiB));
  memory->close();
  lab.driver.hold_fences();
  free(blocks[0]);
  free(blocks[1]);
  EXPECT_EQ(books.bytes_out(), 4 * 30 * kMiB);
  lab.driver.release_fences();
  finish();
  EXPECT_EQ(books.bytes_out(), 2 * 30 * kMiB);
  lab.driver.hold_fences();
  free(blocks[2]);
  finish();
  EXPECT_EQ(books.bytes_out(), 2 * 30 * kMiB);
  lab.driver.release_fences();
  free(blocks[3]);
  EXPECT_EQ(books.bytes_out(), 0U) << "all that has passed, with the free";
}

TEST_F(ProvidedMemoryTest, WhoMayWaitGetsThemAtOnce) {
  free(allocate(3 * kMiB));
  lab.driver.hold_fences();
  memory->close();
  finish(/*wait=*/true);
  EXPECT_EQ(books.bytes_out(), 0U);
}

TEST_F(ProvidedMemoryTest, TensorsOutliveTheirPoolAndTakeItsSegmentsAlong) {
  const Address small = allocate(100);
  const Address large = allocate(3 * kMiB);
  memory->close();
  finish(/*wait=*/true);
  EXPECT_EQ(books.bytes_out(), 22 * kMiB);
  free(small);
  EXPECT_EQ(books.bytes_out(), 20 * kMiB) << "with the free, as nothing is queued";
  free(large);
  EXPECT_EQ(books.bytes_out(), 0U);
}

TEST_F(ProvidedMemoryTest, WhatAGraphUsesStaysUntilItsReplaysArePast) {
  memory->set_pinned(true);
  free(allocate(3 * kMiB));
  memory->close();
  Clock& clock = lab.memory().clock();
  EXPECT_TRUE(clock.wait(clock.now()).ok()) << "the free is long ago";
  EXPECT_EQ(books.bytes_out(), 20 * kMiB);
  EXPECT_FALSE(ProvidedMemory::any_unfinished());
  // The last replay is queued, and then the graph goes. Its pool has been released by then.
  lab.driver.hold_fences();
  memory->set_pinned(false);
  memory->close();
  finish();
  EXPECT_EQ(books.bytes_out(), 20 * kMiB);
  lab.driver.release_fences();
  finish();
  EXPECT_EQ(books.bytes_out(), 0U);
}

TEST_F(ProvidedMemoryTest, AProviderThatThrowsKeepsNoOtherSegment) {
  free(allocate(100));
  free(allocate(3 * kMiB));
  // After its own part, as a Python function may.
  books.in_give_back = [first = true]() mutable {
    if (std::exchange(first, false)) throw std::runtime_error("not now");
  };
  memory->close();
  finish();
  EXPECT_EQ(reports, 1);
  expected_reports = 1;
  EXPECT_FALSE(ProvidedMemory::any_unfinished());
  EXPECT_FALSE(ProvidedMemory::any_segment());
  EXPECT_EQ(lab.memory().foreign_budget().used(), 0U);
}

TEST_F(ProvidedMemoryTest, NothingIsGivenBackWhileAGraphIsCaptured) {
  free(allocate(3 * kMiB));
  memory->close();
  lab.memory().clock().begin_capture();
  finish(/*wait=*/true);
  EXPECT_EQ(books.bytes_out(), 20 * kMiB) << "the provider's free would end the capture";
  lab.memory().clock().end_capture();
  finish();
  EXPECT_EQ(books.bytes_out(), 0U);
}

// --------------------------------------------------------------------- numbers

// Events of segments, as "map 20 MiB", and what was out with the provider then.
class Follower final : public PoolObserver {
 public:
  explicit Follower(Books& books) : books_(books) {}
  void on_event(const Pool& /*pool*/, PoolEvent /*event*/, Address /*address*/, std::size_t /*bytes*/,
                Stream /*stream*/) noexcept override {}
  void on_provided(int device, const RegionId& region, PoolEvent event, Address address, std::size_t bytes,
                   Stream on) noexcept override {
    static constexpr std::array kNames = {"alloc", "free", "freed", "map", "unmap", "here", "gone"};
    EXPECT_EQ(device, 0);
    EXPECT_TRUE(region == kRegion);
    last = {address, bytes};
    told.push_back(std::string(kNames.at(static_cast<std::size_t>(event))) + " " + std::to_string(bytes / kMiB) +
                   " on " + std::to_string(number(on)) + " of " + std::to_string(books_.bytes_out() / kMiB));
  }
  std::vector<std::string> told;
  ByteRange last;

 private:
  Books& books_;
};

TEST_F(ProvidedMemoryTest, WhoeverFollowsSegmentsIsToldOfThese) {
  Follower follower(books);
  lab.memory().set_observer(&follower);
  const Address block = allocate(3 * kMiB);
  EXPECT_EQ(follower.told, (std::vector<std::string>{"map 20 on 10 of 20", "here 20 on 10 of 20"}));
  EXPECT_EQ(follower.last, (ByteRange{block, 20 * kMiB}));
  follower.told.clear();
  allocate(kMiB + 512);
  free(block);
  EXPECT_EQ(follower.told, std::vector<std::string>{}) << "blocks are none of theirs";
  free(live.back());
  memory->close();
  finish(/*wait=*/true);
  EXPECT_EQ(follower.told, (std::vector<std::string>{"unmap 20 on 0 of 20", "gone 20 on 0 of 20"}))
      << "while the provider still has it";
}

std::size_t current(const Statistics& statistics, StatKind kind, std::size_t of = 0) {
  return static_cast<std::size_t>(statistics[kind].at(of).current);
}

TEST_F(ProvidedMemoryTest, StatisticsAndSnapshotsAddUp) {
  const Address small = allocate(100);
  const Address large = allocate(3 * kMiB + 1);
  const Address pending = allocate(5 * kMiB);
  ProvidedMemory::record_stream(pending, kTwo, lab.memory().streams());
  lab.driver.hold_fences(kTwo);
  free(pending);
  const Statistics statistics = provided();
  const std::size_t large_size = 3 * kMiB + 512;
  EXPECT_EQ(current(statistics, StatKind::allocation), 2U);
  EXPECT_EQ(current(statistics, StatKind::allocation, 1), 1U);
  EXPECT_EQ(current(statistics, StatKind::allocated_bytes), 512 + large_size);
  EXPECT_EQ(current(statistics, StatKind::active), 3U);
  EXPECT_EQ(current(statistics, StatKind::active_bytes), 512 + large_size + 5 * kMiB);
  EXPECT_EQ(current(statistics, StatKind::requested_bytes), 100 + 3 * kMiB + 1 + 5 * kMiB);
  EXPECT_EQ(current(statistics, StatKind::segment), 2U);
  EXPECT_EQ(current(statistics, StatKind::reserved_bytes, 1), 2 * kMiB);
  EXPECT_EQ(current(statistics, StatKind::reserved_bytes, 2), 20 * kMiB);
  EXPECT_EQ(statistics.num_device_alloc, 2);

  lab.memory().refresh_numbers();
  const Statistics split = provided();
  for (const std::size_t size_class : {1U, 2U}) {
    EXPECT_EQ(current(split, StatKind::inactive_split, size_class), 1U);
    EXPECT_EQ(
        current(split, StatKind::inactive_split_bytes, size_class),
        current(split, StatKind::reserved_bytes, size_class) - current(split, StatKind::active_bytes, size_class));
  }

  const auto snapshot = ProvidedMemory::snapshot(lab.memory());
  ASSERT_EQ(snapshot.size(), 2U);
  SegmentSnapshot sum;
  for (const auto& [region, segment] : snapshot) {
    EXPECT_TRUE(region == kRegion);
    EXPECT_EQ(segment.stream, kOne);
    EXPECT_EQ(segment.size_class == SizeClass::small_pool, segment.total_size == 2 * kMiB);
    std::size_t tiled = 0;
    for (const BlockSnapshot& block : segment.blocks) tiled += block.size;
    EXPECT_EQ(tiled, segment.total_size);
    sum.total_size += segment.total_size;
    sum.allocated_size += segment.allocated_size;
    sum.active_size += segment.active_size;
    sum.requested_size += segment.requested_size;
  }
  EXPECT_EQ(sum.total_size, current(statistics, StatKind::reserved_bytes));
  EXPECT_EQ(sum.allocated_size, current(statistics, StatKind::allocated_bytes));
  EXPECT_EQ(sum.active_size, current(statistics, StatKind::active_bytes));
  EXPECT_EQ(sum.requested_size, current(statistics, StatKind::requested_bytes));

  // What is about to leave is still a segment, with nothing in it.
  memory->close();
  free(small);
  EXPECT_EQ(books.bytes_out(), 22 * kMiB);
  const auto later = ProvidedMemory::snapshot(lab.memory());
  ASSERT_EQ(later.size(), 2U);
  EXPECT_EQ(later.back().snapshot.address, small);
  EXPECT_EQ(later.back().snapshot.total_size, 2 * kMiB);
  EXPECT_EQ(later.back().snapshot.active_size, 0U);
  EXPECT_EQ(current(provided(), StatKind::reserved_bytes), 22 * kMiB);
  lab.driver.release_fences();
  free(large);
  EXPECT_EQ(books.bytes_out(), 0U);
  EXPECT_EQ(provided().num_device_free, 2);
}

// Once the sum's own peak was followed by nobody: it was the larger of the two pools' and what was there.
TEST_F(ProvidedMemoryTest, TheDeviceCountsItWithItsPools) {
  const auto pool = lab.pool("a");
  const auto of_device = [&] { return lab.memory().statistics()[StatKind::allocated_bytes][0]; };
  const Address ours = lab.allocate(*pool, 4 * kMiB, kOne);
  const Address given = allocate(3 * kMiB);
  EXPECT_EQ(of_device().current, static_cast<std::int64_t>(7 * kMiB));
  free(given);
  free(allocate(2 * kMiB));
  lab.free(ours);
  EXPECT_EQ(of_device().peak, static_cast<std::int64_t>(7 * kMiB));
  lab.memory().reset_peaks();
  free(allocate(2 * kMiB));
  EXPECT_EQ(of_device().peak, static_cast<std::int64_t>(2 * kMiB));
  EXPECT_EQ(of_device().freed, static_cast<std::int64_t>(11 * kMiB));
  EXPECT_EQ(provided()[StatKind::allocated_bytes][0].peak, 0) << "of several there is no sum";
  EXPECT_EQ(memory->statistics()[StatKind::allocated_bytes][0].peak, static_cast<std::int64_t>(2 * kMiB));
  lab.memory().reset_accumulated();
  EXPECT_EQ(of_device().freed, 0);
  EXPECT_EQ(provided().num_device_alloc, 0);
}

TEST_F(ProvidedMemoryTest, WhatHasEndedStaysInTheDevicesNumbers) {
  auto brief = make({0, 9});
  free(allocate(*brief, 3 * kMiB, kOne));
  brief->close();
  finish(/*wait=*/true);
  std::erase(made, brief);
  brief = nullptr;
  const Statistics statistics = lab.memory().statistics();
  EXPECT_EQ(statistics[StatKind::allocation][0].allocated, 1);
  EXPECT_EQ(statistics[StatKind::allocation][0].current, 0);
  EXPECT_EQ(statistics[StatKind::reserved_bytes][0].freed, static_cast<std::int64_t>(20 * kMiB));
  EXPECT_EQ(statistics.num_device_alloc, 1);
  EXPECT_EQ(statistics.num_device_free, 1);
}

TEST_F(ProvidedMemoryTest, ADevicesNumbersAreItsOwn) {
  DeviceMemory other(lab.driver, lab.space, 0, LabSpec::plain_options());
  free(allocate(3 * kMiB));
  lab.driver.hold_fences();
  memory->close();
  EXPECT_EQ(ProvidedMemory::snapshot(lab.memory()).size(), 1U);
  EXPECT_EQ(ProvidedMemory::snapshot(other).size(), 0U);
  EXPECT_EQ(ProvidedMemory::all_of(other).size(), 0U);
  EXPECT_EQ(other.statistics()[StatKind::reserved_bytes][0].current, 0);
  ProvidedMemory::finish_closed(other, /*wait=*/true);
  EXPECT_EQ(books.bytes_out(), 20 * kMiB);
}

// --------------------------------------------------------------------- threads

// What it had counted before came back with its end, in one of 34 rounds.
TEST_F(ProvidedMemoryTest, WhatIsResetStaysSoWhileOneEnds) {
  for (int round = 0; round < 2000; ++round) {
    auto brief = std::make_shared<ProvidedMemory>(lab.memory(), RegionId{0, 9},
                                                  std::make_unique<ScriptedProvider>(books), &report);
    ProvidedMemory::free(brief->allocate(3 * kMiB, kOne));
    brief->close();
    finish(/*wait=*/true);
    const auto end = [&] {
      spin(round % 400);
      brief.reset();
    };
    at_one_moment(end, [&] { lab.memory().reset_accumulated(); });
    const Statistics statistics = lab.memory().statistics();
    ASSERT_EQ(statistics[StatKind::allocation][0].allocated, 0);
    ASSERT_EQ(statistics.num_device_alloc, 0);
  }
}

TEST_F(ProvidedMemoryTest, ThreadsAllocateAndFreeAtOnce) {
  Mutex mutex;
  std::map<Address, std::size_t> mine;  // live blocks, of all threads
  const auto overlaps = [&](Address at, std::size_t size) VMM_REQUIRES(mutex) {
    const auto after = mine.lower_bound(at);
    if (after != mine.end() && after->first < at + size) return true;
    return after != mine.begin() && std::prev(after)->first + std::prev(after)->second > at;
  };
  const auto work = [&](std::uintptr_t thread) {
    std::uint64_t state = thread;
    for (int turn = 0; turn < 400; ++turn) {
      state = state * 6364136223846793005ULL + 1442695040888963407ULL;
      const std::size_t bytes = (state >> 33) % (turn % 8 == 0 ? 12 * kMiB : 100 * kKiB) + 1;
      const Address block = memory->allocate(bytes, stream(1 + (thread + static_cast<std::uintptr_t>(turn)) % 3));
      if (turn % 5 == 0) ProvidedMemory::record_stream(block, kTwo, lab.memory().streams());
      Address freed = 0;
      {
        const MutexLock lock(mutex);
        EXPECT_FALSE(overlaps(block, bytes));
        mine[block] = bytes;
        // Whoever has the lowest frees it, whose ever it is.
        if (mine.size() > 40) {
          freed = mine.begin()->first;
          mine.erase(mine.begin());
        }
      }
      if (freed != 0) {
        EXPECT_TRUE(ProvidedMemory::free(freed));
      }
      if (turn % 50 == 0) finish();
      if (turn % 70 == 0) (void)ProvidedMemory::snapshot(lab.memory());
      if (turn % 60 == 0) lab.memory().refresh_numbers();
      if (turn % 60 == 30) lab.memory().reset_peaks();
    }
  };
  std::vector<std::thread> threads;
  for (std::uintptr_t thread = 1; thread <= 4; ++thread) threads.emplace_back(work, thread);
  for (auto& thread : threads) thread.join();
  // The pool goes, and its last blocks with several threads at once.
  memory->close();
  threads.clear();
  std::vector<Address> rest;
  for (const auto& [block, bytes] : mine) rest.push_back(block);
  for (std::size_t thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      for (std::size_t k = thread; k < rest.size(); k += 4) EXPECT_TRUE(ProvidedMemory::free(rest[k]));
    });
  }
  for (auto& thread : threads) thread.join();
  finish(/*wait=*/true);
  EXPECT_EQ(books.bytes_out(), 0U);
}

}  // namespace
}  // namespace vmm::testing
