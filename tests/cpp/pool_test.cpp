// One pool and its tensors' blocks: addresses, streams, classes, numbers,
// content. Where they stand, and on which chunks, is pool_growth_test's; what happens
// between pools reclaim_test's.
#include "core/pool/pool.h"

#include <gtest/gtest.h>

#include <random>

#include "cpp/lab.h"

namespace vmm::testing {
namespace {

const Stream kOne = stream(0x10);
const Stream kTwo = stream(0x20);

std::int64_t current(const Pool& pool, StatKind kind, int which = 0) {
  return pool.statistics()[kind].at(static_cast<std::size_t>(which)).current;
}

TEST(Pool, GivesAlignedAddressesInsideItsRange) {
  Lab lab;
  const auto pool = lab.pool("a");
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{511}, std::size_t{512}, std::size_t{513}, kMiB, kMiB + 1,
                                  3 * kMiB + 7, 20 * kMiB}) {
    const Address block = lab.allocate(*pool, bytes);
    EXPECT_EQ(block % 512, 0U) << bytes;
    EXPECT_TRUE(pool->contains(block) && pool->contains(block + bytes - 1)) << bytes;
    EXPECT_EQ(pool->block_size(block), align_up(bytes, 512)) << bytes;
    EXPECT_EQ(lab.space.find(block), pool.get());
  }
}

TEST(Pool, KeepsEveryBlocksContentThroughAllItsMemory) {
  Lab lab;
  const auto pool = lab.pool("a", 128 * kMiB);
  std::mt19937 random(11);
  std::vector<std::tuple<Address, std::size_t, std::uint64_t>> live;
  for (std::uint64_t step = 0; step < 300; ++step) {
    if (live.size() < 20 && random() % 3 != 0) {
      const std::size_t bytes = (random() % 2 == 0 ? random() % (256 * kKiB) : random() % (4 * kMiB)) / 8 * 8 + 8;
      const Address block = lab.allocate(*pool, bytes);
      Lab::fill(block, bytes, step);
      live.emplace_back(block, bytes, step);
    } else if (!live.empty()) {
      const auto at = live.begin() + static_cast<std::ptrdiff_t>(random() % live.size());
      const auto [block, bytes, seed] = *at;
      ASSERT_EQ(Lab::first_wrong(block, bytes, seed), bytes) << "step " << step;
      lab.free(block);
      live.erase(at);
    }
  }
  for (const auto& [block, bytes, seed] : live) EXPECT_TRUE(Lab::holds(block, bytes, seed));
}

TEST(Pool, AnswersACachedBlockWithoutTheDriver) {
  Lab lab;
  const auto pool = lab.pool("a");
  for (const std::size_t bytes : {std::size_t{4096}, 5 * kMiB}) {
    const Address first = lab.leave_idle(*pool, bytes);
    const std::uint64_t calls = lab.driver.count();
    for (int k = 0; k < 100; ++k) EXPECT_EQ(lab.leave_idle(*pool, bytes), first) << bytes;
    EXPECT_EQ(lab.driver.count(), calls) << bytes;
  }
}

TEST(Pool, RefusesAddressesThatItDidNotGive) {
  Lab lab;
  const auto pool = lab.pool("a");
  const Address block = lab.allocate(*pool, 4 * kMiB);
  EXPECT_FALSE(DeviceMemory::free(lab.space, block + 512));
  EXPECT_FALSE(DeviceMemory::free(lab.space, pool->base() + kGiB - 512));
  int local = 0;
  EXPECT_FALSE(DeviceMemory::free(lab.space, reinterpret_cast<Address>(&local)));
  lab.free(block);
  EXPECT_FALSE(DeviceMemory::free(lab.space, block)) << "freed twice";
  lab.memory().check();
}

// ----------------------------------------------------------------- streams

TEST(PoolStreams, ReuseABlockAtOnceOnItsOwnStream) {
  Lab lab;
  const auto pool = lab.pool("a");
  lab.driver.hold_fences();
  for (const std::size_t bytes : {std::size_t{8192}, 4 * kMiB}) {
    const Address block = lab.leave_idle(*pool, bytes, kOne);
    EXPECT_EQ(lab.allocate(*pool, bytes, kOne), block) << bytes;
  }
}

