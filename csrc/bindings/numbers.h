// Statistics and snapshots as Python's values, in torch's shapes.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "bindings/bind.h"
#include "core/numbers/stats.h"
#include "core/pool/region_id.h"

namespace vmm {
class Pool;
}  // namespace vmm

namespace vmm::bindings {

// torch.cuda.memory_stats()'s keys, flat.
py::dict to_dict(const Statistics& statistics);

// What torch.cuda.memory_snapshot() answers: a list of segments.
struct DeviceSegment {
  SegmentSnapshot segment;
  int ordinal = 0;
  RegionId region;  // of torch's private pool that it belongs to
  std::string tag;  // under which it was made, if any
};
py::list to_list(const std::vector<DeviceSegment>& segments);
// The segments of these pools, by address. Walks them.
std::vector<DeviceSegment> snapshot(const std::vector<std::shared_ptr<Pool>>& pools);

}  // namespace vmm::bindings
