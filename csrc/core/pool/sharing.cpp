// Pool: what others may have of its memory: other devices, other processes, other addresses.

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
  if (!space_.is_open() || !contains(address)) return;
  for (auto at = space_.range().reaching(address - base_); at != space_.range().live().end(); ++at) {
    if (at->first >= address - base_ + bytes) break;
    each(base_ + at->first, *at->second.chunk);
  }
}

std::vector<ChunkView> Pool::chunks_under(Address address, std::size_t bytes) const {
  const ReadLock lock(*this);
  std::vector<ChunkView> found;
  for_each_chunk_under(address, bytes,
                       [&](Address at, const Chunk& chunk) { found.push_back(view_of(at, chunk, kind_.is_spill())); });
  return found;
}

std::vector<ChunkView> Pool::chunks_to_export(Address address, std::size_t bytes) {
  const MutexLock lock(mutex_);
  require_awake();
  std::vector<ChunkView> found;
  for_each_chunk_under(address, bytes, [&](Address at, Chunk& chunk) {
    chunk.exported = true;
    found.push_back(view_of(at, chunk, kind_.is_spill()));
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
  if (kind_.is_range() && (!space_.is_open() || !space_.range().gaps({address - base_, bytes}).empty())) {
    throw InvalidArgumentError(what_is_not_there(name_, address, bytes));
  }
  if (found.empty() || !begins || end != address + bytes) {
    throw InvalidArgumentError("pool '" + name_ + "': " + format_bytes(bytes) + " at " + format_hex(address) +
                               " do not stand on whole chunks: make the tensor with torch_vmm.aligned(shape, dtype, " +
                               "device), and of a multiple of " + format_bytes(kind_.page));
  }
  out->add(found);
  ended = sleeping_.take_unchanged({address - base_, bytes});  // who has it there may write to it
}

Status Pool::add_accessor(Location who) {
  const MutexLock lock(mutex_);
  return space_.is_open() ? space_.add_accessor(who) : Status();
}

}  // namespace vmm