TEST(PoolStreams, NeverHandABlockToAnotherStreamBeforeItsFence) {
  Lab lab;
  const auto pool = lab.pool("a");
  lab.driver.hold_fences(kOne);
  for (const std::size_t bytes : {std::size_t{8192}, 4 * kMiB}) {
    const Address block = lab.leave_idle(*pool, bytes, kOne);
    const Address other = lab.allocate(*pool, bytes, kTwo);
    EXPECT_TRUE(other + bytes <= block || block + bytes <= other) << bytes;
  }
  EXPECT_EQ(lab.driver.count(Call::wait), 0U);
}

TEST(PoolStreams, MoveAnIdleChunkToAnotherStreamOnlyBehindAnEvent) {
  Lab lab;
  const auto pool = lab.pool("a", 4 * kMiB);
  const Address block = lab.allocate(*pool, 4 * kMiB, kOne);
  Lab::fill(block, 4 * kMiB, 1);
  lab.driver.hold_fences(kOne);
  lab.free(block);
  lab.driver.clear_calls();
  // The limit is reached: the chunks must move although kOne still works.
  const Address moved = lab.allocate(*pool, 4 * kMiB, kTwo);
  EXPECT_NE(moved, block);
  EXPECT_EQ(lab.driver.count(Call::wait) + lab.driver.count(Call::synchronize), 0U) << "no one waits";
  EXPECT_EQ(lab.driver.count(Call::create), 0U);
  EXPECT_EQ(lab.driver.count(Call::unmap), 0U) << "kOne may still use the old addresses";
  const auto waits = lab.driver.calls(Call::stream_wait);
  ASSERT_FALSE(waits.empty()) << "kTwo must come after kOne";
  EXPECT_EQ(waits.front().a, number(kTwo));
  Lab::fill(moved, 4 * kMiB, 2);
  EXPECT_FALSE(Lab::holds(block, 4 * kMiB, 1)) << "one memory at two addresses";
  // Once kOne is done the old addresses go.
  lab.driver.release_fences(kOne);
  EXPECT_TRUE(pool->settle());
  lab.free(moved);
  lab.memory().empty_cache();
  EXPECT_EQ(lab.driver.live_mapped_bytes(), 0U);
  lab.memory().check();
}

TEST(PoolStreams, AFreedBlockWaitsForTheStreamsThatRecordedIt) {
  Lab lab;
  const auto pool = lab.pool("a");
  for (const std::size_t bytes : {std::size_t{8192}, 4 * kMiB}) {
    const Address block = lab.allocate(*pool, bytes, kOne);
    pool->record_stream(block, kTwo);
    lab.driver.hold_fences(kTwo);
    lab.free(block);
    const auto size = static_cast<std::int64_t>(align_up(bytes, 512));
    EXPECT_EQ(current(*pool, StatKind::allocated_bytes), 0) << bytes;
    EXPECT_EQ(current(*pool, StatKind::active_bytes), size) << bytes;
    EXPECT_EQ(pool->memory_stats().quarantined_bytes, static_cast<std::size_t>(size)) << bytes;
    const Address early = lab.allocate(*pool, bytes, kOne);
    EXPECT_NE(early, block) << "kTwo still reads it";
    lab.driver.release_fences(kTwo);
    lab.free(early);
    EXPECT_TRUE(pool->settle());
    EXPECT_EQ(current(*pool, StatKind::active_bytes), 0) << bytes;
    EXPECT_EQ(pool->memory_stats().quarantined_bytes, 0U);
    lab.memory().empty_cache();
  }
}

TEST(PoolStreams, AnAddressInsideABlockRecordsTheBlock) {
  Lab lab;
  const auto pool = lab.pool("a");
  lab.allocate(*pool, 1024, kOne);  // before each, and behind
  lab.allocate(*pool, 4 * kMiB, kOne);
  for (const std::size_t bytes : {std::size_t{8192}, 6 * kMiB}) {
    const Address block = lab.allocate(*pool, bytes, kOne);
    lab.allocate(*pool, bytes, kOne);
    pool->record_stream(block + bytes - 3, kTwo);
    lab.driver.hold_fences(kTwo);
    lab.free(block);
    EXPECT_EQ(pool->memory_stats().quarantined_bytes, bytes);
    EXPECT_NE(lab.allocate(*pool, bytes, kOne), block) << "kTwo still reads it";
    lab.driver.release_fences(kTwo);
    EXPECT_TRUE(pool->settle());
  }
}

