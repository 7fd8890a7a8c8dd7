// Memory of a torch.cuda.MemPool that was made with another allocator (NCCL's, say):
// that allocator as a provider of segments.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>

#include <memory>

#include "core/device/private_pools.h"
#include "core/pool/region_id.h"

namespace vmm {

// What the MemPool `region` has on the device. Throws as Runtime::room() does.
std::shared_ptr<ForeignMemory> memory_provided_by(
    std::shared_ptr<c10::cuda::CUDACachingAllocator::CUDAAllocator> allocator, int device, RegionId region);

// The calling thread asks such an allocator for a segment, or gives it one back. Where that calls
// this one's own C functions they are not to ask the MemPool again.
[[nodiscard]] bool is_asking_provider();

}  // namespace vmm
