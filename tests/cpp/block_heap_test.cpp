// Offsets alone: split, coalesce, tags, best fit; and a random program beside
// a model that knows the owner of every 512 bytes.
#include "core/blocks/block_heap.h"

#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <random>
#include <set>
#include <vector>

namespace vmm::testing {
namespace {

constexpr std::size_t kUnit = kBlockAlignment;
constexpr std::uint64_t kEpoch = 3;

class Heap : public ::testing::Test {
 protected:
  Heap() { heap_.keep_order(kCapacity); }
  void TearDown() override { heap_.check(); }
  Block* take(std::size_t offset, std::size_t size, BlockState state = BlockState::used) {
    Block* block = heap_.carve(heap_.free_covering(offset), offset, size, state);
    heap_.check();
    return block;
  }
  Block* give(Block* block, StreamTag tag, std::uint64_t epoch = kEpoch) {
    Block* free = heap_.free(block, tag, epoch);
    heap_.check();
    return free;
  }
  static constexpr std::size_t kCapacity = 100 * kMiB;
  BlockArena arena_;
  BlockHeap heap_{arena_};
};

TEST_F(Heap, CarvingLeavesBothSidesFreeWithTheirTagAndEpoch) {
  heap_.donate({0, 100 * kUnit}, kNeutral);
  give(take(0, 100 * kUnit), 2, 9);
  Block* middle = take(40 * kUnit, 10 * kUnit);
  EXPECT_EQ(middle->range(), (ByteRange{40 * kUnit, 10 * kUnit}));
  EXPECT_EQ(middle->state, BlockState::used);
  for (Block* side : {middle->prev, middle->next}) {
    ASSERT_NE(side, nullptr);
    EXPECT_EQ(side->state, BlockState::free);
    EXPECT_EQ(side->tag, 2);
    EXPECT_EQ(side->epoch, 9U);
  }
  EXPECT_EQ(middle->prev->range(), (ByteRange{0, 40 * kUnit}));
  EXPECT_EQ(middle->next->range(), (ByteRange{50 * kUnit, 50 * kUnit}));
}

TEST_F(Heap, FreedNeighboursOfOneTagBecomeOneWithTheLatestEpoch) {
  heap_.donate({0, 3 * kUnit}, 1);
  Block* a = take(0, kUnit);
  Block* b = take(kUnit, kUnit);
  Block* c = take(2 * kUnit, kUnit);
  give(a, 1, 5);
  give(c, 1, 7);
  Block* all = give(b, 1, 6);
  EXPECT_EQ(all->range(), (ByteRange{0, 3 * kUnit}));
  EXPECT_EQ(all->epoch, 7U);
  EXPECT_EQ(heap_.free_blocks().size(), 1U);
}

TEST_F(Heap, NeighboursOfTwoTagsStayApart) {
  heap_.donate({0, 2 * kUnit}, kNeutral);
  Block* a = take(0, kUnit);
  Block* b = take(kUnit, kUnit);
  give(a, 1);
  give(b, 2);
  EXPECT_EQ(heap_.free_blocks().size(), 2U);
  EXPECT_EQ(heap_.best_fit(2 * kUnit, 1), nullptr);
  EXPECT_EQ(heap_.best_fit(kUnit, 1)->offset, 0U);
  EXPECT_EQ(heap_.best_fit(kUnit, 2)->offset, kUnit);
  EXPECT_EQ(heap_.best_fit(kUnit, kNeutral), nullptr);
}

TEST_F(Heap, NeutralSpaceCoalescesWithItsLikeAlone) {
  heap_.donate({0, 4 * kUnit}, kNeutral);
  Block* a = take(0, kUnit);
  Block* b = take(kUnit, kUnit);
  Block* c = take(2 * kUnit, kUnit);
  give(a, 4);
  Block* above = give(c, kNeutral, 0);
  EXPECT_EQ(above->range(), (ByteRange{2 * kUnit, 2 * kUnit}));
  EXPECT_EQ(above->tag, kNeutral);
  Block* middle = give(b, 4);
  EXPECT_EQ(middle->range(), (ByteRange{0, 2 * kUnit}));
  EXPECT_EQ(heap_.best_fit(3 * kUnit, 4), nullptr) << "what is bare is none of the tag's";
}

TEST_F(Heap, StretchesNeverCoalesceAndCanBeTakenOut) {
  constexpr std::size_t kStretch = 4 * kMiB;
  heap_.donate({kStretch, kStretch}, 1);
  heap_.donate({0, kStretch}, 1);
  EXPECT_EQ(heap_.stretches().size(), 2U);
  EXPECT_EQ(heap_.stretches().front()->offset, 0U) << "by offset";
  EXPECT_EQ(heap_.best_fit(kStretch + kUnit, 1), nullptr);
  Block* used = take(0, kUnit);
  EXPECT_EQ(heap_.covering(kStretch - 1)->offset, kUnit);
  EXPECT_EQ(heap_.covering(kStretch)->offset, kStretch);
  give(used, 1);
  heap_.retract(heap_.free_covering(kStretch));
  EXPECT_EQ(heap_.stretches().size(), 1U);
  EXPECT_EQ(heap_.free_covering(kStretch), nullptr);
}

TEST_F(Heap, KeepsNoOrderUnlessAsked) {
  BlockHeap heap(arena_);
  constexpr std::size_t kHigh = std::size_t{1} << 46U;  // as an address: there is no table for so many
  heap.donate({kHigh, 4 * kUnit}, 1);
  heap.donate({kHigh + 4 * kUnit, 4 * kUnit}, 1);
  Block* free = heap.best_fit(kUnit, 1);
  Block* block = heap.carve(free, free->offset + kUnit, kUnit, BlockState::used);
  heap.check();
  heap.free(block, 1, kEpoch);
  heap.check();
  EXPECT_EQ(heap.best_fit(5 * kUnit, 1), nullptr);
}

TEST_F(Heap, FreeBlocksStandByOffsetBesideAndFarFromOneAnother) {
  heap_.donate({0, kCapacity}, 1);
  // Some share 2 MiB, others have tens of MiB between them.
  const std::vector<std::size_t> begins = {0, 5 * kUnit, 9 * kUnit, 2 * kMiB - kUnit, 2 * kMiB + kUnit, 70 * kMiB};
  std::vector<Block*> between;
  for (std::size_t k = 0; k < begins.size(); ++k) {
    const std::size_t end = k + 1 < begins.size() ? begins[k + 1] : kCapacity;
    between.push_back(take(begins[k] + kUnit, end - begins[k] - kUnit));
  }
  const FreeByOffset& free = heap_.free_blocks();
  EXPECT_EQ(free.size(), begins.size());
  std::vector<std::size_t> seen;
  for (const Block* block : free) seen.push_back(block->offset);
  EXPECT_EQ(seen, begins);
  for (std::size_t k = 0; k < begins.size(); ++k) {
    const std::size_t end = begins[k] + kUnit;
    EXPECT_EQ(free.from(begins[k])->offset, begins[k]);
    EXPECT_EQ(free.from(end - 1)->offset, begins[k]);
    EXPECT_EQ(free.below(end)->offset, begins[k]);
    const Block* above = free.from(end);
    EXPECT_EQ(above == nullptr ? kUnlimited : above->range().offset,
              k + 1 < begins.size() ? begins[k + 1] : kUnlimited);
    const Block* below = free.below(end - 1);
    EXPECT_EQ(below == nullptr ? kUnlimited : below->range().offset, k != 0 ? begins[k - 1] : kUnlimited);
  }
  EXPECT_EQ(free.below(3 * kCapacity), free.last());
  EXPECT_EQ(free.from(3 * kCapacity), nullptr);
  for (Block* block : between) give(block, 1);
  EXPECT_EQ(free.first(), free.last());
}

TEST_F(Heap, SplitAndJoinAreOpposites) {
  heap_.donate({0, 10 * kUnit}, 1);
  Block* lower = take(0, 10 * kUnit, BlockState::pages);
  Block* upper = heap_.split(lower, 4 * kUnit);
  heap_.check();
  EXPECT_EQ(lower->range(), (ByteRange{0, 4 * kUnit}));
  EXPECT_EQ(upper->range(), (ByteRange{4 * kUnit, 6 * kUnit}));
  EXPECT_EQ(upper->state, BlockState::pages);
  heap_.join(lower, upper);
  heap_.check();
  EXPECT_EQ(lower->range(), (ByteRange{0, 10 * kUnit}));
  EXPECT_EQ(lower->next, nullptr);
}

TEST_F(Heap, FindsTheFreeBlockThatCoversAnOffset) {
  heap_.donate({0, 10 * kUnit}, 1);
  take(4 * kUnit, 2 * kUnit);
  EXPECT_EQ(heap_.free_covering(3 * kUnit + 17)->offset, 0U);
  EXPECT_EQ(heap_.free_covering(4 * kUnit), nullptr);
  EXPECT_EQ(heap_.free_covering(6 * kUnit)->offset, 6 * kUnit);
  EXPECT_EQ(heap_.free_covering(10 * kUnit), nullptr);
}

TEST_F(Heap, FindsThoseThatCoverRisingOffsetsOnItsWay) {
  constexpr std::size_t kStretch = 4 * kMiB;
  heap_.donate({0, 10 * kUnit}, 1);
  heap_.donate({kStretch, 10 * kUnit}, 1);
  for (const std::size_t unit : {2U, 3U, 4U, 8U}) take(unit * kUnit, kUnit);
  take(kStretch + 5 * kUnit, 2 * kUnit);
  const Block* at = nullptr;
  for (const std::size_t begin : {std::size_t{0}, kStretch, std::size_t{0}}) {
    for (std::size_t k = 0; k < 20; ++k) {
      const std::size_t offset = begin + k * kUnit / 2;
      at = heap_.covering_from(at, offset);
      EXPECT_EQ(at, heap_.covering(offset)) << offset;
    }
  }
}

TEST_F(Heap, BestFitIsTheSmallestThatFitsBelowAndAboveTwoMegabytes) {
  // Free blocks of these sizes, apart from one another.
  const std::vector<std::size_t> sizes = {kUnit,    3 * kUnit,        64 * kUnit, 2 * kMiB - kUnit,
                                          2 * kMiB, 2 * kMiB + kUnit, 10 * kMiB,  10 * kMiB};
  std::size_t at = 0;
  for (const std::size_t size : sizes) {
    heap_.donate({at, size}, 1);
    at = align_up(at + size, 2 * kMiB);
  }
  for (std::size_t wanted = kUnit; wanted <= 10 * kMiB; wanted += wanted < 100 * kUnit ? kUnit : 37 * kUnit) {
    const auto least = std::lower_bound(sizes.begin(), sizes.end(), wanted);
    ASSERT_EQ(heap_.best_fit(wanted, 1)->size(), *least) << wanted;
  }
  EXPECT_EQ(heap_.best_fit(10 * kMiB + kUnit, 1), nullptr);
  Block* first = heap_.best_fit(10 * kMiB, 1);
  EXPECT_EQ(first, heap_.free_blocks().prev(heap_.free_blocks().last())) << "the lowest offset first";
  std::vector<std::size_t> largest;
  heap_.for_largest(1, [&](const Block* block) {
    largest.push_back(block->size());
    return largest.size() < 3;
  });
  EXPECT_EQ(largest, (std::vector<std::size_t>{10 * kMiB, 10 * kMiB, 2 * kMiB + kUnit}));
}

TEST_F(Heap, TheFirstFitIsTheLowestRunWhateverItsTags) {
  heap_.donate({0, 100 * kUnit}, kNeutral);
  Block* a = take(0, 10 * kUnit);
  Block* b = take(10 * kUnit, 10 * kUnit);
  Block* c = take(20 * kUnit, 10 * kUnit);
  EXPECT_EQ(heap_.first_fit(15 * kUnit, kUnit), 30 * kUnit);
  give(a, 1);
  EXPECT_EQ(heap_.first_fit(15 * kUnit, kUnit), 30 * kUnit);
  EXPECT_EQ(heap_.first_fit(10 * kUnit, kUnit), 0U);
  give(b, 2);
  EXPECT_EQ(heap_.first_fit(15 * kUnit, kUnit), 0U) << "two tags, one run";
  take(0, 10 * kUnit);
  EXPECT_EQ(heap_.first_fit(15 * kUnit, kUnit), 30 * kUnit);
  take(30 * kUnit, 70 * kUnit);
  EXPECT_EQ(heap_.first_fit(15 * kUnit, kUnit), std::nullopt);
  give(c, 3);
  EXPECT_EQ(heap_.first_fit(15 * kUnit, kUnit), 10 * kUnit) << "it has grown at its end";
}

// ------------------------------------------------------------------ the order

class Numbers : public ::testing::TestWithParam<std::size_t> {};

TEST_P(Numbers, AreFoundUpAndDownAsInASet) {
  const std::size_t bound = GetParam();
  std::vector<std::uint64_t> words(BitTree::words_for(bound), 0);
  BitTree tree(words.data(), bound);
  std::set<std::size_t> model;
  std::mt19937_64 random(bound);
  for (int step = 0; step < 3000; ++step) {
    const std::size_t k = random() % 2 == 0 ? random() % bound : std::min(bound - 1, random() % 70);
    if (random() % 3 != 0 && model.size() < 100) {
      if (model.insert(k).second) tree.insert(k);
    } else if (!model.empty()) {
      auto one = model.lower_bound(k);
      if (one == model.end()) one = model.begin();
      tree.erase(*one);
      model.erase(one);
    }
    const std::size_t at = random() % (bound + 2);
    const auto above = model.lower_bound(at);
    ASSERT_EQ(tree.from(at), above == model.end() ? BitTree::kNone : *above) << "step " << step;
    ASSERT_EQ(tree.below(at), above == model.begin() ? BitTree::kNone : *std::prev(above)) << "step " << step;
    ASSERT_EQ(tree.below(kUnlimited), model.empty() ? BitTree::kNone : *model.rbegin()) << "step " << step;
  }
}

INSTANTIATE_TEST_SUITE_P(Bounds, Numbers, ::testing::Values(1, 2, 63, 64, 65, 4096, 4097, 262144, 262145, 1U << 25U));

// ------------------------------------------------------------ random program

// Who has each unit: -1 nobody, else an id. Knows nothing of lists or bins.
class HeapProgram : public ::testing::TestWithParam<unsigned> {
 protected:
  static constexpr std::size_t kUnits = 20000;  // 10 MiB: bins and the ordered set
  struct Used {
    Block* block;
    std::size_t first;
    std::size_t count;
  };
  void expect_like_the_model(const BlockHeap& heap) {
    heap.check();
    std::size_t seen = 0;
    for (const Block* block = heap.stretches().front(); block != nullptr; block = block->next) {
      ASSERT_EQ(block->offset, seen * kUnit) << "tiles";
      for (std::size_t k = 0; k < block->size() / kUnit; ++k, ++seen) {
        ASSERT_EQ(owner_[seen] < 0, block->state == BlockState::free) << "unit " << seen;
        ASSERT_TRUE(block->state != BlockState::free || last_tag_[seen] == block->tag) << "unit " << seen;
      }
    }
    ASSERT_EQ(seen, kUnits);
  }
  // The smallest run that the model would allow for `tag`, or 0.
  [[nodiscard]] std::size_t smallest_fit(const BlockHeap& heap, std::size_t units, StreamTag tag) const {
    std::size_t least = 0;
    for (const Block* free : heap.free_blocks()) {
      if (free->tag != tag || free->size() < units * kUnit) continue;
      if (least == 0 || free->size() < least) least = free->size();
    }
    return least;
  }
  // The lowest multiple of `grain` units from which so many are nobody's.
  [[nodiscard]] std::optional<std::size_t> lowest_fit(std::size_t units, std::size_t grain) const {
    std::size_t begin = 0;
    for (std::size_t k = 0; k < kUnits; ++k) {
      if (owner_[k] >= 0) begin = (k / grain + 1) * grain;
      if (k + 1 >= begin + units) return begin * kUnit;
    }
    return std::nullopt;
  }
  std::vector<int> owner_ = std::vector<int>(kUnits, -1);
  std::vector<StreamTag> last_tag_ = std::vector<StreamTag>(kUnits, kNeutral);
};

TEST_P(HeapProgram, AgreesWithTheModel) {
  SCOPED_TRACE("seed " + std::to_string(GetParam()));
  std::mt19937 random(GetParam());
  BlockArena arena;
  BlockHeap heap(arena);
  heap.keep_order(kUnits * kUnit);
  heap.donate({0, kUnits * kUnit}, kNeutral);
  std::map<int, Used> live;
  for (int step = 0; step < 1500; ++step) {
    const StreamTag tag = static_cast<StreamTag>(random() % 4);
    if (random() % 100 < 52) {
      const std::size_t units = random() % 10 == 0 ? 1 + random() % 6000 : 1 + random() % 200;
      Block* free = heap.best_fit(units * kUnit, tag);
      ASSERT_EQ(free == nullptr ? 0 : free->size(), smallest_fit(heap, units, tag)) << "step " << step;
      if (free == nullptr) continue;
      const std::size_t slack = free->size() / kUnit - units;
      const std::size_t first = free->offset / kUnit + (slack == 0 ? 0 : random() % (slack + 1));
      Block* block = heap.carve(free, first * kUnit, units * kUnit, BlockState::used);
      ASSERT_EQ(block->range(), (ByteRange{first * kUnit, units * kUnit}));
      for (std::size_t k = first; k < first + units; ++k) {
        ASSERT_EQ(owner_[k], -1) << "step " << step << ": handed out twice";
        owner_[k] = step;
      }
      live[step] = {block, first, units};
    } else if (!live.empty()) {
      auto victim = std::next(live.begin(), static_cast<std::ptrdiff_t>(random() % live.size()));
      Used used = victim->second;
      if (used.count > 1 && random() % 4 == 0) {  // free the lower part only
        const std::size_t keep = 1 + random() % (used.count - 1);
        Block* upper = heap.split(used.block, (used.first + used.count - keep) * kUnit);
        victim->second = {upper, used.first + used.count - keep, keep};
        used.count -= keep;
      } else {
        live.erase(victim);
      }
      heap.free(used.block, tag, static_cast<std::uint64_t>(step));
      for (std::size_t k = used.first; k < used.first + used.count; ++k) {
        owner_[k] = -1;
        last_tag_[k] = tag;
      }
    }
    constexpr std::size_t kGrain = 8;
    const std::size_t units = std::size_t{1} << (random() % 14);
    ASSERT_EQ(heap.first_fit(units * kUnit, kGrain * kUnit), lowest_fit(units, kGrain)) << "step " << step;
    if (step % 50 != 0) continue;
    ASSERT_NO_FATAL_FAILURE(expect_like_the_model(heap)) << "step " << step;
  }
  for (const auto& [id, used] : live) heap.free(used.block, kNeutral, 0);
  heap.check();
}

INSTANTIATE_TEST_SUITE_P(Seeds, HeapProgram, ::testing::Range(1U, 9U));

TEST(HeapEpochs, WhatFillsAGapHasTheNewestOfAll) {
  BlockArena arena;
  BlockHeap heap(arena);
  heap.keep_order(kGiB);
  heap.donate({0, 12 * kMiB}, 1);
  Block* const low = heap.carve(heap.best_fit(4 * kMiB, 1), 0, 4 * kMiB, BlockState::used);
  Block* const middle = heap.carve(heap.best_fit(4 * kMiB, 1), 4 * kMiB, 4 * kMiB, BlockState::used);
  heap.free(low, 1, 9);
  Block* const all = heap.free(middle, 1, 3);
  EXPECT_EQ(all->size(), 12 * kMiB);
  EXPECT_EQ(all->epoch, 9U);
}

}  // namespace
}  // namespace vmm::testing
