// The entry points of the CUDA driver, found at run time. It owns the open
// library and the table of functions; it never knows what they are for.
//
// cuda.h is read for its types only: nothing links libcuda, so the package
// imports, and says why there is no GPU, where there is no driver.
#pragma once

#include <cuda.h>

#include <string>

#include "base/function_ref.h"
#include "base/status.h"

// Every entry point that is needed. cuda.h's own macros turn a name into the
// version whose signature it declares (cuMemGetInfo -> cuMemGetInfo_v2); both
// the member and the looked-up symbol follow.
// NOLINTBEGIN(cppcoreguidelines-macro-usage)
#define VMM_CUDA_FUNCTIONS(X)       \
  X(cuInit)                         \
  X(cuDeviceGet)                    \
  X(cuDeviceGetCount)               \
  X(cuDeviceGetName)                \
  X(cuDeviceGetAttribute)           \
  X(cuDeviceTotalMem)               \
  X(cuDevicePrimaryCtxRetain)       \
  X(cuDevicePrimaryCtxRelease)      \
  X(cuCtxGetCurrent)                \
  X(cuCtxPushCurrent)               \
  X(cuCtxPopCurrent)                \
  X(cuGetErrorName)                 \
  X(cuMemAlloc)                     \
  X(cuMemFree)                      \
  X(cuMemAddressReserve)            \
  X(cuMemAddressFree)               \
  X(cuMemCreate)                    \
  X(cuMemRelease)                   \
  X(cuMemMap)                       \
  X(cuMemUnmap)                     \
  X(cuMemSetAccess)                 \
  X(cuMemGetAllocationGranularity)  \
  X(cuMemExportToShareableHandle)   \
  X(cuMemImportFromShareableHandle) \
  X(cuMemGetInfo)                   \
  X(cuMemcpyAsync)                  \
  X(cuMemHostRegister)              \
  X(cuMemHostUnregister)            \
  X(cuMemsetD8Async)                \
  X(cuEventCreate)                  \
  X(cuEventDestroy)                 \
  X(cuEventRecord)                  \
  X(cuEventQuery)                   \
  X(cuEventSynchronize)             \
  X(cuStreamCreate)                 \
  X(cuStreamDestroy)                \
  X(cuStreamIsCapturing)            \
  X(cuStreamSynchronize)            \
  X(cuStreamWaitEvent)              \
  X(cuModuleLoadData)               \
  X(cuModuleUnload)                 \
  X(cuModuleGetFunction)            \
  X(cuLaunchKernel)                 \
  X(cuThreadExchangeStreamCaptureMode)
// What only the driver's own pools need: without it all else works.
#define VMM_CUDA_POOL_FUNCTIONS(X) \
  X(cuMemPoolCreate)               \
  X(cuMemPoolDestroy)              \
  X(cuMemPoolTrimTo)               \
  X(cuMemPoolGetAttribute)         \
  X(cuMemPoolSetAttribute)         \
  X(cuMemAllocFromPoolAsync)       \
  X(cuMemFreeAsync)
// NOLINTEND(cppcoreguidelines-macro-usage)

namespace vmm {

struct CudaApi {
  // Opens libcuda.so.1 and looks everything up; the library stays open for
  // ever, for its error names do. False: `why_not` says what is missing.
  bool load(std::string* why_not);

  // Looks VMM_CUDA_POOL_FUNCTIONS up by `find`, which answers nullptr for what there
  // is not. Returns the names of those, "" if none; then all members are nullptr.
  using Find = FunctionRef<void*(const char* name)>;
  std::string find_pool_functions(const Find& find);
  std::string lacks_for_pools;  // what load() found so

  // Status::call and the name that the driver has for the error.
  [[nodiscard]] Status status(CUresult result, const char* call) const;
  [[nodiscard]] const char* error_name(CUresult result) const;

#define VMM_CUDA_MEMBER(function) decltype(&::function) function = nullptr;
  VMM_CUDA_FUNCTIONS(VMM_CUDA_MEMBER)
  VMM_CUDA_POOL_FUNCTIONS(VMM_CUDA_MEMBER)
#undef VMM_CUDA_MEMBER
};

// While some thread captures a graph in global mode, CUDA refuses calls that may
// wait (cuEventQuery is one) on every thread, and ends that capture. Our calls
// never touch a capturing stream, so they cannot hurt a graph: for its lifetime
// this guard says so for the calling thread.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const CudaApi& api) : api_(api) { exchange(); }
  ~RelaxedCapture() { exchange(); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  // Swaps the mode with the thread's: the first call sets ours and keeps the
  // thread's own, the second gives it back.
  void exchange() { api_.status(api_.cuThreadExchangeStreamCaptureMode(&mode_), "capture mode").ignore(); }

  const CudaApi& api_;
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

}  // namespace vmm
