// Which memory that others provide lies where, in the whole process. It looks into no segment.
#pragma once

#include <atomic>
#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "base/sync.h"
#include "base/units.h"

namespace vmm {

class DeviceMemory;
class ProvidedMemory;

class ProvidedSegments {
 public:
  // The process's one; never destroyed: tensors outlive everything.
  static ProvidedSegments& instance();
  // Is anything provided? In most programs nothing is: one relaxed load a free.
  static bool any() { return count_.load(std::memory_order_relaxed) != 0; }

  // A segment of `memory`, which lives as long as it has one.
  void add(ByteRange range, const std::shared_ptr<ProvidedMemory>& memory, const DeviceMemory& device)
      VMM_EXCLUDES(mutex_);
  // REQUIRES: it was added, whole.
  void remove(ByteRange range) VMM_EXCLUDES(mutex_);
  // Whose segment holds the address; nullptr: none does.
  std::shared_ptr<ProvidedMemory> find(Address address) VMM_EXCLUDES(mutex_);
  // The whole segment that holds it.
  std::optional<ByteRange> segment_at(Address address) VMM_EXCLUDES(mutex_);
  // Whatever has segments on the device, each once.
  std::vector<std::shared_ptr<ProvidedMemory>> all_of(const DeviceMemory& device) VMM_EXCLUDES(mutex_);

 private:
  // Whoever has segments.
  struct Holder {
    std::shared_ptr<ProvidedMemory> memory;
    const DeviceMemory* device = nullptr;
    std::size_t segments = 0;
  };
  using Holders = std::map<const ProvidedMemory*, Holder>;
  struct Segment {
    std::size_t size = 0;  // bytes
    Holders::iterator holder;
  };
  using Segments = std::map<Address, Segment>;

  ProvidedSegments() = default;
  Segments::iterator holding(Address address) VMM_REQUIRES(mutex_);

  static inline std::atomic<std::size_t> count_{0};  // of segments_
  Mutex mutex_;                                      // a leaf, below ProvidedMemory::mutex_
  Holders holders_ VMM_GUARDED_BY(mutex_);
  Segments segments_ VMM_GUARDED_BY(mutex_);
};

}  // namespace vmm
