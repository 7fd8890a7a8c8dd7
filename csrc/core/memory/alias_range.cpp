#include "core/memory/alias_range.h"

#include "base/check.h"
#include "core/memory/read_only_ranges.h"

namespace vmm {

Status AliasRange::map(std::size_t granularity, std::span<Chunk* const> chunks, std::size_t copies, Access access,
                       std::span<const Location> accessors) {
  VMM_CHECK(size_ == 0 && !chunks.empty() && copies != 0 && !accessors.empty(), "size ", size_, " chunks ",
            chunks.size(), " copies ", copies);
  // Nobody has seen it. What the driver refuses to undo costs its addresses, and its
  // chunks stay counted as mapped.
  const auto undo = [&] {
    if (size_ != 0) {
      if (!unmap().ok()) return;
      mapped_.clear();
      driver_.unreserve(base_, size_).ignore();
      size_ = 0;
    }
    for (Chunk* chunk : chunks) chunk->note_unmapped(static_cast<int>(copies));
  };
  Status status;
  try {
    status = map_all(granularity, chunks, copies, access, accessors);
  } catch (...) {
    undo();
    throw;
  }
  if (!status.ok()) undo();
  return status;
}

Status AliasRange::map_all(std::size_t granularity, std::span<Chunk* const> chunks, std::size_t copies, Access access,
                           std::span<const Location> accessors) {
  std::size_t size = 0;
  for (const Chunk* chunk : chunks) size += chunk->size;
  if (__builtin_mul_overflow(size, copies, &size)) {
    return {StatusCode::out_of_memory, "reserve more bytes than there are addresses"};
  }
  if (const Status status = driver_.reserve(size, granularity, &base_); !status.ok()) return status;
  size_ = size;
  mapped_.reserve(chunks.size() * copies);
  Address at = base_;
  for (std::size_t copy = 0; copy < copies; ++copy) {
    for (Chunk* chunk : chunks) {
      if (const Status status = driver_.map(at, chunk->size, chunk->handle); !status.ok()) return status;
      mapped_.push_back(chunk);
      at += chunk->size;
    }
  }
  for (const Location& who : accessors) {
    if (const Status status = driver_.set_access(base_, size_, who, access); !status.ok()) return status;
  }
  if (access == Access::read) ReadOnlyRanges::of_process().add(base_, size_);
  return {};
}

Status AliasRange::add_accessor(const Location& who, Access access) {
  return driver_.set_access(base_, size_, who, access);
}

// All of it is one run.
Status AliasRange::unmap() {
  std::size_t bytes = 0;
  for (const Chunk* chunk : mapped_) bytes += chunk->size;
  if (bytes == 0) return {};
  const Status status = driver_.unmap(base_, bytes);
  if (!status.ok() && status.code() != StatusCode::driver_gone) return status;
  return {};
}

bool AliasRange::end() {
  if (!mapped_.empty()) {
    ReadOnlyRanges::of_process().remove(base_);
    if (!unmap().ok()) return false;
    for (Chunk* chunk : mapped_) chunk->note_unmapped();
    mapped_.clear();
  }
  if (size_ == 0) return true;
  const Status status = driver_.unreserve(base_, size_);
  if (!status.ok() && status.code() != StatusCode::driver_gone) return false;
  size_ = 0;
  return true;
}

}  // namespace vmm
