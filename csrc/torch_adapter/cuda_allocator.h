// torch's CUDA allocator, standing on our pools: which pool and which stream a
// request is for, and torch's questions answered. It holds no memory itself.
//
// A subclass of CUDAPluggableAllocator because that one defines every pure
// virtual of every torch release; all of them are overridden here, so none of
// its own behaviour is left. The definitions lie in one file a subject:
//   cuda_allocator.cpp   allocation, frees, streams
//   cuda_limits.cpp      the cache, limits, statistics
//   cuda_history.cpp     snapshots, history, observers
//   cuda_graphs.cpp      private pools, graphs, checkpoints
//   cuda_sharing.cpp     other devices, other processes, copies
#pragma once

#include <torch/csrc/cuda/CUDAPluggableAllocator.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "process/runtime.h"
#include "torch_adapter/versions.h"

namespace vmm {

namespace cca = c10::cuda::CUDACachingAllocator;

class CudaAllocator final : public torch::cuda::CUDAPluggableAllocator::CUDAPluggableAllocator {
 public:
  // The process's one allocator; never destroyed, as tensors outlive
  // everything. Needs no driver.
  static const std::shared_ptr<CudaAllocator>& instance();
  // torch allocates through us.
  static bool is_current();

  // The calling thread takes or frees memory for a torch.cuda.MemPool of another allocator,
  // which may hold a lock that whoever has the GIL waits for.
  static bool is_providing();

  // For the C entry points, which are told device and stream, and may be such a provider too.
  // Throws c10::OutOfMemoryError, c10::Error.
  static void* allocate_at_entry_point(int device, std::size_t bytes, cudaStream_t stream);
  static void free_at_entry_point(void* block) noexcept;
  // Throws c10::OutOfMemoryError, c10::Error.
  static void* allocate_on(c10::DeviceIndex device, std::size_t bytes, cudaStream_t stream);
  // The deleter of every block. Finds the pool by the address; never throws.
  static void free_block(void* block) noexcept;

  // -- Allocation --
  c10::DataPtr allocate(std::size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void* raw_alloc(std::size_t bytes) override;
  void* raw_alloc_with_stream(std::size_t bytes, cudaStream_t stream) override;
  void raw_delete(void* block) override;
  void init(int device_count) override;
  bool initialized() override { return is_initialized_.load(std::memory_order_acquire); }
  std::string name() override;
  void recordStream(const c10::DataPtr& block, c10::cuda::CUDAStream stream) override;
  using CUDAAllocator::recordStream;

  // -- Cache and limits --
  void emptyCache(c10::MempoolId_t mempool) override;
  void enable(bool value) override;
  bool isEnabled() const override { return is_enabled_.load(std::memory_order_relaxed); }
  double getMemoryFraction(c10::DeviceIndex device) override;
  void setMemoryFraction(double fraction, c10::DeviceIndex device) override;
  void cacheInfo(c10::DeviceIndex device, std::size_t* largest) override;
  void* getBaseAllocation(void* block, std::size_t* size) override;
  std::vector<cca::StreamSegmentSize> getExpandableSegmentSizes(c10::DeviceIndex device) override;

  // -- Statistics --
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override;
  void resetAccumulatedStats(c10::DeviceIndex device) override;
  void resetPeakStats(c10::DeviceIndex device) override;

  // -- Snapshots, history, observers (cuda_history.cpp) --
  cca::SnapshotInfo snapshot(c10::MempoolId_t mempool, bool include_traces) override;
  bool isHistoryEnabled() override;
  void recordHistory(bool enabled, cca::CreateContextFn context_recorder, std::size_t alloc_trace_max_entries,
                     cca::RecordContext when, bool clear_history,
                     const std::vector<std::string>& skip_actions) override;
  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& metadata) override;
  void pushCompileContext(std::string& context) override;
  void popCompileContext() override;
  void setUserMetadata(const std::string& metadata) override;
  std::string getUserMetadata() override;
  void attachOutOfMemoryObserver(cca::OutOfMemoryObserver observer) override;
  void attachAllocatorTraceTracker(cca::AllocatorTraceTracker tracker) override;
  VMM_SINCE_TORCH_2_12(std::shared_ptr<c10::GatheredContext> getContextForPointer(const void* block) override;)
  VMM_SINCE_TORCH_2_12(void attachOomRejectionObserver(cca::OomRejectionObserver observer) override;)
  VMM_SINCE_TORCH_2_14(bool supportsUserMetadata() override { return true; })
  VMM_SINCE_TORCH_2_14(void annotateMemory(const void* block, const std::string& metadata) override;)

  // -- Private pools, graphs, checkpoints (cuda_graphs.cpp) --
  void beginAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t mempool,
                           std::function<bool(cudaStream_t)> filter) override;
  void endAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t mempool) override;
  void releasePool(c10::DeviceIndex device, c10::MempoolId_t mempool) override;
  int getPoolUseCount(c10::DeviceIndex device, c10::MempoolId_t mempool) override;
  void createOrIncrefPool(c10::DeviceIndex device, c10::MempoolId_t mempool,
                          std::shared_ptr<CUDAAllocator> allocator) override;
  void setUseOnOOM(c10::DeviceIndex device, c10::MempoolId_t mempool, bool use_on_oom) override;
  void setNoSplit(c10::DeviceIndex device, c10::MempoolId_t mempool) override;
  bool checkPoolLiveAllocations(c10::DeviceIndex device, c10::MempoolId_t mempool,
                                const std::unordered_set<void*>& expected_live_allocations) override;
  std::shared_ptr<cca::AllocatorState> getCheckpointState(c10::DeviceIndex device, c10::MempoolId_t mempool) override;
  cca::CheckpointDelta setCheckpointPoolState(c10::DeviceIndex device,
                                              std::shared_ptr<cca::AllocatorState> state) override;
  VMM_SINCE_TORCH_2_13(void markCaptureBegin(c10::DeviceIndex device) override;)
  VMM_SINCE_TORCH_2_13(void markCaptureEnd(c10::DeviceIndex device) override;)
  VMM_SINCE_TORCH_2_13(c10::DataPtr allocateWithAddress(std::size_t bytes, void* address) override;)

  // -- Other devices, other processes, copies (cuda_sharing.cpp) --
  cca::ShareableHandle shareIpcHandle(void* block) override;
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override;
  void enablePeerAccess(c10::DeviceIndex device, c10::DeviceIndex peer) override;
  cudaError_t memcpyAsync(void* to, int to_device, const void* from, int from_device, std::size_t bytes,
                          cudaStream_t stream, bool p2p_enabled) override;
  // Memory comes from pools; else each block is a cudaMalloc of its own.
  [[nodiscard]] bool is_cached() const { return is_cached_.load(std::memory_order_relaxed); }

 private:
  CudaAllocator();
  [[nodiscard]] c10::DeviceIndex current_device() const;
  // torch's error for a device that does not exist.
  void require_device(c10::DeviceIndex device) const;
  // Runs `call` for the device's room if there is one: torch asks devices that
  // were never used.
  template <typename Call>
  void with_room(c10::DeviceIndex device, const Call& call) const;

  std::atomic<bool> is_initialized_{false};
  std::atomic<bool> is_enabled_{true};
  std::atomic<bool> is_cached_{true};  // is_enabled_, and the environment has not ruled it out
  std::atomic<int> device_count_{0};   // as torch sees it; 0 until init()
  std::mutex fraction_mutex_;
  std::unordered_map<int, double> fractions_;  // as set, since a limit in bytes cannot give them back exactly
};

}  // namespace vmm
