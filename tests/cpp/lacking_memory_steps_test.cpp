// The host's memory ends within a step of a pool, once or from some allocation on: nothing is
// lost, and nothing is two pools' at once. lacking_memory_moves_test has the hand-over itself.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <future>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cpp/lab.h"
#include "cpp/lacking_memory.h"

namespace vmm::testing {
namespace {

const Stream kOwner = stream(0x10);
const Stream kOne = stream(0x20);
const Stream kTwo = stream(0x30);
const Stream kNew = stream(0x40);

// Two models under one limit of 32 MiB, whose chunks are of any size.
struct Pair {
  Pair() {
    for (const Stream each : {kOwner, kOne, kTwo}) lab.meet(each);
  }
  void check() {
    for (const auto& pool : lab.memory().pools()) pool->settle();  // what lacked memory twice goes on here
    lab.memory().check();
    EXPECT_EQ(lab.memory().budget().used(), lab.driver.live_chunk_bytes());
    EXPECT_LE(group->used(), group->limit());
  }

  Lab lab;
  const std::shared_ptr<Budget> group = lab.memory().create_group("both", 32 * kMiB);
  std::shared_ptr<Pool> first = lab.pool(Lab::spec("first"), group.get());
  const std::shared_ptr<Pool> second = lab.pool(Lab::spec("second"), group.get());
  Address taken = 0;  // by the step
};

using Step = std::function<void(Pair&)>;

// `prepare`, then `step` with each of its allocations failing in turn, and so many of those
// that follow; then what has to hold.
void each_fails(const Step& prepare, const Step& step, const Step& holds_after, long times = 1) {
  bool failed = true;
  for (long nth = 0; failed && !::testing::Test::HasFailure(); ++nth) {
    SCOPED_TRACE("allocation " + std::to_string(nth));
    Pair pair;
    prepare(pair);
    runs_out_at(
        nth, [&] { step(pair); }, times);
    failed = failures_made != 0;
    if (pair.taken != 0) pair.lab.adopt(pair.taken);
    pair.check();
    holds_after(pair);
    pair.check();
  }
}

// Each stream keeps an empty slab, and all are given up before memory goes elsewhere.
TEST(LackingMemoryOfSteps, SlabsThatAreGivenUpAreLostByNobody) {
  const auto come_and_go = [](Pair& pair, std::size_t each) {
    std::vector<Address> blocks;
    for (int k = 0; k < 2; ++k) {
      for (const Stream stream : {kOwner, kOne, kTwo}) blocks.push_back(pair.lab.allocate(*pair.first, each, stream));
    }
    for (const Address block : blocks) pair.lab.free(block);
  };
  each_fails([&](Pair& pair) { come_and_go(pair, 600 * kKiB); }, [](Pair& pair) { pair.lab.memory().empty_cache(); },
             [&](Pair& pair) {
               come_and_go(pair, 900 * kKiB);
               pair.lab.memory().empty_cache();
               EXPECT_EQ(pair.lab.driver.live_chunk_bytes(), 0U);
             });
}

// Several pools are locked at once: none stays so where there was no memory for it.
TEST(LackingMemoryOfSteps, NoPoolStaysLocked) {
  bool failed = true;
  for (long nth = 0; failed; ++nth) {
    SCOPED_TRACE("allocation " + std::to_string(nth));
    Pair pair;
    std::vector<std::shared_ptr<Pool>> more;
    for (int k = 0; k < 6; ++k) more.push_back(pair.lab.pool(Lab::spec("m" + std::to_string(k)), pair.group.get()));
    std::thread([&] {  // one that has locked none before
      runs_out_at(nth, [&] { static_cast<void>(pair.lab.memory().group_stats(*pair.group)); });
      failed = failures_made != 0;
    })
        .join();
    std::promise<void> done;
    std::thread other([&] {
      for (const auto& pool : pair.lab.memory().pools()) pool->settle();
      done.set_value();
    });
    if (done.get_future().wait_for(std::chrono::seconds(20)) != std::future_status::ready) {
      std::fprintf(stderr, "allocation %ld: a pool stays locked\n", nth);
      std::abort();
    }
    other.join();
  }
}

// A step that lacks memory, and lacks it again where it is undone: its chunks are on the shelf,
// and the pool hands out none of the addresses at which they still stand.
TEST(LackingMemoryOfSteps, MemoryThatLacksTwiceIsNotTwoPools) {
  for (const long times : {1L, 2L, 3L, 1000000L}) {
    each_fails(
        [](Pair& pair) {
          std::vector<Address> apart;
          for (int k = 0; k < 8; ++k) apart.push_back(pair.lab.allocate(*pair.first, 4 * kMiB, kOwner));
          for (std::size_t k = 0; k < 8; k += 2) pair.lab.free(apart[k]);
        },
        [](Pair& pair) { pair.taken = pair.lab.memory().allocate(*pair.first, 11 * kMiB, kOwner); },
        [](Pair& pair) {
          pair.group->set_limit(200 * kMiB);
          std::vector<Address> blocks;
          for (int k = 0; k < 4; ++k) {
            blocks.push_back(pair.lab.allocate(*pair.second, 5 * kMiB, kOwner));
            blocks.push_back(pair.lab.allocate(*pair.first, 9 * kMiB, kOwner));
          }
          for (std::size_t k = 0; k < blocks.size(); ++k) Lab::fill(blocks[k], 5 * kMiB, k + 1);
          for (std::size_t k = 0; k < blocks.size(); ++k) EXPECT_TRUE(Lab::holds(blocks[k], 5 * kMiB, k + 1)) << k;
        },
        times);
  }
}

// The same after a call that the driver refuses.
TEST(LackingMemoryOfSteps, WhatTheDriverRefusesIsUndoneWithoutMemory) {
  for (const Call call : {Call::map, Call::set_access, Call::create}) {
    for (const unsigned which : {1U, 2U}) {
      SCOPED_TRACE(std::string(to_string(call)) + " " + std::to_string(which));
      each_fails(
          [&](Pair& pair) {
            pair.lab.leave_idle(*pair.first, 20 * kMiB, kOwner);
            pair.lab.leave_idle(*pair.second, 12 * kMiB, kOwner);
            pair.lab.driver.fail_nth(call, which, broken());
          },
          [](Pair& pair) {
            try {
              pair.taken = pair.lab.memory().allocate(*pair.second, 24 * kMiB, kOne);
            } catch (const VmmError&) {
              return;  // refused
            }
          },
          [](Pair& pair) { pair.lab.driver.clear_failures(); }, 1000000);
    }
  }
}

// At the last rung, with every pool locked, what is idle goes back.
TEST(LackingMemoryOfSteps, IdleMemoryThatMeltsGoesBackOrRests) {
  each_fails(
      [](Pair& pair) {
        pair.lab.leave_idle(*pair.first, 24 * kMiB, kOwner);
        pair.second->pin();  // no use for what others had
      },
      [](Pair& pair) { pair.taken = pair.lab.memory().allocate(*pair.second, 16 * kMiB, kOwner); },
      [](Pair& pair) { pair.second->unpin(); });
}

// Of what was allocated in one piece, a part in the middle goes.
TEST(LackingMemoryOfSteps, PagesThatGoInPartLeaveTheOthers) {
  each_fails([](Pair& pair) { pair.lab.memory().allocate_pages(*pair.first, 0, 24 * kMiB, kOwner); },
             [](Pair& pair) { pair.lab.memory().deallocate_pages(*pair.first, 8 * kMiB, 8 * kMiB); },
             [](Pair& pair) {
               EXPECT_EQ(pair.first->held_pages(0, 8 * kMiB).size(), 1U);
               EXPECT_EQ(pair.first->held_pages(16 * kMiB, 8 * kMiB).size(), 1U);
               pair.first->drop_pages();
               EXPECT_EQ(pair.first->live_blocks(), 0U);
             });
}

// Pages that queued work may still use become another stream's, its first here.
TEST(LackingMemoryOfSteps, PagesThatWaitGoToAStreamOrWait) {
  each_fails(
      [](Pair& pair) {
        pair.lab.driver.hold_fences();
        pair.lab.memory().allocate_pages(*pair.first, 0, 24 * kMiB, kOwner);
        pair.lab.memory().deallocate_pages(*pair.first, 0, 2 * kMiB);
      },
      [](Pair& pair) { pair.lab.memory().allocate_pages(*pair.first, 0, 2 * kMiB, kNew); },
      [](Pair& pair) {
        if (pair.first->held_pages(0, 2 * kMiB).empty()) {
          pair.lab.memory().allocate_pages(*pair.first, 0, 2 * kMiB, kNew);
        }
      });
}

// After memory was wanted too early: blocks whose frees make ticks ahead of need.
std::vector<Address> freed_ahead_of_need(Pair& pair) {
  pair.lab.driver.hold_fences();
  pair.group->set_limit(64 * kMiB);
  pair.lab.leave_idle(*pair.first, 64 * kMiB, kOwner);
  pair.lab.leave_idle(*pair.first, 64 * kMiB, kOne);
  pair.group->set_limit(900 * kMiB);
  pair.lab.driver.release_fences();
  std::vector<Address> blocks;
  for (int k = 0; k < 5; ++k) blocks.push_back(pair.lab.memory().allocate(*pair.first, 100 * kMiB, kOwner));
  return blocks;
}

TEST(LackingMemoryOfSteps, AFreeDoesWithoutATick) {
  std::vector<Address> blocks;
  each_fails([&](Pair& pair) { blocks = freed_ahead_of_need(pair); },
             [&](Pair& pair) {
               for (; !blocks.empty(); blocks.pop_back())
                 EXPECT_TRUE(DeviceMemory::free(pair.lab.space, blocks.back()));
             },
             [](Pair& pair) { EXPECT_EQ(pair.first->live_blocks(), 0U); });
}

// A tick that could make no fence for a stream makes it with a later free, which may have to make
// room for it.
TEST(LackingMemoryOfSteps, AFreeDoesWithoutAFence) {
  std::vector<Address> blocks;
  std::vector<Fence> taken;
  each_fails(
      [&](Pair& pair) {
        blocks = freed_ahead_of_need(pair);
        pair.lab.driver.hold_fences();
        // There is room for 24, and then for 56.
        DeviceStreams& streams = pair.lab.memory().streams();
        taken.clear();
        while (pair.lab.driver.count(Call::create_fence) < 55) taken.push_back(streams.take_fence());
        pair.lab.driver.fail_nth(Call::create_fence, 1, broken(), Repeat::from_then_on);
        pair.lab.memory().clock().cover(pair.lab.memory().clock().now());
        pair.lab.driver.clear_failures();
        taken.push_back(streams.take_fence());
      },
      [&](Pair& pair) {
        for (; !blocks.empty(); blocks.pop_back()) EXPECT_TRUE(DeviceMemory::free(pair.lab.space, blocks.back()));
      },
      [&](Pair& pair) {
        pair.lab.driver.release_fences();
        EXPECT_EQ(pair.first->live_blocks(), 0U);
        for (; !taken.empty(); taken.pop_back()) pair.lab.memory().streams().put_back(taken.back());
      });
}

// What a thread keeps is the pools' when it ends, and nobody could catch what fails then.
TEST(LackingMemoryOfSteps, AThreadEndsWithoutMemory) {
  Pair pair;
  std::thread([&] {
    std::vector<Address> blocks;
    for (int k = 0; k < 4; ++k) blocks.push_back(pair.lab.memory().allocate(*pair.first, 4 * kKiB, kOwner));
    for (const Address block : blocks) EXPECT_TRUE(DeviceMemory::free(pair.lab.space, block));
    fails_from_here();
  }).join();
  pair.check();
  EXPECT_EQ(pair.lab.memory().kept_blocks(*pair.first), 0U);
}

// A closed pool that waited for queued work ends with whoever comes by after that.
TEST(LackingMemoryOfSteps, AClosedPoolThatWaitsEndsLater) {
  each_fails(
      [](Pair& pair) {
        pair.lab.driver.hold_fences();
        pair.lab.leave_idle(*pair.first, 8 * kMiB, kOwner);
        pair.lab.memory().close_pool(*pair.first, /*force=*/false);
        pair.first = nullptr;
        pair.lab.driver.release_fences();
      },
      [](Pair& pair) { pair.taken = pair.lab.memory().allocate(*pair.second, 2 * kMiB, kOwner); },
      [](Pair& pair) {
        for (int k = 0; k < 200; ++k) pair.lab.leave_idle(*pair.second, 2 * kMiB, kOwner);
        EXPECT_EQ(pair.lab.memory().pools().size(), 1U);
      });
}

// A checkpoint that cannot be gone back to, for want of memory, leaves what was restored and
// free memory.
TEST(LackingMemoryOfSteps, ACheckpointIsRestoredAsFarAsItGoes) {
  PoolCheckpoint target;
  std::vector<Address> restored;
  each_fails(
      [&](Pair& pair) {
        std::vector<Address> blocks;
        for (int k = 0; k < 3; ++k) blocks.push_back(pair.lab.allocate(*pair.first, 4 * kMiB, kOwner));
        for (int k = 0; k < 3; ++k) blocks.push_back(pair.lab.allocate(*pair.first, 4 * kKiB, kOwner));
        pair.first->pin();
        target = pair.first->checkpoint();
        for (const Address block : blocks) pair.lab.free(block);
        restored.clear();
      },
      [&](Pair& pair) {
        std::vector<Address> freed;
        pair.first->restore(target, &freed, &restored);
      },
      [&](Pair& pair) {
        for (const Address block : restored) EXPECT_TRUE(DeviceMemory::free(pair.lab.space, block));
        pair.first->unpin();
        EXPECT_EQ(pair.first->live_blocks(), 0U);
      });
}

// A driver lacks memory for its own notes: what it has done by then is undone.
TEST(LackingMemoryOfSteps, ADriverThatCannotNoteGivesNothing) {
  bool failed = true;
  for (long nth = 0; failed && !::testing::Test::HasFailure(); ++nth) {
    SCOPED_TRACE("allocation " + std::to_string(nth));
    HostDriver host({kPage, kGiB, 1});
    AddressSpace space;
    DeviceMemory memory(host, space, 0, LabSpec::plain_options());
    const auto given = [&host] {
      MemoryInfo info;
      EXPECT_TRUE(host.memory_info(0, &info).ok());
      return info.total - info.free;
    };
    const auto pool = memory.create_pool(Lab::spec("pool"), nullptr);
    Address block = 0;
    runs_out_at(nth, [&] { block = memory.allocate(*pool, 24 * kMiB, kOwner); });
    failed = failures_made != 0;
    memory.check();
    EXPECT_EQ(given(), memory.budget().used());
    if (block == 0) block = memory.allocate(*pool, 24 * kMiB, kOwner);
    Lab::fill(block, 24 * kMiB, 3);
    EXPECT_TRUE(DeviceMemory::free(space, block));
    memory.empty_cache();
    EXPECT_EQ(given(), 0U);
  }
}

// A stream that torch has made is in every point from then on.
TEST(LackingMemoryOfSteps, AStreamThatIsCountedIsRecorded) {
  bool failed = true;
  for (long nth = 0; failed && !::testing::Test::HasFailure(); ++nth) {
    SCOPED_TRACE("allocation " + std::to_string(nth));
    HostDriver host({kPage, kGiB, 1});
    DeviceStreams streams(host, 0);
    const std::vector<Stream> all = {kOwner, kOne, kTwo, kNew};
    streams.set_census({[&all](std::vector<Stream>* out) { *out = all; }, [](Stream) { return true; }});
    runs_out_at(nth, [&] { static_cast<void>(streams.to_record()); });
    failed = failures_made != 0;
    const std::vector<Stream> recorded = streams.to_record();
    for (const Stream each : all) {
      EXPECT_EQ(std::count(recorded.begin(), recorded.end(), each), 1);
      EXPECT_EQ(streams.meet(each), StreamKind::permanent);
    }
  }
}

// A fence that is given back is the driver's, or serves again.
TEST(LackingMemoryOfSteps, AFenceIsGivenBackWithoutMemory) {
  HostDriver host({kPage, kGiB, 1});
  DeviceStreams streams(host, 0);
  std::vector<Fence> fences(5);
  for (Fence& each : fences) each = streams.take_fence();
  for (const Fence each : fences) streams.put_back(each);
  EXPECT_FALSE(runs_out_at(0, [&] { streams.destroy_free_fences(); }));
  for (Fence& each : fences) {
    each = streams.take_fence();
    EXPECT_TRUE(host.record(each, nullptr).ok());
  }
  for (const Fence each : fences) streams.put_back(each);
}

TEST(LackingMemoryOfSteps, AnImportThatCannotBeNotedKeepsNoDescriptor) {
  HostDriver host({kPage, kGiB, 1});
  ChunkHandle chunk = 0;
  ASSERT_TRUE(host.create({kPage, Location::on_device(0), /*exportable=*/true}, &chunk).ok());
  int exported = -1;
  ASSERT_TRUE(host.export_chunk(chunk, &exported).ok());
  const auto open = [] { return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {}); };
  const auto before = open();
  for (int k = 0; k < 20; ++k) {
    ChunkHandle imported = 0;
    EXPECT_TRUE(runs_out_at(0, [&] { host.import_chunk(exported, kPage, &imported).ignore(); }));
  }
  EXPECT_EQ(open(), before);
  EXPECT_EQ(::close(exported), 0);
  EXPECT_TRUE(host.release(chunk).ok());
}

}  // namespace
}  // namespace vmm::testing
