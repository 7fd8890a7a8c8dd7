// Pool: finding a place for a request, taking it and, where that fails, giving it back.
//
// Best fit over the free space that has its memory, then over what lacks the
// least, which backing.cpp backs; at a limit over bare space, on whole idle chunks.
#include <algorithm>
#include <optional>
#include <span>

#include "base/check.h"
#include "core/memory/grant.h"
#include "core/pool/pool.h"

namespace vmm {

Pool::PlacingRule Pool::placing_rule(const Request& request) const {
  if (no_split_) return PlacingRule::unsplit;
  const bool is_free_to_choose = request.where == Request::Where::best_fit;
  return keeps_within_chunks() && is_free_to_choose ? PlacingRule::within_chunk : PlacingRule::best_fit;
}

Block* Pool::place(const Request& request, Grant* grant, Shortage* shortage) {
  large_.prepare(request.tag);
  retire_in_vain();  // what an earlier request, for want of memory, could not
  switch (placing_rule(request)) {
    case PlacingRule::unsplit:
      return place_unsplit(request, grant, shortage);
    case PlacingRule::within_chunk:
      return place_within_chunk(request, grant, shortage);
    case PlacingRule::best_fit:
      break;
  }
  return place_best_fit(request, grant, shortage);
}

Block* Pool::place_best_fit(const Request& request, Grant* grant, Shortage* shortage) {
  if (request.where == Request::Where::best_fit) {
    if (Block* block = placement_.take_backed(request.size, request.tag, request.state)) return block;
  }
  if (!request.is_gathered) {
    shortage->is_kept_by_threads = true;
    return nullptr;
  }
  std::size_t offset = 0;
  bool found = placement_.find_spot(request, &offset);
  if (!found) {
    free_up_space();
    found = placement_.find_spot(request, &offset);
  }
  // Not where graphs use what is free whenever they are replayed.
  if (!found && !pinned_) {
    if (!adopt_free_space(request.tag, shortage)) return nullptr;
    if (request.where == Request::Where::best_fit) {
      if (Block* block = placement_.take_backed(request.size, request.tag, request.state)) return block;
    }
    found = placement_.find_spot(request, &offset);
  }
  if (!found) {
    *shortage = Shortage::of_addresses(request.size);
    return nullptr;
  }
  if (Block* block = back_and_take(request, offset, grant, shortage)) return block;
  // The missing memory could not be made up exactly; perhaps whole idle chunks
  // of other sizes can stand somewhere else.
  if (uniform_ || pinned_ || is_whole(request) || request.where == Request::Where::at) return nullptr;
  return place_on_whole_chunks(request, grant);
}

// Where addresses are short: all free space becomes the asking stream's, whoever
// had it last. False, with what to wait for, where the GPU cannot be made to wait.
bool Pool::adopt_free_space(StreamTag tag, Shortage* shortage) {
  Epoch newest = kLongAgo;
  for (const Block* block : large_.free_blocks()) {
    if (block->tag != tag && block->tag != kNeutral) newest = std::max(newest, block->epoch);
  }
  if (!streams_.order_behind(tag, newest).ok()) {
    shortage->wait_for = newest;
    return false;
  }
  large_.retag(tag);
  return true;
}

Block* Pool::take_range(ByteRange range, BlockState state, std::vector<Piece>* pieces) {
  const std::size_t had = pieces->size();
  Block* whole = nullptr;
  try {
    for (std::size_t at = range.offset; at < range.end();) {
      Block* free = large_.free_covering(at);
      VMM_CHECK(free != nullptr, "taking ", range.offset, "+", range.size, ": ", at, " is not free");
      const std::size_t end = std::min(free->end(), range.end());
      pieces->push_back({{at, end - at}, free->tag, free->epoch});
      Block* taken = large_.carve(free, at, end - at, state);
      if (whole == nullptr) {
        whole = taken;
      } else {
        large_.join(whole, taken);
      }
      at = end;
    }
  } catch (...) {
    if (whole != nullptr) {
      while (pieces->back().range.offset >= whole->end()) pieces->pop_back();
      untake(whole, std::span(*pieces).subspan(had));
    }
    pieces->resize(had);
    throw;
  }
  return whole;
}

void Pool::untake(Block* block, std::span<const Piece> pieces) {
  for (std::size_t k = 0; k < pieces.size(); ++k) {
    Block* rest = k + 1 < pieces.size() ? large_.split(block, pieces[k + 1].range.offset) : nullptr;
    large_.free(block, pieces[k].tag, pieces[k].epoch);
    block = rest;
  }
}

// Frees what was mapped beyond the request, for the stream that asked: nobody
// else may touch memory that is being scrubbed for it.
Block* Pool::trim_to_request(Block* block, const Request& request, std::size_t offset) {
  const Epoch epoch = context_.clock.now();
  streams_[request.tag].last_free = epoch;
  try {
    if (block->offset < offset) {
      Block* lower = block;
      block = large_.split(block, offset);
      large_.free(lower, request.tag, epoch);
    }
    if (block->end() > offset + request.size) {
      large_.free(large_.split(block, offset + request.size), request.tag, epoch);
    }
  } catch (...) {
    large_.free(block, request.tag, epoch);
    throw;
  }
  block->tag = request.tag;
  return block;
}

Block* Pool::back_and_take(const Request& request, std::size_t offset, Grant* grant, Shortage* shortage) {
  const std::size_t first = align_down(offset, page_);
  const std::size_t last = std::min(align_up(offset + request.size, page_), capacity_);
  Extent extent;
  extent.gaps = range_->gaps({first, last - first});
  ByteRange range{offset, request.size};
  if (!extent.gaps.empty()) {
    const std::size_t begin = std::min(offset, extent.gaps.front().offset);
    range = {begin, std::max(offset + request.size, extent.gaps.back().end()) - begin};
  }
  extent.block = take_range(range, request.state, &extent.pieces);
  // Only an explicit offset can land on memory that another stream used last;
  // elsewhere it is the stream's own or bare.
  Epoch others = kLongAgo;
  for (const Piece& piece : extent.pieces) {
    if (piece.tag != request.tag && piece.tag != kNeutral) others = std::max(others, piece.epoch);
  }
  bool is_backed = false;
  try {
    if (!streams_.order_behind(request.tag, others).ok()) {
      shortage->wait_for = others;
    } else {
      is_backed = extent.gaps.empty() || back(&extent, request, grant, shortage);
    }
  } catch (...) {
    untake(extent.block, extent.pieces);
    retire_in_vain();
    throw;
  }
  if (is_backed) return trim_to_request(extent.block, request, offset);
  untake(extent.block, extent.pieces);
  retire_in_vain();
  return nullptr;
}

// Idle chunks of any sizes, side by side from 0 on, for `wanted` bytes; fewer where there
// are no more. Returns their bytes.
std::size_t Pool::collect_whole(std::size_t wanted, StreamTag tag, Grant* grant, Backing* backing) {
  IdleChunks idle(all_idle(tag, Idle::movable));
  std::size_t sum = 0;
  while (sum < wanted) {
    const std::size_t remaining = wanted - sum;
    backing->placements.push_back({sum, nullptr});  // first: what is taken has its place
    Chunk*& chunk = backing->placements.back().chunk;
    if (grant != nullptr) chunk = grant->chunks.take_at_most(remaining, /*exact=*/false);
    if (chunk == nullptr) {
      if (const std::optional<IdleChunk> move = idle.take_nearest(remaining)) {
        backing->moves.push_back(*move);
        chunk = move->chunk;
      } else if (grant != nullptr) {
        chunk = grant->chunks.take_above(remaining);
      }
    }
    if (chunk == nullptr) {
      backing->placements.pop_back();
      break;
    }
    sum += chunk->size;
  }
  return sum;
}

// At a limit, with idle chunks that fit no gap: stands on whole chunks of any
// size at addresses with nothing under them. Address space is free.
Block* Pool::place_on_whole_chunks(const Request& request, Grant* grant) {
  const std::size_t wanted = align_up(request.size, page_);
  give_up_spare_slabs();
  Backing backing;
  Block* block = nullptr;
  std::size_t offset = 0;
  std::vector<Piece> pieces;
  const auto undo = [&]() VMM_REQUIRES(mutex_) {
    put_back(backing, grant);  // first: the others may lack memory
    if (block != nullptr) untake(block, pieces);
    retire_in_vain();
  };
  bool is_installed = false;
  try {
    const std::size_t sum = collect_whole(wanted, request.tag, grant, &backing);
    if (sum >= wanted && placement_.find_bare(sum, request.where == Request::Where::high, &offset)) {
      for (PlacedChunk& placement : backing.placements) placement.offset += offset;
      block = take_range({offset, sum}, request.state, &pieces);
      is_installed = install(backing, request).ok();
    }
  } catch (...) {
    undo();
    throw;
  }
  if (is_installed) return trim_to_request(block, request, offset);
  undo();
  return nullptr;
}

}  // namespace vmm
