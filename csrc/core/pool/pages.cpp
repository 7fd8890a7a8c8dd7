// Pool: the explicit face, allocate(offset, size) and its kind. Pages come out
// of the same occupancy map as tensors' blocks, so neither can take the
// other's.
#include <algorithm>
#include <new>

#include "base/errors.h"
#include "core/pool/pool.h"

namespace vmm {

// The whole pages that cover [offset, offset + size).
ByteRange Pool::page_range(std::size_t offset, std::size_t size) const {
  if (size == 0) throw InvalidRangeError(offset, size, kind_.capacity, "size must be greater than 0");
  if (sum_overflows(offset, size)) throw InvalidRangeError(offset, size, kind_.capacity, "offset + size overflows");
  if (offset + size > kind_.capacity)
    throw InvalidRangeError(offset, size, kind_.capacity, "beyond the end of the pool");
  const std::size_t first = align_down(offset, kind_.page);
  return {first, align_up(offset + size, kind_.page) - first};
}

// The first page of `range` that is not wholly free, or the end.
std::size_t Pool::first_unfree(ByteRange range) const {
  std::size_t at = range.offset;
  while (at < range.end()) {
    const Block* free = space_.blocks().free_covering(at);
    // A slab that is kept empty is nobody's, like free space.
    slabs_.for_each_spare([&](const Block& spare) {
      if (spare.offset <= at && at < spare.end()) free = &spare;
    });
    if (free == nullptr) return align_down(at, kind_.page);
    at = free->end();
  }
  return range.end();
}

Address Pool::take_pages(ByteRange range, Stream stream, Grant* grant, Shortage* shortage) {
  if (can_never_hold(range.size, shortage)) return 0;
  Request request;
  request.size = range.size;
  request.where = Request::Where::at;
  request.offset = range.offset;
  request.tag = streams_.tag_of(stream);
  request.state = BlockState::pages;
  std::vector<ByteRange> kept;  // what stays mapped, and is not new
  if (kind_.is_range()) kept = mapped_in(range);
  Block* block = space_.place(request, grant, shortage);
  if (block == nullptr) return 0;
  try {
    pages_.add(block);
  } catch (...) {
    space_.blocks().free(block, block->tag, context_.clock.now());
    throw;
  }
  space_.growth().note_handed_out(block->size());
  begin_block(block, range.size);
  for (const ByteRange& part : kept) {
    // Ordered: the block is the stream's.
    const Status status =
        context_.driver.fill_async(context_.device, base_ + part.offset, 0, part.size, streams_[request.tag].stream);
    streams_.note_zeroing(request.tag);
    if (status.ok()) continue;
    free_pages(range);
    if (status.code() == StatusCode::not_supported) {
      throw NotAvailableError("pool '" + name_ + "': " + format_bytes(part.size) +
                              " that were given back and stayed mapped have to be zeroed, which a stream that is being "
                              "captured cannot: grow or reserve before the capture");
    }
    *shortage = Shortage::of_driver(range.size, status);
    return 0;
  }
  return base_ + range.offset;
}

// The stretches of `range` that have a mapping, by offset, what touches joined.
std::vector<ByteRange> Pool::mapped_in(ByteRange range) const {
  std::vector<ByteRange> found;
  std::size_t at = range.offset;
  const auto until = [&](std::size_t end) {
    if (end > at) found.push_back({at, end - at});
  };
  for (const ByteRange& gap : space_.range().gaps(range)) {
    until(gap.offset);
    at = gap.end();
  }
  until(range.end());
  return found;
}

Address Pool::try_allocate_pages(std::size_t offset, std::size_t size, Stream stream, Grant* grant,
                                 Shortage* shortage) {
  const ByteRange range = page_range(offset, size);
  const GatheredLock lock(*this);
  require_open();
  require_awake();
  free_up_space();
  if (!keeps_limits(shortage)) return 0;
  const StreamTag tag = streams_.tag_of(stream);
  if (!streams_.is_behind(tag, &shortage->wait_for)) return 0;
  for (std::size_t taken = first_unfree(range); taken < range.end(); taken = first_unfree(range)) {
    if (make_way(taken, tag, shortage)) continue;
    if (shortage->wait_for != kLongAgo) return 0;
    throw AlreadyMappedError(
        taken, kind_.page,
        "pool '" + name_ + "': allocate(" + std::to_string(offset) + ", " + std::to_string(size) + ")");
  }
  return take_pages(range, stream, grant, shortage) == 0 ? 0 : base_ + offset;
}

// The page at `at` was freed, but queued work may still use it. In a chunk that
// has other pages it is the asking stream's at once, behind that work. Where the
// chunk has gone, its former mapping has to go first, and the caller waits:
// nothing else can stand at the very address that was asked for.
bool Pool::make_way(std::size_t at, StreamTag tag, Shortage* shortage) {
  if (const QuarantinedBlocks::Freed* freed = quarantined_.at(at)) {
    if (!streams_.order_behind(tag, freed->epoch).ok()) {
      shortage->wait_for = freed->epoch;
      return false;
    }
    end_quarantine(*freed, tag);
    return true;
  }
  return space_.retired().covers(at) && space_.make_way_of_retired(at, shortage);
}

Address Pool::try_allocate_first(std::size_t size, Stream stream, Grant* grant, Shortage* shortage) {
  const std::size_t wanted = page_range(0, size).size;
  const GatheredLock lock(*this);
  require_open();
  require_awake();
  free_up_space();
  if (!keeps_limits(shortage)) return 0;
  if (!streams_.is_behind(streams_.tag_of(stream), &shortage->wait_for)) return 0;
  if (const auto begin = space_.blocks().first_fit(wanted, kind_.page))
    return take_pages({*begin, wanted}, stream, grant, shortage);
  *shortage = Shortage::of_addresses(wanted);
  return 0;
}

// REQUIRES: every page of `range` is explicit. What reaches beyond it stays. Throws
// std::bad_alloc, and nothing has changed.
void Pool::free_pages(ByteRange range) {
  // Nobody told us of the streams that used them, so they are nobody's, not even
  // their own stream's, until all that is queued now is done.
  const Epoch epoch = context_.clock.now();
  // First: what is kept on either side of `range` would be lost where it cannot be noted.
  space_.blocks().prepare_splits(range.offset | range.end());
  pages_.make_room();
  while (Block* block = pages_.take_first_in(range)) {
    // All of it ends, and what is kept on either side begins anew.
    end_block(*block);
    counters_.block_finished(*block);
    streams_.block_freed(block->tag, epoch);
    tell(PoolEvent::free_completed, block->offset, block->requested, streams_[block->tag].stream);
    const auto keep = [&](Block* kept) VMM_REQUIRES(mutex_) {
      pages_.add(kept);
      begin_block(kept, kept->size());
    };
    if (block->offset < range.offset) {
      Block* lower = block;
      block = space_.blocks().split(block, range.offset);
      keep(lower);
    }
    if (block->end() > range.end()) keep(space_.blocks().split(block, range.end()));
    space_.growth().note_freed(block->size());
    space_.blocks().free(block, block->tag, epoch);
  }
  // Whole chunks go to the shelf at once; what shares its chunk with pages that
  // are still in use stays where it is.
  try {
    space_.shelve_idle_chunks(range);
    quarantine(range, epoch);
  } catch (const std::bad_alloc&) {
    // What could not be noted stays the pool's, and may be used at once: so nothing may use
    // it any more.
    throw_if_failed(context_.clock.synchronize(), "waiting for queued work that may use freed pages");
  }
}

// Takes what is mapped and free in `range` out of use until `epoch` has passed.
void Pool::quarantine(ByteRange range, Epoch epoch) {
  std::vector<ByteRange> parts;
  for (auto at = space_.range().reaching(range.offset); at != space_.range().live().end() && at->first < range.end();
       ++at) {
    const std::size_t begin = std::max(at->first, range.offset);
    parts.push_back({begin, std::min(at->first + at->second.chunk->size, range.end()) - begin});
  }
  for (const ByteRange& part : parts) {
    std::vector<Piece> pieces;
    Block* const block = space_.take_range(part, BlockState::quarantined, &pieces);
    try {
      quarantined_.add({block, epoch});
    } catch (...) {
      space_.untake(block, pieces);
      throw;
    }
  }
}

// `tag`: of a stream whose work comes after all that may use it.
void Pool::end_quarantine(QuarantinedBlocks::Freed freed, StreamTag tag) {
  space_.blocks().prepare(tag);  // first: it may be the stream's first memory here, and there may be none for its bins
  quarantined_.remove(freed);
  space_.blocks().free(freed.block, tag, freed.epoch);
}

// Those that nothing uses any more; looks at no other. True if there were any.
bool Pool::end_passed_quarantines() {
  if (quarantined_.empty()) return false;
  context_.clock.cover(quarantined_.newest());
  context_.clock.poll();
  bool any = false;
  while (!quarantined_.empty() && context_.clock.has_passed(quarantined_.oldest().epoch)) {
    const QuarantinedBlocks::Freed freed = quarantined_.oldest();
    const ByteRange range = freed.block->range();
    end_quarantine(freed, freed.block->tag);
    space_.shelve_idle_chunks(range);
    any = true;
  }
  return any;
}

// Every page of `range` is explicit; NotMappedError names the first that is not.
void Pool::require_pages(ByteRange range, const std::string& doing) const {
  for (std::size_t at = range.offset; at < range.end();) {
    const Block* const block = pages_.covering(at);
    if (block == nullptr) throw NotMappedError(at, kind_.page, "pool '" + name_ + "': " + doing);
    at = block->end();
  }
}

void Pool::deallocate_pages(std::size_t offset, std::size_t size) {
  const ByteRange range = page_range(offset, size);
  const std::string doing = "deallocate(" + std::to_string(offset) + ", " + std::to_string(size) + ")";
  const MutexLock lock(mutex_);
  require_open();
  if (kind_.is_range()) require_awake();  // its zeros would be mapped where its pages come back to
  settle_locked();
  require_pages(range, doing);
  if (const HeldRanges::Held held = held_.in(range); held.count != 0) {
    // One tensor's pages are taken back by it, whatever the caller called; only aliases hold these.
    const std::string what = kind_.is_range() ? format_bytes(range.size) + " cannot be given back: " : doing + ": ";
    const std::string who = kind_.is_range()
                                ? format_count(held.count, "alias", "aliases")
                                : format_count(held.count, "tensor") + " of tensor(), or made of one by alias(),";
    throw StillInUseError("pool '" + name_ + "': " + what + who + held.still_show("it"), held.bytes, held.count);
  }
  free_pages(range);
}

Address Pool::hold_pages(std::size_t offset, std::size_t size) {
  const ByteRange range = page_range(offset, size);
  const MutexLock lock(mutex_);
  require_awake();
  require_open();  // under the lock, so that a forced close sees the hold or the hold sees the close
  require_pages(range, "a tensor over offset " + std::to_string(offset) + ", size " + std::to_string(size) +
                           " needs its pages allocated first");
  held_.hold({offset, size});
  return base_ + offset;
}

bool Pool::unhold_pages(std::size_t offset, std::size_t size) {
  const MutexLock lock(mutex_);
  held_.unhold({offset, size});
  if (!is_closed()) return false;
  for (const ByteRange& part : held_.free_parts(page_range(offset, size), kind_.page)) free_pages(part);
  return live_blocks_locked() == 0;
}

bool Pool::drop_pages() {
  const MutexLock lock(mutex_);
  std::vector<ByteRange> all;
  pages_.for_each_in({0, kind_.capacity}, [&all](const Block& block) { all.push_back(block.range()); });
  bool any = false;
  for (const ByteRange& each : all) {
    for (const ByteRange& part : held_.free_parts(each, kind_.page)) {
      free_pages(part);
      any = true;
    }
  }
  return any;
}

std::vector<ByteRange> Pool::held_pages(std::size_t offset, std::size_t size) const {
  const ByteRange range = page_range(offset, size);
  const MutexLock lock(mutex_);
  std::vector<ByteRange> spans;
  pages_.for_each_in(range, [&](const Block& block) {
    const std::size_t begin = std::max<std::size_t>(block.offset, range.offset);
    append_joined(spans, {begin, std::min(block.end(), range.end()) - begin});
  });
  return spans;
}

bool Pool::is_mapped(std::size_t offset, std::size_t size) const {
  const ByteRange range = page_range(offset, size);
  const GatheredLock lock(*this);
  if (!space_.is_open()) return false;
  for (std::size_t page = range.offset; page < range.end(); page += kind_.page) {
    if (first_unfree({page, kind_.page}) == page + kind_.page) return false;
    if (space_.retired().covers(page) || quarantined_.at(page) != nullptr) return false;
  }
  return true;
}

}  // namespace vmm
