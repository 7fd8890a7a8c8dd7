// What libcudart keeps on top of the driver: each thread's last error and
// device. Its entry points are thin: they make the device's primary context
// current, call the driver of the stand-in, and pass its answer on (the codes
// of both are the same numbers).
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace standin {

// The driver's answer as the runtime's; kept as the thread's last error.
cudaError_t answer(CUresult result);
cudaError_t last_error(bool forget);

// cuInit(), and what goes with its first success.
CUresult initialise();

// Counts the call; an injected failure, or success.
CUresult begin_call(const char* name);
// The same, with the primary context of the thread's device current.
CUresult begin_call_on_device(const char* name);

cudaError_t use_device(int device);
cudaError_t device_in_use(int* device);

// For what is not there: says so on stderr, by name.
cudaError_t refuse_call(const char* name, const char* which = "");

}  // namespace standin

// NOLINTBEGIN(cppcoreguidelines-macro-usage): they return from the entry point
#define STANDIN_BEGIN(begin) \
  if (const CUresult refused = ::standin::begin(__func__); refused != CUDA_SUCCESS) return ::standin::answer(refused)
#define STANDIN_CALL() STANDIN_BEGIN(begin_call)
#define STANDIN_CALL_ON_DEVICE() STANDIN_BEGIN(begin_call_on_device)
// NOLINTEND(cppcoreguidelines-macro-usage)
