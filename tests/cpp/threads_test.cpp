// Sixteen threads under tight limits: nothing overshoots by a byte, what fits
// is never refused, nobody's content changes.
#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <thread>

#include "core/faces/shared_memory_pool.h"
#include "cpp/lab.h"
#include "support/at_one_moment.h"

namespace vmm::testing {
namespace {

constexpr int kThreads = 16;
#ifdef VMM_UNDER_TSAN  // base/sync.h
constexpr bool kTsan = true;
#else
constexpr bool kTsan = false;
#endif
constexpr int kSteps = kTsan ? 40 : 100;

// A step's content check touches a word of every 64 KiB: enough to see
// another owner, and quick.
void mark(Address address, std::size_t bytes, std::uint64_t seed) {
  for (std::size_t at = 0; at + 8 < bytes; at += 64 * kKiB) *reinterpret_cast<std::uint64_t*>(address + at) = seed ^ at;
  *reinterpret_cast<std::uint64_t*>(address + bytes - 8) = seed;
}
bool is_marked(Address address, std::size_t bytes, std::uint64_t seed) {
  if (*reinterpret_cast<const std::uint64_t*>(address + bytes - 8) != seed) return false;
  for (std::size_t at = 0; at + 8 < bytes; at += 64 * kKiB) {
    if (*reinterpret_cast<const std::uint64_t*>(address + at) != (seed ^ at)) return false;
  }
  return true;
}

// Looks all the time; remembers the most it saw.
class Watcher {
 public:
  Watcher(const Lab& lab, const Budget& budget)
      : thread_([this, &lab, &budget] {
          while (!stop_.load(std::memory_order_relaxed)) {
            charged_ = std::max(charged_, budget.used());
            alive_ = std::max(alive_, lab.driver.live_chunk_bytes());
            std::this_thread::yield();
          }
        }) {}
  ~Watcher() { join(); }
  Watcher(const Watcher&) = delete;
  Watcher& operator=(const Watcher&) = delete;
  void join() {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
  }
  [[nodiscard]] std::size_t charged() const { return charged_; }
  [[nodiscard]] std::size_t alive() const { return alive_; }

 private:
  std::atomic<bool> stop_{false};
  std::size_t charged_ = 0;
  std::size_t alive_ = 0;
  std::thread thread_;  // last: it uses the others
};

template <typename Body>
void on_threads(int count, const Body& body) {
  std::vector<std::thread> threads;
  for (int k = 0; k < count; ++k) threads.emplace_back([&body, k] { body(k); });
  for (auto& thread : threads) thread.join();
}

struct Held {
  Address address = 0;
  std::size_t bytes = 0;
  std::uint64_t seed = 0;
};

// What all threads together may hold: exactly the limit, so every request fits
// once the idle memory of others is reclaimed.
class Bank {
 public:
  explicit Bank(std::size_t bytes) : left_(bytes) {}
  bool take(std::size_t bytes) {
    std::size_t left = left_.load();
    do {
      if (left < bytes) return false;
    } while (!left_.compare_exchange_weak(left, left - bytes));
    return true;
  }
  void put(std::size_t bytes) { left_ += bytes; }

