// Models that sleep and wake: what they hold, where it goes, who gets their memory, and what is
// true of it meanwhile.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

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

TEST_F(Sleep, WhatPartsOfItHaveFoundIsAvailableToAWakeThatIsRefused) {
  const auto group = lab_.memory().create_group("shared", 64 * kMiB);
  const auto model = lab_.pool(Lab::spec("a"), group.get());
  const auto weights = lab_.memory().tagged(model, "weights");
  for (const auto& part : {model, weights}) lab_.allocate(*part, 20 * kMiB);
  sleep(model, host());
  const Address others = lab_.allocate(*lab_.pool(Lab::spec("b"), group.get()), 36 * kMiB);
  try {
    wake(model);
    ADD_FAILURE() << "40 of 28 MiB";
  } catch (const OutOfMemoryError& error) {
    EXPECT_EQ(error.requested, 40 * kMiB);
    EXPECT_EQ(error.available, 28 * kMiB);
  }
  lab_.free(others);
  wake(model);
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

// The chunk of what stays has free space too, which is asleep nowhere.
TEST_F(Sleep, WhatSleepsIsCountedBesideWhatStays) {
  const auto pool = lab_.pool("a");
  const Live small = fill(*pool, {kKiB}).front();
  const std::vector<Live> live = fill(*pool, {kMiB + 512});
  sleeper_.set_shared_by_all([&] { return std::vector<Address>{small.address}; });
  sleep(pool, host());
  EXPECT_EQ(pool->physical_bytes(), kPage) << "a slab";
  EXPECT_EQ(pool->memory_stats().asleep_bytes, 3 * (kMiB + 512));
  wake(pool);
  EXPECT_EQ(pool->memory_stats().asleep_bytes, 0U);
  expect_whole(live);
  sleeper_.set_shared_by_all(nullptr);
}

// Where it goes, before any of it has gone; and what comes is still there until all has come.
TEST_F(Sleep, OnItsWayItSaysWhereTo) {
  const auto pool = lab_.pool("a");
  fill(*pool);
  std::set<std::string> said;
  const Look look = [&] { said.insert(where(*pool)); };
  go(*going({pool}, host()), look);
  EXPECT_EQ(said, std::set<std::string>{"host"});
  said.clear();
  go(*coming(pool), look);
  EXPECT_EQ(said, std::set<std::string>{"host"});
  EXPECT_EQ(where(*pool), "");
}

// Of a model that sleeps in part a tag may be new, or anew; of one that sleeps whole none.
TEST_F(Sleep, ATagComesBesideWhatSleeps) {
  const auto pool = lab_.pool("a");
  fill(*pool, {kMiB});
  const auto goes_alone = [&] {
    Transfer out(std::make_unique<Departure>(sleeper_, std::vector<PartToSleep>{{pool, host()}}, false), nullptr);
    go(out);
  };
  goes_alone();
  EXPECT_THROW(lab_.memory().tagged(pool, "new"), AsleepError);
  wake(pool);
  const auto cache = lab_.memory().tagged(pool, "cache");
  const std::vector<Live> live = fill(*cache, {kMiB});
  seal_pages(lab_.memory(), *pool, pieces(live));
  goes_alone();
  EXPECT_NE(lab_.memory().tagged(pool, "new"), nullptr);
  EXPECT_NE(lab_.memory().tagged(pool, "cache"), cache) << "sealed: another space";
  wake(pool);
  unseal_pages(lab_.memory(), *pool, pieces(live));
  sleep(pool, host());
  EXPECT_THROW(lab_.memory().tagged(pool, "newer"), AsleepError);
  wake(pool);
}

TEST_F(Sleep, WhatIsReadOnlyIsSoAgain) {
  const auto pool = lab_.pool("a");
  const auto weights = lab_.memory().tagged(pool, "weights");
  const std::vector<Live> live = fill(*weights);
  const std::vector<SealedPiece> sealed = pieces(live);
  Epoch wait_for = kLongAgo;
  do {
    EXPECT_TRUE(lab_.memory().clock().wait(std::exchange(wait_for, kLongAgo)).ok());
    weights->set_memory_access(sealed, Access::read, &wait_for);
  } while (wait_for != kLongAgo);
  sleep(pool, host());
  EXPECT_TRUE(weights->is_read_only(live.back().address, live.back().bytes));
  wake(pool);
  EXPECT_TRUE(weights->is_sealed());
  for (const Live& each : live) EXPECT_TRUE(weights->is_read_only(each.address, each.bytes));
  expect_whole(live);
  weights->set_memory_access(sealed, Access::read_write, &wait_for);
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
