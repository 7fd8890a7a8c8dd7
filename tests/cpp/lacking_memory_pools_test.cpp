// Private pools and other allocators' memory where the host has no memory to note what happens:
// nothing is lost, and nothing half begun.
#include "cpp/lacking_memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "cpp/private_pools_lab.h"
#include "cpp/turns.h"

namespace vmm::testing {
namespace {

constexpr long kMost = 400;  // allocations of a step

// The bench, made anew for each allocation that fails.
class Bench final : public PrivatePoolsTest {
 public:
  Bench() : PrivatePoolsTest(/*failed_are_ended=*/true) {}
  using PrivatePoolsTest::a;
  using PrivatePoolsTest::allocate;
  using PrivatePoolsTest::b;
  using PrivatePoolsTest::begin_capture;
  using PrivatePoolsTest::captures;
  using PrivatePoolsTest::end_capture;
  using PrivatePoolsTest::everywhere;
  using PrivatePoolsTest::exists;
  using PrivatePoolsTest::expect_nothing_left;
  using PrivatePoolsTest::failures;
  using PrivatePoolsTest::is_pinned;
  using PrivatePoolsTest::lab;
  using PrivatePoolsTest::leave_mempool;
  using PrivatePoolsTest::model;
  using PrivatePoolsTest::only;
  using PrivatePoolsTest::pools;
  using PrivatePoolsTest::region_of;
  using PrivatePoolsTest::use;
  void TestBody() override {}

  // Whoever stops them all has no room to note them yet. (Lab's own checks would stop them.)
  void let_threads_come() {
    for (std::size_t thread = 0; thread < 16; ++thread) {
      turns_.on(thread, [&] { DeviceMemory::free(lab.space, lab.memory().allocate(*model, 512, nullptr)); });
    }
  }
  [[nodiscard]] std::size_t parts_of(RegionId region) {
    const PoolList all = lab.memory().pools();
    return static_cast<std::size_t>(
        std::count_if(all.begin(), all.end(), [&](const auto& pool) { return pool->region() == region; }));
  }
  // A MemPool that has memory, of which a capture on `a` is about to ask for more.
  void begin_capture_beside_mempool() {
    pools.add_user(kOther);
    use(kOther, 4 * kMiB);
    begin_capture(kGraph, a);
    let_threads_come();
  }
  void expect_that_it_takes_of_what_is_pinned() {
    const Address taken = allocate(3 * kMiB, a);
    EXPECT_EQ(region_of(taken), kOther);
    EXPECT_TRUE(is_pinned(kOther));
    lab.free(taken);
  }
  void end_capture_beside_mempool() {
    end_capture(kGraph, a);
    pools.release(kGraph);
    leave_mempool(kOther);
    EXPECT_EQ(lab.memory().pools().size(), 1U);
  }

