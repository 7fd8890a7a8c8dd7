// Addresses that read as zero and take no memory: the same few chunks, mapped
// read-only again and again. A mapping costs some 40 us whatever its size, so a long
// stretch takes the largest chunk that fits, and one that is broken into is made of
// smaller ones anew. It never knows a pool, nor what stands beside it.
#pragma once

#include <array>
#include <cstddef>
#include <map>
#include <memory>
#include <vector>

#include "base/status.h"
#include "base/sync.h"
#include "base/units.h"
#include "core/limits/budget.h"
#include "core/memory/chunk.h"
#include "core/memory/chunk_store.h"
#include "driver/driver.h"

namespace vmm {

// The chunks, of a device, made when first needed. They outlive all covers.
class ZeroChunks {
 public:
  static constexpr std::array<std::size_t, 3> kSizes = {1, 8, 64};  // granules

  // `payer` is charged for them; they end on the shelf of `group`, which it stands under.
  ZeroChunks(ChunkStore& store, Budget& group, Budget& payer) : store_(store), group_(group), payer_(payer) {}
  ZeroChunks(const ZeroChunks&) = delete;
  ZeroChunks& operator=(const ZeroChunks&) = delete;
  // REQUIRES: nothing maps them any more, but what waits for the clock.
  ~ZeroChunks();

  // The largest of at most `size` bytes that is there or can be made, of the sizes
  // above times the granularity; nullptr, and why, where not even the smallest can.
  Chunk* at_most(std::size_t size, Status* why) VMM_EXCLUDES(mutex_);
  [[nodiscard]] std::size_t granularity() const { return store_.granularity(); }

 private:
  ChunkStore& store_;
  Budget& group_;
  Budget& payer_;
  Mutex mutex_;
  std::array<Chunk*, kSizes.size()> chunks_ VMM_GUARDED_BY(mutex_){};
};

class ZeroCover {
 public:
  // [base, base + size) lies in a reservation that outlives it. `accessors` may read.
  ZeroCover(Driver& driver, std::shared_ptr<ZeroChunks> chunks, Address base, std::size_t size,
            std::vector<Location> accessors)
      : driver_(driver), chunks_(std::move(chunks)), base_(base), size_(size), accessors_(std::move(accessors)) {}
  ZeroCover(const ZeroCover&) = delete;
  ZeroCover& operator=(const ZeroCover&) = delete;

  // Makes the smallest chunk, where it is not there: after that no call below lacks
  // memory, whatever is broken into.
  Status prepare();
  // Makes all of `range` read as zero, or nothing. REQUIRES: multiples of the
  // granularity, and nothing is mapped there.
  Status cover(ByteRange range);
  // Unmaps what covers `range`; where a mapping reaches beyond, the rest is covered
  // anew. REQUIRES: no queued work uses the mappings that it touches. What fails half-way
  // leaves stretches without a mapping: cover_gaps() is for them.
  Status uncover(ByteRange range);
  // Covers what of `range` is not. REQUIRES: nothing else is mapped there, and no queued
  // work uses what a failure left.
  Status cover_gaps(ByteRange range);

  // What reads as zero does so for `who` as well from now on.
  Status add_accessor(const Location& who);

  [[nodiscard]] std::size_t mappings() const { return live_.size(); }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }
  // Whether all of `range` is covered.
  [[nodiscard]] bool covers(ByteRange range) const;

 private:
  struct Mapping {
    Chunk* chunk = nullptr;
    bool is_readable = false;  // by all; else a failure left it, which could not be undone
  };
  using Map = std::map<std::size_t, Mapping>;
  Status map(ByteRange range, std::size_t* at);
  Status unmap(Map::const_iterator at);
  [[nodiscard]] Map::const_iterator touching(std::size_t offset) const;
  [[nodiscard]] std::size_t largest_at(std::size_t offset, std::size_t size) const;

  Driver& driver_;
  const std::shared_ptr<ZeroChunks> chunks_;
  const Address base_;
  const std::size_t size_;
  std::vector<Location> accessors_;
  Map live_;  // by offset
  std::size_t bytes_ = 0;
};

}  // namespace vmm
