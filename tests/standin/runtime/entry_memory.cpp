// libcudart's entry points: memory, copies and fills.
#include "runtime.h"

using namespace standin;  // NOLINT(google-build-using-namespace): entry points cannot live in it

namespace {

CUdeviceptr address(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

CUcontext primary_context(int device) {
  CUcontext context = nullptr;
  if (cuDevicePrimaryCtxRetain(&context, device) != CUDA_SUCCESS) return nullptr;
  (void)cuDevicePrimaryCtxRelease(device);
  return context;
}

}  // namespace

extern "C" {

cudaError_t cudaMalloc(void** out, std::size_t size) {
  STANDIN_CALL_ON_DEVICE();
  *out = nullptr;
  if (size == 0) return cudaSuccess;
  CUdeviceptr block = 0;
  const CUresult result = cuMemAlloc(&block, size);
  *out = reinterpret_cast<void*>(block);
  return answer(result);
}

cudaError_t cudaFree(void* block) {
  STANDIN_CALL_ON_DEVICE();
  return answer(cuMemFree(address(block)));
}

cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  STANDIN_CALL_ON_DEVICE();
  return answer(cuMemGetInfo(free, total));
}

cudaError_t cudaHostAlloc(void** out, std::size_t size, unsigned flags) {
  STANDIN_CALL_ON_DEVICE();
  return answer(cuMemHostAlloc(out, size, flags));
}

cudaError_t cudaFreeHost(void* block) {
  STANDIN_CALL_ON_DEVICE();
  return answer(block == nullptr ? CUDA_SUCCESS : cuMemFreeHost(block));
}

cudaError_t cudaHostRegister(void* block, std::size_t size, unsigned flags) {
  STANDIN_CALL_ON_DEVICE();
  return answer(cuMemHostRegister(block, size, flags));
}

cudaError_t cudaHostUnregister(void* block) {
  STANDIN_CALL_ON_DEVICE();
  return answer(cuMemHostUnregister(block));
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void* pointer) {
  STANDIN_CALL();
  if (const CUresult ready = initialise(); ready != CUDA_SUCCESS) return answer(ready);
  *out = {};
  out->device = -2;  // as CUDA says of what it does not know
  out->hostPointer = const_cast<void*>(pointer);
  unsigned type = 0;
  if (cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address(pointer)) != CUDA_SUCCESS) {
    return cudaSuccess;
  }
  (void)cuPointerGetAttribute(&out->device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address(pointer));
  out->devicePointer = const_cast<void*>(pointer);
  out->type = type == CU_MEMORYTYPE_DEVICE ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  if (out->type == cudaMemoryTypeDevice) out->hostPointer = nullptr;
  return cudaSuccess;
}

// -- Other processes.

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* out, void* block) {
  STANDIN_CALL_ON_DEVICE();
  static_assert(sizeof(cudaIpcMemHandle_t) == sizeof(CUipcMemHandle));
  return answer(cuIpcGetMemHandle(reinterpret_cast<CUipcMemHandle*>(out), address(block)));
}

cudaError_t cudaIpcOpenMemHandle(void** out, cudaIpcMemHandle_t handle, unsigned flags) {
  STANDIN_CALL_ON_DEVICE();
  CUdeviceptr block = 0;
  const CUresult result = cuIpcOpenMemHandle(&block, reinterpret_cast<const CUipcMemHandle&>(handle), flags);
  *out = reinterpret_cast<void*>(block);
  return answer(result);
}

cudaError_t cudaIpcCloseMemHandle(void* block) {
  STANDIN_CALL_ON_DEVICE();
  return answer(cuIpcCloseMemHandle(address(block)));
}

// -- Work.

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t size, cudaMemcpyKind /*kind*/,
                            cudaStream_t stream) {
  STANDIN_CALL_ON_DEVICE();
  return answer(cuMemcpyAsync(address(to), address(from), size, stream));
}

cudaError_t cudaMemcpy(void* to, const void* from, std::size_t size, cudaMemcpyKind /*kind*/) {
  STANDIN_CALL_ON_DEVICE();
  const CUresult queued = cuMemcpyAsync(address(to), address(from), size, nullptr);
  return answer(queued == CUDA_SUCCESS ? cuStreamSynchronize(nullptr) : queued);
}

cudaError_t cudaMemcpyPeerAsync(void* to, int to_device, const void* from, int from_device, std::size_t size,
                                cudaStream_t stream) {
  STANDIN_CALL_ON_DEVICE();
  return answer(cuMemcpyPeerAsync(address(to), primary_context(to_device), address(from), primary_context(from_device),
                                  size, stream));
}

cudaError_t cudaMemsetAsync(void* block, int value, std::size_t size, cudaStream_t stream) {
  STANDIN_CALL_ON_DEVICE();
  return answer(cuMemsetD8Async(address(block), static_cast<unsigned char>(value), size, stream));
}

cudaError_t cudaMemset(void* block, int value, std::size_t size) {
  STANDIN_CALL_ON_DEVICE();
  return answer(cuMemsetD8Async(address(block), static_cast<unsigned char>(value), size, nullptr));
}

}  // extern "C"
