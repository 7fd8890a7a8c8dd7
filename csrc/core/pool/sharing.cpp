// Pool: what others may have of its memory: other devices, other processes.
#include <algorithm>

#include "base/errors.h"
#include "core/pool/pool.h"

namespace vmm {

namespace {

ChunkView view_of(Address at, const Chunk& chunk) { return {at, chunk.size, chunk.handle, chunk.exportable}; }

}  // namespace

// Calls `each(address, chunk)` for the chunks under [address, address + bytes).
template <typename Each>
void Pool::for_each_chunk_under(Address address, std::size_t bytes, const Each& each) const {
  if (range_ == nullptr || !contains(address)) return;
  for (auto at = range_->covering(address - base_); at != range_->live().end(); ++at) {
    if (at->first >= address - base_ + bytes) break;
    each(base_ + at->first, *at->second.chunk);
  }
}

std::vector<ChunkView> Pool::chunks_under(Address address, std::size_t bytes) const {
  const ReadLock lock(*this);
  std::vector<ChunkView> found;
  for_each_chunk_under(address, bytes,
                       [&found](Address at, const Chunk& chunk) { found.push_back(view_of(at, chunk)); });
  return found;
}

std::vector<ChunkView> Pool::chunks_to_export(Address address, std::size_t bytes) {
  const MutexLock lock(mutex_);
  std::vector<ChunkView> found;
  for_each_chunk_under(address, bytes, [&found](Address at, Chunk& chunk) {
    chunk.exported = true;
    found.push_back(view_of(at, chunk));
  });
  return found;
}

std::vector<Chunk*> Pool::share_chunks(Address address, std::size_t bytes, int times) {
  const MutexLock lock(mutex_);
  std::vector<Chunk*> found;
  Address end = address;
  bool begins = true;
  for_each_chunk_under(address, bytes, [&](Address at, Chunk& chunk) {
    begins = begins && at == end;
    end = at + chunk.size;
    found.push_back(&chunk);
  });
  if (found.empty() || !begins || end != address + bytes) {
    throw InvalidArgumentError("pool '" + name_ + "': " + format_bytes(bytes) + " at " + format_hex(address) +
                               " do not stand on whole chunks: make the tensor with torch_vmm.aligned(shape, dtype, " +
                               "device), and of a multiple of " + format_bytes(page_));
  }
  for (Chunk* chunk : found) chunk->mappings.fetch_add(times, std::memory_order_acq_rel);
  return found;
}

// The end of the chunks under it.
Address Pool::end_of_whole_pages(Address address, std::size_t bytes) const {
  Address end = address;
  bool begins = true;
  for_each_chunk_under(address, bytes, [&](Address at, const Chunk& chunk) {
    begins = begins && at == end;
    end = at + chunk.size;
  });
  if (!is_range_ || !begins || end < address + bytes || end > align_up(address + bytes, page_)) {
    throw InvalidArgumentError("pool '" + name_ + "': " + format_bytes(bytes) + " at " + format_hex(address) +
                               " share their chunks with other memory, and pages are sealed by whole chunks: make " +
                               "the tensor with torch_vmm.aligned(shape, dtype, device)");
  }
  return end;
}

void Pool::require_whole_pages(Address address, std::size_t bytes) const {
  const ReadLock lock(*this);
  static_cast<void>(end_of_whole_pages(address, bytes));
}

std::vector<ByteRange> Pool::set_pages_access(Address address, std::size_t bytes, Access access) {
  const MutexLock lock(mutex_);
  const std::size_t end = end_of_whole_pages(address, bytes) - base_;
  // Runs of chunks that had the same rights, which a failure gives back.
  std::vector<ByteRange> runs;
  std::vector<LiveMapping> former;
  for (auto at = range_->from(address - base_); at != range_->live().end() && at->first < end; ++at) {
    const LiveMapping& mapping = at->second;
    if (std::all_of(accessors_.begin(), accessors_.end(),
                    [&](const Location& who) { return mapping.access_of(who) == access; })) {
      continue;
    }
    if (!runs.empty() && runs.back().end() == at->first && former.back().rights == mapping.rights) {
      runs.back().size += mapping.chunk->size;
    } else {
      runs.push_back({at->first, mapping.chunk->size});
      former.push_back(mapping);
    }
  }
  for (std::size_t k = 0; k < runs.size(); ++k) {
    for (const Location& who : accessors_) {
      const Status status = range_->set_access(runs[k], who, access);
      if (status.ok()) continue;
      // The run that failed half-way as well; the first failure is what is told.
      for (std::size_t undone = 0; undone <= k; ++undone) {
        for (const Location& each : accessors_) {
          range_->set_access(runs[undone], each, former[undone].access_of(each)).ignore();
          if (undone == k && each == who) break;
        }
      }
      throw_if_failed(status, "changing what may be done with pages of pool '" + name_ + "'");
    }
  }
  return runs;
}

bool Pool::has_read_only(Address address, std::size_t bytes) const {
  const ReadLock lock(*this);
  if (range_ == nullptr || !contains(address)) return false;
  const std::size_t begin = address - base_;
  auto at = range_->covering(begin);
  if (at == range_->live().end()) at = range_->from(begin);
  for (; at != range_->live().end() && at->first < begin + bytes; ++at) {
    if (at->second.access() == Access::read) return true;
  }
  return false;
}

bool Pool::is_read_only(Address address, std::size_t bytes) const {
  const ReadLock lock(*this);
  if (range_ == nullptr || !contains(address)) return false;
  std::size_t at = address - base_;
  const std::size_t end = at + bytes;
  for (auto mapping = range_->covering(at); mapping != range_->live().end() && at < end; ++mapping) {
    if (mapping->first > at || mapping->second.access() != Access::read) return false;
    at = mapping->first + mapping->second.chunk->size;
  }
  return bytes != 0 && at >= end;
}

Status Pool::add_accessor(Location who) {
  const MutexLock lock(mutex_);
  auto& accessors = accessors_;
  if (range_ == nullptr || std::find(accessors.begin(), accessors.end(), who) != accessors.end()) return {};
  const auto& live = range_->live();
  for (auto first = live.begin(); first != live.end();) {
    // One call a run: cost is per chunk all the same.
    auto last = first;
    std::size_t end = first->first + first->second.chunk->size;
    const Access of_others = first->second.access();
    while (++last != live.end() && last->first == end && last->second.access() == of_others) {
      end += last->second.chunk->size;
    }
    const Access access = of_others == Access::read ? Access::read : Access::read_write;  // sealed
    const Status status = range_->set_access({first->first, end - first->first}, who, access);
    if (!status.ok()) return status;  // given twice is given once: the caller may try again
    first = last;
  }
  accessors.push_back(who);
  return {};
}

}  // namespace vmm