 private:
  Turns turns_;
};

// Each allocation of a step fails in turn.
template <typename Prepare, typename Step, typename Then>
void each_in_turn(const Prepare& prepare, const Step& step, const Then& then) {
  for (long nth = 0; nth < kMost; ++nth) {
    SCOPED_TRACE("allocation " + std::to_string(nth));
    Bench bench;
    prepare(bench);
    const bool threw = runs_out_at(nth, [&] { step(bench); });
    const bool was_reached = failures_made != 0;
    then(bench, threw);
    if (!was_reached || ::testing::Test::HasFailure()) return;
  }
  FAIL() << "a step of more than " << kMost << " allocations";
}

TEST_F(PrivatePoolsTest, ACaptureThatTheHostHasNoMemoryForNeverBegan) {
  lab.free(allocate(kMiB, a));
  bool failed = true;
  for (long n = 0; failed; ++n) {
    const bool has_run_out = runs_out_at(n, [&] { pools.begin(kGraph, only(b), a); });
    failed = failures_made != 0;
    EXPECT_EQ(lab.memory().clock().is_capturing(), !has_run_out) << n;
    EXPECT_EQ(pools.any_route(), !has_run_out) << n;
    if (has_run_out) {
      EXPECT_THROW(static_cast<void>(pools.use_count(kGraph)), InvalidArgumentError) << n;
      continue;
    }
    captures[a] = ++last_capture;
    end_capture(kGraph, a);
    pools.release(kGraph);
  }
  expect_nothing_left();
}

TEST(PrivatePoolsWithoutMemory, WhatACaptureTakesOfAMemPoolIsPinnedThen) {
  each_in_turn(
      [](Bench& bench) {
        bench.begin_capture_beside_mempool();
        bench.pools.begin(kOther, Bench::only(bench.a), bench.a);
      },
      [](Bench& bench) { static_cast<void>(bench.pools.route(bench.model, bench.a)); },
      [](Bench& bench, bool /*threw*/) {
        bench.expect_that_it_takes_of_what_is_pinned();
        bench.pools.end(kOther);
        bench.pools.release(kOther);
        bench.end_capture_beside_mempool();
      });
}

TEST(PrivatePoolsWithoutMemory, AGraphThatCannotSayWhichPoolItUsesHasSaidNothing) {
  each_in_turn([](Bench& bench) { bench.begin_capture_beside_mempool(); },
               [](Bench& bench) { bench.pools.add_user(kOther); },
               [](Bench& bench, bool threw) {
                 EXPECT_EQ(bench.pools.use_count(kOther), threw ? 1 : 2);
                 bench.pools.begin(kOther, Bench::only(bench.a), bench.a);
                 bench.expect_that_it_takes_of_what_is_pinned();
                 bench.pools.end(kOther);
                 bench.pools.release(kOther);
                 if (!threw) bench.pools.release(kOther);
                 bench.end_capture_beside_mempool();
               });
}

TEST(PrivatePoolsWithoutMemory, APartIsMadeAndPinnedOrEnds) {
  each_in_turn(
      [](Bench& bench) {
        bench.begin_capture(kGraph, bench.a);
        bench.let_threads_come();
      },
      [](Bench& bench) { static_cast<void>(bench.pools.route(bench.model, bench.a)); },
      [](Bench& bench, bool /*threw*/) {
        EXPECT_EQ(bench.region_of(bench.lab.leave_idle(*bench.pools.route(bench.model, bench.a), kMiB, bench.a)),
                  kGraph);
        EXPECT_TRUE(bench.is_pinned(kGraph));
        EXPECT_EQ(bench.parts_of(kGraph), 1U);
        bench.end_capture(kGraph, bench.a);
        bench.pools.release(kGraph);
        bench.expect_nothing_left();
      });
}

TEST(PrivatePoolsWithoutMemory, PartsOfARegionThatHasGoneEndNowOrLater) {
  std::shared_ptr<Pool> second;
  each_in_turn(
      [&](Bench& bench) {
        second = bench.lab.pool("second");
        bench.pools.add_user(kOther);
        bench.pools.begin(kOther, Bench::everywhere(), nullptr);
        for (const auto& model : {bench.model, second}) bench.lab.free(bench.allocate(model, 4 * kMiB));
        bench.pools.end(kOther);
        bench.pools.release(kOther);
        bench.pools.set_use_on_oom(kOther, false);
      },
      [](Bench& bench) { bench.pools.release(kOther); },
      [&](Bench& bench, bool threw) {
        EXPECT_FALSE(threw) << "whoever tries again releases twice";
        EXPECT_FALSE(bench.exists(kOther));
        bench.pools.sweep();
        bench.lab.memory().settle(/*wait=*/true);
        EXPECT_EQ(bench.parts_of(kOther), 0U);
        bench.lab.memory().close_pool(*second, /*force=*/false);
        second.reset();
        bench.expect_nothing_left();
      });
}

TEST(PrivatePoolsWithoutMemory, CapturesThatFailedEndTogetherOrAreFoundAgain) {
  const Stream c = stream(0xC);
  each_in_turn(
      [&](Bench& bench) {
        bench.begin_capture(kGraph, bench.a);
        bench.lab.free(bench.allocate(4 * kMiB, bench.a));
        bench.pools.begin(kOne, Bench::only(bench.b), bench.b);
        bench.begin_capture(kOther, c);
        bench.lab.free(bench.allocate(4 * kMiB, c));
        bench.captures.clear();
      },
      [](Bench& bench) { bench.pools.sweep(); },
      [](Bench& bench, bool /*threw*/) {
        bench.pools.sweep();
        EXPECT_EQ(bench.failures, 1);
        EXPECT_FALSE(bench.lab.memory().clock().is_capturing());
        for (const RegionId region : {kGraph, kOther}) {
          EXPECT_FALSE(bench.exists(region));
          bench.pools.end(region);  // as torch does, late
          bench.pools.release(region);
          EXPECT_THROW(bench.pools.end(region), InvalidArgumentError);
        }
        const Address block = bench.allocate(kMiB, bench.b);
        EXPECT_EQ(bench.region_of(block), kOne) << "a route among theirs goes on";
        bench.lab.free(block);
        bench.pools.end(kOne);
        bench.pools.release(kOne);
        bench.expect_nothing_left();
      });
}

}  // namespace
}  // namespace vmm::testing
