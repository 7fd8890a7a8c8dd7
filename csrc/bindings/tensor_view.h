// torch tensors over memory that is somebody else's.
#pragma once

#include <c10/core/Allocator.h>

#include <memory>
#include <vector>

#include "base/function_ref.h"
#include "bindings/bind.h"

namespace vmm::bindings {

// What torch's own first tensor does, for the first memory of a GPU that is ours: seeds
// and other calls that torch.cuda has kept until then are done, and it counts as
// initialized. Throws what torch does, in a forked child too. Nothing on the CPU.
// REQUIRES: no lock is held. With the GIL or without.
void initialize_torch(const DeviceRoom& room);

// Bytes that a contiguous tensor of this shape and dtype covers. Throws
// InvalidArgumentError: no dtype, a negative size, more bytes than there are.
std::size_t tensor_bytes(const std::vector<std::int64_t>& shape, py::handle dtype);

// A contiguous tensor at `address`, which must be aligned to the dtype
// (InvalidArgumentError). `owner` lives as long as the tensor's storage.
py::object make_tensor(Address address, const std::vector<std::int64_t>& shape, py::handle dtype,
                       const DeviceRoom& room, std::shared_ptr<void> owner);

// The same for an owner of addresses of their own. One that is made while a CUDA graph is
// being captured on the current stream is that graph's, as torch's own blocks are: it lives
// as long as the graph's memory, for each replay uses it. REQUIRES: the GIL.
py::object make_tensor_of_pages(Address address, const std::vector<std::int64_t>& shape, py::handle dtype,
                                DeviceRoom& room, std::shared_ptr<void> owner);

// The storage of `tensor`, one of make_tensor()'s, ends after `size` bytes from now
// on, for all of its views: what is copied or saved whole is no more than that.
void set_storage_bytes(py::handle tensor, std::size_t size);

// Runs `work` as torch runs its own functions: a warning of it is Python's, and may be an error.
void warn_in_python(FunctionRef<void()> work);

// The memory that `tensor` stands on now, also where its storage takes other memory later, by
// resize_() or share_memory_(): it is freed when the last of the storage and all who hold it
// like this has let go of it.
using HeldMemory = std::shared_ptr<c10::DataPtr>;
[[nodiscard]] HeldMemory hold_memory(py::handle tensor);

// What is written in place through `tensor` or `source` counts in both from now on, as for
// a tensor and its view, so that autograd notices. Nobody counts what is written to a
// tensor of inference mode: where `source` is one nothing changes.
void share_version(py::handle tensor, py::handle source);

}  // namespace vmm::bindings
