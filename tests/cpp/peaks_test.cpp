#include "core/numbers/peaks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <random>
#include <thread>
#include <vector>

namespace vmm::testing {
namespace {

constexpr StatKind kBytes = StatKind::allocated_bytes;

// A pool as Peaks sees one.
struct Counter {
  explicit Counter(Peaks& peaks) : seat(peaks) {}
  void up(SizeClass size_class, std::size_t amount) {
    statistics.increase(kBytes, size_class, amount);
    seat.rose(kBytes, size_class, statistics[kBytes]);
  }
  void down(SizeClass size_class, std::size_t amount) {
    statistics.decrease(kBytes, size_class, amount);
    seat.fell(kBytes, size_class, statistics[kBytes]);
  }
  Statistics statistics;
  Peaks::Seat seat;
};

std::array<std::int64_t, 3> peaks_of(const Peaks& peaks) {
  Statistics out;
  peaks.fill_peaks(out);
  return {out[kBytes][0].peak, out[kBytes][1].peak, out[kBytes][2].peak};
}

TEST(Peaks, AreThoseOfTheSumNotTheSumOfThePeaks) {
  Peaks peaks;
  Counter one(peaks);
  Counter other(peaks);
  one.up(SizeClass::large_pool, 100);
  one.down(SizeClass::large_pool, 100);
  other.up(SizeClass::small_pool, 80);
  EXPECT_EQ(peaks_of(peaks), (std::array<std::int64_t, 3>{100, 80, 100}));
  peaks.reset_peaks();
  EXPECT_EQ(peaks_of(peaks), (std::array<std::int64_t, 3>{80, 80, 0}));
  one.up(SizeClass::large_pool, 1);
  EXPECT_EQ(peaks_of(peaks), (std::array<std::int64_t, 3>{81, 80, 1}));
}

TEST(Peaks, AreExactForAnyOrderOfEventsOfManyPools) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    std::mt19937 random(seed);
    Peaks peaks;
    std::vector<std::unique_ptr<Counter>> pools;
    std::array<std::int64_t, 3> highest{};
    for (int step = 0; step < 3000; ++step) {
      if (pools.size() < 6 && random() % 200 == 0) pools.push_back(std::make_unique<Counter>(peaks));
      if (pools.empty()) continue;
      Counter& pool = *pools[random() % pools.size()];
      const SizeClass size_class = random() % 2 == 0 ? SizeClass::small_pool : SizeClass::large_pool;
      const std::size_t held =
          static_cast<std::size_t>(pool.statistics[kBytes][size_class == SizeClass::small_pool ? 1 : 2].current);
      if (random() % 2 == 0) {
        pool.up(size_class, 1 + random() % 1000);
      } else if (held != 0) {
        pool.down(size_class, 1 + random() % held);
      }
      for (std::size_t which = 0; which < 3; ++which) {
        std::int64_t sum = 0;
        for (const auto& each : pools) sum += each->statistics[kBytes].at(which).current;
        highest.at(which) = std::max(highest.at(which), sum);
      }
      if (random() % 500 == 0) {
        peaks.reset_peaks();
        for (std::size_t which = 0; which < 3; ++which) {
          highest.at(which) = 0;
          for (const auto& each : pools) highest.at(which) += each->statistics[kBytes].at(which).current;
        }
      }
      ASSERT_EQ(peaks_of(peaks), highest) << "seed " << seed << " step " << step;
    }
  }
}

