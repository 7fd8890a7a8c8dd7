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

namespace vmm::testing {
namespace {

// A worker that does what it is told, and nothing meanwhile.
class Turns {
 public:
  template <typename Do>
  void on(std::size_t thread, const Do& what) {
    while (workers_.size() <= thread) workers_.push_back(std::make_unique<Worker>());
    workers_[thread]->run(what);
  }
  void end(std::size_t thread) { workers_[thread] = std::make_unique<Worker>(); }

 private:
  class Worker {
   public:
    Worker()
        : thread_([this] {
            for (;;) {
              has_work_.wait(false, std::memory_order_acquire);
              if (work_ == nullptr) return;
              work_();
              has_work_.store(false, std::memory_order_release);
              has_work_.notify_one();
            }
          }) {}
    ~Worker() {
      work_ = nullptr;
      has_work_.store(true, std::memory_order_release);
      has_work_.notify_one();
      thread_.join();
    }
    Worker(const Worker&) = delete;
    Worker& operator=(const Worker&) = delete;
    void run(std::function<void()> work) {
      work_ = std::move(work);
      has_work_.store(true, std::memory_order_release);
      has_work_.notify_one();
      has_work_.wait(true, std::memory_order_acquire);
    }

   private:
    std::function<void()> work_;
    std::atomic<bool> has_work_{false};
    std::thread thread_;
  };
  std::vector<std::unique_ptr<Worker>> workers_;
};

// Allocates and frees twice, so that the thread keeps a block of that size.
void warm(Lab& lab, Pool& pool, std::size_t bytes, Stream on = nullptr) {
  for (int round = 0; round < 2; ++round) lab.free(lab.allocate(pool, bytes, on));
}

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

// -- Handed on

std::vector<Address> allocate_many(Lab& lab, Pool& pool, std::size_t count, std::size_t bytes, Stream on = nullptr) {
  std::vector<Address> blocks(count);
  for (Address& block : blocks) block = lab.memory().allocate(pool, bytes, on);
  return blocks;
}

void free_all(Lab& lab, const std::vector<Address>& blocks) {
  for (const Address block : blocks) ASSERT_TRUE(DeviceMemory::free(lab.space, block));
}

TEST(Depot, HandsOnByStreamAndSizeAndReturnsWhatIsTooFewOrTooMuch) {
  BlockArena arena;
  const auto chain = [&](std::size_t count, std::size_t size, StreamTag tag, Block* rest = nullptr) {
    for (std::size_t k = 0; k < count; ++k) {
      Block* const block = arena.make();
      block->set_size(size);
      block->tag = tag;
      block->bin_next = rest;
      rest = block;
    }
    return rest;
  };
  const auto length = [](const Block* first) {
    std::size_t count = 0;
    for (; first != nullptr; first = first->bin_next) ++count;
    return count;
  };
  Depot depot;
  // Three sizes in one chain, of which one is too few for a batch.
  Block* const rest = depot.put(chain(20, 512, 1, chain(3, 1024, 1, chain(30, 2048, 1))));
  EXPECT_EQ(length(rest), 3U);
  EXPECT_EQ(rest->size(), 1024U);
  EXPECT_EQ(depot.blocks(), 50U);
  EXPECT_EQ(depot.put(chain(10, 512, 2)), nullptr);
  EXPECT_EQ(depot.take(1, 1024).first, nullptr);
  EXPECT_EQ(depot.take(3, 512).first, nullptr);
  const Depot::Batch batch = depot.take(2, 512);
  EXPECT_EQ(batch.count, 10U);
  EXPECT_EQ(length(batch.first), 10U);
  EXPECT_EQ(batch.first->tag, 2U);
  EXPECT_EQ(depot.take(2, 512).first, nullptr) << "once";
  EXPECT_EQ(length(depot.take_all()), 50U);
  EXPECT_TRUE(depot.is_empty());
  // 8 MiB, and 32 batches.
  EXPECT_EQ(depot.put(chain(8, kMiB, 1)), nullptr);
  EXPECT_EQ(length(depot.put(chain(8, 512, 1))), 8U);
  (void)depot.take_all();
  for (int k = 0; k < 32; ++k) EXPECT_EQ(depot.put(chain(8, 512, 1)), nullptr);
  EXPECT_EQ(length(depot.put(chain(8, 512, 1))), 8U);
  EXPECT_EQ(length(depot.take_all()), 32U * 8);
}

TEST(BlockCaches, WhatOneThreadFreesAnotherGets) {
  Lab lab;
  const auto pool = lab.pool("a");
  Turns turns;
  constexpr std::size_t kCount = 512;
  std::vector<Address> first;
  turns.on(0, [&] {
    warm(lab, *pool, 4096);
    first = allocate_many(lab, *pool, kCount, 4096);
  });
  turns.on(1, [&] { free_all(lab, first); });
  ASSERT_GT(pool->depot().blocks(), kCount / 2);
  std::sort(first.begin(), first.end());
  std::size_t handed_on = 0;
  turns.on(0, [&] {
    const std::vector<Address> again = allocate_many(lab, *pool, kCount, 4096);
    for (const Address block : again) handed_on += std::binary_search(first.begin(), first.end(), block) ? 1U : 0U;
    EXPECT_EQ(pool->depot().blocks(), 0U);
    EXPECT_EQ(pool->live_blocks(), kCount);
    free_all(lab, again);
  });
  EXPECT_GT(handed_on, kCount / 2);
  lab.memory().check();
  EXPECT_EQ(pool->live_bytes(), 0U);
}

TEST(BlockCaches, WhatIsHandedOnIsThePoolsWhereverItIsNeeded) {
  Lab lab;
  Turns turns;
  const auto fill = [&](Pool& pool) {
    std::vector<Address> blocks;
    turns.on(0, [&] { blocks = allocate_many(lab, pool, 512, 2048); });
    turns.on(1, [&] { free_all(lab, blocks); });
    ASSERT_FALSE(pool.depot().is_empty());
  };
  const auto pool = lab.pool("a");
  fill(*pool);
  EXPECT_EQ(pool->memory_stats().allocated_bytes, 0U);
  EXPECT_TRUE(pool->depot().is_empty()) << "whoever asks for numbers sees the pool as it is";
  fill(*pool);
  lab.memory().empty_cache();
  EXPECT_EQ(pool->statistics()[StatKind::reserved_bytes][0].current, 0);
  fill(*pool);
  turns.end(0);
  turns.end(1);
  EXPECT_TRUE(pool->depot().is_empty()) << "no thread is left that could want them";
  fill(*pool);
  pool->pin();
  EXPECT_TRUE(pool->depot().is_empty());
  pool->unpin();
  const auto other = lab.pool("b");
  fill(*other);
  lab.memory().close_pool(*other, /*force=*/false);
  EXPECT_TRUE(other->depot().is_empty());
}

// Sizes and streams of their own, and more of a size than is handed on at a time.
TEST(BlockCaches, NoBlockIsGivenTwiceWhileSomeThreadsAllocateAndOthersFree) {
  Lab lab;
  const auto pool = lab.pool("a");
  constexpr int kPairs = 2;
  constexpr std::uint64_t kSteps = 3000;
  std::atomic<bool> stop{false};
  std::thread gatherer([&] {
    for (int round = 0; !stop.load(); ++round) {
      round % 2 == 0 ? (void)pool->memory_stats() : (void)pool->shed(0);
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  });
  struct Ring {
    std::array<std::atomic<Address>, 200> blocks{};
  };
  std::array<Ring, kPairs> rings;
  const auto seed_of = [](int pair, std::uint64_t step) { return step * 7919 + static_cast<std::uint64_t>(pair) + 1; };
  std::vector<std::thread> crew;
  for (int pair = 0; pair < kPairs; ++pair) {
    auto& blocks = rings.at(static_cast<std::size_t>(pair)).blocks;
    crew.emplace_back([&, pair] {
      for (std::uint64_t step = 0; step < kSteps; ++step) {
        const std::size_t bytes = step / 500 % 2 == 0 ? 512 : 1536;
        const Address block = lab.memory().allocate(*pool, bytes, stream(step / 750 % 2));
        *reinterpret_cast<std::uint64_t*>(block) = seed_of(pair, step);
        auto& slot = blocks.at(step % blocks.size());
        while (slot.load(std::memory_order_acquire) != 0) std::this_thread::yield();
        slot.store(block, std::memory_order_release);
      }
    });
    crew.emplace_back([&, pair] {
      for (std::uint64_t step = 0; step < kSteps; ++step) {
        auto& slot = blocks.at(step % blocks.size());
        Address block = 0;
        while ((block = slot.load(std::memory_order_acquire)) == 0) std::this_thread::yield();
        ASSERT_EQ(*reinterpret_cast<const std::uint64_t*>(block), seed_of(pair, step)) << "given twice";
        slot.store(0, std::memory_order_release);
        ASSERT_TRUE(DeviceMemory::free(lab.space, block));
      }
    });
  }
  for (std::thread& thread : crew) thread.join();
  stop = true;
  gatherer.join();
  lab.memory().check();
  EXPECT_EQ(pool->live_blocks(), 0U);
  EXPECT_EQ(pool->live_bytes(), 0U);
}

// -- Devices that end

TEST(BlockCaches, NothingAtAllIsNoBlock) {
  Lab lab;
  const auto pool = lab.pool("a");
  warm(lab, *pool, 512);
  EXPECT_FALSE(DeviceMemory::free(lab.space, 0));
}

TEST(BlockCaches, AThreadEndsWhileItsDevicesEnd) {
  for (int round = 0; round < 5; ++round) {
    HostDriver host({kPage, kGiB, 1});
    AddressSpace space;
    std::vector<std::unique_ptr<DeviceMemory>> devices;
    for (int k = 0; k < 20; ++k)
      devices.push_back(std::make_unique<DeviceMemory>(host, space, 0, LabSpec::plain_options()));
    std::vector<std::shared_ptr<Pool>> pools;
    for (const auto& device : devices) {
      PoolSpec spec;
      spec.name = "a";
      spec.capacity = kGiB;
      pools.push_back(device->create_pool(spec, nullptr));
    }
    std::atomic<bool> is_done{false};
    std::thread thread([&] {
      for (std::size_t k = 0; k < devices.size(); ++k) {
        EXPECT_TRUE(DeviceMemory::free(space, devices[k]->allocate(*pools[k], 512, nullptr)));
      }
      is_done.store(true);
    });
    while (!is_done.load()) std::this_thread::yield();
    pools.clear();
    while (!devices.empty()) devices.pop_back();
    thread.join();
  }
}

// Whose block it frees a thread knows only after it has looked into its own cache.
TEST(BlockCaches, AThreadFreesWhatIsNobodysWhileItsDeviceEnds) {
  HostDriver host({kPage, kGiB, 1});
  AddressSpace space;
  for (int round = 0; round < 50; ++round) {
    auto device = std::make_unique<DeviceMemory>(host, space, 0, LabSpec::plain_options());
    PoolSpec spec;
    spec.name = "a";
    spec.capacity = kGiB;
    auto pool = device->create_pool(spec, nullptr);
    std::atomic<bool> is_ready{false};
    std::atomic<bool> stop{false};
    std::thread thread([&] {
      EXPECT_TRUE(DeviceMemory::free(space, device->allocate(*pool, 512, nullptr)));
      is_ready.store(true);
      while (!stop.load(std::memory_order_relaxed)) EXPECT_FALSE(DeviceMemory::free(space, 0x1000));
    });
    while (!is_ready.load()) std::this_thread::yield();
    pool.reset();
    device.reset();
    stop.store(true);
    thread.join();
  }
}

// A thread's last look at a device that has ended finds nothing, and harms nobody.
TEST(BlockCaches, AThreadFreesOnOneDeviceAfterAnotherHasEnded) {
  Lab lab;
  const auto pool = lab.pool("a");
  const Address block = lab.memory().allocate(*pool, 512, nullptr);
  {
    Lab other;
    const auto pool_there = other.pool("b");
    for (int round = 0; round < 3; ++round) other.free(other.allocate(*pool_there, 512));
  }
  EXPECT_TRUE(DeviceMemory::free(lab.space, block));
  EXPECT_EQ(pool->live_blocks(), 0U);
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

}  // namespace
}  // namespace vmm::testing
