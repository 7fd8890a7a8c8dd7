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

// Where torch keeps each StatKind, in their order, and the rows of kOversizeStats and
// kCounts, in theirs.
constexpr std::array<StatArray DeviceStats::*, kStatKinds> kArrays = {
    &DeviceStats::allocation,      &DeviceStats::segment,        &DeviceStats::active,
    &DeviceStats::allocated_bytes, &DeviceStats::reserved_bytes, &DeviceStats::active_bytes,
    &DeviceStats::requested_bytes, &DeviceStats::inactive_split, &DeviceStats::inactive_split_bytes};

constexpr std::array<TorchStat DeviceStats::*, kOversizeStats.size()> kTorchOversize = {
    &DeviceStats::oversize_allocations, &DeviceStats::oversize_segments};
constexpr std::array<std::int64_t DeviceStats::*, kCounts.size()> kTorchCounts = {
    &DeviceStats::num_alloc_retries, &DeviceStats::num_ooms, &DeviceStats::num_sync_all_streams,
    &DeviceStats::num_device_alloc, &DeviceStats::num_device_free};
static_assert(kArrays.back() != nullptr && kTorchOversize.back() != nullptr && kTorchCounts.back() != nullptr,
              "each of ours has its place there");

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
  for (std::size_t kind = 0; kind < kStatKinds; ++kind) result.*kArrays[kind] = to_torch(statistics.stats[kind]);
  for (std::size_t row = 0; row < kOversizeStats.size(); ++row) {
    result.*kTorchOversize[row] = to_torch(statistics.*kOversizeStats[row].stat);
  }
  for (std::size_t row = 0; row < kCounts.size(); ++row) {
    result.*kTorchCounts[row] = statistics.*kCounts[row].count;
  }
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
  for (std::size_t kind = 0; kind < kStatKinds; ++kind) flatten_array(kStatNames[kind], stats.*kArrays[kind], &result);
  for (std::size_t row = 0; row < kOversizeStats.size(); ++row) {
    flatten_stat(kOversizeStats[row].name, stats.*kTorchOversize[row], &result);
  }
  for (std::size_t row = 0; row < kCounts.size(); ++row) {
    result.emplace_back(kCounts[row].name, stats.*kTorchCounts[row]);
  }
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
