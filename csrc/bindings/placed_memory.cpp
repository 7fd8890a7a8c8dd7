// _C.PlacedMemory: the memory of one tensor over several devices'.
#include "core/faces/placed_memory.h"

#include <pybind11/stl.h>

#include <tuple>

#include "base/errors.h"
#include "bindings/bind.h"
#include "bindings/tensor_view.h"

namespace vmm::bindings {

namespace {

using PlacedPtr = std::shared_ptr<PlacedMemory>;
using Shares = std::vector<std::tuple<std::shared_ptr<Pool>, std::size_t, std::uintptr_t>>;  // pool, bytes, stream

PlacedPtr make_placed(const Shares& shares) {
  // Not by a call guard: an object is entered into pybind's tables under the GIL.
  const GilReleased released;
  Runtime::require_own_process();
  std::vector<PlacedShare> placed;
  placed.reserve(shares.size());
  for (const auto& [pool, size, stream] : shares) placed.push_back({pool, size, to_stream(stream)});
  return destroyed_without_gil(std::make_unique<PlacedMemory>(placed));
}

py::object tensor_over(const PlacedPtr& self, const std::vector<std::int64_t>& shape, py::handle dtype,
                       const std::string& kind, int ordinal) {
  Runtime::require_own_process();
  DeviceRoom& room = to_room(kind, ordinal);
  if (!self->is_on(room.memory)) {
    throw InvalidArgumentError("the tensor has no share on " + kind + ":" + std::to_string(ordinal));
  }
  const std::size_t bytes = tensor_bytes(shape, dtype);
  if (bytes > self->size()) throw InvalidRangeError(0, bytes, self->size(), "a tensor beyond the end of its addresses");
  return make_tensor_of_pages(self->base(), shape, dtype, room, self);
}

}  // namespace

void bind_placed_memory(py::module_& module) {
  py::class_<PlacedMemory, PlacedPtr>(module, "PlacedMemory")
      .def(py::init(&make_placed), py::arg("shares"))
      .def_property_readonly("base_address", &PlacedMemory::base)
      .def_property_readonly("size", &PlacedMemory::size)
      .def("tensor", &tensor_over, py::arg("shape"), py::arg("dtype"), py::arg("kind"), py::arg("ordinal"));
}

}  // namespace vmm::bindings
