// The memory of one tensor over several devices': a stretch of each, one after the
// other, in one range of addresses that all of them reach. Each stretch is a part of a
// pool of its own device (TensorRange), which pays, counts and limits it; the range
// maps their chunks a second time. It never knows a shape or a dtype.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "base/units.h"
#include "core/device/device_memory.h"
#include "core/faces/tensor_range.h"
#include "core/memory/alias_range.h"
#include "core/memory/second_mappings.h"
#include "core/pool/pool.h"

namespace vmm {

// The next stretch: `size` bytes, above 0 and whole pages of the largest granularity
// among the devices, but for the last one's, in `pool` of its device.
struct PlacedShare {
  std::shared_ptr<Pool> pool;
  std::size_t size = 0;
  Stream stream = nullptr;  // of that device, which uses the memory first
};

class PlacedMemory final : public SecondMapping {
 public:
  // All or nothing. It begins as zero, usable at once on the streams of all shares.
  // Devices are of one driver. Throws InvalidArgumentError, OutOfMemoryError of the pool
  // that has no room, DriverError where one device cannot reach another's memory.
  explicit PlacedMemory(const std::vector<PlacedShare>& shares);
  PlacedMemory(const PlacedMemory&) = delete;
  PlacedMemory& operator=(const PlacedMemory&) = delete;
  // Waits for nothing: memory and addresses go behind what is queued on any of the
  // devices.
  ~PlacedMemory() override;

  // Its memory and addresses go behind what is queued there, whichever device's the stream is.
  void record_stream(Stream stream, DeviceStreams& device) override;
  // Of whoever has been let in on each of its devices.
  Status add_accessor(const Location& who) override;

  [[nodiscard]] Address base() const { return range_->base(); }
  [[nodiscard]] std::size_t size() const { return range_->size(); }
  // In order; a device may have several.
  [[nodiscard]] std::size_t shares() const { return ranges_.size(); }
  // Whether it has a share.
  [[nodiscard]] bool is_on(const DeviceMemory& memory) const;

 private:
  [[nodiscard]] std::vector<Location> accessors() const;
  void watch_each_other() const;
  void back(const std::vector<PlacedShare>& shares);
  static void order(const std::vector<PlacedShare>& shares);
  void map();

  std::vector<DeviceMemory*> devices_;  // the first share's first, each once
  std::vector<std::unique_ptr<TensorRange>> ranges_;
  std::shared_ptr<AliasRange> range_;
  std::vector<SecondMappings::Place> places_;   // on each device
  std::vector<std::function<bool()>> endings_;  // for each: whether the range's addresses went
};

}  // namespace vmm
