// Plain C functions for torch.cuda.memory.CUDAPluggableAllocator(path,
// "torch_vmm_malloc", "torch_vmm_free"), found by name in the shared library.
// A block is its pool's as with enable(); streams recorded on a tensor are not
// passed on by such an allocator, so enable() is the better way.
#pragma once

#include <cuda_runtime_api.h>
#include <sys/types.h>

extern "C" {
// nullptr for size 0. Throws what torch throws: c10::OutOfMemoryError (the
// caller does not look for nullptr) and c10::Error.
__attribute__((visibility("default"))) void* torch_vmm_malloc(ssize_t size, int device, cudaStream_t stream);
// Never throws.
__attribute__((visibility("default"))) void torch_vmm_free(void* block, ssize_t size, int device, cudaStream_t stream);
}
