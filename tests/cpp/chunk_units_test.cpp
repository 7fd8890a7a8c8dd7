// Chunks of one size where models share a limit: any of them may stand for any other.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lab.h"

namespace vmm::testing {
namespace {

constexpr std::size_t kUnit = 8 * kMiB;

class ChunkUnits : public ::testing::Test {
 protected:
  // Two models under a limit of which a 64th for both is a unit.
  static constexpr std::size_t kLimit = 128 * kUnit;
  explicit ChunkUnits(std::size_t limit = kLimit) : group_(lab_.memory().create_group("shared", limit)) {}

  std::shared_ptr<Pool> model(const std::string& name) {
    PoolSpec spec = Lab::spec(name);
    spec.capacity = 8 * kGiB;
    return lab_.pool(spec, group_.get());
  }
  // Sizes of the chunks that were created since.
  std::vector<std::size_t> created() {
    std::vector<std::size_t> sizes;
    for (const CallRecord& call : lab_.driver.calls(Call::create)) sizes.push_back(call.a);
    return sizes;
  }
  std::vector<Address> allocate(Pool& pool, const std::vector<std::size_t>& mib) {
    std::vector<Address> blocks;
    for (const std::size_t each : mib) blocks.push_back(lab_.allocate(pool, each * kMiB));
    return blocks;
  }
  void free(const std::vector<Address>& blocks) {
    for (const Address block : blocks) lab_.free(block);
  }

  // Whatever `ask` asks for, the function that frees memory under pressure is not called, and
  // the host waits for nobody.
  template <typename Ask>
  void expect_nobody_called(const Ask& ask) {
    int called = 0;
    lab_.memory().set_on_pressure(*group_, [&](std::size_t /*bytes*/, const std::shared_ptr<Pool>& /*asker*/) {
      ++called;
      return false;
    });
    lab_.driver.clear_calls();
    ask();
    EXPECT_EQ(called, 0);
    EXPECT_EQ(lab_.driver.count(Call::wait) + lab_.driver.count(Call::synchronize), 0U);
    lab_.memory().set_on_pressure(*group_, nullptr);
  }