// Threads count their blocks in seats of their own, in a pool's peaks and its model's
// at once; what they have counted becomes the pool's now and then, and seats come and
// go. Either is as exact as if all were counted by one.
TEST(Peaks, AreExactForBlocksThatThreadsCount) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    std::mt19937 random(seed);
    Peaks family;
    Peaks own(family);
    Counter pool(own);
    Counter other(family);  // another pool of the model
    Peaks::Seat pool_in_family(family);
    std::vector<std::unique_ptr<BlockSeat>> threads;
    std::array<std::int64_t, 3> now{};  // bytes of the pool's blocks: all, small, large
    std::array<std::int64_t, 3> highest{};
    std::array<std::int64_t, 3> highest_of_family{};
    for (int step = 0; step < 3000; ++step) {
      const std::size_t which = random() % 3;
      if (threads.size() <= which) threads.push_back(std::make_unique<BlockSeat>(own, &family));
      BlockSeat& thread = *threads[random() % threads.size()];
      const SizeClass size_class = random() % 2 == 0 ? SizeClass::small_pool : SizeClass::large_pool;
      const std::size_t part = size_class == SizeClass::small_pool ? 1 : 2;
      const auto bytes = static_cast<std::int64_t>(1 + random() % 1000);
      switch (random() % 4) {
        case 0:
        case 1:
          thread.rose(size_class, static_cast<std::size_t>(bytes), static_cast<std::size_t>(bytes));
          now.at(0) += bytes;
          now.at(part) += bytes;
          break;
        case 2:  // by any thread, whoever allocated it
          if (now.at(part) < bytes) break;
          thread.fell(size_class, static_cast<std::size_t>(bytes), static_cast<std::size_t>(bytes));
          now.at(0) -= bytes;
          now.at(part) -= bytes;
          break;
        default:
          other.up(size_class, 5);
      }
      for (std::size_t k = 0; k < 3; ++k) {
        highest.at(k) = std::max(highest.at(k), now.at(k));
        const std::int64_t others = other.statistics[kBytes].at(k).current;
        highest_of_family.at(k) = std::max(highest_of_family.at(k), now.at(k) + others);
      }
      if (random() % 100 == 0) {
        Peaks::transfer(thread.counts(), thread, {&pool.seat, &pool_in_family});
        EXPECT_EQ(thread.counts(), BlockCounts{});
        if (random() % 2 == 0) {
          std::erase_if(threads, [&](const auto& each) { return each.get() == &thread; });
        }
      }
      ASSERT_EQ(peaks_of(own), highest) << "seed " << seed << " step " << step;
      ASSERT_EQ(peaks_of(family), highest_of_family) << "seed " << seed << " step " << step;
    }
  }
}

// At a peak each class in turn needs all the room that there is.
TEST(Peaks, TakeNoLockWhereClassesTakeTurnsBelowThePeak) {
  Peaks peaks;
  BlockSeat thread(peaks);
  const auto turn = [&] {
    for (const SizeClass size_class : {SizeClass::large_pool, SizeClass::small_pool}) {
      thread.rose(size_class, 1000, 1000);
      thread.fell(size_class, 1000, 1000);
    }
  };
  thread.rose(SizeClass::small_pool, 500, 500);
  for (int k = 0; k < 10; ++k) turn();
  peaks.reset_peaks();
  for (int k = 0; k < 10; ++k) turn();
  const std::uint64_t before = peaks.times_locked();
  for (int k = 0; k < 1000; ++k) turn();
  EXPECT_EQ(peaks.times_locked(), before);
}

// What one class has left the other one has at once: it looks closer once, and not at each.
TEST(Peaks, OneClassThatNeedsAllTheRoomKeepsIt) {
  Peaks peaks;
  BlockSeat thread(peaks);
  const auto once = [&thread](SizeClass size_class, std::size_t bytes) {
    thread.rose(size_class, bytes, bytes);
    thread.fell(size_class, bytes, bytes);
  };
  once(SizeClass::small_pool, 512);
  once(SizeClass::large_pool, 20 << 20);
  once(SizeClass::small_pool, 512);
  once(SizeClass::large_pool, 20 << 20);
  const std::uint64_t looks = thread.times_looked();
  for (int k = 0; k < 1000; ++k) once(SizeClass::large_pool, 20 << 20);
  EXPECT_EQ(thread.times_looked(), looks);
}

