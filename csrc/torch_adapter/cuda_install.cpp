#include "torch_adapter/cuda_install.h"

#include <c10/core/Allocator.h>

#include <string>

#include "base/errors.h"
#include "base/units.h"
#include "driver/cuda_driver.h"
#include "torch_adapter/cuda_allocator.h"

namespace vmm {

namespace {

// Bytes in tensors of the allocator that is in place, as far as it says.
std::string in_use_by(cca::CUDAAllocator& allocator) {
  try {
    const auto stats = allocator.getDeviceStats(0);
    return ", which holds " + format_bytes(static_cast<std::size_t>(stats.allocated_bytes[0].current)) +
           " for tensors on device 0";
  } catch (const c10::Error&) {
    return "";  // a plain pluggable allocator does not know
  }
}

void refuse_if_initialised() {
  cca::CUDAAllocator& present = *cca::get();
  if (!present.initialized()) return;
  throw NotAvailableError(
      "CUDA is already initialised in this process with torch's allocator '" + present.name() + "'" +
      in_use_by(present) +
      ", and torch cannot change allocators after that. Call torch_vmm.enable() first: right after the imports, before "
      "the first CUDA tensor, torch.cuda.current_device(), torch.cuda.get_device_properties(), seeding, and before "
      "importing libraries that do such things themselves.");
}

// Which devices there are is asked when torch first uses one, as torch does:
// cuInit() here would bind CUDA to this process and to CUDA_VISIBLE_DEVICES as
// it is now, where programs fork, or choose a device, after this.
void require_a_driver() {
  std::string why_not;
  if (!CudaDriver::is_installed(&why_not)) throw NotAvailableError("no CUDA device can be used: " + why_not);
}

}  // namespace

void enable_cuda() {
  Runtime::require_own_process();
  const auto& ours = CudaAllocator::instance();
  if (!CudaAllocator::is_current()) {
    refuse_if_initialised();
    require_a_driver();
    torch::cuda::CUDAPluggableAllocator::changeCurrentAllocator(ours);
  }
  // The swap does not tell the registry that torch.accelerator reads.
  c10::SetAllocator(c10::kCUDA, ours.get(), 0);
}

}  // namespace vmm
