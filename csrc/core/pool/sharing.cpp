// Pool: what others may have of its memory: other devices, other processes, other addresses.
#include <algorithm>

#include "base/errors.h"
#include "core/memory/shared_chunks.h"
#include "core/pool/pool.h"

namespace vmm {

namespace {

ChunkView view_of(Address at, const Chunk& chunk, bool is_spilled) {
  return {at, chunk.size, chunk.handle, chunk.exportable, chunk.number, is_spilled};
}

}  // namespace

// Calls `each(address, chunk)` for the chunks under [address, address + bytes).
void Pool::for_each_chunk_under(Address address, std::size_t bytes, const EachChunk& each) const {
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
                       [&](Address at, const Chunk& chunk) { found.push_back(view_of(at, chunk, is_spill_)); });
  return found;
}

std::vector<ChunkView> Pool::chunks_to_export(Address address, std::size_t bytes) {
  const MutexLock lock(mutex_);
  require_awake();
  std::vector<ChunkView> found;
  for_each_chunk_under(address, bytes, [&](Address at, Chunk& chunk) {
    chunk.exported = true;
    found.push_back(view_of(at, chunk, is_spill_));
  });
  return found;
}

void Pool::share_chunks(Address address, std::size_t bytes, SharedChunks* out) {
  Unchanged ended;  // its backup ends with no lock held
  const MutexLock lock(mutex_);
  require_awake();
  std::vector<Chunk*> found;
  Address end = address;
  bool begins = true;
  for_each_chunk_under(address, bytes, [&](Address at, Chunk& chunk) {
    begins = begins && at == end;
    end = at + chunk.size;
    found.push_back(&chunk);
  });
  if (is_range_ && (range_ == nullptr || !range_->gaps({address - base_, bytes}).empty())) {
    throw InvalidArgumentError(what_is_not_there(address, bytes));
  }
  if (found.empty() || !begins || end != address + bytes) {
    throw InvalidArgumentError("pool '" + name_ + "': " + format_bytes(bytes) + " at " + format_hex(address) +
                               " do not stand on whole chunks: make the tensor with torch_vmm.aligned(shape, dtype, " +
                               "device), and of a multiple of " + format_bytes(page_));
  }
  out->add(found);
  ended = unchanged_.take({address - base_, bytes});  // who has it there may write to it
}

Status Pool::add_accessor(Location who) {
  const MutexLock lock(mutex_);
  auto& accessors = accessors_;
  if (range_ == nullptr || std::find(accessors.begin(), accessors.end(), who) != accessors.end()) return {};
  if (const Status status = range_->clear_dormant(); !status.ok()) return status;
  const auto& live = range_->live();
  std::vector<ByteRange> given;
  for (auto first = live.begin(); first != live.end();) {
    // One call a run: cost is per chunk all the same.
    auto last = first;
    std::size_t end = first->first + first->second.chunk->size;
    const Access of_others = first->second.access();
    while (++last != live.end() && last->first == end && last->second.access() == of_others) {
      end += last->second.chunk->size;
    }
    const Access access = of_others == Access::read ? Access::read : Access::read_write;  // sealed
    const ByteRange run{first->first, end - first->first};
    given.push_back(run);
    if (const Status status = range_->set_access(run, who, access); !status.ok()) {
      // Nor does it keep any: it is none of those whom a seal stops.
      for (const ByteRange& each : given) range_->set_access(each, who, Access::none).ignore();
      return status;
    }
    first = last;
  }
  accessors.push_back(who);
  return {};
}

}  // namespace vmm
