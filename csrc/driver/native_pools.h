// A driver's own stream-ordered pools (CUDA's memory pools), for drivers that have
// them. It never knows a Pool of ours: what is allocated here, the driver gives and
// takes back, and no limit of ours counts it.
//
// Rules are driver.h's: a call that fails changes nothing, none waits for the GPU,
// and none ends a stream capture.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/status.h"
#include "base/units.h"
#include "driver/driver.h"

namespace vmm {

// The driver's own name of a pool; 0 is never one.
using NativePool = std::uint64_t;

// Bytes, as the driver counts them.
struct NativePoolUsage {
  std::size_t used = 0;           // allocated and not yet freed in the order of a stream
  std::size_t used_peak = 0;      // the most that this has been
  std::size_t reserved = 0;       // what the pool holds of the device's memory
  std::size_t reserved_peak = 0;  // the most that this has been
};

class NativePools {
 public:
  NativePools() = default;
  NativePools(const NativePools&) = delete;
  NativePools& operator=(const NativePools&) = delete;
  virtual ~NativePools() = default;

  // Why this device has no such pools ("" if it has), in words for the user.
  [[nodiscard]] virtual std::string missing_pools(int device) const = 0;
  // `max_bytes` 0: as much as the driver lets it.
  virtual Status create_pool(int device, std::size_t max_bytes, NativePool* out) = 0;
  // What is still allocated from it stays until it is freed.
  virtual Status destroy_pool(NativePool pool) = 0;
  // Usable by work on `stream` of `device`. out_of_memory: the pool's maximum, or the
  // device. not_supported: the stream is being captured.
  virtual Status allocate_from_pool(NativePool pool, int device, std::size_t bytes, Stream stream, Address* out) = 0;
  // Behind the work that is queued on `stream`. REQUIRES: allocated here and not freed.
  virtual Status free_to_pool(int device, Address address, Stream stream) = 0;
  // Gives unused memory back until at most about `keep` bytes stay reserved.
  virtual Status trim_pool(NativePool pool, std::size_t keep) = 0;
  // Unused bytes that a pool keeps when the device is waited for.
  virtual Status set_release_threshold(NativePool pool, std::size_t bytes) = 0;
  virtual Status release_threshold(NativePool pool, std::size_t* out) const = 0;
  virtual Status pool_usage(NativePool pool, NativePoolUsage* out) const = 0;
};

}  // namespace vmm
