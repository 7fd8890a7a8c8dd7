// Making tensors' pages read-only by the device's own protection, and writable again.
#pragma once

#include <vector>

#include "core/device/device_memory.h"
#include "core/faces/tensor_alias.h"
#include "core/pool/pool.h"

namespace vmm {

// From now on a write to any page under `pieces` faults, until unseal_pages(). All or
// none. Waits for queued work, which may be writing. Throws InvalidArgumentError for
// what is not `model`'s or shares its chunks with other memory: it is explicit pages of
// one tensor's addresses (TensorRange), or what was made under a tag, all of it in the
// chunks concerned.
void seal_pages(DeviceMemory& memory, const Pool& model, const std::vector<AliasedPiece>& pieces);
// Writable again, part by part. Throws as seal_pages(), and DriverError with those
// before the failure writable.
void unseal_pages(DeviceMemory& memory, const Pool& model, const std::vector<AliasedPiece>& pieces);

}  // namespace vmm
