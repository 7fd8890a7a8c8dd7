// Pools that the host has no memory for: made whole, or not at all.
#include "cpp/lacking_memory.h"

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/blocks/block_arena.h"
#include "core/blocks/block_directory.h"
#include "cpp/lab.h"
#include "cpp/turns.h"

namespace vmm::testing {
namespace {

struct Making {
  const char* name;
  std::function<std::shared_ptr<Pool>(Lab&, const std::shared_ptr<Pool>& model, Budget& group)> make;
};

class LackingMemory : public ::testing::TestWithParam<Making> {};

TEST_P(LackingMemory, APoolIsMadeWholeOrNotAtAll) {
  bool failed = true;
  for (long nth = 0; failed; ++nth) {
    SCOPED_TRACE("allocation " + std::to_string(nth));
    Lab lab;
    const auto group = lab.memory().create_group("group", kGiB);
    const auto model = lab.pool(Lab::spec("model"), group.get());
    const std::size_t pools = lab.memory().pools().size();
    const std::size_t reservations = lab.driver.live_reservations();
    std::shared_ptr<Pool> made;
    const bool ran_out = runs_out_at(nth, [&] { made = GetParam().make(lab, model, *group); });
    failed = failures_made != 0;
    if (ran_out) {
      EXPECT_EQ(lab.memory().pools().size(), pools);
      EXPECT_EQ(lab.memory().pools_under(*group).size(), 1U);
      EXPECT_EQ(lab.memory().family(*model).size(), 1U);
      EXPECT_EQ(lab.driver.live_reservations(), reservations);
      EXPECT_TRUE(lab.memory().tags_of(*model).empty());
      made = GetParam().make(lab, model, *group);  // another time
    }
    EXPECT_EQ(lab.memory().pools().size(), pools + 1);
    lab.leave_idle(*made, 3 * kMiB);
    lab.memory().check();
    lab.memory().close_pool(*made, /*force=*/true);
    made.reset();
    lab.memory().empty_cache();
    EXPECT_EQ(lab.memory().pools().size(), pools);
  }
}

INSTANTIATE_TEST_SUITE_P(, LackingMemory,
                         ::testing::Values(Making{"model",
                                                  [](Lab& lab, const auto& /*model*/, Budget& group) {
                                                    return lab.pool(Lab::spec("another"), &group);
                                                  }},
                                           Making{"tag",
                                                  [](Lab& lab, const auto& model, Budget& /*group*/) {
                                                    return lab.memory().tagged(model,
                                                                               "a tag of more than a few letters");
                                                  }},
                                           Making{"part",
                                                  [](Lab& lab, const auto& model, Budget& /*group*/) {
                                                    return lab.memory().create_part(model, {0, 1}, /*no_split=*/false);
                                                  }}),
                         [](const auto& each) { return std::string(each.param.name); });

// Of what threads keep of a model: `step` has all threads stand still.
void expect_that_threads_go_on(const std::function<void(Lab&, Pool&)>& step) {
  bool failed = true;
  for (long nth = 0; failed; ++nth) {
    SCOPED_TRACE("allocation " + std::to_string(nth));
    Lab lab;
    Turns turns;
    const auto first = lab.pool("first");
    const auto second = lab.pool("second");
    const auto use = [&] {
      for (const std::size_t thread : {0U, 1U}) {
        turns.on(thread, [&] {
          warm(lab, *first, 512);
          warm(lab, *second, 512);
        });
      }
    };
    use();
    ASSERT_NE(lab.memory().kept_blocks(*first), 0U);
    runs_out_at(nth, [&] { step(lab, *first); });
    failed = failures_made != 0;
    lab.memory().check();
    use();
    step(lab, *first);  // another time
    lab.memory().check();
    EXPECT_EQ(first->live_blocks(), 0U);
  }
}

TEST(LackingMemoryOfThreads, GoOnWhenTheirShardsCannotEnd) {
  expect_that_threads_go_on([](Lab& /*lab*/, Pool& pool) { pool.follow_family_peaks(); });
}

TEST(LackingMemoryOfThreads, GoOnWhenThoseOfAllPoolsCannotEnd) {
  class Silent final : public PoolObserver {
    void on_event(const Pool& /*pool*/, PoolEvent /*event*/, Address /*address*/, std::size_t /*bytes*/,
                  Stream /*stream*/) noexcept override {}
  };
  expect_that_threads_go_on([](Lab& lab, Pool& /*pool*/) {
    Silent silent;
    lab.memory().set_observer(&silent);
    lab.memory().set_observer(nullptr);
  });
}

// The block is there by then, and has to come to whoever asked.
TEST(LackingMemoryOfThreads, WithoutAnyForAShardNothingIsKept) {
  bool failed = true;
  for (long nth = 0; failed; ++nth) {
    SCOPED_TRACE("allocation " + std::to_string(nth));
    Lab lab;
    Turns turns;
    const auto pool = lab.pool("a");
    lab.allocate(*pool, 512);  // space for more, and its stream's tag
    turns.on(0, [&] {
      Address address = 0;
      failed = reaches(nth, [&] { address = lab.memory().allocate(*pool, 512, nullptr); });
      ASSERT_NE(address, 0U);
      EXPECT_TRUE(DeviceMemory::free(lab.space, address));
      EXPECT_EQ(lab.memory().kept_blocks(*pool), failed ? 0U : 1U);
      warm(lab, *pool, 512);
      EXPECT_EQ(lab.memory().kept_blocks(*pool), 1U);
    });
    lab.memory().check();
  }
}

TEST(LackingMemoryOfThreads, TheirShardsEndWithoutAny) {
  Lab lab;
  const auto first = lab.pool("first");
  const auto second = lab.pool("second");
  for (const auto& pool : {first, second}) warm(lab, *pool, 512);
  first->pin();  // there is room to stop threads from now on
  EXPECT_FALSE(runs_out_at(0, [&] { second->pin(); }));
  EXPECT_EQ(lab.memory().kept_blocks(*second), 0U);
  lab.memory().check();
}

TEST(LackingMemoryOfDirectories, ABlockIsTakenOutAllTheSame) {
  for (const std::size_t size : {kMiB, 64 * kKiB}) {  // some in a page, and a table's full
    BlockDirectory directory(8 * kMiB);
    BlockArena arena;
    std::vector<Block*> blocks;
    for (std::size_t offset = 0; offset < 8 * kMiB; offset += size) {
      blocks.push_back(arena.make());
      blocks.back()->reset(offset);
      blocks.back()->set_size(size);
      directory.insert(blocks.back());
    }
    for (const Block* block : blocks) EXPECT_FALSE(runs_out_at(0, [&] { directory.remove(block); }));
    EXPECT_EQ(directory.size(), 0U);
  }
}

// Of four chunks one is on the shelf, three are new; noting the second or third fails.
TEST(LackingMemoryOfRequests, LeaveNoChargeAndNoChunkBehind) {
  for (const long created : {1L, 2L}) {
    SCOPED_TRACE("chunks created: " + std::to_string(created));
    Lab lab;
    PoolSpec spec = Lab::spec("a");
    spec.page_size = kPage;
    const auto pool = lab.pool(spec);
    lab.leave_idle(*pool, kPage);
    pool->shed(0);
    ASSERT_EQ(lab.memory().store().all_shelved_bytes(), kPage);
    bool is_set = false;
    lab.driver.before(Call::create, [&] {
      if (!std::exchange(is_set, true)) allocations_left = created - 1;
    });
    EXPECT_THROW(lab.allocate(*pool, 4 * kPage), std::bad_alloc);
    EXPECT_LT(allocations_left, 0);
    EXPECT_EQ(pool->budget().used(), 0U);
    EXPECT_EQ(lab.memory().budget().used(), lab.driver.live_chunk_bytes());
    EXPECT_EQ(lab.memory().store().all_shelved_bytes(), lab.driver.live_chunk_bytes());
    lab.memory().check();
    lab.allocate(*pool, 4 * kPage);
    EXPECT_EQ(pool->budget().used(), 4 * kPage);
  }
}

}  // namespace
}  // namespace vmm::testing
