#include "torch_adapter/statistics.h"

#include <c10/core/AllocatorConfig.h>

#include <array>
#include <cstddef>

#include "torch_adapter/versions.h"

namespace vmm {

namespace {

using c10::CachingAllocator::StatArray;
using c10::CachingDeviceAllocator::DeviceStats;
using TorchStat = c10::CachingAllocator::Stat;

TorchStat to_torch(const Stat& stat) {
  TorchStat result;
  result.current = stat.current;
  result.peak = stat.peak;
  result.allocated = stat.allocated;
  result.freed = stat.freed;
  return result;
}

StatArray to_torch(const StatTriple& triple) { return {to_torch(triple[0]), to_torch(triple[1]), to_torch(triple[2])}; }

void flatten_stat(const std::string& prefix, const TorchStat& stat, FlatStatistics* out) {
  out->emplace_back(prefix + ".current", stat.current);
  out->emplace_back(prefix + ".peak", stat.peak);
  out->emplace_back(prefix + ".allocated", stat.allocated);
  out->emplace_back(prefix + ".freed", stat.freed);
}

void flatten_array(const std::string& name, const StatArray& stats, FlatStatistics* out) {
  static constexpr std::array<const char*, 3> kTypes = {".all", ".small_pool", ".large_pool"};
  for (std::size_t type = 0; type < kTypes.size(); ++type) flatten_stat(name + kTypes[type], stats[type], out);
}

}  // namespace

DeviceStats to_device_stats(const Statistics& statistics) {
  DeviceStats result;
  result.allocation = to_torch(statistics[StatKind::allocation]);
  result.segment = to_torch(statistics[StatKind::segment]);
  result.active = to_torch(statistics[StatKind::active]);
  result.inactive_split = to_torch(statistics[StatKind::inactive_split]);
  result.inactive_split_bytes = to_torch(statistics[StatKind::inactive_split_bytes]);
  result.oversize_allocations = to_torch(statistics.oversize_allocations);
  result.oversize_segments = to_torch(statistics.oversize_segments);
  result.allocated_bytes = to_torch(statistics[StatKind::allocated_bytes]);
  result.reserved_bytes = to_torch(statistics[StatKind::reserved_bytes]);
  result.active_bytes = to_torch(statistics[StatKind::active_bytes]);
  result.requested_bytes = to_torch(statistics[StatKind::requested_bytes]);
  result.num_alloc_retries = statistics.num_alloc_retries;
  result.num_ooms = statistics.num_ooms;
  result.num_sync_all_streams = statistics.num_sync_all_streams;
  result.num_device_alloc = statistics.num_device_alloc;
  result.num_device_free = statistics.num_device_free;
  result.max_split_size =
      static_cast<std::int64_t>(c10::CachingAllocator::AcceleratorAllocatorConfig::max_split_size());
  return result;
}

#if TORCH_VERSION_MINOR >= 13
void add_private_pool(const RegionId& region, const Statistics& statistics, DeviceStats* result) {
  StatArray& sums = result->reserved_bytes_by_private_pools[c10::MempoolId_t{region.first, region.second}];
  const StatTriple& reserved = statistics[StatKind::reserved_bytes];
  for (std::size_t type = 0; type < reserved.size(); ++type) {
    sums[type].current += reserved[type].current;
    sums[type].peak += reserved[type].peak;
    sums[type].allocated += reserved[type].allocated;
    sums[type].freed += reserved[type].freed;
  }
}
#endif

FlatStatistics flatten(const Statistics& statistics) {
  const DeviceStats stats = to_device_stats(statistics);
  FlatStatistics result;
  flatten_array("allocation", stats.allocation, &result);
  flatten_array("segment", stats.segment, &result);
  flatten_array("active", stats.active, &result);
  flatten_array("inactive_split", stats.inactive_split, &result);
  flatten_array("allocated_bytes", stats.allocated_bytes, &result);
  flatten_array("reserved_bytes", stats.reserved_bytes, &result);
  flatten_array("active_bytes", stats.active_bytes, &result);
  flatten_array("inactive_split_bytes", stats.inactive_split_bytes, &result);
  flatten_array("requested_bytes", stats.requested_bytes, &result);
  flatten_stat("oversize_allocations", stats.oversize_allocations, &result);
  flatten_stat("oversize_segments", stats.oversize_segments, &result);
  result.emplace_back("num_alloc_retries", stats.num_alloc_retries);
  result.emplace_back("num_ooms", stats.num_ooms);
  result.emplace_back("num_sync_all_streams", stats.num_sync_all_streams);
  result.emplace_back("num_device_alloc", stats.num_device_alloc);
  result.emplace_back("num_device_free", stats.num_device_free);
  result.emplace_back("max_split_size", stats.max_split_size);
  VMM_SINCE_TORCH_2_12(result.emplace_back("num_oom_rejections", stats.num_oom_rejections);)
  return result;
}

c10::CachingDeviceAllocator::SegmentInfo to_segment_info(const SegmentSnapshot& segment, int device) {
  c10::CachingDeviceAllocator::SegmentInfo info;
  info.device = static_cast<c10::DeviceIndex>(device);
  info.address = segment.address;
  info.total_size = segment.total_size;
  info.requested_size = segment.requested_size;
  info.allocated_size = segment.allocated_size;
  info.active_size = segment.active_size;
  info.stream = segment.stream;
  info.registration_counter = static_cast<std::int32_t>(segment.number);
  info.is_large = segment.size_class == SizeClass::large_pool;
  info.is_expandable = true;  // the same thing: mapped chunks
  info.blocks.reserve(segment.blocks.size());
  for (const BlockSnapshot& block : segment.blocks) {
    c10::CachingDeviceAllocator::BlockInfo& out = info.blocks.emplace_back();
    out.size = block.size;
    out.requested_size = block.requested;
    out.allocated = block.state == BlockSnapshot::State::allocated;
    out.active = block.state != BlockSnapshot::State::inactive;
  }
  return info;
}

}  // namespace vmm
