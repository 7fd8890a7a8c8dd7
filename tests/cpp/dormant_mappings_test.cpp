#include "core/memory/dormant_mappings.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "cpp/lab.h"
#include "cpp/lacking_memory.h"

namespace vmm::testing {
namespace {

constexpr std::size_t kSmall = 4 * kKiB;  // small pages: more mappings than are kept cost no memory
constexpr std::size_t kPages = DormantMappings::kMost + 16;

// A reservation, chunks of pages, and mappings of them that nobody uses.
class Dormant : public ::testing::Test {
 protected:
  Dormant() { EXPECT_TRUE(driver_.reserve(kPages * kSmall, kSmall, &base_).ok()); }
  ~Dormant() override {
    driver_.clear_failures();
    EXPECT_TRUE(dormant_.clear(base_, kPages * kSmall).ok());
    EXPECT_EQ(dormant_.size(), 0U);
    EXPECT_EQ(driver_.live_mappings(), 0U);
    for (const auto& chunk : chunks_) EXPECT_TRUE(driver_.release(chunk->handle).ok());
    EXPECT_TRUE(driver_.unreserve(base_, kPages * kSmall).ok());
  }
  Chunk* chunk(std::size_t pages = 1) {
    chunks_.push_back(std::make_unique<Chunk>());
    Chunk* fresh = chunks_.back().get();
    fresh->size = pages * kSmall;
    EXPECT_TRUE(driver_.create({fresh->size, Location::on_device(0), false}, &fresh->handle).ok());
    return fresh;
  }
  Address at(std::size_t page) const { return base_ + page * kSmall; }
  void map(std::size_t page, const Chunk* chunk) {
    ASSERT_TRUE(driver_.map(at(page), chunk->size, chunk->handle).ok());
  }
  void keep(std::size_t page, Chunk* chunk) {
    map(page, chunk);
    ASSERT_TRUE(dormant_.keep(at(page), chunk, &unmapped_));
  }
  void unmap(std::size_t page, std::size_t pages = 1) { ASSERT_TRUE(driver_.unmap(at(page), pages * kSmall).ok()); }
  std::vector<std::size_t> kept(std::size_t page = 0, std::size_t pages = kPages) const {
    std::vector<std::size_t> found;
    for (const auto& each : dormant_.within(at(page), pages * kSmall)) found.push_back((each.address - base_) / kSmall);
    return found;
  }
  using Kept = std::vector<std::size_t>;

