// The one file that needs torch's Python headers.
#include "bindings/tensor_view.h"

#include <ATen/Context.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/device_lazy_init.h>

#include <utility>

#include "base/errors.h"
#include "torch_adapter/torch_kinds.h"

namespace vmm::bindings {

namespace {

at::ScalarType to_scalar_type(py::handle dtype) {
  if (!THPDtype_Check(dtype.ptr())) {
    throw InvalidArgumentError("dtype " + std::string(py::repr(dtype)) + ": give a torch.dtype");
  }
  const at::ScalarType type = reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
  // A quantized tensor is nothing without its scale and zero point; torch
  // crashes on one that has none.
  if (c10::isQIntType(type)) {
    throw InvalidArgumentError("dtype " + std::string(py::repr(dtype)) +
                               ": a view of memory has no scale and no zero point; take the integers underneath, "
                               "torch.uint8, torch.int8 or torch.int32");
  }
  return type;
}

}  // namespace

void initialize_torch(const DeviceRoom& room) {
  const c10::DeviceType type = torch_kind(room.kind).type;
  if (type == c10::kCPU) return;
  const py::gil_scoped_acquire gil;
  try {
    torch::utils::device_lazy_init(type);
  } catch (python_error& error) {
    error.restore();  // where it is not still Python's
    throw py::error_already_set();
  }
  at::globalContext().lazyInitDevice(type);  // under a FakeTensorMode that did nothing
}

void warn_in_python(FunctionRef<void()> work) {
  try {
    torch::PyWarningHandler handler;
    try {
      work();
    } catch (...) {
      handler.set_in_exception();
      throw;
    }
  } catch (python_error& error) {
    error.restore();
    throw py::error_already_set();
  }
}

std::size_t tensor_bytes(const std::vector<std::int64_t>& shape, py::handle dtype) {
  std::size_t bytes = c10::elementSize(to_scalar_type(dtype));
  for (const std::int64_t size : shape) {
    if (size < 0) throw InvalidArgumentError("shape: a size of " + std::to_string(size));
    if (__builtin_mul_overflow(bytes, static_cast<std::size_t>(size), &bytes)) {
      throw InvalidArgumentError("shape: more bytes than there are addresses");
    }
  }
  return bytes;
}

py::object make_tensor(Address address, const std::vector<std::int64_t>& shape, py::handle dtype,
                       const DeviceRoom& room, std::shared_ptr<void> owner) {
  const at::ScalarType type = to_scalar_type(dtype);
  if (address % c10::elementSize(type) != 0) {
    throw InvalidArgumentError("offset: " + format_hex(address) + " is not aligned to the dtype's " +
                               std::to_string(c10::elementSize(type)) + " bytes");
  }
  initialize_torch(room);
  const c10::Device device = torch_device(room.kind, room.ordinal);
  // Holding it in the deleter is all that keeps the owner.
  auto keep = [owner = std::move(owner)](void*) {};
  // With the device given torch need not ask CUDA where the pointer lives.
  at::Tensor tensor = at::for_blob(reinterpret_cast<void*>(address), shape)
                          .deleter(std::move(keep))
                          .options(at::TensorOptions().dtype(type).device(device))
                          .target_device(device)
                          .make_tensor();
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(tensor)));
}

py::object make_tensor_of_pages(Address address, const std::vector<std::int64_t>& shape, py::handle dtype,
                                DeviceRoom& room, std::shared_ptr<void> owner) {
  if (room.private_pools.any_route()) {
    room.private_pools.keep_for_capture(current_stream(room.kind, room.ordinal), owner);
  }
  return make_tensor(address, shape, dtype, room, std::move(owner));
}

void set_storage_bytes(py::handle tensor, std::size_t size) {
  if (!THPVariable_Check(tensor.ptr())) throw InvalidArgumentError("set_storage_bytes: give a tensor");
  THPVariable_Unpack(tensor.ptr()).storage().unsafeGetStorageImpl()->set_nbytes(size);
}

namespace {

void drop(void* held) { delete static_cast<HeldMemory*>(held); }

}  // namespace

HeldMemory hold_memory(py::handle tensor) {
  if (!THPVariable_Check(tensor.ptr())) throw InvalidArgumentError("hold_memory: give a tensor");
  c10::DataPtr& data = THPVariable_Unpack(tensor.ptr()).storage().unsafeGetStorageImpl()->mutable_data_ptr();
  if (data.get_deleter() == &drop) return *static_cast<HeldMemory*>(data.get_context());
  auto held = std::make_shared<c10::DataPtr>();
  auto in_storage = std::make_unique<HeldMemory>(held);
  // The address stays what it is throughout: other threads may read it.
  void* const address = data.get();
  const c10::Device device = data.device();
  *held = std::move(data);
  data = c10::DataPtr(address, in_storage.release(), &drop, device);
  return held;
}

void share_version(py::handle tensor, py::handle source) {
  for (const py::handle each : {tensor, source}) {
    if (!THPVariable_Check(each.ptr())) throw InvalidArgumentError("share_version: give tensors");
  }
  const at::Tensor& counted = THPVariable_Unpack(source.ptr());
  if (counted.is_inference()) return;
  THPVariable_Unpack(tensor.ptr())
      .unsafeGetTensorImpl()
      ->set_version_counter(counted.unsafeGetTensorImpl()->version_counter());
}

}  // namespace vmm::bindings
