// Models that sleep, where something else happens at the same moment: seals, refusals, others.
#include <gtest/gtest.h>

#include <cstdio>
#include <random>

#include "core/faces/seals.h"
#include "core/memory/shared_chunks.h"
#include "cpp/sleep_lab.h"

namespace vmm::testing {
namespace {

class SleepEdges : public Sleep {
 protected:
  std::size_t host_bytes() { return sleeper_.host_memory(lab_.memory().budget())->used_bytes(); }
  const std::shared_ptr<Pool> model_ = lab_.pool("model");
};

// A wake that is stopped behind its first piece, where the driver would not unmap what had
// come: when it wakes at last what was sealed is sealed.
TEST_F(SleepEdges, ASealOutlivesAWakeThatWasStopped) {
  const auto weights = lab_.memory().tagged(model_, "weights");
  std::vector<Live> live = fill(*weights, {40 * kMiB, 30 * kMiB});
  seal_pages(lab_.memory(), *model_, pieces(live));
  sleep(model_, host());
  for (int stop = 1; stop < 12; ++stop) {
    int looks = 0;
    const auto transfer = coming(model_);
    bool stopped = false;
    try {
      go(*transfer, [&] {
        if (++looks != stop) return;
        lab_.driver.fail_nth(Call::unmap, 1, broken(), Repeat::from_then_on);
        throw VmmError("stopped");
      });
    } catch (const VmmError&) {
      stopped = true;
    }
    lab_.driver.clear_failures();
    if (!stopped) break;
    wake(model_);
    expect_whole(live);
    for (const Live& each : live) {
      EXPECT_TRUE(weights->is_read_only(each.address, each.bytes)) << "of " << each.bytes << ", stopped at " << stop;
    }
    EXPECT_TRUE(weights->is_sealed()) << "stopped at " << stop;
    if (HasFailure()) break;
    sleep(model_, host());
  }
  if (model_->is_asleep() || weights->is_asleep()) wake(model_);
  try {
    unseal_pages(lab_.memory(), *model_, pieces(live));
  } catch (const VmmError&) {
  }
}

// Where chunks are borders of blocks: what is freed of two that had gone is one bare space.
TEST_F(SleepEdges, AddressesThatStayBareAreOne) {
  const auto part = lab_.memory().create_part(model_, {0, 3}, /*no_split=*/false, PoolKind::mem_pool);
  const Address one = lab_.allocate(*part, 2 * kMiB);
  const Address two = lab_.allocate(*part, 2 * kMiB);
  sleep(model_, host());
  lab_.free(one);
  lab_.free(two);
  wake(model_);  // which looks at all of it
}

// Each cycle all but one tensor are trained on, and sealed again.
TEST_F(SleepEdges, FormerBackupsDoNotGather) {
  const auto weights = lab_.memory().tagged(model_, "weights");
  std::vector<Live> live;
  for (int k = 0; k < 8; ++k) {
    live.push_back({lab_.allocate(*weights, 32 * kMiB), 32 * kMiB, static_cast<std::uint64_t>(k + 1)});
    Lab::fill(live.back().address, live.back().bytes, live.back().seed);
  }
  seal_pages(lab_.memory(), *model_, pieces(live));
  sleep(model_, host());
  const std::size_t of_one = host_bytes();
  wake(model_);
  for (std::size_t cycle = 0; cycle + 1 < live.size(); ++cycle) {
    const std::vector<Live> trained(live.begin() + static_cast<std::ptrdiff_t>(cycle) + 1, live.end());
    unseal_pages(lab_.memory(), *model_, pieces(trained));
    seal_pages(lab_.memory(), *model_, pieces(trained));
    sleep(model_, host());
    wake(model_);
    std::printf("cycle %zu: %zu MiB of host memory for %zu MiB of weights\n", cycle, host_bytes() / kMiB,
                of_one / kMiB);
  }
  EXPECT_LE(host_bytes(), 2 * of_one);
  unseal_pages(lab_.memory(), *model_, pieces(live));
}

// One sealed tensor keeps the backup of the whole part.
TEST_F(SleepEdges, WhatIsNotSealedIsNotKept) {
  const auto weights = lab_.memory().tagged(model_, "weights");
  const Live sealed{lab_.allocate(*weights, 32 * kMiB), 32 * kMiB, 1};
  std::vector<Address> others;
  for (int k = 0; k < 8; ++k) others.push_back(lab_.allocate(*weights, 32 * kMiB));
  seal_pages(lab_.memory(), *model_, pieces({sealed}));
  sleep(model_, host());
  wake(model_);
  EXPECT_LE(host_bytes(), 64 * kMiB) << "for 32 MiB that are sealed";
  unseal_pages(lab_.memory(), *model_, pieces({sealed}));
}

// What was kept in host memory can never be used again once its chunks have gone.
TEST_F(SleepEdges, InAFileNothingStaysInTheHostsMemory) {
  const auto weights = lab_.memory().tagged(model_, "weights");
  std::vector<Live> live = fill(*weights);
  seal_pages(lab_.memory(), *model_, pieces(live));
  sleep(model_, host());
  wake(model_);
  sleep(model_, file());
  EXPECT_EQ(host_bytes(), 0U) << "while it sleeps in a file";
  wake(model_);
  EXPECT_EQ(host_bytes(), 0U);
  sleep(model_, host());
  wake(model_);
  sleep(model_, discard());
  EXPECT_EQ(host_bytes(), 0U) << "of contents that were thrown away";
  wake(model_);
  unseal_pages(lab_.memory(), *model_, pieces(live));
}

// A device full of others' idle memory, and chunks that are borders of blocks (NCCL's hook, a
// MemPool): all of it would do.
TEST(WakeEdges, WhereBlocksLieWithinChunksAFullDeviceGivesWhatItHasIdle) {
  LabSpec spec;
  spec.device_bytes = 64 * kMiB;
  Lab lab(spec);
  Sleeper sleeper(lab.memory());
  {
    const auto a = lab.pool("a");
    const auto b = lab.pool("b");
    lab.memory().keep_blocks_within_chunks();
    std::vector<Address> blocks;
    for (int k = 0; k < 3; ++k) blocks.push_back(lab.allocate(*a, 16 * kMiB));
    for (const Address each : blocks) Lab::fill(each, 16 * kMiB, 7);
    Transfer out(std::make_unique<Departure>(sleeper, std::vector<PartToSleep>{{a, Places{Place{}}}}, true), nullptr);
    out.begin(&look_away);
    out.run(&look_away);
    ASSERT_EQ(a->physical_bytes(), 0U);
    lab.leave_idle(*b, 40 * kMiB);
    lab.leave_idle(*b, 60 * kMiB);
    Transfer in(nullptr, std::make_unique<Arrival>(sleeper, PoolList{a}, Arrival::Memory::collected));
    try {
      in.begin(&look_away);
      in.run(&look_away);
    } catch (const OutOfMemoryError& error) {
      ADD_FAILURE() << "first: " << error.what();
      Transfer again(nullptr, std::make_unique<Arrival>(sleeper, PoolList{a}, Arrival::Memory::collected));
      try {
        again.begin(&look_away);
        again.run(&look_away);
      } catch (const OutOfMemoryError& second) {
        ADD_FAILURE() << "again: " << second.what();
      }
    }
    EXPECT_FALSE(a->is_asleep());
  }
  lab.close();
}

// Between the look at who is in it and the mark that it takes no requests.
TEST_F(SleepEdges, WhoComesInMeanwhileIsLookedForAgain) {
  const auto weights = lab_.memory().tagged(model_, "weights");
  const std::vector<Live> live = fill(*weights);
  int asked = 0;
  bool leaves = false;
  const auto comes_in = [&](const Pool& pool) {
    EXPECT_FALSE(pool.is_asleep());
    if (pool.tag().empty()) return 0;
    ++asked;
    if (asked == 2) weights->note_entered();
    if (asked == 3 && !leaves) throw VmmError("it is entered");
    if (asked == 3) weights->note_left();
    return 0;
  };
  const auto goes = [&] {
    asked = 0;
    Transfer out(std::make_unique<Departure>(
                     sleeper_, std::vector<PartToSleep>{{model_, Places{Place{}}}, {weights, Places{Place{}}}},
                     /*release=*/false, comes_in),
                 nullptr);
    go(out);
  };
  EXPECT_THROW(goes(), VmmError);
  EXPECT_EQ(asked, 3);
  EXPECT_FALSE(model_->is_asleep());
  EXPECT_FALSE(weights->is_asleep());
  expect_whole(live);
  weights->note_left();
  leaves = true;
  goes();
  EXPECT_EQ(asked, 3);
  EXPECT_TRUE(weights->is_asleep());
  wake(model_);
  expect_whole(live);
}

// Others free, close and limit between any two steps.
TEST_F(SleepEdges, OthersActBetweenAnyTwoCalls) {
  for (int where = 1; where < 60; where += 4) {
    const auto one = lab_.pool("one");
    const auto tag = lab_.memory().tagged(one, "t");
    std::vector<Live> live = fill(*tag, {512, 3 * kMiB, 40 * kMiB});
    std::vector<Live> own = fill(*one, {512, 3 * kMiB, 40 * kMiB});
    seal_pages(lab_.memory(), *one, pieces(live));
    int looks = 0;
    bool acted = false;
    const Look act = [&] {
      if (++looks != where) return;
      acted = true;
      DeviceMemory::free(lab_.space, live.back().address);
      lab_.forget(live.back().address);
      live.pop_back();
      DeviceMemory::free(lab_.space, own.front().address);
      lab_.forget(own.front().address);
      own.erase(own.begin());
      lab_.memory().trim(*one, 0);
      lab_.memory().empty_cache();
      sleeper_.release_host_memory(lab_.memory().budget());
      if (where % 3 == 0) lab_.memory().close_pool(*one, /*force=*/true);
    };
    try {
      go(*going({one}, host()), act);
      go(*coming(one), act);
      if (!one->is_closed()) {
        go(*going({one}, host()), act);
        go(*coming(one), act);
      }
    } catch (const VmmError& error) {
      ADD_FAILURE() << where << ": " << error.what();
    }
    lab_.memory().check();
    expect_whole(live);
    expect_whole(own);
    for (const Live& each : live) lab_.free(each.address);
    for (const Live& each : own) lab_.free(each.address);
    lab_.memory().close_pool(*one, /*force=*/true);
    lab_.memory().settle(/*wait=*/true);
    EXPECT_EQ(host_bytes(), 0U) << where;
    EXPECT_EQ(lab_.memory().pools().size(), 1U) << where;
    if (!acted || HasFailure()) break;
  }
}

}  // namespace
}  // namespace vmm::testing
