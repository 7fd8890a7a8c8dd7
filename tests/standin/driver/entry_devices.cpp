// libcuda's entry points: initialisation, devices, contexts, errors.
#include <cuda.h>
#include <dlfcn.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <string_view>

#include "captures.h"
#include "machine.h"
#include "memory.h"
#include "queue.h"

namespace standin {
namespace {

constexpr int kVersion = CUDA_VERSION;

struct ErrorText {
  const char* name;
  const char* text;
};

// The ones that the stand-in answers, or that tests inject; torch's texts quote them.
const std::map<CUresult, ErrorText>& errors() {
  static const auto* const kErrors = new std::map<CUresult, ErrorText>{
      {CUDA_SUCCESS, {"CUDA_SUCCESS", "no error"}},
      {CUDA_ERROR_INVALID_VALUE, {"CUDA_ERROR_INVALID_VALUE", "invalid argument"}},
      {CUDA_ERROR_OUT_OF_MEMORY, {"CUDA_ERROR_OUT_OF_MEMORY", "out of memory"}},
      {CUDA_ERROR_NOT_INITIALIZED, {"CUDA_ERROR_NOT_INITIALIZED", "initialization error"}},
      {CUDA_ERROR_DEINITIALIZED, {"CUDA_ERROR_DEINITIALIZED", "driver shutting down"}},
      {CUDA_ERROR_NO_DEVICE, {"CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"}},
      {CUDA_ERROR_INVALID_DEVICE, {"CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"}},
      {CUDA_ERROR_INVALID_CONTEXT, {"CUDA_ERROR_INVALID_CONTEXT", "invalid device context"}},
      {CUDA_ERROR_INVALID_HANDLE, {"CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"}},
      {CUDA_ERROR_ILLEGAL_STATE,
       {"CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"}},
      {CUDA_ERROR_NOT_FOUND, {"CUDA_ERROR_NOT_FOUND", "named symbol not found"}},
      {CUDA_ERROR_NOT_READY, {"CUDA_ERROR_NOT_READY", "device not ready"}},
      {CUDA_ERROR_ILLEGAL_ADDRESS, {"CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"}},
      {CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED,
       {"CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access is already enabled"}},
      {CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
       {"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "part or all of the requested memory range is already mapped"}},
      {CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,
       {"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "pointer does not correspond to a registered memory region"}},
      {CUDA_ERROR_NOT_SUPPORTED, {"CUDA_ERROR_NOT_SUPPORTED", "operation not supported"}},
      {CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
       {"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"}},
      {CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
       {"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture"}},
      {CUDA_ERROR_STREAM_CAPTURE_MERGE,
       {"CUDA_ERROR_STREAM_CAPTURE_MERGE", "operation would result in a merge of separate capture sequences"}},
      {CUDA_ERROR_STREAM_CAPTURE_UNMATCHED,
       {"CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "capture was not ended in the same stream as it began"}},
      {CUDA_ERROR_STREAM_CAPTURE_UNJOINED,
       {"CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "capturing stream has unjoined work"}},
      {CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
       {"CUDA_ERROR_STREAM_CAPTURE_ISOLATION", "dependency created on uncaptured work in another stream"}},
      {CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
       {"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
        "operation would make the legacy stream depend on a capturing blocking stream"}},
      {CUDA_ERROR_CAPTURED_EVENT,
       {"CUDA_ERROR_CAPTURED_EVENT", "operation not permitted on an event last recorded in a capturing stream"}},
      {CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD,
       {"CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
        "attempt to terminate a thread-local capture sequence from another thread"}},
      {CUDA_ERROR_UNKNOWN, {"CUDA_ERROR_UNKNOWN", "unknown error"}},
  };
  return *kErrors;
}

int attribute(CUdevice_attribute which) {
  switch (which) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      return 9;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      return 4;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
      return 32;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
      return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR:
      return 2048;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
    case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
      return 1;
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
      return has_memory_pools() ? 1 : 0;
    default:
      return 0;
  }
}

}  // namespace
}  // namespace standin

using namespace standin;  // NOLINT(google-build-using-namespace): entry points cannot live in it

extern "C" {

CUresult cuInit(unsigned /*flags*/) {
  STANDIN_ENTER(Needs::nothing);
  return initialise();
}

CUresult cuDriverGetVersion(int* version) {
  *version = kVersion;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char** out) {
  const auto found = errors().find(error);
  *out = found == errors().end() ? nullptr : found->second.name;
  return *out == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char** out) {
  const auto found = errors().find(error);
  *out = found == errors().end() ? nullptr : found->second.text;
  return *out == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

// There is one version of each function: the one that cuda.h names.
CUresult cuGetProcAddress(const char* symbol, void** out, int /*version*/, cuuint64_t /*flags*/,
                          CUdriverProcAddressQueryResult* result) {
  *out = nullptr;
  static void* const kSelf = ::dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  for (const char* const suffix : {"", "_v2", "_v3", "_v4"}) {
    if (*out == nullptr) *out = ::dlsym(kSelf, (symbol + std::string(suffix)).c_str());
  }
  if (result != nullptr) {
    *result = *out == nullptr ? CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND : CU_GET_PROC_ADDRESS_SUCCESS;
  }
  return *out == nullptr ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}

// -- Devices.

CUresult cuDeviceGetCount(int* count) {
  STANDIN_ENTER(Needs::init);
  *count = device_count();
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  STANDIN_ENTER(Needs::init);
  if (!has_device(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char* name, int size, CUdevice device) {
  STANDIN_ENTER(Needs::init);
  if (!has_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  (void)std::snprintf(name, static_cast<std::size_t>(size), "CUDA stand-in %d", physical_device(device));
  return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem(std::size_t* bytes, CUdevice device) {
  STANDIN_ENTER(Needs::init);
  if (!has_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  *bytes = device_bytes();
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice device) {
  STANDIN_ENTER(Needs::init);
  if (!has_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  *value = attribute(which);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  STANDIN_ENTER(Needs::init);
  if (!has_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  *uuid = {};
  uuid->bytes[15] = static_cast<char>(physical_device(device) + 1);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetPCIBusId(char* text, int size, CUdevice device) {
  STANDIN_ENTER(Needs::init);
  if (!has_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  (void)std::snprintf(text, static_cast<std::size_t>(size), "0000:%02X:00.0", physical_device(device) + 1);
  return CUDA_SUCCESS;
}

CUresult cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
  STANDIN_ENTER(Needs::init);
  if (!has_device(device) || !has_device(peer)) return CUDA_ERROR_INVALID_DEVICE;
  *can = device != peer ? 1 : 0;
  return CUDA_SUCCESS;
}

// -- Contexts.

CUresult cuDevicePrimaryCtxRetain(CUcontext* out, CUdevice device) {
  STANDIN_ENTER(Needs::init);
  if (!has_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  retain(device);
  *out = primary_context(device);
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
  STANDIN_ENTER(Needs::init);
  if (!has_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  return release(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  STANDIN_ENTER(Needs::init);
  if (!has_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  *flags = 0;
  *active = is_active(device) ? 1 : 0;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* out) {
  STANDIN_ENTER(Needs::init);
  *out = current_context();
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
  STANDIN_ENTER(Needs::init);
  if (context != nullptr && device_of(context) < 0) die(__func__, "to what is no context");
  set_current(context);
  return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent(CUcontext context) {
  STANDIN_ENTER(Needs::init);
  if (device_of(context) < 0) die(__func__, "of what is no context");
  push_current(context);
  return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent(CUcontext* out) {
  STANDIN_ENTER(Needs::init);
  return pop_current(out) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult cuCtxGetDevice(CUdevice* device) {
  STANDIN_ENTER(Needs::context);
  *device = current_device();
  return CUDA_SUCCESS;
}

CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  STANDIN_ENTER(Needs::context);
  *least = 0;
  *greatest = -5;
  return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize() {
  STANDIN_ENTER(Needs::context);
  Lock lock(world().mutex);
  if (const CUresult refused = refuse_any_capture(current_device()); refused != CUDA_SUCCESS) return refused;
  if (const CUresult refused = refuse_unsafe(); refused != CUDA_SUCCESS) return refused;
  wait_for_device(lock, current_device());
  return CUDA_SUCCESS;
}

CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned /*flags*/) {
  STANDIN_ENTER(Needs::context);
  if (device_of(peer) < 0) die(__func__, "to what is no context");
  if (device_of(peer) == current_device()) return CUDA_ERROR_INVALID_DEVICE;
  const bool is_new = Memory::instance().enable_peer(current_device(), device_of(peer));
  return is_new ? CUDA_SUCCESS : CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
}

}  // extern "C"
