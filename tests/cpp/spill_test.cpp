// Tensors that find no memory on the device and may stand in the host's: counted apart,
// bounded apart, and only where nothing else would do.
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "cpp/reclaim_lab.h"

namespace vmm::testing {
namespace {

class Spill : public Reclaim {
 protected:
  std::shared_ptr<Pool> spilling(const std::string& name) {
    const auto pool = model(name, 0);
    lab_.memory().set_spills(*pool, true);
    return pool;
  }
  MemoryStats stats(const std::shared_ptr<Pool>& pool) { return lab_.memory().memory_stats_of(*pool); }
  bool is_spilled(Address address) { return lab_.memory().pool_at(address)->is_spill(); }
  std::size_t device_bytes() { return group_.used(); }
  Budget& host() { return *lab_.memory().spill_group_of(group_); }

  const std::shared_ptr<Pool> a_ = spilling("a");
  const std::shared_ptr<Pool> b_ = model("b", 0);
};

TEST_F(Spill, WhatFindsNoMemoryStandsInTheHosts) {
  const Address kept = lab_.allocate(*a_, 32 * kMiB);
  const Address spilled = lab_.allocate(*a_, 6 * kMiB);
  EXPECT_FALSE(is_spilled(kept));
  EXPECT_TRUE(is_spilled(spilled));
  EXPECT_EQ(steps(*a_), "nnnppim");
  EXPECT_EQ(stats(a_).physical_usage, 32 * kMiB) << "the device's";
  EXPECT_EQ(stats(a_).allocated_bytes, 32 * kMiB);
  EXPECT_EQ(stats(a_).spilled_bytes, 6 * kMiB);
  EXPECT_EQ(device_bytes(), 32 * kMiB);
  EXPECT_EQ(host().used(), 6 * kMiB);
  const GlobalMemoryStats all = lab_.memory().group_stats(group_);
  EXPECT_EQ(all.physical_usage, 32 * kMiB);
  EXPECT_EQ(all.spilled_bytes, 6 * kMiB);
  // torch counts its tensors wherever they are.
  EXPECT_EQ(lab_.memory().statistics_of(*a_)[StatKind::allocated_bytes][0].current,
            static_cast<std::int64_t>(38 * kMiB));
  Lab::fill(spilled, 6 * kMiB, 3);
  Lab::fill(kept, 32 * kMiB, 4);
  EXPECT_TRUE(Lab::holds(spilled, 6 * kMiB, 3));
  lab_.memory().check();
}

TEST_F(Spill, OnlyModelsThatAskForItDo) {
  lab_.allocate(*b_, 32 * kMiB);
  EXPECT_THROW(lab_.memory().allocate(*b_, 2 * kMiB, nullptr), OutOfMemoryError);
  EXPECT_EQ(steps(*b_), "nnnppip");
}

TEST_F(Spill, ItComesAfterWhateverOthersCouldGive) {
  lab_.leave_idle(*b_, 32 * kMiB);
  EXPECT_FALSE(is_spilled(lab_.allocate(*a_, 32 * kMiB)));
}

TEST_F(Spill, WhatIsFreedThereIsNobodysOnTheDevice) {
  const Address kept = lab_.allocate(*a_, 32 * kMiB);
  lab_.free(lab_.allocate(*a_, 6 * kMiB));
  EXPECT_THROW(lab_.memory().allocate(*b_, 2 * kMiB, nullptr), OutOfMemoryError);
  lab_.free(kept);
  const Address theirs = lab_.allocate(*b_, 32 * kMiB);
  EXPECT_FALSE(is_spilled(theirs));
}

TEST_F(Spill, TheNextTensorStandsOnTheDeviceAgainOnceThereIsRoom) {
  const Address kept = lab_.allocate(*a_, 32 * kMiB);
  const Address spilled = lab_.allocate(*a_, 6 * kMiB);
  lab_.free(spilled);
  lab_.free(kept);
  EXPECT_FALSE(is_spilled(lab_.allocate(*a_, 6 * kMiB)));
}

TEST_F(Spill, FreedMemoryThereIsUsedAgainWithoutTheDriver) {
  lab_.allocate(*a_, 32 * kMiB);
  lab_.free(lab_.allocate(*a_, 6 * kMiB));
  lab_.driver.clear_calls();
  EXPECT_TRUE(is_spilled(lab_.allocate(*a_, 6 * kMiB)));
  EXPECT_EQ(lab_.driver.count(Call::create) + lab_.driver.count(Call::map), 0U);
}

TEST_F(Spill, TrimAndEmptyCacheGiveTheHostsMemoryBack) {
  lab_.allocate(*a_, 32 * kMiB);
  lab_.free(lab_.allocate(*a_, 6 * kMiB));
  ASSERT_EQ(host().used(), 6 * kMiB);
  lab_.memory().trim(*a_, 0);
  EXPECT_EQ(host().used(), 0U);
  lab_.free(lab_.allocate(*a_, 6 * kMiB));
  ASSERT_EQ(host().used(), 6 * kMiB);
  lab_.memory().empty_cache();
  EXPECT_EQ(host().used(), 0U);
}

TEST_F(Spill, ABoundOfItsOwnHolds) {
  lab_.memory().set_limit(host(), 8 * kMiB);
  lab_.allocate(*a_, 32 * kMiB);
  const Address spilled = lab_.allocate(*a_, 6 * kMiB);
  EXPECT_THROW(lab_.memory().allocate(*a_, 4 * kMiB, nullptr), OutOfMemoryError);
  EXPECT_EQ(steps(*a_), "nnnppin");
  lab_.free(spilled);
  EXPECT_TRUE(is_spilled(lab_.allocate(*a_, 8 * kMiB))) << "what was idle there in other sizes made room";
  EXPECT_EQ(lab_.memory().set_limit(host(), 2 * kMiB), 0U) << "nothing in use is touched";
  EXPECT_THROW(lab_.memory().allocate(*a_, kMiB, nullptr), OutOfMemoryError);
}

TEST_F(Spill, OfTwoModelsTheIdleMemoryOfOneServesTheOther) {
  lab_.memory().set_spills(*b_, true);
  lab_.memory().set_limit(host(), 8 * kMiB);
  lab_.allocate(*a_, 32 * kMiB);
  const Address block = lab_.allocate(*a_, 8 * kMiB);
  Lab::fill(block, 8 * kMiB, 7);
  lab_.free(block);
  const Address theirs = lab_.allocate(*b_, 8 * kMiB, kTwo);
  EXPECT_TRUE(is_spilled(theirs));
  EXPECT_TRUE(Lab::is_zero(theirs, 8 * kMiB)) << "no byte of the former owner";
}

// Where no bound refuses, but the host, whoever's.
TEST_F(Spill, WhereTheHostHasNoMoreTheIdleMemoryOfAnotherGroupServes) {
  lab_.allocate(*a_, 32 * kMiB);
  const Address block = lab_.allocate(*a_, 8 * kMiB);
  const auto theirs = lab_.memory().pool_at(block);
  ASSERT_TRUE(theirs->is_spill());
  lab_.free(block);
  const auto other_group = lab_.memory().create_group("others", 8 * kMiB);
  const auto other = lab_.pool(Lab::spec("other"), other_group.get());
  lab_.memory().set_spills(*other, true);
  lab_.allocate(*other, 8 * kMiB);
  lab_.driver.fail_if(
      [&](const CallRecord& call) { return call.call == Call::create && theirs->physical_bytes() != 0; },
      {StatusCode::out_of_memory, "create"});
  const Address address = lab_.allocate(*other, 12 * kMiB);
  EXPECT_TRUE(is_spilled(address));
  EXPECT_EQ(theirs->physical_bytes(), 0U);
  lab_.driver.clear_failures();
}

// Nor does it keep what nobody uses: pinned memory that models which slept have left.
TEST_F(Spill, WhereTheHostHasNoMoreWhatNobodyUsesThereGoes) {
  lab_.allocate(*a_, 32 * kMiB);
  int releases = 0;
  lab_.memory().set_host_reserve([&](std::size_t) -> std::size_t { return ++releases <= 3 ? kMiB : 0; });
  lab_.driver.fail_if([&](const CallRecord& call) { return call.call == Call::create && releases < 2; },
                      {StatusCode::out_of_memory, "create"});
  EXPECT_TRUE(is_spilled(lab_.allocate(*a_, 8 * kMiB)));
  EXPECT_EQ(releases, 2) << "no more than it takes";
  lab_.driver.clear_failures();
  lab_.driver.fail_if([&](const CallRecord& call) { return call.call == Call::create; },
                      {StatusCode::out_of_memory, "create"});
  EXPECT_THROW(lab_.allocate(*a_, 64 * kMiB), OutOfMemoryError);
  EXPECT_EQ(releases, 4) << "until there is none";
  lab_.driver.clear_failures();
  lab_.memory().set_limit(host(), 8 * kMiB);
  EXPECT_THROW(lab_.allocate(*a_, 64 * kMiB), OutOfMemoryError);
  EXPECT_EQ(releases, 4) << "a bound is no lack of the host's";
}

TEST_F(Spill, SmallTensorsToo) {
  lab_.allocate(*a_, 32 * kMiB);
  std::vector<Address> blocks;
  for (int each = 0; each < 100; ++each) {
    blocks.push_back(lab_.allocate(*a_, 4096));
    EXPECT_TRUE(is_spilled(blocks.back()));
  }
  EXPECT_EQ(stats(a_).spilled_bytes, 2 * kMiB);
  for (const Address each : blocks) lab_.free(each);
  lab_.memory().empty_cache();
  EXPECT_EQ(host().used(), 0U);
}

TEST_F(Spill, ATagsTensorsKeepTheirTag) {
  lab_.allocate(*a_, 32 * kMiB);
  const auto weights = lab_.memory().tagged(a_, "weights");
  EXPECT_TRUE(is_spilled(lab_.allocate(*weights, 4 * kMiB)));
  EXPECT_EQ(lab_.memory().tags_of(*a_).at("weights"), 4 * kMiB);
  EXPECT_TRUE(is_spilled(lab_.allocate(*a_, 4 * kMiB)));
  EXPECT_EQ(lab_.memory().tags_of(*a_).at("weights"), 4 * kMiB);
}

TEST_F(Spill, NeverForAGraphNorWhileOneIsCaptured) {
  lab_.allocate(*a_, 32 * kMiB);
  const auto graphs = lab_.memory().create_part(a_, RegionId{1, 0}, /*no_split=*/false);
  EXPECT_THROW(lab_.memory().allocate(*graphs, 2 * kMiB, kOne), OutOfMemoryError);
  lab_.memory().clock().begin_capture();
  EXPECT_THROW(lab_.memory().allocate(*a_, 2 * kMiB, kOne), OutOfMemoryError);
  lab_.memory().clock().end_capture();
  EXPECT_TRUE(is_spilled(lab_.allocate(*a_, 2 * kMiB)));
}

TEST_F(Spill, NeverForExplicitPages) {
  lab_.allocate(*a_, 32 * kMiB);
  EXPECT_THROW(lab_.memory().allocate_first(*a_, 2 * kMiB, nullptr), OutOfMemoryError);
}

TEST_F(Spill, TurnedOffWhatIsThereStays) {
  lab_.allocate(*a_, 32 * kMiB);
  const Address spilled = lab_.allocate(*a_, 4 * kMiB);
  lab_.memory().set_spills(*a_, false);
  Lab::fill(spilled, 4 * kMiB, 9);
  EXPECT_THROW(lab_.memory().allocate(*a_, 4 * kMiB, nullptr), OutOfMemoryError);
  EXPECT_TRUE(Lab::holds(spilled, 4 * kMiB, 9));
  lab_.free(spilled);
}

TEST_F(Spill, ItStaysWhileItsModelSleeps) {
  const Address kept = lab_.allocate(*a_, 32 * kMiB);
  const Address spilled = lab_.allocate(*a_, 4 * kMiB);
  Lab::fill(spilled, 4 * kMiB, 5);
  const auto space = lab_.memory().pool_at(spilled);
  EXPECT_EQ(space->begin_sleep(), SleepBegun::never);
  EXPECT_FALSE(space->is_asleep());
  EXPECT_TRUE(Lab::holds(spilled, 4 * kMiB, 5));
  lab_.free(kept);
}

TEST_F(Spill, EndsWithItsModel) {
  lab_.allocate(*b_, 32 * kMiB);
  const Address spilled = lab_.allocate(*a_, 4 * kMiB);
  EXPECT_THROW(lab_.memory().close_pool(*a_, /*force=*/false), StillInUseError);
  lab_.memory().close_pool(*a_, /*force=*/true);
  EXPECT_EQ(host().used(), 4 * kMiB) << "as long as the tensor lives";
  lab_.free(spilled);
  lab_.memory().settle(/*wait=*/true);
  EXPECT_EQ(host().used(), 0U);
}

TEST_F(Spill, EveryCallOfTheDriverMayFail) {
  lab_.allocate(*a_, 32 * kMiB);
  for (const Call call : {Call::create, Call::map, Call::set_access}) {
    lab_.driver.fail_nth(call, 1, broken(), Repeat::from_then_on);
    EXPECT_THROW(lab_.memory().allocate(*a_, 4 * kMiB, nullptr), VmmError);
    lab_.driver.clear_failures();
    lab_.memory().check();
    EXPECT_EQ(stats(a_).spilled_bytes, 0U);
  }
  EXPECT_TRUE(is_spilled(lab_.allocate(*a_, 4 * kMiB)));
}

// Against what is expected of each: patterns hold, and both bounds.
TEST_F(Spill, ARandomProgramKeepsItsContentsAndItsBounds) {
  lab_.memory().set_spills(*b_, true);
  lab_.memory().set_limit(host(), 24 * kMiB);
  struct Live {
    Address address = 0;
    std::size_t bytes = 0;
    std::uint64_t pattern = 0;
  };
  std::mt19937 random(11);
  const auto below = [&](std::size_t n) { return std::uniform_int_distribution<std::size_t>(0, n - 1)(random); };
  std::vector<Live> live;
  int spilled = 0;
  int refused = 0;
  constexpr std::uint64_t kSteps = 3000;
  for (std::uint64_t step = 0; step < kSteps; ++step) {
    if (live.empty() || below(100) < 55) {
      const std::size_t bytes = below(2) == 0 ? 512 * (1 + below(256)) : kMiB + 512 * below(6 * 2048);
      Pool& pool = below(2) == 0 ? *a_ : *b_;
      try {
        const Address address = lab_.allocate(pool, bytes, below(2) == 0 ? kOne : kTwo);
        Lab::fill(address, bytes, step % 251 + 1);
        live.push_back({address, bytes, step % 251 + 1});
        spilled += is_spilled(address) ? 1 : 0;
      } catch (const OutOfMemoryError&) {
        ++refused;
        ASSERT_GT(host().used() + bytes + 2 * kMiB, 16 * kMiB) << "a bound that is not nearly full refuses nothing";
      }
    } else {
      const std::size_t at = below(live.size());
      ASSERT_TRUE(Lab::holds(live[at].address, live[at].bytes, live[at].pattern)) << "at step " << step;
      lab_.free(live[at].address);
      live[at] = live.back();
      live.pop_back();
    }
    ASSERT_LE(device_bytes(), 32 * kMiB);
    ASSERT_LE(host().used(), 24 * kMiB);
    if (step % 50 == 0) lab_.memory().check();
  }
  EXPECT_GT(spilled, 100);
  EXPECT_GT(refused, 0);
  for (const Live& each : live) {
    EXPECT_TRUE(Lab::holds(each.address, each.bytes, each.pattern));
    lab_.free(each.address);
  }
}

}  // namespace
}  // namespace vmm::testing
