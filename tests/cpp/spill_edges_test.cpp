// Where spilled memory meets what it is not: other stores, the device's numbers, limits, ends.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <thread>
#include <vector>

#include "cpp/reclaim_lab.h"
#include "support/at_one_moment.h"

namespace vmm::testing {
namespace {

class SpillEdges : public Reclaim {
 protected:
  Budget& host() { return *lab_.memory().spill_group_of(group_); }
  const std::shared_ptr<Pool> b_ = model("b", 0);
  std::shared_ptr<Pool> limited(const std::string& name, std::size_t limit, int priority = 0, std::size_t floor = 0) {
    PoolSpec spec = Lab::spec(name, limit);
    spec.priority = priority;
    spec.floor = floor;
    const auto pool = lab_.pool(spec, &group_);
    lab_.memory().set_spills(*pool, true);
    return pool;
  }
  bool is_spilled(Address address) { return lab_.memory().pool_at(address)->is_spill(); }
  std::size_t creates_on_host() {
    std::size_t n = 0;
    for (const CallRecord& each : lab_.driver.calls(Call::create)) n += each.text().empty() ? 0 : 1;
    return n;
  }
};

// Under a model's own limit the ladder's victims are the model's family: its space in host
// memory is among them.
TEST_F(SpillEdges, AHostChunkIsNoVictimUnderTheModelsOwnLimit) {
  const auto a = limited("a", 16 * kMiB);
  const Address kept = lab_.memory().allocate(*a, 12 * kMiB, nullptr);
  const Address full = lab_.memory().allocate(*a, 4 * kMiB, nullptr);
  const Address spilled = lab_.memory().allocate(*a, 2 * kMiB, nullptr);
  ASSERT_TRUE(is_spilled(spilled));
  const ChunkHandle host_chunk = lab_.memory().pool_at(spilled)->chunks_under(spilled, 2 * kMiB).front().handle;
  DeviceMemory::free(lab_.space, spilled);
  DeviceMemory::free(lab_.space, full);
  lab_.memory().trim_passed(*a, [&] { a->shed(0); });
  ASSERT_EQ(host().used(), 2 * kMiB);
  ASSERT_LE(a->budget().used(), 16 * kMiB);
  // 12 in use, 4 of room, 2 idle in host memory: 6 are asked for, which do not fit.
  const std::size_t shelved = lab_.memory().store().all_shelved_bytes();
  const Address next = lab_.memory().allocate(*a, 6 * kMiB, nullptr);
  std::printf("6 MiB: %s; a pays %zu MiB, the device's shelves %zu -> %zu MiB, host memory pays %zu MiB\n",
              is_spilled(next) ? "in host memory" : "on the device", a->budget().used() / kMiB, shelved / kMiB,
              lab_.memory().store().all_shelved_bytes() / kMiB, host().used() / kMiB);
  const ReclaimDecision decision = latest(*a);
  for (const ReclaimStep::Yielded& each : decision.steps[1].yielded) {
    std::printf("yielded: %s %zu\n", each.pool.c_str(), each.bytes);
    EXPECT_EQ(each.pool.find("host"), std::string::npos) << each.pool << " yielded " << each.bytes;
  }
  EXPECT_EQ(lab_.memory().store().all_shelved_bytes(), shelved) << "of the device";
  // Another model's tensor, within its limit, on the device.
  const Address theirs = lab_.memory().allocate(*b_, 2 * kMiB, nullptr);
  ASSERT_FALSE(is_spilled(theirs));
  EXPECT_NE(b_->chunks_under(theirs, 2 * kMiB).front().handle, host_chunk) << "b's tensor stands in host memory";
  std::printf("device: %zu MiB charged; spilled: %zu MiB charged\n", lab_.memory().budget().used() / kMiB,
              host().used() / kMiB);
  DeviceMemory::free(lab_.space, theirs);
  DeviceMemory::free(lab_.space, next);
  DeviceMemory::free(lab_.space, kept);
}

// The same where it does: a tensor of the device's stands on host memory.
TEST_F(SpillEdges, ADevicesTensorStandsOnNoHostChunk) {
  const auto a = limited("a", 16 * kMiB);
  const Address kept = lab_.memory().allocate(*a, 12 * kMiB, nullptr);
  const Address full = lab_.memory().allocate(*a, 4 * kMiB, nullptr);
  const Address spilled = lab_.memory().allocate(*a, 2 * kMiB, nullptr);
  ASSERT_TRUE(is_spilled(spilled));
  // A bound of the group's, or the device, would let 2 more in; the model's own does, too:
  // it has been raised, and what is lacking is taken from "others" before it is made.
  const auto tag = lab_.memory().tagged(a, "t");
  const ChunkHandle host_chunk = lab_.memory().pool_at(spilled)->chunks_under(spilled, 2 * kMiB).front().handle;
  DeviceMemory::free(lab_.space, full);
  lab_.memory().trim_passed(*a, [&] { a->shed(0); });
  DeviceMemory::free(lab_.space, spilled);
  const Address small = lab_.memory().allocate(*tag, 2 * kMiB, nullptr);
  ASSERT_FALSE(is_spilled(small));
  DeviceMemory::free(lab_.space, small);  // 12 in use, 2 idle under the tag, 2 of room, 2 idle in the host's
  lab_.driver.clear_calls();
  const Address next = lab_.memory().allocate(*a, 4 * kMiB, nullptr);
  const ReclaimDecision decision = latest(*a);
  for (const ReclaimStep::Yielded& each : decision.steps[1].yielded) {
    std::printf("yielded: %s %zu\n", each.pool.c_str(), each.bytes);
    EXPECT_EQ(each.pool.find("host"), std::string::npos) << each.pool << " yielded " << each.bytes;
  }
  EXPECT_FALSE(is_spilled(next));
  for (const ChunkView& each : a->chunks_under(next, 4 * kMiB)) {
    EXPECT_NE(each.handle, host_chunk) << "a tensor of the device's stands in host memory";
  }
  EXPECT_EQ(host().used(), 2 * kMiB);
  lab_.memory().check();
  DeviceMemory::free(lab_.space, next);
  DeviceMemory::free(lab_.space, kept);
}

TEST_F(SpillEdges, AModelsLoweredLimitTakesOfTheDevicesMemory) {
  const auto a = limited("a", 16 * kMiB, /*priority=*/5, /*floor=*/2 * kMiB);
  const Address idle = lab_.allocate(*a, 16 * kMiB);
  const Address spilled = lab_.allocate(*a, 6 * kMiB);
  ASSERT_TRUE(is_spilled(spilled));
  lab_.free(idle);
  lab_.free(spilled);
  lab_.memory().set_limit(a->budget(), 12 * kMiB);
  EXPECT_LE(a->budget().used(), 12 * kMiB);
  EXPECT_EQ(host().used(), 6 * kMiB) << "nobody asked for host memory";
}

TEST_F(SpillEdges, TrimTellsWhatItGaveBack) {
  const auto a = limited("a", 16 * kMiB);
  const Address kept = lab_.allocate(*a, 16 * kMiB);
  lab_.free(lab_.allocate(*a, 6 * kMiB));
  ASSERT_EQ(host().used(), 6 * kMiB);
  EXPECT_EQ(lab_.memory().trim(*a, 0), 6 * kMiB);
  EXPECT_EQ(host().used(), 0U);
  lab_.free(kept);
}

TEST_F(SpillEdges, EmptyCacheTellsWhatItGaveBack) {
  const auto a = limited("a", 16 * kMiB);
  const Address kept = lab_.allocate(*a, 16 * kMiB);
  lab_.free(lab_.allocate(*a, 6 * kMiB));
  EXPECT_EQ(lab_.memory().empty_cache(), 6 * kMiB);
  lab_.free(kept);
}

// What a model keeps idle on the device is what is asked to stay, not what it has in the host's.
TEST_F(SpillEdges, TrimKeepsOfTheDevicesMemory) {
  const auto a = limited("a", 16 * kMiB);
  const Address one = lab_.allocate(*a, 12 * kMiB);
  const Address spilled = lab_.allocate(*a, 6 * kMiB);
  ASSERT_TRUE(is_spilled(spilled));
  const auto tag = lab_.memory().tagged(a, "t");  // after the space in host memory
  const Address two = lab_.allocate(*tag, 4 * kMiB);
  ASSERT_FALSE(is_spilled(two));
  lab_.free(spilled);
  lab_.free(two);
  lab_.memory().trim(*a, 4 * kMiB);
  EXPECT_EQ(tag->physical_bytes(), 4 * kMiB) << "the device's were to stay";
  lab_.free(one);
}

// allocate_spilled() asks how much of its space is idle before it asks the host for more.
TEST_F(SpillEdges, WhatIsIdleInHostMemoryIsKnown) {
  const auto a = limited("a", 16 * kMiB);
  lab_.allocate(*a, 16 * kMiB);
  const Address spilled = lab_.allocate(*a, 6 * kMiB);
  const auto space = lab_.memory().pool_at(spilled);
  lab_.free(spilled);
  EXPECT_EQ(space->physical_bytes(), 6 * kMiB);
  EXPECT_EQ(space->idle_bytes(), 6 * kMiB) << "spilling.cpp:51 goes by this";
}

// Of what is idle there, no more goes than is above the limit.
TEST_F(SpillEdges, ALimitOfHostMemoryTakesWhatIsAboveIt) {
  const auto a = limited("a", 16 * kMiB);
  lab_.allocate(*a, 16 * kMiB);
  std::vector<Address> spilled;
  for (int k = 0; k < 8; ++k) spilled.push_back(lab_.allocate(*a, 2 * kMiB));
  const auto space = lab_.memory().pool_at(spilled.front());
  for (const Address each : spilled) lab_.free(each);
  ASSERT_EQ(space->physical_bytes(), 16 * kMiB);
  lab_.memory().set_limit(host(), 14 * kMiB);
  EXPECT_GE(space->physical_bytes(), 12 * kMiB) << "2 MiB were above it";
}

// A limit of host memory that is lowered below what is in use is over for as long as that
// lives: do threads keep blocks on the device meanwhile?
TEST_F(SpillEdges, AHostLimitThatIsLoweredStopsNoThreadsCaches) {
  const auto a = limited("a", 16 * kMiB);
  const auto b = model("b", 0);
  lab_.free(lab_.allocate(*b, 4096));
  lab_.free(lab_.allocate(*b, 4096));
  EXPECT_GT(lab_.memory().kept_blocks(*b), 0U);
  const Address kept = lab_.allocate(*a, 16 * kMiB);
  const Address spilled = lab_.allocate(*a, 6 * kMiB);
  lab_.memory().set_limit(host(), 0);
  lab_.free(lab_.allocate(*b, 4096));
  lab_.free(lab_.allocate(*b, 4096));
  EXPECT_GT(lab_.memory().kept_blocks(*b), 0U) << "of a model that never spilled";
  const auto space = lab_.memory().pool_at(spilled);
  lab_.free(spilled);
  EXPECT_EQ(space->physical_bytes(), 0U) << "it goes with the free";
  lab_.free(kept);
}

// Two threads bury one group.
TEST(GroupsEnd, TwoThreadsBuryOneGroup) {
  Lab lab;
  std::atomic<bool> stop{false};
  std::atomic<int> thrown{0};
  std::string what;
  const auto settle = [&] {
    while (!stop) {
      try {
        lab.memory().settle(false);
      } catch (const std::exception& error) {
        if (thrown++ == 0) what = error.what();
      }
    }
  };
  std::thread one(settle);
  std::thread two(settle);
  for (int k = 0; k < 300 && thrown == 0; ++k) {
    auto group = lab.memory().create_group("g", 32 * kMiB);
    const Budget* const key = group.get();
    try {
      auto pool = lab.memory().create_pool(Lab::spec("p"), group.get());
      lab.memory().close_pool(*pool, true);
      pool.reset();
      lab.memory().end_group(*key);
    } catch (const std::exception& error) {
      if (thrown++ == 0) what = error.what();
    }
  }
  stop = true;
  one.join();
  two.join();
  EXPECT_EQ(thrown, 0) << what;
}

// Two threads free the last tensors of a closed shared pool: torch's deleters may not throw.
TEST(GroupsEnd, TheLastTensorsOfAClosedGroupAreFreedByTwoThreads) {
  Lab lab;
  int thrown = 0;
  int k = 0;
  for (; k < 1500 && thrown == 0; ++k) {
    auto group = lab.memory().create_group("g", 32 * kMiB);
    const Budget* const key = group.get();
    std::vector<Address> last;
    for (const char* const name : {"a", "b"}) {
      const auto pool = lab.memory().create_pool(Lab::spec(name), group.get());
      last.push_back(lab.memory().allocate(*pool, 512, nullptr));
      lab.memory().close_pool(*pool, true);
    }
    group.reset();
    lab.memory().end_group(*key);
    std::atomic<int> threw{0};
    const auto free_it = [&](Address address) {
      try {
        DeviceMemory::free(lab.space, address);
      } catch (const std::exception&) {
        ++threw;
      }
    };
    at_one_moment([&] { free_it(last[0]); }, [&] { free_it(last[1]); });
    thrown += threw;
  }
  EXPECT_EQ(thrown, 0) << "free() threw in round " << k;
}

TEST(GroupsEnd, WhatTheDriverWouldNotTakeBackOfHostMemoryGoesWithIt) {
  Lab lab;
  const auto group = lab.memory().create_group("g", 4 * kMiB);
  const auto host = lab.memory().spill_group_of(*group);
  auto pool = lab.memory().create_pool(Lab::spec("a"), group.get());
  lab.memory().set_spills(*pool, true);
  const Address kept = lab.allocate(*pool, 4 * kMiB);
  lab.free(lab.allocate(*pool, 2 * kMiB));
  lab.free(kept);
  lab.driver.fail_nth(Call::release, 1, broken(), Repeat::from_then_on);
  lab.memory().close_pool(*pool, /*force=*/false);
  lab.driver.clear_failures();
  ASSERT_EQ(host->used(), 2 * kMiB);
  lab.memory().end_group(*group);
  EXPECT_EQ(host->used(), 0U);
}

// A model that is closed while its request climbs leaves its record behind.
TEST_F(SpillEdges, TheLogForgetsWhoHasEnded) {
  PoolSpec spec = Lab::spec("a", 4 * kMiB);
  auto pool = lab_.pool(spec, &group_);
  const OwnerId id = pool->id();
  lab_.memory().set_on_pressure(group_, [&](std::size_t, const std::shared_ptr<Pool>& asker) {
    lab_.memory().close_pool(*asker, true);
    return false;
  });
  EXPECT_ANY_THROW(lab_.memory().allocate(*pool, 8 * kMiB, nullptr));
  lab_.memory().set_on_pressure(group_, nullptr);
  lab_.memory().settle(true);
  EXPECT_EQ(lab_.memory().ladder().log().report_of(id).requests, 0U);
}

// Asleep while its request is on the last rung: it gets a tensor all the same?
TEST_F(SpillEdges, OneThatWentToSleepMeanwhileIsGivenNothing) {
  const auto a = limited("a", 4 * kMiB);
  lab_.memory().set_on_pressure(group_, [&](std::size_t, const std::shared_ptr<Pool>& asker) {
    asker->begin_sleep();
    return false;
  });
  Address got = 0;
  try {
    got = lab_.memory().allocate(*a, 8 * kMiB, nullptr);
  } catch (const AsleepError&) {
  }
  EXPECT_EQ(got, 0U) << "spilled for a model that sleeps";
  if (got != 0) DeviceMemory::free(lab_.space, got);
  lab_.memory().set_on_pressure(group_, nullptr);
  a->end_sleep();
}

// Work per burst: two models that alternate at one limit.
TEST_F(SpillEdges, TwoThatAlternateDoNotThrash) {
  for (const bool spills : {false, true}) {
    const auto a = model(std::string("a") + (spills ? "s" : ""), 0);
    const auto b = model(std::string("b") + (spills ? "s" : ""), 0);
    if (spills) {
      lab_.memory().set_spills(*a, true);
      lab_.memory().set_spills(*b, true);
    }
    std::vector<std::size_t> calls;
    for (int round = 0; round < 24; ++round) {
      Pool& pool = round % 2 == 0 ? *a : *b;
      lab_.driver.clear_calls();
      std::vector<Address> blocks;
      for (int k = 0; k < 10; ++k) blocks.push_back(lab_.memory().allocate(pool, 3 * kMiB, nullptr));
      for (const Address each : blocks) DeviceMemory::free(lab_.space, each);
      calls.push_back(lab_.driver.count(Call::create) + lab_.driver.count(Call::map) + lab_.driver.count(Call::unmap) +
                      lab_.driver.count(Call::release) + lab_.driver.count(Call::set_access));
    }
    std::printf("spills %d, driver calls by burst:", spills ? 1 : 0);
    for (const std::size_t each : calls) std::printf(" %zu", each);
    std::printf("\n");
    EXPECT_LE(calls.back(), 12U);
    lab_.memory().close_pools({a, b}, true);
    lab_.memory().empty_cache();
  }
}

// What is idle there is found as in any pool: nobody looks through it before.
TEST_F(SpillEdges, ARequestThereWalksNoFreeBlocks) {
  const auto a = limited("a", kUnlimited);
  lab_.allocate(*a, 32 * kMiB);
  const Address spilled = lab_.allocate(*a, 6 * kMiB);
  const auto space = lab_.memory().pool_at(spilled);
  lab_.free(spilled);
  const std::size_t walks = space->times_walked();
  Address again = lab_.memory().allocate(*a, 6 * kMiB, nullptr);
  EXPECT_EQ(space->times_walked(), walks);
  EXPECT_TRUE(is_spilled(again));
  DeviceMemory::free(lab_.space, again);
}

TEST(SpillBeyondTheHost, IsRefusedBeforeTheDriverIsAsked) {
  Lab lab(LabSpec{kTiB});
  const auto group = lab.memory().create_group("shared", 32 * kMiB);
  PoolSpec spec = Lab::spec("a");
  spec.capacity = kTiB;
  const auto a = lab.pool(spec, group.get());
  lab.memory().set_spills(*a, true);
  const std::uint64_t creates = lab.driver.count(Call::create);
  EXPECT_THROW(lab.memory().allocate(*a, 900 * kGiB, nullptr), OutOfMemoryError);
  EXPECT_EQ(lab.driver.count(Call::create), creates);
}

}  // namespace
}  // namespace vmm::testing