 private:
  std::atomic<std::size_t> left_;
};

void allocate_and_free(Lab& lab, Pool& pool, int thread, Bank& bank, std::size_t page) {
  std::mt19937_64 random(static_cast<std::uint64_t>(thread) + 1);
  std::vector<Held> held;
  const auto drop = [&](std::size_t at) {
    EXPECT_TRUE(is_marked(held[at].address, held[at].bytes, held[at].seed)) << "thread " << thread;
    EXPECT_TRUE(DeviceMemory::free(lab.space, held[at].address));
    bank.put(held[at].bytes);
    held.erase(held.begin() + static_cast<std::ptrdiff_t>(at));
  };
  for (int step = 0; step < kSteps; ++step) {
    const std::size_t bytes = page * (1 + random() % 6);
    while (!bank.take(bytes)) {
      if (!held.empty()) drop(random() % held.size());
      std::this_thread::yield();
    }
    const Stream on = stream(static_cast<std::uintptr_t>(thread % 3) + 1);
    try {
      held.push_back({lab.memory().allocate(pool, bytes, on), bytes, random()});
      mark(held.back().address, bytes, held.back().seed);
    } catch (const OutOfMemoryError& error) {
      bank.put(bytes);
      ADD_FAILURE() << "thread " << thread << " step " << step << ": what fits was refused: " << error.what();
      break;
    }
    while (!held.empty() && random() % 8 < held.size()) drop(random() % held.size());
  }
  while (!held.empty()) drop(0);
}

TEST(Threads, OwnPoolsUnderOneLimitNeverOvershootAndNeverFail) {
  LabSpec quick;
  quick.options.scrub = false;
  Lab lab(quick);
  const std::size_t limit = kThreads * 3 * kPage;
  SharedMemoryPool shared(lab.memory(), limit);
  std::vector<std::shared_ptr<Pool>> pools;
  for (int k = 0; k < kThreads; ++k) {
    ModelSpec spec;
    spec.virtual_capacity = kGiB;
    spec.page_size = kPage;
    pools.push_back(shared.register_model("model " + std::to_string(k), spec));
  }
  Watcher watcher(lab, pools.front()->group());
  Bank bank(limit);
  on_threads(kThreads, [&](int k) { allocate_and_free(lab, *pools[static_cast<std::size_t>(k)], k, bank, kPage); });
  watcher.join();
  EXPECT_LE(watcher.charged(), limit);
  EXPECT_LE(watcher.alive(), limit);
  EXPECT_EQ(lab.driver.live_chunk_bytes(), limit) << "the limit was not tight";
  std::int64_t climbed = 0;
  for (const auto& pool : pools) climbed += pool->statistics().num_alloc_retries;
  EXPECT_GT(climbed, 0) << "no one had to reclaim";
  lab.memory().check();
}

TEST(Threads, OnePoolSharedByAllNeverOvershootsAndNeverFails) {
  Lab lab;
  const std::size_t limit = kThreads * 3 * kPage;
  PoolSpec spec = Lab::spec("all", limit);
  spec.page_size = kPage;
  const auto pool = lab.pool(spec);
  Watcher watcher(lab, pool->budget());
  Bank bank(limit);
  on_threads(kThreads, [&](int k) { allocate_and_free(lab, *pool, k, bank, kPage); });
  watcher.join();
  EXPECT_LE(watcher.charged(), limit);
  EXPECT_LE(watcher.alive(), limit);
  lab.memory().check();
}

TEST(Threads, ChunksOfDifferentSizesMeltUnderContention) {
  Lab lab;
  const std::size_t limit = kThreads * 3 * 4 * kMiB;
  SharedMemoryPool shared(lab.memory(), limit);
  std::vector<std::shared_ptr<Pool>> pools;
  for (int k = 0; k < 4; ++k) {
    ModelSpec spec;
    spec.virtual_capacity = kGiB;
    spec.page_size = k % 2 == 0 ? kPage : 4 * kMiB;
    pools.push_back(shared.register_model("model " + std::to_string(k), spec));
  }
  Watcher watcher(lab, pools.front()->group());
  Bank bank(limit);
  on_threads(kThreads,
             [&](int k) { allocate_and_free(lab, *pools[static_cast<std::size_t>(k % 4)], k, bank, 4 * kMiB); });
  watcher.join();
  EXPECT_LE(watcher.charged(), limit);
  EXPECT_LE(watcher.alive(), limit);
  lab.memory().check();
}

TEST(Threads, AnyThreadMayFreeWhatAnotherAllocated) {
  Lab lab;
  const auto pool = lab.pool("a", 256 * kMiB);
  std::mutex mutex;
  std::vector<Held> shelf;
  on_threads(kThreads, [&](int k) {
    std::mt19937_64 random(static_cast<std::uint64_t>(k) + 7);
    for (int step = 0; step < kSteps; ++step) {
      const std::size_t bytes =
          random() % 2 == 0 ? 512 + random() % (32 * kKiB) / 8 * 8 : kMiB + random() % kMiB / 8 * 8;
      Held mine{lab.memory().allocate(*pool, bytes, stream(random() % 3 + 1)), bytes, random()};
      mark(mine.address, mine.bytes, mine.seed);
      if (random() % 4 == 0) pool->record_stream(mine.address, stream(random() % 3 + 1));
      {
        const std::lock_guard<std::mutex> lock(mutex);
        shelf.push_back(mine);
        std::swap(shelf.back(), shelf[random() % shelf.size()]);
        if (shelf.size() < 8) continue;
        mine = shelf.back();
        shelf.pop_back();
      }
      EXPECT_TRUE(is_marked(mine.address, mine.bytes, mine.seed));
      EXPECT_TRUE(DeviceMemory::free(lab.space, mine.address));
    }
  });
  for (const Held& held : shelf) {
    EXPECT_TRUE(is_marked(held.address, held.bytes, held.seed));
    EXPECT_TRUE(DeviceMemory::free(lab.space, held.address));
  }
  lab.memory().check();
  EXPECT_EQ(pool->statistics()[StatKind::allocated_bytes][0].current, 0);
}

// Numbers of before came back with a pool that ended.
TEST(Threads, WhatIsResetStaysSoWhileAPoolEnds) {
  Lab lab;
  for (int round = 0; round < 4000; ++round) {
    const auto pool = lab.pool("a");
    DeviceMemory::free(lab.space, lab.memory().allocate(*pool, 2 * kMiB, nullptr));
    const auto reset = [&] {
      spin(round * 3);
      lab.memory().reset_accumulated();
    };
    at_one_moment(reset, [&] { lab.memory().close_pool(*pool, /*force=*/false); });
    ASSERT_EQ(lab.memory().statistics()[StatKind::allocation][0].allocated, 0) << "in round " << round;
  }
}

TEST(Threads, EverythingAtOnceKeepsItsBooks) {
  Lab lab;
  const std::size_t limit = 96 * kMiB;
  SharedMemoryPool shared(lab.memory(), limit);
  ModelSpec spec;
  spec.virtual_capacity = kGiB;
  const auto stable = shared.register_model("stable", spec);
  Watcher watcher(lab, stable->group());
  std::atomic<int> refused{0};
  on_threads(8, [&](int k) {
    std::mt19937_64 random(static_cast<std::uint64_t>(k) + 77);
    for (int step = 0; step < kSteps; ++step) {
      try {
        switch (k) {
          case 0: {  // models come and go
            const auto model = shared.register_model("passing", spec);
            const Address block = lab.memory().allocate(*model, 5 * kMiB, nullptr);
            shared.unregister_model("passing", /*force=*/true);
            EXPECT_TRUE(DeviceMemory::free(lab.space, block));
            break;
          }
          case 1:  // numbers
            EXPECT_LE(stable->memory_stats().allocated_bytes, limit);
            static_cast<void>(stable->snapshot());
            static_cast<void>(shared.global_stats());
            static_cast<void>(lab.memory().statistics());
            break;
          case 2:
            lab.memory().empty_cache();
            break;
          case 3: {  // explicit pages
            const Address at = shared.allocate_for_model("stable", 4 * kMiB, nullptr);
            mark(at, 4 * kMiB, random());
            shared.deallocate_for_model("stable", at - stable->base(), 4 * kMiB);
            break;
          }
          default: {
            const std::size_t bytes = 1 + random() % (12 * kMiB);
            const Held mine{lab.memory().allocate(*stable, align_up(bytes, 8), stream(random() % 2 + 1)),
                            align_up(bytes, 8), random()};
            mark(mine.address, mine.bytes, mine.seed);
            std::this_thread::yield();
            EXPECT_TRUE(is_marked(mine.address, mine.bytes, mine.seed));
            EXPECT_TRUE(DeviceMemory::free(lab.space, mine.address));
          }
        }
      } catch (const OutOfMemoryError&) {
        ++refused;  // a model whose registration was cut short goes below
        if (k == 0 && shared.has_model("passing")) shared.unregister_model("passing", /*force=*/true);
      }
    }
  });
  watcher.join();
  EXPECT_EQ(refused, 0) << "at most 5 + 4 + 4 x 14 MiB are in use at once";
  EXPECT_LE(watcher.charged(), limit);
  lab.memory().check();
}

// Looks at every pool each time that it is told something, as torch's trackers may.
class Onlooker final : public PoolObserver {
 public:
  explicit Onlooker(DeviceMemory& memory) : memory_(memory) {}
  void on_event(const Pool& /*pool*/, PoolEvent /*event*/, Address /*address*/, std::size_t /*bytes*/,
                Stream /*stream*/) noexcept override {
    memory_.refresh_numbers();
    (void)memory_.statistics();
    std::size_t reserved = 0;
    for (const auto& pool : memory_.pools()) {
      std::size_t of_segments = 0;
      for (const SegmentSnapshot& segment : pool->snapshot()) of_segments += segment.total_size;
      (void)pool->snapshot(SnapshotGrain::chunk);
      (void)pool->live_addresses();
      reserved += of_segments;
    }
    largest_ = std::max(largest_, reserved);
    ++looked_;
  }
  [[nodiscard]] int looked() const { return looked_; }
  [[nodiscard]] std::size_t largest() const { return largest_; }

