// CudaAllocator: private pools, CUDA graphs, checkpoints. The table of them is
// core/private_pools; here torch's words are turned into its, and what torch
// leaves undone after a failed capture is done.
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <torch/csrc/cuda/CUDAPluggableAllocator.h>

#include <functional>
#include <memory>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "core/device/private_pools.h"
#include "core/device/provided_memory.h"
#include "ipc/ipc_exports.h"
#include "torch_adapter/cuda_allocator.h"
#include "torch_adapter/cuda_callbacks.h"
#include "torch_adapter/entry_points.h"
#include "torch_adapter/errors.h"
#include "torch_adapter/history.h"
#include "torch_adapter/mempool_provider.h"
#include "torch_adapter/out_of_memory.h"
#include "torch_adapter/private_member.h"

namespace vmm {

using torch::cuda::CUDAPluggableAllocator::CUDAPluggableAllocator;

struct AllocateFunction {
  using Type = std::function<void*(std::size_t, int, cudaStream_t)> CUDAPluggableAllocator::*;
  friend Type member_of(AllocateFunction /*which*/);
};
template struct PrivateMember<AllocateFunction, &CUDAPluggableAllocator::alloc_fn_>;

struct FreeFunction {
  using Type = std::function<void(void*, std::size_t, int, cudaStream_t)> CUDAPluggableAllocator::*;
  friend Type member_of(FreeFunction /*which*/);
};
template struct PrivateMember<FreeFunction, &CUDAPluggableAllocator::free_fn_>;

namespace {

// This one, or one that is made of its own C functions.
bool is_ours(cca::CUDAAllocator* allocator) {
  if (allocator == nullptr || dynamic_cast<CudaAllocator*>(allocator) != nullptr) return true;
  auto* const pluggable = dynamic_cast<CUDAPluggableAllocator*>(allocator);
  if (pluggable == nullptr) return false;
  using Allocate = void* (*)(std::size_t, int, cudaStream_t);
  using Free = void (*)(void*, std::size_t, int, cudaStream_t);
  const Allocate* const allocate = (pluggable->*member_of(AllocateFunction{})).target<Allocate>();
  const Free* const free = (pluggable->*member_of(FreeFunction{})).target<Free>();
  return allocate != nullptr && *allocate == reinterpret_cast<Allocate>(&torch_vmm_malloc) && free != nullptr &&
         *free == reinterpret_cast<Free>(&torch_vmm_free);
}

RegionId region_of(c10::MempoolId_t mempool) { return {mempool.first, mempool.second}; }

// For what torch expects to throw.
template <typename Call>
auto in_torch_words(c10::DeviceIndex device, const Call& call) {
  try {
    return call(Runtime::room(DeviceKind::cuda, device).private_pools);
  } catch (const VmmError&) {
    rethrow_as_torch(DeviceKind::cuda, device, 0);
  }
}

// For what torch calls from destructors: nothing may come out of it, and where
// there is no device there is nothing to give up.
template <typename Call>
void without_throwing(const char* who, c10::DeviceIndex device, const Call& call) noexcept {
  if (Runtime::in_child()) return;
  try {
    if (DeviceRoom* room = Runtime::made(DeviceKind::cuda, device); room != nullptr) call(room->private_pools);
  } catch (...) {
    report_swallowed(who);
  }
}

// CUDA counts captures from 1.
std::uint64_t capture_of(Stream stream) {
  auto status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  if (cudaStreamGetCaptureInfo(static_cast<cudaStream_t>(stream), &status, &id) != cudaSuccess) {
    (void)cudaGetLastError();  // torch would take it for its own call's
    return 0;
  }
  return status == cudaStreamCaptureStatusActive ? id : 0;
}

#if VMM_GENERATOR_HAS_CAPTURE_FLAG
// The flag is public, the way to it is not.
}  // namespace
struct GeneratorState {
  using Type = c10::intrusive_ptr<at::CUDAGeneratorState> at::CUDAGeneratorImpl::*;
  friend Type member_of(GeneratorState which);
};
template struct PrivateMember<GeneratorState, &at::CUDAGeneratorImpl::state_>;
namespace {

// With the flag left set by a failed capture, torch refuses every random number
// ("Offset increment outside graph capture") and every replay of an earlier
// graph that draws some. A copy of the state in its place would not do: the
// earlier graphs go on with the original. Takes no lock: whoever holds the
// generator's may be asking for memory.
void forget_failed_capture(int ordinal) {
  try {
    const at::Generator& generator = at::cuda::detail::getDefaultCUDAGenerator(static_cast<c10::DeviceIndex>(ordinal));
    (generator.get<at::CUDAGeneratorImpl>()->*member_of(GeneratorState{}))->capturing_ = false;
  } catch (...) {
    report_swallowed("after a failed capture");
  }
}
#else
void forget_failed_capture(int /*ordinal*/) {}
#endif

// What cudagraph trees keep of a pool, and give back unread.
struct CheckpointState final : cca::AllocatorState {
  explicit CheckpointState(RegionCheckpoint checkpoint) : checkpoint(std::move(checkpoint)) {}
  const RegionCheckpoint checkpoint;
};

}  // namespace

CaptureHooks cuda_capture_hooks(int ordinal) {
  return {&capture_of, [ordinal] { forget_failed_capture(ordinal); }, VMM_FAILED_CAPTURES_ARE_ENDED,
          VMM_FAILED_CAPTURES_ARE_RELEASED};
}

// ------------------------------------------------------------------ users

void CudaAllocator::createOrIncrefPool(c10::DeviceIndex device, c10::MempoolId_t mempool,
                                       std::shared_ptr<CUDAAllocator> allocator) {
  in_torch_words(device, [&](PrivatePools& pools) {
    const bool ours = is_ours(allocator.get());
    pools.add_user(region_of(mempool),
                   ours ? nullptr : memory_provided_by(std::move(allocator), device, region_of(mempool)));
  });
}

void CudaAllocator::releasePool(c10::DeviceIndex device, c10::MempoolId_t mempool) {
  without_throwing("releasePool", device, [&](PrivatePools& pools) { pools.release(region_of(mempool)); });
  const DeviceRoom* const room = Runtime::made(DeviceKind::cuda, device);
  if (room != nullptr && !Runtime::in_child()) ProvidedMemory::finish_closed(room->memory, /*wait=*/false);
}

int CudaAllocator::getPoolUseCount(c10::DeviceIndex device, c10::MempoolId_t mempool) {
  return in_torch_words(device, [&](PrivatePools& pools) { return pools.use_count(region_of(mempool)); });
}

void CudaAllocator::setUseOnOOM(c10::DeviceIndex device, c10::MempoolId_t mempool, bool use_on_oom) {
  without_throwing("setUseOnOOM", device,
                   [&](PrivatePools& pools) { pools.set_use_on_oom(region_of(mempool), use_on_oom); });
}

void CudaAllocator::setNoSplit(c10::DeviceIndex device, c10::MempoolId_t mempool) {
  in_torch_words(device, [&](PrivatePools& pools) { pools.set_no_split(region_of(mempool)); });
}

// ----------------------------------------------------------------- routes

void CudaAllocator::beginAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t mempool,
                                        std::function<bool(cudaStream_t)> filter) {
  in_torch_words(device, [&](PrivatePools& pools) {
    // A graph's filter throws for the null stream while a stream that waits for
    // that one is being captured.
    const auto passes = [filter = std::move(filter)](Stream stream) {
      try {
        return filter(static_cast<cudaStream_t>(stream));
      } catch (const c10::Error&) {
        return false;
      }
    };
    pools.begin(region_of(mempool), passes, c10::cuda::getCurrentCUDAStream(device).stream());
  });
}

