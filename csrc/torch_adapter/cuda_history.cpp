// CudaAllocator: snapshots, history, observers.
#include <c10/core/AllocatorConfig.h>
#include <c10/cuda/CUDAAllocatorConfig.h>
#include <c10/cuda/CUDAFunctions.h>

#include <dlfcn.h>

#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>

#include "core/device/provided_memory.h"
#include "torch_adapter/cuda_allocator.h"
#include "torch_adapter/errors.h"
#include "torch_adapter/history.h"
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
  info.expandable_segments = Config::use_expandable_segments();  // as set: CudaConfig's asks how we were built
  info.release_lock_on_malloc = CudaConfig::release_lock_on_cudamalloc();
  info.pinned_use_host_register = CudaConfig::pinned_use_cuda_host_register();
  info.graph_capture_record_stream_reuse = CudaConfig::graph_capture_record_stream_reuse();
  info.last_allocator_settings = Config::last_allocator_settings();
  info.roundup_power2_divisions = Config::roundup_power2_divisions();
  VMM_SINCE_TORCH_2_13(info.max_round_threshold = Config::pinned_max_round_threshold();
                       info.max_cached_size = Config::pinned_max_cached_size();)
  return info;
}

// Who asks. Python's callers want runs, whoever listens: torch's own (check_memory_pool)
// expect a tensor to be one block. Libraries that register segments (NCCL's process
// groups do with what a snapshot holds) want each chunk as a segment, as their
// trackers are told: one registration may not cover two chunks. Some of them look before
// they follow. torch's interface does not say which of the two asks; the library that
// the call comes from does. nullopt: one that shows them.
std::optional<History::Registrar> registrar_at(const void* code) {
  Dl_info where{};
  if (dladdr(code, &where) == 0 || where.dli_fname == nullptr) return std::nullopt;
  const std::string_view library(where.dli_fname);
  const auto is_in = [&](std::string_view name) { return library.find(name) != std::string_view::npos; };
  if (is_in("libtorch_python")) return std::nullopt;
  if (!is_in("libtorch_cuda")) return History::Registrar::of_all;
  // torch::cuda::_memory_snapshot_pickled(), which is not inlined, shows it too.
  const std::string_view function(where.dli_sname == nullptr ? "" : where.dli_sname);
  if (function.find("_memory_snapshot_pickled") != std::string_view::npos) return std::nullopt;
  // What torch 2.15's `nccl` is by default, nccl2, registers all that it is told of but where torch's own segments
  // are expandable, of many handles, as ours are: then MemPools alone. The older one asks for those it registers.
  return History::nccl_registers_all() ? History::Registrar::of_all : History::Registrar::of_mem_pools;
}

// The pool's segments, as torch is told.
void add_segments(Pool& pool, int device, SnapshotGrain grain, std::vector<cca::SegmentInfo>* segments) {
  for (const SegmentSnapshot& segment : pool.snapshot(grain)) {
    segments->push_back(to_segment_info(segment, device));
    segments->back().owner_private_pool_id = {pool.region().first, pool.region().second};
  }
}

}  // namespace

