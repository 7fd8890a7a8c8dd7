// Models on their way to sleep and back, where something fails or stops them in the middle.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <vector>

#include "cpp/sleep_lab.h"

namespace vmm::testing {
namespace {

class SleepFailures : public Sleep {};

TEST_F(SleepFailures, WhatStopsItInTheMiddleLeavesItAwakeAndWhole) {
  for (int at = 1; at < 12; ++at) {
    const auto pool = lab_.pool("a");
    const std::vector<Live> live = fill(*pool);
    bool is_stopped = false;
    try {
      go(*going({pool}, host()), stops_at(at));
    } catch (const VmmError&) {
      is_stopped = true;
    }
    lab_.memory().check();
    EXPECT_NE(pool->is_asleep(), is_stopped) << at;
    if (!is_stopped) {
      wake(pool);
      at = 100;
    }
    expect_whole(live);
    for (const Live& each : live) lab_.free(each.address);
    lab_.memory().close_pool(*pool, false);
  }
}

TEST_F(SleepFailures, AWakeThatIsStoppedIsAsleepAsBefore) {
  for (int at = 1; at < 20; ++at) {
    const auto pool = lab_.pool("a");
    std::vector<Live> live = fill(*pool);
    sleep(pool, host());
    try {
      go(*coming(pool), stops_at(at));
    } catch (const VmmError&) {
      lab_.memory().check();
      EXPECT_TRUE(pool->is_asleep()) << at;
      EXPECT_EQ(pool->physical_bytes(), 0U) << at;
      EXPECT_THROW(lab_.memory().allocate(*pool, 512, nullptr), AsleepError);
      lab_.free(live.back().address);
      live.pop_back();
      if (at % 2 == 0) sleep(pool, host());
      wake(pool);
    }
    EXPECT_FALSE(pool->is_asleep());
    expect_whole(live);
    for (const Live& each : live) lab_.free(each.address);
    lab_.memory().close_pool(*pool, false);
  }
}

TEST_F(SleepFailures, WhatHadComeBeforeAWakeWasStoppedIsNotSaidToBeThere) {
  const auto pool = lab_.pool("a");
  const std::vector<Live> live = fill(*pool, {70 * kMiB});
  sleep(pool, host());
  Arrival arrival(sleeper_, {pool}, Arrival::Memory::collected);
  arrival.begin();
  const auto first = [&] { return arrival.wait_for(live.front().address, 4 * kMiB, std::chrono::milliseconds(0)); };
  while (first() != Arrival::Waited::there) ASSERT_TRUE(arrival.advance() || arrival.wait());
  EXPECT_NO_THROW(pool->require_there(live.front().address, 4 * kMiB));
  arrival.undo();
  EXPECT_EQ(first(), Arrival::Waited::ended);
  EXPECT_THROW(pool->require_there(live.front().address, 4 * kMiB), AsleepError);
  EXPECT_THROW(pool->require_there(live.front().address + kMiB, 1), AsleepError);
  wake(pool);
  EXPECT_NO_THROW(pool->require_there(live.front().address, 4 * kMiB));
  expect_whole(live);
}

TEST_F(SleepFailures, AWayBackThatFailsLeavesItAsleepAndWhole) {
  const auto pool = lab_.pool("a");
  const std::vector<Live> live = fill(*pool, {40 * kMiB});
  int calls = 0;
  EXPECT_THROW(go(*going({pool}, host()),
                  [&] {
                    if (++calls != 4) return;
                    lab_.driver.fail_nth(Call::copy_async, 1, broken());
                    throw VmmError("stopped");
                  }),
               VmmError);
  lab_.driver.clear_failures();
  lab_.memory().check();
  wake(pool);
  expect_whole(live);
}

TEST_F(SleepFailures, ChunksThatTheDriverKeepsAreStillThePools) {
  const auto pool = lab_.pool("a");
  const std::vector<Live> live = fill(*pool, {512, 20 * kMiB});
  sleep(pool, host());
  lab_.driver.fail_nth(Call::copy_async, 2, broken());
  lab_.driver.fail_nth(Call::unmap, 1, broken());
  EXPECT_THROW(go(*coming(pool)), VmmError);
  lab_.driver.clear_failures();
  lab_.memory().check();
  sleep(pool, host());
  wake(pool);
  expect_whole(live);
}

// A stream of another library may be using what had come; no clock knows it.
TEST_F(SleepFailures, AWakeThatIsStoppedWaitsForTheWholeDevice) {
  const auto pool = lab_.pool("a");
  const std::vector<Live> live = fill(*pool, {20 * kMiB});
  sleep(pool, host());
  int waited = 0;
  int unmapped_before = 0;
  lab_.driver.before(Call::synchronize, [&] { ++waited; });
  lab_.driver.before(Call::unmap, [&] { unmapped_before += waited == 0 ? 1 : 0; });
  EXPECT_THROW(go(*coming(pool), stops_at(6)), VmmError);
  lab_.driver.before(Call::synchronize, nullptr);
  lab_.driver.before(Call::unmap, nullptr);
  EXPECT_GE(waited, 1);
  EXPECT_EQ(unmapped_before, 0);
  wake(pool);
  expect_whole(live);
}

// On its way to sleep all of it goes, what is there still too.
TEST_F(SleepFailures, WhatIsOnItsWayIsNotSaidToBeThere) {
  const auto pool = lab_.pool("a");
  const std::vector<Live> live = fill(*pool, {20 * kMiB});
  const Live& last = live.back();
  int looks = 0;
  go(*going({pool}, host()), [&] {
    ++looks;
    EXPECT_THROW(pool->require_there(last.address, last.bytes), AsleepError);
  });
  EXPECT_GE(looks, 2);
  wake(pool);
  EXPECT_NO_THROW(pool->require_there(last.address, last.bytes));
}

// What could not be scrubbed is not the pool's own the next time.
TEST_F(SleepFailures, AScrubThatFailsLeavesNothingOfOthersToBeSeen) {
  constexpr std::size_t kLive = kPage - 512 * kKiB;  // the rest of its chunk is free, and no content comes to it
  const auto one = lab_.pool("one");
  const auto other = lab_.pool("other");
  const Address address = lab_.allocate(*one, kLive);
  ASSERT_EQ(one->chunks_under(address, kLive).size(), 1U);
  Lab::fill(address, kLive, 1);
  sleep(one, host(), /*release=*/true);
  Lab::fill(lab_.allocate(*other, kPage), kPage, 2);
  sleep(other, discard());
  lab_.driver.fail_nth(Call::fill_async, 1, broken());
  EXPECT_THROW(go(*coming(one)), VmmError);
  EXPECT_EQ(lab_.driver.failures(), 1U);
  lab_.driver.clear_failures();
  wake(one);
  EXPECT_TRUE(Lab::holds(address, kLive, 1));
  EXPECT_TRUE(is_zero(address + kLive, kPage - kLive));
}

// The chunk stays mapped then, with what another had in it: the next wake fills it.
TEST_F(SleepFailures, NorDoesOneThatTheDriverDoesNotUnmapEither) {
  constexpr std::size_t kLive = kPage - 512 * kKiB;
  for (const Places& places : {host(), discard()}) {
    const auto one = lab_.pool("one");
    const auto other = lab_.pool("other");
    const Address address = lab_.allocate(*one, kLive);
    Lab::fill(address, kLive, 1);
    sleep(one, places, /*release=*/true);
    Lab::fill(lab_.allocate(*other, kPage), kPage, 2);
    sleep(other, discard());
    lab_.driver.fail_nth(Call::fill_async, 1, broken());
    lab_.driver.fail_nth(Call::unmap, 1, broken(), Repeat::from_then_on);
    EXPECT_THROW(go(*coming(one)), VmmError);
    lab_.driver.clear_failures();
    wake(one);
    if (places == host()) {
      EXPECT_TRUE(Lab::holds(address, kLive, 1));
    }
    EXPECT_TRUE(is_zero(address + kLive, kPage - kLive));
    if (places == discard()) {
      EXPECT_TRUE(is_zero(address, kLive));
    }
    lab_.memory().close_pool(*one, /*force=*/true);
    lab_.memory().close_pool(*other, /*force=*/true);
  }
}

// Every call of the driver fails in turn; whatever was wanted is done, or as before.
TEST_F(SleepFailures, AnyCallMayFail) {
  const auto pool = lab_.pool("a");
  const std::vector<Live> live = fill(*pool, {512, 3 * kMiB});
  for (const Places& places : {host(), file()}) {
    for (std::uint64_t n = 1;; ++n) {
      const auto out = going({pool}, places);
      bool has_failed = fails_at(n, [&] { go(*out); });
      if (!has_failed) has_failed = fails_at(n, [&] { go(*coming(pool)); });  // and on the way back
      wake(pool);
      ASSERT_FALSE(pool->is_asleep()) << n;
      expect_whole(live);
      if (!has_failed) break;
    }
    for (std::uint64_t n = 1;; ++n) {
      sleep(pool, places);
      const bool has_failed = fails_at(n, [&] { go(*coming(pool)); });
      wake(pool);
      expect_whole(live);
      if (!has_failed) break;
    }
  }
}

}  // namespace
}  // namespace vmm::testing
