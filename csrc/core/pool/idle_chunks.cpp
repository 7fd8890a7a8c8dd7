#include "core/pool/idle_chunks.h"

#include <algorithm>
#include <iterator>

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

IdleChunk IdleChunks::take_last(BySize::iterator of_size) {
  const IdleChunk taken = of_size->second.back();
  of_size->second.pop_back();
  bytes_ -= of_size->first;
  if (of_size->second.empty()) by_size_.erase(of_size);
  return taken;
}

std::optional<IdleChunk> take_most_useful(std::vector<IdleChunk>* idle, std::size_t remaining, std::size_t room,
                                          std::size_t total) {
  auto best = idle->end();
  double most = 0;
  for (auto at = idle->begin(); at != idle->end(); ++at) {
    const std::size_t size = at->chunk->size;
    if (size > room) continue;
    const std::size_t beyond = size - std::min(size, remaining);
    const double worth = static_cast<double>(size - beyond) / static_cast<double>(remaining) -
                         (0.5 * static_cast<double>(at->stretch - size) + 0.1 * static_cast<double>(beyond)) /
                             static_cast<double>(total);
    if (best != idle->end() && worth <= most) continue;
    best = at;
    most = worth;
  }
  if (best == idle->end()) return std::nullopt;
  const IdleChunk taken = *best;
  *best = idle->back();
  idle->pop_back();
  return taken;
}

}  // namespace vmm
