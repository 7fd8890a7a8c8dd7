// Becoming torch's CUDA allocator.
#pragma once

namespace vmm {

// Idempotent. NotAvailableError when there is no usable GPU, or when CUDA has
// been initialised in this process with another allocator: tensors may exist
// that only that one can free.
void enable_cuda();

}  // namespace vmm
