// Memory leaves its stream only behind all streams: the rule at the level of
// pools, case by case. That it holds in every program is the random programs'
// proof (stream_program_test).
#include <gtest/gtest.h>

#include "core/device/private_pools.h"
#include "core/faces/shared_memory_pool.h"
#include "core/memory/address_space.h"
#include "cpp/lab.h"

namespace vmm::testing {
namespace {

const Stream kOne = stream(0x10);
const Stream kTwo = stream(0x20);
const Stream kReader = stream(0x90);  // no pool ever meets it

class StreamOrder : public ::testing::Test {
 protected:
  StreamOrder() { lab_.meet(kReader); }
  // Work that reads memory and is not done until released.
  void read_late() { lab_.driver.hold_fences(kReader); }
  // Work queued on `later` from now on comes after the reader's.
  bool is_behind_the_reader(Stream later) {
    Fence fence = nullptr;
    EXPECT_TRUE(lab_.driver.create_fence(0, &fence).ok());
    EXPECT_TRUE(lab_.driver.record(fence, later).ok());
    const bool behind = lab_.driver.query(fence).code() == StatusCode::not_ready;
    EXPECT_TRUE(lab_.driver.destroy_fence(fence).ok());
    return behind;
  }
  std::uint64_t waits() { return lab_.driver.count(Call::wait) + lab_.driver.count(Call::synchronize); }
  std::shared_ptr<Pool> model(SharedMemoryPool& shared, const char* id) {
    ModelSpec spec;
    spec.virtual_capacity = kGiB;
    return shared.register_model(id, spec);
  }

