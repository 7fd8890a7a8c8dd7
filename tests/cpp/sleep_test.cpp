// Models that sleep and wake: what they hold, where it goes, who gets their memory, and what
// becomes of it where something fails in the middle.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cpp/reclaim_lab.h"
#include "cpp/sleep_lab.h"

namespace vmm::testing {
namespace {

TEST_F(Sleep, WhatItHoldsIsThereAgain) {
  for (const Places& places : {host(), file()}) {
    const auto pool = lab_.pool("a");
    const std::vector<Live> live = fill(*pool);
    const std::size_t before = pool->live_bytes();
    sleep(pool, places);
    EXPECT_TRUE(pool->is_asleep());
    EXPECT_EQ(pool->physical_bytes(), 0U);
    EXPECT_EQ(pool->live_bytes(), before) << "its tensors live";
    const MemoryStats stats = pool->memory_stats();
    EXPECT_EQ(stats.asleep_bytes, before);
    EXPECT_EQ(stats.physical_usage, 0U);
    EXPECT_EQ(stats.allocated_bytes + stats.idle_bytes + stats.stranded_bytes + stats.quarantined_bytes, 0U);
    wake(pool);
    EXPECT_FALSE(pool->is_asleep());
    expect_whole(live);
    EXPECT_EQ(pool->memory_stats().allocated_bytes, before);
    for (const Live& each : live) lab_.free(each.address);
    EXPECT_EQ(pool->memory_stats().allocated_bytes, 0U);
  }
}

TEST_F(Sleep, WhatIsThrownAwayIsZero) {
  const auto pool = lab_.pool("a");
  const std::vector<Live> live = fill(*pool);
  sleep(pool, discard());
  EXPECT_EQ(pool->physical_bytes(), 0U);
  wake(pool);
  for (const Live& each : live) EXPECT_TRUE(is_zero(each.address, each.bytes)) << each.bytes;
}

TEST_F(Sleep, ItsMemoryIsTheOthersMeanwhileAndNobodySeesWhatItHeld) {
  LabSpec spec;
  spec.device_bytes = 128 * kMiB;
  Lab small(spec);
  Sleeper sleeper(small.memory());
  const auto a = small.pool("a");
  const auto b = small.pool("b");
  const Address held = small.allocate(*a, 100 * kMiB);
  Lab::fill(held, 100 * kMiB, 5);
  std::vector<PartToSleep> parts = {{a, host()}};
  Transfer out(std::make_unique<Departure>(sleeper, parts, false), nullptr);
  go(out);
  const Address others = small.allocate(*b, 100 * kMiB);
  EXPECT_TRUE(is_zero(others, 100 * kMiB));
  Transfer in(nullptr, std::make_unique<Arrival>(sleeper, PoolList{a}, Arrival::Memory::collected));
  EXPECT_THROW(in.begin(&look_away), OutOfMemoryError);
  EXPECT_TRUE(a->is_asleep()) << "as before";
  small.memory().check();
  small.free(others);
  Transfer again(nullptr, std::make_unique<Arrival>(sleeper, PoolList{a}, Arrival::Memory::collected));
  go(again);
  EXPECT_EQ(Lab::first_wrong(held, 100 * kMiB, 5), 100 * kMiB);
}

TEST_F(Sleep, NothingIsTakenFromOneThatSleeps) {
  const auto pool = lab_.pool("a");
  fill(*pool);
  sleep(pool, host());
  EXPECT_THROW(lab_.memory().allocate(*pool, 512, nullptr), AsleepError);
  EXPECT_THROW(lab_.memory().allocate(*pool, 40 * kMiB, nullptr), AsleepError);
  EXPECT_THROW(lab_.memory().allocate_pages(*pool, 0, kPage, nullptr), AsleepError);
  EXPECT_THROW(lab_.memory().allocate_first(*pool, kPage, nullptr), AsleepError);
  // Where its blocks are can be told, and that they stay there.
  const PoolCheckpoint now = pool->checkpoint();
  std::vector<Address> freed;
  std::vector<Address> allocated;
  pool->restore(now, &freed, &allocated);
  EXPECT_TRUE(freed.empty() && allocated.empty());
  EXPECT_THROW(pool->restore({}, &freed, &allocated), AsleepError);
  EXPECT_THROW(lab_.memory().create_part(pool, RegionId{7, 0}, /*no_split=*/false), AsleepError);
  wake(pool);
  lab_.allocate(*pool, 40 * kMiB);
}

TEST_F(Sleep, WhatIsFreedMeanwhileDoesNotComeBack) {
  const auto pool = lab_.pool("a");
  std::vector<Live> live = fill(*pool);
  const std::size_t before = pool->physical_bytes();
  sleep(pool, host());
  while (live.size() > 3) {
    lab_.free(live.back().address);
    live.pop_back();
  }
  wake(pool);
  expect_whole(live);
  EXPECT_LT(pool->physical_bytes(), before / 2);
  lab_.allocate(*pool, 20 * kMiB);
}

TEST_F(Sleep, OnlyWhatLivesIsCopied) {
  const auto pool = lab_.pool("a");
  const Address low = lab_.allocate(*pool, 10 * kMiB);
  const Address hole = lab_.allocate(*pool, 40 * kMiB);
  const Address high = lab_.allocate(*pool, 10 * kMiB);
  Lab::fill(low, 10 * kMiB, 1);
  Lab::fill(high, 10 * kMiB, 2);
  lab_.free(hole);
  const auto transfer = going({pool}, host());
  go(*transfer);
  EXPECT_EQ(transfer->total(), 20 * kMiB);
  EXPECT_EQ(transfer->done(), 20 * kMiB);
  wake(pool);
  EXPECT_EQ(Lab::first_wrong(low, 10 * kMiB, 1), 10 * kMiB);
  EXPECT_EQ(Lab::first_wrong(high, 10 * kMiB, 2), 10 * kMiB);
}

TEST_F(Sleep, TwiceIsOnce) {
  const auto pool = lab_.pool("a");
  const std::vector<Live> live = fill(*pool);
  sleep(pool, host());
  sleep(pool, discard());
  wake(pool);
  wake(pool);
  expect_whole(live);
}

TEST_F(Sleep, PinnedMemoryIsUsedAgainAndBounded) {
  const auto pool = lab_.pool("a");
  const std::vector<Live> live = fill(*pool);
  const auto memory = sleeper_.host_memory(pool->group());
  sleep(pool, host());
  const std::size_t used = memory->used_bytes();
  EXPECT_EQ(used, 3 * PinnedMemory::kSlabBytes) << "for 87.2 MiB";
  wake(pool);
  EXPECT_EQ(memory->used_bytes(), 0U);
  EXPECT_EQ(memory->unused_bytes(), used);
  lab_.driver.clear_calls();
  sleep(pool, host());
  EXPECT_EQ(lab_.driver.count(Call::pin), 0U);
  wake(pool);
  EXPECT_EQ(memory->release_unused(), used);
  memory->set_limit(used - 1);
  expect_next_place_taken(pool, host(), [&live] { expect_whole(live); });
  expect_whole(live);
}

TEST_F(Sleep, AFileIsThereWhileItIsNeeded) {
  const auto pool = lab_.pool("a");
  const std::vector<Live> live = fill(*pool);
  const Places places = file();
  sleep(pool, places);
  EXPECT_TRUE(fs::exists(places.front().path));
  wake(pool);
  EXPECT_FALSE(fs::exists(places.front().path));
  expect_whole(live);
}

TEST_F(Sleep, AFileOfSomebodyElsesIsNotTouched) {
  const auto pool = lab_.pool("a");
  const std::vector<Live> live = fill(*pool);
  const Places places = file();
  std::ofstream(places.front().path) << "a thesis";
  EXPECT_THROW(sleep(pool, places), InvalidArgumentError);
  EXPECT_FALSE(pool->is_asleep());
  std::string words;
  std::getline(std::ifstream(places.front().path) >> std::ws, words);
  EXPECT_EQ(words, "a thesis");
  expect_whole(live);
}

TEST_F(Sleep, AFileThatWasChangedIsNotTaken) {
  const auto pool = lab_.pool("a");
  const std::vector<Live> live = fill(*pool);
  const Places places = file();
  sleep(pool, places);
  flip_a_bit(places.front().path);
  EXPECT_THROW(wake(pool), VmmError);
  EXPECT_TRUE(pool->is_asleep());
  lab_.memory().check();
  flip_a_bit(places.front().path);
  wake(pool);
  expect_whole(live);
}

TEST_F(Sleep, APlaceWithoutRoomLeavesItAwake) {
  const auto pool = lab_.pool("a");
  const std::vector<Live> live = fill(*pool);
  EXPECT_THROW(sleep(pool, {{Place::Kind::file, "/nowhere/at/all", nullptr}}), VmmError);
  EXPECT_FALSE(pool->is_asleep());
  expect_whole(live);
  lab_.allocate(*pool, 3 * kMiB);
}

TEST_F(Sleep, WhatStopsItInTheMiddleLeavesItAwakeAndWhole) {
  for (int at = 1; at < 12; ++at) {
    const auto pool = lab_.pool("a");
    const std::vector<Live> live = fill(*pool);
    int calls = 0;
    const Look look = [&] {
      if (++calls == at) throw VmmError("stopped");
    };
    bool is_stopped = false;
    try {
      go(*going({pool}, host()), look);
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

TEST_F(Sleep, AWakeThatIsStoppedIsAsleepAsBefore) {
  for (int at = 1; at < 20; ++at) {
    const auto pool = lab_.pool("a");
    std::vector<Live> live = fill(*pool);
    sleep(pool, host());
    int calls = 0;
    try {
      go(*coming(pool), [&] {
        if (++calls == at) throw VmmError("stopped");
      });
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

// What is copied along, or was freed on the way, is written over nobody's memory: no block is
// handed out before all has come.
TEST_F(Sleep, NothingIsHandedOutWhileContentsCome) {
  const auto pool = lab_.pool("a");
  std::vector<Address> blocks;
  for (int k = 0; k < 3; ++k) blocks.push_back(lab_.allocate(*pool, 4 * kKiB));
  lab_.free(blocks[1]);
  sleep(pool, host());
  const auto in = coming(pool);
  in->begin(&look_away);
  EXPECT_THROW(lab_.memory().allocate(*pool, 4 * kKiB, nullptr), AsleepError);
  in->run([&] { EXPECT_THROW(lab_.memory().allocate(*pool, 4 * kKiB, nullptr), AsleepError); });
  lab_.allocate(*pool, 4 * kKiB);
}

TEST_F(Sleep, TwoTagsInOneFileWakeAtOnce) {
  const auto pool = lab_.pool("a");
  const auto weights = lab_.memory().tagged(pool, "weights");
  const auto cache = lab_.memory().tagged(pool, "cache");
  const std::vector<Live> of_weights = fill(*weights, {20 * kMiB});
  const std::vector<Live> of_cache = fill(*cache, {20 * kMiB});
  sleep(pool, file());
  Transfer one(nullptr, std::make_unique<Arrival>(sleeper_, PoolList{weights}, Arrival::Memory::collected));
  Transfer two(nullptr, std::make_unique<Arrival>(sleeper_, PoolList{cache}, Arrival::Memory::collected));
  one.begin(&look_away);
  two.begin(&look_away);
  std::thread other([&] { two.run(&look_away); });
  one.run(&look_away);
  other.join();
  wake(pool);
  expect_whole(of_weights);
  expect_whole(of_cache);
}

TEST_F(Sleep, AWayBackThatFailsLeavesItAsleepAndWhole) {
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

TEST_F(Sleep, ChunksThatTheDriverKeepsAreStillThePools) {
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

TEST_F(Sleep, WhoeverRegistersSegmentsMayComeWhileItSleeps) {
  const auto pool = lab_.pool("a");
  const std::vector<Live> live = fill(*pool);
  sleep(pool, host());
  lab_.memory().keep_blocks_within_chunks();
  lab_.memory().check();
  wake(pool);
  expect_whole(live);
  lab_.allocate(*pool, 20 * kMiB);
}

// Every call of the driver fails in turn; whatever was wanted is done, or as before.
TEST_F(Sleep, AnyCallMayFail) {
  const auto pool = lab_.pool("a");
  const std::vector<Live> live = fill(*pool, {512, 3 * kMiB});
  for (const Places& places : {host(), file()}) {
    for (std::uint64_t n = 1;; ++n) {
      lab_.driver.fail_nth_call(n, broken());
      const auto out = going({pool}, places);
      try {
        go(*out);
      } catch (const VmmError&) {
      } catch (const std::bad_alloc&) {
      }
      lab_.memory().check();
      bool has_failed = lab_.driver.failures() != 0;
      lab_.driver.clear_failures();
      if (!has_failed) {  // and on the way back
        lab_.driver.fail_nth_call(n, broken());
        try {
          go(*coming(pool));
        } catch (const VmmError&) {
        } catch (const std::bad_alloc&) {
        }
        lab_.memory().check();
        has_failed = lab_.driver.failures() != 0;
        lab_.driver.clear_failures();
      }
      wake(pool);
      ASSERT_FALSE(pool->is_asleep()) << n;
      expect_whole(live);
      if (!has_failed) break;
    }
    for (std::uint64_t n = 1;; ++n) {
      sleep(pool, places);
      lab_.driver.fail_nth_call(n, broken());
      try {
        go(*coming(pool));
      } catch (const VmmError&) {
      }
      lab_.memory().check();
      const bool has_failed = lab_.driver.failures() != 0;
      lab_.driver.clear_failures();
      wake(pool);
      expect_whole(live);
      if (!has_failed) break;
    }
  }
}

TEST_F(Sleep, ASwapNeedsNoMoreThanTheLimit) {
  const auto group = lab_.memory().create_group("shared", 128 * kMiB);
  const auto a = lab_.pool(Lab::spec("a"), group.get());
  const auto b = lab_.pool(Lab::spec("b"), group.get());
  const std::vector<Live> of_a = fill(*a);
  sleep(a, host());
  const std::vector<Live> of_b = fill(*b);
  for (int turn = 0; turn < 3; ++turn) {
    const auto& [out, in] = turn % 2 == 0 ? std::pair(b, a) : std::pair(a, b);
    Transfer swap(std::make_unique<Departure>(sleeper_, std::vector<PartToSleep>{{out, host()}}, false),
                  std::make_unique<Arrival>(sleeper_, PoolList{in}, Arrival::Memory::by_piece));
    go(swap);
    lab_.memory().check();
    EXPECT_TRUE(out->is_asleep());
    EXPECT_FALSE(in->is_asleep());
    EXPECT_LE(group->used(), 128 * kMiB);
    expect_whole(turn % 2 == 0 ? of_a : of_b);
  }
  wake(a->is_asleep() ? b : a);
}

TEST_F(Sleep, ASwapThatIsStoppedLeavesBothAsTheyWere) {
  const auto group = lab_.memory().create_group("shared", 128 * kMiB);
  const auto a = lab_.pool(Lab::spec("a"), group.get());
  const auto b = lab_.pool(Lab::spec("b"), group.get());
  const std::vector<Live> of_a = fill(*a);
  sleep(a, host());
  const std::vector<Live> of_b = fill(*b);
  for (int at = 1; at < 30; ++at) {
    Transfer swap(std::make_unique<Departure>(sleeper_, std::vector<PartToSleep>{{b, host()}}, false),
                  std::make_unique<Arrival>(sleeper_, PoolList{a}, Arrival::Memory::by_piece));
    int calls = 0;
    try {
      go(swap, [&] {
        if (++calls == at) throw VmmError("stopped");
      });
      break;
    } catch (const VmmError&) {
    }
    lab_.memory().check();
    ASSERT_TRUE(a->is_asleep()) << at;
    ASSERT_FALSE(b->is_asleep()) << at;
    expect_whole(of_b);
  }
  EXPECT_FALSE(a->is_asleep());
  expect_whole(of_a);
}

// What could not come though the other had gone whole is refused before anything moves.
class SwapWithoutRoom : public Sleep {
 protected:
  std::unique_ptr<Transfer> swap(const std::shared_ptr<Pool>& out, const std::shared_ptr<Pool>& in) {
    return std::make_unique<Transfer>(
        std::make_unique<Departure>(sleeper_, std::vector<PartToSleep>{{out, host()}}, false),
        std::make_unique<Arrival>(sleeper_, PoolList{in}, Arrival::Memory::by_piece));
  }
  std::shared_ptr<Pool> model(const std::string& name, std::size_t floor = 0) {
    PoolSpec spec = Lab::spec(name);
    spec.floor = floor;
    return lab_.pool(spec, group_.get());
  }
  std::vector<Live> one_of(Pool& pool, std::size_t bytes) {
    const Live live{lab_.allocate(pool, bytes), bytes, 7};
    Lab::fill(live.address, bytes, live.seed);
    return {live};
  }
  void expect_refused(const std::shared_ptr<Pool>& out, const std::shared_ptr<Pool>& in, std::size_t available) {
    const std::uint64_t copies = lab_.driver.count(Call::copy_async);
    try {
      swap(out, in)->begin(&look_away);
      ADD_FAILURE() << "begun";
    } catch (const OutOfMemoryError& error) {
      EXPECT_EQ(error.requested, 40 * kMiB);
      EXPECT_EQ(error.available, available) << error.what();
      EXPECT_EQ(error.pool, in->name());
    }
    EXPECT_EQ(lab_.driver.count(Call::copy_async), copies);
    EXPECT_FALSE(out->is_asleep());
    EXPECT_TRUE(in->is_asleep());
  }

  const std::shared_ptr<Budget> group_ = lab_.memory().create_group("shared", 64 * kMiB);
};

TEST_F(SwapWithoutRoom, OthersHoldIt) {
  const auto in = model("in");
  const std::vector<Live> of_in = one_of(*in, 40 * kMiB);
  sleep(in, host());
  const auto out = model("out");
  const auto third = model("third");
  one_of(*out, 20 * kMiB);
  const Address held = lab_.allocate(*third, 30 * kMiB);
  expect_refused(out, in, 34 * kMiB);
  lab_.free(held);
  go(*swap(out, in));
  expect_whole(of_in);
  wake(out);
}

TEST_F(SwapWithoutRoom, FloorsReserveIt) {
  const auto in = model("in");
  const std::vector<Live> of_in = one_of(*in, 40 * kMiB);
  sleep(in, host());
  const auto out = model("out");
  one_of(*out, 20 * kMiB);
  lab_.memory().set_floor(*out, 26 * kMiB);
  expect_refused(out, in, 38 * kMiB);
  const auto third = model("third");
  lab_.memory().set_floor(*out, 0);
  lab_.memory().set_floor(*third, 26 * kMiB);
  expect_refused(out, in, 38 * kMiB);
  lab_.memory().set_floor(*third, 24 * kMiB);
  go(*swap(out, in));
  expect_whole(of_in);
}

TEST_F(SwapWithoutRoom, ItsOwnLimitIsTooLow) {
  const auto in = model("in");
  const std::vector<Live> of_in = one_of(*in, 40 * kMiB);
  sleep(in, host());
  const auto out = model("out");
  one_of(*out, 20 * kMiB);
  lab_.memory().set_limit(in->budget(), 30 * kMiB);
  expect_refused(out, in, 30 * kMiB);
  lab_.memory().set_limit(in->budget(), kUnlimited);
  go(*swap(out, in));
  expect_whole(of_in);
}

TEST_F(SwapWithoutRoom, TheDeviceHasNoMore) {
  const auto in = model("in");
  const std::vector<Live> of_in = one_of(*in, 40 * kMiB);
  sleep(in, host(), /*release=*/true);
  const auto out = model("out");
  one_of(*out, 20 * kMiB);
  const auto beside = lab_.pool("beside");
  const Address held = lab_.allocate(*beside, 970 * kMiB);
  const std::size_t available = kGiB - 970 * kMiB;
  ASSERT_GE(available, 40 * kMiB);
  const Address more = lab_.allocate(*beside, available - 36 * kMiB);
  expect_refused(out, in, 36 * kMiB);
  lab_.free(more);
  go(*swap(out, in));
  expect_whole(of_in);
  lab_.free(held);
}

// What others could still give counts, and so does what a function of the user's gives up.
TEST_F(SwapWithoutRoom, WhoeverCanGiveIsAskedFirst) {
  const auto in = model("in");
  const std::vector<Live> of_in = one_of(*in, 40 * kMiB);
  sleep(in, host());
  const auto out = model("out");
  const auto third = model("third");
  one_of(*out, 20 * kMiB);
  Address held = lab_.allocate(*third, 30 * kMiB);
  lab_.memory().set_on_pressure(*group_, [&](std::size_t bytes, const std::shared_ptr<Pool>& asker) {
    EXPECT_EQ(bytes, 40 * kMiB);
    EXPECT_EQ(asker, in);
    if (held != 0) lab_.free(std::exchange(held, 0));
    return held == 0;
  });
  go(*swap(out, in));
  lab_.memory().set_on_pressure(*group_, nullptr);
  expect_whole(of_in);
}

TEST_F(Sleep, TagsSleepByThemselves) {
  const auto pool = lab_.pool("a");
  const auto weights = lab_.memory().tagged(pool, "weights");
  const auto cache = lab_.memory().tagged(pool, "cache");
  const std::vector<Live> kept = fill(*weights);
  const std::vector<Live> lost = fill(*cache);
  const std::vector<Live> rest = fill(*pool);
  std::vector<PartToSleep> parts = {{weights, host()}, {cache, discard()}};
  Transfer out(std::make_unique<Departure>(sleeper_, parts, false), nullptr);
  go(out);
  expect_whole(rest);
  lab_.allocate(*pool, 3 * kMiB);
  EXPECT_EQ(weights->physical_bytes() + cache->physical_bytes(), 0U);
  EXPECT_THROW(lab_.memory().allocate(*cache, 512, nullptr), AsleepError);
  wake(pool);
  expect_whole(kept);
  for (const Live& each : lost) EXPECT_TRUE(is_zero(each.address, each.bytes));
}

TEST_F(Sleep, AModelThatIsClosedByForceWhileItSleepsEndsWithItsTensors) {
  const auto pool = lab_.pool("a");
  const std::vector<Live> live = fill(*pool);
  sleep(pool, host());
  lab_.memory().close_pool(*pool, /*force=*/true);
  wake(pool);
  expect_whole(live);
  for (const Live& each : live) lab_.free(each.address);
}

TEST_F(Sleep, OneThatEndsAsleepGivesItsBackupBack) {
  const auto memory = sleeper_.host_memory(lab_.memory().budget());
  {
    const auto pool = lab_.pool("a");
    const std::vector<Live> live = fill(*pool);
    sleep(pool, host());
    for (const Live& each : live) lab_.free(each.address);
    lab_.memory().close_pool(*pool, false);
  }
  EXPECT_EQ(memory->used_bytes(), 0U);
}

// Found by the random program: it had no memory, and was no longer asleep.
TEST_F(Sleep, OneThatEndsAsleepWhileItsFreesWaitAddsUp) {
  const auto pool = lab_.pool("a");
  const Address used = lab_.allocate(*pool, 3 * kMiB);
  const Address small = lab_.allocate(*pool, 512);
  sleep(pool, host());
  lab_.driver.hold_fences(stream(16));
  pool->record_stream(used, stream(16));
  lab_.driver.set_wait_on_held(ScriptedDriver::WaitOnHeld::block);
  lab_.free(used);
  lab_.free(small);
  lab_.memory().close_pool(*pool, /*force=*/true);
  lab_.memory().check();
  lab_.driver.release_fences();
  lab_.driver.set_wait_on_held(ScriptedDriver::WaitOnHeld::pass);
}

// A library keeps a block for whoever calls it next.
TEST_F(Sleep, WhatIsEverybodysStays) {
  const auto pool = lab_.pool("a");
  const std::vector<Live> live = fill(*pool);
  const Live& large = live.back();
  const Live& small = live.front();
  sleeper_.set_shared_by_all([&] { return std::vector<Address>{large.address, small.address, 4096}; });
  sleep(pool, host());
  EXPECT_EQ(Lab::first_wrong(large.address, large.bytes, large.seed), large.bytes) << "it is there";
  EXPECT_EQ(Lab::first_wrong(small.address, small.bytes, small.seed), small.bytes);
  EXPECT_GT(pool->physical_bytes(), large.bytes);
  EXPECT_LT(pool->physical_bytes(), large.bytes + 32 * kMiB) << "and the rest is not";
  Lab::fill(large.address, large.bytes, 77);
  wake(pool);
  std::vector<Live> after = live;
  after.back().seed = 77;
  expect_whole(after);
  sleep(pool, discard());
  EXPECT_EQ(Lab::first_wrong(large.address, large.bytes, 77), large.bytes);
  wake(pool);
  sleeper_.set_shared_by_all(nullptr);
}

TEST_F(Sleep, WhatHadComeBeforeAWakeWasStoppedIsNotSaidToBeThere) {
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

TEST_F(Sleep, WhatIsReadOnlyIsSoAgain) {
  const auto pool = lab_.pool("a");
  const auto weights = lab_.memory().tagged(pool, "weights");
  const std::vector<Live> live = fill(*weights);
  std::vector<SealedPiece> pieces;
  for (const Live& each : live) pieces.push_back({each.address, each.bytes, true});
  Epoch wait_for = kLongAgo;
  do {
    EXPECT_TRUE(lab_.memory().clock().wait(std::exchange(wait_for, kLongAgo)).ok());
    weights->set_memory_access(pieces, Access::read, &wait_for);
  } while (wait_for != kLongAgo);
  sleep(pool, host());
  EXPECT_TRUE(weights->is_read_only(live.back().address, live.back().bytes));
  wake(pool);
  EXPECT_TRUE(weights->is_sealed());
  for (const Live& each : live) EXPECT_TRUE(weights->is_read_only(each.address, each.bytes));
  expect_whole(live);
  weights->set_memory_access(pieces, Access::read_write, &wait_for);
}

// ------------------------------------------------------------------------ poison

TEST_F(Sleep, WhatIsDiscardedComesBackAsPoisonWhereThatIsWanted) {
  Places poisoned = discard();
  poisoned.front().is_poisoned = true;
  const auto pool = lab_.pool("a");
  const auto other = lab_.pool("b");
  const std::vector<Live> live = fill(*pool, {512, 70 * kKiB, 3 * kMiB});
  const auto is_poison = [](const Live& each) {
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(each.address);
    return std::all_of(bytes, bytes + each.bytes, [](std::uint8_t byte) { return byte == kPoisonByte; });
  };
  for (const bool is_new : {true, false}) {
    sleep(pool, poisoned, /*release=*/is_new);
    if (!is_new) lab_.leave_idle(*other, 16 * kMiB);  // the memory that comes back has been another's
    wake(pool);
    EXPECT_TRUE(std::all_of(live.begin(), live.end(), is_poison)) << (is_new ? "new memory" : "used memory");
  }
  sleep(pool, discard());
  wake(pool);
  for (const Live& each : live) EXPECT_TRUE(is_zero(each.address, each.bytes));
}

TEST_F(Sleep, WhatFindsAPlaceIsNotPoisoned) {
  Places places = host();
  places.push_back(discard().front());
  places.back().is_poisoned = true;
  const auto pool = lab_.pool("a");
  const std::vector<Live> live = fill(*pool);
  sleep(pool, places, /*release=*/true);
  wake(pool);
  expect_whole(live);
}

}  // namespace
}  // namespace vmm::testing
