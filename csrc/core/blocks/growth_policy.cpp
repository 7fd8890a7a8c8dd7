#include "core/blocks/growth_policy.h"

#include <algorithm>

#include "base/units.h"
#include "core/blocks/small_heap.h"

namespace vmm {

namespace {

// New chunks are a share of what is missing and of the pool's peak, or more: cost is per
// chunk (58 us to 64 MiB), not per byte, yet a chunk that is large against its request
// strands more when part of it is reused.
// Over seventeen recorded programs, each at six sizes, a 48th, 40th and 24th of what is missing
// ended at 1.0193, 1.0198 and 1.0207 of what they used at most, with 66, 64 and 59 thousand
// driver calls, a 16th at 1.025. On a GPU a checkpointed program, which asks for a fifth of its
// peak at once, ended at 1.014 with a 48th, 1.022 with a 40th and 1.028 with a 24th.
constexpr std::size_t kPiecesPerRequest = 48;
struct Pieces {
  std::size_t per_pool;
  std::size_t least;  // bytes
};
// With a 600th and 24 MiB (beside a 24th) replays ended at 1.030, with these (beside a 48th) at
// 1.020, for twice the calls; a 1200th saved 0.0003 more.
constexpr Pieces kAlone{900, 8 * kMiB};
// Where others take from the same device, or a limit too small for units, a chunk that goes
// from one to the other costs driver calls too.
constexpr Pieces kBesideOthers{600, 24 * kMiB};
// Under a limit that others share, chunks go from model to model at every turn, and each
// costs a map, access and an unmap: two models made 2000 calls a pass, 70 ms of 1.9 s. Where
// all are of one size each fills whatever place another has left, often its own. Three sets
// of recorded programs in turn, a pool each under 1.05 of their joint peak, made 4100, 2700
// and 17700 calls in a late pass with sizes by the request, and 3200, 2300 and 6100 with
// these (replays at c8a6622, before the margin); with twice as many units twice the calls.
constexpr std::size_t kUnitsPerLimit = 600;
constexpr std::size_t kLeastUnit = 8 * kMiB;
constexpr std::size_t kMostUnit = 32 * kMiB;
// Each model strands a part of one: a 64th of the limit, all models together.
constexpr std::size_t kUnitsPerModel = 64;
// What a small pool has stays, in chunks of any size.
constexpr std::size_t kFewUnits = 2;
constexpr std::size_t kPiecesPerSmallPool = 4;
// Models that take turns grow into all that their limit leaves, and hold it from then on. While
// others have idle memory a 32nd is left, for graphs above all, which can use no memory that
// was used before: under 1.05 of their joint peak three sets of recorded programs end at
// 1.020, 1.025 and 1.037 of it (the third needs 1.045 to fit at all), and with a 40th 1 % higher
// where a GPU is behind, as what it may still use cannot go back to the driver.
constexpr std::size_t kMarginShare = 32;
// A pool that has been given back less than a 64th of what it handed out, since it last
// held nothing, holds what stays, weights above all: nothing of it is reused in part, and
// what is loaded first is waited for, so a request has few chunks. 20 GiB in blocks of 256 MiB
// took 55 ms each way in 1000 of them, ten and six times native's time, and 10 and 15 ms in 160.
constexpr std::size_t kLastingShare = 64;
// And its chunks grow with it: 20 GiB in blocks of 24 MiB are 370 chunks instead of 850.
// At most a 128th of what it holds lies unused where the loading ends.
constexpr std::size_t kAheadShare = 128;
constexpr std::size_t kHeadroomShare = 16;
// But not in one whatever its size: what a load frees again, as it makes a weight in another
// type first, smaller weights come to stand in, and hold all of its chunk. Of one of 120 MiB a
// serving program lacked 84 at its peak, 1.2 % of all it used. It ended at 1.019 at seven sizes,
// at 1.017 with 32 MiB and a 64th, and at 1.014 with these. 20 GiB in blocks of 256 MiB are some
// 300 chunks instead of 80, and in one block 20.
// Pages by hand are in one: who asked for them says what goes.
constexpr std::size_t kLoadedLeast = 24 * kMiB;
constexpr std::size_t kLoadedShare = 96;  // of the pool
constexpr std::size_t kLoadedPerRequest = 20;
// So are slabs, which would be a chunk each: of a model of 3157 tensors, 16 GiB, they were
// 249 of 376 chunks, and what unmaps and maps a model costs by the chunk. At most an eighth
// of them is empty where the loading ends, and 14 MiB.
constexpr std::size_t kSlabsPerSpare = 8;
constexpr std::size_t kMostSlabs = 8;
// What was loaded and wakes is known whole, and nothing of it need lie unused: several blocks share
// twice what a chunk goes ahead of its request, and four times as much where no contents come. Of
// 16 GiB the chunks are then some 45 instead of 130, and 5 of slabs instead of 33.
constexpr std::size_t kKeptTogetherShare = 64;
constexpr std::size_t kTogetherShare = 32;
constexpr std::size_t kMostSlabsTogether = 64;
constexpr std::size_t kSmallPool = 96 * kMiB;  // at its peak: a few chunks are all of it
constexpr std::size_t kLargestPiece = kGiB;
// A range's chunk is at most a 16th of what lies below it: so much may stay mapped
// for nothing where the range ends within it, and 20 GiB are 120 chunks.
constexpr std::size_t kRangePerChunk = 16;
// A pool grows rather than moves its chunks about while it has at most 1.4 % more than was ever
// live at once. Nine programs recorded on a GPU, each at five sizes, what their warm-up left
// given back, ended at 1.0184 with 1.5 %, at 1.0175 with this, and at 1.0172 with 1.25 %, where a
// repeated program moved chunks in its seventh turn; with 1 % one that holds large weights ended
// 0.4 % higher: moves broke up free space that was needed later.
// While it makes its first 2000 moves (140 ms of CPU,
// which a run of requests may cost at once) it may come to have half as much again (of fifteen
// programs at three sizes, up to 300 steps behind, one that serves requests that come and go ended
// at 1.033 and not at 1.037, for as many calls; the others as with as much again); with more
// moves than that it takes a quarter, and what never settles then has what it lacked:
// blocks of 2 to 256 MiB replaced at random made 150 driver calls in each 20000 steps while
// each 85 moves beyond 1350 allowed 1.5 % more, and make 20. Where a GPU is behind, the
// place that a chunk has left cannot be filled for a while, and caches of all sizes that
// come and go want twice the moves: with a quarter after 1350 they ended at 1.15, after 2000
// at 1.03, up to a thousand steps behind.
constexpr std::size_t kFreeGrowth = 73;
constexpr std::size_t kMovedPerFree = 2;
constexpr std::size_t kManyMoves = 2000;
constexpr std::size_t kMostGrowth = 4;
// One that grows freely has no slack to speak of: RMM's random allocations (up to 1 GiB,
// 16 GB in use at most) moved 400 chunks in each 2000 operations for ever, and none with
// this: 21 GiB were held on one stream, where torch's own allocator holds 45.
constexpr std::size_t kFreelyGrown = 4;
// Nor is it filled to the brim, so what is new is few chunks and goes ahead. But no larger than
// this for it: what a small buffer that stays keeps from others is a chunk.
constexpr std::size_t kPiecesPerFreeRequest = 8;
constexpr std::size_t kFreelyAheadShare = 16;
constexpr std::size_t kFreePiece = 128 * kMiB;
constexpr std::size_t kMostFreelyAhead = 64 * kMiB;
constexpr std::size_t kFreeHeadroomShare = 8;  // of what a limit still allows
// An idle chunk below this share of the request is not worth a move of its own
// while new memory may still be had. Of a 256th a logits tensor of 3 GiB left all of a
// checkpointed program's chunks where they were, and it ended 2 % higher.
constexpr std::size_t kSmallestMoveShare = 1024;

}  // namespace

bool GrowthPolicy::grows(std::size_t mapped, std::chrono::nanoseconds now) {
  const std::size_t moves = move_debt_.moves(now);
  if (kind_.grows_freely) {
    taken_ = {};
    if (mapped <= peak_live_ * kFreelyGrown) return true;
  }
  const std::size_t free_growth = peak_live_ / kFreeGrowth;
  const std::size_t growth =
      moves > kManyMoves ? peak_live_ / kMostGrowth : free_growth + free_growth / kMovedPerFree / kManyMoves * moves;
  return mapped <= peak_live_ + growth;
}

std::size_t GrowthPolicy::least_move(const Lack& lack) const {
  return kind_.is_uniform ? kind_.page : std::max(kind_.page, lack.total / kSmallestMoveShare);
}

std::size_t GrowthPolicy::largest_at(std::size_t offset, std::size_t remaining) const {
  if (kind_.is_uniform) return kind_.page;
  if (!kind_.is_range) return remaining;
  return std::min(remaining, std::max(kind_.page, align_down(offset / kRangePerChunk, kind_.page)));
}

std::size_t GrowthPolicy::unit(std::size_t limit, std::size_t sharers, std::size_t peak) const {
  const std::size_t most = std::min(kMostUnit, limit / kUnitsPerModel / sharers);
  const std::size_t wanted = std::max(limit / kUnitsPerLimit, kLeastUnit);
  const std::size_t unit = floor_power_of_two(std::max(std::min(wanted, most), kind_.page));
  return unit > kind_.page && std::max(peak, peak_live_) >= unit * kFewUnits ? unit : 0;
}

std::size_t GrowthPolicy::margin(std::size_t limit) { return limit / kMarginShare; }

std::size_t GrowthPolicy::next_size(const Lack& lack, std::size_t offset, std::size_t remaining) const {
  const std::size_t page = kind_.page;
  if (kind_.is_uniform) return page;
  if (lack.is_whole) return remaining;
  // A graph's memory never moves, so small pieces are no use to it.
  if (!kind_.is_ordinary) return std::min(remaining, std::max(kLargestPiece, page));
  if (lack.unit != 0) {
    // What stays too: among chunks of many units, two models that did the same in every turn
    // moved others each time, and with these alone ask for nothing from the third turn on.
    const std::size_t to_unit = align_up(offset, lack.unit) - offset;
    return std::min(to_unit == 0 ? lack.unit : to_unit, remaining);
  }
  const Pieces& pieces_of = lack.is_contested ? kBesideOthers : kAlone;
  const std::size_t free_piece = kind_.grows_freely ? std::min(lack.total / kPiecesPerFreeRequest, kFreePiece) : 0;
  const std::size_t least = std::min(pieces_of.least, peak_live_ / kPiecesPerSmallPool);
  const std::size_t loaded =
      lack.is_explicit ? lack.total : std::max({size_of_what_stays(), lack.total / kLoadedPerRequest, page});
  const std::size_t fitting =
      holds_what_stays()
          ? loaded
          : std::max({least, peak_live_ / pieces_of.per_pool, lack.total / kPiecesPerRequest, free_piece, page});
  const std::size_t wanted = std::min(fitting, kLargestPiece);
  const std::size_t pieces = std::max<std::size_t>(1, (remaining + wanted / 2) / wanted);
  return std::min(align_up((remaining + pieces - 1) / pieces, page), remaining);
}

std::size_t GrowthPolicy::shared_by_what_stays(bool is_contested, bool is_kept) const {
  if (is_contested || !holds_what_stays()) return 0;
  return peak_live_ / (is_kept ? kKeptTogetherShare : kTogetherShare);
}

std::size_t GrowthPolicy::slabs_of_what_stays(bool is_contested) const {
  if (!holds_what_stays()) return 1;
  return is_contested ? kMostSlabs
                      : std::clamp(peak_live_ / kTogetherShare / kSlabBytes, kMostSlabs, kMostSlabsTogether);
}

// The least of its chunks. 0: all that the pool ever had is a few.
std::size_t GrowthPolicy::size_of_what_stays() const {
  return peak_live_ < kSmallPool ? 0 : std::max(kLoadedLeast, peak_live_ / kLoadedShare);
}

// It holds what stays: little was given back of what it handed out.
bool GrowthPolicy::holds_what_stays() const {
  return peak_live_ >= kSmallPool && freed_ <= (handed_out_ - handed_out_when_empty_) / kLastingShare;
}

std::size_t GrowthPolicy::ahead(const Lack& lack, std::size_t size, const Beyond& beyond) const {
  if (!kind_.is_ordinary || lack.is_whole || lack.is_explicit) return 0;
  if (!kind_.grows_freely && (lack.is_contested || !holds_what_stays())) return 0;
  // Near a limit what lies unused here is what the model's graphs, tags and ranges lack.
  if (beyond.headroom < beyond.mapped / kHeadroomShare) return 0;
  const std::size_t most = kind_.grows_freely ? std::min(beyond.mapped / kFreelyAheadShare, kMostFreelyAhead)
                                              : std::min(beyond.mapped / kAheadShare, kLargestPiece);
  const std::size_t wanted = align_down(most, kind_.page);
  if (kind_.grows_freely && beyond.headroom / kFreeHeadroomShare < wanted) return 0;
  return wanted > size ? std::min(wanted - size, align_down(beyond.bare_behind, kind_.page)) : 0;
}

std::size_t GrowthPolicy::slabs_at_once(std::size_t slabs, const Beyond& beyond) const {
  if (!kind_.is_ordinary || kind_.is_uniform || !holds_what_stays()) return 1;
  if (beyond.headroom < beyond.mapped / kHeadroomShare) return 1;
  return std::min(1 + slabs / kSlabsPerSpare, kMostSlabs);
}

}  // namespace vmm