TEST(PoolStreams, RecordingTheOwnStreamOrAnUnknownAddressChangesNothing) {
  Lab lab;
  const auto pool = lab.pool("a");
  const Address block = lab.allocate(*pool, kMiB, kOne);
  lab.driver.hold_fences();
  pool->record_stream(block, kOne);
  pool->record_stream(block + kMiB, kTwo);
  const std::uint64_t records = lab.driver.count(Call::record);
  lab.free(block);
  EXPECT_EQ(lab.driver.count(Call::record), records);
  EXPECT_EQ(lab.allocate(*pool, kMiB, kOne), block);
}

TEST(PoolStreams, RecordingOneStreamTwiceMakesOneFence) {
  Lab lab;
  const auto pool = lab.pool("a");
  const Address block = lab.allocate(*pool, 4 * kMiB, kOne);
  pool->record_stream(block, kTwo);
  pool->record_stream(block, kTwo);
  pool->record_stream(block, stream(0x30));
  lab.driver.clear_calls();
  lab.free(block);
  EXPECT_EQ(lab.driver.count(Call::record), 2U);
}

// ------------------------------------------------------ numbers and snapshots

TEST(PoolNumbers, CountSmallAndLargeBlocksApartAndExactly) {
  Lab lab;
  const auto pool = lab.pool("a");
  const Address small = lab.allocate(*pool, kMiB);  // the largest small one
  const Address tiny = lab.allocate(*pool, 100);
  const Address large = lab.allocate(*pool, kMiB + 1);
  const auto expect = [&](StatKind kind, std::size_t in_small, std::size_t in_large, const char* what) {
    EXPECT_EQ(current(*pool, kind, 1), static_cast<std::int64_t>(in_small)) << what;
    EXPECT_EQ(current(*pool, kind, 2), static_cast<std::int64_t>(in_large)) << what;
    EXPECT_EQ(current(*pool, kind, 0), static_cast<std::int64_t>(in_small + in_large)) << what;
  };
  expect(StatKind::allocation, 2, 1, "allocation");
  expect(StatKind::allocated_bytes, kMiB + 512, kMiB + 512, "allocated_bytes");
  expect(StatKind::requested_bytes, kMiB + 100, kMiB + 1, "requested_bytes");
  expect(StatKind::active, 2, 1, "active");
  expect(StatKind::reserved_bytes, kPage, kPage, "reserved_bytes");
  expect(StatKind::segment, 1, 1, "segment");
  for (const Address block : {small, tiny, large}) lab.free(block);
  expect(StatKind::allocation, 0, 0, "allocation");
  expect(StatKind::requested_bytes, 0, 0, "requested_bytes");
  const Statistics all = pool->statistics();
  EXPECT_EQ(all[StatKind::allocated_bytes][0].peak, static_cast<std::int64_t>(2 * kMiB + 1024));
  EXPECT_EQ(all[StatKind::allocation][0].allocated, 3);
  EXPECT_EQ(all[StatKind::allocation][0].freed, 3);
  EXPECT_EQ(all.num_device_alloc, 2);
  pool->reset_peaks();
  pool->reset_accumulated();
  EXPECT_EQ(pool->statistics()[StatKind::allocated_bytes][0].peak, 0);
  EXPECT_EQ(pool->statistics()[StatKind::allocation][0].allocated, 0);
}

