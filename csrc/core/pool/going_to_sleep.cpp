// SleepingMemory: on its way there: what is to leave, and each chunk of it as it goes.
#include <algorithm>
#include <set>
#include <span>
#include <utility>

#include "base/check.h"
#include "core/memory/chunk_store.h"
#include "core/pool/sleeping_memory.h"

namespace vmm {

namespace {

// What is free between two kept ranges is copied with them: a copy costs some 2 us, in which
// the bus moves as much.
constexpr std::size_t kCopiedAlong = 64 * kKiB;

}  // namespace

// What has to be there again when it wakes, by offset: what somebody still uses, and all of
// a graph's memory, which may use any of it whenever it is launched.
std::vector<ByteRange> SleepingMemory::contents() const {
  std::vector<ByteRange> found;
  const auto add = [&found](ByteRange range) {
    if (!found.empty() && range.offset - found.back().end() <= kCopiedAlong) {
      found.back().size = range.end() - found.back().offset;
    } else {
      found.push_back(range);
    }
  };
  if (space_.is_pinned()) {
    for (const auto& [offset, mapping] : space_.range().live()) add({offset, mapping.chunk->size});
    return found;
  }
  for (const Block* block = space_.blocks().stretches().front(); block != nullptr; block = block->next) {
    if (block->state != BlockState::slab) {
      if (block->is_live() || block->state == BlockState::pages) add(block->range());
      continue;
    }
    for (const Block* piece = slabs_.first_piece(*block); piece != nullptr; piece = piece->next) {
      if (piece->is_live()) add(piece->range());
    }
  }
  return found;
}

std::vector<MovedChunk> SleepingMemory::plan_to_go(bool keeps_unchanged, std::span<const ByteRange> staying) {
  std::vector<MovedChunk> plan;
  if (!space_.is_pinned()) {
    owner_.give_up_spare_slabs();
    space_.shelve_idle_in({0, space_.kind().capacity});
    space_.drop_retired();
  }
  const std::vector<ByteRange> kept = contents();
  auto next = kept.begin();
  std::set<std::size_t> stays;  // chunks, by offset
  for (const ByteRange& each : staying) {
    for (auto at = space_.range().covering(each.offset); at != space_.range().live().end() && at->first < each.end();
         ++at) {
      stays.insert(at->first);
    }
  }
  for (const auto& [offset, mapping] : space_.range().live()) {
    const Chunk& chunk = *mapping.chunk;
    if (stays.count(offset) != 0) continue;
    // What others have mapped as well stays as it is: they would go on with the chunk that
    // the pool had.
    if (chunk.exported || chunk.mappings.load(std::memory_order_acquire) != 1) continue;
    MovedChunk leaving;
    leaving.offset = offset;
    leaving.place.size = chunk.size;
    const ByteRange range{offset, chunk.size};
    leaving.place.is_read_only = is_to_be_read_only(range, mapping);
    const std::size_t end = range.end();
    while (next != kept.end() && next->end() <= offset) ++next;
    for (auto live = next; live != kept.end() && live->offset < end; ++live) {
      const std::size_t begin = std::max(live->offset, offset);
      // What a wake that was stopped has left is kept already.
      for (const ByteRange& part : asleep_->kept.missing({begin, std::min(live->end(), end) - begin})) {
        KeptRanges unchanged;
        if (keeps_unchanged) {
          for (const KeptRange& each : unchanged_.within(part, offset, mapping)) {
            unchanged.add(each);
            leaving.unchanged.push_back(each);
          }
        }
        for (const ByteRange& rest : unchanged.missing(part)) leaving.kept.push_back(rest);
      }
    }
    plan.push_back(std::move(leaving));
  }
  return plan;
}

Status SleepingMemory::let_go(const MovedChunk& leaving, std::span<const KeptRange> kept, Unchanged* ended) {
  const auto found = space_.range().live().find(leaving.offset);
  VMM_CHECK(is_asleep() && found != space_.range().live().end(), "no chunk at ", leaving.offset);
  const Chunk& chunk = *found->second.chunk;
  if (chunk.exported || chunk.mappings.load(std::memory_order_acquire) != 1) return {};  // of somebody else's too, now
  const ByteRange range = leaving.range();
  const auto undo = [&] {
    for (const KeptRange& each : kept) asleep_->kept.remove({each.offset, each.size});
    for (const KeptRange& each : leaving.unchanged) asleep_->kept.remove({each.offset, each.size});
  };
  const bool is_discarded = kept.empty() && !leaving.kept.empty();
  Status status;
  try {
    for (const KeptRange& each : kept) asleep_->kept.add(each);
    for (const KeptRange& each : leaving.unchanged) asleep_->kept.add(each);
    status = send_away(range, leaving.place.is_poisoned && is_discarded);
  } catch (...) {
    undo();
    throw;
  }
  if (!status.ok()) {
    undo();
    return status;
  }
  *ended = unchanged_.take(range);  // what of it was used is among what is kept
  asleep_->is_discarded = asleep_->is_discarded || is_discarded;
  return status;
}

// The chunk leaves for the group's shelf, or stays where the driver refuses. What is noted of
// its place is what holds now: others may have registered or unsealed it since it was planned.
// REQUIRES: nothing uses it.
Status SleepingMemory::send_away(ByteRange range, bool is_poisoned) {
  const LiveMapping& mapping = space_.range().live().at(range.offset);
  Chunk* const chunk = mapping.chunk;
  const PlaceOfChunk place{range.size, is_to_be_read_only(range, mapping), mapping.is_withheld, is_poisoned};
  const bool was_sealed = !space_.allows(mapping, Access::read_write);
  const bool is_told = mapping.is_to_be_told();
  const auto gone = asleep_->gone.emplace(range.offset, place).first;  // first: there may be no memory to note it
  // Before it goes, for whoever registered it.
  if (is_told) owner_.addresses_go(range);
  if (const Status status = space_.range().unmap(range); !status.ok()) {
    if (is_told) owner_.addresses_stay(range);
    asleep_->gone.erase(gone);
    return status;
  }
  std::erase(asleep_->to_seal, range);
  if (was_sealed) context_.store.dormant().allow(chunk);
  owner_.unmapped({range.offset, chunk});
  chunk->last_use = kLongAgo;  // whoever asked has waited for all that is queued
  context_.store.put(group_, chunk);
  return {};
}

}  // namespace vmm
