// vmm's numbers in torch's shapes. It knows no device and holds nothing.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/numbers/stats.h"
#include "core/pool/region_id.h"
#include "torch_adapter/versions.h"

namespace vmm {

c10::CachingDeviceAllocator::DeviceStats to_device_stats(const Statistics& statistics);

#if TORCH_VERSION_MINOR >= 13
// Adds what one part of a private pool's memory reserves (a model's, or what another
// allocator provides) to what the pool does. The peak of several is a bound.
void add_private_pool(const RegionId& region, const Statistics& statistics,
                      c10::CachingDeviceAllocator::DeviceStats* result);
#endif

// The keys of torch.cuda.memory_stats(), all of them, in no order.
using FlatStatistics = std::vector<std::pair<std::string, std::int64_t>>;
FlatStatistics flatten(const Statistics& statistics);

// A segment, as torch.cuda.memory_snapshot() tells it.
c10::CachingDeviceAllocator::SegmentInfo to_segment_info(const SegmentSnapshot& segment, int device);

}  // namespace vmm
