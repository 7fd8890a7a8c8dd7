// Mappings that nobody uses, of chunks that have gone elsewhere, kept for the day on which
// a chunk comes back to where it was: then nothing is asked of the driver. Two models that
// take turns under one limit hand over the same chunks each time, and unmap, map and
// set_access cost some 70 us a chunk (docs/performance.md, "The limits").
//
// The memory is the chunk's, whoever has it: only a use after free goes through such an
// address. It knows chunks and addresses, and neither a pool nor a range.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "base/status.h"
#include "base/sync.h"
#include "core/memory/chunk.h"

namespace vmm {

class DormantMappings {
 public:
  // The oldest goes where there are more. As many as the chunks of an 80 GiB GPU have places
  // if half of them stood at two.
  static constexpr std::size_t kMost = 4096;

  struct Dormant {
    Address address = 0;
    Chunk* chunk = nullptr;    // whoever asks does not own it: it may be gone, but for its name
    std::size_t size = 0;      // bytes
    OwnerId holder = kNobody;  // the pool that had it last
  };

  explicit DormantMappings(Driver& driver) : driver_(driver) {}
  DormantMappings(const DormantMappings&) = delete;
  DormantMappings& operator=(const DormantMappings&) = delete;

  // Takes over the mapping of `chunk` at `address`, which everybody who may access it there
  // may write through; `unmapped` counts when it goes, and outlives it. False: it is not
  // kept, and the caller unmaps it. REQUIRES: no queued work uses the address; the chunk
  // counts this mapping still.
  bool keep(Address address, Chunk* chunk, std::atomic<std::int64_t>* unmapped) VMM_EXCLUDES(mutex_);
  // The mapping of `chunk` at `address` is the caller's; false: there is none.
  bool claim(Address address, const Chunk* chunk) VMM_EXCLUDES(mutex_);
  // Unmaps what reaches into [address, address + size). What the driver refuses stays.
  Status clear(Address address, std::size_t size) VMM_EXCLUDES(mutex_);
  // The same, but what the driver refuses is forgotten: the addresses end.
  void abandon(Address address, std::size_t size) VMM_EXCLUDES(mutex_);
  // As clear(), for every place of a chunk, which may then go back to the driver.
  Status clear_of(Chunk* chunk) VMM_EXCLUDES(mutex_);
  // The chunk's memory is read-only: it keeps no writable mapping elsewhere from now on, or,
  // again, it may.
  Status ban(Chunk* chunk) VMM_EXCLUDES(mutex_);
  void allow(Chunk* chunk) VMM_EXCLUDES(mutex_);
  // Those that begin within [address, address + size) and reach at most `beyond` bytes
  // beyond it, by address. Looks at no others.
  [[nodiscard]] std::vector<Dormant> within(Address address, std::size_t size, std::size_t beyond = 0) const
      VMM_EXCLUDES(mutex_);

  [[nodiscard]] std::size_t size() const { return size_.load(std::memory_order_relaxed); }

 private:
  using ByChunk = std::multimap<const Chunk*, Address>;
  struct Kept {
    Chunk* chunk = nullptr;
    std::size_t size = 0;
    std::uint64_t since = 0;
    std::atomic<std::int64_t>* unmapped = nullptr;
    ByChunk::iterator of_chunk;
  };
  using ByAddress = std::map<Address, Kept>;

  ByAddress::iterator forget(ByAddress::iterator at) VMM_REQUIRES(mutex_);
  Status drop(ByAddress::iterator at) VMM_REQUIRES(mutex_);
  Status drop_all_of(Chunk* chunk) VMM_REQUIRES(mutex_);
  ByAddress::iterator first_reaching_into(Address address) VMM_REQUIRES(mutex_);

  Driver& driver_;
  std::atomic<std::size_t> size_{0};  // what there is none of costs no lock
  mutable Mutex mutex_;
  ByAddress by_address_ VMM_GUARDED_BY(mutex_);
  std::map<std::uint64_t, Address> by_age_ VMM_GUARDED_BY(mutex_);
  ByChunk by_chunk_ VMM_GUARDED_BY(mutex_);
  std::uint64_t next_ VMM_GUARDED_BY(mutex_) = 0;
};

}  // namespace vmm
