#include "torch_adapter/current_device.h"

#include <c10/cuda/CUDAFunctions.h>

#include <atomic>

namespace vmm {

namespace {

std::atomic<const Driver*> known{nullptr};

// What torch said last, and the context that was current then; -1: nothing that lasts.
struct Seen {
  const void* context;
  c10::DeviceIndex device;
};
[[gnu::tls_model("initial-exec")]] constinit thread_local Seen seen{nullptr, -1};

// A thread without a context has set no device: that would have made it one.
[[gnu::noinline]] c10::DeviceIndex ask_torch(const Driver* driver, bool is_known, const void* context) {
  const c10::DeviceIndex device = c10::cuda::current_device();
  const bool lasts =
      is_known && driver->used_context(0) != nullptr && (context == nullptr || context == driver->used_context(device));
  if (lasts) seen = {context, device};
  return device;
}

}  // namespace

void know_contexts_of(const Driver& driver) { known.store(&driver, std::memory_order_release); }

c10::DeviceIndex current_cuda_device() {
  const Driver* const driver = known.load(std::memory_order_acquire);
  const void* context = nullptr;
  const bool is_known = driver != nullptr && driver->current_context(&context);
  if (is_known && context == seen.context && seen.device >= 0) [[likely]]
    return seen.device;
  return ask_torch(driver, is_known, context);
}

}  // namespace vmm
