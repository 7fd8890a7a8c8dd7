// BackedSpace: which chunks are idle, and letting go of them. A chunk that leaves is
// detached: its old mapping waits for the device's clock, the caller does not.
#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "base/check.h"
#include "base/errors.h"
#include "core/backing/backed_space.h"
#include "core/memory/chunk_store.h"

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

// -------------------------------------------------------------- idle chunks

// Of the chunks that the stream may use at once, those that stand in free blocks
// of at least `at_least` bytes, the smallest blocks first: what they lose there
// breaks up the least. A look at so many blocks costs as much as half a move.
std::vector<IdleChunk> BackedSpace::idle_at_once(StreamTag tag, std::size_t at_least) {
  std::vector<IdleChunk> idle;
  const Clock& clock = context_.clock;
  if (!may_move() || !streams_.is_past_graphs(tag)) return idle;
  int looked_at = 0;
  const auto look_at = [&](const Block* block) {
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
  blocks_.for_smallest(at_least, tag, look_at);
  for (std::size_t other = 1; other < streams_.size() && looked_at < kMostLookedAt; ++other) {
    if (other != tag) blocks_.for_smallest(at_least, static_cast<StreamTag>(other), look_at);
  }
  return idle;
}

// None while a graph may use them at any time.
std::vector<IdleChunk> BackedSpace::all_idle(StreamTag tag, Idle which, std::size_t bare_bytes) {
  std::vector<IdleChunk> idle;
  // Without a page's worth of memory under free addresses there is none to find:
  // of ten thousand pages in use, a walk took half a millisecond each time.
  if (!may_move() || free_mapped_bytes(bare_bytes) < kind_.page) return idle;
  note_walk();
  const Clock& clock = context_.clock;
  const bool graphs_are_done = streams_.is_past_graphs(tag);
  const FreeByOffset& free = blocks_.free_blocks();
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

// The newest moment at which others than the tag's stream may have used an idle chunk.
Epoch BackedSpace::last_use_beside(StreamTag tag, const IdleChunk& idle) const {
  if (idle.at_once) return kLongAgo;
  Epoch newest = streams_.is_past_graphs(tag) ? kLongAgo : streams_.graphs_end();
  for (std::size_t at = idle.offset; at < idle.offset + idle.chunk->size;) {
    const Block* const under = blocks_.free_covering(at);
    if (under->tag != tag && under->tag != kNeutral) newest = std::max(newest, under->epoch);
    at = under->end();
  }
  return newest;
}

std::vector<IdleChunk> BackedSpace::unused_of(std::vector<IdleChunk> idle, std::optional<Stream> but_by) {
  const StreamTag tag = but_by.has_value() ? streams_.known_tag(*but_by) : kNeutral;
  Clock& clock = context_.clock;
  Epoch newest = kLongAgo;
  for (const IdleChunk& each : idle) newest = std::max(newest, last_use_beside(tag, each));
  clock.cover_in_time(newest);
  clock.poll();
  std::erase_if(idle, [&](const IdleChunk& each) { return !clock.has_passed(last_use_beside(tag, each)); });
  return idle;
}

Chunk* BackedSpace::detach(std::size_t offset, MappedRange::Fate fate) {
  const auto mapping = range_->live().find(offset);
  VMM_CHECK(mapping != range_->live().end(), "no chunk at ", offset);
  Chunk* chunk = mapping->second.chunk;
  const Epoch last_use = last_use_of({offset, chunk->size});
  const bool was_sealed = !allows(mapping->second, Access::read_write);
  retire_mapping(offset, last_use, fate);  // first: there may be no memory for it
  // It is read-only for nobody any more.
  if (was_sealed) context_.store.dormant().allow(chunk);
  owner_.unmapped({offset, chunk});
  chunk->last_use = std::max(chunk->last_use, last_use);
  return chunk;
}

// Throws std::bad_alloc, and the mapping is live as before.
void BackedSpace::retire_mapping(std::size_t offset, Epoch last_use, MappedRange::Fate fate) {
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
  blocks_.remove_border(offset);
}

void BackedSpace::retire_in_vain() {
  const Epoch now = context_.clock.now();
  for (; !in_vain_.empty(); in_vain_.pop_back()) retire_mapping(in_vain_.back(), now, MappedRange::Fate::in_vain);
}

// Former addresses are dropped without hurry: a tick is made for them only when
// many have gathered, or when somebody needs one for another reason.
bool BackedSpace::drop_retired() {
  if (!range_->has_retired()) return false;
  if (range_->retired_count() >= context_.clock.streams() / kStreamsPerRetired) {
    context_.clock.cover_in_time(range_->last_retired_use());
  }
  context_.clock.poll();
  const std::vector<ByteRange> dropped =
      range_->drop_retired(context_.clock, [this](ByteRange range) { owner_.addresses_go(range); });
  for (const ByteRange& range : dropped) blocks_.free(retired_.take(range), kNeutral, kLongAgo);
  return !dropped.empty();
}

// At those only: a pool may hold very many.
void BackedSpace::shelve_idle_chunks(ByteRange range) {
  retire_in_vain();  // what an earlier request could not: those chunks are not the pool's
  if (may_move()) shelve_idle_in(range);
}

void BackedSpace::shelve_idle_in(ByteRange range) {
  auto at = range_->reaching(range.offset);
  while (at != range_->live().end() && at->first < range.end()) {
    const ByteRange of_chunk{at->first, at->second.chunk->size};
    ++at;  // before it is taken out
    if (is_free(of_chunk)) context_.store.put(group_, detach(of_chunk.offset));
  }
  drop_retired();
}

std::vector<IdleChunk> BackedSpace::idle_by_age(const FreedAt& freed_at) {
  std::vector<std::pair<std::uint64_t, IdleChunk>> aged;
  for (const IdleChunk& idle : all_idle(kNeutral, Idle::all)) {
    aged.emplace_back(freed_at({idle.offset, idle.chunk->size}), idle);
  }
  std::sort(aged.begin(), aged.end(), [](const auto& a, const auto& b) {
    return a.first != b.first ? a.first < b.first : a.second.offset > b.second.offset;
  });
  std::vector<IdleChunk> result;
  result.reserve(aged.size());
  for (const auto& [age, idle] : aged) result.push_back(idle);
  return result;
}

IdleChunks BackedSpace::idle_in(std::span<const ByteRange> ranges) const {
  IdleChunks idle;
  if (!may_move()) return idle;
  std::set<std::size_t> seen;  // offsets: several may reach into one chunk
  for (const ByteRange& range : ranges) {
    for (auto at = range_->reaching(range.offset); at != range_->live().end() && at->first < range.end(); ++at) {
      Chunk* const chunk = at->second.chunk;
      if (!seen.insert(at->first).second || !is_free({at->first, chunk->size})) continue;
      idle.add({chunk, at->first, chunk->size, /*at_once=*/false});
    }
  }
  return idle;
}

std::size_t BackedSpace::shelve(const IdleChunk& idle) {
  const std::size_t size = idle.chunk->size;
  context_.store.put(group_, detach(idle.offset));
  return size;
}

std::size_t BackedSpace::shelve_largest(IdleChunks idle, std::size_t want, const Budget* beneath) {
  std::size_t moved = 0;
  const auto above = [&] { return beneath == nullptr ? kUnlimited : budget_.above_floors(*beneath); };
  while (moved < want) {
    const std::optional<IdleChunk> next = idle.take_nearest(above());
    if (!next.has_value()) break;
    if (above() >= std::min(next->chunk->size, want - moved)) moved += shelve(*next);
  }
  drop_retired();
  return moved;
}

// ----------------------------------------------------------- former mappings

bool BackedSpace::must_wait_for_retired(Shortage* shortage) {
  const Epoch last_use = range_->last_retired_use();
  if (context_.clock.has_passed(last_use)) return false;
  shortage->wait_for = last_use;
  return true;
}

bool BackedSpace::make_way_of_retired(std::size_t offset, Shortage* shortage) {
  if (must_wait_for_retired(shortage)) return false;
  drop_retired();
  if (!retired_.covers(offset)) return true;
  throw_if_failed(range_->refused(),
                  "dropping a former mapping of pool '" + name_ + "' at offset " + std::to_string(offset));
  return false;
}

}  // namespace vmm
