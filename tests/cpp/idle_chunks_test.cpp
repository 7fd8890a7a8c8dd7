// Which idle chunk is taken next, beside a plain list that is searched.
#include "core/backing/idle_chunks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/units.h"
#include "cpp/lab.h"

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
  EXPECT_EQ(idle.take_nearest(kUnlimited)->chunk->size, 8 * kMiB);
  EXPECT_EQ(idle.bytes(), 0U);
  EXPECT_FALSE(idle.take_nearest(kUnlimited).has_value());
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
      EXPECT_FALSE(idle.take_nearest(kUnlimited).has_value());
    } else {
      std::vector<std::size_t> sizes;
      for (const IdleChunk& each : plain) sizes.push_back(each.chunk->size);
      std::sort(sizes.begin(), sizes.end());
      std::size_t want = sizes.back();
      std::optional<IdleChunk> taken;
      if (random() % 2 == 0) {
        taken = idle.take_nearest(kUnlimited);
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

TEST(IdleChunks, WhatStaysEmptyIsWhatTheLargestThatFitLeave) {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    Chunks made;
    IdleChunks idle;
    std::vector<std::size_t> sizes;
    for (std::size_t k = random() % 12; k != 0; --k) {
      sizes.push_back((1 + random() % 6) * kMiB);
      idle.add(made.make(sizes.back()));
    }
    std::sort(sizes.rbegin(), sizes.rend());
    const std::size_t place = random() % 30 * kMiB;
    std::size_t left = place;
    for (const std::size_t size : sizes) left -= size <= left ? size : 0;
    EXPECT_EQ(idle.left_of(place), left);
  }
}

TEST(UnitPlaces, AreThoseOfWhichAllIsIdle) {
  Chunks made;
  UnitPlaces places(8 * kMiB);
  const IdleChunk first = made.make(6 * kMiB);
  const IdleChunk second = made.make(2 * kMiB);
  EXPECT_FALSE(places.add(first));
  EXPECT_TRUE(places.add(second));
  EXPECT_FALSE(places.add(made.make(6 * kMiB))) << "2 MiB are missing there";
  EXPECT_FALSE(places.add(made.make(4 * kMiB))) << "over the end of a place";
  EXPECT_FALSE(places.add(made.make(6 * kMiB))) << "2 MiB of it are the other's";
  const std::vector<IdleChunk> taken = places.take();
  ASSERT_EQ(taken.size(), 2U);
  EXPECT_EQ(taken[0].chunk, first.chunk);
  EXPECT_EQ(taken[1].chunk, second.chunk);
  EXPECT_TRUE(places.take().empty());
  EXPECT_FALSE(UnitPlaces(0).add(first)) << "without units there are none";
}

TEST(IdleMoves, TheMostUsefulServesMostAndBreaksUpLeast) {
  Chunks made;
  std::vector<IdleChunk> all = {made.make(4 * kMiB), made.make(8 * kMiB), made.make(8 * kMiB), made.make(32 * kMiB)};
  all[1].stretch = 64 * kMiB;
  IdleMoves idle(all);
  const auto take = [&](std::size_t remaining, std::size_t room) {
    const std::optional<IdleChunk> taken = idle.take_most_useful(remaining, room, 16 * kMiB);
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

// Of 6, 4, 4 and 8 MiB two make 10, though 8 serves the most: what is created for the 2 MiB
// that are left stays for good.
TEST(IdleMoves, WhatRemainsIsFilledToTheByteWhereSomeDo) {
  Chunks made;
  const std::vector<IdleChunk> all = {made.make(6 * kMiB), made.make(4 * kMiB), made.make(4 * kMiB),
                                      made.make(8 * kMiB)};
  const auto sizes_for = [&](std::size_t page, std::size_t remaining, std::size_t beyond) {
    IdleMoves idle(all, page);
    std::vector<std::size_t> sizes;
    while (remaining != 0) {
      const std::optional<IdleChunk> taken = idle.take_most_useful(remaining, remaining + beyond, 64 * kMiB);
      if (!taken.has_value()) break;
      sizes.push_back(taken->chunk->size / kMiB);
      remaining -= std::min(remaining, taken->chunk->size);
    }
    return sizes;
  };
  using Sizes = std::vector<std::size_t>;
  EXPECT_EQ(sizes_for(2 * kMiB, 10 * kMiB, 0), Sizes({6, 4}));
  EXPECT_EQ(sizes_for(2 * kMiB, 16 * kMiB, 0), Sizes({8, 4, 4}));
  EXPECT_EQ(sizes_for(2 * kMiB, 20 * kMiB, 0), Sizes({8, 6, 4})) << "18 is the most below: nothing fills it";
  EXPECT_EQ(sizes_for(0, 10 * kMiB, 0), Sizes({8})) << "where it need not be";
  EXPECT_EQ(sizes_for(2 * kMiB, 10 * kMiB, 6 * kMiB), Sizes({8, 4})) << "where the last may reach beyond";
}

// The plain model: a list that is looked through each time, whose last one takes the place
// of the one that is taken.
class ListedMoves {
 public:
  ListedMoves(std::vector<IdleChunk> chunks, bool fills) : chunks_(std::move(chunks)), fills_(fills) {}
  [[nodiscard]] bool empty() const { return chunks_.empty(); }
  const Chunk* take_most_useful(std::size_t remaining, std::size_t room, std::size_t total) {
    auto best = chunks_.end();
    const bool is_filled = fills_ && room == remaining && make_up(remaining, chunks_.end());
    for (auto at = chunks_.begin(); at != chunks_.end(); ++at) {
      if (at->chunk->size > room) continue;
      if (is_filled && !make_up(remaining - at->chunk->size, at)) continue;
      if (best == chunks_.end() || worth_of(*at, remaining, total) > worth_of(*best, remaining, total)) best = at;
    }
    if (best == chunks_.end()) return nullptr;
    std::swap(*best, chunks_.back());
    return take_last();
  }
  const Chunk* take_last() {
    const Chunk* const taken = chunks_.back().chunk;
    chunks_.pop_back();
    return taken;
  }

 private:
  // Whether some but that one are so many bytes.
  bool make_up(std::size_t bytes, std::vector<IdleChunk>::iterator but) {
    std::set<std::size_t> sums = {0};
    for (auto at = chunks_.begin(); at != chunks_.end(); ++at) {
      if (at == but) continue;
      std::vector<std::size_t> more;
      for (const std::size_t sum : sums) more.push_back(sum + at->chunk->size);
      for (const std::size_t sum : more) {
        if (sum <= bytes) sums.insert(sum);
      }
    }
    return sums.count(bytes) != 0;
  }
  // Ten times the worth of a chunk, times both totals: whole numbers, so none is rounded.
  static std::int64_t worth_of(const IdleChunk& chunk, std::size_t remaining, std::size_t total) {
    const auto mib = [](std::size_t bytes) { return static_cast<std::int64_t>(bytes / kMiB); };
    const std::int64_t size = mib(chunk.chunk->size);
    const std::int64_t used = std::min(size, mib(remaining));
    return 10 * used * mib(total) - 5 * (mib(chunk.stretch) - size) * mib(remaining) - (size - used) * mib(remaining);
  }

  std::vector<IdleChunk> chunks_;
  const bool fills_;
};

TEST(IdleMoves, AfterSoManySizesInVainItIsNotFilled) {
  for (const std::size_t others : {15UL, 17UL}) {
    Chunks made;
    std::vector<IdleChunk> idle = {made.make(512 * kPage)};
    idle.front().stretch = 400 * kGiB;  // it would break up a great deal
    for (std::size_t pages = 257; pages < 257 + others; ++pages) idle.push_back(made.make(pages * kPage));
    IdleMoves moves(idle, kPage);
    const std::size_t taken = moves.take_most_useful(512 * kPage, 512 * kPage, 512 * kPage)->chunk->size;
    EXPECT_EQ(taken, others < 16 ? 512 * kPage : (256 + others) * kPage);
  }
}

TEST(IdleMoves, OfARandomProgramAreThoseOfAListThatIsLookedThrough) {
  for (unsigned seed = 1; seed <= 6; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const auto any = [&random](std::size_t below) { return static_cast<std::size_t>(random()) % below; };
    Chunks made;
    std::vector<IdleChunk> all;
    const std::size_t sizes = 1 + any(12);
    const std::size_t stretches = 1 + any(40);
    for (std::size_t k = 0; k < 100; ++k) {
      const std::size_t size = (seed % 3 == 0 ? 3 : 1) * (std::size_t{1} << any(sizes) % 5);
      all.push_back(made.make(size * kMiB));
      all.back().stretch = (size + any(stretches)) * kMiB;
    }
    const bool fills = any(2) == 0;
    IdleMoves idle(all, fills ? kMiB : 0);
    ListedMoves model(all, fills);
    while (!model.empty()) {
      if (any(16) == 0) {
        ASSERT_EQ(idle.take_last().chunk, model.take_last());
        continue;
      }
      // Powers of two: what is worth the same is the same when it is rounded.
      const std::size_t remaining = (std::size_t{1} << any(6)) * kMiB;
      const std::size_t total = remaining << any(4);
      const std::size_t room = any(2) == 0 ? remaining : (1 + any(18)) * kMiB;
      const std::optional<IdleChunk> taken = idle.take_most_useful(remaining, room, total);
      ASSERT_EQ(taken.has_value() ? taken->chunk : nullptr, model.take_most_useful(remaining, room, total));
    }
    EXPECT_TRUE(idle.empty());
  }
}

}  // namespace
}  // namespace vmm::testing