TEST(PoolNumbers, TellIdleFromStrandedFromInUse) {
  Lab lab;
  PoolSpec spec = Lab::spec("a");
  spec.page_size = 4 * kMiB;  // chunks of 4 MiB
  const auto pool = lab.pool(spec);
  const Address first = lab.allocate(*pool, 4 * kMiB);
  lab.allocate(*pool, 3 * kMiB);
  MemoryStats stats = pool->memory_stats();
  EXPECT_EQ(stats.virtual_capacity, kGiB);
  EXPECT_EQ(stats.physical_usage, 8 * kMiB);
  EXPECT_EQ(stats.mapped_pages, 2U);
  EXPECT_EQ(stats.allocated_bytes, 7 * kMiB);
  EXPECT_EQ(stats.stranded_bytes, kMiB) << "the rest of the second chunk";
  EXPECT_EQ(stats.idle_bytes, 0U);
  EXPECT_DOUBLE_EQ(stats.fragmentation_ratio, 1.0 / 8.0);
  lab.free(first);
  stats = pool->memory_stats();
  EXPECT_EQ(stats.idle_bytes, 4 * kMiB);
  EXPECT_EQ(stats.stranded_bytes, kMiB);
  EXPECT_EQ(stats.physical_usage, 8 * kMiB) << "idle memory stays until it is asked for";
}

TEST(PoolNumbers, AnEmptyPoolHasNoFragmentation) {
  Lab lab;
  const MemoryStats stats = lab.pool("a")->memory_stats();
  EXPECT_EQ(stats.physical_usage, 0U);
  EXPECT_EQ(stats.fragmentation_ratio, 0.0);
}

TEST(PoolNumbers, TheSnapshotTilesAndSumsToTheStatistics) {
  Lab lab;
  const auto pool = lab.pool("a");
  std::mt19937 random(5);
  std::vector<Address> live;
  for (int step = 0; step < 200; ++step) {
    if (live.empty() || random() % 5 < 3) {
      const std::size_t bytes = random() % 2 == 0 ? 1 + random() % (64 * kKiB) : 1 + random() % (6 * kMiB);
      live.push_back(lab.allocate(*pool, bytes, random() % 2 == 0 ? kOne : kTwo));
    } else {
      const std::size_t at = random() % live.size();
      lab.free(live[at]);
      live.erase(live.begin() + static_cast<std::ptrdiff_t>(at));
    }
    if (step % 20 != 0) continue;
    std::size_t total = 0;
    std::size_t allocated = 0;
    std::size_t requested = 0;
    Address last_end = 0;
    for (const SegmentSnapshot& segment : pool->snapshot()) {
      EXPECT_GE(segment.address, last_end) << "segments by address, apart";
      last_end = segment.address + segment.total_size;
      std::size_t tiled = 0;
      std::size_t in_use = 0;
      for (const BlockSnapshot& block : segment.blocks) {
        EXPECT_GT(block.size, 0U);
        tiled += block.size;
        if (block.state == BlockSnapshot::State::allocated) in_use += block.size;
      }
      EXPECT_EQ(tiled, segment.total_size) << "blocks tile their segment";
      EXPECT_EQ(in_use, segment.allocated_size);
      total += segment.total_size;
      allocated += segment.allocated_size;
      requested += segment.requested_size;
    }
    EXPECT_EQ(total, static_cast<std::size_t>(current(*pool, StatKind::reserved_bytes)));
    EXPECT_EQ(allocated, static_cast<std::size_t>(current(*pool, StatKind::allocated_bytes)));
    EXPECT_EQ(requested, static_cast<std::size_t>(current(*pool, StatKind::requested_bytes)));
  }
}

// ------------------------------------------------------------------ lives

// Rounded up, they would wrap to next to nothing.
TEST(PoolSizes, NearTheLargestNumberAreRefused) {
  Lab lab;
  const auto whole = lab.pool("a");
  const auto unsplit = lab.memory().create_part(whole, {1, 0}, /*no_split=*/true);
  for (const auto& pool : {whole, unsplit}) {
    const Address keep = lab.allocate(*pool, 512);  // with free memory beside it
    lab.leave_idle(*pool, 4 * kPage);
    for (const std::size_t size : {kUnlimited, kUnlimited - 5, kUnlimited - 512, kUnlimited - kPage + 2, kGiB + 1}) {
      EXPECT_EQ(pool->try_allocate_within(size, nullptr), 0U) << size;
      EXPECT_THROW(lab.allocate(*pool, size), OutOfMemoryError) << size;
      EXPECT_THROW(lab.memory().allocate_at(*pool, pool->base() + 8 * kPage, size, nullptr), InvalidRangeError);
      EXPECT_THROW(lab.memory().allocate_pages(*pool, kPage, size, nullptr), InvalidRangeError);
      EXPECT_THROW(lab.memory().allocate_first(*pool, size, nullptr), InvalidRangeError);
      EXPECT_THROW(lab.memory().deallocate_pages(*pool, kPage, size), InvalidRangeError);
      EXPECT_THROW(static_cast<void>(pool->is_mapped(kPage, size)), InvalidRangeError);
    }
    EXPECT_EQ(pool->live_blocks(), 1U);
    lab.free(keep);
  }
}