  HostDriver host_{HostDriverOptions{kSmall, kGiB, 1}};
  ScriptedDriver driver_{host_};
  DormantMappings dormant_{driver_};
  Address base_ = 0;
  std::atomic<std::int64_t> unmapped_{0};
  std::vector<std::unique_ptr<Chunk>> chunks_;
};

TEST_F(Dormant, IsClaimedByTheSameChunkAtTheSamePlaceAlone) {
  Chunk* kept_one = chunk();
  keep(3, kept_one);
  EXPECT_FALSE(dormant_.claim(at(3), chunk()));
  EXPECT_FALSE(dormant_.claim(at(4), kept_one));
  EXPECT_EQ(dormant_.size(), 1U);
  driver_.clear_calls();
  EXPECT_TRUE(dormant_.claim(at(3), kept_one));
  EXPECT_EQ(driver_.count(), 0U) << "it is there already";
  EXPECT_EQ(dormant_.size(), 0U);
  EXPECT_FALSE(dormant_.claim(at(3), kept_one)) << "it is the caller's";
  EXPECT_TRUE(dormant_.clear_of(kept_one).ok());
  EXPECT_EQ(driver_.live_mappings(), 1U) << "which nobody else unmaps";
  EXPECT_EQ(unmapped_, 0);
  unmap(3);
}

TEST_F(Dormant, AChunkMayHaveSeveralPlaces) {
  Chunk* one = chunk();
  Chunk* two = chunk();
  keep(1, one);
  keep(4, one);
  keep(2, two);
  keep(9, one);
  EXPECT_TRUE(dormant_.claim(at(4), one));
  EXPECT_EQ(kept(), (Kept{1, 2, 9})) << "the others stay";
  EXPECT_TRUE(dormant_.clear_of(one).ok());
  EXPECT_EQ(kept(), (Kept{2}));
  EXPECT_EQ(unmapped_, 2);
  EXPECT_EQ(driver_.live_mappings(), 2U);
  unmap(4);
}

TEST_F(Dormant, ClearsWhatReachesInAndNothingBeside) {
  keep(0, chunk(2));
  keep(2, chunk(4));  // reaches in from before
  keep(6, chunk());
  keep(7, chunk(3));  // and out behind
  keep(10, chunk());
  EXPECT_TRUE(dormant_.clear(at(2) + 3 * kSmall, 3 * kSmall).ok());
  EXPECT_EQ(kept(), (Kept{0, 10})) << "those that touch it stay";
  EXPECT_EQ(unmapped_, 3);
  EXPECT_EQ(driver_.live_mappings(), 2U);
  EXPECT_TRUE(dormant_.clear(at(2), 8 * kSmall).ok());
  EXPECT_EQ(unmapped_, 3);
}

TEST_F(Dormant, OnlyWhatLiesWhollyInsideIsWithin) {
  Chunk* last = chunk(3);
  keep(7, last);
  keep(0, chunk(2));
  keep(2, chunk());
  last->content = 17;
  EXPECT_EQ(kept(), (Kept{0, 2, 7})) << "by address";
  EXPECT_EQ(kept(1, 9), (Kept{2, 7})) << "not what reaches in from before";
  EXPECT_EQ(kept(0, 9), (Kept{0, 2})) << "nor what reaches out";
  EXPECT_TRUE(kept(3, 4).empty());
  const auto found = dormant_.within(at(7), 3 * kSmall);
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(found[0].chunk, last);
  EXPECT_EQ(found[0].size, 3 * kSmall);
  EXPECT_EQ(found[0].holder, 17U) << "who had it last";
}

// The bare space behind a request may be all of a pool, with thousands of them.
TEST_F(Dormant, WhatBeginsBeyondIsNotLookedAt) {
  keep(0, chunk(2));
  keep(2, chunk(2));
  keep(4, chunk(2));
  const auto reaching = [&](std::size_t pages, std::size_t beyond) {
    Kept found;
    for (const auto& each : dormant_.within(at(0), pages * kSmall, beyond * kSmall)) {
      found.push_back((each.address - base_) / kSmall);
    }
    return found;
  };
  EXPECT_EQ(reaching(3, 0), (Kept{0}));
  EXPECT_EQ(reaching(3, 1), (Kept{0, 2}));
  EXPECT_EQ(reaching(3, kPages), (Kept{0, 2}));
}

TEST_F(Dormant, WhatTheDriverRefusesStays) {
  Chunk* one = chunk();
  keep(0, one);
  keep(1, chunk());
  keep(2, chunk());
  driver_.fail_nth(Call::unmap, 2, broken());
  EXPECT_EQ(dormant_.clear(at(0), 3 * kSmall).code(), StatusCode::driver_error);
  EXPECT_EQ(kept(), (Kept{1})) << "and the others go all the same";
  EXPECT_EQ(unmapped_, 2);
  EXPECT_TRUE(dormant_.clear(at(0), 3 * kSmall).ok()) << "another time";
  EXPECT_EQ(unmapped_, 3);
}

TEST_F(Dormant, WhatTheDriverRefusesOfAChunkStays) {
  Chunk* one = chunk();
  keep(0, one);
  driver_.fail_nth(Call::unmap, 1, broken());
  EXPECT_FALSE(dormant_.clear_of(one).ok());
  driver_.fail_nth(Call::unmap, 1, broken());
  EXPECT_FALSE(dormant_.ban(one).ok());
  EXPECT_EQ(kept(), (Kept{0}));
  EXPECT_EQ(unmapped_, 0);
  keep(1, one);  // it was not banned
  EXPECT_TRUE(dormant_.claim(at(0), one));
  unmap(0);
}

TEST_F(Dormant, AbandonForgetsWhatTheDriverRefuses) {
  keep(0, chunk());
  keep(1, chunk(2));
  keep(3, chunk());
  driver_.fail_if([&](const CallRecord& call) { return call.call == Call::unmap && call.a == at(1); }, broken());
  dormant_.abandon(at(0), 3 * kSmall);
  EXPECT_EQ(kept(), (Kept{3}));
  EXPECT_EQ(unmapped_, 1);
  EXPECT_EQ(driver_.live_mappings(), 2U);
  driver_.clear_failures();
  unmap(1, 2);
}

TEST_F(Dormant, WhatADriverHadThatHasGoneIsUnmapped) {
  keep(0, chunk());
  driver_.fail_nth(Call::unmap, 1, {StatusCode::driver_gone, "scripted"});
  EXPECT_TRUE(dormant_.clear(at(0), kSmall).ok());
  EXPECT_EQ(dormant_.size(), 0U);
  unmap(0);  // this one has not
}

TEST_F(Dormant, ABannedChunkKeepsNone) {
  Chunk* one = chunk();
  Chunk* two = chunk();
  keep(0, one);
  keep(1, one);
  keep(2, two);
  EXPECT_TRUE(dormant_.ban(one).ok());
  EXPECT_EQ(kept(), (Kept{2})) << "another chunk's";
  EXPECT_EQ(driver_.live_mappings(), 1U);
  map(0, one);
  EXPECT_FALSE(dormant_.keep(at(0), one, &unmapped_));
  EXPECT_EQ(driver_.live_mappings(), 2U) << "the caller unmaps it";
  dormant_.allow(one);
  EXPECT_TRUE(dormant_.keep(at(0), one, &unmapped_));
  EXPECT_EQ(kept(), (Kept{0, 2}));
}

TEST_F(Dormant, TheOldestGoesWhereThereAreMore) {
  Chunk* one = chunk();
  for (std::size_t page = 0; page < DormantMappings::kMost; ++page) keep(page, one);
  EXPECT_EQ(dormant_.size(), DormantMappings::kMost);
  EXPECT_EQ(unmapped_, 0);
  // The first is claimed and kept again: then it is the newest.
  ASSERT_TRUE(dormant_.claim(at(0), one));
  ASSERT_TRUE(dormant_.keep(at(0), one, &unmapped_));
  keep(DormantMappings::kMost, one);
  EXPECT_EQ(dormant_.size(), DormantMappings::kMost);
  EXPECT_EQ(unmapped_, 1);
  EXPECT_EQ(kept(0, 3), (Kept{0, 2}));
  // What the driver does not let go of makes no room.
  map(DormantMappings::kMost + 1, one);
  driver_.fail_nth(Call::unmap, 1, broken());
  EXPECT_FALSE(dormant_.keep(at(DormantMappings::kMost + 1), one, &unmapped_));
  EXPECT_EQ(kept(0, 3), (Kept{0, 2})) << "nor is it forgotten";
  EXPECT_EQ(dormant_.size(), DormantMappings::kMost);
  unmap(DormantMappings::kMost + 1);
}

TEST_F(Dormant, WithoutMemoryToNoteItNothingIsKept) {
  Chunk* one = chunk();
  keep(0, one);
  map(1, one);
  bool is_kept = false;
  long nth = 0;
  for (; !is_kept; ++nth) {
    SCOPED_TRACE("allocation " + std::to_string(nth));
    allocations_left = nth;
    is_kept = dormant_.keep(at(1), one, &unmapped_);
    allocations_left = -1;
    EXPECT_EQ(kept(), is_kept ? (Kept{0, 1}) : (Kept{0}));
    if (is_kept) break;
    // Nothing of it is left behind in any of the three indexes.
    driver_.clear_calls();
    EXPECT_FALSE(dormant_.claim(at(1), one));
    EXPECT_TRUE(dormant_.clear_of(one).ok());
    EXPECT_EQ(driver_.count(Call::unmap), 1U);
    EXPECT_EQ(driver_.live_mappings(), 1U);
    keep(0, one);
  }
  EXPECT_GE(nth, 3);
  for (std::size_t page = 2; page <= DormantMappings::kMost; ++page) keep(page, one);
  EXPECT_EQ(kept(0, 3), (Kept{1, 2})) << "nor does it count as the oldest";
}

}  // namespace
}  // namespace vmm::testing
