// MemoryPool: buffers in the order of streams, what is kept of them, and the numbers.
#include "core/faces/memory_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "cpp/lab.h"

namespace vmm::testing {
namespace {

using std::chrono::milliseconds;

const Stream kOne = stream(0x10);
const Stream kTwo = stream(0x20);
const Stream kThree = stream(0x30);

class Buffers : public ::testing::Test {
 protected:
  ~Buffers() override {
    lab_.driver.release_fences();
    for (const Address address : std::set<Address>(live_)) free(address);
    pool_.reset();
  }
  // Another moment: each is later than the last.
  void after(milliseconds time) { time_ += time; }
  Address allocate(std::size_t bytes, Stream on = kOne) {
    const Address address = pool_->allocate(bytes, on);
    live_.insert(address);
    lab_.memory().check();
    return address;
  }
  void free(Address address) {
    EXPECT_EQ(live_.erase(address), 1U);
    pool_->free(address);
    lab_.memory().check();
  }
  std::uint64_t created() { return lab_.driver.count(Call::create); }
  std::uint64_t waits() { return lab_.driver.count(Call::wait) + lab_.driver.count(Call::synchronize); }
  // What the device has given, all of it to this pool.
  std::size_t held() { return lab_.driver.live_chunk_bytes(); }

  Lab lab_;
  std::set<Address> live_;
  MemoryPool::Time time_{milliseconds(1)};
  std::optional<MemoryPool> pool_{std::in_place, lab_.memory(), [this] { return time_; }};
};

// -- Order of streams.

TEST_F(Buffers, AFreedOneIsReusedAtOnceOnItsOwnStream) {
  lab_.driver.hold_fences();
  const Address first = allocate(8 * kMiB);
  free(first);
  EXPECT_EQ(allocate(8 * kMiB), first);
  EXPECT_EQ(waits(), 0U);
}

TEST_F(Buffers, AnySizeThatFitsReusesIt) {
  lab_.driver.hold_fences();
  const Address first = allocate(16 * kMiB);
  free(first);
  const std::uint64_t before = created();
  EXPECT_EQ(allocate(6 * kMiB), first);
  EXPECT_EQ(allocate(10 * kMiB), first + 6 * kMiB);
  EXPECT_EQ(created(), before);
}

TEST_F(Buffers, AnotherStreamHasItBehindTheWorkThatIsQueued) {
  lab_.memory().set_limit(lab_.memory().budget(), 16 * kMiB);
  const Address first = allocate(16 * kMiB, kOne);
  lab_.driver.hold_fences(kOne);
  free(first);
  const std::uint64_t ordered = lab_.driver.count(Call::stream_wait);
  allocate(16 * kMiB, kTwo);
  EXPECT_GT(lab_.driver.count(Call::stream_wait), ordered) << "the GPU waits";
  EXPECT_EQ(waits(), 0U) << "and the caller does not";
}

TEST_F(Buffers, WhatTheGpuHasFinishedIsAnyStreams) {
  const Address first = allocate(8 * kMiB, kOne);
  const Address second = allocate(8 * kMiB, kTwo);
  ASSERT_EQ(second, first + 8 * kMiB);
  free(first);
  free(second);
  const std::uint64_t before = created();
  EXPECT_EQ(allocate(6 * kMiB, kThree), first) << "the shortest that is long enough";
  EXPECT_EQ(allocate(10 * kMiB, kThree), first + 6 * kMiB) << "across what two streams had";
  EXPECT_EQ(created(), before);
  EXPECT_EQ(waits(), 0U);
}

TEST_F(Buffers, WhatItHasNotFinishedIsItsStreamsAlone) {
  const Address first = allocate(8 * kMiB, kOne);
  lab_.meet(kTwo);
  lab_.driver.hold_fences(kOne);
  free(first);
  const std::uint64_t before = created();
  const Address second = allocate(8 * kMiB, kTwo);
  EXPECT_NE(second, first);
  EXPECT_GT(created(), before);
  EXPECT_EQ(waits(), 0U);
  EXPECT_EQ(lab_.driver.count(Call::stream_wait), 0U) << "nor does the GPU, while there is memory";
  EXPECT_EQ(allocate(8 * kMiB, kOne), first);
}

TEST_F(Buffers, SmallOnesStandWhereMemoryIsFree) {
  const Address first = allocate(8 * kMiB);
  free(first);
  const std::uint64_t before = created();
  EXPECT_GE(allocate(1000), first + 6 * kMiB) << "at the end of it, where they pin one chunk";
  EXPECT_EQ(allocate(6 * kMiB), first);
  EXPECT_EQ(created(), before);
}

TEST_F(Buffers, OneSmallOneKeepsOneChunk) {
  const Address first = allocate(16 * kMiB);
  free(first);
  EXPECT_EQ(allocate(1000), first + 14 * kMiB);
  const Address second = allocate(32 * kMiB);
  EXPECT_GT(second, first);
  free(second);
  EXPECT_EQ(allocate(1000, kTwo), first + 12 * kMiB) << "in the chunk of 4 MiB that the other one keeps";
  EXPECT_GE(pool_->trim(0), 40 * kMiB);
  EXPECT_EQ(held(), 4 * kMiB);
}

// What one lets go the other takes, which costs a look and a question each time.
TEST_F(Buffers, StreamsThatTakeTurnsHaveMemoryOfTheirOwnInTheEnd) {
  const auto turns = [&](int count) {
    for (int k = 0; k < count; ++k) free(allocate(8 * kMiB, k % 2 == 0 ? kOne : kTwo));
  };
  turns(200);
  const auto asked = [&] { return lab_.driver.count(Call::record) + created(); };
  const std::uint64_t before = asked();
  turns(200);
  EXPECT_EQ(asked(), before);
  EXPECT_LE(held(), 20 * kMiB);
}

// Above four times its peak it grows no more, and still takes what others have freed.
TEST_F(Buffers, TasksWithStreamsOfTheirOwnDoNotHoldTheirPeakEach) {
  constexpr int kStreams = 64;
  const auto tasks = [&](int count) {
    for (int task = 0; task < count; ++task) {
      std::vector<Address> live;
      for (std::size_t k = 0; k < 8; ++k) {
        live.push_back(allocate((4 + k) * kMiB, stream(0x1000 + 0x10 * static_cast<std::uintptr_t>(task % kStreams))));
      }
      for (const Address address : live) free(address);
    }
  };
  tasks(1000);
  EXPECT_LE(held(), 6 * 60 * kMiB);
  const std::uint64_t before = created();
  tasks(1000);
  EXPECT_LE(created() - before, 30U);
  EXPECT_LE(held(), 6 * 60 * kMiB);
}

TEST_F(Buffers, WhatNobodyHasUsedIsAnyStreamsWhileTheGpuIsBusy) {
  allocate(64 * kMiB, kOne);
  lab_.meet(kTwo);
  lab_.driver.hold_fences();
  const std::uint64_t before = created();
  const Address first = allocate(2 * kMiB, kOne);
  ASSERT_EQ(created(), before + 1);
  ASSERT_EQ(held(), 68 * kMiB) << "a 16th goes ahead";
  EXPECT_EQ(allocate(2 * kMiB, kTwo), first + 2 * kMiB);
  EXPECT_EQ(created(), before + 1);
  EXPECT_EQ(lab_.driver.count(Call::stream_wait), 0U);
}

TEST_F(Buffers, ARecordedStreamDefersItsOwnStreamToo) {
  const Address first = allocate(8 * kMiB, kOne);
  lab_.meet(kTwo);
  lab_.driver.hold_fences(kTwo);
  pool_->record_stream(first, kTwo);
  free(first);
  EXPECT_NE(allocate(8 * kMiB, kOne), first);
  lab_.driver.release_fences();
  lab_.memory().settle(/*wait=*/false);
  EXPECT_EQ(allocate(8 * kMiB, kOne), first);
}

// -- Speed.

// Blocks of all sizes that come and go, live bytes up and down: once it holds what that
// takes, it asks the driver for nothing. A model's pool moves its chunks about instead.
TEST_F(Buffers, AProgramThatSettlesCallsTheDriverNoMore) {
  const auto round = [&] {
    std::mt19937_64 again;
    std::vector<Address> live;
    std::size_t in_use = 0;
    std::map<Address, std::size_t> sizes;
    for (int k = 0; k < 400; ++k) {
      const std::size_t size = 1 + again() % (12 * kMiB);
      if (live.empty() || (again() % 100 < 73 && in_use + size < 60 * kMiB)) {
        live.push_back(pool_->allocate(size, kOne));
        sizes[live.back()] = size;
        in_use += size;
      } else {
        std::swap(live[again() % live.size()], live.back());
        in_use -= sizes[live.back()];
        pool_->free(live.back());
        live.pop_back();
      }
    }
    for (const Address address : live) pool_->free(address);
    lab_.memory().check();
  };
  for (int k = 0; k < 8; ++k) round();
  const auto calls = [&] { return lab_.driver.count(Call::map) + lab_.driver.count(Call::unmap); };
  const std::uint64_t before = calls();
  for (int k = 0; k < 4; ++k) round();
  EXPECT_EQ(calls(), before);
  EXPECT_LE(held(), 288 * kMiB) << "four times the most that was live";
}

// -- Numbers.

TEST_F(Buffers, NumbersAreExact) {
  const Address a = allocate(1000);
  const Address b = allocate(3 * kMiB);
  free(a);
  BufferStats stats = pool_->stats();
  EXPECT_EQ(stats.allocated_bytes, 3 * kMiB);
  EXPECT_EQ(stats.peak_bytes, 3 * kMiB + 1024);
  EXPECT_EQ(stats.allocation_count, 2U);
  EXPECT_EQ(stats.free_count, 1U);
  EXPECT_EQ(stats.cached_bytes, held() - 3 * kMiB);
  free(b);
  stats = pool_->stats();
  EXPECT_EQ(stats.allocated_bytes, 0U);
  EXPECT_EQ(stats.free_count, 2U);
  EXPECT_EQ(stats.cached_bytes, held());
}

TEST_F(Buffers, TheDevicesLimitCountsThem) {
  lab_.memory().set_limit(lab_.memory().budget(), 8 * kMiB);
  allocate(8 * kMiB);
  try {
    allocate(2 * kMiB);
    FAIL();
  } catch (const OutOfMemoryError& error) {
    EXPECT_EQ(error.limit, 8 * kMiB);
    EXPECT_EQ(error.pool, pool_->pool().name());
  }
  EXPECT_EQ(pool_->stats().allocation_count, 1U);
}

TEST_F(Buffers, WhatIsCachedServesAModel) {
  lab_.memory().set_limit(lab_.memory().budget(), 8 * kMiB);
  free(allocate(8 * kMiB));
  const auto model = lab_.pool("a");
  lab_.allocate(*model, 8 * kMiB);
  EXPECT_EQ(pool_->stats().cached_bytes, 0U);
}

// -- Trim.

TEST_F(Buffers, TrimGivesBackWhatWasFreedFirst) {
  std::vector<Address> buffers;
  for (int k = 0; k < 4; ++k) buffers.push_back(allocate(4 * kMiB));
  for (const std::size_t k : {2U, 0U, 3U, 1U}) free(buffers.at(k));
  EXPECT_EQ(pool_->trim(8 * kMiB), 8 * kMiB);
  EXPECT_EQ(pool_->stats().cached_bytes, 8 * kMiB);
  EXPECT_TRUE(pool_->pool().chunks_under(buffers[2], 4 * kMiB).empty());
  EXPECT_TRUE(pool_->pool().chunks_under(buffers[0], 4 * kMiB).empty());
  EXPECT_FALSE(pool_->pool().chunks_under(buffers[3], 4 * kMiB).empty());
  EXPECT_FALSE(pool_->pool().chunks_under(buffers[1], 4 * kMiB).empty());
}

TEST_F(Buffers, AUseInBetweenMakesItYoung) {
  const Address first = allocate(4 * kMiB);
  const Address second = allocate(4 * kMiB);
  free(first);
  free(second);
  const std::set<Address> again{allocate(4 * kMiB), allocate(4 * kMiB)};
  ASSERT_EQ(again, (std::set<Address>{first, second}));
  free(second);
  free(first);
  pool_->trim(4 * kMiB);
  EXPECT_TRUE(pool_->pool().chunks_under(second, 4 * kMiB).empty());
  EXPECT_FALSE(pool_->pool().chunks_under(first, 4 * kMiB).empty());
}

TEST_F(Buffers, TrimKeepsAtMostThat) {
  for (int k = 0; k < 3; ++k) free(allocate(6 * kMiB));
  const std::size_t cached = pool_->stats().cached_bytes;
  EXPECT_EQ(pool_->trim(cached), 0U);
  pool_->trim(cached - 1);
  EXPECT_LT(pool_->stats().cached_bytes, cached);
  pool_->trim(0);
  EXPECT_EQ(pool_->stats().cached_bytes, 0U);
  EXPECT_EQ(held(), 0U);
}

TEST_F(Buffers, TrimCountsWhatLiesBesideLiveOnes) {
  const Address small = allocate(512);
  free(allocate(4 * kMiB));
  const std::size_t beside = kPage - 512;
  pool_->trim(beside);
  EXPECT_EQ(pool_->stats().cached_bytes, beside) << "the chunk of the live one stays";
  free(small);
}

TEST_F(Buffers, TrimWaitsForWhatIsQueued) {
  lab_.driver.hold_fences(kOne);
  free(allocate(4 * kMiB, kOne));
  EXPECT_EQ(pool_->trim(0), 4 * kMiB);
  EXPECT_GT(waits(), 0U);
}

// -- The threshold.

TEST_F(Buffers, WithoutAThresholdAllStays) {
  free(allocate(8 * kMiB));
  after(std::chrono::hours(1));
  EXPECT_EQ(pool_->stats().cached_bytes, 8 * kMiB);
}

TEST_F(Buffers, AThresholdOfZeroLeavesAStepItsCache) {
  pool_->set_threshold(0);
  std::uint64_t first_step = 0;
  for (int step = 0; step < 50; ++step) {
    std::vector<Address> buffers;
    for (int k = 0; k < 4; ++k) {
      buffers.push_back(allocate(4 * kMiB));
      after(milliseconds(70));
    }
    for (const Address buffer : buffers) free(buffer);
    after(milliseconds(70));
    if (step == 0) first_step = created();
  }
  EXPECT_EQ(created(), first_step) << "no chunk was given back and made again";
  EXPECT_EQ(pool_->stats().cached_bytes, 16 * kMiB);
}

TEST_F(Buffers, AThresholdOfZeroEmptiesARestingPool) {
  pool_->set_threshold(0);
  const Address kept = allocate(4 * kMiB);
  free(allocate(8 * kMiB));
  after(milliseconds(999));
  EXPECT_EQ(pool_->stats().cached_bytes, 8 * kMiB) << "not yet";
  after(milliseconds(1));
  EXPECT_EQ(pool_->stats().cached_bytes, 0U);
  EXPECT_EQ(held(), 4 * kMiB);
  free(kept);
}

TEST_F(Buffers, WhatNoStepNeedsGoesWhileStepsGoOn) {
  pool_->set_threshold(0);
  std::vector<Address> buffers;
  for (int k = 0; k < 6; ++k) buffers.push_back(allocate(4 * kMiB));
  for (const Address buffer : buffers) free(buffer);
  for (int k = 0; k < 30; ++k) {
    after(milliseconds(100));
    const Address one = allocate(4 * kMiB);
    free(allocate(4 * kMiB));
    free(one);
  }
  EXPECT_EQ(pool_->stats().cached_bytes, 8 * kMiB);
}

TEST_F(Buffers, AStepThatComesLateFindsItsCache) {
  pool_->set_threshold(0);
  free(allocate(8 * kMiB));
  const std::uint64_t before = created();
  after(std::chrono::seconds(10));
  free(allocate(8 * kMiB));
  EXPECT_EQ(created(), before) << "what the request itself uses is not given back first";
}

TEST_F(Buffers, AThresholdKeepsThatMuch) {
  pool_->set_threshold(8 * kMiB);
  std::vector<Address> buffers;
  for (int k = 0; k < 5; ++k) buffers.push_back(allocate(4 * kMiB));
  for (const Address buffer : buffers) free(buffer);
  after(milliseconds(1000));
  EXPECT_EQ(pool_->stats().cached_bytes, 8 * kMiB);
  EXPECT_FALSE(pool_->pool().chunks_under(buffers[4], 4 * kMiB).empty()) << "the youngest stay";
  EXPECT_EQ(pool_->threshold(), 8 * kMiB);
}

TEST_F(Buffers, NothingOfQueuedWorkGoesAndNobodyWaits) {
  pool_->set_threshold(0);
  const Address buffer = allocate(8 * kMiB);
  lab_.driver.hold_fences(kOne);
  free(buffer);
  after(milliseconds(1000));
  EXPECT_EQ(pool_->stats().cached_bytes, 8 * kMiB);
  EXPECT_EQ(waits(), 0U);
  lab_.driver.release_fences();
  EXPECT_EQ(pool_->stats().cached_bytes, 0U);
  EXPECT_EQ(waits(), 0U);
}

// -- Its end.

TEST_F(Buffers, ClosingOneInUseIsRefusedUnlessForced) {
  const Address buffer = allocate(4 * kMiB);
  try {
    pool_->close(/*force=*/false);
    FAIL();
  } catch (const StillInUseError& error) {
    EXPECT_EQ(error.live_blocks, 1U);
    EXPECT_EQ(error.live_bytes, 4 * kMiB);
  }
  pool_->close(/*force=*/true);
  EXPECT_TRUE(pool_->is_closed());
  EXPECT_NO_THROW(pool_->close(false));
  EXPECT_THROW(pool_->allocate(512, kOne), InvalidArgumentError);
  EXPECT_THROW(pool_->trim(0), InvalidArgumentError);
  EXPECT_THROW(pool_->set_threshold(0), InvalidArgumentError);
  Lab::fill(buffer, 4 * kMiB, 3);
  EXPECT_TRUE(Lab::holds(buffer, 4 * kMiB, 3)) << "it keeps its memory";
  free(buffer);
  lab_.memory().settle(/*wait=*/true);
  EXPECT_EQ(lab_.driver.live_reservations(), lab_.memory().pools().size());
  EXPECT_EQ(pool_->stats().allocation_count, 1U) << "numbers can still be read";
}

TEST_F(Buffers, AFailedDriverCallLeavesItAsItWas) {
  free(allocate(4 * kMiB));
  const BufferStats before = pool_->stats();
  for (const Call call : {Call::create, Call::map, Call::set_access}) {
    lab_.driver.fail_nth(call, 1, no_memory(), Repeat::from_then_on);
    EXPECT_THROW(pool_->allocate(32 * kMiB, kOne), OutOfMemoryError);
    lab_.driver.clear_failures();
    lab_.memory().check();
  }
  const BufferStats after_it = pool_->stats();
  EXPECT_EQ(after_it.allocation_count, before.allocation_count);
  EXPECT_EQ(after_it.allocated_bytes, 0U);
  free(allocate(32 * kMiB));
}

// Requests, frees, trims and rests at random, beside what the numbers have to be.
TEST_F(Buffers, AnyProgramKeepsContentAndNumbers) {
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    pool_.emplace(lab_.memory(), [this] { return time_; });
    std::mt19937_64 random(seed);
    const auto below = [&random](std::size_t n) { return static_cast<std::size_t>(random() % n); };
    struct Live {
      Address at = 0;
      std::size_t bytes = 0;
      std::uint64_t pattern = 0;
    };
    std::vector<Live> live;
    BufferStats expected;
    for (std::uint64_t step = 0; step < 150; ++step) {
      SCOPED_TRACE("seed " + std::to_string(seed) + ", step " + std::to_string(step));
      const std::size_t what = below(12);
      if (what < 6 || live.empty()) {
        const std::size_t bytes = 8 * (1 + below(below(3) == 0 ? kMiB / 4 : 4096));
        const Live made{allocate(bytes, stream(16 * (1 + below(3)))), bytes, seed * 1000 + step};
        for (const Live& other : live) {
          ASSERT_TRUE(made.at + made.bytes <= other.at || other.at + other.bytes <= made.at);
        }
        Lab::fill(made.at, made.bytes, made.pattern);
        live.push_back(made);
        ++expected.allocation_count;
        expected.allocated_bytes += align_up(bytes, 512);
      } else if (what < 10) {
        std::swap(live[below(live.size())], live.back());
        const Live gone = live.back();
        live.pop_back();
        ASSERT_EQ(Lab::first_wrong(gone.at, gone.bytes, gone.pattern), gone.bytes);
        if (below(3) == 0) pool_->record_stream(gone.at, stream(16 * (1 + below(3))));
        free(gone.at);
        ++expected.free_count;
        expected.allocated_bytes -= align_up(gone.bytes, 512);
      } else if (what == 10) {
        const std::size_t keep = below(16) * kMiB;
        const std::size_t before = pool_->pool().physical_bytes();
        const std::size_t given = pool_->trim(keep);
        ASSERT_EQ(given, before - pool_->pool().physical_bytes());
        const MemoryStats numbers = pool_->pool().memory_stats();
        ASSERT_TRUE(numbers.idle_bytes == 0 || numbers.physical_usage - numbers.allocated_bytes <= keep);
      } else {
        after(milliseconds(below(1500)));
        pool_->set_threshold(below(3) == 0 ? kUnlimited : below(8) * kMiB);
      }
      expected.peak_bytes = std::max(expected.peak_bytes, expected.allocated_bytes);
      const BufferStats stats = pool_->stats();
      ASSERT_EQ(stats.allocated_bytes, expected.allocated_bytes);
      ASSERT_EQ(stats.peak_bytes, expected.peak_bytes);
      ASSERT_EQ(stats.allocation_count, expected.allocation_count);
      ASSERT_EQ(stats.free_count, expected.free_count);
      ASSERT_EQ(stats.cached_bytes, pool_->pool().physical_bytes() - stats.allocated_bytes);
    }
    for (const Live& each : live) free(each.at);
    pool_->close(/*force=*/false);
    lab_.memory().empty_cache();  // what rests on the shelf
    ASSERT_EQ(held(), 0U);
  }
}

TEST_F(Buffers, ThreadsShareOne) {
  pool_.emplace(lab_.memory());
  pool_->set_threshold(4 * kMiB);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (std::uintptr_t name = 1; name <= 4; ++name) {
    threads.emplace_back([this, name, &wrong] {
      for (std::size_t k = 0; k < 200; ++k) {
        const std::size_t bytes = 512 * (1 + (k * 37 * name) % 600);
        const Address buffer = pool_->allocate(bytes, stream(16 * name));
        Lab::fill(buffer, bytes, name * 1000 + k);
        if (k % 50 == 0) static_cast<void>(pool_->stats());
        if (k % 70 == 0) pool_->trim(0);
        if (!Lab::holds(buffer, bytes, name * 1000 + k)) ++wrong;
        pool_->free(buffer);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  const BufferStats stats = pool_->stats();
  EXPECT_EQ(stats.allocation_count, 800U);
  EXPECT_EQ(stats.free_count, 800U);
  EXPECT_EQ(stats.allocated_bytes, 0U);
  EXPECT_EQ(stats.cached_bytes, held());
  lab_.memory().check();
}

// -- The order of frees.

TEST(FreedOrder, TheLatestFreeOfAnyOfItsPagesCounts) {
  FreedOrder order(10);
  order.note({0, 40});   // pages 0 to 3: 1
  order.note({10, 20});  // pages 1 and 2: 2
  EXPECT_EQ(order.newest({0, 10}), 1U);
  EXPECT_EQ(order.newest({10, 10}), 2U);
  EXPECT_EQ(order.newest({29, 1}), 2U);
  EXPECT_EQ(order.newest({30, 10}), 1U);
  EXPECT_EQ(order.newest({0, 40}), 2U);
  EXPECT_EQ(order.newest({40, 100}), 0U);
  order.note({25, 1});  // page 2: 3
  EXPECT_EQ(order.newest({20, 10}), 3U);
  EXPECT_EQ(order.newest({10, 10}), 2U);
  order.note({0, 40});
  EXPECT_EQ(order.newest({0, 1}), 4U);
}

TEST(FreedOrder, AgreesWithAMomentForEachPage) {
  constexpr std::size_t kPage = 4;
  constexpr std::size_t kAll = 3000;  // pages: several leaves of them
  std::mt19937 random(3);
  const auto any = [&](std::size_t most) { return std::size_t{random()} % most; };
  FreedOrder order(kPage);
  std::vector<std::uint64_t> plain(kAll, 0);
  for (std::uint64_t when = 1; when <= 2000; ++when) {
    const std::size_t longest = when % 3 == 0 ? kAll : 40;
    const std::size_t offset = any((kAll - 1) * kPage);
    const ByteRange freed{offset, 1 + any(std::min(kAll * kPage - offset, longest * kPage))};
    order.note(freed);
    std::fill(plain.begin() + std::ptrdiff_t(freed.offset / kPage),
              plain.begin() + std::ptrdiff_t((freed.end() - 1) / kPage) + 1, when);
    const std::size_t first = any(kAll);
    const std::size_t end = first + 1 + any(std::min<std::size_t>(kAll - first, 60));
    EXPECT_EQ(order.newest({first * kPage, (end - first) * kPage}),
              *std::max_element(plain.begin() + std::ptrdiff_t(first), plain.begin() + std::ptrdiff_t(end)));
  }
}

// Whoever is told that memory goes may be what another thread, which uses the pool, waits for.
class Neighbour final : public PoolObserver {
 public:
  explicit Neighbour(MemoryPool& pool) : pool_(pool) {}
  void on_event(const Pool& /*pool*/, PoolEvent event, Address /*address*/, std::size_t /*bytes*/,
                Stream /*stream*/) noexcept override {
    if (event != PoolEvent::segment_unmap) return;
    const std::future<void> other = std::async(std::launch::async, [this] { pool_.set_threshold(kMiB); });
    ++(other.wait_for(std::chrono::seconds(5)) == std::future_status::ready ? went_on_ : stood_);
  }
  int went_on_ = 0;
  int stood_ = 0;

 private:
  MemoryPool& pool_;
};

TEST_F(Buffers, ObserversAreToldWithoutTheirLock) {
  for (const bool by_look : {false, true}) {
    pool_->set_threshold(kMiB);
    free(allocate(8 * kMiB));
    Neighbour neighbour(*pool_);
    lab_.memory().set_observer(&neighbour);
    if (by_look) {
      after(milliseconds(5000));
      static_cast<void>(pool_->stats());
      after(milliseconds(5000));
      static_cast<void>(pool_->stats());
    } else {
      pool_->trim(0);
    }
    lab_.memory().set_observer(nullptr);
    EXPECT_GT(neighbour.went_on_, 0);
    EXPECT_EQ(neighbour.stood_, 0);
  }
}

}  // namespace
}  // namespace vmm::testing
