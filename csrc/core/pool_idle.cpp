// Pool: which chunks are idle, and letting go of them. A chunk that leaves is
// detached: its old mapping waits for its fence, the caller does not.
#include <algorithm>
#include <iterator>

#include "base/check.h"
#include "core/pool.h"

namespace vmm {

// ------------------------------------------------------------------- fences

bool Pool::has_passed(StreamTag tag, std::uint64_t epoch) {
  StreamState& stream = streams_[tag];
  if (stream.passed > epoch) return true;
  if (stream.newest == nullptr || stream.records <= epoch || !stream.newest->passed()) return false;
  stream.passed = stream.records;
  return true;
}

// A point after everything that was freed on the stream up to `epoch`.
FencePointPtr Pool::point_after(StreamTag tag, std::uint64_t epoch) {
  StreamState& stream = streams_[tag];
  if (stream.newest == nullptr || stream.records <= epoch) {
    stream.newest = context_.fences.record(stream.stream);
    ++stream.records;
  }
  return stream.newest;
}

FenceSet Pool::last_use_of(ByteRange range) {
  FenceSet points;
  if (after_graphs_ != nullptr) {
    if (after_graphs_->passed()) {
      after_graphs_.reset();
    } else {
      points.add(after_graphs_);
    }
  }
  for (std::size_t at = range.offset; at < range.end();) {
    const Block* free = large_.free_covering(at);
    if (free == nullptr) {
      // Not free: whoever asks knows that it holds no work (an ending pool).
      at += page_;
      continue;
    }
    if (free->tag != kNeutral && !has_passed(free->tag, free->epoch)) points.add(point_after(free->tag, free->epoch));
    at = free->end();
  }
  return points;
}

// -------------------------------------------------------------- idle chunks

// Every chunk that stands wholly in free space, by size and then by offset.
// None while a graph may use them at any time.
Pool::IdleChunks Pool::idle_chunks(StreamTag tag) {
  IdleChunks idle;
  if (pinned_) return idle;
  const bool graphs_are_done = after_graphs_ == nullptr || after_graphs_->passed();
  const auto& free = large_.free_blocks();
  for (auto first = free.begin(); first != free.end();) {
    // One run of adjacent free blocks: a chunk may lie across two of them.
    auto last = first;
    while (std::next(last) != free.end() && (*std::next(last))->offset == (*last)->end()) ++last;
    const std::size_t run_end = (*last)->end();
    auto block = first;
    for (auto at = range_->from((*first)->offset); at != range_->live().end(); ++at) {
      const std::size_t end = at->first + at->second.chunk->size;
      if (end > run_end) break;
      while ((*block)->end() <= at->first) ++block;
      bool at_once = graphs_are_done;
      for (auto under = block; under != std::next(last) && (*under)->offset < end; ++under) {
        const Block& span = **under;
        if (span.tag == tag || span.tag == kNeutral || has_passed(span.tag, span.epoch)) continue;
        at_once = tag != kNeutral && point_after(span.tag, span.epoch)->passed() && at_once;
      }
      idle[at->second.chunk->size].push_back({at->second.chunk, at->first, at_once});
    }
    first = std::next(last);
  }
  return idle;
}

// Takes the largest idle chunk of at most `at_most` and at least `at_least`
// bytes; where `at_most` is no bound, the smallest of at least `at_least`.
bool Pool::take_idle(IdleChunks& idle, std::size_t at_most, std::size_t at_least, IdleChunk* out) {
  const bool smallest = at_most == kUnlimited;
  for (;;) {
    auto at = smallest ? idle.lower_bound(at_least) : idle.upper_bound(at_most);
    if (smallest ? at == idle.end() : at == idle.begin()) return false;
    if (!smallest) --at;
    if (at->first < at_least) return false;
    if (at->second.empty()) {
      idle.erase(at);
      continue;
    }
    // The highest first: low addresses stay whole.
    *out = at->second.back();
    at->second.pop_back();
    return true;
  }
}

// Takes the chunk at `offset` out of the pool's range. REQUIRES: its addresses
// are free. They are handed to no one until the old mapping has been dropped.
Chunk* Pool::detach(std::size_t offset, const FenceSet& last_use) {
  const auto mapping = range_->live().find(offset);
  VMM_CHECK(mapping != range_->live().end(), "no chunk at ", offset);
  count_unmapped({offset, mapping->second.chunk});
  Chunk* chunk = range_->retire(offset, last_use);
  std::vector<Piece> pieces;
  retired_blocks_.emplace(offset, take_range({offset, chunk->size}, BlockState::retired, &pieces));
  return chunk;
}

bool Pool::drop_retired(bool wait) {
  if (!range_->has_retired()) return false;
  const std::vector<ByteRange> dropped = range_->drop_retired(wait, [this](ByteRange range) VMM_REQUIRES(mutex_) {
    tell(PoolEvent::segment_free, range.offset, range.size, nullptr);
  });
  for (const ByteRange& range : dropped) {
    const auto block = retired_blocks_.find(range.offset);
    VMM_CHECK(block != retired_blocks_.end() && block->second->range() == range, "retired block at ", range.offset);
    large_.free(block->second, kNeutral, 0);
    retired_blocks_.erase(block);
  }
  return !dropped.empty();
}

// Mapped memory is the large pool's until a slab is made of it.
void Pool::count_mapped(const Placement& placement, Stream stream) {
  const std::size_t size = placement.chunk->size;
  count_up(StatKind::segment, SizeClass::large_pool, 1);
  count_up(StatKind::reserved_bytes, SizeClass::large_pool, size);
  ++statistics_.num_device_alloc;
  if (size >= context_.oversize_bytes.load(std::memory_order_relaxed)) statistics_.oversize_segments.increase(1);
  tell(PoolEvent::segment_map, placement.offset, size, stream);
}

void Pool::count_unmapped(const Placement& placement) {
  const std::size_t size = placement.chunk->size;
  count_down(StatKind::segment, SizeClass::large_pool, 1);
  count_down(StatKind::reserved_bytes, SizeClass::large_pool, size);
  ++statistics_.num_device_free;
  if (size >= context_.oversize_bytes.load(std::memory_order_relaxed)) statistics_.oversize_segments.decrease(1);
  tell(PoolEvent::segment_unmap, placement.offset, size, nullptr);
}

void Pool::pin() {
  const MutexLock lock(mutex_);
  pinned_ = true;
}

void Pool::unpin() {
  const MutexLock lock(mutex_);
  if (!pinned_) return;
  pinned_ = false;
  after_graphs_ = context_.fences.record_all();
}

bool Pool::is_pinned() const {
  const MutexLock lock(mutex_);
  return pinned_;
}

std::size_t Pool::bytes_above_floor() const {
  const std::size_t held = model().budget_.used();
  return held - std::min(held, floor());
}

// --------------------------------------------------------------- giving away

std::size_t Pool::surrender(std::size_t want, bool respect_floor, Grant& grant, Budget** refused) {
  *refused = nullptr;
  const MutexLock lock(mutex_);
  if (range_ == nullptr) return 0;
  settle_locked(/*wait=*/false);
  give_up_spare_slabs();
  IdleChunks idle = idle_chunks(kNeutral);
  std::size_t moved = 0;
  IdleChunk chosen;
  while (moved < want) {
    const std::size_t remaining = want - moved;
    if (!take_idle(idle, remaining, 0, &chosen) && !take_idle(idle, kUnlimited, remaining, &chosen)) break;
    const std::size_t size = chosen.chunk->size;
    if (respect_floor && bytes_above_floor() < size) continue;  // perhaps a smaller one
    *refused = Budget::transfer(budget_, grant.payer(), size);
    if (*refused != nullptr) break;
    const FenceSet last_use = last_use_of({chosen.offset, size});
    Chunk* chunk = detach(chosen.offset, last_use);
    chunk->charged = &grant.payer();
    chunk->last_use.add_all(last_use);
    grant.chunks.put(chunk);
    moved += size;
  }
  drop_retired(/*wait=*/false);
  return moved;
}

std::size_t Pool::shed(std::size_t keep) {
  const MutexLock lock(mutex_);
  if (range_ == nullptr) return 0;
  settle_locked(/*wait=*/false);
  give_up_spare_slabs();
  IdleChunks idle = idle_chunks(kNeutral);
  std::size_t idle_bytes = 0;
  for (const auto& [size, chunks] : idle) idle_bytes += size * chunks.size();
  std::size_t moved = 0;
  IdleChunk chosen;
  while (idle_bytes > keep && take_idle(idle, kUnlimited - 1, 0, &chosen)) {
    const std::size_t size = chosen.chunk->size;
    const FenceSet last_use = last_use_of({chosen.offset, size});
    Chunk* chunk = detach(chosen.offset, last_use);
    chunk->last_use.add_all(last_use);
    context_.store.put(group_, chunk);
    idle_bytes -= size;
    moved += size;
  }
  drop_retired(/*wait=*/false);
  return moved;
}

void Pool::settle_for_melting() {
  if (range_ != nullptr) settle_locked(/*wait=*/true);
}

void Pool::melt_locked(const Budget* limit, std::size_t want) {
  if (range_ == nullptr) return;
  give_up_spare_slabs();
  IdleChunks idle = idle_chunks(kNeutral);
  IdleChunk chosen;
  while ((limit == nullptr || limit->room() < want) && take_idle(idle, kUnlimited - 1, 0, &chosen)) {
    const std::size_t size = chosen.chunk->size;
    if (bytes_above_floor() < size) continue;
    Chunk* chunk = detach(chosen.offset, last_use_of({chosen.offset, size}));
    drop_retired(/*wait=*/true);
    // Another pool's former mapping, of before the chunk came here, may still
    // stand: then it cannot be released yet and rests on the shelf.
    const bool unmapped = chunk->mappings.load(std::memory_order_acquire) == 0;
    if (!unmapped || !context_.store.release(chunk).ok()) context_.store.put(group_, chunk);
  }
}

}  // namespace vmm
