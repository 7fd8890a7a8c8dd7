// BackedSpace: backing a place with the chunks that choosing.cpp finds: covering, mapping and
// scrubbing.
//
// What lacks memory is backed by a grant; or the pool grows, by the group's shelf and
// new chunks within the limits; or it moves its own idle chunks by a second mapping
// (growth_policy decides). A chunk is mapped at its new place before it leaves the
// old one, so a failure undoes to what was.
#include <algorithm>
#include <initializer_list>
#include <new>
#include <span>

#include "core/backing/backed_space.h"
#include "core/memory/chunk_store.h"
#include "core/memory/grant.h"
#include "core/options.h"
#include "driver/driver.h"

namespace vmm {

namespace {
bool has_nothing(const Grant* grant) { return grant == nullptr || grant->bytes() == 0; }
}  // namespace

bool BackedSpace::Backing::is_move(const Chunk* chunk) const {
  return std::any_of(moves.begin(), moves.end(), [&](const IdleChunk& move) { return move.chunk == chunk; });
}

std::size_t BackedSpace::Extent::missing() const {
  std::size_t bytes = 0;
  for (const ByteRange& gap : gaps) bytes += gap.size;
  return bytes;
}

// Backs the gaps. Where the pool does not simply grow: with memory that the stream
// may use at once, then with what the GPU has to wait for. Where the stream is
// being captured neither a wait nor a fill may be queued, so there it is fresh
// chunks alone, as in a pool that is pinned or never splits.
bool BackedSpace::back(Extent* extent, const Request& request, Grant* grant, Shortage* shortage) {
  Status status;
  const auto back_from = [&](std::initializer_list<Source> sources) {
    Backing backing;
    const std::size_t end = extent->block->end();
    try {
      const bool found = std::any_of(sources.begin(), sources.end(), [&](Source source) {
        return collect(*extent, request, source, grant, &backing, shortage);
      });
      if (!found) return false;
      cover(extent, backing, request.state);
      const auto& [offset, chunk] = backing.placements.back();
      if (chunk->content.load(std::memory_order_relaxed) == kNobody) extent->unused_from = offset;
      status = install(backing, request);
    } catch (...) {
      put_back(backing, grant);
      throw;
    }
    if (status.ok()) return true;
    *shortage = Shortage::of_driver(0, status);
    note_units(*extent, shortage);
    for (const PlacedChunk& placement : backing.placements) shortage->bytes += placement.chunk->size;
    put_back(backing, grant);  // from here on others may end them
    uncover(extent, end);
    return false;
  };
  growth_.note_live(owner_.peak_with(request.size));
  if (is_pinned_ || kind_.no_split) return back_from({Source::fresh});
  if (is_whole(request)) {
    if (back_from({Source::grown})) return true;
    return status.code() == StatusCode::not_supported && in_vain_.empty() && back_from({Source::fresh});
  }
  // Not of the margin, nor where a limit has refused: there it is worth any move.
  const bool may_grow = has_nothing(grant) && terms_of(grant).keeps_margin;
  if (may_grow && growth_.grows(range_->mapped_bytes() + extent->missing(), context_.driver.now())) {
    if (back_from({Source::grown})) return true;
    if (!in_vain_.empty() || (!status.ok() && status.code() != StatusCode::not_supported)) return false;
  }
  if (back_from({Source::at_once, Source::any})) return true;
  // What was mapped in vain stands where fresh memory would: the ladder finds another place.
  return status.code() == StatusCode::not_supported && in_vain_.empty() && back_from({Source::fresh});
}

// Takes the bare space into which the backing reaches beyond the extent.
void BackedSpace::cover(Extent* extent, const Backing& backing, BlockState state) {
  const PlacedChunk& last = backing.placements.back();
  const std::size_t end = last.offset + last.chunk->size;
  const std::size_t taken = extent->block->end();
  if (end <= taken) return;
  blocks_.join(extent->block, take_range({taken, end - taken}, state, &extent->pieces));
}

// Undoes that.
void BackedSpace::uncover(Extent* extent, std::size_t end) {
  if (extent->block->end() == end) return;
  const auto beyond = std::find_if(extent->pieces.begin(), extent->pieces.end(),
                                   [end](const Piece& piece) { return piece.range.offset >= end; });
  untake(blocks_.split(extent->block, end), std::span<const Piece>(beyond, extent->pieces.end()));
  extent->pieces.erase(beyond, extent->pieces.end());
}

void BackedSpace::put_back(Chunk* chunk, Grant* grant) {
  if (grant != nullptr) {
    grant->chunks.put(chunk);
  } else {
    context_.store.put(group_, chunk);
  }
}

void BackedSpace::put_back(const Backing& backing, Grant* grant) {
  for (const PlacedChunk& placement : backing.placements) {
    // A move never left its place.
    if (placement.chunk != nullptr && !backing.is_move(placement.chunk)) put_back(placement.chunk, grant);
  }
}

// Zeroes what another model wrote: one fill for each run of adjacent chunks,
// since a launch costs microseconds and a driver queues about a thousand. A range's
// pages begin as zero, whoever had them.
Status BackedSpace::scrub(const std::vector<PlacedChunk>& placements, StreamTag tag) {
  if (!context_.options.scrub && !kind_.is_range()) return {};
  ByteRange run;
  bool any = false;
  const auto flush = [&]() -> Status {
    if (run.size == 0) return {};
    any = true;
    return context_.driver.fill_async(context_.device, base_ + run.offset, 0, run.size, streams_[tag].stream);
  };
  for (const auto& [offset, chunk] : placements) {
    const OwnerId content = chunk->content.load(std::memory_order_relaxed);
    if (content == kNobody || (content == id_ && !kind_.is_range())) continue;
    if (run.end() != offset) {
      if (const Status status = flush(); !status.ok()) return status;
      run = {offset, 0};
    }
    run.size += chunk->size;
  }
  const Status status = flush();
  if (any) streams_.note_zeroing(tag);
  return status;
}

// Maps the chosen chunks, orders the asking stream after their last use and
// scrubs what another model wrote. Then the moved ones leave their old places.
Status BackedSpace::install(const Backing& backing, const Request& request) {
  Epoch last_use = kLongAgo;
  for (const IdleChunk& move : backing.moves) {
    if (!move.at_once) last_use = std::max(last_use, last_use_of({move.offset, move.chunk->size}));
  }
  for (const PlacedChunk& placement : backing.placements) last_use = std::max(last_use, placement.chunk->last_use);
  if (const Status status = streams_.order_behind(request.tag, last_use); !status.ok()) return status;
  in_vain_.reserve(in_vain_.size() + backing.placements.size());
  if (const Status status = range_->map(backing.placements, accessors_); !status.ok()) {
    for (const auto& [offset, chunk] : backing.placements) {
      if (range_->live().count(offset) != 0) in_vain_.push_back(offset);
    }
    return status;
  }
  const auto map_in_vain = [&]() {
    // Scrubbing may be queued through the new addresses: they go behind it.
    const Epoch now = context_.clock.now();
    for (const auto& [offset, chunk] : backing.placements) {
      chunk->last_use = std::max(chunk->last_use, now);
      in_vain_.push_back(offset);
    }
  };
  std::size_t moved = 0;
  try {
    if (const Status status = scrub(backing.placements, request.tag); !status.ok()) {
      map_in_vain();
      return status;
    }
    for (; moved < backing.moves.size(); ++moved) {
      const IdleChunk& move = backing.moves[moved];
      detach(move.offset, MappedRange::Fate::may_return);
    }
    for (const PlacedChunk& placement : backing.placements) {
      if (kind_.keeps_within_chunks()) blocks_.add_border(placement.offset);
    }
  } catch (...) {
    map_in_vain();
    while (moved > 0) context_.store.put(group_, backing.moves[--moved].chunk);  // they have left their places
    throw;
  }
  growth_.note_moves(backing.moves.size());
  for (const PlacedChunk& placement : backing.placements) {
    placement.chunk->content.store(id_, std::memory_order_relaxed);
    placement.chunk->last_use = kLongAgo;
    if (!announces(request)) range_->withhold(placement.offset);
    owner_.mapped(placement, streams_[request.tag].stream);
  }
  try {
    drop_retired();
  } catch (const std::bad_alloc&) {
    // Another time: what was asked for is installed.
  }
  return {};
}

}  // namespace vmm