  Lab lab_{LabSpec{64 * kGiB}};
  const std::shared_ptr<Budget> group_;
};

TEST_F(ChunkUnits, StandAtMultiplesOfThemselvesAndAreWhole) {
  const auto a = model("a");
  const auto b = model("b");
  lab_.driver.clear_calls();
  allocate(*a, {20, 7, 100, 3});
  EXPECT_EQ(created(), std::vector<std::size_t>(17, kUnit)) << "130 MiB, and what is left of one serves the next";
  for (const CallRecord& call : lab_.driver.calls(Call::map)) EXPECT_EQ(call.a % kUnit, 0U);
  lab_.memory().check();
}

TEST_F(ChunkUnits, AnyServesAnyRequestOfAnotherModel) {
  const auto a = model("a");
  const auto b = model("b");
  free(allocate(*a, std::vector<std::size_t>(50, 20)));
  lab_.driver.clear_calls();
  free(allocate(*b, {300, 111, 37, 41, 500}));
  free(allocate(*a, {17, 23, 600, 300}));
  EXPECT_EQ(lab_.driver.count(Call::release), 0U) << "nothing is given back for want of a size";
  for (const std::size_t size : created()) EXPECT_EQ(size, kUnit);
  EXPECT_LE(group_->used(), group_->limit());
  lab_.memory().check();
}

TEST_F(ChunkUnits, ModelsThatDoTheSameInEveryTurnGetTheSameChunksBack) {
  const auto a = model("a");
  const auto b = model("b");
  const std::vector<std::size_t> sizes(24, 40);
  for (int turn = 0; turn < 6; ++turn) {
    if (turn == 4) lab_.driver.clear_calls();  // in two turns each has its memory, and there is some to spare
    free(allocate(turn % 2 == 0 ? *a : *b, sizes));
  }
  for (const Call call : {Call::create, Call::map, Call::set_access, Call::unmap, Call::release}) {
    EXPECT_EQ(lab_.driver.count(call), 0U) << static_cast<int>(call);
  }
  lab_.memory().check();
}

// A limit is kept to the page, and all of it can be used.
TEST_F(ChunkUnits, WhereNobodyHasAnyMoreThePageCounts) {
  const auto a = model("a");
  const auto b = model("b");
  allocate(*b, {514});
  const std::size_t left = kLimit - 520 * kMiB;
  lab_.memory().set_limit(*group_, kLimit - 2 * kMiB);
  lab_.allocate(*a, left - 2 * kMiB);
  EXPECT_EQ(group_->used(), kLimit - 2 * kMiB);
  EXPECT_THROW(lab_.allocate(*a, kMiB + 1), OutOfMemoryError);
  lab_.memory().check();
}

TEST_F(ChunkUnits, AModelsOwnLimitIsKeptToThePageToo) {
  const auto b = model("b");
  PoolSpec spec = Lab::spec("a");
  spec.capacity = kGiB;
  spec.physical_limit = 102 * kMiB;
  const auto a = lab_.pool(spec, group_.get());
  allocate(*a, {50, 50, 2});
  EXPECT_EQ(a->physical_bytes(), 102 * kMiB);
  lab_.memory().check();
}

// What a model took while it was alone is of any size, and is no use to others; its bytes are.
TEST_F(ChunkUnits, ChunksOfOtherSizesMakeRoomForThem) {
  const auto a = model("a");
  std::vector<Address> blocks;
  for (std::size_t left = kLimit; left >= 34 * kMiB; left -= 34 * kMiB) blocks.push_back(lab_.allocate(*a, 34 * kMiB));
  free(blocks);
  const auto b = model("b");
  for (int turn = 0; turn < 3; ++turn) {
    free(allocate(*b, {300, 111, 37, 41, 500}));
    free(allocate(*a, {17, 23, 600, 300}));
    lab_.memory().check();
  }
  EXPECT_LE(group_->used(), group_->limit());
}

// They are found on the rung of what others have, before anybody is called or waited for.
TEST_F(ChunkUnits, NobodyIsCalledWhileOthersHaveChunksOfOtherSizes) {
  const auto a = model("a");
  std::vector<Address> blocks;
  for (int k = 0; k < 30; ++k) blocks.push_back(lab_.allocate(*a, 34 * kMiB));
  free(blocks);
  const auto b = model("b");
  expect_nobody_called([&] {
    for (int k = 0; k < 20; ++k) lab_.allocate(*b, 34 * kMiB);
  });
}

TEST_F(ChunkUnits, NorWhereALimitHasRoomForThePage) {
  const auto a = model("a");
  const auto b = model("b");
  lab_.memory().set_limit(*group_, kLimit - kPage);
  lab_.allocate(*b, 512 * kMiB);
  lab_.allocate(*a, 504 * kMiB);
  expect_nobody_called([&] { lab_.allocate(*a, kPage + 512); });
}

TEST_F(ChunkUnits, NorWhereUnitsWereSmallerBefore) {
  const auto a = model("a");
  const auto b = model("b");
  lab_.leave_idle(*a, 800 * kMiB);
  lab_.memory().set_limit(*group_, 5 * kLimit);
  lab_.allocate(*b, 5 * kLimit - 840 * kMiB);
  expect_nobody_called([&] {
    for (int k = 0; k < 10; ++k) lab_.allocate(*b, 64 * kMiB);
  });
}

TEST_F(ChunkUnits, StreamsOfLittleStrandNoUnits) {
  const auto a = model("a");
  const auto b = model("b");
  lab_.leave_idle(*a, 64 * kMiB);
  for (std::uintptr_t k = 1; k <= 32; ++k) lab_.allocate(*a, 512, stream(k));
  EXPECT_LE(a->physical_bytes(), 64 * kMiB + 32 * kPage);
}

TEST_F(ChunkUnits, ASmallModelTakesNoMoreThanItNeeds) {
  const auto a = model("a");
  const auto b = model("b");
  lab_.allocate(*a, 512);
  EXPECT_EQ(a->physical_bytes(), kPage);
  lab_.allocate(*a, 6 * kMiB);
  EXPECT_EQ(a->physical_bytes(), 4 * kPage);
}

// Blocks below a quarter of a unit stand among the slabs, as close together as elsewhere.
TEST_F(ChunkUnits, SmallBlocksLieCloseTogether) {
  const auto a = model("a");
  const auto b = model("b");
  lab_.memory().set_limit(*group_, 40 * kGiB);  // units of 32 MiB
  for (const std::size_t bytes : {1100 * kKiB, 2100 * kKiB, 7 * kMiB}) {
    const std::vector<Address> blocks = [&] {
      std::vector<Address> found;
      for (int k = 0; k < 300; ++k) found.push_back(lab_.allocate(*a, bytes));
      return found;
    }();
    EXPECT_LE(a->physical_bytes(), 300 * bytes + 300 * bytes / 50) << bytes;
    free(blocks);
    lab_.memory().trim(*a, 0);
  }
}

TEST_F(ChunkUnits, SmallBlocksLeaveThePlacesOfUnitsWhole) {
  const auto a = model("a");
  const auto b = model("b");
  lab_.leave_idle(*a, 300 * kMiB);
  lab_.memory().empty_cache();
  for (int k = 0; k < 8; ++k) {
    lab_.allocate(*a, 1500 * kKiB);
    lab_.allocate(*a, 22 * kMiB);
  }
  std::size_t odd = 0;
  for (const CallRecord& call : lab_.driver.calls(Call::map)) odd += call.b % kUnit == 0 ? 0 : call.b;
  EXPECT_LE(odd, 12 * kMiB) << "what the small ones need, and nothing in between";
}

TEST_F(ChunkUnits, AtItsOwnLimitAModelUsesItsOwn) {
  const auto b = model("b");
  PoolSpec spec = Lab::spec("a", 512 * kMiB);
  const auto a = lab_.pool(spec, group_.get());
  for (int k = 0; k < 56; ++k) lab_.allocate(*a, kUnit);
  lab_.leave_idle(*a, 64 * kMiB, stream(2));
  ASSERT_EQ(a->physical_bytes(), 512 * kMiB);
  expect_nobody_called([&] { lab_.allocate(*a, 1900 * kKiB); });
}

// Chunks of the shelf that a failed attempt took are room below a limit that carries no shelf: as
// before it, and its own of other sizes do.
TEST_F(ChunkUnits, AtItsOwnLimitBesideAFullShelfAModelUsesItsOwn) {
  PoolSpec spec = Lab::spec("a");
  spec.capacity = 8 * kGiB;
  const auto a = lab_.pool(spec, group_.get());
  lab_.allocate(*a, 500 * kMiB);
  std::vector<Address> odd;
  for (int k = 0; k < 8; ++k) odd.push_back(lab_.allocate(*a, 10 * kMiB));
  const auto b = model("b");
  lab_.leave_idle(*b, 128 * kMiB);
  b->shed(0);
  ASSERT_GE(lab_.memory().store().shelved_bytes(*group_), 128 * kMiB);
  for (std::size_t k = 1; k < odd.size(); k += 2) lab_.free(odd[k]);
  lab_.memory().set_limit(a->budget(), a->physical_bytes() + 20 * kMiB);
  expect_nobody_called([&] { lab_.allocate(*a, 40 * kMiB); });
}

// Each of them strands a part of one for each stream.
TEST_F(ChunkUnits, ManyModelsHaveSmallerOnes) {
  std::vector<std::shared_ptr<Pool>> models;
  for (int k = 0; k < 60; ++k) models.push_back(model("model " + std::to_string(k)));
  for (const auto& each : models) lab_.allocate(*each, 6 * kMiB);
  EXPECT_EQ(group_->used(), 60 * 6 * kMiB);
}

// Where it is the device that has no more, and no limit says so.
TEST(ChunkUnitsOfADevice, TheDriversMemoryIsUsedToThePage) {
  Lab lab(LabSpec{kGiB});
  const auto outside = lab.pool("outside");
  lab.allocate(*outside, 190 * kMiB);
  const std::size_t limit = kGiB - kPage;
  const auto group = lab.memory().create_group("shared", limit);
  const auto a = lab.pool(Lab::spec("a"), group.get());
  const auto b = lab.pool(Lab::spec("b"), group.get());
  lab.allocate(*b, 400 * kMiB);
  lab.free(lab.allocate(*a, 100 * kMiB));
  const std::size_t left = kGiB - lab.driver.live_chunk_bytes();
  lab.allocate(*a, 100 * kMiB + left);
  EXPECT_EQ(lab.driver.live_chunk_bytes(), kGiB);
  lab.memory().check();
}

// Between a request's attempt and the rung that asks others, when nobody has to give any more.
TEST(ChunkUnitsMeanwhile, RoomThatComesIsTakenAndNobodyYields) {
  LabSpec of_lab;
  of_lab.granularity = 64 * kKiB;
  Lab lab(of_lab);
  const auto group = lab.memory().create_group("shared", 48 * kMiB);
  const auto model = [&](const char* name, int priority) {
    PoolSpec spec = Lab::spec(name);
    spec.priority = priority;
    return lab.pool(spec, group.get());
  };
  const auto asker = model("asker", 0);
  const auto equal = model("equal", 0);
  const auto more_important = model("more important", 1);
  lab.allocate(*equal, 20 * kMiB);
  const Address freed = lab.allocate(*equal, 4 * kMiB);
  lab.allocate(*more_important, 16 * kMiB);
  lab.driver.hold_fences();
  lab.free(freed);
  equal->shed(0);  // it rests on the shelf, and its fence is asked for once the limit has refused
  bool is_raised = false;
  lab.driver.before(Call::query, [&] {
    if (!std::exchange(is_raised, true)) group->set_limit(100 * kMiB);
  });
  lab.allocate(*asker, 16 * kMiB);
  EXPECT_TRUE(is_raised) << "the test is about nothing";
  EXPECT_EQ(more_important->physical_bytes(), 16 * kMiB);
  EXPECT_EQ(equal->physical_bytes(), 20 * kMiB);
  lab.driver.before(Call::query, nullptr);
  lab.driver.release_fences();
  lab.memory().check();
}

}  // namespace
}  // namespace vmm::testing
