// One tensor's memory over two devices: whose it is, who reaches it, and that nothing is
// left or taken too early.
#include "core/faces/placed_memory.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "lab.h"
#include "lacking_memory.h"
#include "two_devices.h"

namespace vmm::testing {
namespace {

const Stream kOne = stream(0x10);
const Stream kTwo = stream(0x20);

TEST(PlacedMemory, IsOfEachDevicesPoolAndReachedByAll) {
  TwoDevices two;
  const auto here = two.lab.pool("here");
  const auto there = two.there("there");
  {
    const PlacedMemory memory({{here, 6 * kMiB, kOne}, {there, 4 * kMiB, kTwo}, {here, 3 * kMiB, kOne}});
    EXPECT_EQ(memory.size(), 14 * kMiB) << "whole pages";
    EXPECT_EQ(memory.shares(), 3U);
    EXPECT_TRUE(memory.is_on(two.lab.memory()) && memory.is_on(two.other()));
    EXPECT_TRUE(Lab::is_zero(memory.base(), 13 * kMiB));
    EXPECT_EQ(here->budget().used(), 10 * kMiB);
    EXPECT_EQ(there->budget().used(), 4 * kMiB);
    EXPECT_EQ(two.lab.memory().statistics_of(*here)[StatKind::allocated_bytes][0].current, 10 * kMiB);
    EXPECT_EQ(two.other().statistics_of(*there)[StatKind::allocated_bytes][0].current, 4 * kMiB);
    std::set<std::uint64_t> let_in;
    for (const CallRecord& call : two.lab.driver.calls(Call::set_access)) {
      if (call.a == memory.base() && call.b == memory.size()) let_in.insert(call.c);
    }
    EXPECT_EQ(let_in.size(), 2U) << "both devices";
    Lab::fill(memory.base(), 14 * kMiB, 1);
    EXPECT_TRUE(Lab::holds(memory.base(), 14 * kMiB, 1));
    two.check();
  }
  two.lab.memory().settle(/*wait=*/true);
  two.lab.memory().empty_cache();
  two.other().empty_cache();
  EXPECT_EQ(two.lab.driver.live_chunks(), 0U);
  EXPECT_EQ(two.lab.driver.live_mappings(), 0U);
}

TEST(PlacedMemory, OneDeviceMayHaveAllShares) {
  Lab lab;
  const auto pool = lab.pool("a", 8 * kMiB);
  {
    const PlacedMemory memory({{pool, 4 * kMiB, nullptr}, {pool, 4 * kMiB, nullptr}});
    Lab::fill(memory.base(), 8 * kMiB, 1);
    EXPECT_EQ(pool->budget().used(), 8 * kMiB);
  }
  const Address next = lab.allocate(*pool, 8 * kMiB);
  EXPECT_NE(next, 0U) << "its memory serves again";
}

TEST(PlacedMemory, AStreamThatNobodyKnewKeepsItFromOthers) {
  TwoDevices two;
  const auto here = two.lab.pool("here");
  const auto there = two.there("there");
  auto memory =
      std::make_unique<PlacedMemory>(std::vector<PlacedShare>{{here, 4 * kMiB, kOne}, {there, 4 * kMiB, kOne}});
  SecondMapping* const shown = two.other().second_mappings().at(memory->base() + 6 * kMiB);
  ASSERT_EQ(shown, memory.get());
  ASSERT_EQ(two.lab.memory().second_mappings().at(memory->base()), shown);
  shown->record_stream(kTwo, two.lab.memory().streams());
  two.lab.driver.hold_fences(kTwo);
  two.lab.driver.clear_calls();
  memory.reset();
  EXPECT_EQ(two.lab.driver.count(Call::unmap), 0U) << "it may read from both";
  two.lab.driver.release_fences();
  two.lab.memory().empty_cache();
  two.other().empty_cache();
  EXPECT_EQ(two.lab.driver.live_mappings(), 0U);
}

// What another group lacks there is held by the mapping alone.
TEST(PlacedMemory, ItsEndIsFoundByWhoeverLacksItOnEitherDevice) {
  TwoDevices two;
  const auto here = two.lab.pool("here");
  two.other().set_limit(two.other().budget(), 4 * kMiB);
  const auto there = two.there("there");
  const auto group = two.other().create_group("group", kUnlimited);
  const auto next = two.other().create_pool(Lab::spec("next"), group.get());
  two.lab.meet(kOne);
  auto memory =
      std::make_unique<PlacedMemory>(std::vector<PlacedShare>{{here, 4 * kMiB, kOne}, {there, 4 * kMiB, kTwo}});
  two.lab.driver.hold_fences(kOne);
  memory.reset();
  two.lab.driver.release_fences();
  const Address block = two.other().allocate(*next, 4 * kMiB, kTwo);
  EXPECT_NE(block, 0U);
  DeviceMemory::free(two.lab.space, block);
}

TEST(PlacedMemory, WhatCannotBeIsRefused) {
  TwoDevices two;
  const auto here = two.lab.pool("here");
  const auto there = two.there("there");
  EXPECT_THROW(PlacedMemory({}), InvalidArgumentError);
  EXPECT_THROW(PlacedMemory({{here, 3 * kMiB, kOne}, {there, 4 * kMiB, kTwo}}), InvalidArgumentError);
  EXPECT_THROW(PlacedMemory({{here, 4 * kMiB, kOne}, {there, 0, kTwo}}), InvalidArgumentError);
  Lab elsewhere;
  EXPECT_THROW(PlacedMemory({{here, 4 * kMiB, kOne}, {elsewhere.pool("x"), 4 * kMiB, kTwo}}), InvalidArgumentError);
  const auto closed = two.there("closed");
  two.other().close_pool(*closed, false);
  EXPECT_THROW(PlacedMemory({{here, 4 * kMiB, kOne}, {closed, 4 * kMiB, kTwo}}), InvalidArgumentError);
  EXPECT_EQ(here->budget().used(), 0U);
}

TEST(PlacedMemory, OneDevicesLimitUndoesAll) {
  TwoDevices two;
  const auto here = two.lab.pool("here");
  const auto there = two.there("there", 2 * kMiB);
  try {
    const PlacedMemory memory({{here, 8 * kMiB, kOne}, {there, 4 * kMiB, kTwo}});
    FAIL() << "above a limit";
  } catch (const OutOfMemoryError& error) {
    EXPECT_EQ(error.limit, 2 * kMiB);
  }
  EXPECT_EQ(two.lab.memory().statistics_of(*here)[StatKind::allocated_bytes][0].current, 0);
  EXPECT_EQ(here->live_bytes(), 0U);
  two.lab.memory().empty_cache();
  two.other().empty_cache();
  EXPECT_EQ(two.lab.driver.live_chunks(), 0U);
  two.check();
}

// Each driver call in turn: nothing is left of it, and the next one works.
TEST(PlacedMemory, AFailedOneLeavesNothing) {
  for (std::uint64_t nth = 1;; ++nth) {
    SCOPED_TRACE("call " + std::to_string(nth));
    TwoDevices two;
    const auto here = two.lab.pool("here");
    const auto there = two.there("there");
    const std::size_t reservations = two.lab.driver.live_reservations();
    two.lab.driver.fail_nth_call(nth, broken());
    bool failed = false;
    try {
      const PlacedMemory memory({{here, 6 * kMiB, kOne}, {there, 4 * kMiB, kTwo}});
      Lab::fill(memory.base(), 10 * kMiB, nth);
    } catch (const VmmError&) {
      failed = true;
    }
    const bool any = two.lab.driver.failures() != 0;
    two.lab.driver.clear_failures();
    for (int attempt = 0; attempt < 2; ++attempt) {
      two.lab.memory().empty_cache();
      two.other().empty_cache();
    }
    EXPECT_EQ(two.lab.driver.live_mappings(), 0U);
    EXPECT_EQ(two.lab.driver.live_chunks(), 0U);
    EXPECT_LE(two.lab.driver.live_reservations(), reservations + (failed ? 1U : 0U)) << "at most addresses";
    two.check();
    const PlacedMemory memory({{here, 6 * kMiB, kOne}, {there, 4 * kMiB, kTwo}});
    Lab::fill(memory.base(), 10 * kMiB, nth);
    if (!any) break;
  }
}

// Each allocation of the host's in turn.
TEST(PlacedMemory, OneThatTheHostHasNoMemoryForLeavesNothing) {
  bool failed = true;
  for (long nth = 0; failed; ++nth) {
    SCOPED_TRACE("allocation " + std::to_string(nth));
    TwoDevices two;
    const auto here = two.lab.pool("here");
    const auto there = two.there("there");
    failed = runs_out_at(nth,
                         [&] {
                           const PlacedMemory memory({{here, 6 * kMiB, kOne}, {there, 4 * kMiB, kTwo}});
                         }) ||
             failures_made != 0;
    for (int attempt = 0; attempt < 2; ++attempt) {
      two.lab.memory().empty_cache();
      two.other().empty_cache();
    }
    EXPECT_EQ(two.lab.driver.live_mappings(), 0U);
    EXPECT_EQ(two.lab.driver.live_chunks(), 0U);
    EXPECT_EQ(two.lab.memory().pools().size() + two.other().pools().size(), 2U);
    two.check();
  }
}

// Whoever reads it on whichever device comes before the next owner of its memory.
TEST(PlacedMemory, GoesBehindTheWorkOfEachDevice) {
  for (const int reader : {0, 1}) {
    SCOPED_TRACE("reader on device " + std::to_string(reader));
    TwoDevices two;
    const Stream on = reader == 0 ? kOne : kTwo;
    two.lab.memory().streams().meet(kOne);
    two.other().streams().meet(kTwo);
    const auto here = two.lab.pool("here", 4 * kMiB);
    const auto there = two.there("there", 4 * kMiB);
    auto memory =
        std::make_unique<PlacedMemory>(std::vector<PlacedShare>{{here, 4 * kMiB, kOne}, {there, 4 * kMiB, kTwo}});
    two.lab.driver.hold_fences(on);
    two.lab.driver.clear_calls();
    memory.reset();
    two.lab.memory().settle(/*wait=*/false);
    EXPECT_EQ(two.lab.driver.count(Call::unreserve), 0U) << "its addresses are in use";
    EXPECT_EQ(two.lab.driver.count(Call::wait), 0U) << "the end waits for nobody";
    // The memory of either device is given away behind the reader.
    two.lab.memory().allocate(*two.lab.pool("next"), 2 * kMiB, stream(0x30));
    two.lab.driver.clear_calls();
    const Address mine = two.lab.memory().allocate(*here, 4 * kMiB, stream(0x30));
    const Address others = two.other().allocate(*there, 4 * kMiB, stream(0x40));
    EXPECT_GE(two.lab.driver.count(Call::stream_wait) + two.lab.driver.count(Call::wait), 2U);
    two.lab.driver.release_fences();
    EXPECT_TRUE(DeviceMemory::free(two.lab.space, mine));
    EXPECT_TRUE(DeviceMemory::free(two.lab.space, others));
    for (const auto& pool : two.lab.memory().pools()) {
      for (const Address address : pool->live_addresses()) DeviceMemory::free(two.lab.space, address);
    }
  }
}

// What one device zeroes the other may read: its stream waits for that.
TEST(PlacedMemory, EachStreamComesAfterTheZeroingOfTheOthers) {
  TwoDevices two;
  const auto here = two.lab.pool("here");
  const auto there = two.there("there");
  const PlacedMemory memory({{here, 4 * kMiB, kOne}, {there, 4 * kMiB, kTwo}});
  std::set<std::uint64_t> waited;
  for (const CallRecord& call : two.lab.driver.calls(Call::stream_wait)) waited.insert(call.a);
  EXPECT_EQ(waited, (std::set<std::uint64_t>{number(kOne), number(kTwo)}));
}

TEST(PlacedMemory, LivesOnWhenAPoolIsClosedByForce) {
  TwoDevices two;
  const auto here = two.lab.pool("here");
  const auto there = two.there("there");
  auto memory =
      std::make_unique<PlacedMemory>(std::vector<PlacedShare>{{here, 4 * kMiB, kOne}, {there, 4 * kMiB, kTwo}});
  EXPECT_THROW(two.other().close_pool(*there, /*force=*/false), StillInUseError);
  two.other().close_pool(*there, /*force=*/true);
  Lab::fill(memory->base(), 8 * kMiB, 3);
  EXPECT_TRUE(Lab::holds(memory->base(), 8 * kMiB, 3));
  memory.reset();
}

}  // namespace
}  // namespace vmm::testing
