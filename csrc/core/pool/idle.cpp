// Pool: which chunks are idle, and letting go of them. A chunk that leaves is
// detached: its old mapping waits for the device's clock, the caller does not.
#include <algorithm>
#include <functional>
#include <iterator>
#include <new>
#include <optional>
#include <set>
#include <utility>

#include "base/check.h"
#include "core/memory/chunk_store.h"
#include "core/memory/grant.h"
#include "core/pool/pool.h"

namespace vmm {

namespace {

// A tick costs up to some 100 us where torch has made all of its 128 streams and
// 0.5 where there is one; an unmap costs 16 to 22. With one tick for a quarter as
// many addresses as there are streams it does not show.
constexpr std::size_t kStreamsPerRetired = 4;
// Free blocks that are looked at for chunks to move, and chunks that are compared.
constexpr int kMostLookedAt = 128;
constexpr std::size_t kMostChoice = 256;

}  // namespace

// The newest moment at which anything in `range` was freed; what is neutral or
// not free (an ending pool's) counts for nothing.
Epoch Pool::last_use_of(ByteRange range) const {
  Epoch newest = streams_.graphs_end();
  for (std::size_t at = range.offset; at < range.end();) {
    const Block* free = large_.free_covering(at);
    if (free == nullptr) {
      at += page_;
      continue;
    }
    if (free->tag != kNeutral) newest = std::max(newest, free->epoch);
    at = free->end();
  }
  return newest;
}

// -------------------------------------------------------------- idle chunks

// Of the chunks that the stream may use at once, those that stand in free blocks
// of at least `at_least` bytes, the smallest blocks first: what they lose there
// breaks up the least. A look at so many blocks costs as much as half a move.
std::vector<IdleChunk> Pool::idle_at_once(StreamTag tag, std::size_t at_least) {
  std::vector<IdleChunk> idle;
  const Clock& clock = context_.clock;
  if (pinned_ || asleep_ != nullptr || !streams_.is_past_graphs(tag)) return idle;
  int looked_at = 0;
  const std::function<bool(const Block*)> look_at = [&](const Block* block) VMM_REQUIRES(mutex_) {
    if (block->tag == tag || clock.has_passed(block->epoch)) {
      for (auto at = range_->from(block->offset); at != range_->live().end(); ++at) {
        Chunk* chunk = at->second.chunk;
        if (at->first + chunk->size > block->end()) break;
        if (chunk->size < at_least || chunk->exported) continue;
        idle.push_back({chunk, at->first, block->size(), /*at_once=*/true});
      }
    }
    return ++looked_at < kMostLookedAt && idle.size() < kMostChoice;
  };
  large_.for_smallest(at_least, tag, look_at);
  for (std::size_t other = 1; other < streams_.size() && looked_at < kMostLookedAt; ++other) {
    if (other != tag) large_.for_smallest(at_least, static_cast<StreamTag>(other), look_at);
  }
  return idle;
}

// Every chunk that stands wholly in free space, by offset; what queued work may
// still use comes first. None while a graph may use them at any time.
// `bare_bytes` of what is taken have no memory yet. Walks all free blocks.
std::vector<IdleChunk> Pool::all_idle(StreamTag tag, Idle which, std::size_t bare_bytes) {
  std::vector<IdleChunk> idle;
  // Without a page's worth of memory under free addresses there is none to find:
  // of ten thousand pages in use, a walk took half a millisecond each time.
  if (pinned_ || asleep_ != nullptr || free_mapped_bytes(bare_bytes) < page_) return idle;
  ++walks_;
  const Clock& clock = context_.clock;
  const bool graphs_are_done = streams_.is_past_graphs(tag);
  const FreeByOffset& free = large_.free_blocks();
  const auto is_free = [](const Block* block) {
    return block != nullptr && block->state == BlockState::free && block->tag != kNeutral;
  };
  const Block* last = nullptr;
  for (const Block* first = free.first(); first != nullptr; first = free.next(last)) {
    last = first;
    if (!is_free(first)) continue;
    // One run of adjacent free blocks: a chunk may lie across two of them.
    while (is_free(last->next)) last = last->next;
    const std::size_t run_end = last->end();
    const std::size_t run = run_end - first->offset;
    const Block* block = first;
    for (auto at = range_->from(first->offset); at != range_->live().end(); ++at) {
      Chunk* chunk = at->second.chunk;
      const std::size_t end = at->first + chunk->size;
      if (end > run_end) break;
      while (block->end() <= at->first) block = block->next;
      if (chunk->exported && which == Idle::movable) continue;
      bool at_once = graphs_are_done;
      for (const Block* under = block; under != nullptr && under->offset < end; under = under->next) {
        at_once = at_once && ((tag != kNeutral && under->tag == tag) || clock.has_passed(under->epoch));
      }
      idle.push_back({chunk, at->first, run, at_once});
    }
  }
  std::stable_partition(idle.begin(), idle.end(), [](const IdleChunk& chunk) { return !chunk.at_once; });
  return idle;
}

// Takes the chunk at `offset` out of the pool's range. REQUIRES: its addresses
// are free. They are handed to no one until the old mapping has been dropped.
Chunk* Pool::detach(std::size_t offset, Epoch last_use, MappedRange::Fate fate) {
  const auto mapping = range_->live().find(offset);
  VMM_CHECK(mapping != range_->live().end(), "no chunk at ", offset);
  Chunk* chunk = mapping->second.chunk;
  const bool was_sealed = !allows(mapping->second, Access::read_write);
  retire_mapping(offset, last_use, fate);  // first: there may be no memory for it
  // It is read-only for nobody any more.
  if (was_sealed) context_.store.dormant().allow(chunk);
  count_unmapped({offset, chunk});
  chunk->last_use = std::max(chunk->last_use, last_use);
  return chunk;
}

// Throws std::bad_alloc, and the mapping is live as before.
void Pool::retire_mapping(std::size_t offset, Epoch last_use, MappedRange::Fate fate) {
  const ByteRange range{offset, range_->live().at(offset).chunk->size};
  std::vector<Piece> pieces;
  Block* const block = take_range(range, BlockState::retired, &pieces);
  bool is_noted = false;
  try {
    retired_.add(block);
    is_noted = true;
    range_->retire(offset, last_use, fate);
  } catch (...) {
    if (is_noted) retired_.take(range);
    untake(block, pieces);
    throw;
  }
  large_.remove_border(offset);
}

// What was mapped for a request that failed after that. Its chunks have gone
// back to where they came from.
void Pool::retire_in_vain() {
  const Epoch now = context_.clock.now();
  for (; !in_vain_.empty(); in_vain_.pop_back()) retire_mapping(in_vain_.back(), now, MappedRange::Fate::in_vain);
}

// Former addresses are dropped without hurry: a tick is made for them only when
// many have gathered, or when somebody needs one for another reason.
bool Pool::drop_retired() {
  if (!range_->has_retired()) return false;
  if (range_->retired_count() >= context_.clock.streams() / kStreamsPerRetired) {
    context_.clock.cover(range_->last_retired_use());
  }
  context_.clock.poll();
  const std::vector<ByteRange> dropped =
      range_->drop_retired(context_.clock, [this](ByteRange range) VMM_REQUIRES(mutex_) {
        tell(PoolEvent::segment_free, range.offset, range.size, nullptr);
      });
  for (const ByteRange& range : dropped) large_.free(retired_.take(range), kNeutral, kLongAgo);
  return !dropped.empty();
}

bool Pool::is_free(ByteRange range) const {
  for (std::size_t at = range.offset; at < range.end();) {
    const Block* free = large_.free_covering(at);
    if (free == nullptr) return false;
    at = free->end();
  }
  return true;
}

// Puts the idle chunks that lie in `range` or reach into it on the group's shelf.
// Looks at those only: a pool may hold very many.
void Pool::shelve_idle_chunks(ByteRange range) {
  retire_in_vain();  // what an earlier request could not: those chunks are not the pool's
  if (!pinned_ && asleep_ == nullptr) shelve_idle_in(range);
}

void Pool::shelve_idle_in(ByteRange range) {
  auto at = range_->reaching(range.offset);
  while (at != range_->live().end() && at->first < range.end()) {
    const ByteRange of_chunk{at->first, at->second.chunk->size};
    ++at;  // before it is taken out
    if (is_free(of_chunk)) context_.store.put(group_, detach(of_chunk.offset, last_use_of(of_chunk)));
  }
  drop_retired();
}

void Pool::count_mapped(const PlacedChunk& placement, Stream stream) {
  const std::size_t size = placement.chunk->size;
  placement.chunk->oversize = is_oversize(size);
  counters_.mapped(size, placement.chunk->oversize);
  tell(PoolEvent::segment_map, placement.offset, size, stream);
  if (range_->live().at(placement.offset).is_withheld) return;
  if (context_.observer.load(std::memory_order_acquire) != nullptr) range_->note_told(placement.offset);
  tell(PoolEvent::segment_alloc, placement.offset, size, stream);
}

void Pool::count_unmapped(const PlacedChunk& placement) {
  const std::size_t size = placement.chunk->size;
  counters_.unmapped(size, placement.chunk->oversize);
  tell(PoolEvent::segment_unmap, placement.offset, size, nullptr);
  if (counters_.current(StatKind::reserved_bytes) != 0) return;
  directory_->trim();
  growth_.note_empty();
}

// --------------------------------------------------------------- giving away

std::size_t Pool::surrender(std::size_t want, std::span<const DormantMappings::Dormant> wanted, bool is_gathered,
                            Grant& grant, Budget** refused) {
  VMM_CHECK(&context_.store == &grant.store(), "pool '", name_, "' gives chunks of another store");
  *refused = nullptr;
  if (!is_gathered) context_.caches.gather(*this);
  const MutexLock lock(mutex_);
  if (range_ == nullptr) return 0;
  free_up_space();
  std::set<const Chunk*> first;
  for (const DormantMappings::Dormant& each : wanted) first.insert(each.chunk);
  IdleChunks idle;
  std::size_t moved = 0;
  const auto move = [&](const IdleChunk& chosen) VMM_REQUIRES(mutex_) {
    const std::size_t size = chosen.chunk->size;
    if (budget_.above_floors(grant.payer()) < size) return;  // perhaps a smaller one
    *refused = Budget::transfer(budget_, grant.payer(), size);
    if (*refused != nullptr) return;
    Chunk* chunk = nullptr;
    try {
      chunk = detach(chosen.offset, last_use_of({chosen.offset, size}), MappedRange::Fate::may_return);
    } catch (...) {
      Budget::transfer_back(budget_, grant.payer(), size);
      throw;
    }
    chunk->charged = &grant.payer();
    grant.chunks.put(chunk);
    moved += size;
  };
  for (const IdleChunk& each : all_idle(kNeutral, Idle::movable)) {
    if (first.count(each.chunk) == 0) {
      idle.add(each);
    } else if (*refused == nullptr) {
      move(each);
    }
  }
  while (moved < want && *refused == nullptr) {
    const std::optional<IdleChunk> chosen = idle.take_nearest(want - moved);
    if (!chosen.has_value()) break;
    move(*chosen);
  }
  drop_retired();
  return moved;
}

std::vector<DormantMappings::Dormant> Pool::dormant_of_others(ByteRange place) const {
  if (place.size == 0) return {};
  const ReadLock lock(*this);
  if (range_ == nullptr) return {};
  std::vector<DormantMappings::Dormant> found = range_->dormant_in(place);
  std::erase_if(found, [this](const DormantMappings::Dormant& chunk) { return chunk.holder == id_; });
  return found;
}

// The largest first.
std::size_t Pool::shelve_largest(IdleChunks idle, std::size_t want, const Budget* beneath) {
  std::size_t moved = 0;
  while (moved < want) {
    const std::optional<IdleChunk> largest = idle.take_largest();
    if (!largest.has_value()) break;
    // Else perhaps a smaller one.
    if (beneath == nullptr || budget_.above_floors(*beneath) >= largest->chunk->size) moved += shelve(*largest);
  }
  drop_retired();
  return moved;
}

std::size_t Pool::shed(std::size_t keep) {
  const GatheredLock lock(*this);
  if (range_ == nullptr) return 0;
  free_up_space();
  IdleChunks idle(all_idle(kNeutral, Idle::all));
  const std::size_t above = idle.bytes() - std::min(idle.bytes(), keep);
  return shelve_largest(std::move(idle), above, nullptr);
}

std::size_t Pool::shed_about(std::size_t want, const Budget* beneath) {
  const GatheredLock lock(*this);
  if (range_ == nullptr) return 0;
  free_up_space();
  return shelve_largest(IdleChunks(all_idle(kNeutral, Idle::all)), want, beneath);
}

std::vector<ByteRange> Pool::came_free_with(ByteRange range) {
  std::vector<ByteRange> freed = {range};
  const MutexLock lock(mutex_);
  if (range_ == nullptr) return freed;
  settle_locked(&freed);
  give_up_spare_slabs(&freed);
  for (ByteRange& each : freed) {
    if (each.size > kSmallLimitBytes) continue;
    // It may have been the last of its slab, which began and ended within this.
    const std::size_t begin = each.offset - std::min(each.offset, kSlabBytes);
    each = {begin, std::min(each.end() + kSlabBytes, capacity_) - begin};
  }
  return freed;
}

std::size_t Pool::shed_in(std::span<const ByteRange> freed, std::size_t want, const Budget* beneath) {
  const MutexLock lock(mutex_);
  if (range_ == nullptr || pinned_ || asleep_ != nullptr) return 0;
  IdleChunks idle;
  std::set<std::size_t> seen;  // offsets: several may reach into one chunk
  for (const ByteRange& range : freed) {
    for (auto at = range_->reaching(range.offset); at != range_->live().end() && at->first < range.end(); ++at) {
      Chunk* const chunk = at->second.chunk;
      if (!seen.insert(at->first).second || !is_free({at->first, chunk->size})) continue;
      idle.add({chunk, at->first, chunk->size, /*at_once=*/false});
    }
  }
  return shelve_largest(std::move(idle), want, beneath);
}

std::size_t Pool::shelve(const IdleChunk& idle) {
  const std::size_t size = idle.chunk->size;
  context_.store.put(group_, detach(idle.offset, last_use_of({idle.offset, size})));
  return size;
}

std::vector<IdleChunk> Pool::idle_by_age(const FreedAt& freed_at) {
  std::vector<std::pair<std::uint64_t, IdleChunk>> aged;
  for (const IdleChunk& idle : all_idle(kNeutral, Idle::all)) {
    aged.emplace_back(freed_at({idle.offset, idle.chunk->size}), idle);
  }
  // Of one age the highest go first: low addresses stay whole.
  std::sort(aged.begin(), aged.end(), [](const auto& a, const auto& b) {
    return a.first != b.first ? a.first < b.first : a.second.offset > b.second.offset;
  });
  std::vector<IdleChunk> result;
  result.reserve(aged.size());
  for (const auto& [age, idle] : aged) result.push_back(idle);
  return result;
}

std::size_t Pool::shed_oldest(std::size_t keep, const FreedAt& freed_at) {
  const GatheredLock lock(*this);
  if (range_ == nullptr) return 0;
  free_up_space();
  const std::vector<IdleChunk> idle = idle_by_age(freed_at);
  std::size_t idle_bytes = 0;
  for (const IdleChunk& each : idle) idle_bytes += each.chunk->size;
  std::size_t moved = 0;
  for (auto oldest = idle.begin(); oldest != idle.end() && idle_bytes > keep; ++oldest) {
    const std::size_t size = shelve(*oldest);
    idle_bytes -= size;
    moved += size;
  }
  drop_retired();
  return moved;
}

std::size_t Pool::shed_unused(std::size_t most, const FreedAt& freed_at) {
  const GatheredLock lock(*this);
  if (range_ == nullptr) return 0;
  context_.clock.cover(context_.clock.now());
  context_.clock.poll();
  free_up_space();
  std::size_t moved = 0;
  for (const IdleChunk& idle : idle_by_age(freed_at)) {
    if (idle.at_once && idle.chunk->size <= most - moved) moved += shelve(idle);
  }
  drop_retired();
  return moved;
}

std::size_t Pool::melt_locked(const Budget* limit, std::size_t want, const Budget& payer) {
  if (range_ == nullptr) return 0;
  free_up_space();
  IdleChunks idle(all_idle(kNeutral, Idle::all));
  std::size_t in_use = 0;
  while (limit == nullptr || limit->room_for(payer) < want) {
    const std::optional<IdleChunk> chosen = idle.take_largest();
    if (!chosen.has_value()) break;
    const std::size_t size = chosen->chunk->size;
    if (budget_.above_floors(payer) < size) continue;
    if (!chosen->at_once) {
      in_use += size;
      continue;
    }
    Chunk* chunk = detach(chosen->offset, last_use_of({chosen->offset, size}));
    try {
      drop_retired();
    } catch (const std::bad_alloc&) {
      // Another time: the chunk rests on the shelf until then.
    }
    // Another pool's former mapping, of before the chunk came here, may still
    // stand: then it cannot be released yet and rests on the shelf.
    const bool unmapped = chunk->mappings.load(std::memory_order_acquire) == 0;
    if (!unmapped || !context_.store.release(chunk).ok()) context_.store.put(group_, chunk);
  }
  return in_use;
}

}  // namespace vmm
