#include "torch_adapter/cuda_callbacks.h"

#include "process/device_kind.h"
#include "torch_adapter/shared_by_all.h"

namespace vmm {

namespace {

// When the library is loaded: before anybody can ask for a device.
[[maybe_unused]] const bool kRegistered = [] {
  set_hooks(DeviceKind::cuda, {&cuda_capture_hooks, &cuda_stream_census, &run_cuda_free_memory_callbacks,
                               &tell_cuda_out_of_memory, &blocks_shared_by_all, &watch_cuda_memory});
  return true;
}();

}  // namespace

}  // namespace vmm