cca::SnapshotInfo CudaAllocator::snapshot(c10::MempoolId_t mempool, bool include_traces) {
  cca::SnapshotInfo result;
  result.config_metadata = config_info();
  const int devices = device_count_.load(std::memory_order_relaxed);
  result.device_traces.resize(static_cast<std::size_t>(devices));
  if (Runtime::in_child()) return result;
  History& history = History::instance();
  if (include_traces) history.add_traces(devices, &result);
  const RegionId region{mempool.first, mempool.second};
  const std::optional<History::Registrar> registrar = registrar_at(__builtin_return_address(0));
  const SnapshotGrain grain = registrar.has_value() ? SnapshotGrain::chunk : SnapshotGrain::run;
  // Not of one that follows already, and asks from within: it has been reckoned with.
  if (registrar == History::Registrar::of_all && !Telling::is_mine()) history.expect_registrar_of_all();
  std::vector<std::size_t> active_bytes(static_cast<std::size_t>(devices));
  for (DeviceRoom* room : Runtime::all_made(DeviceKind::cuda)) {
    // Whoever follows segments is to find none that it was told of and that has
    // only not been unmapped yet. A wait would end a capture.
    if (grain == SnapshotGrain::chunk && !Telling::is_mine() && !room->memory.clock().is_capturing()) {
      room->memory.settle(/*wait=*/true);
    }
    const std::size_t first = result.segments.size();
    for (const auto& pool : room->memory.pools()) {
      if (!(region == RegionId{}) && !(pool->region() == region)) continue;
      if (registrar == History::Registrar::of_mem_pools && !pool->is_mem_pool()) continue;
      if (registrar == History::Registrar::of_all && !pool->keeps_within_chunks()) continue;
      add_segments(*pool, room->ordinal, grain, &result.segments);
    }
    for (const auto& [provided, segment] : ProvidedMemory::snapshot(room->memory)) {
      if (!(region == RegionId{}) && !(provided == region)) continue;
      cca::SegmentInfo& info = result.segments.emplace_back(to_segment_info(segment, room->ordinal));
      info.owner_private_pool_id = {provided.first, provided.second};
      info.is_expandable = false;
    }
    if (room->ordinal >= devices) continue;
    for (std::size_t k = first; k < result.segments.size(); ++k) {
      active_bytes[static_cast<std::size_t>(room->ordinal)] += result.segments[k].active_size;
    }
  }
  std::sort(result.segments.begin(), result.segments.end(),
            [](const auto& a, const auto& b) { return a.address < b.address; });
  history.add_contexts(&result.segments);
  if (!History::is_on()) return result;
  for (int device = 0; device < devices; ++device) {
    history.mark_snapshot(device, region, active_bytes[static_cast<std::size_t>(device)]);
  }
  return result;
}

bool CudaAllocator::isHistoryEnabled() { return History::instance().is_recording(); }

void CudaAllocator::recordHistory(bool enabled, cca::CreateContextFn context_recorder,
                                  std::size_t alloc_trace_max_entries, cca::RecordContext when, bool clear_history,
                                  const std::vector<std::string>& skip_actions) {
  History::instance().record(enabled, context_recorder, alloc_trace_max_entries, when, clear_history, skip_actions);
}

void CudaAllocator::recordAnnotation(const std::vector<std::pair<std::string, std::string>>& metadata) {
  if (History::instance().is_recording()) History::instance().annotate(current_device(), metadata);
}

void CudaAllocator::pushCompileContext(std::string& context) { History::instance().push_compile_context(context); }
void CudaAllocator::popCompileContext() { History::instance().pop_compile_context(); }
void CudaAllocator::setUserMetadata(const std::string& metadata) { History::set_user_metadata(metadata); }
std::string CudaAllocator::getUserMetadata() { return History::user_metadata(); }

VMM_SINCE_TORCH_2_14(void CudaAllocator::annotateMemory(const void* block, const std::string& metadata) {
  Runtime::require_own_process();
  const History::Scope scope(cca::RecordContext::ALLOC);
  const auto address = reinterpret_cast<Address>(block);
  // Asked first, as it may have come out of a pool of ours.
  if (const auto provided = ProvidedMemory::asked_at(address); provided.has_value()) {
    History::instance().annotate_block(provided->device, provided->region, nullptr, address, provided->bytes,
                                       provided->stream, metadata);
    return;
  }
  const Pool* pool = Runtime::pool_at(block);
  const auto asked = pool == nullptr ? std::nullopt : pool->asked_at(address);
  if (!asked.has_value()) {
    throw_torch_error("annotateMemory: no live allocation found at pointer " + format_hex(address));
  }
  History::instance().annotate_block(pool->device(), pool->region(), pool, address, asked->bytes, asked->stream,
                                     metadata);
})

VMM_SINCE_TORCH_2_12(std::shared_ptr<c10::GatheredContext> CudaAllocator::getContextForPointer(const void* block) {
  return History::instance().context_of(reinterpret_cast<Address>(block));
})

void CudaAllocator::attachOutOfMemoryObserver(cca::OutOfMemoryObserver observer) {
  History::instance().attach_out_of_memory_observer(std::move(observer));
}

VMM_SINCE_TORCH_2_12(void CudaAllocator::attachOomRejectionObserver(cca::OomRejectionObserver observer) {
  History::instance().attach_rejection_observer(std::move(observer));
})

void CudaAllocator::attachAllocatorTraceTracker(cca::AllocatorTraceTracker tracker) {
  const auto registrar = registrar_at(__builtin_return_address(0)).value_or(History::Registrar::of_all);
  History::instance().attach_tracker(std::move(tracker), registrar);
}

}  // namespace vmm