// Whoever takes room from a seat does so while its thread gives it to another class: what both
// classes may rise to unseen is never more than the seat has.
TEST(Peaks, AreMissedByNobodyOnceThreadsRestThatTookRoomFromEachOther) {
  constexpr int kRounds = 4000;
  std::mt19937 random(7);
  Peaks peaks;
  BlockSeat one(peaks);
  BlockSeat other(peaks);
  const auto turn = [](BlockSeat& seat, std::mt19937& sizes) {
    for (int k = 0; k < 20; ++k) {
      const SizeClass size_class = sizes() % 2 == 0 ? SizeClass::small_pool : SizeClass::large_pool;
      const std::size_t bytes = 1 + sizes() % 1000;
      seat.rose(size_class, bytes, bytes);
      seat.fell(size_class, bytes, bytes);
    }
  };
  std::atomic<int> begun{0};
  std::atomic<int> ended{0};
  std::thread beside([&] {
    std::mt19937 sizes(8);
    for (int round = 1; round <= kRounds; ++round) {
      while (begun.load() < round) {
      }
      turn(other, sizes);
      ended.store(round);
    }
  });
  int missed = 0;
  for (int round = 1; round <= kRounds; ++round) {
    begun.store(round);
    turn(one, random);
    while (ended.load() < round) {
    }
    const std::int64_t highest = peaks.level(kBytes).peak;
    const std::size_t small = random() % static_cast<std::size_t>(highest);
    one.rose(SizeClass::small_pool, small, small);
    const std::size_t large = static_cast<std::size_t>(highest) + 1 - small;
    one.rose(SizeClass::large_pool, large, large);
    one.fell(SizeClass::large_pool, large, large);
    one.fell(SizeClass::small_pool, small, small);
    missed += peaks.level(kBytes).peak < highest + 1 ? 1 : 0;
    if (highest > 3000) peaks.reset_peaks();
  }
  beside.join();
  EXPECT_EQ(missed, 0) << "of " << kRounds << " rounds";
}

// Each holds 100 while the next has 200 more and lets go of it: a new peak only
// where there is none higher, whoever left room and whoever is gone meanwhile.
TEST(Peaks, FollowManyPoolsInTurn) {
  Peaks peaks;
  std::vector<std::unique_ptr<Counter>> pools;
  for (int k = 0; k < 1000; ++k) {
    pools.push_back(std::make_unique<Counter>(peaks));
    pools.back()->up(SizeClass::large_pool, 100);
  }
  for (int round = 0; round < 3; ++round) {
    for (const auto& pool : pools) {
      pool->up(SizeClass::large_pool, 200);
      pool->down(SizeClass::large_pool, 200);
    }
    ASSERT_EQ(peaks_of(peaks)[0], 100'200);
  }
  for (int k = 0; k < 500; ++k) {
    pools.back()->down(SizeClass::large_pool, 100);
    pools.pop_back();
  }
  for (const auto& pool : pools) pool->up(SizeClass::large_pool, 100);
  EXPECT_EQ(peaks_of(peaks)[0], 100'200) << "100 x 1000 and 200 x 500 are less";
  pools.front()->up(SizeClass::large_pool, 201);
  EXPECT_EQ(peaks_of(peaks)[0], 100'201);
}

TEST(Peaks, StayWithinWhatManyThreadsCanHold) {
  constexpr int kThreads = 20;
  constexpr std::int64_t kHeldByEach = 10;
  Peaks peaks;
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  for (int k = 0; k < kThreads; ++k) {
    threads.emplace_back([&] {
      Counter pool(peaks);
      for (int step = 0; step < 2000; ++step) {
        pool.up(SizeClass::large_pool, kHeldByEach);
        pool.down(SizeClass::large_pool, kHeldByEach);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_GE(peaks_of(peaks)[0], kHeldByEach);
  EXPECT_LE(peaks_of(peaks)[0], kThreads * kHeldByEach) << "all of them at once";
  peaks.reset_peaks();
  EXPECT_EQ(peaks_of(peaks)[0], 0);
}

}  // namespace
}  // namespace vmm::testing
