// libcuda's entry points: memory that stands somewhere. Work on it is in
// entry_streams.cpp.
#include <cuda.h>

#include <cstring>

#include "captures.h"
#include "machine.h"
#include "memory.h"
#include "queue.h"

namespace {

using namespace standin;  // NOLINT(google-build-using-namespace)

Memory& memory() { return Memory::instance(); }

// For calls that a capture does not allow beside it.
CUresult refuse_beside_captures() {
  const Lock lock(world().mutex);
  return refuse_unsafe();
}

// cudaFree and its kind wait for the device.
void finish(int device) {
  Lock lock(world().mutex);
  wait_for_device(lock, device);
}

}  // namespace

extern "C" {

// -- Virtual memory. None of these calls disturbs a capture or waits.

CUresult cuMemGetAllocationGranularity(std::size_t* bytes, const CUmemAllocationProp* /*how*/,
                                       CUmemAllocationGranularity_flags /*which*/) {
  STANDIN_ENTER(Needs::init);
  *bytes = Memory::kGranularity;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr* out, std::size_t size, std::size_t alignment, CUdeviceptr /*hint*/,
                             unsigned long long flags) {
  STANDIN_ENTER(Needs::init);
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  return memory().reserve(size, alignment, out);
}

CUresult cuMemAddressFree(CUdeviceptr address, std::size_t size) {
  STANDIN_ENTER(Needs::init);
  return memory().unreserve(address, size);
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* out, std::size_t size, const CUmemAllocationProp* how,
                     unsigned long long flags) {
  STANDIN_ENTER(Needs::init);
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  return memory().create(size, *how, out);
}

CUresult cuMemRelease(CUmemGenericAllocationHandle chunk) {
  STANDIN_ENTER(Needs::init);
  return memory().release(chunk);
}

CUresult cuMemMap(CUdeviceptr address, std::size_t size, std::size_t offset, CUmemGenericAllocationHandle chunk,
                  unsigned long long flags) {
  STANDIN_ENTER(Needs::init);
  if (offset != 0 || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  return memory().map(address, size, chunk);
}

CUresult cuMemUnmap(CUdeviceptr address, std::size_t size) {
  STANDIN_ENTER(Needs::init);
  return memory().unmap(address, size);
}

CUresult cuMemSetAccess(CUdeviceptr address, std::size_t size, const CUmemAccessDesc* rights, std::size_t count) {
  STANDIN_ENTER(Needs::init);
  for (std::size_t k = 0; k < count; ++k) {
    if (const CUresult set = memory().set_access(address, size, rights[k]); set != CUDA_SUCCESS) return set;
  }
  return CUDA_SUCCESS;
}

CUresult cuMemExportToShareableHandle(void* out, CUmemGenericAllocationHandle chunk, CUmemAllocationHandleType kind,
                                      unsigned long long /*flags*/) {
  STANDIN_ENTER(Needs::init);
  if (kind != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
  return memory().export_chunk(chunk, static_cast<int*>(out));
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* out, void* handle,
                                        CUmemAllocationHandleType kind) {
  STANDIN_ENTER(Needs::context);
  if (kind != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
  return memory().import_chunk(current_device(), static_cast<int>(reinterpret_cast<std::intptr_t>(handle)), out);
}

CUresult cuMemGetInfo(std::size_t* free, std::size_t* total) {
  STANDIN_ENTER(Needs::context);
  return memory().info(current_device(), free, total);
}

// -- Blocks.

CUresult cuMemAlloc(CUdeviceptr* out, std::size_t size) {
  STANDIN_ENTER(Needs::context);
  if (const CUresult refused = refuse_beside_captures(); refused != CUDA_SUCCESS) return refused;
  return memory().allocate(current_device(), size, out);
}

CUresult cuMemFree(CUdeviceptr block) {
  STANDIN_ENTER(Needs::context);
  if (block == 0) return CUDA_SUCCESS;
  if (const CUresult refused = refuse_beside_captures(); refused != CUDA_SUCCESS) return refused;
  if (const int device = memory().device_of_block(block); device >= 0) finish(device);
  return memory().free(block);
}

CUresult cuIpcGetMemHandle(CUipcMemHandle* out, CUdeviceptr inside) {
  STANDIN_ENTER(Needs::context);
  return memory().share_block(inside, out);
}

CUresult cuIpcOpenMemHandle(CUdeviceptr* out, CUipcMemHandle handle, unsigned /*flags*/) {
  STANDIN_ENTER(Needs::context);
  if (const CUresult refused = refuse_beside_captures(); refused != CUDA_SUCCESS) return refused;
  return memory().open_block(current_device(), handle, out);
}

CUresult cuIpcCloseMemHandle(CUdeviceptr block) {
  STANDIN_ENTER(Needs::context);
  if (const int device = memory().device_of_block(block); device >= 0) finish(device);
  return memory().close_block(block);
}

// -- Host memory.

CUresult cuMemHostAlloc(void** out, std::size_t size, unsigned /*flags*/) {
  STANDIN_ENTER(Needs::context);
  if (const CUresult refused = refuse_beside_captures(); refused != CUDA_SUCCESS) return refused;
  return memory().allocate_host(size, out);
}

CUresult cuMemFreeHost(void* block) {
  STANDIN_ENTER(Needs::context);
  if (const CUresult refused = refuse_beside_captures(); refused != CUDA_SUCCESS) return refused;
  for (int device = 0; device < device_count(); ++device) finish(device);
  return memory().free_host(block);
}

CUresult cuMemHostRegister(void* address, std::size_t size, unsigned /*flags*/) {
  STANDIN_ENTER(Needs::context);
  return memory().pin(address, size);
}

CUresult cuMemHostUnregister(void* address) {
  STANDIN_ENTER(Needs::context);
  return memory().unpin(address);
}

CUresult cuPointerGetAttribute(void* out, CUpointer_attribute which, CUdeviceptr address) {
  STANDIN_ENTER(Needs::init);
  const Memory::Place place = memory().place_of(address);
  if (place.kind == Kind::host) return CUDA_ERROR_INVALID_VALUE;
  switch (which) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      *static_cast<CUcontext*>(out) = primary_context(place.device);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *static_cast<unsigned*>(out) = place.kind == Kind::device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      *static_cast<int*>(out) = place.device;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      *static_cast<CUdeviceptr*>(out) = place.base;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      *static_cast<std::size_t*>(out) = place.size;
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_NOT_SUPPORTED;
  }
}

}  // extern "C"
