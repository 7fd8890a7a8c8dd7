#include "torch_adapter/entry_points.h"

#include "torch_adapter/cuda_allocator.h"
#include "torch_adapter/enabled.h"

// A negative size becomes one beyond every device, which is refused as such.
void* torch_vmm_malloc(ssize_t size, int device, cudaStream_t stream) {
  vmm::note_entry_points_used();
  return vmm::CudaAllocator::allocate_at_entry_point(device, static_cast<std::size_t>(size), stream);
}

void torch_vmm_free(void* block, ssize_t /*size*/, int /*device*/, cudaStream_t /*stream*/) {
  vmm::CudaAllocator::free_at_entry_point(block);
}
