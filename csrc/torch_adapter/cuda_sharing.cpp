// CudaAllocator: other devices, other processes, copies. Sharing with other
// processes, and letting kernels of one GPU into another's pools, come with a
// later version.
#include <c10/cuda/CUDAException.h>
#include <cuda_runtime_api.h>

#include "torch_adapter/cuda_allocator.h"
#include "torch_adapter/errors.h"

namespace vmm {

cca::ShareableHandle CudaAllocator::shareIpcHandle(void* /*block*/) {
  throw_not_yet("shareIpcHandle", "sharing CUDA tensors with other processes");
}

std::shared_ptr<void> CudaAllocator::getIpcDevPtr(std::string /*handle*/) {
  throw_not_yet("getIpcDevPtr", "opening CUDA tensors of other processes");
}

void CudaAllocator::enablePeerAccess(c10::DeviceIndex /*device*/, c10::DeviceIndex /*peer*/) {
  throw_not_yet("enablePeerAccess", "reaching one GPU's tensors from another GPU");
}

// A copy between devices that does not go through peer mappings: mapped memory
// is a peer's only where access was given, and plain cudaMemcpyAsync fails
// without it.
cudaError_t CudaAllocator::memcpyAsync(void* to, int to_device, const void* from, int from_device, std::size_t bytes,
                                       cudaStream_t stream, bool /*p2p_enabled*/) {
  if (to_device == from_device) return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
  return cudaMemcpyPeerAsync(to, to_device, from, from_device, bytes, stream);
}

}  // namespace vmm
