// A physical chunk: what the driver gave in one create call. Exactly one of a
// mapped range, the chunk store or a grant owns it at any time.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>

#include "core/limits/budget.h"
#include "core/streams/clock.h"
#include "driver/driver.h"

namespace vmm {

// Names whose data a chunk holds; a fresh chunk's is nobody's, and zero.
using OwnerId = std::uint64_t;
inline constexpr OwnerId kNobody = 0;

struct Chunk;
using ChunksBySize = std::multimap<std::size_t, Chunk*>;

struct Chunk {
  ChunkHandle handle = 0;
  std::uint64_t number = 0;  // no other chunk of the process ever has it; a driver gives a handle again
  std::size_t size = 0;      // bytes
  bool exportable = false;
  Budget* charged = nullptr;              // who pays for it
  bool is_shelved = false;                // rests on a shelf of that budget
  std::atomic<OwnerId> content{kNobody};  // whose data it may still hold: the pool that had it last
  Epoch last_use = kLongAgo;              // behind which nothing uses it any more that used it before
  bool oversize = false;                  // while mapped: was counted as torch's oversize ones
  // Another process has had it: it may go on reading, so the chunk serves no
  // other model and goes back to the driver from where it stands.
  bool exported = false;
  bool may_stay_mapped = true;  // where it is no more (DormantMappings, whose lock guards this)
  // Addresses at which it is mapped, those that wait for the clock included and
  // dormant ones not.
  // Two pools drop their mappings under two locks, hence atomic.
  std::atomic<int> mappings{0};
  void note_mapped(int times = 1) { mappings.fetch_add(times, std::memory_order_acq_rel); }
  void note_unmapped(int times = 1) {
    if (mappings.fetch_sub(times, std::memory_order_acq_rel) == times)
      unmappings.fetch_add(1, std::memory_order_acq_rel);
  }
  // How often a chunk of the process, whichever, came to be mapped nowhere: whoever found
  // none that is needs not look again until it has risen.
  inline static std::atomic<std::uint64_t> unmappings{0};
  // While it stands on none: its place on a shelf, made with it, so that to put it there
  // takes no memory.
  ChunksBySize::node_type shelf_place;
};

// A chunk under a block, for sharing with another process.
struct ChunkView {
  Address address = 0;
  std::size_t size = 0;  // bytes
  ChunkHandle handle = 0;
  bool exportable = false;
  std::uint64_t number = 0;  // Chunk::number
  bool is_spilled = false;   // it lies in host memory
};

}  // namespace vmm
