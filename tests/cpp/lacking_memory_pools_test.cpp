// Private pools and other allocators' memory where the host has no memory to note what happens:
// nothing is lost, and nothing half begun.
#include "cpp/lacking_memory.h"

#include <gtest/gtest.h>

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
  using PrivatePoolsTest::a;
  using PrivatePoolsTest::allocate;
  using PrivatePoolsTest::begin_capture;
  using PrivatePoolsTest::captures;
  using PrivatePoolsTest::end_capture;
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
  bool has_run_out = true;
  for (long n = 0; has_run_out; ++n) {
    has_run_out = runs_out_at(n, [&] { pools.begin(kGraph, only(b), a); });
    EXPECT_EQ(lab.memory().clock().is_capturing(), !has_run_out) << n;
    EXPECT_EQ(pools.any_route(), !has_run_out) << n;
    if (has_run_out) EXPECT_FALSE(exists(kGraph)) << n;
  }
  captures[a] = ++last_capture;
  end_capture(kGraph, a);
  pools.release(kGraph);
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

}  // namespace
}  // namespace vmm::testing
