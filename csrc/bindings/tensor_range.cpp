// _C.TensorRange: the memory of one tensor whose pages come and go.
#include "core/faces/tensor_range.h"

#include <pybind11/stl.h>

#include <algorithm>

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

// What Python has of one: its memory ends with the last tensor that shows it, whoever still
// knows of it. (A parameter keeps what it was made with when .data, .half() or .to() gives it
// other memory.)
class RangeHandle {
 public:
  explicit RangeHandle(RangePtr range)
      : unshown_(std::move(range)),
        range_(unshown_),
        base_(unshown_->base()),
        capacity_(unshown_->capacity()),
        page_size_(unshown_->page_size()) {}

  // NotAvailableError in a forked child, where its locks may be held for ever;
  // InvalidArgumentError where its last tensor has gone.
  [[nodiscard]] RangePtr here() const {
    Runtime::require_own_process();
    RangePtr range = range_.lock();
    if (range == nullptr) throw InvalidArgumentError("the tensor's memory went with the last tensor that showed it");
    return range;
  }
  // Under the GIL. Whoever has the tensor has the memory from now on.
  py::object tensor(const std::vector<std::int64_t>& shape, py::handle dtype) {
    const RangePtr range = here();
    const std::size_t bytes = tensor_bytes(shape, dtype);
    if (bytes > capacity_) throw InvalidRangeError(0, bytes, capacity_, "a tensor beyond the end of its addresses");
    py::object made = make_tensor_of_pages(base_, shape, dtype, Runtime::room_of(*range->part()), range);
    unshown_.reset();
    return made;
  }
  [[nodiscard]] bool has_gone() const { return range_.expired(); }
  // In a forked child, where nothing can be asked, nothing sleeps either.
  void require_awake() const {
    if (!Runtime::in_child()) here()->part()->require_taking();
  }
  [[nodiscard]] bool require_there(std::size_t bytes) const {
    if (Runtime::in_child()) return true;
    const RangePtr range = here();
    range->part()->require_there(base_, std::min(bytes, capacity_));
    return !range->part()->is_asleep();
  }
  [[nodiscard]] Address base() const { return base_; }
  [[nodiscard]] std::size_t capacity() const { return capacity_; }
  [[nodiscard]] std::size_t page_size() const { return page_size_; }

 private:
  RangePtr unshown_;  // until a tensor has it
  const std::weak_ptr<TensorRange> range_;
  const Address base_;
  const std::size_t capacity_;
  const std::size_t page_size_;
};

std::unique_ptr<RangeHandle> make_range(const std::shared_ptr<Pool>& pool, const std::string& what,
                                        std::size_t capacity, std::optional<std::size_t> page_size, bool zeros) {
  // Not by a call guard: an object is entered into pybind's tables under the GIL.
  const GilReleased released;
  Runtime::require_own_process();
  initialize_torch(Runtime::room_of(*pool));
  DeviceMemory& memory = *pool->home();
  const TensorRangeSpec spec{what, capacity, to_page_size(page_size, memory.granularity()), zeros};
  return std::make_unique<RangeHandle>(destroyed_without_gil(std::make_unique<TensorRange>(memory, pool, spec)));
}

Spans committed(const RangeHandle& self, std::size_t offset, std::size_t size) {
  Spans spans;
  for (const ByteRange& span : self.here()->committed({offset, size})) spans.emplace_back(span.offset, span.size);
  return spans;
}

}  // namespace

void bind_tensor_range(py::module_& module) {
  py::class_<RangeHandle>(module, "TensorRange")
      .def(py::init(&make_range), py::arg("pool"), py::arg("what"), py::arg("capacity"),
           py::arg("page_size") = py::none(), py::arg("zeros") = false)
      .def_property_readonly("base_address", &RangeHandle::base)
      .def_property_readonly("capacity", &RangeHandle::capacity)
      .def_property_readonly("page_size", &RangeHandle::page_size)
      .def_property_readonly("has_gone", &RangeHandle::has_gone)
      .def(
          "commit",
          [](const RangeHandle& self, const Spans& spans, std::uintptr_t stream) {
            self.here()->commit(to_ranges(spans), to_stream(stream));
          },
          py::arg("spans"), py::arg("stream") = 0, WithoutGil())
      .def(
          "decommit",
          [](const RangeHandle& self, const Spans& spans) { return self.here()->decommit(to_ranges(spans)); },
          py::arg("spans"), WithoutGil())
      .def("committed", &committed, py::arg("offset"), py::arg("size"), WithoutGil())
      .def(
          "is_committed",
          [](const RangeHandle& self, const Spans& spans) { return self.here()->is_committed(to_ranges(spans)); },
          py::arg("spans"), WithoutGil())
      .def("require_awake", &RangeHandle::require_awake, WithoutGil())
      .def("require_there", &RangeHandle::require_there, py::arg("size"), WithoutGil())
      .def("tensor", &RangeHandle::tensor, py::arg("shape"), py::arg("dtype"));
  module.def("set_storage_bytes", &set_storage_bytes, py::arg("tensor"), py::arg("size"));
}

}  // namespace vmm::bindings
