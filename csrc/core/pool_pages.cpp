// Pool: the explicit face, allocate(offset, size) and its kind. Pages come out
// of the same occupancy map as tensors' blocks, so neither can take the
// other's.
#include <algorithm>

#include "base/check.h"
#include "base/errors.h"
#include "core/pool.h"

namespace vmm {

// The whole pages that cover [offset, offset + size).
ByteRange Pool::page_range(std::size_t offset, std::size_t size) const {
  if (size == 0) throw InvalidRangeError(offset, size, capacity_, "size must be greater than 0");
  if (sum_overflows(offset, size)) throw InvalidRangeError(offset, size, capacity_, "offset + size overflows");
  if (offset + size > capacity_) throw InvalidRangeError(offset, size, capacity_, "beyond the end of the pool");
  const std::size_t first = align_down(offset, page_);
  return {first, align_up(offset + size, page_) - first};
}

// The first page of `range` that is not wholly free, or the end.
std::size_t Pool::first_unfree(ByteRange range) const {
  std::size_t at = range.offset;
  while (at < range.end()) {
    const Block* free = large_.free_covering(at);
    for (const StreamState& stream : streams_) {
      const Block* spare = stream.spare_slab;  // empty: nobody's, like free space
      if (spare != nullptr && spare->offset <= at && at < spare->end()) free = spare;
    }
    if (free == nullptr) return align_down(at, page_);
    at = free->end();
  }
  return range.end();
}

Address Pool::take_pages(ByteRange range, Stream stream, Grant* grant, Shortage* shortage) {
  Request request;
  request.size = range.size;
  request.where = Request::Where::at;
  request.offset = range.offset;
  request.tag = tag_of(stream);
  request.state = BlockState::pages;
  Block* block = place(request, grant, shortage);
  if (block == nullptr) return 0;
  pages_.emplace(block->offset, block);
  page_bytes_ += block->size;
  begin_block(block, range.size);
  return base_ + range.offset;
}

Address Pool::try_allocate_pages(std::size_t offset, std::size_t size, Stream stream, Grant* grant,
                                 Shortage* shortage) {
  require_open();
  const ByteRange range = page_range(offset, size);
  const MutexLock lock(mutex_);
  settle_locked(/*wait=*/false);
  give_up_spare_slabs();
  std::size_t taken = first_unfree(range);
  if (taken < range.end() && !retired_blocks_.empty()) {
    // The caller wants the very address whose former mapping queued work still
    // uses. Nothing else can stand there, so this one call waits.
    const auto after = retired_blocks_.upper_bound(taken);
    const bool is_retired_block = after != retired_blocks_.begin() && std::prev(after)->second->end() > taken;
    if (is_retired_block && drop_retired(/*wait=*/true)) taken = first_unfree(range);
  }
  if (taken < range.end()) {
    throw AlreadyMappedError(
        taken, page_, "pool '" + name_ + "': allocate(" + std::to_string(offset) + ", " + std::to_string(size) + ")");
  }
  return take_pages(range, stream, grant, shortage) == 0 ? 0 : base_ + offset;
}

Address Pool::try_allocate_first(std::size_t size, Stream stream, Grant* grant, Shortage* shortage) {
  require_open();
  const std::size_t wanted = page_range(0, size).size;
  const MutexLock lock(mutex_);
  settle_locked(/*wait=*/false);
  give_up_spare_slabs();
  const auto& free = large_.free_blocks();
  for (auto first = free.begin(); first != free.end();) {
    const std::size_t begin = align_up((*first)->offset, page_);
    std::size_t end = (*first)->end();
    for (++first; first != free.end() && (*first)->offset == end; ++first) end = (*first)->end();
    if (begin < end && end - begin >= wanted) return take_pages({begin, wanted}, stream, grant, shortage);
  }
  *shortage = {wanted, nullptr, {}, /*no_address_space=*/true};
  return 0;
}

// REQUIRES: every page of `range` is explicit. Splits, counts down, frees.
void Pool::free_pages(ByteRange range) {
  // The pages may be in use on streams that nobody told us of.
  const FencePointPtr after = context_.fences.record_all();
  std::vector<std::pair<ByteRange, StreamTag>> freed;
  for (auto it = std::prev(pages_.upper_bound(range.offset)); it != pages_.end() && it->first < range.end();) {
    Block* block = it->second;
    it = pages_.erase(it);
    // All of it ends, and what is kept on either side begins anew.
    end_block(*block);
    count(StatKind::active, StatKind::active_bytes, *block, /*up=*/false);
    count_requested(*block, /*up=*/false);
    tell(PoolEvent::free_completed, block->offset, block->requested, streams_[block->tag].stream);
    const auto keep = [&](Block* kept) VMM_REQUIRES(mutex_) {
      pages_.emplace(kept->offset, kept);
      begin_block(kept, kept->size);
    };
    if (block->offset < range.offset) {
      Block* lower = block;
      block = large_.split(block, range.offset);
      keep(lower);
    }
    if (block->end() > range.end()) keep(large_.split(block, range.end()));
    page_bytes_ -= block->size;
    freed.emplace_back(block->range(), block->tag);
    large_.free(block, block->tag, streams_[block->tag].records);
  }
  // Whole idle chunks go to the shelf at once.
  IdleChunks idle = idle_chunks(kNeutral);
  for (const auto& [size, chunks] : idle) {
    for (const IdleChunk& chunk : chunks) {
      if (chunk.offset + size <= range.offset || chunk.offset >= range.end()) continue;
      FenceSet last_use = last_use_of({chunk.offset, size});
      last_use.add(after);
      detach(chunk.offset, last_use);
      if (!last_use.passed()) chunk.chunk->last_use.add_all(last_use);
      context_.store.put(group_, chunk.chunk);
    }
  }
  // What stays mapped (part of a larger chunk) is reused in its stream's
  // order, so that stream comes after the streams we do not know.
  for (const auto& [part, tag] : freed) {
    if (range_->missing_bytes(part) == part.size) continue;
    if (!after->order_before(streams_[tag].stream).ok()) after->wait();
  }
  drop_retired(/*wait=*/false);
}

// Every page of `range` is explicit; NotMappedError names the first that is not.
void Pool::require_pages(ByteRange range, const std::string& doing) const {
  for (std::size_t at = range.offset; at < range.end();) {
    const auto after = pages_.upper_bound(at);
    if (after == pages_.begin() || std::prev(after)->second->end() <= at) {
      throw NotMappedError(at, page_, "pool '" + name_ + "': " + doing);
    }
    at = std::prev(after)->second->end();
  }
}

void Pool::deallocate_pages(std::size_t offset, std::size_t size) {
  require_open();
  const ByteRange range = page_range(offset, size);
  const std::string doing = "deallocate(" + std::to_string(offset) + ", " + std::to_string(size) + ")";
  const MutexLock lock(mutex_);
  require_pages(range, doing);
  if (const auto [count, bytes] = held_.in(range); count != 0) {
    throw StillInUseError("pool '" + name_ + "': " + doing + ": " + std::to_string(count) +
                              " tensors of tensor() still show " + format_bytes(bytes) + " of it; drop them first",
                          bytes, count);
  }
  free_pages(range);
}

Address Pool::hold_pages(std::size_t offset, std::size_t size) {
  const ByteRange range = page_range(offset, size);
  const MutexLock lock(mutex_);
  require_open();  // under the lock, so that a forced close sees the hold or the hold sees the close
  require_pages(range, "a tensor over offset " + std::to_string(offset) + ", size " + std::to_string(size) +
                           " needs its pages allocated first");
  held_.hold({offset, size});
  return base_ + offset;
}

bool Pool::unhold_pages(std::size_t offset, std::size_t size) {
  const MutexLock lock(mutex_);
  held_.unhold({offset, size});
  if (!is_retired()) return false;
  for (const ByteRange& part : held_.free_parts(page_range(offset, size), page_)) free_pages(part);
  return live_.size() == 0 && pages_.empty();
}

void Pool::drop_pages() {
  const MutexLock lock(mutex_);
  std::vector<ByteRange> parts;
  for (const auto& [offset, block] : pages_) {
    const auto unheld = held_.free_parts(block->range(), page_);
    parts.insert(parts.end(), unheld.begin(), unheld.end());
  }
  for (const ByteRange& part : parts) free_pages(part);
}

bool Pool::is_mapped(std::size_t offset, std::size_t size) const {
  const ByteRange range = page_range(offset, size);
  const MutexLock lock(mutex_);
  for (std::size_t page = range.offset; page < range.end(); page += page_) {
    if (retired_blocks_.count(page) != 0) return false;
    if (first_unfree({page, page_}) == page + page_) return false;
    const auto after = retired_blocks_.upper_bound(page);
    if (after != retired_blocks_.begin() && std::prev(after)->second->end() > page) return false;
  }
  return true;
}

}  // namespace vmm
