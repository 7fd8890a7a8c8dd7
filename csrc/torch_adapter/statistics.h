// vmm's numbers in torch's shapes. It knows no device and holds nothing.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/stats.h"

namespace vmm {

// inactive_split stays zero, as with torch's expandable segments: any free
// stretch can be given back. oversize_* stay zero: nothing is kept whole.
c10::CachingDeviceAllocator::DeviceStats to_device_stats(const Statistics& statistics);

// The keys of torch.cuda.memory_stats(), all of them, in no order.
using FlatStatistics = std::vector<std::pair<std::string, std::int64_t>>;
FlatStatistics flatten(const Statistics& statistics);

// One contiguous mapped stretch, as torch.cuda.memory_snapshot() tells it.
c10::CachingDeviceAllocator::SegmentInfo to_segment_info(const SegmentSnapshot& segment, int device);

}  // namespace vmm
