// How a pool grows, by numbers alone: when, in chunks of what size, and how far ahead.
#include "core/blocks/growth_policy.h"

#include <gtest/gtest.h>

#include <chrono>
#include <vector>

#include "base/units.h"

namespace vmm::testing {
namespace {

constexpr std::size_t kPage = 2 * kMiB;

// A moment at which nothing has been moved.
constexpr std::chrono::nanoseconds kNow = std::chrono::hours(1);

GrowthPolicy::Kind ordinary() {
  GrowthPolicy::Kind kind;
  kind.page = kPage;
  return kind;
}

GrowthPolicy::Lack lack(std::size_t bytes) {
  GrowthPolicy::Lack result;
  result.total = bytes;
  return result;
}

GrowthPolicy::Lack contested(std::size_t bytes) {
  GrowthPolicy::Lack result = lack(bytes);
  result.is_contested = true;
  return result;
}

GrowthPolicy::Lack in_units(std::size_t bytes, std::size_t unit) {
  GrowthPolicy::Lack result = lack(bytes);
  result.unit = unit;
  return result;
}

// The chunks that back it all, from `offset` on.
std::vector<std::size_t> sizes(const GrowthPolicy& policy, const GrowthPolicy::Lack& lack, std::size_t offset = 0) {
  std::vector<std::size_t> sizes;
  for (std::size_t remaining = lack.total; remaining != 0; remaining -= sizes.back()) {
    sizes.push_back(policy.next_size(lack, offset + lack.total - remaining, remaining));
    if (sizes.back() == 0 || sizes.back() > remaining) {
      ADD_FAILURE() << sizes.back() << " of " << remaining;
      break;
    }
  }
  return sizes;
}
using Sizes = std::vector<std::size_t>;

// One that has handed out `bytes`, of which so many came back.
void use(GrowthPolicy* policy, std::size_t bytes, std::size_t freed = 0) {
  policy->note_handed_out(bytes);
  policy->note_live(bytes);
  policy->note_freed(freed);
}

// --------------------------------------------------------------- grow or move

TEST(GrowthPolicy, GrowsWhileItHasLittleMoreThanWasEverLive) {
  GrowthPolicy policy(ordinary());
  EXPECT_FALSE(policy.grows(kPage, kNow)) << "nothing was ever live";
  policy.note_live(73 * kPage);
  EXPECT_TRUE(policy.grows(74 * kPage, kNow));
  EXPECT_FALSE(policy.grows(74 * kPage + 1, kNow));
  policy.note_live(kPage);
  EXPECT_TRUE(policy.grows(74 * kPage, kNow)) << "the most that was, not what is";
}

TEST(GrowthPolicy, ForWhatItMovesItMayGrowAndForManyMovesByAQuarter) {
  GrowthPolicy policy(ordinary());
  const std::size_t peak = 73 * 4000 * kPage;
  policy.note_live(peak);
  const std::size_t step = 4000 * kPage;  // a 73rd
  EXPECT_FALSE(policy.grows(peak + step + kPage, kNow));
  policy.note_moves(1);
  EXPECT_TRUE(policy.grows(peak + step + kPage, kNow)) << "a page for each";
  EXPECT_FALSE(policy.grows(peak + step + 2 * kPage, kNow));
  policy.note_moves(1999);
  EXPECT_TRUE(policy.grows(peak + step + step / 2, kNow));
  EXPECT_FALSE(policy.grows(peak + step + step / 2 + 1, kNow));
  policy.note_moves(1);
  EXPECT_TRUE(policy.grows(peak + peak / 4, kNow)) << "it never settles";
  EXPECT_FALSE(policy.grows(peak + peak / 4 + 1, kNow));
}

TEST(GrowthPolicy, TimePaysForMoves) {
  using std::chrono::milliseconds;
  using std::chrono::nanoseconds;
  GrowthPolicy policy(ordinary());
  const std::size_t peak = 73 * 4000 * kPage;
  policy.note_live(peak);
  EXPECT_TRUE(policy.grows(peak, kNow));
  policy.note_moves(3);
  const std::size_t most = peak + 4003 * kPage;
  EXPECT_TRUE(policy.grows(most, kNow + milliseconds(3) - nanoseconds(1)));
  EXPECT_FALSE(policy.grows(most, kNow + milliseconds(3)));
  EXPECT_TRUE(policy.grows(most - kPage, kNow + milliseconds(3)));
  EXPECT_TRUE(policy.grows(most - kPage, kNow + milliseconds(6) - nanoseconds(1))) << "asked twice, paid once";
  EXPECT_FALSE(policy.grows(most - kPage, kNow + milliseconds(6)));
  EXPECT_FALSE(policy.grows(peak + 4000 * kPage + 1, kNow + std::chrono::hours(1)));
  EXPECT_TRUE(policy.grows(peak + 4000 * kPage, kNow + std::chrono::hours(1))) << "never less than a 73rd";
  policy.note_moves(1);
  EXPECT_TRUE(policy.grows(peak + 4001 * kPage, kNow + std::chrono::hours(1))) << "an idle hour is no credit";
}

TEST(GrowthPolicy, OneThatGrowsFreelyTakesFourTimesItsPeak) {
  GrowthPolicy::Kind kind = ordinary();
  kind.grows_freely = true;
  GrowthPolicy policy(kind);
  policy.note_live(100 * kPage);
  EXPECT_TRUE(policy.grows(400 * kPage, kNow));
  EXPECT_FALSE(policy.grows(400 * kPage + 1, kNow));
}

TEST(GrowthPolicy, OneThatGrowsFreelyTakesWhatOthersHadForThePriceOfGrowing) {
  GrowthPolicy::Kind kind = ordinary();
  kind.grows_freely = true;
  GrowthPolicy policy(kind);
  policy.note_live(100 * kPage);
  policy.note_taken(std::chrono::microseconds(480) - std::chrono::nanoseconds(1));
  EXPECT_TRUE(policy.takes_others());
  policy.note_taken(std::chrono::nanoseconds(1));
  EXPECT_FALSE(policy.takes_others());
  EXPECT_TRUE(policy.grows(400 * kPage, kNow));
  EXPECT_TRUE(policy.takes_others());
  policy.note_taken(std::chrono::microseconds(480));
  EXPECT_FALSE(policy.grows(401 * kPage, kNow));
  EXPECT_TRUE(policy.takes_others()) << "what it does not grow by it would move or map at each request for ever";
  EXPECT_FALSE(GrowthPolicy(ordinary()).takes_others());
}

TEST(GrowthPolicy, OneThatGrowsFreelyTakesFewChunksAndGoesAhead) {
  GrowthPolicy::Kind kind = ordinary();
  kind.grows_freely = true;
  GrowthPolicy policy(kind);
  use(&policy, kGiB, kGiB);
  EXPECT_EQ(sizes(policy, lack(256 * kMiB)), Sizes(8, 32 * kMiB));
  EXPECT_EQ(sizes(policy, lack(kGiB)), Sizes(8, 128 * kMiB));
  EXPECT_EQ(sizes(policy, lack(2 * kGiB)), Sizes(16, 128 * kMiB)) << "no larger than that";
  EXPECT_EQ(sizes(policy, lack(12 * kGiB)), Sizes(48, 256 * kMiB)) << "as any pool's";
  EXPECT_EQ(sizes(policy, lack(16 * kMiB)), Sizes(2, 8 * kMiB));
  GrowthPolicy::Beyond beyond{512 * kMiB, kUnlimited, kGiB};
  EXPECT_EQ(policy.ahead(lack(16 * kMiB), 8 * kMiB, beyond), 24 * kMiB) << "a 16th of what it holds";
  beyond.mapped = 4 * kGiB;
  EXPECT_EQ(policy.ahead(lack(16 * kMiB), 8 * kMiB, beyond), 56 * kMiB) << "no larger than 64 MiB";
  EXPECT_EQ(policy.ahead(contested(16 * kMiB), 8 * kMiB, beyond), 56 * kMiB) << "what lies unused others can have";
  beyond.headroom = 512 * kMiB;
  EXPECT_EQ(policy.ahead(lack(16 * kMiB), 8 * kMiB, beyond), 56 * kMiB);
  beyond.headroom -= 1;
  EXPECT_EQ(policy.ahead(lack(16 * kMiB), 8 * kMiB, beyond), 0U) << "an eighth of what the limits allow";
}

TEST(GrowthPolicy, OnlyIdleChunksOfSomeSizeAreWorthAMove) {
  const GrowthPolicy policy(ordinary());
  EXPECT_EQ(policy.least_move(lack(kGiB)), kPage);
  EXPECT_EQ(policy.least_move(lack(16 * kGiB)), 16 * kMiB) << "a 1024th";
  GrowthPolicy::Kind uniform = ordinary();
  uniform.is_uniform = true;
  EXPECT_EQ(GrowthPolicy(uniform).least_move(lack(16 * kGiB)), kPage);
}

// ------------------------------------------------------------- sizes of chunks

TEST(GrowthPolicy, WhatComesAndGoesIsBackedWithSmallEvenPieces) {
  GrowthPolicy small(ordinary());
  use(&small, 16 * kMiB, 16 * kMiB);
  EXPECT_EQ(sizes(small, lack(16 * kMiB)), Sizes(4, 4 * kMiB)) << "a quarter of the peak";
  GrowthPolicy policy(ordinary());
  use(&policy, kGiB, kGiB);
  EXPECT_EQ(sizes(policy, lack(24 * kMiB)), Sizes(3, 8 * kMiB));
  EXPECT_EQ(sizes(policy, lack(kPage)), Sizes(1, kPage)) << "and not a byte more";
  EXPECT_EQ(sizes(policy, lack(12 * kGiB)), Sizes(48, 256 * kMiB)) << "a 48th of the request";
  use(&policy, 36 * kGiB, 36 * kGiB);
  EXPECT_EQ(sizes(policy, lack(120 * kMiB)), Sizes(3, 40 * kMiB)) << "about a 900th of the peak, which is 41.0 MiB";
  EXPECT_EQ(sizes(policy, lack(96 * kGiB)), Sizes(96, kGiB)) << "never more than that";
}

TEST(GrowthPolicy, WhatOthersWantTooIsBackedWithFewerPieces) {
  GrowthPolicy policy(ordinary());
  use(&policy, kGiB, kGiB);
  EXPECT_EQ(sizes(policy, contested(96 * kMiB)), Sizes(4, 24 * kMiB));
  EXPECT_EQ(sizes(policy, contested(12 * kGiB)), Sizes(48, 256 * kMiB)) << "a 48th of the request";
  use(&policy, 36 * kGiB, 36 * kGiB);
  EXPECT_EQ(sizes(policy, contested(180 * kMiB)), Sizes(3, 60 * kMiB)) << "about a 600th of the peak";
}

TEST(GrowthPolicy, UnitsAreA600thOfTheLimitAndAPowerOfTwo) {
  const GrowthPolicy policy(ordinary());
  const auto unit = [&](std::size_t limit, std::size_t sharers) { return policy.unit(limit, sharers, kGiB); };
  EXPECT_EQ(unit(600 * 16 * kMiB, 2), 16 * kMiB);
  EXPECT_EQ(unit(600 * 16 * kMiB - 1, 2), 8 * kMiB);
  EXPECT_EQ(unit(600 * 32 * kMiB, 2), 32 * kMiB);
  EXPECT_EQ(unit(kUnlimited, 2), 32 * kMiB) << "no more than that";
  EXPECT_EQ(unit(2 * 64 * 8 * kMiB, 2), 8 * kMiB) << "no less";
  EXPECT_EQ(unit(2 * 64 * 8 * kMiB - 1, 2), 4 * kMiB) << "but where that were more than a 64th for all models";
  EXPECT_EQ(unit(80 * kGiB, 40), 32 * kMiB);
  EXPECT_EQ(unit(80 * kGiB, 41), 16 * kMiB);
  EXPECT_EQ(unit(80 * kGiB, 1000), 0U) << "a page is no unit";
  EXPECT_EQ(unit(256 * kMiB, 2), 0U);
}

TEST(GrowthPolicy, APoolThatNeverHadTwoUnitsHasChunksOfAnySize) {
  GrowthPolicy policy(ordinary());
  const std::size_t limit = 600 * 16 * kMiB;
  EXPECT_EQ(policy.unit(limit, 2, 32 * kMiB - 1), 0U);
  EXPECT_EQ(policy.unit(limit, 2, 32 * kMiB), 16 * kMiB);
  policy.note_live(32 * kMiB);
  EXPECT_EQ(policy.unit(limit, 2, 0), 16 * kMiB) << "whatever its peaks were reset to";
}

TEST(GrowthPolicy, UnitsStandAtMultiplesOfThemselves) {
  GrowthPolicy policy(ordinary());
  const std::size_t unit = 16 * kMiB;
  use(&policy, kGiB);  // it stays
  EXPECT_EQ(sizes(policy, in_units(96 * kMiB, unit)), Sizes(6, unit));
  EXPECT_EQ(sizes(policy, in_units(40 * kMiB, unit)), Sizes({unit, unit, 8 * kMiB}));
  EXPECT_EQ(sizes(policy, in_units(40 * kMiB, unit), 6 * kMiB), Sizes({10 * kMiB, unit, 14 * kMiB}));
  EXPECT_EQ(sizes(policy, in_units(4 * kMiB, unit), 6 * kMiB), Sizes(1, 4 * kMiB));
}

TEST(GrowthPolicy, WhatStaysHasFewChunks) {
  GrowthPolicy small(ordinary());
  use(&small, 96 * kMiB - 1);
  EXPECT_EQ(sizes(small, lack(24 * kMiB)), Sizes(3, 8 * kMiB)) << "but not in a small pool";
  GrowthPolicy policy(ordinary());
  use(&policy, 96 * kMiB);
  EXPECT_EQ(sizes(policy, lack(24 * kMiB)), Sizes(1, 24 * kMiB));
  EXPECT_EQ(sizes(policy, lack(96 * kMiB)), Sizes(4, 24 * kMiB)) << "each could be freed, and a part of it used";
  EXPECT_EQ(sizes(policy, lack(20 * kGiB)), Sizes(20, kGiB)) << "a 20th of the request";
  EXPECT_EQ(sizes(policy, lack(26 * kGiB)), Sizes(26, kGiB)) << "and never more than that";
  GrowthPolicy::Lack pages = lack(512 * kMiB);
  pages.is_explicit = true;
  EXPECT_EQ(sizes(policy, pages), Sizes(1, 512 * kMiB)) << "by hand";
  use(&policy, 9 * kGiB);
  EXPECT_EQ(sizes(policy, lack(384 * kMiB)), Sizes(4, 96 * kMiB)) << "a 96th of the pool";
}

TEST(GrowthPolicy, WhatStaysIsPutTogetherWhereNobodyWantsWhatIsFreed) {
  GrowthPolicy policy(ordinary());
  use(&policy, 16 * kGiB);
  EXPECT_EQ(policy.shared_by_what_stays(/*is_contested=*/false, /*is_kept=*/false), 512 * kMiB);
  EXPECT_EQ(policy.shared_by_what_stays(/*is_contested=*/false, /*is_kept=*/true), 256 * kMiB);
  EXPECT_EQ(policy.slabs_of_what_stays(/*is_contested=*/false), 64U) << "and never more";
  EXPECT_EQ(policy.shared_by_what_stays(/*is_contested=*/true, /*is_kept=*/false), 0U);
  EXPECT_EQ(policy.slabs_of_what_stays(/*is_contested=*/true), 8U);
  GrowthPolicy smaller(ordinary());
  use(&smaller, kGiB);
  EXPECT_EQ(smaller.slabs_of_what_stays(/*is_contested=*/false), 16U) << "a 32nd of it";
  smaller.note_freed(kGiB / 32);
  EXPECT_EQ(smaller.shared_by_what_stays(/*is_contested=*/false, /*is_kept=*/true), 0U) << "it comes and goes";
  EXPECT_EQ(smaller.slabs_of_what_stays(/*is_contested=*/false), 1U);
}

TEST(GrowthPolicy, WhatStaysIsWhereLessThanA64thCameBackSinceItHeldNothing) {
  GrowthPolicy policy(ordinary());
  use(&policy, kGiB, 16 * kMiB);
  EXPECT_EQ(sizes(policy, lack(24 * kMiB)), Sizes(1, 24 * kMiB));
  policy.note_freed(1);
  EXPECT_EQ(sizes(policy, lack(24 * kMiB)), Sizes(3, 8 * kMiB));
  policy.note_empty();
  EXPECT_EQ(sizes(policy, lack(24 * kMiB)), Sizes(1, 24 * kMiB)) << "it begins anew";
  policy.note_handed_out(640 * kMiB);
  policy.note_freed(10 * kMiB + 1);
  EXPECT_EQ(sizes(policy, lack(24 * kMiB)), Sizes(3, 8 * kMiB)) << "what was handed out before counts no more";
}

TEST(GrowthPolicy, SomePoolsHaveSizesOfTheirOwn) {
  GrowthPolicy::Kind graph = ordinary();
  graph.is_ordinary = false;
  EXPECT_EQ(sizes(GrowthPolicy(graph), lack(2 * kGiB + kPage)), Sizes({kGiB, kGiB, kPage})) << "nothing moves there";
  GrowthPolicy::Kind uniform = ordinary();
  uniform.is_uniform = true;
  GrowthPolicy pages(uniform);
  use(&pages, kGiB);
  EXPECT_EQ(sizes(pages, lack(3 * kPage)), Sizes(3, kPage));
  GrowthPolicy::Lack whole = lack(2 * kGiB);
  whole.is_whole = true;
  EXPECT_EQ(sizes(GrowthPolicy(ordinary()), whole), Sizes(1, 2 * kGiB));
}

TEST(GrowthPolicy, ARangesChunkIsA16thOfWhatLiesBelowIt) {
  GrowthPolicy::Kind range = ordinary();
  range.is_range = true;
  const GrowthPolicy policy(range);
  EXPECT_EQ(policy.largest_at(0, kGiB), kPage);
  EXPECT_EQ(policy.largest_at(48 * kPage - 1, kGiB), 2 * kPage);
  EXPECT_EQ(policy.largest_at(48 * kPage, kGiB), 3 * kPage);
  EXPECT_EQ(policy.largest_at(48 * kPage, kPage), kPage);
  EXPECT_EQ(GrowthPolicy(ordinary()).largest_at(48 * kPage, kGiB), kGiB);
  GrowthPolicy::Kind uniform = range;
  uniform.is_uniform = true;
  EXPECT_EQ(GrowthPolicy(uniform).largest_at(48 * kPage, kGiB), kPage);
}

// ----------------------------------------------------------------------- ahead

// By how much a chunk of two pages goes beyond its request.
std::size_t ahead(const GrowthPolicy& policy, const GrowthPolicy::Beyond& beyond,
                  const GrowthPolicy::Lack& of = lack(2 * kPage)) {
  return policy.ahead(of, 2 * kPage, beyond);
}
// Of a pool that holds 4 GiB, of which a 128th is 16 pages.
constexpr GrowthPolicy::Beyond kWide{4 * kGiB, kUnlimited, kGiB};

GrowthPolicy loading(const GrowthPolicy::Kind& kind = ordinary()) {
  GrowthPolicy policy(kind);
  use(&policy, 4 * kGiB);
  return policy;
}

TEST(GrowthPolicy, GrowsAheadUpToA128thOfWhatItHolds) {
  const GrowthPolicy policy = loading();
  EXPECT_EQ(ahead(policy, kWide), 14 * kPage);
  EXPECT_EQ(policy.ahead(lack(17 * kPage), 17 * kPage, kWide), 0U) << "the chunk is larger already";
  EXPECT_EQ(ahead(policy, {4 * kGiB - 1, kUnlimited, kGiB}), 13 * kPage) << "in whole pages";
  EXPECT_EQ(ahead(policy, {kTiB, kUnlimited, kTiB}), kGiB - 2 * kPage) << "no chunk is larger than that";
}

TEST(GrowthPolicy, GrowsAheadNoFurtherThanTheBareSpaceBehind) {
  const GrowthPolicy policy = loading();
  EXPECT_EQ(ahead(policy, {4 * kGiB, kUnlimited, 3 * kPage + 1}), 3 * kPage);
  EXPECT_EQ(ahead(policy, {4 * kGiB, kUnlimited, 0}), 0U);
}

TEST(GrowthPolicy, GrowsAheadNotNearALimit) {
  const GrowthPolicy policy = loading();
  EXPECT_EQ(ahead(policy, {4 * kGiB, 256 * kMiB, kGiB}), 14 * kPage);
  EXPECT_EQ(ahead(policy, {4 * kGiB, 256 * kMiB - 1, kGiB}), 0U) << "a 16th of what it holds";
}

TEST(GrowthPolicy, GrowsAheadNotWhileItIsGivingBack) {
  GrowthPolicy policy = loading();
  policy.note_freed(64 * kMiB);
  EXPECT_EQ(ahead(policy, kWide), 14 * kPage);
  policy.note_freed(1);
  EXPECT_EQ(ahead(policy, kWide), 0U);
}

TEST(GrowthPolicy, GrowsAheadNotWhereOthersWantItOrNobodyAsked) {
  const GrowthPolicy policy = loading();
  EXPECT_EQ(ahead(policy, kWide, contested(2 * kPage)), 0U);
  GrowthPolicy::Lack pages = lack(2 * kPage);
  pages.is_explicit = true;
  EXPECT_EQ(ahead(policy, kWide, pages), 0U);
  GrowthPolicy::Lack whole = lack(2 * kPage);
  whole.is_whole = true;
  EXPECT_EQ(ahead(policy, kWide, whole), 0U);
  GrowthPolicy::Kind graph = ordinary();
  graph.is_ordinary = false;
  EXPECT_EQ(ahead(loading(graph), kWide), 0U);
}

// ------------------------------------------------------------- slabs at once

TEST(GrowthPolicy, SlabsOfWhatIsLoadedAreMadeAnEighthAtOnce) {
  const GrowthPolicy policy = loading();
  EXPECT_EQ(policy.slabs_at_once(0, kWide), 1U);
  EXPECT_EQ(policy.slabs_at_once(7, kWide), 1U);
  EXPECT_EQ(policy.slabs_at_once(8, kWide), 2U);
  EXPECT_EQ(policy.slabs_at_once(16, kWide), 3U);
  EXPECT_EQ(policy.slabs_at_once(1000, kWide), 8U);
}

TEST(GrowthPolicy, SlabsAreMadeOneByOneElsewhere) {
  EXPECT_EQ(loading().slabs_at_once(1000, {4 * kGiB, 256 * kMiB - 1, 0}), 1U) << "near a limit";
  GrowthPolicy used = loading();
  used.note_freed(64 * kMiB + 1);
  EXPECT_EQ(used.slabs_at_once(1000, kWide), 1U) << "where memory comes and goes";
  EXPECT_EQ(GrowthPolicy(ordinary()).slabs_at_once(1000, kWide), 1U) << "in a small pool";
  GrowthPolicy::Kind kind = ordinary();
  kind.is_ordinary = false;
  EXPECT_EQ(loading(kind).slabs_at_once(1000, kWide), 1U) << "in a graph's";
  kind = ordinary();
  kind.is_uniform = true;
  EXPECT_EQ(loading(kind).slabs_at_once(1000, kWide), 1U) << "where every chunk is a page";
}

}  // namespace
}  // namespace vmm::testing
