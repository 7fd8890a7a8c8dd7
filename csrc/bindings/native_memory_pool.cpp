// _C.NativeMemoryPool.
#include "core/faces/native_memory_pool.h"

#include <pybind11/stl.h>

#include <array>

#include "bindings/bind.h"
#include "bindings/numbers.h"
#include "core/numbers/stats.h"
#include "torch_adapter/errors.h"

namespace vmm::bindings {

namespace {

struct Native {
  Native(DeviceRoom& room, std::size_t max_bytes)
      : ordinal(room.ordinal),
        pool(room.memory.driver(), room.ordinal, max_bytes, static_cast<NativeMemoryPool::Report>(&report_swallowed)) {}

  [[nodiscard]] NativeMemoryPool& here() {
    Runtime::require_own_process();
    return pool;
  }

  const int ordinal;
  NativeMemoryPool pool;
};

std::shared_ptr<Native> make_native(const std::string& kind, int ordinal, std::size_t max_bytes) {
  const GilReleased released;
  return destroyed_without_gil(std::make_unique<Native>(to_room(kind, ordinal), max_bytes));
}

// The same without Python, for loops in C++: `functions` has their addresses.
void* allocate_natively(void* pool, std::size_t bytes, void* stream) {
  Runtime::require_own_process();
  return reinterpret_cast<void*>(static_cast<NativeMemoryPool*>(pool)->allocate(bytes, stream));
}
void free_natively(void* pool, void* address, void* stream) {
  Runtime::require_own_process();
  static_cast<NativeMemoryPool*>(pool)->free(reinterpret_cast<Address>(address), stream);
}

// Here, as the driver's room knows no names of Python's.
constexpr std::array<FieldRow<NativePoolUsage>, 4> kUsageFields = {
    {{"used_bytes", &NativePoolUsage::used},
     {"peak_used_bytes", &NativePoolUsage::used_peak},
     {"reserved_bytes", &NativePoolUsage::reserved},
     {"peak_reserved_bytes", &NativePoolUsage::reserved_peak}}};
static_assert(every_field_has_its_row(kUsageFields));

}  // namespace

void bind_native_memory_pool(py::module_& module) {
  py::class_<Native, std::shared_ptr<Native>>(module, "NativeMemoryPool")
      .def(py::init(&make_native), py::arg("kind"), py::arg("ordinal"), py::arg("max_bytes"))
      .def_property_readonly("is_destroyed", [](const Native& self) { return self.pool.is_destroyed(); })
      .def_property_readonly("max_bytes", [](const Native& self) { return self.pool.max_bytes(); })
      .def_property_readonly("raw", [](Native& self) { return self.here().raw(); })
      .def_property_readonly_static("destructor_failures",
                                    [](const py::object& /*cls*/) { return NativeMemoryPool::failures(); })
      .def(
          "allocate",
          [](Native& self, std::size_t bytes, std::optional<std::uintptr_t> stream) {
            const Stream on = to_stream(stream, DeviceKind::cuda, self.ordinal);
            const GilReleased released;
            return self.here().allocate(bytes, on);
          },
          py::arg("bytes"), py::arg("stream") = py::none())
      .def(
          "free",
          [](Native& self, Address address, std::optional<std::uintptr_t> stream) {
            const Stream on = to_stream(stream, DeviceKind::cuda, self.ordinal);
            const GilReleased released;
            self.here().free(address, on);
          },
          py::arg("address"), py::arg("stream") = py::none())
      .def_property_readonly("functions",
                             [](Native& self) {
                               return py::make_tuple(reinterpret_cast<std::uintptr_t>(&self.here()),
                                                     reinterpret_cast<std::uintptr_t>(&allocate_natively),
                                                     reinterpret_cast<std::uintptr_t>(&free_natively));
                             })
      .def(
          "destroy", [](Native& self, bool force) { self.here().destroy(force); }, py::arg("force") = false,
          WithoutGil())
      .def("stats",
           [](Native& self) {
             NativePoolUsage usage;
             {
               const GilReleased released;
               usage = self.here().usage();
             }
             return to_dict(usage, kUsageFields);
           })
      .def(
          "trim", [](Native& self, std::size_t keep) { return self.here().trim(keep); }, py::arg("keep"), WithoutGil())
      .def(
          "set_release_threshold", [](Native& self, std::size_t bytes) { self.here().set_release_threshold(bytes); },
          py::arg("bytes"), WithoutGil())
      .def(
          "release_threshold", [](Native& self) { return self.here().release_threshold(); }, WithoutGil());
}

}  // namespace vmm::bindings
