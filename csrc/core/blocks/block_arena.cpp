#include "core/blocks/block_arena.h"

#include <algorithm>
#include <new>

#include "base/host_pages.h"

namespace vmm {

namespace {
// Segments are taken together, twice as many each time: taking some costs
// microseconds.
constexpr std::size_t kMostTaken = 16;
// Of the segments that empty, one stays and one more for each eighth of those in
// use: to drop 64 KiB and touch them again costs about 10 us.
constexpr std::size_t kInUsePerKept = 8;
}  // namespace

BlockArena::~BlockArena() {
  for (const Region& region : regions_) BlockSpace::give(region.begin, region.bytes);
}

Block* BlockArena::make_another() {
  if (open_ == nullptr) open_another();
  Segment& segment = *open_;
  if (segment.free != nullptr) return make();
  auto* const block = new (block_at(reinterpret_cast<std::byte*>(&segment), segment.made++)) Block;
  ++segment.used;
  if (is_full(segment)) unlink_open(&segment);
  return block;
}

// No block of it is in use any more.
void BlockArena::empty(Segment* segment) {
  unlink_open(segment);
  --in_use_;
  empty_.push_back(segment);
  while (empty_.size() - bare_ > 1 + in_use_ / kInUsePerKept) discard(empty_[bare_++], kSegmentBytes);
}

void BlockArena::open_another() {
  if (empty_.empty()) take_more();
  Segment* const segment = empty_.back();
  empty_.pop_back();
  bare_ = std::min(bare_, empty_.size());
  ++in_use_;
  push_open(segment);
}

void BlockArena::take_more() {
  const std::size_t count = floor_power_of_two(std::clamp<std::size_t>(in_use_, 1, kMostTaken));
  regions_.reserve(regions_.size() + 1);
  empty_.reserve(in_use_ + count);  // recycle() never has to ask for memory
  auto* const begin = static_cast<std::byte*>(BlockSpace::take(count * kSegmentBytes));
  regions_.push_back({begin, count * kSegmentBytes});
  for (std::size_t k = count; k-- != 0;) empty_.push_back(reinterpret_cast<Segment*>(begin + k * kSegmentBytes));
  bare_ = count;
}

void BlockArena::push_open(Segment* segment) {
  segment->prev = nullptr;
  segment->next = open_;
  if (open_ != nullptr) open_->prev = segment;
  open_ = segment;
}

void BlockArena::unlink_open(Segment* segment) {
  (segment->prev == nullptr ? open_ : segment->prev->next) = segment->next;
  if (segment->next != nullptr) segment->next->prev = segment->prev;
  segment->prev = segment->next = nullptr;
}

}  // namespace vmm
