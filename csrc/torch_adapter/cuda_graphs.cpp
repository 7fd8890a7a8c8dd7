// CudaAllocator: private pools, CUDA graphs, checkpoints. They come with a
// later version; until then each says so, except those that torch calls from
// destructors, which do nothing: there is nothing to give up.
#include <ATen/cuda/CUDAGeneratorImpl.h>

#include "torch_adapter/cuda_allocator.h"
#include "torch_adapter/errors.h"

namespace vmm {

namespace {
constexpr const char* kPrivatePools = "allocating to a private pool (CUDA graphs, torch.cuda.MemPool)";

// torch 2.11 tells its random generator that a capture has begun before it asks
// for the pool, and does not take it back when that fails: every later random
// number would be refused ("Offset increment outside graph capture"). A copy of
// the generator's state that knows of no capture takes the state's place.
void forget_capture(c10::DeviceIndex device) {
  at::Generator generator = at::cuda::detail::getDefaultCUDAGenerator(device);
  const std::lock_guard<std::mutex> lock(generator.mutex());
  generator.graphsafe_set_state(generator.clone());
}

}  // namespace

void CudaAllocator::beginAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t /*mempool*/,
                                        std::function<bool(cudaStream_t)> /*filter*/) {
  forget_capture(device);
  throw_not_yet("beginAllocateToPool", kPrivatePools);
}

void CudaAllocator::endAllocateToPool(c10::DeviceIndex /*device*/, c10::MempoolId_t /*mempool*/) {}
void CudaAllocator::releasePool(c10::DeviceIndex /*device*/, c10::MempoolId_t /*mempool*/) {}
void CudaAllocator::setUseOnOOM(c10::DeviceIndex /*device*/, c10::MempoolId_t /*mempool*/, bool use_on_oom) {
  if (use_on_oom) throw_not_yet("setUseOnOOM", kPrivatePools);
}

int CudaAllocator::getPoolUseCount(c10::DeviceIndex /*device*/, c10::MempoolId_t /*mempool*/) {
  throw_not_yet("getPoolUseCount", kPrivatePools);
}

void CudaAllocator::createOrIncrefPool(c10::DeviceIndex /*device*/, c10::MempoolId_t /*mempool*/,
                                       std::shared_ptr<CUDAAllocator> /*allocator*/) {
  throw_not_yet("createOrIncrefPool", kPrivatePools);
}

void CudaAllocator::setNoSplit(c10::DeviceIndex /*device*/, c10::MempoolId_t /*mempool*/) {
  throw_not_yet("setNoSplit", kPrivatePools);
}

bool CudaAllocator::checkPoolLiveAllocations(c10::DeviceIndex /*device*/, c10::MempoolId_t /*mempool*/,
                                             const std::unordered_set<void*>& /*expected_live_allocations*/) {
  throw_not_yet("checkPoolLiveAllocations", kPrivatePools);
}

std::shared_ptr<cca::AllocatorState> CudaAllocator::getCheckpointState(c10::DeviceIndex /*device*/,
                                                                       c10::MempoolId_t /*mempool*/) {
  throw_not_yet("getCheckpointState", "checkpointing a private pool");
}

cca::CheckpointDelta CudaAllocator::setCheckpointPoolState(c10::DeviceIndex /*device*/,
                                                           std::shared_ptr<cca::AllocatorState> /*state*/) {
  throw_not_yet("setCheckpointPoolState", "checkpointing a private pool");
}

// A capture that torch announces has already failed in beginAllocateToPool.
VMM_SINCE_TORCH_2_13(void CudaAllocator::markCaptureBegin(c10::DeviceIndex /*device*/){})
VMM_SINCE_TORCH_2_13(void CudaAllocator::markCaptureEnd(c10::DeviceIndex /*device*/){})
VMM_SINCE_TORCH_2_13(c10::DataPtr CudaAllocator::allocateWithAddress(std::size_t /*bytes*/, void* /*address*/) {
  throw_not_yet("allocateWithAddress", "allocating at a given address");
})

}  // namespace vmm
