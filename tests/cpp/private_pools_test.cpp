// Which requests private pools serve, who uses them, and when they let go.
#include "core/device/private_pools.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <unordered_set>
#include <utility>
#include <vector>

#include "lab.h"

namespace vmm::testing {
namespace {

constexpr RegionId kOne{0, 1};
constexpr RegionId kOther{0, 2};
constexpr RegionId kGraph{7, 0};
const Stream kCaptured = stream(0xCA);

// Captures of streams, as CUDA would tell of them, and a device's private pools.
class PrivatePoolsTest : public ::testing::Test {
 protected:
  PrivatePoolsTest()
      : pools(lab.memory(),
              {[this](Stream on) { return captures.count(on) != 0 ? captures.at(on) : 0; }, [this] { ++failures; }}),
        model(lab.pool("model")) {}

  static PrivatePools::Filter everywhere() {
    return [](Stream) { return true; };
  }
  static PrivatePools::Filter only(Stream stream) {
    return [stream](Stream on) { return on == stream; };
  }
  static PrivatePools::Filter this_thread_only() {
    return [mine = std::this_thread::get_id()](Stream) { return std::this_thread::get_id() == mine; };
  }

  // As torch does it: the route first, with a filter that knows the graph's capture.
  struct Graph {
    std::uint64_t id = 0;
  };
  std::shared_ptr<Graph> prepare(RegionId region, Stream on) {
    auto graph = std::make_shared<Graph>();
    const auto filter = [this, seen = std::weak_ptr<Graph>(graph)](Stream stream) {
      EXPECT_FALSE(seen.expired()) << "the filter of a graph that is gone was asked";
      const auto at = captures.find(stream);
      return at != captures.end() && !seen.expired() && at->second == seen.lock()->id;
    };
    pools.begin(region, filter, on);
    return graph;
  }
  std::shared_ptr<Graph> begin_capture(RegionId region, Stream on) {
    auto graph = prepare(region, on);
    graph->id = captures[on] = ++last_capture;
    return graph;
  }
  void end_capture(RegionId region, Stream on) {
    const std::uint64_t id = captures.at(on);
    for (auto at = captures.begin(); at != captures.end();) at = at->second == id ? captures.erase(at) : std::next(at);
    pools.end(region);
  }

  Address allocate(const std::shared_ptr<Pool>& of, std::size_t bytes, Stream on = nullptr) {
    const std::shared_ptr<Pool> part = pools.any_route() ? pools.route(of, on) : nullptr;
    return lab.allocate(part == nullptr ? *of : *part, bytes, on);
  }
  Address allocate(std::size_t bytes, Stream on = nullptr) { return allocate(model, bytes, on); }
  // Where it lies, and that its model pays for it.
  RegionId region_of(Address address, const Pool* payer = nullptr) {
    const Pool* const pool = lab.space.find(address);
    EXPECT_EQ(&pool->model(), payer == nullptr ? model.get() : payer);
    return pool->region();
  }
  std::size_t mapped(RegionId region) {
    std::size_t bytes = 0;
    for (const auto& pool : lab.memory().pools()) bytes += pool->region() == region ? pool->physical_bytes() : 0;
    return bytes;
  }
  bool is_pinned(RegionId region) {
    const PoolList parts = pools.parts(region);
    return std::all_of(parts.begin(), parts.end(), [](const auto& part) { return part->is_pinned(); });
  }
  bool exists(RegionId region) {
    try {
      return pools.use_count(region) > 0;
    } catch (const InvalidArgumentError&) {
      return false;
    }
  }
  void leave_mempool(RegionId region) {
    pools.set_use_on_oom(region, false);
    pools.release(region);
    pools.empty_cache(region);
    lab.memory().check();
  }
  void use(RegionId region, std::size_t bytes) {
    pools.begin(region, everywhere(), nullptr);
    lab.free(allocate(bytes));
    pools.end(region);
    pools.release(region);
  }
  void expect_nothing_left() {
    EXPECT_FALSE(pools.any_route());
    EXPECT_FALSE(lab.memory().clock().is_capturing());
    lab.memory().empty_cache();
    lab.memory().check();
    EXPECT_EQ(lab.memory().pools().size(), 1U);
    EXPECT_EQ(lab.memory().committed_bytes(), 0U);
  }

