#include "core/memory/mapped_range.h"

#include <gtest/gtest.h>

#include <memory>

#include "cpp/lab.h"
#include "cpp/lacking_memory.h"

namespace vmm::testing {
namespace {

const Location kDevice = Location::on_device(0);

// A reservation of 16 pages and chunks to stand in it.
class Range : public ::testing::Test {
 protected:
  Range() {
    driver_.set_wait_on_held(ScriptedDriver::WaitOnHeld::pass);
    EXPECT_TRUE(driver_.reserve(16 * kPage, kPage, &base_).ok());
    range_ = std::make_unique<MappedRange>(driver_, base_, 16 * kPage);
  }
  ~Range() override {
    driver_.clear_failures();
    driver_.release_fences();
    EXPECT_TRUE(clock_.wait(clock_.now()).ok());
    range_->drop_retired(clock_);
    while (!range_->live().empty()) {
      const auto& [offset, mapping] = *range_->live().begin();
      EXPECT_TRUE(range_->unmap({offset, mapping.chunk->size}).ok());
    }
    EXPECT_TRUE(range_->clear_dormant().ok());
    for (const auto& chunk : chunks_) {
      EXPECT_EQ(chunk->mappings.load(), 0);
      EXPECT_TRUE(driver_.release(chunk->handle).ok());
    }
    EXPECT_TRUE(driver_.unreserve(base_, 16 * kPage).ok());
  }
  Chunk* chunk(std::size_t pages = 1) {
    chunks_.push_back(std::make_unique<Chunk>());
    Chunk* fresh = chunks_.back().get();
    fresh->size = pages * kPage;
    EXPECT_TRUE(driver_.create({fresh->size, kDevice, false}, &fresh->handle).ok());
    return fresh;
  }
  Status map(std::vector<PlacedChunk> placements) { return range_->map(placements, std::vector<Location>{kDevice}); }

