// _C.TensorRange: the memory of one tensor whose pages come and go.
#include "core/faces/tensor_range.h"

#include <pybind11/stl.h>

#include "base/errors.h"
#include "bindings/bind.h"
#include "bindings/tensor_view.h"

namespace vmm::bindings {

namespace {

using RangePtr = std::shared_ptr<TensorRange>;
using Span = std::pair<std::size_t, std::size_t>;  // offset, size
using Spans = std::vector<Span>;

std::vector<ByteRange> to_ranges(const Spans& spans) {
  std::vector<ByteRange> ranges;
  ranges.reserve(spans.size());
  for (const auto& [offset, size] : spans) ranges.push_back({offset, size});
  return ranges;
}

// NotAvailableError in a forked child, where its locks may be held for ever.
TensorRange& here(TensorRange& range) {
  Runtime::require_own_process();
  return range;
}

RangePtr make_range(const std::shared_ptr<Pool>& pool, const std::string& what, std::size_t capacity,
                    std::optional<std::size_t> page_size, bool zeros) {
  // Not by a call guard: an object is entered into pybind's tables under the GIL.
  const GilReleased released;
  Runtime::require_own_process();
  initialize_torch(Runtime::room_of(*pool));
  DeviceMemory& memory = *pool->home();
  const TensorRangeSpec spec{what, capacity, to_page_size(page_size, memory.granularity()), zeros};
  return destroyed_without_gil(std::make_unique<TensorRange>(memory, pool, spec));
}

Spans committed(TensorRange& range, std::size_t offset, std::size_t size) {
  Spans spans;
  for (const ByteRange& span : here(range).committed({offset, size})) spans.emplace_back(span.offset, span.size);
  return spans;
}

}  // namespace

void bind_tensor_range(py::module_& module) {
  py::class_<TensorRange, RangePtr>(module, "TensorRange")
      .def(py::init(&make_range), py::arg("pool"), py::arg("what"), py::arg("capacity"),
           py::arg("page_size") = py::none(), py::arg("zeros") = false)
      .def_property_readonly("base_address", &TensorRange::base)
      .def_property_readonly("capacity", &TensorRange::capacity)
      .def_property_readonly("page_size", &TensorRange::page_size)
      .def(
          "commit",
          [](TensorRange& self, const Spans& spans, std::uintptr_t stream) {
            here(self).commit(to_ranges(spans), to_stream(stream));
          },
          py::arg("spans"), py::arg("stream") = 0, WithoutGil())
      .def(
          "decommit", [](TensorRange& self, const Spans& spans) { return here(self).decommit(to_ranges(spans)); },
          py::arg("spans"), WithoutGil())
      .def("committed", &committed, py::arg("offset"), py::arg("size"), WithoutGil())
      .def(
          "is_committed",
          [](TensorRange& self, const Spans& spans) { return here(self).is_committed(to_ranges(spans)); },
          py::arg("spans"), WithoutGil())
      .def(
          "tensor",
          [](const RangePtr& self, const std::vector<std::int64_t>& shape, py::handle dtype) {
            Runtime::require_own_process();
            const std::size_t bytes = tensor_bytes(shape, dtype);
            if (bytes > self->capacity()) {
              throw InvalidRangeError(0, bytes, self->capacity(), "a tensor beyond the end of its addresses");
            }
            return make_tensor_of_pages(self->base(), shape, dtype, Runtime::room_of(*self->part()), self);
          },
          py::arg("shape"), py::arg("dtype"));
  module.def("set_storage_bytes", &set_storage_bytes, py::arg("tensor"), py::arg("size"));
}

}  // namespace vmm::bindings
