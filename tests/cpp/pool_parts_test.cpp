// Private pools of torch's as parts of a model: who pays, what a graph pins,
// checkpoints, and what an observer is told.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "cpp/lab.h"

namespace vmm::testing {
namespace {

const Stream kOne = stream(0x10);
const Stream kTwo = stream(0x20);
constexpr RegionId kGraph{1, 0};

std::int64_t reserved(const Statistics& statistics) { return statistics[StatKind::reserved_bytes][0].current; }

// Calls that touch `captured` answer as CUDA does while it is being captured.
void capture(Lab& lab, Stream captured) {
  lab.memory().clock().begin_capture();
  lab.driver.begin_capture(captured);
}
void end_capture(Lab& lab) {
  lab.driver.end_capture(kOne);
  lab.driver.end_capture(kTwo);
  lab.memory().clock().end_capture();
}

TEST(Parts, AreCountedAndPaidByTheModel) {
  Lab lab;
  const auto model = lab.pool("a", 16 * kMiB);
  const auto part = lab.memory().create_part(model, kGraph, false);
  const Address own = lab.allocate(*model, 4 * kMiB);
  const Address other = lab.allocate(*part, 8 * kMiB);
  EXPECT_TRUE(part->is_part() && !model->is_part());
  EXPECT_EQ(&part->model(), model.get());
  EXPECT_EQ(model->budget().used(), 12 * kMiB);
  EXPECT_EQ(reserved(lab.memory().statistics_of(*model)), static_cast<std::int64_t>(12 * kMiB));
  EXPECT_EQ(lab.memory().memory_stats_of(*model).allocated_bytes, 12 * kMiB);
  EXPECT_THROW(lab.allocate(*part, 6 * kMiB), OutOfMemoryError) << "the model's limit is the part's";
  EXPECT_THROW(lab.memory().close_pool(*model, false), StillInUseError);
  lab.free(other);
  lab.free(own);
  lab.memory().close_pool(*part, true);
  EXPECT_EQ(lab.memory().family(*model).size(), 1U);
  EXPECT_EQ(model->budget().used(), 4 * kMiB);
  const Statistics after = lab.memory().statistics_of(*model);
  EXPECT_EQ(after[StatKind::allocation][0].allocated, 2) << "what an ended part had counted stays counted";
  EXPECT_EQ(after[StatKind::allocated_bytes][0].peak, static_cast<std::int64_t>(12 * kMiB)) << "of both together";
}

TEST(Parts, PeaksOfBeforeTheFirstPartStay) {
  Lab lab;
  const auto model = lab.pool("a");
  lab.leave_idle(*model, 20 * kMiB);
  const auto part = lab.memory().create_part(model, kGraph, false);
  lab.allocate(*part, 2 * kMiB);
  const Statistics statistics = lab.memory().statistics_of(*model);
  EXPECT_EQ(statistics[StatKind::allocated_bytes][0].peak, static_cast<std::int64_t>(20 * kMiB));
  lab.memory().reset_peaks_of(*model);
  EXPECT_EQ(lab.memory().statistics_of(*model)[StatKind::allocated_bytes][0].peak, static_cast<std::int64_t>(2 * kMiB));
}

TEST(Parts, AFullModelTakesItsOwnPartsIdleMemoryUnlessPinned) {
  Lab lab;
  const auto model = lab.pool("a", 8 * kMiB);
  const auto part = lab.memory().create_part(model, kGraph, false);
  part->pin();
  lab.leave_idle(*part, 8 * kMiB);
  EXPECT_THROW(lab.allocate(*model, 8 * kMiB), OutOfMemoryError);
  part->unpin();
  lab.allocate(*model, 8 * kMiB);
  EXPECT_EQ(part->physical_bytes(), 0U);
}

TEST(Pinned, MemoryNeitherMovesNorLeaves) {
  Lab lab;
  const auto model = lab.pool("a", 32 * kMiB);
  const auto part = lab.memory().create_part(model, kGraph, false);
  part->pin();
  const Address block = lab.leave_idle(*part, 16 * kMiB);
  lab.driver.clear_calls();
  EXPECT_EQ(lab.memory().trim(*part, 0), 0U);
  lab.memory().empty_cache();
  lab.memory().trim(*model, 0);
  lab.allocate(*part, 8 * kMiB, kTwo);  // another stream: its own idle chunks are not moved
  EXPECT_EQ(lab.driver.count(Call::unmap), 0U);
  EXPECT_EQ(part->physical_bytes(), 24 * kMiB);
  EXPECT_EQ(lab.memory().memory_stats_of(*model).idle_bytes, 0U) << "nobody can have it";
  EXPECT_EQ(lab.allocate(*part, 16 * kMiB), block) << "in the pool it is used again";
}

TEST(Pinned, AnotherStreamNeverGetsWhatGraphsMayUse) {
  Lab lab;
  const auto model = lab.pool(Lab::spec("a"));
  PoolSpec few = Lab::spec("a (1, 0)");
  few.capacity = 8 * kMiB;
  few.kind = PoolKind::graph;
  few.model = model;
  few.region = kGraph;
  const auto part = lab.pool(few);
  part->pin();
  const Address block = lab.leave_idle(*part, 8 * kMiB, kOne);  // all of its addresses
  EXPECT_THROW(lab.allocate(*part, kPage, kTwo), OutOfMemoryError);
  EXPECT_THROW(lab.memory().allocate_at(*part, block, kPage, kTwo), AlreadyMappedError);
  EXPECT_EQ(lab.allocate(*part, 8 * kMiB, kOne), block);
  lab.free(block);
  part->unpin();
  EXPECT_EQ(lab.allocate(*part, 8 * kMiB, kTwo), block);
}

TEST(Pinned, GrowsByFreshChunksOnly) {
  Lab lab;
  const auto other = lab.pool("b");
  lab.leave_idle(*other, 16 * kMiB);
  other->shed(0);
  const auto model = lab.pool("a");
  const auto part = lab.memory().create_part(model, kGraph, false);
  part->pin();
  const std::size_t made = lab.driver.live_chunk_bytes();
  lab.driver.clear_calls();
  lab.allocate(*part, 16 * kMiB, kOne);
  EXPECT_EQ(lab.driver.live_chunk_bytes(), made + 16 * kMiB) << "what rests on the shelf has been used";
  EXPECT_EQ(lab.driver.count(Call::fill_async) + lab.driver.count(Call::stream_wait), 0U);
}

TEST(Pinned, GetsAtALimitWhatOthersHoldIdle) {
  Lab lab;
  const auto group = lab.memory().create_group("group", 16 * kMiB);
  const auto idle = lab.pool(Lab::spec("b"), group.get());
  lab.leave_idle(*idle, 16 * kMiB, kTwo);
  const auto model = lab.pool(Lab::spec("a"), group.get());
  const auto part = lab.memory().create_part(model, kGraph, false);
  part->pin();
  capture(lab, kOne);
  const Address block = lab.allocate(*part, 12 * kMiB, kOne);
  EXPECT_TRUE(Lab::is_zero(block, 12 * kMiB));
  end_capture(lab);
}

TEST(Pinned, GetsOnAFullDeviceWhatOthersHoldIdle) {
  for (const bool is_pinned : {true, false}) {
    Lab lab(LabSpec{32 * kMiB});
    const auto a = lab.pool("a");
    const auto b = lab.pool("b");
    lab.leave_idle(*b, 32 * kMiB);
    const auto part = lab.memory().create_part(a, {1, 0}, /*no_split=*/!is_pinned);
    if (is_pinned) part->pin();
    const Address block = lab.allocate(*part, 20 * kMiB);  // less than twice that is there
    EXPECT_NE(block, 0U);
    lab.free(block);
  }
}

TEST(Pinned, WhatGraphsLeftQueuedIsWaitedForBeforeMemoryGoes) {
  Lab lab;
  const auto group = lab.memory().create_group("group", 8 * kMiB);
  const auto model = lab.pool(Lab::spec("a"), group.get());
  const auto other = lab.pool(Lab::spec("b"), group.get());
  const auto part = lab.memory().create_part(model, kGraph, false);
  part->pin();
  lab.leave_idle(*part, 8 * kMiB, kOne);
  lab.meet(kTwo);
  lab.driver.hold_fences(kTwo);  // a replay on another stream
  part->unpin();
  lab.memory().close_pool(*part, true);
  EXPECT_EQ(lab.driver.count(Call::unmap), 0U) << "the replay still uses the address";
  lab.driver.release_fences();
  lab.allocate(*other, 8 * kMiB);
  lab.memory().empty_cache();
  EXPECT_GT(lab.driver.count(Call::unmap), 0U);
}

TEST(Captured, AFreedBlockWithARecordedStreamWaitsForTheEndOfTheCapture) {
  Lab lab;
  const auto pool = lab.pool("a");
  const Address block = lab.allocate(*pool, 4 * kMiB, kOne);
  pool->record_stream(block, kTwo);
  capture(lab, kTwo);
  lab.driver.clear_calls();
  lab.free(block);
  lab.memory().settle(/*wait=*/true);
  EXPECT_EQ(pool->memory_stats().quarantined_bytes, 4 * kMiB) << "what uses it runs at the replay";
  end_capture(lab);
  EXPECT_TRUE(pool->settle());
}

TEST(Captured, NothingIsWaitedForOrFilledOnACapturedStream) {
  Lab lab;
  const auto pool = lab.pool("a");
  lab.leave_idle(*pool, 8 * kMiB, kTwo);  // would be moved by a wait on the GPU
  lab.driver.hold_fences(kTwo);
  capture(lab, kOne);
  pool->budget().set_limit(16 * kMiB);
  const Address block = lab.allocate(*pool, 8 * kMiB, kOne);
  EXPECT_TRUE(Lab::is_zero(block, 8 * kMiB));
  end_capture(lab);
}

TEST(Checkpoints, BlocksComeBackAtTheirAddresses) {
  Lab lab;
  const auto model = lab.pool("a");
  const auto part = lab.memory().create_part(model, kGraph, false);
  part->pin();
  const Address small = lab.allocate(*part, 3000, kOne);
  const Address other = lab.allocate(*part, 700, kTwo);
  const Address large = lab.allocate(*part, 5 * kMiB, kOne);
  const PoolCheckpoint then = part->checkpoint();
  Lab::fill(large, 5 * kMiB, 1);
  for (const Address block : {small, other, large}) lab.free(block);
  const Address later = lab.allocate(*part, 6 * kMiB, kOne);
  std::vector<Address> freed;
  std::vector<Address> allocated;
  part->restore(then, &freed, &allocated);
  lab.memory().check();
  EXPECT_EQ(freed, std::vector<Address>{later});
  std::sort(allocated.begin(), allocated.end());
  std::vector<Address> expected{small, other, large};
  std::sort(expected.begin(), expected.end());
  EXPECT_EQ(allocated, expected);
  EXPECT_EQ(part->block_size(small), 3072U);
  EXPECT_EQ(part->block_size(large), 5 * kMiB);
  EXPECT_TRUE(Lab::holds(large, 5 * kMiB, 1)) << "restoring changes no byte";
  EXPECT_EQ(part->physical_bytes(), lab.memory().memory_stats_of(*model).physical_usage);
  part->restore({}, &freed, &allocated);
  EXPECT_EQ(part->live_blocks(), 0U);
  lab.memory().check();
  lab.forget(later);
}

TEST(Checkpoints, AreRefusedWhileAFreedBlockIsInUse) {
  Lab lab;
  const auto part = lab.memory().create_part(lab.pool("a"), kGraph, false);
  const Address block = lab.allocate(*part, 4 * kMiB, kOne);
  part->record_stream(block, kTwo);
  lab.driver.hold_fences(kTwo);
  lab.free(block);
  EXPECT_THROW((void)part->checkpoint(), VmmError);
}

TEST(Checkpoints, AreRefusedWhenTheirMemoryHasLeft) {
  Lab lab;
  const auto part = lab.memory().create_part(lab.pool("a"), kGraph, false);
  const Address block = lab.allocate(*part, 4 * kMiB, kOne);
  const PoolCheckpoint then = part->checkpoint();
  lab.free(block);
  lab.memory().trim(*part, 0);
  std::vector<Address> freed;
  std::vector<Address> allocated;
  EXPECT_THROW(part->restore(then, &freed, &allocated), VmmError);
  EXPECT_TRUE(freed.empty() && allocated.empty());
}

TEST(NoSplit, ABlockHasAChunkForItself) {
  Lab lab;
  const auto part = lab.memory().create_part(lab.pool("a"), kGraph, /*no_split=*/true);
  const Address large = lab.leave_idle(*part, 20 * kMiB);
  const Address small = lab.allocate(*part, 1000);
  EXPECT_EQ(small, large) << "all of the smallest chunk that fits";
  EXPECT_EQ(part->block_size(small), 20 * kMiB);
  const Address other = lab.allocate(*part, 1000);
  EXPECT_FALSE(other >= large && other < large + 20 * kMiB) << "nothing is cut";
  EXPECT_EQ(part->block_size(other), kPage);
  lab.free(small);
  EXPECT_EQ(lab.allocate(*part, 19 * kMiB), large);
  EXPECT_EQ(part->chunks_under(large, 20 * kMiB).size(), 1U);
}

TEST(NoSplit, AnotherStreamsRequestTakesAWholeChunkToo) {
  Lab lab;
  const auto part = lab.memory().create_part(lab.pool("a"), kGraph, /*no_split=*/true);
  const Address large = lab.leave_idle(*part, 20 * kMiB, kOne);
  EXPECT_EQ(part->try_allocate_within(3 * kMiB, kOne), large);
  lab.adopt(large);
  EXPECT_EQ(part->block_size(large), 20 * kMiB);
}

TEST(NoSplit, NoBlockStandsAtAGivenAddress) {
  Lab lab;
  const auto part = lab.memory().create_part(lab.pool("a"), kGraph, /*no_split=*/true);
  const Address idle = lab.leave_idle(*part, 12 * kMiB, kOne);
  EXPECT_THROW(lab.memory().allocate_at(*part, idle + 20 * kMiB, 3 * kMiB, kOne), InvalidRangeError);
  EXPECT_EQ(part->live_blocks(), 0U);
}

TEST(At, ABlockStandsWhereItIsAskedFor) {
  Lab lab;
  const auto pool = lab.pool("a");
  const Address wanted = pool->base() + 10 * kMiB + 512;
  EXPECT_EQ(lab.memory().allocate_at(*pool, wanted, 3 * kMiB, kOne), wanted);
  lab.adopt(wanted);
  EXPECT_THROW(lab.memory().allocate_at(*pool, wanted + kMiB, 100, kOne), AlreadyMappedError);
  EXPECT_THROW(lab.memory().allocate_at(*pool, wanted + 100, 100, kOne), InvalidRangeError);
  lab.memory().check();
}

// What was told, as "alloc 1000".
class Listener final : public PoolObserver {
 public:
  void on_event(const Pool& /*pool*/, PoolEvent event, Address address, std::size_t bytes,
                Stream /*stream*/) noexcept override {
    static constexpr const char* kNames[] = {"alloc", "free_requested", "free_completed", "map", "unmap", "here",
                                             "gone"};
    told.push_back(std::string(kNames[static_cast<int>(event)]) + " " + std::to_string(bytes));
    if (event == PoolEvent::segment_map) mapped += bytes;
    if (event == PoolEvent::segment_unmap) mapped -= bytes;
    last = address;
  }
  std::vector<std::string> told;
  std::size_t mapped = 0;
  Address last = 0;
};

TEST(Observer, IsToldOfEverythingInOrder) {
  Listener listener;
  Lab lab;
  const auto pool = lab.pool("a");
  lab.memory().set_observer(&listener);
  const Address block = lab.allocate(*pool, 1500 * kKiB, kOne);
  EXPECT_EQ(listener.told, (std::vector<std::string>{"map 2097152", "here 2097152", "alloc 1536000"}));
  EXPECT_EQ(listener.last, block);
  pool->record_stream(block, kTwo);
  lab.driver.hold_fences(kTwo);
  listener.told.clear();
  lab.free(block);
  EXPECT_EQ(listener.told, std::vector<std::string>{"free_requested 1536000"});
  lab.driver.release_fences();
  lab.memory().empty_cache();
  EXPECT_EQ(listener.told, (std::vector<std::string>{"free_requested 1536000", "free_completed 1536000",
                                                     "unmap 2097152", "gone 2097152"}));
  EXPECT_EQ(listener.mapped, 0U);
  lab.memory().set_observer(nullptr);
}

TEST(Snapshots, OfChunksAreCutAtTheirBordersAndNumbered) {
  Lab lab;
  const auto pool = lab.pool("a");
  lab.allocate(*pool, 7 * kMiB, kOne);
  lab.allocate(*pool, 1000, kTwo);
  const auto runs = pool->snapshot(SnapshotGrain::run);
  const auto chunks = pool->snapshot(SnapshotGrain::chunk);
  const auto sum = [](const auto& segments, auto member) {
    std::size_t bytes = 0;
    for (const auto& segment : segments) bytes += segment.*member;
    return bytes;
  };
  EXPECT_EQ(chunks.size(), static_cast<std::size_t>(pool->statistics()[StatKind::segment][0].current));
  for (const auto member : {&SegmentSnapshot::total_size, &SegmentSnapshot::allocated_size,
                            &SegmentSnapshot::active_size, &SegmentSnapshot::requested_size}) {
    EXPECT_EQ(sum(runs, member), sum(chunks, member));
  }
  for (const SegmentSnapshot& segment : chunks) {
    const auto under = pool->chunks_under(segment.address, 1);
    ASSERT_EQ(under.size(), 1U);
    EXPECT_EQ(under.front().address, segment.address);
    EXPECT_EQ(under.front().size, segment.total_size);
    std::size_t tiled = 0;
    for (const BlockSnapshot& block : segment.blocks) tiled += block.size;
    EXPECT_EQ(tiled, segment.total_size);
  }
}

TEST(InactiveSplit, IsWhatIsStranded) {
  Lab lab;
  const auto pool = lab.pool("a");
  const Address one = lab.allocate(*pool, 20 * kMiB, kOne);
  const Address two = lab.allocate(*pool, 1200 * kKiB, kOne);
  const Address tiny = lab.allocate(*pool, 100, kOne);
  lab.free(one);
  pool->refresh_numbers();
  const Statistics statistics = pool->statistics();
  EXPECT_EQ(statistics[StatKind::inactive_split_bytes][0].current,
            static_cast<std::int64_t>(pool->memory_stats().stranded_bytes));
  EXPECT_GT(statistics[StatKind::inactive_split][1].current, 0);
  for (const Address block : {two, tiny}) lab.free(block);
  lab.memory().refresh_numbers();
  EXPECT_EQ(pool->statistics()[StatKind::inactive_split][0].current, 0);
}

// A graph's last replays may still be queued when it has gone. What threads keep is not
// ordered behind them, so nothing is kept until they have passed.
TEST(Parts, WhatAGraphUsedIsKeptByNobodyWhileItsReplaysMayRun) {
  Lab lab;
  for (const Stream each : {kOne, kTwo}) lab.meet(each);
  const auto part = lab.memory().create_part(lab.pool("a"), kGraph, false);
  part->pin();
  const Address first = lab.allocate(*part, kMiB, kOne);
  const Address second = lab.allocate(*part, kMiB, kOne);
  lab.driver.hold_fences(kTwo);
  part->unpin();
  lab.free(first);  // where blocks may be kept the thread has a place for them from here on
  lab.free(second);
  EXPECT_EQ(lab.memory().kept_blocks(*part), 0U);
  lab.driver.clear_calls();
  lab.allocate(*part, kMiB, kOne);
  EXPECT_GT(lab.driver.count(Call::stream_wait), 0U) << "the stream's work comes after the replays";
}

TEST(Parts, ThePeakOfTheModelHasWhatAThreadCountedBeforeItWasGathered) {
  Lab lab;
  const auto model = lab.pool("m");
  const auto part = lab.memory().create_part(model, kGraph, false);
  const auto allocated = [&] { return lab.memory().statistics_of(*model)[StatKind::allocated_bytes][0]; };
  lab.free(lab.allocate(*model, 4 * kMiB, kOne));  // from here on the thread counts
  const Address first = lab.allocate(*model, 4 * kMiB, kOne);
  const Address second = lab.allocate(*model, 6 * kMiB, kOne);
  model->shed(0);  // what it has counted is the pool's
  lab.allocate(*part, 8 * kMiB, kOne);
  EXPECT_EQ(allocated().current, static_cast<std::int64_t>(18 * kMiB));
  lab.memory().reset_peaks_of(*model);
  lab.free(first);
  lab.free(second);
  lab.allocate(*model, 9 * kMiB, kOne);
  EXPECT_EQ(allocated().peak, static_cast<std::int64_t>(18 * kMiB));
}

TEST(Parts, AModelsFirstOneFindsThePeakThatAThreadCounted) {
  constexpr int kBlocks = 100;
  Lab lab;
  const auto model = lab.pool("m");
  const auto peak = [&] { return lab.memory().statistics_of(*model)[StatKind::allocation][0].peak; };
  for (int k = 0; k < 2; ++k) lab.free(lab.allocate(*model, 512, kOne));  // from here on the thread counts
  std::vector<Address> blocks;
  for (int k = 0; k < kBlocks; ++k) blocks.push_back(lab.allocate(*model, 4096, kOne));
  for (const Address each : blocks) lab.free(each);
  EXPECT_EQ(peak(), kBlocks);
  const auto part = lab.memory().create_part(model, kGraph, false);
  EXPECT_EQ(peak(), kBlocks);
}

}  // namespace
}  // namespace vmm::testing
