// Statistics and snapshots as Python's values, in torch's shapes.
#pragma once

#include <vector>

#include "bindings/bind.h"
#include "core/stats.h"

namespace vmm::bindings {

// torch.cuda.memory_stats()'s keys, flat.
py::dict to_dict(const Statistics& statistics);

// What torch.cuda.memory_snapshot() answers: a list of segments.
struct DeviceSegment {
  SegmentSnapshot segment;
  int ordinal = 0;
};
py::list to_list(const std::vector<DeviceSegment>& segments);

}  // namespace vmm::bindings