  Lab lab_;
};

TEST_F(StreamOrder, AnotherStreamGetsMemoryBehindReadersThatNobodyRecorded) {
  const auto pool = lab_.pool("a", 32 * kMiB);
  const Address block = lab_.allocate(*pool, 32 * kMiB, kOne);
  read_late();
  lab_.free(block);
  lab_.allocate(*pool, 32 * kMiB, kTwo);
  EXPECT_TRUE(is_behind_the_reader(kTwo));
  EXPECT_EQ(waits(), 0U) << "the GPU waits, not the caller";
}

TEST_F(StreamOrder, ItsOwnStreamGetsItAtOnce) {
  const auto pool = lab_.pool("a", 32 * kMiB);
  const Address block = lab_.allocate(*pool, 32 * kMiB, kOne);
  read_late();
  lab_.free(block);
  EXPECT_EQ(lab_.allocate(*pool, 32 * kMiB, kOne), block);
  EXPECT_FALSE(is_behind_the_reader(kOne)) << "the program waits before that, as under native";
}

TEST_F(StreamOrder, AnotherModelGetsItBehindThem) {
  SharedMemoryPool shared(lab_.memory(), 32 * kMiB);
  const auto a = model(shared, "a");
  const auto b = model(shared, "b");
  const Address block = lab_.allocate(*a, 32 * kMiB, kOne);
  read_late();
  lab_.free(block);
  lab_.driver.clear_calls();
  lab_.allocate(*b, 32 * kMiB, kOne);  // also on the very same stream
  const auto fills = lab_.driver.calls(Call::fill_async);
  const auto ordered = lab_.driver.calls(Call::stream_wait);
  ASSERT_FALSE(fills.empty() || ordered.empty());
  EXPECT_LT(ordered.back().number, fills.front().number) << "scrubbing is a use as well";
  EXPECT_TRUE(is_behind_the_reader(kOne));
  EXPECT_EQ(waits(), 0U);
}

TEST_F(StreamOrder, MemoryOfTheShelfIsUsedBehindThem) {
  const auto pool = lab_.pool("a");
  const Address block = lab_.allocate(*pool, 8 * kMiB, kOne);
  read_late();
  lab_.free(block);
  pool->shed(0);
  EXPECT_EQ(pool->physical_bytes(), 0U);
  EXPECT_EQ(lab_.driver.count(Call::unmap), 0U) << "the reader still uses the address";
  lab_.driver.clear_calls();
  lab_.allocate(*pool, 8 * kMiB, kOne);
  EXPECT_EQ(lab_.driver.count(Call::create), 0U);
  EXPECT_TRUE(is_behind_the_reader(kOne));
}

TEST_F(StreamOrder, AChunkThatMovesWithinItsStreamKeepsItsOldAddressForTheReader) {
  const auto pool = lab_.pool("a", 16 * kMiB);
  std::vector<Address> blocks;
  blocks.reserve(4);
  for (int k = 0; k < 4; ++k) blocks.push_back(lab_.allocate(*pool, 4 * kMiB, kOne));
  read_late();
  lab_.free(blocks[0]);
  lab_.free(blocks[2]);
  lab_.driver.clear_calls();
  lab_.allocate(*pool, 8 * kMiB, kOne);  // two holes of 4 MiB move together
  EXPECT_EQ(lab_.driver.count(Call::create), 0U);
  EXPECT_EQ(lab_.driver.count(Call::unmap), 0U);
  EXPECT_FALSE(is_behind_the_reader(kOne)) << "the content is the stream's own";
  lab_.driver.release_fences();
  EXPECT_EQ(lab_.memory().store().dormant().size(), 0U);
  lab_.memory().settle(/*wait=*/false);
  EXPECT_GT(lab_.memory().store().dormant().size(), 0U) << "nobody uses it, and it may come back";
}

TEST_F(StreamOrder, EmptyingTheCacheWaitsForThem) {
  const auto pool = lab_.pool("a");
  const Address block = lab_.allocate(*pool, 8 * kMiB, kOne);
  read_late();
  lab_.free(block);
  lab_.memory().empty_cache();
  EXPECT_GT(waits(), 0U);
  EXPECT_EQ(lab_.driver.live_chunk_bytes(), 0U);
}

TEST_F(StreamOrder, ReadersOfAPeerCount) {
  LabSpec spec;
  spec.device_count = 2;
  Lab lab(spec);
  ScriptedDriver others(lab.host);  // the other device's side of the driver
  others.set_wait_on_held(ScriptedDriver::WaitOnHeld::pass);
  DeviceStreams peers(others, 1);
  peers.meet(kReader);
  lab.memory().set_neighbours([&](int device) { return device == 1 ? &peers : nullptr; });
  auto pool = lab.pool("a", 8 * kMiB);
  ASSERT_TRUE(lab.memory().add_accessor(Location::on_device(1)).ok());
  lab.leave_idle(*pool, 8 * kMiB, kOne);
  others.hold_fences(kReader);
  lab.leave_idle(*pool, 8 * kMiB, kTwo);
  EXPECT_GT(others.count(Call::stream_wait), 0U);
  pool.reset();
  lab.close();
}

TEST_F(StreamOrder, WhatHasPassedIsPreferred) {
  const auto pool = lab_.pool("a", 16 * kMiB);
  const Address early = lab_.allocate(*pool, 6 * kMiB, kOne);
  lab_.allocate(*pool, 2 * kMiB, kOne);  // between the two: free space that touches has one epoch
  const Address late = lab_.allocate(*pool, 8 * kMiB, kOne);
  lab_.free(early);
  lab_.memory().clock().cover(lab_.memory().clock().now());
  EXPECT_TRUE(lab_.memory().clock().poll());
  read_late();
  lab_.free(late);
  lab_.driver.clear_calls();
  lab_.allocate(*pool, 2 * kMiB, kTwo);
  EXPECT_EQ(lab_.driver.count(Call::stream_wait), 0U) << "some of the memory is nobody's any more";
}

// ---------------------------------------------------------------------- graphs

TEST_F(StreamOrder, AfterTheLastGraphEvenItsOwnStreamComesBehindTheReplays) {
  const auto pool = lab_.pool("m");
  const auto part = lab_.memory().create_part(pool, {1, 2}, false);
  for (const std::size_t bytes : {8 * kMiB, std::size_t{600}}) {
    part->pin();
    const Address block = lab_.allocate(*part, bytes, kOne);
    lab_.free(block);
    read_late();  // a replay
    part->unpin();
    EXPECT_EQ(lab_.allocate(*part, bytes, kOne), block);
    EXPECT_TRUE(is_behind_the_reader(kOne)) << bytes;
    lab_.free(block);
    lab_.driver.release_fences();
  }
  lab_.memory().close_pool(*part, true);
}

TEST_F(StreamOrder, WhereTheGpuCannotBeMadeToWaitForReplaysTheCallerDoes) {
  const auto pool = lab_.pool("m");
  const auto part = lab_.memory().create_part(pool, {1, 2}, false);
  part->pin();
  lab_.leave_idle(*part, 8 * kMiB, kOne);
  read_late();
  part->unpin();
  lab_.driver.begin_capture(kOne);
  lab_.allocate(*part, 8 * kMiB, kOne);
  EXPECT_GT(waits(), 0U);
  lab_.driver.end_capture(kOne);
  lab_.driver.release_fences();
}

// --------------------------------------------------------------------- captures

TEST_F(StreamOrder, TheLastRungInACaptureForgetsNoUse) {
  SharedMemoryPool shared(lab_.memory(), 16 * kMiB);
  const auto a = model(shared, "a");
  const auto g = model(shared, "g");
  const auto b = model(shared, "b");
  const auto part = lab_.memory().create_part(g, {0, 1}, false);
  part->pin();
  const Address block = lab_.allocate(*a, 8 * kMiB, kTwo);
  read_late();
  lab_.free(block);
  lab_.memory().clock().begin_capture();
  lab_.driver.begin_capture(kOne);
  EXPECT_THROW(lab_.memory().allocate(*part, 20 * kMiB, kOne), OutOfMemoryError);
  lab_.driver.end_capture(kOne);
  lab_.memory().clock().end_capture();
  read_late();  // a new reader would be missed by nobody: it reads no freed memory
  lab_.allocate(*b, 8 * kMiB, kTwo);
  lab_.memory().close_pool(*part, true);
}

TEST_F(StreamOrder, MemoryFreedInACaptureMovesOnlyAfterAWait) {
  SharedMemoryPool shared(lab_.memory(), 16 * kMiB);
  const auto a = model(shared, "a");
  const auto b = model(shared, "b");
  const Address block = lab_.allocate(*a, 8 * kMiB, kTwo);
  lab_.meet(kOne);
  lab_.memory().clock().begin_capture();
  lab_.driver.begin_capture(kOne);
  read_late();
  lab_.free(block);
  lab_.driver.clear_calls();
  lab_.allocate(*b, 12 * kMiB, kTwo);
  EXPECT_GT(waits(), 0U) << "no fence covers the captured stream's earlier work";
  lab_.driver.end_capture(kOne);
  lab_.memory().clock().end_capture();
  lab_.driver.release_fences();
}

// --------------------------------------------------------------- explicit pages

TEST_F(StreamOrder, PagesInASharedChunkAreNobodysUntilTheirReadersAreDone) {
  const auto pool = lab_.pool("a");
  const Address base = lab_.memory().allocate_pages(*pool, 0, 32 * kMiB, kOne);
  const std::size_t chunk = pool->chunks_under(base, 32 * kMiB).front().size;
  ASSERT_GT(chunk, 4 * kMiB);
  read_late();
  lab_.memory().deallocate_pages(*pool, 0, 4 * kMiB);
  lab_.memory().check();
  EXPECT_EQ(pool->memory_stats().quarantined_bytes, 4 * kMiB);
  const Address other = lab_.allocate(*pool, 4 * kMiB, kOne);
  EXPECT_NE(other, base) << "not even its own stream";
  lab_.driver.release_fences();
  EXPECT_TRUE(pool->settle());
  EXPECT_EQ(pool->memory_stats().quarantined_bytes, 0U);
  EXPECT_EQ(lab_.allocate(*pool, 4 * kMiB, kOne), base);
  lab_.memory().check();
}

TEST_F(StreamOrder, PagesInASharedChunkCanBeHadAgainBehindTheirReaders) {
  const auto pool = lab_.pool("a");
  const Address base = lab_.memory().allocate_pages(*pool, 0, 32 * kMiB, kOne);
  read_late();
  lab_.memory().deallocate_pages(*pool, 0, 4 * kMiB);
  lab_.driver.clear_calls();
  EXPECT_EQ(lab_.memory().allocate_pages(*pool, kPage, kPage, kTwo), base + kPage);
  lab_.memory().check();
  EXPECT_TRUE(is_behind_the_reader(kTwo));
  EXPECT_EQ(waits(), 0U);
  EXPECT_FALSE(is_behind_the_reader(kOne));
  // The rest is the stream's that waits, and no other's.
  const Address other = lab_.allocate(*pool, kPage, kOne);
  EXPECT_NE(other, base);
}

TEST_F(StreamOrder, PagesFreedInACaptureAreNotReusedUnordered) {
  const auto pool = lab_.pool("a");
  const Address base = lab_.memory().allocate_pages(*pool, 0, 32 * kMiB, kOne);
  read_late();
  lab_.memory().clock().begin_capture();
  lab_.meet(kTwo);
  lab_.driver.begin_capture(kTwo);
  lab_.memory().deallocate_pages(*pool, 0, 4 * kMiB);
  EXPECT_NE(lab_.allocate(*pool, 4 * kMiB, kOne), base);
  lab_.driver.end_capture(kTwo);
  lab_.memory().clock().end_capture();
}

// ---------------------------------------------------------- streams of others

TEST_F(StreamOrder, AForeignStreamsHandleIsUsedOnlyWhileSomebodyUsesTheStream) {
  const Stream foreign = stream(0x70);
  lab_.memory().streams().set_census({[](std::vector<Stream>*) {}, [](Stream) { return false; }});
  const auto pool = lab_.pool("a");
  lab_.memory().allocate_pages(*pool, 0, 32 * kMiB, foreign);
  const Address block = lab_.allocate(*pool, 8 * kMiB, foreign);
  lab_.driver.clear_calls();
  // Its owner destroys it now.
  lab_.memory().deallocate_pages(*pool, 0, 4 * kMiB);
  lab_.memory().deallocate_pages(*pool, 4 * kMiB, 28 * kMiB);
  lab_.free(block);
  lab_.leave_idle(*pool, 8 * kMiB, kOne);
  lab_.memory().empty_cache();
  for (const CallRecord& call : lab_.driver.calls()) {
    EXPECT_FALSE(call.call == Call::record && call.b == number(foreign)) << call.text();
    EXPECT_FALSE(call.call == Call::stream_wait && call.a == number(foreign)) << call.text();
  }
  EXPECT_GT(lab_.driver.count(Call::synchronize), 0U) << "what covers it";
}

// No fence tells when what they used is free: they are waited for, some at a time, and when
// there are no addresses left.
TEST_F(StreamOrder, ModelsThatComeAndGoBesideAForeignStreamEnd) {
  lab_.memory().streams().set_census({[](std::vector<Stream>*) {}, [](Stream) { return false; }});
  const auto stays = lab_.pool("stays");
  lab_.leave_idle(*stays, kPage, stream(0x70));
  for (int k = 0; k < 44; ++k) {  // the last few wait
    const auto pool = lab_.pool("model " + std::to_string(k));
    lab_.leave_idle(*pool, 4 * kMiB);
    lab_.memory().close_pool(*pool, /*force=*/false);
    EXPECT_LE(lab_.memory().pools().size(), 12U);
    EXPECT_LE(lab_.memory().committed_bytes(), 10 * 16 * kMiB);
  }
  lab_.driver.clear_calls();
  std::size_t made = 0;
  lab_.driver.fail_if([&made](const CallRecord& call) { return call.call == Call::reserve && made++ == 0; },
                      {StatusCode::out_of_memory, "scripted"});
  const auto last = lab_.pool("last");
  EXPECT_EQ(made, 2U) << "once more after the wait";
  EXPECT_EQ(lab_.memory().pools().size(), 2U);
}

// What had the name zeroed pages, and is perhaps no more: whoever has it now comes after that.
TEST_F(StreamOrder, ANameThatIsUsedAgainComesAfterARangesPagesAreZero) {
  const Stream foreign = stream(0x800);
  lab_.memory().streams().set_census({[](std::vector<Stream>*) {}, [](Stream) { return false; }});
  const auto range = lab_.memory().create_range(lab_.pool("a"), "tensor", 128 * kMiB, 0);
  lab_.memory().allocate_pages(*range, 0, 64 * kMiB, foreign);
  lab_.memory().allocate_pages(*range, 64 * kMiB, 4 * kMiB, foreign);
  lab_.memory().deallocate_pages(*range, 66 * kMiB, 2 * kMiB);
  lab_.memory().settle(/*wait=*/true);
  lab_.driver.hold_fences(foreign);
  lab_.driver.clear_calls();
  lab_.memory().allocate_pages(*range, 66 * kMiB, 2 * kMiB, foreign);
  EXPECT_EQ(lab_.driver.count(Call::fill_async), 1U) << "it stayed mapped, in a chunk with other pages";
  EXPECT_EQ(lab_.driver.count(Call::stream_wait), 0U);
  lab_.memory().allocate_pages(*range, 68 * kMiB, 2 * kMiB, foreign);
  EXPECT_GT(lab_.driver.count(Call::stream_wait), 0U);
}

TEST_F(StreamOrder, StreamsThatComeAndGoLeaveNothingBehind) {
  lab_.memory().streams().set_census({[](std::vector<Stream>*) {}, [](Stream) { return true; }});
  const auto pool = lab_.pool("a");
  lab_.memory().check();
  // More than 16 bits can tell apart.
  for (std::uintptr_t k = 1; k <= 70000; ++k) {
    const Address block = lab_.memory().allocate(*pool, k % 2 == 0 ? 512 : 3 * kMiB, stream(k * 16));
    DeviceMemory::free(lab_.space, block);
  }
  lab_.memory().check();
  EXPECT_LE(pool->streams_known(), 70U);
  EXPECT_LE(pool->physical_bytes(), kGiB);
}

TEST_F(StreamOrder, AStreamThatHasBlocksKeepsItsOwn) {
  const auto pool = lab_.pool("a");
  std::vector<Address> kept;
  for (std::uintptr_t k = 1; k <= 100; ++k) kept.push_back(lab_.allocate(*pool, 512, stream(k * 16)));
  for (std::uintptr_t k = 101; k <= 300; ++k) {
    lab_.driver.hold_fences(stream(k * 16));
    const Address block = lab_.allocate(*pool, 512, stream(k * 16));
    lab_.free(block);
  }
  for (std::uintptr_t k = 301; k <= 400; ++k) {
    lab_.driver.clear_calls();
    const Address block = lab_.allocate(*pool, 512, stream(k * 16));
    EXPECT_EQ(lab_.driver.count(Call::stream_wait), 0U) << "memory of its own, not one that others may use";
    lab_.free(block);
  }
  EXPECT_GT(pool->streams_known(), 300U) << "held streams' space is still theirs";
  lab_.driver.release_fences();
}

TEST(StreamOrderOfTwoDevices, ARecordedStreamOfAnotherDeviceCountsThoughItIsNoPeer) {
  HostDriver host({kPage, kGiB, 2});
  ScriptedDriver driver(host);
  AddressSpace space;
  DeviceMemory other(driver, space, 1, LabSpec::plain_options());
  DeviceMemory memory(driver, space, 0, LabSpec::plain_options());
  const auto pool = memory.create_pool(Lab::spec("a"), nullptr);
  const Address block = memory.allocate(*pool, kPage, kOne);
  pool->record_stream(block, kReader, &other.streams());
  driver.hold_fences(kReader);
  EXPECT_TRUE(DeviceMemory::free(space, block));
  memory.clock().cover(memory.clock().now());
  memory.clock().poll();
  EXPECT_FALSE(pool->settle()) << "the other device's copy still reads it";
  EXPECT_EQ(pool->statistics()[StatKind::active][0].current, 1);
  driver.release_fences();
  EXPECT_TRUE(pool->settle());
}

TEST(StreamOrderOfReplays, MemoryOfAPoolWhoseGraphHasGoneLeavesBehindItsReplays) {
  Lab lab;
  const auto group = lab.memory().create_group("g", 8 * kMiB);
  const auto a = lab.pool(Lab::spec("a"), group.get());
  const auto b = lab.pool(Lab::spec("b"), group.get());
  lab.meet(kReader);
  lab.leave_idle(*a, 8 * kMiB, kOne);
  lab.memory().settle(/*wait=*/true);
  a->pin();
  lab.driver.hold_fences();  // of a replay
  a->unpin();
  lab.driver.clear_calls();
  lab.allocate(*b, 8 * kMiB, kOne);
  EXPECT_GT(lab.driver.count(Call::stream_wait) + lab.driver.count(Call::synchronize), 0U);
  lab.driver.release_fences();
  lab.memory().end_group(*group);
}

}  // namespace
}  // namespace vmm::testing
