#include "runtime.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>

#include "driver/control.h"

namespace standin {
namespace {

thread_local cudaError_t last = cudaSuccess;
thread_local int chosen_device = 0;

// Kernels for torch, where this is torch's process: beside this library lies
// one that has them. Once, before torch uses a device.
void load_kernels() {
  static std::once_flag once;
  std::call_once(once, [] {
    if (::dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD) == nullptr) return;
    Dl_info self{};
    (void)::dladdr(reinterpret_cast<void*>(&load_kernels), &self);
    const std::string folder(self.dli_fname, std::string(self.dli_fname).rfind('/') + 1);
    if (::dlopen((folder + "libhost_kernels.so").c_str(), RTLD_NOW | RTLD_LOCAL) != nullptr) return;
    std::fprintf(stderr, "CUDA stand-in: %s\n", ::dlerror());
    std::abort();
  });
}

// The runtime holds each primary context once, for good.
CUresult make_current(int device) {
  CUcontext context = nullptr;
  unsigned flags = 0;
  int active = 0;
  CUresult result = cuDevicePrimaryCtxGetState(device, &flags, &active);
  if (result != CUDA_SUCCESS) return result;
  result = cuDevicePrimaryCtxRetain(&context, device);
  if (result != CUDA_SUCCESS) return result;
  if (active != 0) (void)cuDevicePrimaryCtxRelease(device);
  return cuCtxSetCurrent(context);
}

}  // namespace

cudaError_t answer(CUresult result) {
  const auto error = static_cast<cudaError_t>(result);
  // "Not ready" is no error that would be remembered.
  if (error != cudaSuccess && error != cudaErrorNotReady) last = error;
  return error;
}

cudaError_t last_error(bool forget) {
  const cudaError_t error = last;
  if (forget) last = cudaSuccess;
  return error;
}

CUresult begin_call(const char* name) { return static_cast<CUresult>(standin_enter(name)); }

CUresult initialise() {
  const CUresult ready = cuInit(0);
  if (ready == CUDA_SUCCESS) load_kernels();
  return ready;
}

CUresult begin_call_on_device(const char* name) {
  if (const CUresult failure = begin_call(name); failure != CUDA_SUCCESS) return failure;
  if (const CUresult ready = initialise(); ready != CUDA_SUCCESS) return ready;
  CUcontext current = nullptr;
  const CUresult asked = cuCtxGetCurrent(&current);
  if (asked != CUDA_SUCCESS || current != nullptr) return asked;
  return make_current(chosen_device);
}

cudaError_t use_device(int device) {
  if (const CUresult ready = initialise(); ready != CUDA_SUCCESS) return answer(ready);
  const CUresult made = make_current(device);
  if (made == CUDA_SUCCESS) chosen_device = device;
  return answer(made);
}

cudaError_t device_in_use(int* device) {
  CUcontext current = nullptr;
  if (cuCtxGetCurrent(&current) == CUDA_SUCCESS && current != nullptr) return answer(cuCtxGetDevice(device));
  *device = chosen_device;
  return cudaSuccess;
}

cudaError_t refuse_call(const char* name, const char* which) {
  std::fprintf(stderr, "CUDA stand-in: there is no %s%s%s here\n", name, *which == '\0' ? "" : " of ", which);
  return answer(CUDA_ERROR_NOT_SUPPORTED);
}

}  // namespace standin

// For what missing_calls.py writes.
extern "C" int refuse_missing_call(const char* name) { return standin::refuse_call(name); }
