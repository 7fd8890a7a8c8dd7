#include "core/backing/idle_chunks.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace vmm {

void IdleChunks::add(const IdleChunk& idle) {
  by_size_[idle.chunk->size].push_back(idle);
  bytes_ += idle.chunk->size;
}

std::optional<IdleChunk> IdleChunks::take_largest() {
  if (by_size_.empty()) return std::nullopt;
  return take_last(std::prev(by_size_.end()));
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

IdleMoves::IdleMoves(std::vector<IdleChunk> chunks) : chunks_(std::move(chunks)) {
  auto of_size = by_size_.end();
  for (std::size_t place = 0; place < chunks_.size(); ++place) {
    const std::size_t size = chunks_[place].chunk->size;
    if (of_size == by_size_.end() || of_size->first != size) of_size = by_size_.try_emplace(size).first;
    of_size->second.push_back({chunks_[place].stretch, place});
  }
  for (auto& [size, heap] : by_size_) std::make_heap(heap.begin(), heap.end(), comes_later);
}

IdleChunk IdleMoves::take_last() {
  const IdleChunk taken = chunks_.back();
  chunks_.pop_back();
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

// What the request uses of it, as a part of what remains; less half of what stays beside it
// in its free stretch, and a tenth of what lies beyond the request, as parts of the total.
// So of one size it is the one in the shortest stretch.
std::optional<IdleChunk> IdleMoves::take_most_useful(std::size_t remaining, std::size_t room, std::size_t total) {
  auto best = by_size_.end();
  double most = 0;
  for (auto at = by_size_.begin(); at != by_size_.end() && at->first <= room;) {
    auto& [size, heap] = *at;
    if (!drop_stale(heap)) {
      at = by_size_.erase(at);
      continue;
    }
    const Entry& first = heap.front();
    const std::size_t beyond = size - std::min(size, remaining);
    const double worth = static_cast<double>(size - beyond) / static_cast<double>(remaining) -
                         (0.5 * static_cast<double>(first.stretch - size) + 0.1 * static_cast<double>(beyond)) /
                             static_cast<double>(total);
    const bool is_better =
        best == by_size_.end() || worth > most || (worth == most && first.place < best->second.front().place);
    if (is_better) {
      best = at;
      most = worth;
    }
    ++at;
  }
  if (best == by_size_.end()) return std::nullopt;
  Heap& heap = best->second;
  const std::size_t place = heap.front().place;
  std::pop_heap(heap.begin(), heap.end(), comes_later);
  heap.pop_back();
  const IdleChunk taken = chunks_[place];
  const IdleChunk last = take_last();
  if (place == chunks_.size()) return taken;
  chunks_[place] = last;  // its entry names a place beyond the end
  Heap& of_last = by_size_.at(last.chunk->size);
  of_last.push_back({last.stretch, place});
  std::push_heap(of_last.begin(), of_last.end(), comes_later);
  return taken;
}

}  // namespace vmm