  const Stream a = stream(0xA);
  const Stream b = stream(0xB);
  std::map<Stream, std::uint64_t> captures;
  std::uint64_t last_capture = 0;
  int failures = 0;
  Lab lab;
  PrivatePools pools;
  std::shared_ptr<Pool> model;
};

// -------------------------------------------------------------------- routes

// What stands at addresses of its own: a tensor's range, say.
TEST_F(PrivatePoolsTest, WhatACaptureHasBesideBlocksGoesWithItsRegion) {
  int ended = 0;
  const auto make = [&] {
    // Whoever ends it comes back here: no lock is held.
    return std::shared_ptr<const void>(nullptr, [&](const void*) {
      pools.sweep();
      EXPECT_FALSE(exists(kGraph));
      ++ended;
    });
  };
  pools.keep_for_capture(kCaptured, make());
  EXPECT_EQ(ended, 1) << "no capture, nobody who keeps it";
  ended = 0;
  const auto graph = begin_capture(kGraph, kCaptured);
  pools.keep_for_capture(nullptr, std::shared_ptr<const void>(nullptr, [&](const void*) { ++ended; }));
  EXPECT_EQ(ended, 1) << "of another stream, which is not captured";
  auto kept = make();
  pools.keep_for_capture(kCaptured, kept);
  pools.keep_for_capture(kCaptured, kept);
  EXPECT_EQ(kept.use_count(), 2) << "once is enough";
  pools.keep_for_capture(kCaptured, make());
  kept.reset();
  end_capture(kGraph, kCaptured);
  EXPECT_EQ(ended, 1);
  pools.release(kGraph);
  EXPECT_EQ(ended, 3);
}

TEST_F(PrivatePoolsTest, NobodyIsRoutedUntilSomebodyBegins) {
  pools.add_user(kOne);
  EXPECT_FALSE(pools.any_route());
  EXPECT_EQ(pools.route(model, a), nullptr);
  pools.begin(kOne, only(a), a);
  EXPECT_TRUE(pools.any_route());
  const Address inside = allocate(3 * kMiB, a);
  const Address outside = allocate(3 * kMiB, b);
  EXPECT_TRUE(region_of(inside) == kOne);
  EXPECT_TRUE(region_of(outside) == RegionId{});
  EXPECT_FALSE(is_pinned(kOne));
  EXPECT_FALSE(lab.memory().clock().is_capturing());
  pools.end(kOne);
  EXPECT_FALSE(pools.any_route());
  EXPECT_TRUE(region_of(allocate(kMiB, a)) == RegionId{});
}

TEST_F(PrivatePoolsTest, TheLatestRouteWins) {
  pools.begin(kOne, everywhere(), a);
  pools.begin(kOther, only(a), a);
  EXPECT_TRUE(region_of(allocate(kMiB, a)) == kOther);
  EXPECT_TRUE(region_of(allocate(kMiB, b)) == kOne);
  pools.end(kOther);
  EXPECT_TRUE(region_of(allocate(kMiB, a)) == kOne);
  pools.end(kOne);
}

TEST_F(PrivatePoolsTest, ARouteOfAThreadIsItsOwn) {
  pools.begin(kOne, this_thread_only(), a);
  std::thread([&] { EXPECT_EQ(pools.route(model, a), nullptr); }).join();
  EXPECT_NE(pools.route(model, a), nullptr);
  pools.end(kOne);
}

TEST_F(PrivatePoolsTest, ARegionIsRecordedOnceAtATime) {
  pools.add_user(kOne);
  pools.begin(kOne, everywhere(), a);
  try {
    pools.begin(kOne, everywhere(), a);
    FAIL();
  } catch (const InvalidArgumentError& error) {
    EXPECT_STREQ(error.what(), "beginAllocateToPool: already recording to mempool_id");
  }
  EXPECT_EQ(pools.use_count(kOne), 2) << "what was refused counts";
  pools.end(kOne);
  EXPECT_THROW(pools.end(kOne), InvalidArgumentError);
  EXPECT_THROW(pools.end(kOther), InvalidArgumentError);
  EXPECT_THROW((void)pools.use_count(kOther), InvalidArgumentError);
  EXPECT_THROW((void)pools.checkpoint(kOther), InvalidArgumentError);
}

TEST_F(PrivatePoolsTest, EachModelHasAPartOfItsOwn) {
  const auto second = lab.pool("second");
  pools.add_user(kOne);
  pools.begin(kOne, everywhere(), a);
  const Address one = allocate(model, 4 * kMiB);
  const Address other = allocate(second, 4 * kMiB);
  pools.end(kOne);
  pools.release(kOne);
  EXPECT_TRUE(region_of(one) == kOne);
  EXPECT_TRUE(region_of(other, second.get()) == kOne);
  EXPECT_EQ(pools.parts(kOne).size(), 2U);
  EXPECT_EQ(lab.memory().statistics_of(*second)[StatKind::allocated_bytes][0].current, 4 * kMiB);
  lab.free(one);
  lab.free(other);
  pools.empty_cache(kOne);
  EXPECT_EQ(mapped(kOne), 0U);
  leave_mempool(kOne);
  lab.memory().close_pool(*second, /*force=*/false);
  expect_nothing_left();
}

TEST_F(PrivatePoolsTest, AClosedModelRefusesInARegionToo) {
  const auto second = lab.pool("second");
  pools.begin(kOne, everywhere(), a);
  const Address kept = allocate(second, kMiB);
  lab.memory().close_pool(*second, /*force=*/true);
  EXPECT_THROW(allocate(second, kMiB), InvalidArgumentError);
  EXPECT_TRUE(region_of(allocate(kMiB)) == kOne);
  lab.free(kept);
  pools.end(kOne);
}

// ------------------------------------------------------------ users, releases

TEST_F(PrivatePoolsTest, UsersAreCountedAsTorchCountsThem) {
  pools.add_user(kOne);
  EXPECT_EQ(pools.use_count(kOne), 1);
  pools.begin(kOne, everywhere(), a);
  EXPECT_EQ(pools.use_count(kOne), 2);
  pools.end(kOne);
  EXPECT_EQ(pools.use_count(kOne), 2) << "the release is due";
  pools.release(kOne);
  EXPECT_EQ(pools.use_count(kOne), 1);
  begin_capture(kOne, a);
  end_capture(kOne, a);
  begin_capture(kOne, a);
  end_capture(kOne, a);
  EXPECT_EQ(pools.use_count(kOne), 3);
  pools.release(kOne);
  pools.release(kOne);
  EXPECT_EQ(pools.use_count(kOne), 1);
  leave_mempool(kOne);
  EXPECT_FALSE(exists(kOne));
  pools.release(kOne);
  pools.set_use_on_oom(kOne, false);
  pools.set_no_split(kOne);
  pools.empty_cache(kOne);
  EXPECT_FALSE(exists(kOne)) << "what nobody knows is ignored";
}

TEST_F(PrivatePoolsTest, WhatIsFreeInALivingMemPoolGoesBack) {
  pools.add_user(kOne);
  use(kOne, 8 * kMiB);
  EXPECT_EQ(mapped(kOne), 8 * kMiB);
  pools.empty_cache(kOther);
  EXPECT_EQ(mapped(kOne), 8 * kMiB);
  pools.empty_cache(kOne);
  EXPECT_EQ(mapped(kOne), 0U);
  leave_mempool(kOne);
  expect_nothing_left();
}

TEST_F(PrivatePoolsTest, WithTheLastUserTheMemoryGoesAtOnce) {
  pools.add_user(kOne);
  use(kOne, 8 * kMiB);
  pools.set_use_on_oom(kOne, false);
  pools.release(kOne);
  EXPECT_EQ(mapped(kOne), 0U);
  expect_nothing_left();
}

TEST_F(PrivatePoolsTest, AMemPoolAndItsGraphsGoInAnyOrder) {
  enum class User { mempool, first_graph, second_graph, block };
  std::vector<User> order = {User::mempool, User::first_graph, User::second_graph, User::block};
  do {
    pools.add_user(kOne);
    for (int graph = 0; graph < 2; ++graph) {
      begin_capture(kOne, a);
      lab.free(allocate(4 * kMiB, a));
      end_capture(kOne, a);
    }
    pools.begin(kOne, everywhere(), nullptr);
    const Address block = allocate(3 * kMiB);
    lab.fill(block, 3 * kMiB, 5);
    pools.end(kOne);
    pools.release(kOne);
    int graphs = 2;
    int users = 3;
    bool live = true;
    for (const User user : order) {
      if (user == User::block) {
        EXPECT_TRUE(lab.holds(block, 3 * kMiB, 5));
        lab.free(block);
        live = false;
      } else if (user == User::mempool) {
        leave_mempool(kOne);
        --users;
      } else {
        pools.release(kOne);
        --graphs;
        --users;
      }
      lab.memory().empty_cache();
      lab.memory().check();
      if (users > 0) {
        EXPECT_EQ(pools.use_count(kOne), users);
        EXPECT_EQ(is_pinned(kOne), graphs > 0);
      }
      EXPECT_EQ(exists(kOne), users > 0);
      if (graphs == 0) {
        EXPECT_LE(mapped(kOne), live ? 4 * kMiB : 0U);
      } else {
        EXPECT_GE(mapped(kOne), 4 * kMiB);
      }
    }
    expect_nothing_left();
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST_F(PrivatePoolsTest, AGraphThatEndsWhileAThreadIsInItsPoolIsTheOneReleased) {
  pools.add_user(kOne);
  begin_capture(kOne, a);
  lab.free(allocate(4 * kMiB, a));
  end_capture(kOne, a);
  pools.begin(kOne, everywhere(), nullptr);
  EXPECT_TRUE(is_pinned(kOne));
  pools.release(kOne);
  EXPECT_FALSE(is_pinned(kOne));
  EXPECT_EQ(pools.use_count(kOne), 2);
  pools.end(kOne);
  pools.release(kOne);
  leave_mempool(kOne);
  expect_nothing_left();
}

// --------------------------------------------------------------------- graphs

TEST_F(PrivatePoolsTest, ACapturePinsItsRegionUntilItsGraphIsGone) {
  const auto second = lab.pool("second");
  begin_capture(kGraph, a);
  EXPECT_TRUE(lab.memory().clock().is_capturing());
  captures[b] = captures.at(a);  // joined
  const Address one = allocate(4 * kMiB, a);
  const Address joined = allocate(4 * kMiB, b);
  const Address late = allocate(second, 4 * kMiB, a);
  EXPECT_TRUE(region_of(one) == kGraph);
  EXPECT_TRUE(region_of(joined) == kGraph);
  EXPECT_TRUE(region_of(allocate(kMiB)) == RegionId{}) << "of a stream that is not captured";
  EXPECT_TRUE(region_of(late, second.get()) == kGraph);
  EXPECT_TRUE(is_pinned(kGraph));
  end_capture(kGraph, a);
  EXPECT_FALSE(lab.memory().clock().is_capturing());
  lab.free(one);
  lab.free(joined);
  lab.free(late);
  pools.empty_cache(kGraph);
  lab.memory().empty_cache();
  EXPECT_EQ(mapped(kGraph), 12 * kMiB);
  pools.release(kGraph);
  EXPECT_EQ(mapped(kGraph), 0U);
  lab.memory().close_pool(*second, /*force=*/false);
}

TEST_F(PrivatePoolsTest, ACaptureInAMemPoolThatHasPartsAlreadyPinsThem) {
  pools.add_user(kOne);
  use(kOne, 4 * kMiB);
  EXPECT_FALSE(is_pinned(kOne));
  begin_capture(kOne, a);
  EXPECT_TRUE(is_pinned(kOne));
  end_capture(kOne, a);
  pools.release(kOne);
  EXPECT_FALSE(is_pinned(kOne));
  leave_mempool(kOne);
  expect_nothing_left();
}

TEST_F(PrivatePoolsTest, OneStreamsNextCaptureIsNotTheFormers) {
  begin_capture(kGraph, a);
  const Address first = allocate(kMiB, a);
  end_capture(kGraph, a);
  begin_capture(kOther, a);
  const Address second = allocate(kMiB, a);
  end_capture(kOther, a);
  EXPECT_TRUE(region_of(first) == kGraph);
  EXPECT_TRUE(region_of(second) == kOther);
  EXPECT_EQ(failures, 0);
}

TEST_F(PrivatePoolsTest, AnotherThreadWorksForTheCaptureAndDoesNotEndIt) {
  begin_capture(kGraph, a);
  std::thread([&] { EXPECT_NE(pools.route(model, a), nullptr); }).join();
  // It is over, but its route will end in a moment: only its own thread knows.
  captures.clear();
  std::thread([&] {
    EXPECT_EQ(pools.route(model, a), nullptr);
    pools.sweep();
  }).join();
  pools.end(kGraph);
  EXPECT_EQ(failures, 0);
  EXPECT_TRUE(is_pinned(kGraph));
  pools.release(kGraph);
  expect_nothing_left();
}

// Whatever a capture takes the graph uses at each replay; nobody tells when it goes.
TEST_F(PrivatePoolsTest, AThreadsPoolInsideACaptureIsNoCaptureAndStays) {
  begin_capture(kGraph, a);
  pools.add_user(kOne);
  const int users = pools.use_count(kOne);
  pools.begin(kOne, this_thread_only(), a);
  const Address taken = allocate(kMiB, a);
  EXPECT_TRUE(region_of(taken) == kOne);
  EXPECT_TRUE(is_pinned(kOne));
  pools.end(kOne);
  pools.release(kOne);
  EXPECT_EQ(pools.use_count(kOne), users) << "the graph is none";
  EXPECT_TRUE(is_pinned(kOne));
  EXPECT_TRUE(region_of(allocate(kMiB, a)) == kGraph);
  end_capture(kGraph, a);
  EXPECT_EQ(failures, 0);
}

// Serving engines let another pool serve a part of a capture, and go on with the
// capture's by a route of the thread.
TEST_F(PrivatePoolsTest, ACaptureThatAThreadsRouteGoesOnWithIsOneGraph) {
  const auto graph = begin_capture(kGraph, a);
  allocate(kMiB, a);
  pools.end(kGraph);
  pools.begin(kGraph, this_thread_only(), a);
  EXPECT_TRUE(region_of(allocate(3 * kMiB, a)) == kGraph);
  EXPECT_TRUE(lab.memory().clock().is_capturing());
  end_capture(kGraph, a);
  EXPECT_FALSE(lab.memory().clock().is_capturing());
  pools.sweep();
  EXPECT_TRUE(is_pinned(kGraph)) << "it did not fail";
  EXPECT_EQ(failures, 0);
}

// torch 2.12 and later, for a conditional node: the capture goes on, its route
// gives way to one for a child graph on a stream that nobody has told of.
TEST_F(PrivatePoolsTest, ACaptureWithAConditionalNodeStaysOneUser) {
  auto graph = begin_capture(kGraph, a);
  const Address before = allocate(kMiB, a);
  const std::uint64_t whole = graph->id;
  pools.end(kGraph);
  EXPECT_TRUE(is_pinned(kGraph));
  auto child = prepare(kGraph, a);
  child->id = captures[b] = ++last_capture;
  const Address inside = allocate(kMiB, b);
  EXPECT_TRUE(region_of(inside) == kGraph);
  EXPECT_TRUE(lab.memory().clock().is_capturing());
  captures.erase(b);
  pools.end(kGraph);
  const auto filter = [this, whole](Stream on) { return captures.count(on) != 0 && captures.at(on) == whole; };
  pools.begin(kGraph, filter, a);
  const Address after = allocate(kMiB, a);
  EXPECT_TRUE(region_of(before) == kGraph);
  EXPECT_TRUE(region_of(after) == kGraph);
  EXPECT_EQ(pools.use_count(kGraph), 1);
  end_capture(kGraph, a);
  EXPECT_FALSE(lab.memory().clock().is_capturing());
  EXPECT_EQ(failures, 0);
  for (const Address block : {before, inside, after}) lab.free(block);
  EXPECT_TRUE(is_pinned(kGraph));
  pools.release(kGraph);
  expect_nothing_left();
}

// ------------------------------------------------------------ failed captures

TEST_F(PrivatePoolsTest, ACaptureThatFailedIsFoundByItsThreadsNextRequest) {
  {
    const auto graph = begin_capture(kGraph, a);
    lab.free(allocate(4 * kMiB, a));
    captures.clear();  // invalid, and ended with an error
  }
  EXPECT_TRUE(region_of(allocate(kMiB, a)) == RegionId{});
  EXPECT_EQ(failures, 1);
  EXPECT_FALSE(exists(kGraph));
  EXPECT_EQ(mapped(kGraph), 0U);
  EXPECT_FALSE(pools.any_route());
  EXPECT_FALSE(lab.memory().clock().is_capturing());
  EXPECT_THROW(pools.end(kGraph), InvalidArgumentError);
}

TEST_F(PrivatePoolsTest, ACaptureThatNeverBeganIsFoundToo) {
  prepare(kGraph, a);
  pools.sweep();
  EXPECT_EQ(failures, 1);
  EXPECT_FALSE(exists(kGraph));
  expect_nothing_left();
}

TEST_F(PrivatePoolsTest, ABlockOutlivesTheFailedCaptureThatMadeIt) {
  begin_capture(kGraph, a);
  const Address block = allocate(3 * kMiB, a);
  lab.fill(block, 3 * kMiB, 8);
  captures.clear();
  pools.empty_cache(kGraph);
  EXPECT_EQ(failures, 1);
  EXPECT_FALSE(exists(kGraph));
  EXPECT_TRUE(lab.holds(block, 3 * kMiB, 8));
  lab.free(block);
  expect_nothing_left();
}

TEST_F(PrivatePoolsTest, TheNextCaptureFindsTheFailedOneAndIsNotDisturbed) {
  begin_capture(kGraph, a);
  captures.clear();
  begin_capture(kGraph, a);  // into the same region, on the same stream
  EXPECT_EQ(failures, 0) << "torch has prepared the next capture already";
  EXPECT_EQ(pools.use_count(kGraph), 1);
  EXPECT_TRUE(region_of(allocate(kMiB, a)) == kGraph);
  end_capture(kGraph, a);
  EXPECT_EQ(failures, 0);
}

TEST_F(PrivatePoolsTest, AFailedCaptureLeavesARunningOneAndAHealthyGraphAlone) {
  begin_capture(kOther, a);
  end_capture(kOther, a);
  begin_capture(kGraph, a);
  const Address good = allocate(kMiB, a);
  {
    const auto bad = begin_capture(kOther, b);
    lab.free(allocate(4 * kMiB, b));
    captures.erase(b);
  }
  const Address more = allocate(kMiB, a);
  EXPECT_EQ(failures, 0) << "a capture is under way";
  EXPECT_TRUE(region_of(good) == kGraph);
  EXPECT_TRUE(region_of(more) == kGraph);
  EXPECT_EQ(pools.use_count(kOther), 1);
  EXPECT_TRUE(is_pinned(kOther)) << "the earlier graph lives";
  EXPECT_EQ(mapped(kOther), 4 * kMiB);
  EXPECT_TRUE(lab.memory().clock().is_capturing());
  end_capture(kGraph, a);
  EXPECT_FALSE(lab.memory().clock().is_capturing());
  pools.release(kOther);
  EXPECT_EQ(mapped(kOther), 0U);
}

TEST_F(PrivatePoolsTest, AFailedCaptureInAMemPoolLeavesTheMemPool) {
  pools.add_user(kOne);
  begin_capture(kOne, a);
  lab.free(allocate(4 * kMiB, a));
  captures.clear();
  pools.sweep();
  EXPECT_EQ(pools.use_count(kOne), 1);
  EXPECT_FALSE(is_pinned(kOne));
  leave_mempool(kOne);
  expect_nothing_left();
}

TEST_F(PrivatePoolsTest, AThreadThatEndedWithAFailedCaptureIsStoodInFor) {
  std::thread([&] {
    begin_capture(kGraph, a);
    lab.free(allocate(4 * kMiB, a));
  }).join();
  EXPECT_EQ(pools.route(model, b), nullptr);
  EXPECT_TRUE(exists(kGraph)) << "it is still under way: another thread may end it";
  captures.clear();
  EXPECT_EQ(pools.route(model, b), nullptr);
  EXPECT_FALSE(exists(kGraph));
  EXPECT_EQ(failures, 1);
  expect_nothing_left();
}

TEST_F(PrivatePoolsTest, ACaptureBegunWhereOneRunsFailsAndGoesWithIt) {
  const auto good = begin_capture(kGraph, a);
  const auto refused = prepare(kOther, a);
  EXPECT_TRUE(region_of(allocate(kMiB, a)) == kGraph);
  end_capture(kGraph, a);
  pools.sweep();
  EXPECT_FALSE(exists(kOther));
  EXPECT_TRUE(exists(kGraph));
}

// -------------------------------------------------------------------- rescue

TEST_F(PrivatePoolsTest, OnlyWillingRegionsRescue) {
  pools.add_user(kOne);
  use(kOne, 8 * kMiB);
  EXPECT_EQ(pools.lend(*model, 4 * kMiB, nullptr), 0U);
  pools.set_use_on_oom(kOne, true);
  EXPECT_EQ(pools.lend(*model, 16 * kMiB, nullptr), 0U);
  EXPECT_EQ(pools.lend(*lab.pool("stranger"), 4 * kMiB, nullptr), 0U);
  const Address found = pools.lend(*model, 4 * kMiB, nullptr);
  ASSERT_NE(found, 0U);
  EXPECT_TRUE(region_of(found) == kOne);
  EXPECT_EQ(mapped(kOne), 8 * kMiB);
  EXPECT_TRUE(DeviceMemory::free(lab.space, found));
  begin_capture(kOne, a);
  end_capture(kOne, a);
  EXPECT_EQ(pools.lend(*model, 4 * kMiB, nullptr), 0U) << "it is a graph's";
  pools.release(kOne);
  EXPECT_EQ(pools.use_count(kOne), 1);
  leave_mempool(kOne);
}

// As natively, which asks such a pool before it counts an error or gives anything up.
TEST_F(PrivatePoolsTest, WhatIsLentIsNoOutOfMemory) {
  pools.add_user(kOne);
  use(kOne, 16 * kMiB);
  pools.begin(kOne, everywhere(), nullptr);
  const Address kept = allocate(3 * kMiB);
  pools.end(kOne);
  pools.release(kOne);
  ASSERT_EQ(mapped(kOne), 16 * kMiB) << "in the middle of its one chunk, whose rest is nobody's to take";
  lab.memory().set_limit(model->budget(), 16 * kMiB);
  EXPECT_THROW(lab.allocate(*model, 8 * kMiB), OutOfMemoryError);
  EXPECT_EQ(model->statistics().num_ooms, 1);
  pools.set_use_on_oom(kOne, true);
  const auto waits = lab.driver.count(Call::synchronize);
  const Address lent = lab.allocate(*model, 8 * kMiB);
  EXPECT_TRUE(region_of(lent) == kOne);
  EXPECT_EQ(model->statistics().num_ooms, 1);
  EXPECT_EQ(lab.driver.count(Call::synchronize), waits);
  EXPECT_THROW(lab.memory().allocate_first(*model, 8 * kMiB, nullptr), OutOfMemoryError) << "pages are its own";
  lab.free(lent);
  lab.free(kept);
  leave_mempool(kOne);
}

TEST_F(PrivatePoolsTest, WithoutSplittingABlockHasItsChunksForItself) {
  pools.add_user(kOne);
  pools.set_no_split(kOne);
  use(kOne, 12 * kMiB);
  pools.begin(kOne, everywhere(), nullptr);
  const Address first = allocate(3 * kMiB);
  const Address second = allocate(3 * kMiB);
  const std::shared_ptr<Pool> part = pools.parts(kOne).front();
  const std::vector<ChunkView> under_first = part->chunks_under(first, 3 * kMiB);
  const std::vector<ChunkView> under_second = part->chunks_under(second, 3 * kMiB);
  ASSERT_EQ(under_first.size(), 1U);
  ASSERT_EQ(under_second.size(), 1U);
  EXPECT_NE(under_first[0].handle, under_second[0].handle);
  pools.end(kOne);
}

// --------------------------------------------------------------- checkpoints

TEST_F(PrivatePoolsTest, ACheckpointBringsBackTheBlocksOfAllParts) {
  const auto second = lab.pool("second");
  const auto late = lab.pool("late");
  begin_capture(kGraph, a);
  const Address kept = allocate(model, 3 * kMiB, a);
  const Address other = allocate(second, 1000, a);
  const Address dropped = allocate(model, 5 * kMiB, a);
  lab.free(dropped);
  lab.fill(kept, 3 * kMiB, 1);
  lab.fill(other, 1000, 2);
  end_capture(kGraph, a);
  EXPECT_EQ(pools.live_addresses(kGraph), (std::unordered_set<Address>{kept, other}));
  const RegionCheckpoint checkpoint = pools.checkpoint(kGraph);

  begin_capture(kGraph, a);
  const Address newer = lab.memory().allocate(*pools.route(model, a), 4 * kMiB, a);
  const Address stranger = lab.memory().allocate(*pools.route(late, a), kMiB, a);
  end_capture(kGraph, a);
  lab.free(other);
  std::vector<Address> freed;
  std::vector<Address> allocated;
  pools.restore(checkpoint, &freed, &allocated);
  lab.memory().check();
  EXPECT_EQ(std::unordered_set<Address>(freed.begin(), freed.end()),
            (std::unordered_set<Address>{kept, newer, stranger}));
  EXPECT_EQ(std::unordered_set<Address>(allocated.begin(), allocated.end()),
            (std::unordered_set<Address>{kept, other}));
  EXPECT_EQ(pools.live_addresses(kGraph), (std::unordered_set<Address>{kept, other}));
  EXPECT_TRUE(lab.holds(kept, 3 * kMiB, 1));
  EXPECT_TRUE(lab.holds(other, 1000, 2));
  EXPECT_TRUE(DeviceMemory::free(lab.space, other));
  lab.free(kept);
  pools.release(kGraph);
  pools.release(kGraph);
  EXPECT_FALSE(exists(kGraph));
  EXPECT_EQ(mapped(kGraph), 0U);
}

// ------------------------------------------------------------- foreign memory

struct Foreign final : ForeignMemory {
  void set_pinned(bool value) noexcept override { pinned = value; }
  void close() noexcept override { closed = true; }
  void set_no_split() noexcept override { no_split = true; }
  Address try_allocate_within(std::size_t bytes, Stream /*stream*/) override { return bytes <= unused ? 512 : 0; }
  bool pinned = false;
  bool closed = false;
  bool no_split = false;
  std::size_t unused = 0;
};

TEST_F(PrivatePoolsTest, ForeignMemoryServesWhatFoundNoneWhereItMay) {
  const auto foreign = std::make_shared<Foreign>();
  foreign->unused = 1000;
  pools.add_user(kOne, foreign);
  EXPECT_EQ(pools.lend(*model, 1000, a), 0U) << "nobody said that it may";
  pools.set_use_on_oom(kOne, true);
  EXPECT_EQ(pools.lend(*model, 1000, a), 512U);
  EXPECT_EQ(pools.lend(*model, 1001, a), 0U);
  begin_capture(kOne, a);
  EXPECT_EQ(pools.lend(*model, 1000, a), 0U) << "a graph's";
  end_capture(kOne, a);
  pools.release(kOne);
  EXPECT_FALSE(foreign->no_split);
  pools.set_no_split(kOne);
  EXPECT_TRUE(foreign->no_split);
  leave_mempool(kOne);
}

TEST_F(PrivatePoolsTest, ForeignMemoryFollowsItsRegion) {
  const auto foreign = std::make_shared<Foreign>();
  pools.add_user(kOne, foreign);
  pools.begin(kOne, everywhere(), a);
  std::shared_ptr<ForeignMemory> found;
  EXPECT_EQ(pools.route(model, a, &found), nullptr);
  EXPECT_EQ(found, foreign);
  pools.begin(kOther, everywhere(), a);
  found = nullptr;
  EXPECT_NE(pools.route(model, a, &found), nullptr);
  EXPECT_EQ(found, nullptr);
  pools.end(kOther);
  pools.end(kOne);
  pools.release(kOne);
  begin_capture(kOne, a);
  EXPECT_TRUE(foreign->pinned);
  end_capture(kOne, a);
  pools.release(kOne);
  EXPECT_FALSE(foreign->pinned);
  pools.empty_cache(kOne);
  EXPECT_FALSE(foreign->closed);
  leave_mempool(kOne);
  EXPECT_TRUE(foreign->closed);
}

// -------------------------------------------------------------------- threads

TEST_F(PrivatePoolsTest, ThreadsComeAndGoAtOnce) {
  const auto work = [&](std::uint64_t number) {
    for (int turn = 0; turn < 50; ++turn) {
      const RegionId region{0, 100 + number * 100 + static_cast<std::uint64_t>(turn)};
      pools.add_user(region);
      pools.begin(region, this_thread_only(), a);
      const std::shared_ptr<Pool> part = pools.route(model, stream(number));
      ASSERT_NE(part, nullptr);
      ASSERT_TRUE(part->region() == region);
      const Address block = lab.memory().allocate(*part, 100'000, stream(number));
      pools.end(region);
      pools.release(region);
      pools.set_use_on_oom(region, false);
      pools.release(region);
      ASSERT_TRUE(DeviceMemory::free(lab.space, block));
    }
  };
  std::vector<std::thread> threads;
  threads.reserve(4);
  for (std::uint64_t number = 1; number <= 4; ++number) threads.emplace_back(work, number);
  for (auto& thread : threads) thread.join();
  expect_nothing_left();
}

}  // namespace
}  // namespace vmm::testing
