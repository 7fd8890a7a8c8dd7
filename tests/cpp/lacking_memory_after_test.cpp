// Host memory that lacks after a step has been made, or in the middle of one that is made in
// parts: what is due stays due, and the next call goes on.
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "core/faces/seals.h"
#include "core/faces/shared_memory_pool.h"
#include "cpp/lab.h"
#include "cpp/lacking_memory.h"

namespace vmm::testing {
namespace {

const Stream kOne = stream(0x10);
constexpr long kMost = 400;  // allocations of a step

// Each allocation of a step fails in turn, in a world of its own.
template <typename World, typename Step, typename Then>
void each_in_turn(const Step& step, const Then& then) {
  for (long nth = 0; nth < kMost; ++nth) {
    SCOPED_TRACE(nth);
    World world;
    const bool threw = runs_out_at(nth, [&] { step(world); });
    const bool was_reached = failures_made != 0;
    then(world, threw);
    if (!was_reached || ::testing::Test::HasFailure()) return;
  }
  FAIL() << "a step of more than " << kMost << " allocations";
}

struct Limited {
  explicit Limited(std::size_t count = 200) {
    for (std::size_t k = 0; k < count; ++k) blocks.push_back(lab.memory().allocate(*pool, kPage, nullptr));
  }
  ~Limited() {
    while (!blocks.empty()) free_one();
  }
  void free_one() {
    const Address block = blocks.back();
    blocks.pop_back();
    EXPECT_TRUE(DeviceMemory::free(lab.space, block));
  }
  void free_until(std::size_t left) {
    while (blocks.size() > left) free_one();
  }
  Lab lab;
  std::shared_ptr<Budget> group = lab.memory().create_group("group", 900 * kMiB);
  std::shared_ptr<Pool> pool = lab.pool(Lab::spec("a"), group.get());
  std::vector<Address> blocks;
};

struct Lowered : Limited {
  Lowered() {
    lab.memory().set_limit(*group, 16 * kMiB);
    free_until(blocks.size() - 63);  // the next one looks at all that are over
  }
};

TEST(LackingMemoryAfter, AFreeOverALimitIsMadeAndTheLimitEnforced) {
  each_in_turn<Lowered>([](Lowered& world) { world.free_one(); },
                        [](Lowered& world, bool threw) {
                          EXPECT_FALSE(threw) << "whoever tries again frees twice";
                          world.free_until(2);
                          EXPECT_LE(world.group->used(), 16 * kMiB);
                          // Threads keep blocks again once nothing is over its limit.
                          world.lab.memory().set_limit(*world.group, 900 * kMiB);
                          DeviceMemory::free(world.lab.space, world.lab.memory().allocate(*world.pool, 512, nullptr));
                          DeviceMemory::free(world.lab.space, world.lab.memory().allocate(*world.pool, 512, nullptr));
                          EXPECT_GT(world.lab.memory().kept_blocks(*world.pool), 0U);
                        });
}

struct Twenty : Limited {
  Twenty() : Limited(20) {}
};

TEST(LackingMemoryAfter, ALimitThatWasSetIsEnforced) {
  each_in_turn<Twenty>([](Twenty& world) { world.lab.memory().set_limit(*world.group, 16 * kMiB); },
                       [](Twenty& world, bool /*threw*/) {
                         world.free_until(2);
                         EXPECT_EQ(world.group->limit(), 16 * kMiB);
                         EXPECT_LE(world.group->used(), 16 * kMiB);
                       });
}

struct WithIdle {
  WithIdle() { DeviceMemory::free(lab.space, lab.memory().allocate(*other, 32 * kMiB, nullptr)); }
  ~WithIdle() {
    other.reset();
    shared.close(/*force=*/true);
  }
  Lab lab;
  SharedMemoryPool shared{lab.memory(), 32 * kMiB};
  std::shared_ptr<Pool> other = shared.register_model("other", {});
};

TEST(LackingMemoryAfter, AModelIsRegisteredWithItsFloorOrNotAtAll) {
  ModelSpec spec;
  spec.floor = 16 * kMiB;
  each_in_turn<WithIdle>([&](WithIdle& world) { world.shared.register_model("a", spec); },
                         [](WithIdle& world, bool threw) {
                           EXPECT_EQ(world.shared.has_model("a"), !threw);
                           EXPECT_EQ(world.lab.memory().pools().size(), threw ? 1U : 2U);
                           std::size_t floors = 0;
                           for (const auto& pool : world.lab.memory().pools()) floors += pool->budget().floor();
                           EXPECT_EQ(floors, threw ? 0U : 16 * kMiB);
                         });
}

struct Closed {
  Closed() : last(lab.memory().allocate(*pool, 64 * kMiB, nullptr)) {
    lab.memory().close_pools({pool}, /*force=*/true);
    pool.reset();
  }
  Lab lab;
  std::shared_ptr<Pool> other = lab.pool("other");
  std::shared_ptr<Pool> pool = lab.pool("closed");
  Address last;
};

TEST(LackingMemoryAfter, AClosedPoolEndsThoughItsLastFreeLackedMemory) {
  each_in_turn<Closed>([](Closed& world) { EXPECT_TRUE(DeviceMemory::free(world.lab.space, world.last)); },
                       [](Closed& world, bool threw) {
                         EXPECT_FALSE(threw) << "the free has been made";
                         for (int k = 0; k < 200; ++k) {  // whoever comes by ends it
                           DeviceMemory::free(world.lab.space,
                                              world.lab.memory().allocate(*world.other, 2 * kMiB, nullptr));
                         }
                         EXPECT_EQ(world.lab.memory().pools().size(), 1U);
                       });
}

struct Houses {
  Houses() {
    for (const char* id : {"one", "two"}) {
      DeviceMemory::free(lab.space, lab.memory().allocate(*shared.register_model(id, {}), 4 * kMiB, nullptr));
    }
  }
  Lab lab;
  std::shared_ptr<Pool> other = lab.pool("other");
  SharedMemoryPool shared{lab.memory(), 256 * kMiB};
};

TEST(LackingMemoryAfter, AClosedSharedPoolsGroupEnds) {
  each_in_turn<Houses>([](Houses& world) { world.shared.close(/*force=*/false); },
                       [](Houses& world, bool threw) {
                         EXPECT_EQ(world.shared.is_closed(), !threw);
                         world.shared.close(/*force=*/false);
                         for (int k = 0; k < 200; ++k) {  // whoever comes by ends it
                           DeviceMemory::free(world.lab.space,
                                              world.lab.memory().allocate(*world.other, 2 * kMiB, nullptr));
                         }
                         EXPECT_EQ(world.lab.memory().groups(), 0U);
                         EXPECT_EQ(world.lab.memory().pools().size(), 1U);
                         EXPECT_EQ(world.lab.driver.live_chunk_bytes(), 2 * kMiB);
                       });
}

struct Peers {
  static LabSpec spec() {
    LabSpec spec;
    spec.device_count = 2;
    return spec;
  }
  Peers() { lab.driver.clear_calls(); }
  ~Peers() {
    for (const Address block : blocks) DeviceMemory::free(lab.space, block);
  }
  Lab lab{spec()};
  std::shared_ptr<Pool> a = lab.pool("a");
  std::shared_ptr<Pool> b = lab.pool("b");
  std::vector<Address> blocks{lab.memory().allocate(*a, 4 * kMiB, nullptr),
                              lab.memory().allocate(*b, 4 * kMiB, nullptr)};
};

TEST(LackingMemoryAfter, AnAccessorIsLetInWhollyOrAtTheNextCall) {
  const Location peer = Location::on_device(1);
  each_in_turn<Peers>([&](Peers& world) { static_cast<void>(world.lab.memory().add_accessor(peer)); },
                      [&](Peers& world, bool /*threw*/) {
                        EXPECT_TRUE(world.lab.memory().add_accessor(peer).ok());
                        EXPECT_GE(world.lab.driver.count(Call::set_access), 2U) << "a run in each pool";
                      });
}

struct TwoRuns : Peers {
  TwoRuns() {
    for (std::size_t k = 0; k < 3; ++k) runs.push_back(lab.memory().allocate(*weights, 4 * kMiB, nullptr));
    DeviceMemory::free(lab.space, runs[1]);
    weights->shed(0);
    static_cast<void>(lab.memory().settle(/*wait=*/true));
  }
  ~TwoRuns() {
    for (const std::size_t k : {0U, 2U}) DeviceMemory::free(lab.space, runs[k]);
  }
  std::shared_ptr<Pool> weights = lab.memory().tagged(a, "weights");
  std::vector<Address> runs;
};

TEST(LackingMemoryAfter, WhoIsLetInHalfwayKeepsNoAccessToWhatIsSealed) {
  each_in_turn<TwoRuns>(
      [&](TwoRuns& world) { static_cast<void>(world.lab.memory().add_accessor(Location::on_device(1))); },
      [&](TwoRuns& world, bool /*threw*/) {
        seal_pages(world.lab.memory(), *world.a, {{world.runs[0], 4 * kMiB}, {world.runs[2], 4 * kMiB}});
        for (const std::size_t k : {0U, 2U}) EXPECT_TRUE(world.weights->is_read_only(world.runs[k], 4 * kMiB)) << k;
      });
}

struct Numbers {
  Numbers() {
    lab.memory().allocate_pages(*a, 0, 4 * kPage, kOne);
    lab.memory().allocate_pages(*b, 0, 3 * kPage, kOne);
    look();
    lab.driver.hold_fences();
    lab.memory().deallocate_pages(*a, 0, kPage);  // a former mapping waits
    look();
    lab.driver.release_fences();
    static_cast<void>(lab.memory().clock().synchronize());
  }
  std::size_t look() { return lab.memory().group_stats(*group).allocated_bytes; }
  static PoolSpec pages(const char* name) {
    PoolSpec spec = Lab::spec(name);
    spec.page_size = kPage;
    return spec;
  }
  Lab lab;
  std::shared_ptr<Budget> group = lab.memory().create_group("group", 64 * kMiB);
  std::shared_ptr<Pool> a = lab.pool(pages("a"), group.get());
  std::shared_ptr<Pool> b = lab.pool(pages("b"), group.get());
};

TEST(LackingMemoryAfter, AGroupsNumbersAreRightTheNextTime) {
  each_in_turn<Numbers>([](Numbers& world) { world.look(); },
                        [](Numbers& world, bool /*threw*/) {
                          EXPECT_EQ(world.look(), 6 * kPage);
                          EXPECT_EQ(world.look(), 6 * kPage);
                        });
}

struct Slabs {
  Slabs() {
    for (int k = 0; k < 15; ++k) blocks.push_back(lab.memory().allocate(*pool, 512, nullptr));
    for (const Address block : blocks) DeviceMemory::free(lab.space, block);
  }
  Lab lab;
  std::shared_ptr<Pool> pool = lab.pool("a");
  std::vector<Address> blocks;
};

TEST(LackingMemoryAfter, BlocksAreKeptWithinChunksByTheNextCall) {
  each_in_turn<Slabs>([](Slabs& world) { world.lab.memory().keep_blocks_within_chunks(); },
                      [](Slabs& world, bool threw) {
                        const std::uint64_t looks = world.pool->times_locked();
                        world.lab.memory().keep_blocks_within_chunks();
                        EXPECT_EQ(world.pool->times_locked() != looks, threw);
                      });
}

}  // namespace
}  // namespace vmm::testing
