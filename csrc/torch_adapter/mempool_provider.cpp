#include "torch_adapter/mempool_provider.h"

#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <exception>
#include <string>
#include <utility>

#include "core/device/provided_memory.h"
#include "core/device/segment_provider.h"
#include "process/runtime.h"
#include "torch_adapter/errors.h"

namespace vmm {

namespace {

using Allocator = c10::cuda::CUDACachingAllocator::CUDAAllocator;

thread_local int asks = 0;  // deep

struct Asking {
  Asking() { ++asks; }
  ~Asking() { --asks; }
  Asking(const Asking&) = delete;
  Asking& operator=(const Asking&) = delete;
};

class MempoolProvider final : public SegmentProvider {
 public:
  MempoolProvider(std::shared_ptr<Allocator> allocator, int device)
      : allocator_(std::move(allocator)), device_(static_cast<c10::DeviceIndex>(device)) {}

  Address take(std::size_t bytes, std::string* words) override {
    const Asking asking;
    try {
      const c10::cuda::CUDAGuard guard(device_);
      c10::cuda::CUDAStreamCaptureModeGuard relaxed{cudaStreamCaptureModeRelaxed};
      if (void* segment = allocator_->raw_alloc(bytes); segment != nullptr) return reinterpret_cast<Address>(segment);
    } catch (const std::exception& error) {
      *words = error.what();
    } catch (...) {  // NOLINT(bugprone-empty-catch): that is how some say that they have none
    }
    (void)cudaGetLastError();  // the next kernel would be blamed for it
    return 0;
  }
  void give_back(Address segment) override {
    const Asking asking;
    const c10::cuda::CUDAGuard guard(device_);
    allocator_->raw_delete(reinterpret_cast<void*>(segment));
  }

 private:
  const std::shared_ptr<Allocator> allocator_;
  const c10::DeviceIndex device_;
};

}  // namespace

bool is_asking_provider() { return asks != 0; }

std::shared_ptr<ForeignMemory> memory_provided_by(std::shared_ptr<Allocator> allocator, int device, RegionId region) {
  DeviceMemory& memory = Runtime::room(DeviceKind::cuda, device).memory;
  return std::make_shared<ProvidedMemory>(memory, region,
                                          std::make_unique<MempoolProvider>(std::move(allocator), device),
                                          static_cast<ProvidedMemory::Report>(&report_swallowed));
}

}  // namespace vmm
