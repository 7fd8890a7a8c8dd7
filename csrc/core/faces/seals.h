// Making tensors' pages read-only by the device's own protection, and writable again.
#pragma once

#include <vector>

#include "core/pool/sealed_piece.h"

namespace vmm {

class DeviceMemory;
class Pool;

// From now on a write to any page under `pieces` faults, until unseal_pages(). All or
// none. Waits for queued work, which may be writing. Throws InvalidArgumentError for
// what is not `model`'s, or in chunks of which anything that lives is not among the
// pieces: they are pages of one tensor's addresses (TensorRange), or made under a tag.
void seal_pages(DeviceMemory& memory, const Pool& model, const std::vector<SealedPiece>& pieces);
// Writable again, part by part. Throws as seal_pages(), and DriverError with those
// before the failure writable.
void unseal_pages(DeviceMemory& memory, const Pool& model, const std::vector<SealedPiece>& pieces);

}  // namespace vmm
