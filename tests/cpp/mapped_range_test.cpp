#include "core/memory/mapped_range.h"

#include <gtest/gtest.h>

#include <memory>

#include "cpp/lab.h"

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

}  // namespace
}  // namespace vmm::testing
