// BackedSpace: finding a place for a request, taking it and, where that fails, giving it back.
//
// Best fit over the free space that has its memory, then over what lacks the
// least, which backing.cpp backs; at a limit over bare space, on whole idle chunks.
#include <algorithm>
#include <chrono>
#include <optional>
#include <span>

#include "core/backing/backed_space.h"
#include "core/memory/grant.h"

namespace vmm {

namespace {

// Below this share of a unit a block is little: each stream's would strand the rest.
constexpr std::size_t kUnitsPerLittle = 4;
// Free blocks that are looked through before a pool grows, which costs 60 us a chunk.
constexpr std::size_t kMostFreeLookedAt = 4096;
constexpr std::size_t kMostLookedAtForSlab = 64;
constexpr std::size_t kMostPlacesForSlab = 4;
// What it costs to take what other streams had: looking for it and gathering what threads keep,
// and whether the GPU has finished it: 77 us where torch has made its 128 streams (an H200).
constexpr std::chrono::nanoseconds kLook = std::chrono::microseconds(1);
constexpr std::chrono::nanoseconds kLookAtBlock = std::chrono::nanoseconds(5);
constexpr std::chrono::nanoseconds kTick = std::chrono::microseconds(10);
constexpr std::chrono::nanoseconds kTickOfStream = std::chrono::nanoseconds(500);

bool takes_any(const Grant* grant) { return terms_of(grant).fit == ChunkFit::any; }

}  // namespace

BackedSpace::PlacingRule BackedSpace::placing_rule(const Request& request) const {
  if (kind_.no_split) return PlacingRule::unsplit;
  const bool is_free_to_choose = request.where == Request::Where::best_fit;
  return kind_.keeps_within_chunks() && is_free_to_choose ? PlacingRule::within_chunk : PlacingRule::best_fit;
}

Block* BackedSpace::place(const Request& request, Grant* grant, Shortage* shortage) {
  blocks_.prepare(request.tag);
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

// Not slabs, and not what is little.
bool BackedSpace::fills_units(const Request& request, std::size_t unit) {
  return request.where == Request::Where::best_fit && request.size >= unit / kUnitsPerLittle;
}

Block* BackedSpace::place_best_fit(const Request& request, Grant* grant, Shortage* shortage) {
  const bool is_best_fit = request.where == Request::Where::best_fit;
  if (is_best_fit) {
    if (Block* block = placement_.take_backed(request.size, request.tag, request.state)) return block;
  }
  if (!request.is_gathered) {
    shortage->is_kept_by_threads = true;
    return nullptr;
  }
  if (kind_.grows_freely && request.where != Request::Where::at) {
    if (Block* block = place_without_growing(request, grant, shortage)) return block;
  }
  std::size_t offset = 0;
  const std::size_t unit = unit_for(request.size);
  placement_.place_beside_slabs_below(unit / kUnitsPerLittle);
  Request wanted = request;
  // Its chunk would leave places in between that only its like fill.
  if (is_best_fit && !fills_units(request, unit)) wanted.where = Request::Where::beside_slabs;
  bool found = placement_.find_spot(wanted, unit, &offset);
  if (!found) {
    owner_.free_up_space();
    found = placement_.find_spot(wanted, unit, &offset);
  }
  // Not where graphs use what is free whenever they are replayed.
  if (!found && !is_pinned_) {
    if (!adopt_free_space(request.tag, shortage)) return nullptr;
    if (is_best_fit) {
      if (Block* block = placement_.take_backed(request.size, request.tag, request.state)) return block;
    }
    found = placement_.find_spot(wanted, unit, &offset);
  }
  if (!found) {
    *shortage = Shortage::of_addresses(request.size);
    return nullptr;
  }
  if (Block* block = place_at(request, offset, grant, shortage)) return block;
  if (shortage->is_margin && terms_of(grant).fit == ChunkFit::apart) return place_apart(request, unit, grant, shortage);
  // The missing memory could not be made up exactly; perhaps whole idle chunks
  // of other sizes can stand somewhere else.
  if (kind_.is_uniform || is_pinned_ || is_whole(request) || request.where == Request::Where::at) return nullptr;
  if (unit != 0 && !takes_any(grant)) {
    shortage->is_particular = true;
    return nullptr;
  }
  return place_on_whole_chunks(request, grant);
}

// On memory that the pool has, for no call of the driver: free space that the stream may use at
// once, its own and what other streams have freed and the GPU has finished. Streams that take it
// from one another again and again have memory of their own in the end: once that has cost what
// growing does, the pool grows.
Block* BackedSpace::place_without_growing(const Request& request, const Grant* grant, Shortage* shortage) {
  if (is_pinned_ || kind_.keeps_within_chunks() || free_mapped_bytes() < request.size) return nullptr;
  const bool takes_others = growth_.takes_others();
  const auto find = [&] {
    const Finished few = request.where == Request::Where::high ? find_for_slab(request) : Finished{};
    return few.offset.has_value() ? few : find_finished(request);
  };
  Finished found = find();
  growth_.note_taken(kLookAtBlock * static_cast<std::int64_t>(found.looked_at));
  if (!found.offset.has_value() && found.passes.has_value() && takes_others && grant == nullptr) {
    growth_.note_taken(kTick + kTickOfStream * static_cast<std::int64_t>(context_.clock.streams()));
    if (!context_.clock.passes_at_once(*found.passes)) return nullptr;
    found = find();
  }
  if (!found.offset.has_value() || (found.is_others && !takes_others)) return nullptr;
  if (found.is_others) growth_.note_taken(kLook);
  return place_over({}, request, *found.offset, nullptr, shortage);
}

// At the end of one of the highest free blocks, the stream's own before others', and of these in a
// chunk that is used already: what is small would keep a whole one from going back. Slabs come and
// go by the hundred, so few blocks are looked at.
BackedSpace::Finished BackedSpace::find_for_slab(const Request& request) const {
  const FreeByOffset& free = blocks_.free_blocks();
  Finished found;
  int best = -1;
  std::size_t own = 0;
  std::size_t others = 0;
  for (const Block* block = free.last(); block != nullptr && found.looked_at < kMostLookedAtForSlab;
       block = free.prev(block), ++found.looked_at) {
    if (block->tag == kNeutral || block->size() < request.size) continue;
    const bool is_own = block->tag == request.tag;
    std::size_t& seen = is_own ? own : others;
    if (seen == kMostPlacesForSlab || (!is_own && !context_.clock.has_passed(block->epoch))) continue;
    ++seen;
    const auto chunk = range_->reaching(block->end() - 1);
    const bool is_used = chunk->first < block->offset || chunk->first + chunk->second.chunk->size > block->end();
    const int rank = (is_own ? 2 : 0) + (is_used ? 1 : 0);
    if (rank > best) {
      best = rank;
      found.offset = block->end() - request.size;
      found.is_others = !is_own;
    }
    if (own == kMostPlacesForSlab || (is_own && is_used)) break;
  }
  return found;
}

// In the shortest run of such free blocks that is long enough; a slab at the end of the highest.
BackedSpace::Finished BackedSpace::find_finished(const Request& request) const {
  const bool is_slab = request.where == Request::Where::high;
  struct Run {
    ByteRange range;
    Epoch newest = kLongAgo;
    bool is_others = false;
  };
  Run best;            // of what may be used at once
  Run best_of_others;  // and once it has passed
  const auto compare = [&](const Run& run, Run* to) {
    if (run.range.size < request.size) return;
    if (to->range.size == 0 || (!is_slab && run.range.size < to->range.size)) *to = run;
  };
  const auto extend = [&](Run* run, const Block& block, bool is_part, Run* to) {
    if (!is_part || block.end() != run->range.offset) {
      compare(*run, to);
      *run = {{block.end(), 0}};
    }
    if (!is_part) return;
    run->range = {block.offset, run->range.end() - block.offset};
    run->newest = std::max(run->newest, block.epoch);
    run->is_others = run->is_others || block.tag != request.tag;
  };
  Run finished;
  Run any;
  const FreeByOffset& free = blocks_.free_blocks();
  Finished found;
  for (const Block* block = free.last(); block != nullptr && found.looked_at < kMostFreeLookedAt; ++found.looked_at) {
    const bool has_memory = block->tag != kNeutral;
    const bool is_usable = block->tag == request.tag || context_.clock.has_passed(block->epoch);
    extend(&finished, *block, has_memory && is_usable, &best);
    extend(&any, *block, has_memory, &best_of_others);
    block = free.prev(block);
  }
  compare(finished, &best);
  compare(any, &best_of_others);
  found.is_others = best.is_others;
  if (best.range.size != 0) found.offset = is_slab ? best.range.end() - request.size : best.range.offset;
  if (best_of_others.range.size != 0) found.passes = best_of_others.newest;
  return found;
}

// Where addresses are short: all free space becomes the asking stream's, whoever
// had it last. False, with what to wait for, where the GPU cannot be made to wait.
bool BackedSpace::adopt_free_space(StreamTag tag, Shortage* shortage) {
  Epoch newest = kLongAgo;
  for (const Block* block : blocks_.free_blocks()) {
    if (block->tag != tag && block->tag != kNeutral) newest = std::max(newest, block->epoch);
  }
  if (!streams_.order_behind(tag, newest).ok()) {
    shortage->wait_for = newest;
    return false;
  }
  blocks_.retag(tag);
  return true;
}

// Frees what was mapped beyond the request, for the stream that asked: nobody
// else may touch memory that is being scrubbed for it.
// What is above `unused_from`, which nobody has used yet, is at once any stream's, where streams
// take what others have.
Block* BackedSpace::trim_to_request(Block* block, const Request& request, std::size_t offset, std::size_t unused_from) {
  const Epoch epoch = context_.clock.now();
  const bool is_unused = kind_.grows_freely && offset + request.size >= unused_from;
  streams_[request.tag].last_free = epoch;
  try {
    if (block->offset < offset) {
      Block* lower = block;
      block = blocks_.split(block, offset);
      blocks_.free(lower, request.tag, epoch);
    }
    if (block->end() > offset + request.size) {
      blocks_.free(blocks_.split(block, offset + request.size), request.tag, is_unused ? kLongAgo : epoch);
    }
  } catch (...) {
    blocks_.free(block, request.tag, epoch);
    throw;
  }
  block->tag = request.tag;
  return block;
}

// What is to be backed, to whole units at both ends, as far as the bare space there goes.
void BackedSpace::widen(Extent* extent) const {
  ByteRange& front = extent->gaps.front();
  const std::size_t lowest = blocks_.free_covering(front.offset)->offset;
  const std::size_t begin = std::max(align_down(front.offset, extent->unit), lowest);
  front = {begin, front.end() - begin};
  ByteRange& back = extent->gaps.back();
  back.size = std::min(align_up(back.end(), extent->unit), blocks_.free_covering(back.offset)->end()) - back.offset;
}

Block* BackedSpace::place_at(const Request& request, std::size_t offset, Grant* grant, Shortage* shortage) {
  blocks_.prepare(request.tag);  // first: there may be no memory for its bins when it is freed
  const std::size_t first = align_down(offset, kind_.page);
  const std::size_t last = std::min(align_up(offset + request.size, kind_.page), kind_.capacity);
  Extent extent;
  extent.gaps = range_->gaps({first, last - first});
  const std::size_t unit = unit_for(request.size);
  if (!extent.gaps.empty() && fills_units(request, unit)) extent.unit = unit;
  if (extent.unit == 0) return place_over(std::move(extent), request, offset, grant, shortage);
  Extent wide = extent;
  widen(&wide);
  const std::size_t retired = range_->retired_count();
  if (Block* block = place_over(std::move(wide), request, offset, grant, shortage)) return block;
  // To the page where there is not so much, and not before: smaller chunks would stay. Nor where
  // what was mapped in vain stands.
  const bool is_in_the_way = range_->retired_count() != retired || !in_vain_.empty();
  if (!takes_any(grant) || is_in_the_way || shortage->wait_for != kLongAgo) return nullptr;
  extent.unit = 0;
  return place_over(std::move(extent), request, offset, grant, shortage);
}

// On units that were granted and nothing else, at bare addresses: what is over of the last
// one is free memory.
Block* BackedSpace::place_apart(const Request& request, std::size_t unit, Grant* grant, Shortage* shortage) {
  if (unit == 0 || is_whole(request) || !fills_units(request, unit)) return nullptr;
  const std::size_t wanted = align_up(request.size, unit);
  const auto is_unit = [unit](const Chunk& chunk) { return is_aligned(chunk.size, unit); };
  std::size_t offset = 0;
  if (grant->chunks.bytes_if(is_unit) < wanted || !placement_.find_bare(wanted, unit, /*high=*/false, &offset)) {
    return nullptr;
  }
  return place_at(request, offset, grant, shortage);
}

// At `offset`, where the extent's gaps are to be backed.
Block* BackedSpace::place_over(Extent extent, const Request& request, std::size_t offset, Grant* grant,
                               Shortage* shortage) {
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
  if (is_backed) return trim_to_request(extent.block, request, offset, extent.unused_from);
  untake(extent.block, extent.pieces);
  retire_in_vain();
  return nullptr;
}

// Idle chunks of any sizes, side by side from 0 on, for `wanted` bytes; fewer where there
// are no more. Returns their bytes.
std::size_t BackedSpace::collect_whole(std::size_t wanted, StreamTag tag, Grant* grant, Backing* backing) {
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
Block* BackedSpace::place_on_whole_chunks(const Request& request, Grant* grant) {
  const std::size_t wanted = align_up(request.size, kind_.page);
  owner_.give_up_spare_slabs();
  Backing backing;
  Block* block = nullptr;
  std::size_t offset = 0;
  std::vector<Piece> pieces;
  const auto undo = [&]() {
    put_back(backing, grant);  // first: the others may lack memory
    if (block != nullptr) untake(block, pieces);
    retire_in_vain();
  };
  bool is_installed = false;
  try {
    const std::size_t sum = collect_whole(wanted, request.tag, grant, &backing);
    const bool is_high = request.where == Request::Where::high;
    if (sum >= wanted && placement_.find_bare(sum, unit_for(request.size), is_high, &offset)) {
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
