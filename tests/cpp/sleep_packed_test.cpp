// Models that sleep in the host's memory packed: they are what they were, take less there, and
// whatever fails on the way leaves them whole.
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "core/faces/seals.h"
#include "core/memory/packed_backup.h"
#include "cpp/lacking_memory.h"
#include "cpp/sleep_lab.h"

namespace vmm::testing {
namespace {

class SleepPacked : public Sleep {
 protected:
  std::vector<Live> weights(Pool& pool, const std::vector<std::size_t>& sizes) {
    std::vector<Live> live;
    for (const std::size_t bytes : sizes) {
      live.push_back({lab_.allocate(pool, bytes), bytes, live.size() + 1});
      fill_weights(live.back().address, bytes, live.back().seed);
    }
    return live;
  }
  static void expect_weights(const std::vector<Live>& live) {
    for (const Live& each : live) {
      EXPECT_EQ(wrong_weights(each.address, each.bytes, each.seed), 0U) << "words of " << each.bytes / 2;
    }
  }
  std::size_t host_bytes() { return sleeper_.host_memory(lab_.memory().budget())->used_bytes(); }
};

TEST_F(SleepPacked, WhatItHoldsIsThereAgainAndTakesLess) {
  const auto pool = lab_.pool("a");
  const std::vector<Live> live = weights(*pool, {60 * kMiB, 512, 8 * kMiB + 512, 70 * kKiB});
  const std::vector<Live> any = fill(*pool, {512, 3 * kKiB, 3 * kMiB});
  sleep(pool, host());
  EXPECT_EQ(host_bytes(), 3 * PinnedMemory::kSlabBytes) << "for 77 MiB";
  wake(pool);
  sleep(pool, packed());
  EXPECT_EQ(where(*pool), "host, packed");
  EXPECT_EQ(host_bytes(), 2 * PinnedMemory::kSlabBytes);
  EXPECT_EQ(pool->physical_bytes(), 0U);
  wake(pool);
  expect_weights(live);
  expect_whole(any);
}

// A unit of packed memory comes back in part.
TEST_F(SleepPacked, WhatIsFreedMeanwhileDoesNotComeBack) {
  const auto pool = lab_.pool("a");
  std::vector<std::size_t> sizes;
  for (std::size_t k = 0; k < 60; ++k) sizes.push_back(512 + k % 7 * 8 * kKiB);
  for (std::size_t k = 0; k < 10; ++k) sizes.push_back(2 * kMiB + k * 512);
  std::vector<Live> live = weights(*pool, sizes);
  sleep(pool, packed());
  std::mt19937 random(3);
  std::shuffle(live.begin(), live.end(), random);
  for (; live.size() > 30; live.pop_back()) lab_.free(live.back().address);
  wake(pool);
  expect_weights(live);
}

TEST_F(SleepPacked, ATensorIsReadWhereItSleeps) {
  const auto pool = lab_.pool("a");
  const std::vector<Live> live = weights(*pool, {512, 3 * kMiB + 512, 10 * kMiB});
  sleep(pool, packed());
  std::vector<std::byte> read(10 * kMiB);
  for (const Live& each : live) {
    ASSERT_TRUE(pool->read_kept(each.address, each.bytes, read.data()));
    const std::uint16_t last = weight(each.seed, each.bytes / 2 - 1);
    EXPECT_EQ(std::memcmp(read.data() + each.bytes - 2, &last, 2), 0) << each.bytes;
    const std::size_t from = each.bytes / 4 * 2;
    ASSERT_TRUE(pool->read_kept(each.address + from, 1, read.data()));
    const std::uint16_t middle = weight(each.seed, from / 2);
    EXPECT_EQ(std::memcmp(read.data(), &middle, 1), 0) << "one byte of it";
  }
  wake(pool);
  expect_weights(live);
}

// Where a slab cannot be pinned the device does not reach it.
TEST_F(SleepPacked, MemoryThatIsNotPinnedIsPackedByTheCpu) {
  for (const std::uint64_t nth : {1U, 2U}) {
    const auto pool = lab_.pool("a" + std::to_string(nth));
    const std::vector<Live> live = weights(*pool, {50 * kMiB + 512, 3 * kKiB});
    const std::vector<Live> any = fill(*pool, {512, 3 * kMiB});
    lab_.driver.fail_nth(Call::pin, nth, no_memory(), nth == 1 ? Repeat::from_then_on : Repeat::once);
    lab_.driver.clear_calls();
    sleep(pool, packed());
    lab_.driver.clear_failures();
    EXPECT_GT(lab_.driver.count(Call::read), 0U);
    EXPECT_EQ(lab_.driver.count(Call::pack) == 0, nth == 1);
    wake(pool);
    expect_weights(live);
    expect_whole(any);
    for (const std::vector<Live>& all : {live, any}) {
      for (const Live& each : all) lab_.free(each.address);
    }
    sleeper_.release_host_memory(lab_.memory().budget());
  }
}

TEST_F(SleepPacked, ADeviceThatCannotSaysSoBeforeAnythingMoves) {
  const auto pool = lab_.pool("a");
  const std::vector<Live> live = weights(*pool, {3 * kMiB});
  lab_.driver.set_missing_packing("no compiler");
  Places places = packed();
  places.push_back(file().front());
  for (const Places& each : {packed(), places}) {
    try {
      sleep(pool, each);
      ADD_FAILURE() << "it slept";
    } catch (const NotAvailableError& error) {
      EXPECT_NE(std::string(error.what()).find("no compiler"), std::string::npos) << error.what();
    }
    EXPECT_FALSE(pool->is_asleep());
  }
  lab_.driver.set_missing_packing("");
  expect_weights(live);
}

TEST_F(SleepPacked, TheLimitCountsWhatItTakesPacked) {
  const auto pool = lab_.pool("a");
  const std::vector<Live> live = weights(*pool, {80 * kMiB});
  const auto memory = sleeper_.host_memory(pool->group());
  memory->set_limit(2 * PinnedMemory::kSlabBytes);
  EXPECT_THROW(sleep(pool, host()), OutOfMemoryError);
  sleep(pool, packed());
  wake(pool);
  for (const std::size_t slabs : {0U, 1U}) {
    memory->set_limit(slabs * PinnedMemory::kSlabBytes);
    expect_next_place_taken(pool, packed(), [&memory] { EXPECT_EQ(memory->used_bytes(), 0U); });
  }
  expect_weights(live);
}

TEST_F(SleepPacked, SealedMemoryIsPackedOnce) {
  const auto pool = lab_.pool("a");
  const auto tagged = lab_.memory().tagged(pool, "w");
  const std::vector<Live> live = weights(*tagged, {5 * kMiB, 20 * kMiB});
  seal_pages(lab_.memory(), *pool, pieces(live));
  for (int time = 0; time < 3; ++time) {
    lab_.driver.clear_calls();
    sleep(pool, packed());
    EXPECT_EQ(lab_.driver.count(Call::pack) == 0, time != 0);
    wake(pool);
    expect_weights(live);
  }
  sleep(pool, host());
  EXPECT_EQ(where(*tagged), "host, packed") << "nothing of it had to go anew";
  wake(pool);
  expect_weights(live);
  unseal_pages(lab_.memory(), *pool, pieces(live));
}

TEST_F(SleepPacked, TagsAndAFormerHalfStandEachWhereItWent) {
  const auto pool = lab_.pool("a");
  const auto tagged = lab_.memory().tagged(pool, "w");
  const std::vector<Live> of_tag = weights(*tagged, {5 * kMiB, 3 * kKiB});
  const std::vector<Live> own = weights(*pool, {7 * kMiB, 512});
  Transfer out(
      std::make_unique<Departure>(sleeper_, std::vector<PartToSleep>{{tagged, packed()}, {pool, host()}}, false),
      nullptr);
  go(out);
  EXPECT_EQ(where(*tagged), "host, packed");
  EXPECT_EQ(where(*pool), "host");
  Transfer back(nullptr, std::make_unique<Arrival>(sleeper_, PoolList{tagged}, Arrival::Memory::collected));
  go(back);
  expect_weights(of_tag);
  sleep(pool, packed());
  wake(pool);
  expect_weights(of_tag);
  expect_weights(own);
}

TEST_F(SleepPacked, ASwapNeedsNoMoreThanTheLimit) {
  const auto group = lab_.memory().create_group("shared", 128 * kMiB);
  const auto a = lab_.pool(Lab::spec("a"), group.get());
  const auto b = lab_.pool(Lab::spec("b"), group.get());
  const std::vector<Live> of_a = weights(*a, {40 * kMiB, 30 * kMiB, 512});
  sleep(a, packed());
  const std::vector<Live> of_b = weights(*b, {80 * kMiB, 512});
  for (int turn = 0; turn < 3; ++turn) {
    const auto& [out, in] = turn % 2 == 0 ? std::pair(b, a) : std::pair(a, b);
    go(*swapping(out, in, packed()));
    lab_.memory().check();
    EXPECT_TRUE(out->is_asleep());
    EXPECT_LE(group->used(), 128 * kMiB);
    expect_weights(turn % 2 == 0 ? of_a : of_b);
  }
}

TEST_F(SleepPacked, StoppedAnywhereItIsAwakeOrAsleepAndWhole) {
  const auto pool = lab_.pool("a");
  const std::vector<Live> live = weights(*pool, {16 * kMiB, 3 * kKiB, 4 * kMiB});
  int stopped = 0;
  for (int at = 1, before = -1; stopped != before; ++at) {
    before = stopped;
    for (const bool is_back : {false, true}) {
      if (is_back) sleep(pool, packed());
      const auto transfer = is_back ? coming(pool) : going({pool}, packed());
      try {
        go(*transfer, stops_at(at));
      } catch (const VmmError&) {
        EXPECT_EQ(pool->is_asleep(), is_back) << at;
        ++stopped;
      }
      lab_.memory().check();
      if (pool->is_asleep()) wake(pool);
    }
  }
  EXPECT_GT(stopped, 6);
  expect_weights(live);
}

TEST_F(SleepPacked, AnyCallMayFail) {
  const auto pool = lab_.pool("a");
  const std::vector<Live> live = weights(*pool, {512, kMiB, 3 * kMiB});
  std::uint64_t failed = 0;
  for (std::uint64_t n = 1;; ++n) {
    const bool has_failed = fails_at(n, [&] {
      go(*going({pool}, packed()));
      go(*coming(pool));
    });
    wake(pool);
    ASSERT_FALSE(pool->is_asleep()) << n;
    expect_weights(live);
    sleeper_.release_host_memory(lab_.memory().budget());  // so that memory is pinned each time
    if (!has_failed) break;
    ++failed;
  }
  EXPECT_GT(failed, 20U);
}

TEST_F(SleepPacked, TheHostsMemoryMayRunOutAnywhere) {
  const auto pool = lab_.pool("a");
  const std::vector<Live> live = weights(*pool, {512, kMiB, 3 * kMiB});
  sleep(pool, packed());  // streams are made
  wake(pool);
  long failed = 0;
  for (long n = 0;; ++n) {
    const bool ran_out = runs_out_at(n, [&] {
      try {
        go(*going({pool}, packed()));
      } catch (const VmmError&) {
      }
    });
    lab_.memory().check();
    if (!ran_out && failures_made == 0) break;
    wake(pool);
    ++failed;
  }
  EXPECT_GT(failed, 20);
  for (long n = 0;; ++n) {
    const bool ran_out = runs_out_at(n, [&] {
      try {
        go(*coming(pool));
      } catch (const VmmError&) {
      }
    });
    lab_.memory().check();
    if (!ran_out && failures_made == 0) break;
    if (!pool->is_asleep()) sleep(pool, packed());
  }
  if (pool->is_asleep()) wake(pool);
  expect_weights(live);
  EXPECT_EQ(host_bytes(), 0U);
}

TEST_F(SleepPacked, ASurveyThatFailsLeavesItAwake) {
  const auto pool = lab_.pool("a");
  const std::vector<Live> live = weights(*pool, {3 * kMiB, 3 * kMiB});
  lab_.driver.clear_calls();
  lab_.driver.fail_nth(Call::pack, 1, broken());
  EXPECT_THROW(sleep(pool, packed()), DriverError);
  EXPECT_FALSE(pool->is_asleep());
  EXPECT_EQ(host_bytes(), 0U);
  expect_weights(live);
}

}  // namespace
}  // namespace vmm::testing