  HostDriver host_{HostDriverOptions{kPage, kGiB, 1}};
  ScriptedDriver driver_{host_};
  DeviceStreams streams_{driver_, 0};
  Clock clock_{streams_};
  Address base_ = 0;
  DormantMappings dormant_{driver_};
  std::unique_ptr<MappedRange> range_;
  std::vector<std::unique_ptr<Chunk>> chunks_;
};

TEST_F(Range, MapsEveryChunkAndOpensEachRunInOneCall) {
  ASSERT_TRUE(map({{0, chunk(2)}, {2 * kPage, chunk()}, {5 * kPage, chunk()}}).ok());
  EXPECT_EQ(range_->mapped_bytes(), 4 * kPage);
  EXPECT_EQ(range_->live().size(), 3U);
  EXPECT_EQ(driver_.count(Call::set_access), 2U) << "two runs";
  Lab::fill(base_, 3 * kPage, 1);
  Lab::fill(base_ + 5 * kPage, kPage, 2);
  EXPECT_TRUE(Lab::holds(base_, 3 * kPage, 1));
  for (const auto& chunk : chunks_) EXPECT_EQ(chunk->mappings.load(), 1);
}

TEST_F(Range, AFailedCallLeavesNothingMapped) {
  const std::vector<PlacedChunk> placements = {{0, chunk(2)}, {2 * kPage, chunk()}, {5 * kPage, chunk()}};
  std::uint64_t n = 1;
  for (;; ++n) {
    driver_.clear_failures();
    driver_.fail_nth_call(n, no_memory());
    const Status status = map(placements);
    if (driver_.failures() == 0) break;
    EXPECT_EQ(status.code(), StatusCode::out_of_memory) << n;
    EXPECT_EQ(driver_.live_mappings(), 0U) << n;
    EXPECT_EQ(range_->mapped_bytes(), 0U) << n;
    EXPECT_TRUE(range_->live().empty()) << n;
    for (const auto& chunk : chunks_) EXPECT_EQ(chunk->mappings.load(), 0) << n;
  }
  EXPECT_EQ(n, 6U) << "three maps and two set_access";
  EXPECT_EQ(driver_.live_mappings(), 3U);
}

TEST_F(Range, GapsAreWhatLacksAMapping) {
  ASSERT_TRUE(map({{2 * kPage, chunk(2)}, {6 * kPage, chunk()}}).ok());
  using Gaps = std::vector<ByteRange>;
  EXPECT_EQ(range_->gaps({0, 16 * kPage}), (Gaps{{0, 2 * kPage}, {4 * kPage, 2 * kPage}, {7 * kPage, 9 * kPage}}));
  EXPECT_EQ(range_->gaps({3 * kPage, 2 * kPage}), (Gaps{{4 * kPage, kPage}})) << "from the middle of a chunk";
  EXPECT_EQ(range_->gaps({2 * kPage, 2 * kPage}), Gaps{});
  EXPECT_EQ(range_->gaps({3 * kPage + 512, 1024}), Gaps{});
  EXPECT_EQ(range_->missing_bytes({0, 16 * kPage}), 13 * kPage);
  EXPECT_EQ(range_->covering(3 * kPage)->first, 2 * kPage);
  EXPECT_EQ(range_->covering(4 * kPage), range_->live().end());
  EXPECT_EQ(range_->reaching(3 * kPage)->first, 2 * kPage);
  EXPECT_EQ(range_->reaching(4 * kPage)->first, 6 * kPage);
  EXPECT_EQ(range_->reaching(7 * kPage), range_->live().end());
  EXPECT_EQ(range_->from(3 * kPage)->first, 6 * kPage);
}

TEST_F(Range, UnmapsARunInOneCallOrNotAtAll) {
  ASSERT_TRUE(map({{0, chunk()}, {kPage, chunk()}, {2 * kPage, chunk()}}).ok());
  driver_.fail_nth(Call::unmap, 1, broken());
  EXPECT_FALSE(range_->unmap({0, 2 * kPage}).ok());
  EXPECT_EQ(range_->mapped_bytes(), 3 * kPage);
  driver_.clear_calls();
  EXPECT_TRUE(range_->unmap({0, 2 * kPage}).ok());
  EXPECT_EQ(driver_.count(Call::unmap), 1U);
  EXPECT_EQ(range_->mapped_bytes(), kPage);
  EXPECT_EQ(range_->live().begin()->first, 2 * kPage);
}

TEST_F(Range, ARetiredMappingStaysUntilItsFenceHasPassed) {
  Chunk* moved = chunk();
  ASSERT_TRUE(map({{0, moved}}).ok());
  Lab::fill(base_, kPage, 1);
  driver_.hold_fences();
  const Epoch last_use = clock_.now();
  EXPECT_EQ(range_->retire(0, last_use), moved);
  EXPECT_EQ(range_->mapped_bytes(), 0U);
  EXPECT_TRUE(range_->live().empty());
  EXPECT_TRUE(range_->has_retired());
  // The chunk already stands elsewhere; work at the old address still sees it.
  ASSERT_TRUE(map({{4 * kPage, moved}}).ok());
  EXPECT_TRUE(Lab::holds(base_, kPage, 1) && Lab::holds(base_ + 4 * kPage, kPage, 1));
  EXPECT_EQ(moved->mappings.load(), 2);
  EXPECT_TRUE(range_->drop_retired(clock_).empty()) << "no tick covers it";
  clock_.cover(last_use);
  EXPECT_FALSE(clock_.poll());
  EXPECT_TRUE(range_->drop_retired(clock_).empty());
  driver_.release_fences();
  EXPECT_TRUE(clock_.poll());
  EXPECT_EQ(range_->drop_retired(clock_), (std::vector<ByteRange>{{0, kPage}}));
  EXPECT_EQ(moved->mappings.load(), 1);
  EXPECT_EQ(driver_.live_mappings(), 1U);
}

TEST_F(Range, KnowsTheNewestUseOfWhatIsRetired) {
  ASSERT_TRUE(map({{0, chunk()}, {kPage, chunk()}}).ok());
  EXPECT_EQ(range_->last_retired_use(), kLongAgo);
  const Epoch earlier = clock_.now();
  clock_.cover(earlier);
  const Epoch later = clock_.now();
  range_->retire(0, later);
  range_->retire(kPage, earlier);
  EXPECT_EQ(range_->last_retired_use(), later);
}

TEST_F(Range, AMappingThatTheDriverKeepsIsTriedAgain) {
  ASSERT_TRUE(map({{0, chunk()}, {kPage, chunk()}}).ok());
  range_->retire(0, kLongAgo);
  range_->retire(kPage, kLongAgo);
  driver_.fail_nth(Call::unmap, 1, broken());
  EXPECT_EQ(range_->drop_retired(clock_), (std::vector<ByteRange>{{kPage, kPage}}));
  EXPECT_EQ(range_->retired_count(), 1U);
  EXPECT_EQ(range_->drop_retired(clock_), (std::vector<ByteRange>{{0, kPage}}));
}

TEST_F(Range, RemembersEveryonesRights) {
  ASSERT_TRUE(range_->map(std::vector<PlacedChunk>{{0, chunk()}}, {}).ok());
  EXPECT_EQ(range_->live().begin()->second.access(), Access::none);
  ASSERT_TRUE(range_->set_access({0, kPage}, kDevice, Access::read_write).ok());
  ASSERT_TRUE(range_->set_access({0, kPage}, Location::on_host(), Access::read).ok());
  const LiveMapping& mapping = range_->live().begin()->second;
  EXPECT_EQ(mapping.access_of(kDevice), Access::read_write);
  EXPECT_EQ(mapping.access_of(Location::on_host()), Access::read);
  EXPECT_EQ(mapping.access(), Access::read_write) << "the strongest";
  driver_.fail_nth(Call::set_access, 1, broken());
  EXPECT_FALSE(range_->set_access({0, kPage}, kDevice, Access::none).ok());
  EXPECT_EQ(mapping.access(), Access::read_write);
}

// ------------------------------------------------------------------- dormant

// A range of which what goes stays mapped in case it comes back.
class ReturningRange : public Range {
 protected:
  ReturningRange() { range_ = std::make_unique<MappedRange>(driver_, base_, 16 * kPage, &dormant_); }

