// The host's memory ends while a pool's moves about, waits or leaves: each step of it fails
// in turn, and nothing is lost, charged twice or half done.
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/faces/memory_pool.h"
#include "core/faces/tensor_alias.h"
#include "cpp/lab.h"
#include "cpp/lacking_memory.h"

namespace vmm::testing {
namespace {

const Stream kOwner = stream(0x10);
const Stream kOne = stream(0x20);
const Stream kTwo = stream(0x30);

// Two models under one limit of 32 MiB.
struct Two {
  Two() {
    for (const Stream each : {kOwner, kOne, kTwo}) lab.meet(each);
  }
  static PoolSpec spec(const std::string& name) {
    PoolSpec made = Lab::spec(name);
    made.page_size = kPage;
    return made;
  }
  // What every failure has to leave as it was.
  void check() {
    lab.memory().check();
    EXPECT_EQ(lab.memory().budget().used(), lab.driver.live_chunk_bytes());
    EXPECT_LE(group->used(), group->limit());
  }

  Lab lab;
  const std::shared_ptr<Budget> group = lab.memory().create_group("both", 32 * kMiB);
  const std::shared_ptr<Pool> first = lab.pool(spec("first"), group.get());
  const std::shared_ptr<Pool> second = lab.pool(spec("second"), group.get());
};

// `prepare`, then `step` with each of its allocations failing in turn, then the same again
// without a failure. Returns how many there were.
long all_or_nothing(const std::function<void(Two&)>& prepare, const std::function<void(Two&)>& step,
                    const std::function<void(Two&)>& holds_after) {
  bool failed = true;
  long nth = 0;
  for (; failed; ++nth) {
    SCOPED_TRACE("allocation " + std::to_string(nth));
    Two two;
    prepare(two);
    two.check();
    const bool ran_out = runs_out_at(nth, [&] { step(two); });
    failed = failures_made != 0;
    two.check();
    if (ran_out) step(two);
    two.check();
    holds_after(two);
    if (::testing::Test::HasFailure()) break;
  }
  return nth - 1;
}

TEST(LackingMemoryOfMoves, AChunkThatGoesToAnotherModelIsLostByNobody) {
  Address taken = 0;
  const long asked = all_or_nothing(
      [](Two& two) {
        two.lab.leave_idle(*two.first, 20 * kMiB, kOwner);
        two.lab.leave_idle(*two.second, 12 * kMiB, kOwner);
      },
      [&](Two& two) { taken = two.lab.memory().allocate(*two.second, 24 * kMiB, kOwner); },
      [&](Two& two) {
        EXPECT_GE(two.second->physical_bytes(), 24 * kMiB);
        Lab::fill(taken, 24 * kMiB, 7);
        EXPECT_TRUE(Lab::holds(taken, 24 * kMiB, 7));
        EXPECT_TRUE(DeviceMemory::free(two.lab.space, taken));
      });
  EXPECT_GT(asked, 0) << "nothing was asked for, so nothing was tried";
}

// Of one far larger than the request, which is to go back to the driver: beside so many streams a tick is
// made only then.
TEST(LackingMemoryOfMoves, ALargeChunkIsLostByNobody) {
  constexpr std::size_t kLoaded = 20 * 256 * kMiB;
  LabSpec roomy;
  roomy.device_bytes = 2 * kLoaded;
  bool failed = true;
  long nth = 0;
  for (; failed; ++nth) {
    SCOPED_TRACE("allocation " + std::to_string(nth));
    Lab lab(roomy);
    for (std::uintptr_t k = 0; k < 100; ++k) lab.meet(stream(0x1000 + k));
    const auto group = lab.memory().create_group("both", kLoaded);
    PoolSpec spec = Lab::spec("large");
    spec.capacity = roomy.device_bytes;
    const auto large = lab.pool(spec, group.get());
    lab.leave_idle(*large, kLoaded, stream(0x1000));
    const auto small = lab.pool(Lab::spec("small"), group.get());
    Address block = 0;
    const auto ask = [&] { block = lab.memory().allocate(*small, 4 * kMiB, stream(0x1001)); };
    const bool ran_out = runs_out_at(nth, ask);
    failed = failures_made != 0;
    const auto is_all_held = [&] {
      return large->physical_bytes() + small->physical_bytes() + lab.memory().store().shelved_bytes(*group) ==
             group->used();
    };
    EXPECT_TRUE(is_all_held());
    if (ran_out) ask();
    EXPECT_TRUE(is_all_held());
    EXPECT_TRUE(DeviceMemory::free(lab.space, block));
  }
  EXPECT_GT(nth, 60);
}

TEST(LackingMemoryOfMoves, AChunkThatMovesWithinItsPoolStaysThere) {
  Address taken = 0;
  std::vector<Address> apart;
  const long asked = all_or_nothing(
      [&](Two& two) {
        apart.clear();
        for (int k = 0; k < 8; ++k) apart.push_back(two.lab.allocate(*two.first, 4 * kMiB, kOwner));
        for (int k = 0; k < 8; k += 2) two.lab.free(apart[static_cast<std::size_t>(k)]);
      },
      [&](Two& two) { taken = two.lab.memory().allocate(*two.first, 12 * kMiB, kOwner); },
      [&](Two& two) {
        EXPECT_GE(two.first->physical_bytes(), 28 * kMiB);  // a chunk may rest on the shelf now
        EXPECT_TRUE(DeviceMemory::free(two.lab.space, taken));
      });
  EXPECT_GT(asked, 0) << "nothing was asked for, so nothing was tried";
}

TEST(LackingMemoryOfMoves, IdleMemoryGoesBackOrStays) {
  const long asked = all_or_nothing(
      [](Two& two) {
        two.lab.leave_idle(*two.first, 16 * kMiB, kOwner);
        two.lab.leave_idle(*two.second, 8 * kMiB, kOwner);
      },
      [](Two& two) { two.lab.memory().empty_cache(); },
      [](Two& two) {
        two.lab.memory().empty_cache();
        EXPECT_EQ(two.lab.driver.live_chunk_bytes(), 0U);
      });
  EXPECT_GT(asked, 0) << "nothing was asked for, so nothing was tried";
}

TEST(LackingMemoryOfMoves, PagesByHandComeAndGo) {
  const long asked = all_or_nothing([](Two& two) { two.lab.leave_idle(*two.second, 16 * kMiB, kOwner); },
                                    [](Two& two) {
                                      if (two.first->live_blocks() == 0)
                                        two.lab.memory().allocate_pages(*two.first, 0, 24 * kMiB, kOwner);
                                      two.lab.memory().deallocate_pages(*two.first, 0, 24 * kMiB);
                                    },
                                    [](Two& two) { EXPECT_EQ(two.first->live_blocks(), 0U); });
  EXPECT_GT(asked, 0) << "nothing was asked for, so nothing was tried";
}

// A free that cannot be noted has not been made.
TEST(LackingMemoryOfMoves, PagesOfAClosedPoolGoAfterTheAliasThatHeldThem) {
  bool is_reached = true;
  for (long nth = 0; is_reached && !::testing::Test::HasFailure(); ++nth) {
    SCOPED_TRACE("allocation " + std::to_string(nth));
    Lab lab;
    const auto opener = lab.pool("opener");
    auto pool = lab.pool("a");
    lab.memory().allocate_pages(*pool, 0, 4 * kPage, nullptr);
    const std::vector<AliasedPiece> shown{{pool->base() + kPage, kPage}};
    auto alias = std::make_unique<TensorAlias>(lab.memory(), opener, shown, 2, /*read_only=*/false);
    lab.memory().close_pool(*pool, /*force=*/true);
    pool.reset();
    is_reached = reaches(nth, [&] { alias.reset(); });
    lab.memory().empty_cache();
    EXPECT_EQ(lab.memory().pools().size(), 1U);
    EXPECT_EQ(lab.memory().committed_bytes(), 0U);
  }
}

TEST(LackingMemoryOfMoves, ABlockThatOthersReadIsFreedOrStays) {
  Address block = 0;
  const long asked = all_or_nothing(
      [&](Two& two) {
        block = two.lab.memory().allocate(*two.first, 4 * kMiB, kOwner);
        for (const Stream reader : {kOne, kTwo}) two.first->record_stream(block, reader);
        two.lab.driver.hold_fences(kOne);
      },
      [&](Two& two) {
        const std::size_t live = two.first->live_blocks();
        try {
          EXPECT_TRUE(DeviceMemory::free(two.lab.space, block));
        } catch (...) {
          EXPECT_EQ(two.first->live_blocks(), live);
          throw;
        }
      },
      [](Two& two) {
        EXPECT_EQ(two.first->memory_stats().quarantined_bytes, 4 * kMiB);
        two.lab.driver.release_fences();
        two.first->settle();
        EXPECT_EQ(two.first->memory_stats().quarantined_bytes, 0U);
        EXPECT_EQ(two.first->live_blocks(), 0U);
      });
  EXPECT_GT(asked, 0) << "nothing was asked for, so nothing was tried";
}

TEST(LackingMemoryOfMoves, WhatHasPassedIsFreedNowOrLater) {
  const long asked = all_or_nothing(
      [](Two& two) {
        two.lab.driver.hold_fences(kOne);
        for (const std::size_t bytes : {2 * kMiB, 4 * kMiB, 6 * kMiB}) {
          const Address block = two.lab.memory().allocate(*two.first, bytes, kOwner);
          for (const Stream reader : {kOne, kTwo}) two.first->record_stream(block, reader);
          EXPECT_TRUE(DeviceMemory::free(two.lab.space, block));
        }
        EXPECT_EQ(two.first->memory_stats().quarantined_bytes, 12 * kMiB);
        two.lab.driver.release_fences();
      },
      [](Two& two) { two.first->settle(); },
      [](Two& two) { EXPECT_EQ(two.first->memory_stats().quarantined_bytes, 0U); });
  EXPECT_EQ(asked, 0) << "what ends a free asks for no memory";
}

// Its group's shelf cannot be made: the chunk goes back to the driver, or waits until it can.
TEST(LackingMemoryOfMoves, AChunkWithoutAShelfGoesBackToTheDriver) {
  for (const bool is_mapped : {false, true}) {
    Lab lab;
    ChunkStore& store = lab.memory().store();
    const auto group = lab.memory().create_group("group", kGiB);
    Chunk* chunk = nullptr;
    ASSERT_TRUE(store.create(store.spec(kPage), *group, &chunk, nullptr).ok());
    if (is_mapped) chunk->note_mapped();
    chunk->last_use = 1;
    EXPECT_TRUE(reaches(0, [&] { store.put(*group, chunk); }));
    EXPECT_EQ(store.shelved_bytes(*group), is_mapped ? kPage : 0U);
    EXPECT_EQ(store.waiting(*group, kLongAgo).bytes, is_mapped ? kPage : 0U);
    EXPECT_EQ(store.all_shelved_bytes(), is_mapped ? kPage : 0U);
    EXPECT_EQ(group->used(), is_mapped ? kPage : 0U);
    if (!is_mapped) continue;
    EXPECT_FALSE(store.forget(*group));
    chunk->note_unmapped();
    EXPECT_EQ(store.trim(*group, 0), kPage);
    EXPECT_EQ(group->used(), 0U);
    EXPECT_TRUE(store.forget(*group));
  }
}

// What a look at the threshold lacks is no failure of the request or the free that it
// follows: the buffer would be nobody's, or be freed twice.
TEST(LackingMemoryOfBuffers, WhatALookLacksFailsNobody) {
  using std::chrono::milliseconds;
  for (const bool frees : {false, true}) {
    bool is_reached = true;
    for (long nth = 0; is_reached; ++nth) {
      SCOPED_TRACE((frees ? "free, allocation " : "request, allocation ") + std::to_string(nth));
      Lab lab;
      MemoryPool::Time time{milliseconds(1)};
      MemoryPool pool(lab.memory(), [&] { return time; });
      pool.set_threshold(0);
      std::vector<Address> idle;
      for (int k = 0; k < 8; ++k) idle.push_back(pool.allocate(4 * kMiB, kOwner));
      std::vector<Address> live{pool.allocate(2 * kMiB, kOwner)};
      for (const Address buffer : idle) pool.free(buffer);
      pool.record_stream(live.back(), kTwo);  // its free has to be noted
      time += milliseconds(1500);
      pool.free(pool.allocate(2 * kMiB, kOwner));
      time += milliseconds(1500);
      Address made = 0;
      const bool has_failed = runs_out_at(nth, [&] {
        if (!frees) {
          made = pool.allocate(2 * kMiB, kOwner);
        } else {
          pool.free(live.back());
          live.pop_back();
        }
      });
      if (made != 0) live.push_back(made);
      is_reached = failures_made != 0;
      EXPECT_EQ(pool.stats().allocated_bytes, live.size() * 2 * kMiB) << (has_failed ? "as it was" : "done");
      lab.memory().check();
      for (const Address buffer : live) pool.free(buffer);
      time += milliseconds(1000);
      EXPECT_EQ(pool.stats().cached_bytes, 0U) << "the next look gives back what this one could not";
      pool.close(/*force=*/false);
    }
  }
}

// What is looked at after a free, with no lock held, is given on whatever lacks: else whoever
// climbs to the last rung would wait for it for ever.
class LackingMemoryOfDebugMode : public ::testing::TestWithParam<const char*> {};

TEST_P(LackingMemoryOfDebugMode, AFreedBlockIsLookedAtAndGoesOn) {
  LabSpec spec;
  spec.options.debug = parse_debug_mode(GetParam());
  bool failed = true;
  for (long nth = 0; failed && !HasFailure(); ++nth) {
    SCOPED_TRACE("allocation " + std::to_string(nth));
    Lab lab(spec);
    const auto pool = lab.pool("a");
    const Address block = lab.allocate(*pool, 3 * kMiB);
    failed = false;
    try {
      failed = runs_out_at(nth, [&] { lab.free(block); }) || failures_made != 0;
      if (pool->live_blocks() != 0) lab.free(block);
    } catch (const VmmError& error) {
      ADD_FAILURE() << error.what();
    }
    lab.memory().settle(/*wait=*/true);
    EXPECT_FALSE(pool->is_being_judged());
    EXPECT_EQ(pool->memory_stats().quarantined_bytes, 0U);
    lab.memory().check();
  }
}

INSTANTIATE_TEST_SUITE_P(, LackingMemoryOfDebugMode, ::testing::Values("guard", "canary"));

}  // namespace
}  // namespace vmm::testing