void CudaAllocator::endAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t mempool) {
  in_torch_words(device, [&](PrivatePools& pools) { pools.end(region_of(mempool)); });
}

// Which routes are captures' shows in their filters, in every version of torch.
VMM_SINCE_TORCH_2_13(void CudaAllocator::markCaptureBegin(c10::DeviceIndex /*device*/){})
VMM_SINCE_TORCH_2_13(void CudaAllocator::markCaptureEnd(c10::DeviceIndex /*device*/){})

// ------------------------------------------------------------ checkpoints

bool CudaAllocator::checkPoolLiveAllocations(c10::DeviceIndex device, c10::MempoolId_t mempool,
                                             const std::unordered_set<void*>& expected_live_allocations) {
  return in_torch_words(device, [&](PrivatePools& pools) {
    const std::unordered_set<Address> live = pools.live_addresses(region_of(mempool));
    if (live.size() != expected_live_allocations.size()) return false;
    for (void* const expected : expected_live_allocations) {
      if (live.count(reinterpret_cast<Address>(expected)) == 0) return false;
    }
    return true;
  });
}

std::shared_ptr<cca::AllocatorState> CudaAllocator::getCheckpointState(c10::DeviceIndex device,
                                                                       c10::MempoolId_t mempool) {
  return in_torch_words(device, [&](PrivatePools& pools) -> std::shared_ptr<cca::AllocatorState> {
    return std::make_shared<CheckpointState>(pools.checkpoint(region_of(mempool)));
  });
}

cca::CheckpointDelta CudaAllocator::setCheckpointPoolState(c10::DeviceIndex device,
                                                           std::shared_ptr<cca::AllocatorState> state) {
  const auto ours = std::dynamic_pointer_cast<CheckpointState>(state);
  if (ours == nullptr) throw_torch_error("torch_vmm: setCheckpointPoolState: this checkpoint is another allocator's");
  const History::Scope scope(cca::RecordContext::STATE);
  std::vector<Address> freed;
  std::vector<Address> allocated;
  in_torch_words(device, [&](PrivatePools& pools) {
    if (IpcExports::any_shared()) {
      for (const Address live : pools.live_addresses(ours->checkpoint.region)) IpcExports::before_free(live);
    }
    pools.restore(ours->checkpoint, &freed, &allocated);
  });
  cca::CheckpointDelta delta;
  for (const Address address : freed) delta.ptrs_freed.push_back(reinterpret_cast<void*>(address));
  for (const Address address : allocated) {
    void* const block = reinterpret_cast<void*>(address);
    delta.dataptrs_allocd.emplace_back(block, block, &free_block, c10::Device(c10::kCUDA, device));
  }
  return delta;
}

}  // namespace vmm
