// Chunks that somebody else owns and pays for, mapped a second time, side by side in
// a reservation of their own. It never knows whose they are nor a pool. No lock: it
// is mapped, once, lets others in, and then only ends.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "base/status.h"
#include "base/units.h"
#include "core/memory/chunk.h"
#include "driver/driver.h"

namespace vmm {

class AliasRange {
 public:
  // Of nothing yet: so whatever ends it can be made before there is anything to end.
  explicit AliasRange(Driver& driver) : driver_(driver) {}
  AliasRange(const AliasRange&) = delete;
  AliasRange& operator=(const AliasRange&) = delete;
  // REQUIRES: end() was true, or the driver has gone.
  ~AliasRange() = default;

  // Maps `chunks`, in order, `copies` times, and gives `accessors` this access; or does
  // nothing. REQUIRES: each chunk carries a mapping more for each copy, counted by the
  // caller (SharedChunks), so that it is not released meanwhile; on failure, a
  // throw too, they are taken back here. At least one chunk, copy and accessor.
  Status map(std::size_t granularity, std::span<Chunk* const> chunks, std::size_t copies, Access access,
             std::span<const Location> accessors);
  // REQUIRES: it is mapped.
  Status add_accessor(const Location& who, Access access);
  // Unmaps all and gives the addresses back; false: the driver refuses, to be tried
  // again. REQUIRES: no queued work uses them.
  bool end();

  [[nodiscard]] Address base() const { return base_; }
  [[nodiscard]] std::size_t size() const { return size_; }

 private:
  Status map_all(std::size_t granularity, std::span<Chunk* const> chunks, std::size_t copies, Access access,
                 std::span<const Location> accessors);
  Status unmap();

  Driver& driver_;
  Address base_ = 0;
  std::size_t size_ = 0;        // bytes reserved; 0: nothing is
  std::vector<Chunk*> mapped_;  // by address
};

}  // namespace vmm
