// What the stand-in does not have says its name on stderr, and is not supported.
#include <cuda.h>

#include <cstdio>

extern "C" {

// For what missing_calls.py writes.
int refuse_missing_call(const char* name) {
  std::fprintf(stderr, "CUDA stand-in: there is no %s here\n", name);
  return CUDA_ERROR_NOT_SUPPORTED;
}

// What torch looks up by name before it uses any of it (c10/cuda/driver_api.h).
CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* /*out*/, void* /*address*/) {
  return static_cast<CUresult>(refuse_missing_call(__func__));
}
CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* /*out*/, CUmemGenericAllocationHandle /*chunk*/) {
  return static_cast<CUresult>(refuse_missing_call(__func__));
}
CUresult cuStreamWriteValue32(CUstream /*stream*/, CUdeviceptr /*address*/, cuuint32_t /*value*/, unsigned /*flags*/) {
  return static_cast<CUresult>(refuse_missing_call(__func__));
}

}  // extern "C"
