#include "core/backing/idle_chunks.h"

#include <algorithm>
#include <bitset>
#include <iterator>
#include <utility>

namespace vmm {

namespace {
// What remains is to be filled to the byte where it is at most so many pages, 1 GiB of a GPU's.
// Before more is missing than that, many a choice is left.
constexpr std::size_t kMostFilled = 512;
// Sizes beside which nothing fills the rest, after which it stays unfilled: of 255 such each
// choice took 1.8 ms.
constexpr std::size_t kMostTried = 16;
}  // namespace

void IdleChunks::add(const IdleChunk& idle) {
  by_size_[idle.chunk->size].push_back(idle);
  bytes_ += idle.chunk->size;
}

std::optional<IdleChunk> IdleChunks::take_nearest(std::size_t bytes) {
  if (by_size_.empty()) return std::nullopt;
  const auto above = by_size_.upper_bound(bytes);
  return take_last(above == by_size_.begin() ? above : std::prev(above));
}

std::size_t IdleChunks::left_of(std::size_t size) const {
  for (auto at = by_size_.upper_bound(size); at != by_size_.begin();) {
    const auto& [each, chunks] = *--at;
    size -= std::min(chunks.size(), size / each) * each;
  }
  return size;
}

IdleChunk IdleChunks::take_last(BySize::iterator of_size) {
  const IdleChunk taken = of_size->second.back();
  of_size->second.pop_back();
  bytes_ -= of_size->first;
  if (of_size->second.empty()) by_size_.erase(of_size);
  return taken;
}

bool UnitPlaces::add(const IdleChunk& idle) {
  if (unit_ == 0) return false;
  const std::size_t begin = align_down(idle.offset, unit_);
  if (align_down(idle.offset + idle.chunk->size - 1, unit_) != begin) return false;
  Place& place = places_[begin];
  place.chunks.push_back(idle);
  place.bytes += idle.chunk->size;
  return place.bytes == unit_;
}

bool UnitPlaces::has_whole() const {
  return std::any_of(places_.begin(), places_.end(), [this](const auto& each) { return each.second.bytes == unit_; });
}

std::vector<IdleChunk> UnitPlaces::take() {
  while (!places_.empty()) {
    auto first = places_.extract(places_.begin());
    if (first.mapped().bytes == unit_) return std::move(first.mapped().chunks);
  }
  return {};
}

bool IdleMoves::comes_later(const Entry& a, const Entry& b) {
  return a.stretch != b.stretch ? a.stretch > b.stretch : a.place > b.place;
}

IdleMoves::IdleMoves(std::vector<IdleChunk> chunks, std::size_t page) : chunks_(std::move(chunks)), page_(page) {
  auto of_size = by_size_.end();
  for (std::size_t place = 0; place < chunks_.size(); ++place) {
    const std::size_t size = chunks_[place].chunk->size;
    if (of_size == by_size_.end() || of_size->first != size) of_size = by_size_.try_emplace(size).first;
    of_size->second.heap.push_back({chunks_[place].stretch, place});
    ++of_size->second.count;
  }
  for (auto& [size, each] : by_size_) std::make_heap(each.heap.begin(), each.heap.end(), comes_later);
}

IdleChunk IdleMoves::take_last() {
  const IdleChunk taken = chunks_.back();
  chunks_.pop_back();
  --by_size_.at(taken.chunk->size).count;
  return taken;
}

// Whether any is left.
bool IdleMoves::drop_stale(Heap& heap) const {
  while (!heap.empty() && heap.front().place >= chunks_.size()) {
    std::pop_heap(heap.begin(), heap.end(), comes_later);
    heap.pop_back();
  }
  return !heap.empty();
}

// Whether some of them, side by side, are so many bytes.
bool IdleMoves::fill(std::size_t bytes) const {
  std::bitset<kMostFilled + 1> sums;  // in pages
  sums[0] = true;
  for (const auto& [size, each] : by_size_) {
    std::size_t left = std::min(each.count, bytes / size);
    for (std::size_t some = 1; left != 0; some *= 2) {
      const std::size_t now = std::min(some, left);
      sums |= sums << now * (size / page_);
      left -= now;
    }
  }
  return sums[bytes / page_];
}

// What the request uses of it, as a part of what remains; less half of what stays beside it
// in its free stretch, and a tenth of what lies beyond the request, as parts of the total.
// So of one size it is the one in the shortest stretch.
IdleMoves::BySize::iterator IdleMoves::most_useful(std::size_t remaining, std::size_t room, std::size_t total,
                                                   const std::vector<std::size_t>& but) {
  auto best = by_size_.end();
  double most = 0;
  for (auto at = by_size_.begin(); at != by_size_.end() && at->first <= room;) {
    auto& [size, each] = *at;
    if (!drop_stale(each.heap)) {
      at = by_size_.erase(at);
      continue;
    }
    const Entry& first = each.heap.front();
    const std::size_t beyond = size - std::min(size, remaining);
    const double worth = static_cast<double>(size - beyond) / static_cast<double>(remaining) -
                         (0.5 * static_cast<double>(first.stretch - size) + 0.1 * static_cast<double>(beyond)) /
                             static_cast<double>(total);
    const bool is_better =
        best == by_size_.end() || worth > most || (worth == most && first.place < best->second.heap.front().place);
    if (is_better && std::find(but.begin(), but.end(), size) == but.end()) {
      best = at;
      most = worth;
    }
    ++at;
  }
  return best;
}

std::optional<IdleChunk> IdleMoves::take_most_useful(std::size_t remaining, std::size_t room, std::size_t total) {
  bool is_filled = page_ != 0 && room == remaining && remaining / page_ <= kMostFilled && fill(remaining);
  std::vector<std::size_t> but;
  auto best = most_useful(remaining, room, total, but);
  while (is_filled && best != by_size_.end()) {
    --best->second.count;
    if (fill(remaining - best->first)) break;
    ++best->second.count;
    but.push_back(best->first);
    is_filled = but.size() < kMostTried;
    if (!is_filled) but.clear();
    best = most_useful(remaining, room, total, but);
  }
  if (best == by_size_.end()) return std::nullopt;
  if (!is_filled) --best->second.count;
  Heap& heap = best->second.heap;
  const std::size_t place = heap.front().place;
  std::pop_heap(heap.begin(), heap.end(), comes_later);
  heap.pop_back();
  const IdleChunk taken = chunks_[place];
  const IdleChunk last = chunks_.back();
  chunks_.pop_back();
  if (place == chunks_.size()) return taken;
  chunks_[place] = last;  // its entry names a place beyond the end
  Heap& of_last = by_size_.at(last.chunk->size).heap;
  of_last.push_back({last.stretch, place});
  std::push_heap(of_last.begin(), of_last.end(), comes_later);
  return taken;
}

}  // namespace vmm
