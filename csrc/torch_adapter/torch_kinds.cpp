#include "torch_adapter/torch_kinds.h"

#include <array>

#include "torch_adapter/cuda_allocator.h"
#include "torch_adapter/host_allocator.h"

namespace vmm {

namespace {

// A MemPool shares the object that it was given, and so does whoever is about to make one.
bool is_cuda_held() { return CudaAllocator::instance().use_count() > 1; }

constexpr std::array<TorchKind, kDeviceKinds.size()> kTorchKinds = {{
    {c10::kCUDA, /*is_numbered=*/true, "GPU", "torch_vmm.enable()",
     " first: right after the imports, before CUDA is used", &CudaAllocator::is_current, &is_cuda_held},
    {c10::kCPU, /*is_numbered=*/false, "The host", "torch_vmm.enable(\"cpu\")", " first", &HostAllocator::is_enabled,
     nullptr},
}};
static_assert(kTorchKinds.back().is_enabled != nullptr, "each kind has its row");

}  // namespace

const TorchKind& torch_kind(DeviceKind kind) { return kTorchKinds.at(index_of(kind)); }

}  // namespace vmm
