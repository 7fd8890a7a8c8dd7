#include "torch_adapter/cuda_callbacks.h"

#include "process/device_kind.h"

namespace vmm {

namespace {

// When the library is loaded: before anybody can ask for a device.
[[maybe_unused]] const bool kRegistered = [] {
  set_hooks(DeviceKind::cuda, {&cuda_capture_hooks, &cuda_stream_census, &run_cuda_free_memory_callbacks,
                               &tell_cuda_out_of_memory, &watch_cuda_memory});
  return true;
}();

}  // namespace

}  // namespace vmm
