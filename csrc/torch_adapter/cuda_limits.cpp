// CudaAllocator: the cache emptied, limits, and torch's questions for sizes and numbers.
#include <c10/util/Exception.h>

#include <algorithm>

#include "base/errors.h"
#include "core/device/provided_memory.h"
#include "torch_adapter/cuda_allocator.h"
#include "torch_adapter/errors.h"
#include "torch_adapter/history.h"
#include "torch_adapter/out_of_memory.h"
#include "torch_adapter/routing.h"
#include "torch_adapter/statistics.h"

namespace vmm {

namespace {

#if TORCH_VERSION_MINOR >= 13
void add_private_pools(const DeviceMemory& memory, c10::CachingDeviceAllocator::DeviceStats* result) {
  for (const auto& pool : memory.pools()) {
    if (pool->is_private()) add_private_pool(pool->region(), pool->statistics(), result);
  }
  for (const auto& provided : ProvidedMemory::all_of(memory)) {
    add_private_pool(provided->region(), provided->statistics(), result);
  }
}
#endif

}  // namespace

// ------------------------------------------------------------ cache and limits

void CudaAllocator::emptyCache(c10::MempoolId_t mempool) {
  // torch calls this from destructors, so nothing may come out of it.
  if (Runtime::in_child()) return;
  try {
    const History::Scope scope(cca::RecordContext::ALL);
    const RegionId region{mempool.first, mempool.second};
    for (DeviceRoom* room : Runtime::all_made(DeviceKind::cuda)) {
      if (region == RegionId{}) {
        room->private_pools.sweep();
        room->memory.empty_cache();
      } else {
        room->private_pools.empty_cache(region);
      }
      // torch calls this right after the release of a MemPool that goes.
      ProvidedMemory::finish_closed(room->memory, /*wait=*/true);
    }
  } catch (...) {
    report_swallowed("emptyCache");
  }
}

double CudaAllocator::getMemoryFraction(c10::DeviceIndex device) {
  require_device(device);
  const std::lock_guard<std::mutex> lock(fraction_mutex_);
  const auto found = fractions_.find(device);
  return found == fractions_.end() ? 1.0 : found->second;
}

void CudaAllocator::setMemoryFraction(double fraction, c10::DeviceIndex device) {
  require_device(device);
  if (!(0 <= fraction && fraction <= 1)) {
    const std::string text = "invalid fraction: " + std::to_string(fraction) + ". Please set within [0, 1].";
    TORCH_CHECK_VALUE(false, text);
  }
  try {
    DeviceMemory& memory = Runtime::room(DeviceKind::cuda, device).memory;
    const auto total = static_cast<double>(memory.capabilities().total_memory);
    memory.set_limit(memory.budget(), fraction >= 1.0 ? kUnlimited : static_cast<std::size_t>(fraction * total));
  } catch (const VmmError&) {
    rethrow_as_torch(DeviceKind::cuda, device, 0);
  }
  const std::lock_guard<std::mutex> lock(fraction_mutex_);
  fractions_[device] = fraction;
}

// Asked by cuDNN, which looks for the largest workspace it may hope for.
void CudaAllocator::cacheInfo(c10::DeviceIndex device, std::size_t* largest) {
  try {
    DeviceRoom& room = Runtime::room(DeviceKind::cuda, device);
    Pool& pool = *current_pool(room);
    const std::size_t headroom = pool.budget().headroom();
    if (*largest == 0) {
      MemoryInfo info;
      throw_if_failed(room.memory.driver().memory_info(device, &info), "asking for the free memory");
      *largest = std::min(info.free, headroom);
    }
    // Idle chunks, wherever they stand, make one block when one is asked for.
    *largest = std::max(*largest, pool.idle_bytes());
  } catch (const VmmError&) {
    rethrow_as_torch(DeviceKind::cuda, device, 0);
  }
}

void* CudaAllocator::getBaseAllocation(void* block, std::size_t* size) {
  Runtime::require_own_process();
  if (const auto segment = ProvidedMemory::segment_at(reinterpret_cast<Address>(block)); segment.has_value()) {
    if (size != nullptr) *size = segment->size;
    return reinterpret_cast<void*>(segment->offset);
  }
  const Pool* pool = Runtime::pool_at(block);
  if (pool == nullptr) throw_invalid_pointer(block);
  const auto address = reinterpret_cast<Address>(block);
  for (const SegmentSnapshot& segment : pool->snapshot()) {
    if (address < segment.address || address - segment.address >= segment.total_size) continue;
    if (size != nullptr) *size = segment.total_size;
    return reinterpret_cast<void*>(segment.address);
  }
  throw_invalid_pointer(block);
}

std::vector<cca::StreamSegmentSize> CudaAllocator::getExpandableSegmentSizes(c10::DeviceIndex device) {
  std::vector<cca::StreamSegmentSize> sizes;
  with_room(device, [&](DeviceRoom& room) {
    for (const auto& pool : room.memory.pools()) {
      for (const SegmentSnapshot& segment : pool->snapshot()) {
        sizes.emplace_back(static_cast<cudaStream_t>(segment.stream), segment.size_class == SizeClass::small_pool,
                           segment.total_size);
      }
    }
  });
  return sizes;
}

// ------------------------------------------------------------------ statistics

void CudaAllocator::require_device(c10::DeviceIndex device) const {
  if (device >= 0 && device < device_count_.load(std::memory_order_relaxed)) return;
  throw_torch_error("Invalid device argument " + std::to_string(device) + ": did you call init?");
}

template <typename Call>
void CudaAllocator::with_room(c10::DeviceIndex device, const Call& call) const {
  require_device(device);
  if (Runtime::in_child()) return;
  if (DeviceRoom* room = Runtime::made(DeviceKind::cuda, device); room != nullptr) call(*room);
}

c10::CachingDeviceAllocator::DeviceStats CudaAllocator::getDeviceStats(c10::DeviceIndex device) {
  c10::CachingDeviceAllocator::DeviceStats result = to_device_stats(Statistics{});
  with_room(device, [&](DeviceRoom& room) {
    room.memory.refresh_numbers();
    result = to_device_stats(room.memory.statistics());
    VMM_SINCE_TORCH_2_13(add_private_pools(room.memory, &result);)
    VMM_SINCE_TORCH_2_12(result.num_oom_rejections = History::instance().rejections(device);)
  });
  return result;
}

void CudaAllocator::resetAccumulatedStats(c10::DeviceIndex device) {
  with_room(device, [&](DeviceRoom& room) {
    room.memory.reset_accumulated();
    History::instance().reset_rejections(room.ordinal);
  });
}

void CudaAllocator::resetPeakStats(c10::DeviceIndex device) {
  with_room(device, [](DeviceRoom& room) { room.memory.reset_peaks(); });
}

}  // namespace vmm
