// Memory of another process, mapped here: chunks that came as descriptors, side
// by side in a reservation of their own. It charges nobody, since it is its
// creator's memory, and never knows a pool nor how the descriptors came.
//
// The memory lives as long as it is mapped anywhere: its creator may free it,
// or end, meanwhile. No lock: its owner's lock guards it.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "driver/driver.h"

namespace vmm {

struct ImportedPart {
  int fd = -1;           // stays the caller's
  std::size_t size = 0;  // bytes, the chunk's own
};

class ImportedRange {
 public:
  // Maps all parts, in order, and gives `accessors` read and write access; or
  // does nothing. The first accessor is the device that the range is for.
  // REQUIRES: at least one part and one accessor.
  static Status make(Driver& driver, std::span<const ImportedPart> parts, std::span<const Location> accessors,
                     std::unique_ptr<ImportedRange>* out);
  ImportedRange(const ImportedRange&) = delete;
  ImportedRange& operator=(const ImportedRange&) = delete;
  // Unmaps. REQUIRES: no queued work uses the range.
  ~ImportedRange();

  // Nothing to do for whoever has access already.
  Status add_accessor(Location who);

  [[nodiscard]] Address base() const { return base_; }
  [[nodiscard]] std::size_t size() const { return size_; }
  [[nodiscard]] const std::vector<Location>& accessors() const { return accessors_; }

 private:
  explicit ImportedRange(Driver& driver) : driver_(driver) {}
  Status map_parts(std::span<const ImportedPart> parts);

  Driver& driver_;
  Address base_ = 0;
  std::size_t size_ = 0;    // bytes reserved; 0: nothing is
  std::size_t mapped_ = 0;  // bytes mapped, from the base on
  std::vector<Location> accessors_;
};

}  // namespace vmm
