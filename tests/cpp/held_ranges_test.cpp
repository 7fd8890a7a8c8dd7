// Who looks at which bytes: against a naive count of every byte.
#include "core/blocks/held_ranges.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <random>
#include <utility>
#include <vector>

namespace vmm::testing {
namespace {

TEST(HeldRanges, CountEachLookerAndEachByteOnce) {
  HeldRanges held;
  EXPECT_TRUE(held.empty());
  held.hold({10, 10});
  held.hold({10, 10});
  held.hold({15, 10});
  EXPECT_EQ(held.in({0, 100}).count, 3U);
  EXPECT_EQ(held.in({0, 100}).bytes, 15U);
  EXPECT_EQ(held.in({19, 1}).count, 3U);
  EXPECT_EQ(held.in({20, 1}).count, 1U);
  EXPECT_EQ(held.in({0, 10}).count, 0U) << "it ends where the first begins";
  EXPECT_EQ(held.in({25, 10}).count, 0U);
  held.unhold({10, 10});
  EXPECT_EQ(held.in({10, 1}).count, 1U);
  held.unhold({10, 10});
  held.unhold({15, 10});
  EXPECT_TRUE(held.empty());
}

TEST(HeldRanges, FindALongOneThatBeganFarBefore) {
  HeldRanges held;
  held.hold({0, 1000});
  for (std::size_t at = 100; at < 900; at += 10) held.hold({at, 1});
  EXPECT_EQ(held.in({995, 1}).count, 1U);
  EXPECT_EQ(held.in({500, 1}).count, 2U);
}

TEST(HeldRanges, ALongOneThatHasGoneCostsNothingAnyMore) {
  HeldRanges held;
  for (std::size_t at = 0; at < 900; at += 10) held.hold({at, at % 20 == 0 ? 1U : 2U});
  EXPECT_EQ(held.reach(), 2U);
  held.hold({0, 1000});
  held.hold({0, 1000});
  held.hold({500, 100});
  EXPECT_EQ(held.reach(), 1000U);
  held.unhold({0, 1000});
  EXPECT_EQ(held.reach(), 1000U) << "somebody else has the same";
  held.unhold({0, 1000});
  EXPECT_EQ(held.reach(), 100U);
  held.unhold({500, 100});
  EXPECT_EQ(held.reach(), 2U);
}

TEST(HeldRanges, TheFreePartsAreWholePages) {
  HeldRanges held;
  held.hold({35, 1});     // page 2
  held.hold({94, 4});     // pages 5 and 6
  held.hold({200, 100});  // beyond what is asked for
  EXPECT_EQ(held.free_parts({0, 128}, 16), (std::vector<ByteRange>{{0, 32}, {48, 32}, {112, 16}}));
  EXPECT_EQ(held.free_parts({32, 16}, 16), std::vector<ByteRange>{});
  EXPECT_EQ(held.free_parts({48, 16}, 16), (std::vector<ByteRange>{{48, 16}}));
}

TEST(HeldRanges, AgreeWithANaiveCountOfEveryByte) {
  constexpr std::size_t kBytes = 256;
  std::mt19937 random(7);
  const auto below = [&](std::size_t bound) { return std::size_t{random() % bound}; };
  HeldRanges held;
  std::vector<ByteRange> live;
  for (int step = 0; step < 3000; ++step) {
    if (live.empty() || below(2) == 0) {
      const std::size_t offset = below(kBytes);
      live.push_back({offset, 1 + below(kBytes - offset)});
      held.hold(live.back());
    } else {
      std::swap(live[below(live.size())], live.back());
      held.unhold(live.back());
      live.pop_back();
    }
    if (live.size() > 6) {
      held.unhold(live.front());
      live.erase(live.begin());
    }
    std::array<bool, kBytes> covered{};
    for (const ByteRange& range : live)
      std::fill_n(covered.begin() + static_cast<std::ptrdiff_t>(range.offset), range.size, true);
    const std::size_t offset = 16 * below(kBytes / 16);
    const ByteRange asked{offset, 16 * (1 + below((kBytes - offset) / 16))};
    std::size_t count = 0;
    for (const ByteRange& range : live) count += range.offset < asked.end() && range.end() > asked.offset ? 1U : 0U;
    std::size_t bytes = 0;
    for (std::size_t at = asked.offset; at < asked.end(); ++at) bytes += covered.at(at) ? 1U : 0U;
    ASSERT_EQ(held.in(asked).count, count) << "step " << step;
    ASSERT_EQ(held.in(asked).bytes, bytes) << "step " << step;
    std::size_t free_bytes = 0;
    for (const ByteRange& part : held.free_parts(asked, 16)) {
      ASSERT_EQ(held.in(part).count, 0U) << "step " << step;
      free_bytes += part.size;
    }
    std::size_t free_pages = 0;
    for (std::size_t page = asked.offset; page < asked.end(); page += 16)
      free_pages += held.in({page, 16}).count == 0 ? 1U : 0U;
    ASSERT_EQ(free_bytes, 16 * free_pages) << "step " << step;
    ASSERT_EQ(held.empty(), live.empty());
  }
}

}  // namespace
}  // namespace vmm::testing
