// Small blocks within slabs: split, coalesce, best fit; and a random program beside a
// model that knows the owner of every 512 bytes.
#include "core/blocks/small_heap.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <new>
#include <random>
#include <vector>

namespace {
bool memory_ends = false;
}  // namespace

void* operator new(std::size_t bytes) {
  void* const memory = memory_ends ? nullptr : std::malloc(bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
// The library's own would be the sanitizer's, whose memory std::free() refuses.
void* operator new(std::size_t bytes, const std::nothrow_t& /*tag*/) noexcept { return std::malloc(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace vmm::testing {
namespace {

constexpr std::size_t kUnit = kBlockAlignment;
constexpr StreamTag kTag = 3;

class SmallBlocks : public ::testing::Test {
 protected:
  Block* take(std::size_t units) {
    Block* const free = heap_.best_fit(units * kUnit);
    return free == nullptr ? nullptr : heap_.cut(free, units * kUnit);
  }
  BlockArena arena_;
  SmallHeap heap_{arena_, kTag};
};

TEST_F(SmallBlocks, AreCutFromTheLowerEndAndBecomeOneAgain) {
  Block* const first = heap_.donate(4 * kMiB);
  EXPECT_TRUE(SmallHeap::is_whole(*first));
  Block* const a = take(1);
  Block* const b = take(3);
  EXPECT_EQ(a, first);
  EXPECT_EQ(a->range(), (ByteRange{4 * kMiB, kUnit}));
  EXPECT_EQ(b->range(), (ByteRange{4 * kMiB + kUnit, 3 * kUnit}));
  for (const Block* block : {a, b}) {
    EXPECT_EQ(block->state, BlockState::used);
    EXPECT_EQ(block->tag, kTag);
    EXPECT_TRUE(block->small);
  }
  EXPECT_EQ(heap_.check(first), 1U);
  heap_.free(a, 7);
  EXPECT_EQ(heap_.check(first), 2U);
  Block* const whole = heap_.free(b, 5);
  EXPECT_EQ(whole, first);
  EXPECT_TRUE(SmallHeap::is_whole(*whole));
  EXPECT_EQ(whole->epoch, 7U) << "the latest of those that became one";
  EXPECT_EQ(heap_.check(first), 1U);
  heap_.retract(whole);
  EXPECT_EQ(heap_.free_count(), 0U);
  EXPECT_EQ(take(1), nullptr);
}

TEST_F(SmallBlocks, ComeFromTheSmallestThatFitsOfAllSlabs) {
  heap_.donate(0);
  Block* const hole = take(8);
  take(1);
  Block* const smaller = take(5);
  take(1);
  heap_.donate(2 * kMiB);
  heap_.free(hole, 1);
  heap_.free(smaller, 1);
  EXPECT_EQ(take(4)->offset, 9 * kUnit);
  EXPECT_EQ(take(8)->offset, 0U);
}

TEST_F(SmallBlocks, AtAnOffsetLeaveBothSidesFree) {
  Block* const first = heap_.donate(0);
  Block* const middle = heap_.cut_at(first, 10 * kUnit, 2 * kUnit);
  EXPECT_EQ(middle->range(), (ByteRange{10 * kUnit, 2 * kUnit}));
  EXPECT_EQ(first->range(), (ByteRange{0, 10 * kUnit}));
  EXPECT_EQ(heap_.check(first), 2U);
  EXPECT_EQ(take(10), first);
  EXPECT_EQ(heap_.check(first), 1U);
}

TEST_F(SmallBlocks, AtAnOffsetChangeNothingWhereThereIsNoMemory) {
  constexpr std::size_t kOfASegment = (64 * kKiB - 64) / sizeof(Block);
  Block* const first = heap_.donate(0);
  for (std::size_t made = 1; made < kOfASegment - 1; ++made) arena_.make();  // one is left, of two that it takes
  memory_ends = true;
  bool refused = false;
  try {
    heap_.cut_at(first, 2 * kUnit, kUnit);
  } catch (const std::bad_alloc&) {
    refused = true;
  }
  memory_ends = false;
  EXPECT_TRUE(refused);
  EXPECT_TRUE(SmallHeap::is_whole(*first));
  EXPECT_EQ(heap_.check(first), 1U);
}

TEST_F(SmallBlocks, OfARandomProgramAreNobodyElses) {
  for (const unsigned seed : {1U, 2U, 3U}) {
    BlockArena arena;
    SmallHeap heap(arena, kTag);
    std::mt19937 random(seed);
    std::map<std::size_t, Block*> slabs;       // offset -> first block
    std::map<std::size_t, int> owners;         // unit -> who has it
    std::vector<std::pair<Block*, int>> live;  // with who has it
    const auto largest_free = [&] {
      std::size_t largest = 0;
      for (const auto& [offset, first] : slabs) {
        std::size_t run = 0;
        for (std::size_t unit = offset / kUnit; unit < (offset + kSlabBytes) / kUnit; ++unit) {
          run = owners.count(unit) == 0 ? run + 1 : 0;
          largest = std::max(largest, run);
        }
      }
      return largest;
    };
    for (int step = 0; step < 3000; ++step) {
      if (random() % 2 == 0 || live.empty()) {
        const std::size_t units = 1 + random() % (random() % 8 == 0 ? 2048 : 40);
        Block* const free = heap.best_fit(units * kUnit);
        if (step % 16 == 0) {
          ASSERT_EQ(free != nullptr, largest_free() >= units) << "seed " << seed << " step " << step;
        }
        if (free == nullptr) {
          const std::size_t offset = slabs.size() * kSlabBytes;
          slabs.emplace(offset, heap.donate(offset));
          continue;
        }
        Block* const block = heap.cut(free, units * kUnit);
        ASSERT_EQ(block->size(), units * kUnit);
        for (std::size_t unit = block->offset / kUnit; unit < block->end() / kUnit; ++unit) {
          ASSERT_TRUE(owners.emplace(unit, step).second) << "seed " << seed << " step " << step;
        }
        live.emplace_back(block, step);
      } else {
        std::swap(live[random() % live.size()], live.back());
        const auto [block, owner] = live.back();
        live.pop_back();
        for (std::size_t unit = block->offset / kUnit; unit < block->end() / kUnit; ++unit) {
          ASSERT_EQ(owners.at(unit), owner) << "seed " << seed << " step " << step;
          owners.erase(unit);
        }
        heap.free(block, static_cast<Epoch>(step));
      }
      if (step % 64 != 0) continue;
      std::size_t free = 0;
      for (const auto& [offset, first] : slabs) free += heap.check(first);
      ASSERT_EQ(free, heap.free_count());
    }
  }
}

}  // namespace
}  // namespace vmm::testing
