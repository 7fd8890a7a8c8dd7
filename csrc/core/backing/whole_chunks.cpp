// BackedSpace: where a block may not lie anywhere: it has a chunk for itself (no_split), or lies
// within one (memory that is registered with libraries by the chunk).
#include <cstddef>

#include "base/errors.h"
#include "core/backing/backed_space.h"

namespace vmm {

// ------------------------------------------------------------- nothing is split

// The smallest free chunk that fits, all of it; or nullptr. Looks at what is free alone: of
// ten thousand blocks in use, a walk over their chunks took 270 us each time.
Block* BackedSpace::take_whole_chunk(const Request& request) {
  Block* best = nullptr;
  ByteRange whole;
  for (Block* free : blocks_.free_blocks()) {
    if (free->tag != request.tag || free->size() < request.size) continue;
    for (auto at = range_->from(free->offset); at != range_->live().end(); ++at) {
      const std::size_t size = at->second.chunk->size;
      if (at->first + size > free->end()) break;
      if (size < request.size || (best != nullptr && size >= whole.size)) continue;
      best = free;
      whole = {at->first, size};
    }
    if (best != nullptr && whole.size == request.size) break;
  }
  return best == nullptr ? nullptr : blocks_.carve(best, whole.offset, whole.size, request.state);
}

// Where nothing is split, a block has a chunk for itself: a free one or a new one of
// exactly its size.
Block* BackedSpace::place_unsplit(Request request, Grant* grant, Shortage* shortage) {
  if (Block* const block = take_whole_chunk(request)) return block;
  if (!placement_.find_bare(request.size, 0, /*high=*/false, &request.offset)) {
    *shortage = Shortage::of_addresses(request.size);
    return nullptr;
  }
  return place_at(request, request.offset, grant, shortage);
}

// ----------------------------------------------------------- within one chunk

// Where blocks are registered with somebody (NCCL, above all), one lies within one
// chunk: a registration is a chunk, and NCCL compares nothing. A send whose buffer is
// registered and a receive whose buffer is not, as it lies over two, gave wrong
// numbers. So free space does not coalesce over the chunks' borders, and nothing is
// put together out of several.
Block* BackedSpace::place_within_chunk(const Request& request, Grant* grant, Shortage* shortage) {
  if (Block* block = placement_.take_backed(request.size, request.tag, request.state)) return block;
  if (!request.is_gathered) {
    shortage->is_kept_by_threads = true;
    return nullptr;
  }
  std::size_t offset = 0;
  const auto find = [&]() { return placement_.find_bare(request.size, 0, /*high=*/false, &offset); };
  bool found = find();
  if (!found) {
    owner_.free_up_space();
    found = find();
  }
  if (!found && !is_pinned_) {
    // The addresses are full of chunks that do not fit.
    if (!adopt_free_space(request.tag, shortage)) return nullptr;
    if (Block* block = placement_.take_backed(request.size, request.tag, request.state)) return block;
    shelve_idle_chunks({0, kind_.capacity});
    found = find();
    if (!found && range_->has_retired()) {
      if (must_wait_for_retired(shortage)) return nullptr;
      drop_retired();
      found = find();
    }
  }
  if (!found) {
    *shortage = Shortage::of_addresses(request.size);
    return nullptr;
  }
  return place_at(request, offset, grant, shortage);
}

// For a block at a place that is not ours to choose.
void BackedSpace::require_within_chunk(ByteRange range) const {
  for (auto at = range_->reaching(range.offset); at != range_->live().end() && at->first < range.end(); ++at) {
    const bool is_within = at->first <= range.offset && range.end() <= at->first + at->second.chunk->size;
    if (is_within || at->second.is_withheld) continue;
    throw InvalidRangeError(range.offset, range.size, kind_.capacity,
                            "it would lie over the border of a chunk of pool '" + name_ +
                                "', and such chunks are registered with libraries (NCCL)");
  }
}

void BackedSpace::withhold_broken_chunks() {
  const bool all = kind_.is_uniform || is_pinned_;  // a checkpoint may bring any block of before back
  for (const auto& [offset, mapping] : range_->live()) {
    if (all) range_->withhold(offset);
    if (!kind_.is_uniform) blocks_.add_border(offset);
  }
  for (const Block* block = blocks_.stretches().front(); block != nullptr; block = block->next) {
    if (block->is_nobodys()) continue;
    auto at = range_->reaching(block->offset);
    const bool is_there = at != range_->live().end() && at->first <= block->offset;
    const bool is_whole = is_there && at->first + at->second.chunk->size >= block->end();
    if (is_whole && block->state != BlockState::pages) continue;
    for (; at != range_->live().end() && at->first < block->end(); ++at) range_->withhold(at->first);
  }
}

}  // namespace vmm
