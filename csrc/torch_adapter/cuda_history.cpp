// CudaAllocator: snapshots, history, observers. History and observers come
// with a later version.
#include <c10/core/AllocatorConfig.h>
#include <c10/cuda/CUDAAllocatorConfig.h>
#include <c10/cuda/CUDAFunctions.h>

#include <algorithm>
#include <utility>

#include "torch_adapter/cuda_allocator.h"
#include "torch_adapter/errors.h"
#include "torch_adapter/statistics.h"

namespace vmm {

namespace {

cca::AllocatorConfigInfo config_info() {
  using Config = c10::CachingAllocator::AcceleratorAllocatorConfig;
  using CudaConfig = cca::CUDAAllocatorConfig;
  cca::AllocatorConfigInfo info{};
  info.garbage_collection_threshold = Config::garbage_collection_threshold();
  info.max_split_size = Config::max_split_size();
  info.pinned_num_register_threads = CudaConfig::pinned_num_register_threads();
  info.expandable_segments = CudaConfig::expandable_segments();
  info.release_lock_on_malloc = CudaConfig::release_lock_on_cudamalloc();
  info.pinned_use_host_register = CudaConfig::pinned_use_cuda_host_register();
  info.graph_capture_record_stream_reuse = CudaConfig::graph_capture_record_stream_reuse();
  info.last_allocator_settings = Config::last_allocator_settings();
  info.roundup_power2_divisions = Config::roundup_power2_divisions();
  return info;
}

}  // namespace

cca::SnapshotInfo CudaAllocator::snapshot(c10::MempoolId_t mempool, bool /*include_traces*/) {
  cca::SnapshotInfo result;
  result.config_metadata = config_info();
  result.device_traces.resize(static_cast<std::size_t>(device_count_.load(std::memory_order_relaxed)));
  // No private pools in this version: nothing belongs to one.
  if (mempool != c10::MempoolId_t{0, 0} || Runtime::in_child()) return result;
  for (DeviceRoom* room : Runtime::all_made(DeviceKind::cuda)) {
    for (const auto& pool : room->memory.pools()) {
      for (const SegmentSnapshot& segment : pool->snapshot()) {
        result.segments.push_back(to_segment_info(segment, room->ordinal));
      }
    }
  }
  std::sort(result.segments.begin(), result.segments.end(),
            [](const auto& a, const auto& b) { return a.address < b.address; });
  return result;
}

void CudaAllocator::recordHistory(bool enabled, cca::CreateContextFn /*context_recorder*/,
                                  std::size_t /*alloc_trace_max_entries*/, cca::RecordContext /*when*/,
                                  bool /*clear_history*/, const std::vector<std::string>& /*skip_actions*/) {
  if (enabled) throw_not_yet("recordHistory", "recording the history of allocations");
}

// Annotations, contexts and metadata belong to a history; there is none to
// attach them to, and torch sets them whether it is on or not.
void CudaAllocator::recordAnnotation(const std::vector<std::pair<std::string, std::string>>& /*metadata*/) {}
void CudaAllocator::pushCompileContext(std::string& /*context*/) {}
void CudaAllocator::popCompileContext() {}
void CudaAllocator::setUserMetadata(const std::string& /*metadata*/) {}
std::string CudaAllocator::getUserMetadata() { return ""; }
VMM_SINCE_TORCH_2_14(void CudaAllocator::annotateMemory(const void* /*block*/, const std::string& /*metadata*/){})
VMM_SINCE_TORCH_2_12(std::shared_ptr<c10::GatheredContext> CudaAllocator::getContextForPointer(const void* /*block*/) {
  return nullptr;
})

void CudaAllocator::attachOutOfMemoryObserver(cca::OutOfMemoryObserver /*observer*/) {
  throw_not_yet("attachOutOfMemoryObserver", "observing out-of-memory errors");
}

VMM_SINCE_TORCH_2_12(void CudaAllocator::attachOomRejectionObserver(cca::OomRejectionObserver /*observer*/) {
  throw_not_yet("attachOomRejectionObserver", "observing rejected requests");
})

void CudaAllocator::attachAllocatorTraceTracker(cca::AllocatorTraceTracker /*tracker*/) {
  throw_not_yet("attachAllocatorTraceTracker", "following segments as they come and go");
}

}  // namespace vmm
