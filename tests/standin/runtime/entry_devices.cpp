// libcudart's entry points: devices and errors.
#include <cstring>

#include "runtime.h"

using namespace standin;  // NOLINT(google-build-using-namespace): entry points cannot live in it

namespace {

int attribute(CUdevice_attribute which, int device) {
  int value = 0;
  (void)cuDeviceGetAttribute(&value, which, device);
  return value;
}

CUcontext primary_context(int device) {
  CUcontext context = nullptr;
  if (cuDevicePrimaryCtxRetain(&context, device) != CUDA_SUCCESS) return nullptr;
  (void)cuDevicePrimaryCtxRelease(device);
  return context;
}

}  // namespace

extern "C" {

cudaError_t cudaGetLastError() { return last_error(/*forget=*/true); }
cudaError_t cudaPeekAtLastError() { return last_error(/*forget=*/false); }

const char* cudaGetErrorName(cudaError_t error) {
  const char* name = nullptr;
  (void)cuGetErrorName(static_cast<CUresult>(error), &name);
  return name == nullptr ? "unrecognized error code" : name;
}

const char* cudaGetErrorString(cudaError_t error) {
  const char* text = nullptr;
  (void)cuGetErrorString(static_cast<CUresult>(error), &text);
  return text == nullptr ? "unrecognized error code" : text;
}

cudaError_t cudaDriverGetVersion(int* version) { return answer(cuDriverGetVersion(version)); }

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** out, unsigned version, unsigned long long flags,
                                             cudaDriverEntryPointQueryResult* result) {
  STANDIN_CALL();
  CUdriverProcAddressQueryResult found{};
  (void)cuGetProcAddress(symbol, out, static_cast<int>(version), flags, &found);
  if (result != nullptr) *result = static_cast<cudaDriverEntryPointQueryResult>(found);
  return cudaSuccess;  // whether there is such a symbol is the result's to say
}

cudaError_t cudaGetDeviceCount(int* count) {
  STANDIN_CALL();
  *count = 0;
  if (const CUresult ready = initialise(); ready != CUDA_SUCCESS) return answer(ready);
  return answer(cuDeviceGetCount(count));
}

cudaError_t cudaGetDevice(int* device) {
  STANDIN_CALL();
  return device_in_use(device);
}

cudaError_t cudaSetDevice(int device) {
  STANDIN_CALL();
  return use_device(device);
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* out, int device) {
  STANDIN_CALL();
  if (const CUresult ready = initialise(); ready != CUDA_SUCCESS) return answer(ready);
  *out = {};
  const CUresult named = cuDeviceGetName(out->name, sizeof(out->name), device);
  if (named != CUDA_SUCCESS) return answer(named);
  CUuuid uuid{};
  (void)cuDeviceGetUuid(&uuid, device);
  std::memcpy(&out->uuid, &uuid, sizeof(uuid));
  (void)cuDeviceTotalMem(&out->totalGlobalMem, device);
  out->major = attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device);
  out->multiProcessorCount = attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device);
  out->warpSize = attribute(CU_DEVICE_ATTRIBUTE_WARP_SIZE, device);
  out->maxThreadsPerBlock = attribute(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, device);
  out->maxThreadsPerMultiProcessor = attribute(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, device);
  out->unifiedAddressing = attribute(CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, device);
  out->streamPrioritiesSupported = 1;
  out->pciBusID = device + 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int device) {
  STANDIN_CALL();
  if (const CUresult ready = initialise(); ready != CUDA_SUCCESS) return answer(ready);
  return answer(cuDeviceGetAttribute(value, static_cast<CUdevice_attribute>(which), device));
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  STANDIN_CALL();
  return answer(cuDeviceGetPCIBusId(text, size, device));
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  STANDIN_CALL_ON_DEVICE();
  return answer(cuCtxGetStreamPriorityRange(least, greatest));
}

cudaError_t cudaDeviceSynchronize() {
  STANDIN_CALL_ON_DEVICE();
  return answer(cuCtxSynchronize());
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  STANDIN_CALL();
  return answer(cuDeviceCanAccessPeer(can, device, peer));
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
  STANDIN_CALL_ON_DEVICE();
  return answer(cuCtxEnablePeerAccess(primary_context(peer), flags));
}

cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }

}  // extern "C"
