// Which idle chunk is taken next, beside a plain list that is searched.
#include "core/pool/idle_chunks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "base/units.h"

namespace vmm::testing {
namespace {

class Chunks {
 public:
  // At the next place, in a stretch of its own size.
  IdleChunk make(std::size_t size) {
    chunks_.push_back(std::make_unique<Chunk>());
    chunks_.back()->size = size;
    const IdleChunk made{chunks_.back().get(), end_, size, true};
    end_ += size;
    return made;
  }

 private:
  std::vector<std::unique_ptr<Chunk>> chunks_;
  std::size_t end_ = 0;
};

TEST(IdleChunks, TheLargestThatAreNotLargerAndElseTheSmallestAbove) {
  Chunks made;
  IdleChunks idle;
  for (const std::size_t size : {2 * kMiB, 8 * kMiB, 4 * kMiB}) idle.add(made.make(size));
  EXPECT_EQ(idle.bytes(), 14 * kMiB);
  EXPECT_EQ(idle.take_nearest(6 * kMiB)->chunk->size, 4 * kMiB);
  EXPECT_EQ(idle.take_nearest(kMiB)->chunk->size, 2 * kMiB);
  EXPECT_EQ(idle.take_largest()->chunk->size, 8 * kMiB);
  EXPECT_EQ(idle.bytes(), 0U);
  EXPECT_FALSE(idle.take_largest().has_value());
  EXPECT_FALSE(idle.take_nearest(kUnlimited).has_value());
}

TEST(IdleChunks, AgreeWithAListThatIsSearched) {
  std::mt19937 random(7);
  Chunks made;
  IdleChunks idle;
  std::vector<IdleChunk> plain;
  const auto last_of = [&plain](std::size_t size) {
    const auto at =
        std::find_if(plain.rbegin(), plain.rend(), [size](const IdleChunk& each) { return each.chunk->size == size; });
    const IdleChunk found = *at;
    plain.erase(std::prev(at.base()));
    return found.chunk;
  };
  for (int step = 0; step < 5000; ++step) {
    const std::size_t bytes = (1 + random() % 16) * 2 * kMiB;
    if (random() % 5 < 3) {
      const IdleChunk each = made.make(bytes);
      idle.add(each);
      plain.push_back(each);
    } else if (plain.empty()) {
      EXPECT_FALSE(idle.take_largest().has_value());
    } else {
      std::vector<std::size_t> sizes;
      for (const IdleChunk& each : plain) sizes.push_back(each.chunk->size);
      std::sort(sizes.begin(), sizes.end());
      std::size_t want = sizes.back();
      std::optional<IdleChunk> taken;
      if (random() % 2 == 0) {
        taken = idle.take_largest();
      } else {
        want = sizes.front();
        for (const std::size_t size : sizes) {
          if (size <= bytes) want = size;
        }
        taken = idle.take_nearest(bytes);
      }
      ASSERT_TRUE(taken.has_value());
      EXPECT_EQ(taken->chunk, last_of(want)) << "of one size the last";
    }
    std::size_t sum = 0;
    for (const IdleChunk& each : plain) sum += each.chunk->size;
    ASSERT_EQ(idle.bytes(), sum);
  }
}

TEST(IdleChunks, TheMostUsefulServesMostAndBreaksUpLeast) {
  Chunks made;
  std::vector<IdleChunk> idle = {made.make(4 * kMiB), made.make(8 * kMiB), made.make(8 * kMiB), made.make(32 * kMiB)};
  const std::vector<IdleChunk> all = idle;
  idle[1].stretch = 64 * kMiB;
  const auto take = [&](std::size_t remaining, std::size_t room) {
    const std::optional<IdleChunk> taken = take_most_useful(&idle, remaining, room, 16 * kMiB);
    return taken.has_value() ? taken->chunk : nullptr;
  };
  EXPECT_EQ(take(10 * kMiB, 2 * kMiB), nullptr) << "none of at most so many bytes";
  EXPECT_EQ(take(10 * kMiB, 16 * kMiB), all[2].chunk) << "as large as the other, in a stretch of its own";
  EXPECT_EQ(take(10 * kMiB, 64 * kMiB), all[3].chunk) << "all of the request, and what is beyond costs little";
  EXPECT_EQ(take(4 * kMiB, 16 * kMiB), all[0].chunk) << "exactly";
  EXPECT_EQ(take(10 * kMiB, 16 * kMiB), all[1].chunk);
  EXPECT_EQ(take(10 * kMiB, 16 * kMiB), nullptr);
  EXPECT_TRUE(idle.empty());
}

}  // namespace
}  // namespace vmm::testing
