#include "core/sleep/chunk_backup.h"

#include <algorithm>
#include <new>
#include <utility>
#include <vector>

#include "base/errors.h"

namespace vmm {

namespace {

constexpr std::size_t kChunkBytes = 256 * kMiB;

}  // namespace

ChunkBackup::ChunkBackup(DeviceMemory& own, DeviceMemory& other, std::size_t bytes) : own_(own), other_(other) {
  const std::size_t grain = std::max(own.granularity(), other.granularity());
  const std::size_t size = align_up(bytes, grain);
  const std::string doing = "keeping " + format_bytes(bytes) + " of a model that sleeps on another device";
  try {
    throw_if_failed(other_.driver().reserve(size, grain, &base_), doing);
    size_ = size;
    for (std::size_t at = 0; at < size;) {
      const std::size_t piece = std::min(kChunkBytes, size - at);
      Chunk* chunk = nullptr;
      Budget* refused = nullptr;
      chunks_.reserve(chunks_.size() + 1);
      const auto create = [&] {
        return other_.store().create(other_.store().spec(piece), other_.foreign_budget(), &chunk, &refused);
      };
      Status made = create();
      if (!made.ok() && other_.empty_cache() != 0) made = create();  // what its models have idle
      if (!made.ok()) {
        throw OutOfMemoryError(place() + " has no room for " + format_bytes(bytes) + " of a model that sleeps there",
                               bytes, other_.budget().headroom(), other_.budget().limit(), place());
      }
      chunks_.push_back(chunk);
      at += piece;
    }
  } catch (...) {
    end();
    throw;
  }
}

ChunkBackup::~ChunkBackup() { end(); }

// What the driver refuses to take back goes when it is asked again.
void ChunkBackup::end() noexcept {
  *held_ = {base_, size_, mapped_, std::move(chunks_)};
  const auto let_go = [&other = other_, held = held_] {
    if (held->mapped != 0) {
      if (!other.driver().unmap(held->base, held->mapped).ok()) return false;
      std::size_t at = 0;
      for (Chunk* chunk : held->chunks) {
        if (at < held->mapped) chunk->mappings.fetch_sub(1, std::memory_order_acq_rel);
        at += chunk->size;
      }
      held->mapped = 0;
    }
    std::erase_if(held->chunks, [&other](Chunk* chunk) { return other.store().release(chunk).ok(); });
    if (!held->chunks.empty()) return false;
    return held->size == 0 || other.driver().unreserve(held->base, held->size).ok();
  };
  if (let_go()) return;
  try {
    other_.leave(let_go);
  } catch (const std::bad_alloc&) {
    return;  // it stays, and counts
  }
}

// Chunk by chunk, while what was saved before is on its way: access costs 0.7 ms a GiB, and as
// much again for each further device.
void ChunkBackup::map_until(std::size_t end) {
  const std::string doing = "mapping " + place() + "'s memory for a model that sleeps there";
  while (mapped_ < end) {
    Chunk* const chunk = chunks_[mapped_ / kChunkBytes];
    const Address at = base_ + mapped_;
    throw_if_failed(other_.driver().map(at, chunk->size, chunk->handle), doing);
    chunk->mappings.fetch_add(1, std::memory_order_acq_rel);
    mapped_ += chunk->size;
    const Location own = Location::on_device(own_.device());
    throw_if_failed(other_.driver().set_access(at, chunk->size, own, Access::read_write), doing);
  }
}

void ChunkBackup::save(std::size_t at, Address from, std::size_t size, const StreamUse& by) {
  map_until(at + size);
  throw_if_failed(other_.driver().copy_async(by.device->device(), base_ + at, from, size, by.stream),
                  "saving a model on " + place());
}

void ChunkBackup::load(std::size_t at, Address to, std::size_t size, const StreamUse& by) {
  throw_if_failed(other_.driver().copy_async(by.device->device(), to, base_ + at, size, by.stream),
                  "loading a model from " + place());
}

void ChunkBackup::read(std::size_t at, std::byte* to, std::size_t size) {
  throw_if_failed(own_.driver().read(own_.device(), to, base_ + at, size), "reading a model on " + place());
}

std::string ChunkBackup::place() const { return other_.driver().name() + ":" + std::to_string(other_.device()); }

}  // namespace vmm
