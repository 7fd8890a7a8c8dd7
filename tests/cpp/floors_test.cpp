// A floor is a reservation: others neither take what a model has of it nor grow into what is
// left. The sums are Budget's (budget_test); here is what they mean for pools.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/faces/shared_memory_pool.h"
#include "cpp/reclaim_lab.h"

namespace vmm::testing {
namespace {

class Floors : public Reclaim {
 protected:
  std::string refusal_of(Pool& pool, std::size_t bytes) {
    try {
      lab_.allocate(pool, bytes);
    } catch (const OutOfMemoryError& error) {
      return error.what();
    }
    return "";
  }
};

TEST_F(Floors, NobodyGrowsIntoWhatIsLeftOfOne) {
  const auto a = model("a");
  const auto b = model("b", kPage, 0, /*floor=*/20 * kMiB);
  lab_.allocate(*a, 12 * kMiB);
  const std::string text = refusal_of(*a, 2 * kMiB);
  EXPECT_NE(text.find("the shared pool: limit 32 MiB, mapped 12 MiB, reserved by floors 20 MiB"), std::string::npos)
      << text;
  EXPECT_NE(text.find("'b' 0 B in use (its floor of 20 MiB reserves another 20 MiB)"), std::string::npos) << text;
  EXPECT_NE(text.find("give 'b' a lower floor: it keeps 20 MiB"), std::string::npos) << text;
  lab_.allocate(*b, 20 * kMiB);
  EXPECT_NE(refusal_of(*b, 2 * kMiB), "") << "beyond its floor it is as anybody";
}

TEST_F(Floors, WhatRestsOnTheShelfIsThereForWhoeverReservedIt) {
  const auto a = model("a");
  const auto b = model("b", kPage, 0, /*floor=*/20 * kMiB);
  lab_.leave_idle(*a, 12 * kMiB);
  a->shed(0);
  lab_.driver.clear_calls();
  lab_.allocate(*b, 20 * kMiB);
  EXPECT_EQ(group_.used(), 20 * kMiB) << "of the shelf, and no more";
}

TEST_F(Floors, AModelWithinItsFloorGrowsWhileOthersFillTheRest) {
  const auto a = model("a");
  const auto b = model("b", kPage, 0, /*floor=*/20 * kMiB);
  lab_.leave_idle(*a, 12 * kMiB);
  lab_.allocate(*b, 20 * kMiB);
  EXPECT_EQ(bytes(a), 12 * kMiB) << "it needs nothing of it";
}

TEST_F(Floors, WhatAModelFreesWithinItsFloorStaysItsOwn) {
  const auto a = model("a");
  const auto b = model("b", kPage, 0, /*floor=*/20 * kMiB);
  lab_.allocate(*a, 12 * kMiB);
  lab_.leave_idle(*b, 20 * kMiB);
  EXPECT_NE(refusal_of(*a, 2 * kMiB), "") << "idle";
  b->shed(0);
  EXPECT_NE(refusal_of(*a, 2 * kMiB), "") << "on the shelf";
  lab_.memory().empty_cache();
  EXPECT_NE(refusal_of(*a, 2 * kMiB), "") << "given back";
  lab_.allocate(*b, 20 * kMiB);
}

TEST_F(Floors, OneThatIsRaisedComesAtOnceAsFarAsOthersAreIdle) {
  const auto a = model("a");
  const auto b = model("b");
  const Address used = lab_.allocate(*a, 12 * kMiB);
  lab_.leave_idle(*a, 20 * kMiB);
  EXPECT_EQ(lab_.memory().set_floor(*b, 24 * kMiB), 0U) << "the memory is within the limit: on the shelf, for b";
  EXPECT_EQ(bytes(a), 12 * kMiB);
  EXPECT_EQ(group_.excess_claims(), 4 * kMiB) << "what a uses";
  lab_.allocate(*b, 20 * kMiB);
  EXPECT_NE(refusal_of(*b, 2 * kMiB), "");
  lab_.free(used);
  EXPECT_EQ(group_.excess_claims(), 0U) << "given as it was freed";
  lab_.allocate(*b, 4 * kMiB);
  EXPECT_NE(refusal_of(*a, 10 * kMiB), "");
  lab_.allocate(*a, 8 * kMiB);
}

// What was registered comes as what was set.
TEST_F(Floors, OneThatIsRegisteredOverHeldMemoryComesAsItIsFreed) {
  const auto c = model("c");
  const Address used = lab_.allocate(*c, 32 * kMiB);
  const auto a = model("a", kPage, 0, /*floor=*/20 * kMiB);
  lab_.memory().enforce_floor(a->budget());
  lab_.free(used);
  EXPECT_NE(refusal_of(*c, 14 * kMiB), "");
  lab_.allocate(*c, 12 * kMiB);
  lab_.allocate(*a, 20 * kMiB);
}

TEST_F(Floors, NoMoreThanTheDeviceHasIsReserved) {
  PoolSpec spec = Lab::spec("a");
  spec.floor = std::size_t{1} << 50U;
  EXPECT_THROW(lab_.pool(spec), InvalidArgumentError);
}

TEST_F(Floors, IdleMemoryIsFoundBesideOnesThatALimitHasCutShort) {
  const auto a = model("a", kPage, 0, /*floor=*/20 * kMiB);
  const auto b = model("b");
  const auto c = model("c");
  lab_.memory().set_limit(a->budget(), 8 * kMiB);
  lab_.leave_idle(*c, 24 * kMiB);
  lab_.allocate(*b, 24 * kMiB);
}

TEST_F(Floors, WithinItsFloorAModelClimbsUnderALoweredLimitToo) {
  const auto c = model("c");
  const auto a = model("a", 4 * kMiB, 0, /*floor=*/20 * kMiB);
  const auto b = model("b", kPage, 0, /*floor=*/12 * kMiB);
  lab_.memory().set_limit(group_, 16 * kMiB);
  lab_.leave_idle(*b, 12 * kMiB);
  lab_.memory().set_floor(*b, 0);
  lab_.allocate(*a, 8 * kMiB);
  EXPECT_LE(group_.used(), 16 * kMiB);
}

TEST_F(Floors, ThreadsKeepBlocksWhereNothingIsAboveALoweredLimit) {
  const auto a = model("a", kPage, 0, /*floor=*/20 * kMiB);
  const auto b = model("b", kPage, 0, /*floor=*/10 * kMiB);
  lab_.memory().set_limit(group_, 16 * kMiB);
  const auto other = lab_.pool("other");
  lab_.leave_idle(*other, 512);
  lab_.leave_idle(*other, 512);
  const Address kept = lab_.memory().take_kept(*other, 512, nullptr);
  EXPECT_NE(kept, 0U);
  if (kept != 0) lab_.adopt(kept);
}

TEST_F(Floors, NobodyIsShedBeneathItsOwn) {
  const auto a = model("a");
  const auto b = model("b", 4 * kMiB, -1, /*floor=*/14 * kMiB);
  const auto c = model("c");
  lab_.leave_idle(*b, 16 * kMiB);
  lab_.leave_idle(*c, 16 * kMiB);
  lab_.memory().set_floor(*a, 8 * kMiB);
  EXPECT_EQ(bytes(b), 16 * kMiB) << "no chunk of 4 MiB is above it";
  EXPECT_LE(bytes(c), 8 * kMiB);
  EXPECT_FALSE(group_.is_over());
}

TEST_F(Floors, ThoseAboveALimitTogetherAreRefusedAndNothingIsMade) {
  const auto a = model("a", kPage, 0, /*floor=*/20 * kMiB);
  const std::size_t pools = lab_.memory().pools().size();
  EXPECT_THROW(model("b", kPage, 0, /*floor=*/14 * kMiB), InvalidArgumentError);
  EXPECT_EQ(lab_.memory().pools().size(), pools);
  EXPECT_EQ(group_.floors(), 20 * kMiB);
  const auto b = model("b", kPage, 0, /*floor=*/12 * kMiB);
  EXPECT_THROW(lab_.memory().set_floor(*a, 22 * kMiB), InvalidArgumentError);
  EXPECT_EQ(a->floor(), 20 * kMiB);
  EXPECT_THROW(lab_.memory().set_floor(*a, std::size_t{1} << 60U), InvalidArgumentError);
  EXPECT_THROW(lab_.memory().set_floor(*a, kUnlimited), InvalidArgumentError);
}

TEST_F(Floors, OneEndsWithItsModelAlsoWhileItsTensorsLive) {
  const auto a = model("a");
  const auto b = model("b", kPage, 0, /*floor=*/20 * kMiB);
  lab_.allocate(*b, 4 * kMiB);
  lab_.memory().close_pool(*b, /*force=*/true);
  EXPECT_EQ(group_.floors(), 0U);
  lab_.allocate(*a, 28 * kMiB);
  EXPECT_THROW(lab_.memory().set_floor(*b, 2 * kMiB), InvalidArgumentError);
}

TEST_F(Floors, ALimitThatIsLoweredGoesBeforeThem) {
  const auto a = model("a", kPage, 0, /*floor=*/20 * kMiB);
  lab_.leave_idle(*a, 20 * kMiB);
  EXPECT_EQ(lab_.memory().set_limit(group_, 8 * kMiB), 12 * kMiB);
  EXPECT_EQ(group_.used(), 8 * kMiB);
  EXPECT_EQ(a->floor(), 20 * kMiB) << "it stands, for when there is more again";
  lab_.memory().set_limit(group_, 32 * kMiB);
  const auto b = model("b");
  EXPECT_NE(refusal_of(*b, 14 * kMiB), "");
  lab_.allocate(*b, 12 * kMiB);
}

TEST_F(Floors, UnderAModelsOwnLimitMoreIsNotReserved) {
  const auto a = model("a", kPage, 0, /*floor=*/20 * kMiB);
  const auto b = model("b");
  lab_.memory().set_limit(a->budget(), 8 * kMiB);
  lab_.allocate(*b, 24 * kMiB);
  EXPECT_NE(refusal_of(*b, 2 * kMiB), "");
  lab_.memory().set_limit(a->budget(), kUnlimited);
  lab_.allocate(*a, 8 * kMiB);
}

TEST_F(Floors, PartsOfAModelGrowWithinItsFloor) {
  const auto a = model("a");
  const auto b = model("b", kPage, 0, /*floor=*/20 * kMiB);
  const auto part = lab_.memory().create_part(b, {1, 1}, /*no_split=*/false);
  lab_.allocate(*a, 12 * kMiB);
  lab_.allocate(*part, 12 * kMiB);
  lab_.allocate(*b, 8 * kMiB);
  EXPECT_EQ(group_.used(), 32 * kMiB);
}

TEST_F(Floors, AGroupsKeepsPoolsBesideItOut) {
  SharedMemoryPool shared(lab_.memory(), 48 * kMiB);
  const auto a = shared.register_model("a", {.virtual_capacity = kGiB});
  const auto beside = lab_.pool("beside");
  lab_.memory().set_limit(lab_.memory().budget(), 64 * kMiB);
  shared.set_floor(40 * kMiB);
  EXPECT_NE(refusal_of(*beside, 26 * kMiB), "");
  lab_.leave_idle(*a, 48 * kMiB);
  lab_.allocate(*beside, 24 * kMiB);  // of what is idle above the group's floor
  EXPECT_EQ(bytes(a), 40 * kMiB);
  EXPECT_NE(refusal_of(*beside, 2 * kMiB), "");
  EXPECT_THROW(shared.set_floor(50 * kMiB), InvalidArgumentError);
  shared.close(/*force=*/true);
  EXPECT_EQ(lab_.memory().budget().floors(), 0U);
}

TEST_F(Floors, AGroupsPriorityCountsBesideOthers) {
  SharedMemoryPool shared(lab_.memory(), 48 * kMiB);
  const auto a = shared.register_model("a", {.virtual_capacity = kGiB});
  const auto beside = lab_.pool("beside");
  const auto asker = lab_.pool("asker");
  lab_.memory().set_limit(lab_.memory().budget(), 32 * kMiB);
  lab_.leave_idle(*a, 16 * kMiB);
  lab_.leave_idle(*beside, 16 * kMiB);
  shared.set_priority(1);
  lab_.allocate(*asker, 16 * kMiB);
  EXPECT_EQ(bytes(a), 16 * kMiB);
  EXPECT_EQ(bytes(beside), 0U);
}

TEST_F(Floors, EachFailingCallLeavesTheSumsRight) {
  bool failed = true;
  for (std::uint64_t nth = 1; failed; ++nth) {
    SCOPED_TRACE("call " + std::to_string(nth));
    Lab lab;
    const auto group = lab.memory().create_group("group", 32 * kMiB);
    PoolSpec spec = Lab::spec("b");
    const auto b = lab.pool(spec, group.get());
    const auto a = lab.pool(Lab::spec("a"), group.get());
    lab.leave_idle(*a, 20 * kMiB);
    const std::uint64_t failures = lab.driver.failures();
    lab.driver.fail_nth_call(nth, Status(StatusCode::driver_error, "scripted", 999, "SCRIPTED"));
    lab.memory().set_floor(*b, 24 * kMiB);
    try {
      lab.allocate(*b, 24 * kMiB);
    } catch (const VmmError&) {  // NOLINT(bugprone-empty-catch): the sums are what is asked
    }
    failed = lab.driver.failures() != failures;
    lab.driver.clear_failures();
    EXPECT_EQ(b->floor(), 24 * kMiB);
    EXPECT_EQ(group->reserved(), 24 * kMiB - std::min(24 * kMiB, b->budget().used()));
    EXPECT_LE(group->used(), 32 * kMiB);
    lab.memory().check();
  }
}

// While others take and give whatever there is, and floors elsewhere go up and down.
TEST_F(Floors, AReservationIsThereForThreads) {
  const auto keeper = model("keeper", kPage, 0, /*floor=*/8 * kMiB);
  const auto moving = model("moving");
  std::vector<std::shared_ptr<Pool>> others = {model("x"), model("y")};
  std::atomic<bool> ends{false};
  std::vector<std::thread> threads;
  for (const auto& other : others) {
    threads.emplace_back([&, other] {
      while (!ends) {
        std::vector<Address> held;
        try {
          while (held.size() < 20) held.push_back(lab_.memory().allocate(*other, 2 * kMiB, nullptr));
        } catch (const OutOfMemoryError&) {  // NOLINT(bugprone-empty-catch): as much as there is
        }
        for (const Address address : held) DeviceMemory::free(lab_.space, address);
      }
    });
  }
  threads.emplace_back([&] {
    while (!ends) {
      for (const std::size_t floor : {4 * kMiB, 12 * kMiB, std::size_t{0}}) lab_.memory().set_floor(*moving, floor);
    }
  });
  for (int turn = 0; turn < 100; ++turn) {
    // Others may hold what a floor was raised over, but the keeper's was there before them.
    const Address mine = lab_.memory().allocate(*keeper, 8 * kMiB, nullptr);
    DeviceMemory::free(lab_.space, mine);
    lab_.memory().trim(*keeper, 0);
  }
  ends = true;
  for (auto& thread : threads) thread.join();
  lab_.memory().check();
}

TEST(FloorsOfAFullDevice, SeveralChunksAtOnceDoNotGoBeneathOne) {
  LabSpec small;
  small.device_bytes = 64 * kMiB;
  Lab lab(small);
  PoolSpec spec = Lab::spec("keeper");
  spec.page_size = 2 * kMiB;
  spec.floor = 20 * kMiB;
  const auto keeper = lab.pool(spec);
  const auto asker = lab.pool(Lab::spec("asker"));
  const auto rest = lab.pool(Lab::spec("rest"));
  std::vector<Address> blocks;
  for (int k = 0; k < 16; ++k) blocks.push_back(lab.allocate(*keeper, 2 * kMiB));
  for (const Address each : blocks) lab.free(each);
  lab.allocate(*rest, 32 * kMiB);
  EXPECT_THROW(lab.allocate(*asker, 16 * kMiB), OutOfMemoryError);
  EXPECT_GE(keeper->physical_bytes(), 20 * kMiB);
}

}  // namespace
}  // namespace vmm::testing
