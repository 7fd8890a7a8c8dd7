// What happens in the pools of a device, told at the moment it happens and
// under the pool's lock, so in the right order. It knows nobody who listens.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/units.h"
#include "driver/driver.h"

namespace vmm {

class Pool;

// The names are those of torch's memory history.
enum class PoolEvent : std::uint8_t {
  alloc,           // bytes: as requested
  free_requested,  // bytes: as requested
  free_completed,  // the same; at once, or when the recorded streams have passed
  segment_map,     // a chunk stands at the address, accessible; bytes: the chunk's
  segment_unmap,   // it has left the pool's range; queued work may still use the address
  segment_free,    // right before the driver unmaps the address, after its segment_unmap
};

class PoolObserver {
 public:
  PoolObserver() = default;
  PoolObserver(const PoolObserver&) = delete;
  PoolObserver& operator=(const PoolObserver&) = delete;
  virtual ~PoolObserver() = default;
  // Called under the pool's lock: it must not call into any pool.
  virtual void on_event(const Pool& pool, PoolEvent event, Address address, std::size_t bytes,
                        Stream stream) noexcept = 0;
};

}  // namespace vmm