  Chunk* leave(std::size_t offset) {
    Chunk* gone = range_->retire(offset, kLongAgo, MappedRange::Fate::may_return);
    range_->drop_retired(clock_);
    return gone;
  }
  // A chunk that was at `offset`, with its pattern there, and is elsewhere or nowhere.
  Chunk* leave_one(std::size_t offset, std::size_t pages = 1) {
    Chunk* fresh = chunk(pages);
    EXPECT_TRUE(map({{offset, fresh}}).ok());
    Lab::fill(base_ + offset, fresh->size, offset + 1);
    return leave(offset);
  }

  using Pages = std::vector<std::size_t>;
  Pages dormant_at() const {
    Pages found;
    for (const auto& each : range_->dormant_in({0, 16 * kPage})) found.push_back((each.address - base_) / kPage);
    return found;
  }
  // Mappings that the driver made and has not undone.
  std::int64_t driven() const { return range_->mapped_by_driver() - range_->unmapped_by_driver(); }
};

TEST_F(ReturningRange, AChunkThatComesBackIsThereAlready) {
  Chunk* const gone = leave_one(0);
  EXPECT_EQ(gone->mappings, 0) << "it may go wherever it likes";
  EXPECT_EQ(range_->mapped_bytes(), 0U);
  EXPECT_TRUE(range_->live().empty());
  EXPECT_EQ(range_->unmapped_by_driver(), 0);
  ASSERT_TRUE(map({{4 * kPage, gone}}).ok());
  EXPECT_TRUE(Lab::holds(base_ + 4 * kPage, kPage, 1));
  Lab::fill(base_ + 4 * kPage, kPage, 9);
  leave(4 * kPage);
  driver_.clear_calls();
  ASSERT_TRUE(map({{0, gone}}).ok());
  EXPECT_EQ(driver_.count(), 0U) << driver_.transcript();
  EXPECT_TRUE(Lab::holds(base_, kPage, 9)) << "with what it holds";
  EXPECT_EQ(gone->mappings, 1);
  EXPECT_EQ(range_->mapped_bytes(), kPage);
  EXPECT_EQ(range_->live().at(0).access_of(kDevice), Access::read_write);
  EXPECT_EQ(range_->dormant_in({0, 16 * kPage}).size(), 1U) << "the other place";
}

TEST_F(ReturningRange, OnlyTheOthersAreMappedAndOpened) {
  Chunk* const one = leave_one(kPage);
  Chunk* const two = leave_one(3 * kPage, 2);
  driver_.clear_calls();
  ASSERT_TRUE(map({{0, chunk()}, {kPage, one}, {2 * kPage, chunk()}, {3 * kPage, two}, {5 * kPage, chunk()}}).ok());
  EXPECT_EQ(driver_.count(Call::map), 3U);
  EXPECT_EQ(driver_.count(Call::unmap), 0U);
  EXPECT_EQ(driver_.count(Call::set_access), 3U) << "what is between stays as it was";
  Lab::fill(base_, 6 * kPage, 5);
  EXPECT_TRUE(Lab::holds(base_, 6 * kPage, 5));
  EXPECT_EQ(range_->mapped_bytes(), 6 * kPage);
}

TEST_F(ReturningRange, AnotherChunkAtThePlaceUnmapsItFirst) {
  Chunk* const gone = leave_one(2 * kPage, 2);
  leave_one(6 * kPage);
  driver_.clear_calls();
  ASSERT_TRUE(map({{3 * kPage, chunk(2)}}).ok());  // it only reaches in
  EXPECT_EQ(driver_.count(Call::unmap), 1U);
  EXPECT_EQ(range_->unmapped_by_driver(), 1);
  EXPECT_EQ(range_->dormant_in({0, 16 * kPage}).size(), 1U);
  ASSERT_TRUE(map({{8 * kPage, gone}}).ok());
  Lab::fill(base_ + 3 * kPage, 2 * kPage, 7);
  EXPECT_TRUE(Lab::holds(base_ + 8 * kPage, 2 * kPage, 2 * kPage + 1)) << "the two have nothing in common";
}

TEST_F(ReturningRange, AFailedCallLeavesAllAsItWas) {
  const std::vector<PlacedChunk> placements = {{0, leave_one(0)}, {kPage, chunk()}, {2 * kPage, leave_one(2 * kPage)}};
  leave_one(kPage);  // stands where the second is to stand
  for (const Call call : {Call::unmap, Call::map, Call::set_access}) {
    SCOPED_TRACE(to_string(call));
    const bool had_made_way = call != Call::unmap;
    driver_.clear_failures();
    driver_.fail_nth(call, 1, broken());
    EXPECT_EQ(map(placements).code(), StatusCode::driver_error);
    EXPECT_EQ(range_->mapped_bytes(), 0U);
    EXPECT_TRUE(range_->live().empty());
    for (const auto& chunk : chunks_) EXPECT_EQ(chunk->mappings.load(), 0);
    EXPECT_EQ(dormant_at(), had_made_way ? (Pages{0, 2}) : (Pages{0, 1, 2}));
    EXPECT_EQ(driver_.live_mappings(), had_made_way ? 2U : 3U);
    EXPECT_EQ(driven(), static_cast<std::int64_t>(driver_.live_mappings())) << "what was in vain as well";
  }
  driver_.clear_calls();
  ASSERT_TRUE(map(placements).ok());
  EXPECT_EQ(driver_.count(), 2U) << "a map and a set_access";
  EXPECT_TRUE(Lab::holds(base_, kPage, 1) && Lab::holds(base_ + 2 * kPage, kPage, 2 * kPage + 1));
  EXPECT_EQ(driven(), 3);
}

TEST_F(ReturningRange, WhatCannotBeTakenBackIsLiveAndServesNobody) {
  const std::vector<PlacedChunk> placements = {{0, leave_one(0)}, {kPage, chunk()}, {2 * kPage, chunk()}};
  driver_.fail_nth(Call::map, 2, broken());
  driver_.fail_nth(Call::unmap, 1, broken());
  EXPECT_FALSE(map(placements).ok());
  ASSERT_EQ(range_->live().size(), 1U);
  EXPECT_EQ(range_->live().begin()->first, kPage);
  EXPECT_EQ(range_->live().begin()->second.chunk, placements[1].chunk);
  EXPECT_EQ(range_->live().begin()->second.access(), Access::none);
  EXPECT_EQ(range_->mapped_bytes(), kPage);
  EXPECT_EQ(dormant_at(), (Pages{0}));
  EXPECT_EQ(placements[1].chunk->mappings, 1);
}

TEST_F(ReturningRange, ThatCannotBeNotedIsNotMapped) {
  leave_one(kPage);
  const std::vector<PlacedChunk> placements = {{0, leave_one(0)}, {kPage, chunk()}, {2 * kPage, chunk()}};
  bool failed = true;
  for (long nth = 0; failed; ++nth) {
    SCOPED_TRACE("allocation " + std::to_string(nth));
    failed = runs_out_at(nth, [&] { EXPECT_TRUE(map(placements).ok()); });
    EXPECT_EQ(failed, failures_made != 0);
    if (!failed) break;
    EXPECT_EQ(dormant_at(), (Pages{0, 1}));
    EXPECT_TRUE(range_->live().empty());
    EXPECT_EQ(range_->mapped_bytes(), 0U);
    EXPECT_EQ(driver_.live_mappings(), 2U);
    for (const auto& chunk : chunks_) EXPECT_EQ(chunk->mappings.load(), 0);
  }
  EXPECT_EQ(range_->live().size(), 3U);
}

TEST_F(ReturningRange, OnlyWhatAllMayWriteToIsKept) {
  using Fate = MappedRange::Fate;
  ASSERT_TRUE(map({{0, chunk()}, {kPage, chunk()}, {2 * kPage, chunk()}, {3 * kPage, chunk()}}).ok());
  ASSERT_TRUE(range_->set_access({0, kPage}, kDevice, Access::read).ok());
  ASSERT_TRUE(range_->set_access({3 * kPage, kPage}, Location::on_host(), Access::read).ok());
  for (const std::size_t page : {0U, 3U}) range_->retire(page * kPage, kLongAgo, Fate::may_return);
  range_->retire(kPage, kLongAgo, Fate::in_vain);
  range_->retire(2 * kPage, kLongAgo, Fate::leaves);
  EXPECT_EQ(range_->drop_retired(clock_).size(), 4U);
  EXPECT_EQ(dormant_.size(), 0U);
  EXPECT_EQ(driver_.live_mappings(), 0U);
  EXPECT_EQ(range_->unmapped_by_driver(), 4);
}

TEST_F(ReturningRange, WhatQueuedWorkUsesIsNotDormantYet) {
  ASSERT_TRUE(map({{0, chunk()}}).ok());
  driver_.hold_fences();
  const Epoch last_use = clock_.now();
  clock_.cover(last_use);
  Chunk* const gone = range_->retire(0, last_use, MappedRange::Fate::may_return);
  EXPECT_FALSE(clock_.poll());
  EXPECT_TRUE(range_->drop_retired(clock_).empty());
  EXPECT_EQ(dormant_.size(), 0U);
  EXPECT_EQ(gone->mappings, 1);
  driver_.release_fences();
  EXPECT_TRUE(clock_.poll());
  EXPECT_EQ(range_->drop_retired(clock_), (std::vector<ByteRange>{{0, kPage}}));
  EXPECT_EQ(dormant_.size(), 1U);
  EXPECT_EQ(gone->mappings, 0);
}

TEST_F(ReturningRange, ABannedChunkIsUnmappedWhereItWas) {
  ASSERT_TRUE(map({{0, chunk()}}).ok());
  Chunk* const gone = range_->retire(0, kLongAgo, MappedRange::Fate::may_return);
  ASSERT_TRUE(dormant_.ban(gone).ok());  // it is read-only elsewhere before its old place went
  range_->drop_retired(clock_);
  EXPECT_EQ(driver_.live_mappings(), 0U);
  EXPECT_EQ(range_->unmapped_by_driver(), 1);
}

TEST_F(ReturningRange, ClearingUnmapsAllAndKeepsNothingOfWhatWaits) {
  leave_one(0);
  ASSERT_TRUE(map({{kPage, chunk()}, {2 * kPage, chunk()}}).ok());
  range_->retire(kPage, kLongAgo, MappedRange::Fate::may_return);
  driver_.fail_nth(Call::unmap, 1, broken());
  EXPECT_FALSE(range_->clear_dormant().ok());
  EXPECT_EQ(dormant_.size(), 1U) << "to be tried again";
  EXPECT_TRUE(range_->clear_dormant().ok());
  EXPECT_EQ(dormant_.size(), 0U);
  range_->drop_retired(clock_);
  EXPECT_EQ(dormant_.size(), 0U) << "others may access the range, and not that mapping";
  EXPECT_EQ(driver_.live_mappings(), 1U) << "the one that is in use";
  EXPECT_EQ(range_->unmapped_by_driver(), 2);
  leave(2 * kPage);
  EXPECT_EQ(dormant_.size(), 1U) << "what goes from then on is kept";
  range_.reset();
  EXPECT_EQ(driver_.live_mappings(), 0U) << "and goes with the range";
  range_ = std::make_unique<MappedRange>(driver_, base_, 16 * kPage);
}

TEST_F(Range, OfAnEndThatTheDriverRefusesOthersAreToldOnce) {
  ASSERT_TRUE(map({{0, chunk()}}).ok());
  int told = 0;
  const auto count = [&](ByteRange) { ++told; };
  range_->retire(0, kLongAgo);
  driver_.fail_nth(Call::unmap, 1, broken());
  EXPECT_TRUE(range_->drop_retired(clock_, count).empty());
  EXPECT_EQ(range_->drop_retired(clock_, count).size(), 1U);
  EXPECT_EQ(told, 1);
}

// What was written may have been while the driver's answer was on its way.
TEST_F(Range, ACallThatLetsSomebodyWriteCountsThoughTheDriverRefuses) {
  ASSERT_TRUE(map({{0, chunk()}}).ok());
  ASSERT_TRUE(range_->set_access({0, kPage}, kDevice, Access::read).ok());
  const auto before = range_->live().at(0).times_writable;
  driver_.fail_nth(Call::set_access, 1, broken());
  EXPECT_FALSE(range_->set_access({0, kPage}, kDevice, Access::read_write).ok());
  EXPECT_EQ(range_->live().at(0).times_writable, before + 1);
}

}  // namespace
}  // namespace vmm::testing
