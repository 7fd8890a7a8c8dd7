// Why a request could not be met by the pool itself.
#pragma once

#include <cstddef>

#include "base/status.h"
#include "base/units.h"
#include "core/limits/budget.h"
#include "core/streams/clock.h"

namespace vmm {

struct Shortage {
  // No stretch of addresses is that long.
  static Shortage of_addresses(std::size_t bytes) { return {bytes, nullptr, {}, /*no_address_space=*/true}; }
  // The device has not that much: the driver was not asked.
  static Shortage of_device(std::size_t bytes) { return {bytes, nullptr, {}}; }
  static Shortage of_driver(std::size_t bytes, const Status& said) { return {bytes, nullptr, said}; }

  std::size_t bytes = 0;      // physical bytes that were missing
  Budget* refused = nullptr;  // the limit that refused; nullptr: the driver, or no address space
  Status status;              // what the driver said, when it was the driver
  bool no_address_space = false;
  // Threads keep blocks, which may be all that is missing.
  bool is_kept_by_threads = false;
  // The pool takes no requests while some of its memory is read-only.
  bool is_sealed = false;
  // There is room, but `bytes` of it would come of the margin of `refused`
  // (GrowthPolicy::margin()), which is taken once nobody has idle memory (Ladder::keep_margin()).
  bool is_margin = false;
  bool takes_units = false;  // this request stands on units
  // Whole chunks of other sizes, its own idle ones too, might do (ChunkFit::any).
  bool is_particular = false;
  // Nothing is missing: the pool can once this has passed. Whoever asks waits,
  // with no lock held, and asks again.
  Epoch wait_for = kLongAgo;
  // What the pool's chunks are multiples of (GrowthPolicy::unit()); 0: they are of any size.
  std::size_t unit = 0;
  // Where chunks that others have would be had back for nothing (Pool::dormant_of_others()).
  ByteRange returning_to{};
};

}  // namespace vmm