 private:
  DeviceMemory& memory_;
  int looked_ = 0;  // one event is told at a time
  std::size_t largest_ = 0;
};

// Each waits for locks that another holds who tells something: for its pool's,
// for all of a group's, for the list of pools.
TEST(Threads, AnObserverMayLookAtAllPoolsWhileOthersGoOn) {
  Lab lab;
  const auto group = lab.memory().create_group("group", 64 * kMiB);
  std::vector<std::shared_ptr<Pool>> pools;
  for (int k = 0; k < 4; ++k)
    pools.push_back(lab.memory().create_pool(Lab::spec("p" + std::to_string(k)), group.get()));
  Onlooker onlooker(lab.memory());
  lab.memory().set_observer(&onlooker);
  on_threads(8, [&](int thread) {
    std::mt19937_64 random(static_cast<std::uint64_t>(thread) + 1);
    for (int step = 0; step < kSteps; ++step) {
      Pool& pool = *pools[random() % pools.size()];
      std::vector<Address> blocks;
      for (int k = 0; k < 3; ++k) {
        try {
          // Together often more than the limit: pools take from pools.
          blocks.push_back(
              lab.memory().allocate(pool, k == 0 ? 1000 : random() % (6 * kMiB) + 1, stream(random() % 3 + 1)));
        } catch (const OutOfMemoryError&) {
        }
      }
      for (const Address block : blocks) EXPECT_TRUE(DeviceMemory::free(lab.space, block));
      if (step % 7 == 0) {
        const GlobalMemoryStats stats = lab.memory().group_stats(*group);
        EXPECT_EQ(stats.physical_usage, stats.allocated_bytes + stats.idle_bytes + stats.stranded_bytes +
                                            stats.quarantined_bytes + stats.store_bytes);
      }
      if (step % 11 == 0) lab.memory().empty_cache();
      if (step % 13 == 0) {
        const auto passing = lab.memory().create_pool(Lab::spec("passing"), group.get());
        (void)lab.memory().allocate(*passing, kMiB, stream(1));
        lab.memory().close_pools({passing}, /*force=*/true);
        for (const Address block : passing->live_addresses()) EXPECT_TRUE(DeviceMemory::free(lab.space, block));
      }
    }
  });
  lab.memory().set_observer(nullptr);
  EXPECT_GT(onlooker.looked(), 8 * kSteps);
  EXPECT_LE(onlooker.largest(), 96 * kMiB) << "what is on its way is seen twice for a moment, not more";
  lab.memory().check();
}

// Debug mode: what is freed is looked at and unmapped by whoever comes by, while others
// look at what lives.
TEST(Threads, WatchedBlocksAmongThreads) {
  for (const char* mode : {"guard", "canary", "guard,sample=1/3"}) {
    SCOPED_TRACE(mode);
    LabSpec spec;
    spec.options.debug = parse_debug_mode(mode);
    Lab lab(spec);
    const auto pool = lab.pool("a");
    std::atomic<int> wrong{0};
    std::atomic<bool> stop{false};
    std::thread looker([&] {
      while (!stop.load(std::memory_order_relaxed)) {
        wrong += static_cast<int>(lab.memory().check_watched().size());
        static_cast<void>(lab.memory().debug_report());
        static_cast<void>(lab.memory().debug_log()->explain(pool->base()));
        std::this_thread::yield();
      }
    });
    std::vector<std::thread> threads;
    for (std::uint64_t number = 0; number < 4; ++number) {
      threads.emplace_back([&, number] {
        std::mt19937_64 random(number);
        std::vector<std::pair<Address, std::size_t>> mine;
        for (int step = 0; step < kSteps; ++step) {
          const std::size_t bytes = 8 + random() % (step % 4 == 0 ? 3 * kMiB : 4 * kKiB) / 8 * 8;
          mine.emplace_back(lab.memory().allocate(*pool, bytes, stream(0x10 * number)), bytes);
          mark(mine.back().first, bytes, number + 1);
          if (mine.size() < 6) continue;
          const std::size_t at = random() % mine.size();
          wrong += is_marked(mine[at].first, mine[at].second, number + 1) ? 0 : 1;
          DeviceMemory::free(lab.space, mine[at].first);
          mine[at] = mine.back();
          mine.pop_back();
        }
        for (const auto& [address, bytes] : mine) DeviceMemory::free(lab.space, address);
      });
    }
    for (std::thread& thread : threads) thread.join();
    stop = true;
    looker.join();
    EXPECT_EQ(wrong.load(), 0);
    lab.memory().settle(/*wait=*/true);
    lab.memory().check();
    EXPECT_EQ(lab.memory().debug_log()->counts().live, 0U);
  }
}

}  // namespace
}  // namespace vmm::testing
