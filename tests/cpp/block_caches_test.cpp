// What threads keep before a pool: used again, counted right, and given back
// whenever somebody has to see the pool as it is.
#include "core/cache/block_caches.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "core/faces/shared_memory_pool.h"
#include "cpp/lab.h"
#include "cpp/turns.h"

namespace vmm::testing {
namespace {

TEST(BlockCaches, AFreedBlockServesTheNextRequestOfItsSizeAndStream) {
  Lab lab;
  const auto pool = lab.pool("a");
  for (const std::size_t bytes : {std::size_t{512}, 64 * kKiB, kMiB, 20 * kMiB}) {
    warm(lab, *pool, bytes);
    ASSERT_NE(lab.memory().kept_blocks(*pool), 0U) << bytes;
    const Address first = lab.allocate(*pool, bytes);
    lab.free(first);
    EXPECT_EQ(lab.allocate(*pool, bytes - 100), first) << bytes;
    EXPECT_EQ(pool->block_size(first), bytes);
    EXPECT_NE(lab.allocate(*pool, bytes), first) << "live";
    EXPECT_NE(lab.allocate(*pool, bytes, stream(7)), first) << "another stream";
  }
}

TEST(BlockCaches, ABlockThatOtherStreamsUseIsNotKept) {
  Lab lab;
  const auto pool = lab.pool("a");
  warm(lab, *pool, 512);
  const std::size_t before = lab.memory().kept_blocks(*pool);
  const Address address = lab.allocate(*pool, 512);
  lab.meet(stream(9));
  pool->record_stream(address, stream(9));
  lab.driver.hold_fences();
  lab.free(address);
  EXPECT_EQ(lab.memory().kept_blocks(*pool), before - 1);
  EXPECT_NE(lab.allocate(*pool, 512), address);
}

TEST(BlockCaches, ARequestOfNoBytesIsOneOfTheSmallest) {
  Lab lab;
  const auto pool = lab.pool("a");
  for (std::size_t bytes = 512; bytes <= 64 * kKiB; bytes += 512) warm(lab, *pool, bytes);
  const Address address = lab.allocate(*pool, 0);
  EXPECT_EQ(pool->block_size(address), 512U);
}

TEST(BlockCaches, AFreeOfWhatIsKeptIsRefused) {
  Lab lab;
  const auto pool = lab.pool("a");
  warm(lab, *pool, 512);
  const Address address = lab.allocate(*pool, 512);
  lab.free(address);
  ASSERT_NE(lab.memory().kept_blocks(*pool), 0U);
  EXPECT_EQ(pool->block_size(address), 0U);
  EXPECT_FALSE(DeviceMemory::free(lab.space, address)) << "twice";
  EXPECT_FALSE(DeviceMemory::free(lab.space, address + 512));
  EXPECT_FALSE(DeviceMemory::free(lab.space, address + 8)) << "inside";
  lab.memory().check();
  EXPECT_EQ(pool->live_blocks(), 0U);
}

TEST(BlockCaches, WhatOtherThreadsKeepNeverMakesThePoolGrow) {
  Lab lab;
  const auto pool = lab.pool("a");
  Turns turns;
  std::vector<Address> blocks;
  blocks.reserve(200);
  for (int k = 0; k < 200; ++k) blocks.push_back(lab.allocate(*pool, 32 * kKiB));
  turns.on(0, [&] { warm(lab, *pool, 32 * kKiB); });
  turns.on(0, [&] {
    for (const Address address : blocks) lab.free(address);
  });
  ASSERT_GT(lab.memory().kept_blocks(*pool), 100U);
  const std::size_t held = pool->physical_bytes();
  std::vector<Address> again;
  turns.on(1, [&] {
    for (int k = 0; k < 200; ++k) again.push_back(lab.allocate(*pool, 32 * kKiB));
  });
  EXPECT_EQ(pool->physical_bytes(), held);
}

TEST(BlockCaches, WhatIsKeptIsIdleToEverybodyElse) {
  Lab lab;
  const auto a = lab.pool("a");
  const auto b = lab.pool("b");
  lab.memory().set_limit(lab.memory().budget(), 40 * kMiB);
  warm(lab, *a, 20 * kMiB);
  warm(lab, *a, 10 * kMiB);
  ASSERT_NE(lab.memory().kept_blocks(*a), 0U);
  lab.allocate(*b, 40 * kMiB);  // all of it
  EXPECT_EQ(a->physical_bytes(), 0U);
}

TEST(BlockCaches, AFreedLargeBlockWaitsForTheThreadsNextLargeOne) {
  Lab lab;
  const auto pool = lab.pool("a");
  warm(lab, *pool, 20 * kMiB);
  const Address first = lab.allocate(*pool, 20 * kMiB);
  const Address second = lab.allocate(*pool, 20 * kMiB);
  const Address third = lab.allocate(*pool, 20 * kMiB);
  const std::size_t held = pool->physical_bytes();
  ASSERT_EQ(lab.memory().kept_blocks(*pool), 0U);
  lab.free(first);  // not the latest
  EXPECT_EQ(lab.memory().kept_blocks(*pool), 1U);
  const Address within = lab.allocate(*pool, 10 * kMiB);
  EXPECT_TRUE(first <= within && within < first + 20 * kMiB) << "it came back before that looked for a place";
  EXPECT_EQ(lab.memory().kept_blocks(*pool), 0U);
  lab.free(second);
  EXPECT_EQ(lab.memory().kept_blocks(*pool), 1U);
  lab.free(third);
  EXPECT_EQ(lab.memory().kept_blocks(*pool), 0U) << "the second took the first along";
  lab.allocate(*pool, 40 * kMiB);
  EXPECT_EQ(pool->physical_bytes(), held) << "both are one";
  lab.memory().check();
}

TEST(BlockCaches, AFreedLargeBlockDoesNotWaitWhereOthersCouldWantIt) {
  Lab lab;
  const auto pool = lab.pool("a");
  Turns turns;
  turns.on(0, [&] { warm(lab, *pool, 512); });
  warm(lab, *pool, 20 * kMiB);
  const Address first = lab.allocate(*pool, 20 * kMiB);
  lab.allocate(*pool, 20 * kMiB);
  const std::size_t kept = lab.memory().kept_blocks(*pool);
  lab.free(first);
  EXPECT_EQ(lab.memory().kept_blocks(*pool), kept);
  Address got = 0;
  turns.on(0, [&] { got = lab.allocate(*pool, 20 * kMiB); });
  EXPECT_EQ(got, first);
}

TEST(BlockCaches, ASmallRequestHasGivenBackWhatItNeedsAndNoMore) {
  Lab lab;
  const auto pool = lab.pool("a");
  warm(lab, *pool, 32 * kKiB);
  std::vector<Address> blocks;
  for (int k = 0; k < 192; ++k) blocks.push_back(lab.allocate(*pool, 32 * kKiB));  // 6 MiB: three slabs
  const std::size_t held = pool->physical_bytes();
  for (const Address address : blocks) lab.free(address);
  const std::size_t kept = lab.memory().kept_blocks(*pool);
  ASSERT_GE(kept, 192U);
  warm(lab, *pool, 256 * kKiB);  // eight of them, once
  EXPECT_GE(lab.memory().kept_blocks(*pool), kept - 32);
  EXPECT_EQ(pool->physical_bytes(), held);
  for (int k = 0; k < 24; ++k) lab.allocate(*pool, 256 * kKiB);
  EXPECT_EQ(pool->physical_bytes(), held) << "all of them, before it grows";
  lab.memory().check();
}

TEST(BlockCaches, OneFreeGivesBackAFewBlocks) {
  Lab lab;
  const auto pool = lab.pool("a");
  warm(lab, *pool, 4 * kKiB);
  std::vector<Address> blocks;
  for (int k = 0; k < 2200; ++k) blocks.push_back(lab.allocate(*pool, 4 * kKiB));  // 8.6 MiB; 8 are kept
  std::size_t kept = lab.memory().kept_blocks(*pool);
  std::size_t most = kept;
  std::size_t most_at_once = 0;
  for (const Address address : blocks) {
    lab.free(address);
    const std::size_t now = lab.memory().kept_blocks(*pool);
    if (now < kept) most_at_once = std::max(most_at_once, kept - now);
    most = std::max(most, kept = now);
  }
  EXPECT_GT(most, 2000U);
  EXPECT_LT(kept, 1000U) << "it goes on";
  EXPECT_LE(most_at_once, 16U);
  lab.memory().check();
}

TEST(BlockCaches, WithALoweredLimitAFreeGivesBackAtOnce) {
  Lab lab;
  const auto pool = lab.pool("a");
  warm(lab, *pool, 8 * kMiB);
  const Address first = lab.allocate(*pool, 8 * kMiB);
  const Address second = lab.allocate(*pool, 8 * kMiB);
  lab.memory().set_limit(pool->budget(), 4 * kMiB);
  lab.free(first);
  EXPECT_LE(pool->physical_bytes(), 8 * kMiB);
  lab.free(second);
  EXPECT_LE(pool->physical_bytes(), 4 * kMiB);
  lab.memory().set_limit(pool->budget(), 64 * kMiB);
  for (int round = 0; round < 2; ++round) warm(lab, *pool, 8 * kMiB);
  EXPECT_NE(lab.memory().kept_blocks(*pool), 0U) << "kept again";
}

TEST(BlockCaches, APoolClosesWhileThreadsKeepItsBlocks) {
  Lab lab;
  auto pool = lab.pool("a");
  Turns turns;
  turns.on(0, [&] { warm(lab, *pool, 512); });
  warm(lab, *pool, 8 * kMiB);
  const Address live = lab.allocate(*pool, 512);
  try {
    lab.memory().close_pool(*pool, /*force=*/false);
    FAIL();
  } catch (const StillInUseError& error) {
    EXPECT_EQ(error.live_blocks, 1U);
    EXPECT_EQ(error.live_bytes, 512U);
  }
  lab.free(live);
  lab.memory().close_pool(*pool, /*force=*/false);
  EXPECT_TRUE(lab.memory().pools().empty());
  EXPECT_EQ(lab.memory().statistics()[StatKind::allocation][0].current, 0);
}

TEST(BlockCaches, AForcedCloseEndsWithTheLastBlockWhoeverFreesIt) {
  Lab lab;
  auto pool = lab.pool("a");
  Turns turns;
  warm(lab, *pool, 512);
  const Address live = lab.allocate(*pool, 512);
  turns.on(0, [&] { warm(lab, *pool, 512); });
  lab.memory().close_pool(*pool, /*force=*/true);
  EXPECT_EQ(lab.memory().pools().size(), 1U);
  turns.on(0, [&] { lab.free(live); });
  EXPECT_TRUE(lab.memory().pools().empty());
}

struct Counting final : PoolObserver {
  void on_event(const Pool& pool, PoolEvent event, Address, std::size_t, Stream) noexcept override {
    ++events[static_cast<std::size_t>(event)];
    live = pool.statistics()[StatKind::allocation][0].current;
  }
  std::array<int, 6> events{};
  std::int64_t live = 0;
};

TEST(BlockCaches, AnObserverSeesEachEventWhenItHappens) {
  Lab lab;
  Counting observer;
  const auto pool = lab.pool("a");
  warm(lab, *pool, 512);
  const Address before = lab.allocate(*pool, 512);
  lab.memory().set_observer(&observer);
  warm(lab, *pool, 512);
  EXPECT_EQ(observer.events[static_cast<std::size_t>(PoolEvent::alloc)], 2);
  EXPECT_EQ(observer.events[static_cast<std::size_t>(PoolEvent::free_completed)], 2);
  EXPECT_EQ(observer.live, 1);
  lab.free(before);
  EXPECT_EQ(observer.events[static_cast<std::size_t>(PoolEvent::free_completed)], 3);
  lab.memory().set_observer(nullptr);
  warm(lab, *pool, 512);
  EXPECT_NE(lab.memory().kept_blocks(*pool), 0U);
}

TEST(BlockCaches, AGraphsMemoryIsNotKept) {
  Lab lab;
  const auto pool = lab.pool("a");
  warm(lab, *pool, 512);
  pool->pin();
  EXPECT_EQ(lab.memory().kept_blocks(*pool), 0U);
  warm(lab, *pool, 512);
  EXPECT_EQ(lab.memory().kept_blocks(*pool), 0U);
  pool->unpin();
  lab.memory().settle(/*wait=*/true);
  warm(lab, *pool, 512);
  EXPECT_NE(lab.memory().kept_blocks(*pool), 0U);
}

TEST(BlockCaches, AThreadThatEndsGivesBackWhatItKept) {
  Lab lab;
  const auto pool = lab.pool("a");
  Turns turns;
  turns.on(0, [&] { warm(lab, *pool, 512); });
  ASSERT_NE(lab.memory().kept_blocks(*pool), 0U);
  const Statistics before = pool->statistics();
  turns.end(0);
  EXPECT_EQ(lab.memory().kept_blocks(*pool), 0U);
  const Statistics after = pool->statistics();
  for (const StatKind kind : {StatKind::allocation, StatKind::active_bytes, StatKind::requested_bytes}) {
    EXPECT_EQ(before[kind][0].current, after[kind][0].current);
    EXPECT_EQ(before[kind][0].peak, after[kind][0].peak);
    EXPECT_EQ(before[kind][0].allocated, after[kind][0].allocated);
    EXPECT_EQ(before[kind][0].freed, after[kind][0].freed);
  }
  lab.memory().check();
}

// A thousand models in turn: each finds its own.
TEST(BlockCaches, ManyPoolsInTurnEachKeepTheirs) {
  LabSpec spec;
  spec.device_bytes = 4 * kGiB;
  Lab lab(spec);
  std::vector<std::shared_ptr<Pool>> pools;
  pools.reserve(100);
  for (int k = 0; k < 100; ++k) pools.push_back(lab.pool("p" + std::to_string(k)));
  std::map<const Pool*, Address> first;
  for (int round = 0; round < 4; ++round) {
    for (const auto& pool : pools) {
      const Address address = lab.memory().allocate(*pool, 512, nullptr);
      if (round == 2) first[pool.get()] = address;
      if (round == 3) {
        EXPECT_EQ(first[pool.get()], address);
      }
      EXPECT_TRUE(DeviceMemory::free(lab.space, address));
    }
  }
  for (std::size_t k = 0; k < pools.size(); k += 2) lab.memory().close_pool(*pools[k], false);
  for (std::size_t k = 1; k < pools.size(); k += 2) {
    EXPECT_EQ(lab.memory().kept_blocks(*pools[k]), 1U);
    const Address address = lab.memory().allocate(*pools[k], 512, nullptr);
    EXPECT_EQ(first[pools[k].get()], address);
    EXPECT_TRUE(DeviceMemory::free(lab.space, address));
  }
  lab.memory().check();
}

// -- Numbers: threads that take turns, against a plain count.

struct Oracle {
  struct Counts {
    std::int64_t current = 0;
    std::int64_t peak = 0;
    std::int64_t allocated = 0;
    std::int64_t freed = 0;
    void add(std::int64_t by) {
      current += by;
      peak = std::max(peak, current);
      (by > 0 ? allocated : freed) += by > 0 ? by : -by;
    }
  };
  void add(bool small, std::size_t bytes, int sign) {
    const auto size = static_cast<std::int64_t>(align_up(bytes, 512));
    const std::array<std::int64_t, 3> by = {sign, sign * size, sign * static_cast<std::int64_t>(bytes)};
    for (std::size_t k = 0; k < 3; ++k) {
      counts[k][0].add(by.at(k));
      counts[k][small ? 1 : 2].add(by.at(k));
    }
  }
  void expect(const Statistics& told, const std::string& where) const {
    for (std::size_t k = 0; k < 3; ++k) {
      for (const StatKind kind : kinds_of_block_count(k)) {
        for (std::size_t which = 0; which < 3; ++which) {
          const Counts& mine = counts[k][which];
          const Stat& theirs = told[kind].at(which);
          ASSERT_EQ(theirs.current, mine.current) << where << " kind " << static_cast<int>(kind) << " " << which;
          ASSERT_EQ(theirs.peak, mine.peak) << where << " kind " << static_cast<int>(kind) << " " << which;
          ASSERT_EQ(theirs.allocated, mine.allocated) << where << " kind " << static_cast<int>(kind) << " " << which;
          ASSERT_EQ(theirs.freed, mine.freed) << where << " kind " << static_cast<int>(kind) << " " << which;
        }
      }
    }
  }
  std::array<std::array<Counts, 3>, 3> counts;
};

TEST(BlockCaches, NumbersAreExactWhicheverThreadAllocatesAndFrees) {
  for (unsigned seed = 0; seed < 4; ++seed) {
    LabSpec spec;
    spec.device_bytes = 4 * kGiB;
    Lab lab(spec);
    Turns turns;
    std::mt19937 random(seed);
    struct Live {
      Address address;
      std::size_t bytes;
      std::size_t pool;
    };
    std::vector<Live> live;
    std::array<std::shared_ptr<Pool>, 2> pools = {lab.pool("a"), lab.pool("b")};
    std::array<Oracle, 3> oracles;  // of the pools, of the device
    for (int step = 0; step < 1500; ++step) {
      const std::size_t thread = random() % 3;
      const bool frees = live.size() > 40 || (!live.empty() && random() % 2 == 0);
      if (frees) {
        const std::size_t which = random() % live.size();
        const Live block = live[which];
        live[which] = live.back();
        live.pop_back();
        turns.on(thread, [&] { ASSERT_TRUE(DeviceMemory::free(lab.space, block.address)); });
        for (const std::size_t of : {block.pool, std::size_t{2}})
          oracles.at(of).add(block.bytes <= kMiB, block.bytes, -1);
      } else {
        static constexpr std::array<std::size_t, 6> kSizes = {100, 512, 3000, 70000, kMiB, 3 * kMiB};
        Live block{0, kSizes.at(random() % kSizes.size()), random() % 2};
        turns.on(thread, [&] { block.address = lab.memory().allocate(*pools.at(block.pool), block.bytes, nullptr); });
        live.push_back(block);
        for (const std::size_t of : {block.pool, std::size_t{2}})
          oracles.at(of).add(block.bytes <= kMiB, block.bytes, 1);
      }
      for (std::size_t k = 0; k < 2; ++k) oracles.at(k).expect(pools.at(k)->statistics(), "pool");
      oracles[2].expect(lab.memory().statistics(), "device");
      if (HasFatalFailure()) FAIL() << "seed " << seed << " step " << step;
      switch (random() % 100) {
        case 0:
          turns.end(thread);
          break;
        case 1:
          lab.memory().check();
          break;
        case 2:
          (void)pools[0]->memory_stats();
          break;
        case 3:
          lab.memory().reset_peaks();
          for (Oracle& oracle : oracles) {
            for (auto& of_kind : oracle.counts) {
              for (auto& counts : of_kind) counts.peak = counts.current;
            }
          }
          break;
        case 4:
          lab.memory().reset_accumulated();
          for (Oracle& oracle : oracles) {
            for (auto& of_kind : oracle.counts) {
              for (auto& counts : of_kind) counts.allocated = counts.freed = 0;
            }
          }
          break;
        case 5:
          lab.memory().empty_cache();
          break;
        default:
          break;
      }
    }
    for (const Live& block : live) ASSERT_TRUE(DeviceMemory::free(lab.space, block.address));
    lab.memory().check();
  }
}

TEST(BlockCaches, WhatWasCountedAsOversizeStopsBeingSoWhateverIsOversizeNow) {
  Lab lab;
  const auto pool = lab.pool("a");
  lab.memory().set_oversize(8 * kMiB);
  const Address block = lab.allocate(*pool, 16 * kMiB);
  ASSERT_EQ(pool->statistics().oversize_allocations.current, 1);
  lab.memory().set_oversize(64 * kMiB);
  warm(lab, *pool, 512);  // the thread has a place for the pool's blocks now
  lab.free(block);
  EXPECT_EQ(pool->statistics().oversize_allocations.current, 0);
}

// Two threads, so that what one counts falls below zero; a third asks all the time.
TEST(BlockCaches, NumbersThatAreAskedForMeanwhileAreNeverBelowZero) {
  Lab lab;
  const auto pool = lab.pool("a");
  std::atomic<bool> stop{false};
  std::atomic<Address> slot{0};
  std::thread taker([&] {
    for (int step = 0; step < 3000; ++step) {
      const Address block = lab.memory().allocate(*pool, 512, nullptr);
      while (slot.load(std::memory_order_acquire) != 0) std::this_thread::yield();
      slot.store(block, std::memory_order_release);
    }
    stop.store(true);
  });
  std::thread freer([&] {
    for (int step = 0; step < 3000; ++step) {
      Address block = 0;
      while ((block = slot.exchange(0, std::memory_order_acq_rel)) == 0) std::this_thread::yield();
      EXPECT_TRUE(DeviceMemory::free(lab.space, block));
    }
  });
  while (!stop.load()) {
    EXPECT_GE(pool->statistics()[StatKind::allocated_bytes][0].current, 0);
    EXPECT_LE(pool->live_bytes(), kMiB);
  }
  taker.join();
  freer.join();
  EXPECT_EQ(pool->live_bytes(), 0U);
}

// -- Many at once

TEST(BlockCaches, NoBlockIsGivenTwiceWhileThreadsShareAndOthersGather) {
  LabSpec spec;
  spec.device_bytes = 4 * kGiB;
  Lab lab(spec);
  const auto pool = lab.pool("a");
  constexpr int kThreads = 4;
  constexpr int kSteps = 4000;
  std::mutex bag_mutex;
  std::vector<Address> bag;
  std::map<Address, int> owners;
  std::atomic<bool> stop{false};
  std::thread gatherer([&] {
    for (int round = 0; !stop.load(); ++round) {
      if (round % 3 == 0) (void)pool->memory_stats();
      if (round % 3 == 1) (void)pool->statistics();
      if (round % 3 == 2) pool->shed(0);
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  });
  std::vector<std::thread> crew;
  crew.reserve(kThreads);
  for (int id = 0; id < kThreads; ++id) {
    crew.emplace_back([&, id] {
      std::mt19937 random(static_cast<unsigned>(id));
      for (int step = 0; step < kSteps; ++step) {
        if (random() % 2 == 0) {
          const std::size_t bytes = random() % 20 == 0 ? 2 * kMiB : 512 * (1 + random() % 16);
          const Address address = lab.memory().allocate(*pool, bytes, nullptr);
          const std::lock_guard<std::mutex> lock(bag_mutex);
          ASSERT_EQ(owners[address]++, 0) << "given twice";
          bag.push_back(address);
        } else {
          Address address = 0;
          {
            const std::lock_guard<std::mutex> lock(bag_mutex);
            if (bag.empty()) continue;
            const std::size_t which = random() % bag.size();
            address = bag[which];
            bag[which] = bag.back();
            bag.pop_back();
            --owners[address];
          }
          ASSERT_TRUE(DeviceMemory::free(lab.space, address));
        }
      }
    });
  }
  for (std::thread& thread : crew) thread.join();
  stop = true;
  gatherer.join();
  EXPECT_EQ(pool->live_blocks(), bag.size());
  for (const Address address : bag) ASSERT_TRUE(DeviceMemory::free(lab.space, address));
  lab.memory().check();
  EXPECT_EQ(pool->live_blocks(), 0U);
  EXPECT_EQ(pool->live_bytes(), 0U);
}

TEST(BlockCaches, AStreamThatAThreadHasAPlaceForKeepsItsTag) {
  constexpr std::uintptr_t kStreams = 80;  // beyond those whose tags are let be
  Lab lab;
  const auto pool = lab.pool("a");
  for (std::uintptr_t k = 1; k <= kStreams; ++k) {
    for (int turn = 0; turn < 2; ++turn) lab.free(lab.allocate(*pool, 512, stream(k)));
    pool->shed(0);
    lab.memory().settle(/*wait=*/true);
  }
  for (std::uintptr_t k = 1; k <= kStreams; ++k) {
    const Address block = lab.allocate(*pool, 512, stream(k));
    const auto asked = pool->asked_at(block);
    ASSERT_TRUE(asked.has_value());
    EXPECT_EQ(asked->stream, stream(k)) << k;
    lab.free(block);
  }
}

}  // namespace
}  // namespace vmm::testing
