#include "driver/cuda_api.h"

#include <dlfcn.h>

namespace vmm {

// Two steps, so that cuda.h's macros are applied before the name becomes text.
#define VMM_TEXT(name) VMM_TEXT_NOW(name)
#define VMM_TEXT_NOW(name) #name

bool CudaApi::load(std::string* why_not) {
  void* const library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const reason = ::dlerror();
    *why_not = std::string("no NVIDIA driver on this machine: ") + (reason == nullptr ? "libcuda.so.1" : reason) +
               "; install NVIDIA's, or give device=\"cpu\", which has all that is not a GPU's own";
    return false;
  }
  std::string missing;
  const auto find = [library, &missing](const char* name) {
    void* const symbol = ::dlsym(library, name);
    if (symbol == nullptr) missing += (missing.empty() ? "" : ", ") + std::string(name);
    return symbol;
  };
#define VMM_CUDA_FIND(function) this->function = reinterpret_cast<decltype(this->function)>(find(VMM_TEXT(function)));
  VMM_CUDA_FUNCTIONS(VMM_CUDA_FIND)
#undef VMM_CUDA_FIND
  lacks_for_pools = find_pool_functions([library](const char* name) { return ::dlsym(library, name); });
  if (missing.empty()) return true;
  *why_not = "the NVIDIA driver is too old, install a newer one: it lacks " + missing;
  return false;
}

std::string CudaApi::find_pool_functions(const Find& find) {
  std::string missing;
  const auto look = [&](const char* name) {
    void* const symbol = find(name);
    if (symbol == nullptr) missing += (missing.empty() ? "" : ", ") + std::string(name);
    return symbol;
  };
#define VMM_CUDA_FIND(function) this->function = reinterpret_cast<decltype(this->function)>(look(VMM_TEXT(function)));
  VMM_CUDA_POOL_FUNCTIONS(VMM_CUDA_FIND)
#undef VMM_CUDA_FIND
  if (missing.empty()) return missing;
#define VMM_CUDA_FORGET(function) this->function = nullptr;
  VMM_CUDA_POOL_FUNCTIONS(VMM_CUDA_FORGET)
#undef VMM_CUDA_FORGET
  return missing;
}

const char* CudaApi::error_name(CUresult result) const {
  const char* name = nullptr;
  if (cuGetErrorName(result, &name) != CUDA_SUCCESS || name == nullptr) return "unknown CUresult";
  return name;
}

Status CudaApi::status(CUresult result, const char* call) const {
  StatusCode code = StatusCode::driver_error;
  switch (result) {
    case CUDA_SUCCESS:
      return {};
    case CUDA_ERROR_OUT_OF_MEMORY:
      code = StatusCode::out_of_memory;
      break;
    case CUDA_ERROR_NOT_READY:
      code = StatusCode::not_ready;
      break;
    case CUDA_ERROR_INVALID_VALUE:
    case CUDA_ERROR_INVALID_HANDLE:
    case CUDA_ERROR_INVALID_DEVICE:
      code = StatusCode::invalid_argument;
      break;
    case CUDA_ERROR_NOT_SUPPORTED:
    case CUDA_ERROR_NOT_PERMITTED:
    case CUDA_ERROR_PEER_ACCESS_UNSUPPORTED:
    case CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED:
    case CUDA_ERROR_STREAM_CAPTURE_INVALIDATED:
    case CUDA_ERROR_STREAM_CAPTURE_MERGE:
    case CUDA_ERROR_STREAM_CAPTURE_UNMATCHED:
    case CUDA_ERROR_STREAM_CAPTURE_UNJOINED:
    case CUDA_ERROR_STREAM_CAPTURE_ISOLATION:
    case CUDA_ERROR_STREAM_CAPTURE_IMPLICIT:
    case CUDA_ERROR_CAPTURED_EVENT:
    case CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD:
      code = StatusCode::not_supported;
      break;
    case CUDA_ERROR_DEINITIALIZED:
    case CUDA_ERROR_CONTEXT_IS_DESTROYED:
      code = StatusCode::driver_gone;
      break;
    default:
      break;
  }
  return {code, call, static_cast<int>(result), error_name(result)};
}

}  // namespace vmm