TEST(PoolSizes, UpToTheVeryEndCanBeAskedForByAddress) {
  Lab lab;
  const auto pool = lab.pool("a");
  const Address last = pool->base() + pool->capacity() - 1024;
  lab.adopt(lab.memory().allocate_at(*pool, last, 1024, nullptr));
  EXPECT_THROW(lab.memory().allocate_at(*pool, last + 512, 513, nullptr), InvalidRangeError);
}

TEST(PoolLife, RefusesWhatCannotBe) {
  Lab lab;
  const auto with = [&](auto change) {
    PoolSpec spec = Lab::spec("a");
    change(spec);
    return spec;
  };
  EXPECT_THROW(lab.pool(with([](PoolSpec& s) { s.page_size = 3 * kMiB; })), InvalidPageSizeError);
  EXPECT_THROW(lab.pool(with([](PoolSpec& s) { s.page_size = 64 * kKiB; })), InvalidPageSizeError);
  EXPECT_THROW(lab.pool(with([](PoolSpec& s) { s.capacity = kUnlimited; })), InvalidArgumentError);
  EXPECT_THROW(lab.pool(with([](PoolSpec& s) {
    s.floor = 2 * kPage;
    s.physical_limit = kPage;
  })),
               InvalidArgumentError);
  EXPECT_EQ(lab.memory().pools().size(), 0U);
  EXPECT_EQ(lab.driver.leaks(), "");
}

TEST(PoolLife, ClosingOneInUseIsRefusedAndChangesNothing) {
  Lab lab;
  const auto pool = lab.pool("a");
  const Address block = lab.allocate(*pool, 3 * kMiB);
  Lab::fill(block, 3 * kMiB, 3);
  try {
    lab.memory().close_pool(*pool, /*force=*/false);
    FAIL() << "closed a pool in use";
  } catch (const StillInUseError& error) {
    EXPECT_EQ(error.live_blocks, 1U);
    EXPECT_EQ(error.live_bytes, 3 * kMiB);
  }
  EXPECT_TRUE(Lab::holds(block, 3 * kMiB, 3));
  lab.allocate(*pool, kMiB);  // it still works
}

TEST(PoolLife, AForcedCloseKeepsLiveTensorsUntilTheirEnd) {
  Lab lab;
  const auto pool = lab.pool("a");
  const Address block = lab.allocate(*pool, 3 * kMiB);
  Lab::fill(block, 3 * kMiB, 3);
  lab.memory().close_pool(*pool, /*force=*/true);
  EXPECT_THROW(lab.memory().allocate(*pool, 512, nullptr), InvalidArgumentError) << "no new tensors";
  EXPECT_TRUE(Lab::holds(block, 3 * kMiB, 3));
  lab.free(block);
  EXPECT_EQ(lab.memory().pools().size(), 0U) << "buried with its last tensor";
  EXPECT_EQ(lab.driver.live_reservations(), 0U);
  EXPECT_EQ(lab.space.find(block), nullptr);
}

TEST(PoolLife, TrimGivesBackAllButWhatIsToBeKept) {
  Lab lab;
  PoolSpec spec = Lab::spec("a");
  spec.page_size = kPage;
  const auto pool = lab.pool(spec);
  lab.leave_idle(*pool, 20 * kMiB);
  EXPECT_EQ(lab.memory().trim(*pool, 6 * kMiB), 14 * kMiB);
  EXPECT_EQ(pool->memory_stats().idle_bytes, 6 * kMiB);
  EXPECT_EQ(lab.memory().trim(*pool, 0), 6 * kMiB);
  EXPECT_EQ(lab.driver.live_chunk_bytes(), 0U);
  EXPECT_EQ(lab.memory().committed_bytes(), 0U);
}

}  // namespace
}  // namespace vmm::testing
