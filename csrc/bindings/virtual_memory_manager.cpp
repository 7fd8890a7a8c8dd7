// _C.VirtualMemoryManager and what it gives out.
#include "core/faces/virtual_memory_manager.h"

#include <pybind11/stl.h>

#include "base/errors.h"
#include "bindings/bind.h"
#include "bindings/tensor_view.h"
#include "torch_adapter/errors.h"

namespace vmm::bindings {

namespace {

using DeviceName = std::pair<std::string, int>;

// A manager, and whose it is. Tensors over its ranges keep it alive.
struct Manager {
  explicit Manager(DeviceRoom& room) : room(room), manager(room.memory) {}
  ~Manager() = default;
  Manager(const Manager&) = delete;
  Manager& operator=(const Manager&) = delete;

  [[nodiscard]] VirtualMemoryManager& here() {
    Runtime::require_own_process();
    return manager;
  }

  DeviceRoom& room;
  VirtualMemoryManager manager;
};
using ManagerPtr = std::shared_ptr<Manager>;

ManagerPtr make_manager(const std::string& kind, int ordinal) {
  const GilReleased released;
  return destroyed_without_gil(std::make_unique<Manager>(to_room(kind, ordinal)));
}

// Of a GPU's manager "cpu" is host memory; of the host's it is its own device.
Location to_location(const DeviceRoom& room, const DeviceName& device) {
  const DeviceKind kind = to_kind(device.first);
  if (kind == room.kind) {
    const int count = Runtime::device_count(kind);
    if (device.second >= 0 && device.second < count) return Location::on_device(device.second);
    throw Runtime::no_such_device(kind, device.second, count);
  }
  if (kind == DeviceKind::cpu) return Location::on_host();
  throw InvalidArgumentError("a manager of host memory has nothing to do with a GPU's");
}

PhysicalAllocation alloc_physical(Manager& self, std::size_t size, const std::optional<DeviceName>& device,
                                  bool exportable) {
  const Location location = device ? to_location(self.room, *device) : Location::on_device(self.room.ordinal);
  return self.here().alloc_physical(size, location, exportable);
}

void set_access(Manager& self, const VirtualAddressRange& range, Access access,
                const std::optional<std::vector<DeviceName>>& devices, std::size_t offset,
                std::optional<std::size_t> size) {
  std::vector<Location> who;
  if (!devices) who.push_back(Location::on_device(self.room.ordinal));
  for (const DeviceName& device : devices.value_or(std::vector<DeviceName>())) {
    who.push_back(to_location(self.room, device));
  }
  if (size == std::size_t{0}) throw InvalidRangeError(offset, 0, range.size, "empty");
  self.here().set_access(range, access, who, offset, size.value_or(0));
}

py::object tensor_in(const ManagerPtr& self, const VirtualAddressRange& range, std::size_t offset,
                     const std::vector<std::int64_t>& shape, py::handle dtype) {
  const std::size_t bytes = tensor_bytes(shape, dtype);
  const Address address = self->here().hold(range, offset, bytes);
  // From here on the tensor's end, or a failure to make it, lets go.
  const std::shared_ptr<void> hold(nullptr, [self, range, offset, bytes](void*) {
    if (Runtime::in_child()) return;
    try {
      self->manager.unhold(range, offset, bytes);
    } catch (...) {
      report_swallowed("the end of a tensor over a range");
    }
  });
  return make_tensor(address, shape, dtype, self->room, hold);
}

// AccessFlags(value), and no other than the three that there are.
Access to_access(const py::object& value) {
  if (py::isinstance<Access>(value)) return value.cast<Access>();
  if (PyIndex_Check(value.ptr()) != 0 && PyBool_Check(value.ptr()) == 0) {
    for (const Access access : {Access::none, Access::read, Access::read_write}) {
      if (value.equal(py::int_(static_cast<int>(access)))) return access;
    }
  }
  throw InvalidArgumentError("value=" + std::string(py::repr(value)).substr(0, 60) +
                             " is none of AccessFlags: give AccessFlags.NONE (0), READ (1) or READ_WRITE (2)");
}

// Any whole number may be asked about.
bool contains(const VirtualAddressRange& self, const py::object& address) {
  if (PyIndex_Check(address.ptr()) == 0 || PyBool_Check(address.ptr()) != 0) {
    throw InvalidArgumentError("address=" + std::string(py::repr(address)) + " is not an address: give a whole number");
  }
  const auto whole = py::reinterpret_steal<py::object>(PyNumber_Index(address.ptr()));
  if (!whole) throw py::error_already_set();
  return py::int_(self.base) <= whole && whole < py::int_(self.end());
}

// For records that only a manager makes: Class(...) says so, and Class.__new__(Class), which would make one of
// whatever is in its memory.
template <typename Record>
py::class_<Record> record(py::module_& module, const char* name, const char* maker) {
  py::class_<Record> made(module, name);
  made.attr("__new__") = py::cpp_function(
      [name, maker](const py::args&, const py::kwargs&) -> py::object {
        throw InvalidArgumentError(std::string(name) + ": VirtualMemoryManager." + maker +
                                   "() makes them, and nothing else");
      },
      py::name("__new__"));
  return made;
}

void bind_values(py::module_& module) {
  py::enum_<Access> access(module, "AccessFlags");
  access.def(py::init(&to_access), py::arg("value"), py::prepend());
  access.value("NONE", Access::none).value("READ", Access::read).value("READ_WRITE", Access::read_write);
  access.attr("__str__") = py::cpp_function(
      [](Access self) {
        switch (self) {
          case Access::none:
            return "None";
          case Access::read:
            return "Read";
          case Access::read_write:
            return "ReadWrite";
        }
        __builtin_unreachable();
      },
      py::name("__str__"), py::is_method(access));

  record<VirtualAddressRange>(module, "VirtualAddressRange", "reserve")
      .def_readonly("base", &VirtualAddressRange::base)
      .def_readonly("size", &VirtualAddressRange::size)
      .def_readonly("alignment", &VirtualAddressRange::alignment)
      .def_property_readonly("end", &VirtualAddressRange::end)
      .def("contains", &contains, py::arg("address"))
      .def("__str__", &VirtualAddressRange::text)
      .def("__repr__", &VirtualAddressRange::text)
      .def(
          "__eq__",
          [](const VirtualAddressRange& a, const VirtualAddressRange& b) {
            return a.manager == b.manager && a.key == b.key;
          },
          py::is_operator())
      .def("__hash__",
           [](const VirtualAddressRange& self) { return py::hash(py::make_tuple(self.manager, self.key)); });

  record<PhysicalAllocation>(module, "PhysicalAllocation", "alloc_physical")
      .def_readonly("handle", &PhysicalAllocation::handle)
      .def_readonly("size", &PhysicalAllocation::size)
      .def_readonly("device", &PhysicalAllocation::device)
      .def("__str__", &PhysicalAllocation::text)
      .def("__repr__", &PhysicalAllocation::text)
      .def(
          "__eq__",
          [](const PhysicalAllocation& a, const PhysicalAllocation& b) {
            return a.manager == b.manager && a.key == b.key;
          },
          py::is_operator())
      .def("__hash__", [](const PhysicalAllocation& self) { return py::hash(py::make_tuple(self.manager, self.key)); });

  record<MappingRecord>(module, "MappingRecord", "mappings")
      .def_readonly("va_offset", &MappingRecord::va_offset)
      .def_readonly("size", &MappingRecord::size)
      .def_readonly("phys_handle", &MappingRecord::phys_handle)
      .def_readonly("access", &MappingRecord::access)
      .def("__repr__", [](const MappingRecord& self) {
        return "MappingRecord(va_offset=" + std::to_string(self.va_offset) + ", size=" + std::to_string(self.size) +
               ", phys_handle=" + format_hex(self.phys_handle) +
               ", access=" + std::string(py::str(py::cast(self.access))) + ")";
      });
}

}  // namespace

void bind_virtual_memory_manager(py::module_& module) {
  bind_values(module);

  py::class_<Manager, ManagerPtr> manager(module, "VirtualMemoryManager");
  manager.def(py::init(&make_manager), py::arg("kind"), py::arg("ordinal") = 0)
      .def_property_readonly("kind", [](const Manager& self) { return to_string(self.room.kind); })
      .def_property_readonly("ordinal", [](const Manager& self) { return self.room.ordinal; })
      .def_property_readonly("granularity", [](const Manager& self) { return self.manager.granularity(); })
      .def_property_readonly("host_memory_usage",
                             [](const Manager& self) { return self.room.memory.host_budget().used(); })
      .def_property_readonly("is_closed", [](const Manager& self) { return self.manager.is_closed(); });
  manager
      .def(
          "reserve",
          [](Manager& self, std::size_t size, std::optional<std::size_t> alignment) {
            return self.here().reserve(size, alignment.value_or(VirtualMemoryManager::kDefaultAlignment));
          },
          py::arg("size"), py::arg("alignment") = py::none(), WithoutGil())
      .def(
          "release", [](Manager& self, const VirtualAddressRange& range) { self.here().release(range); },
          py::arg("range"), WithoutGil())
      .def("alloc_physical", &alloc_physical, py::arg("size"), py::arg("device") = py::none(),
           py::arg("exportable") = false, WithoutGil())
      .def(
          "free_physical",
          [](Manager& self, const PhysicalAllocation& physical) { self.here().free_physical(physical); },
          py::arg("physical"), WithoutGil())
      .def(
          "map",
          [](Manager& self, const VirtualAddressRange& range, const PhysicalAllocation& physical, std::size_t offset) {
            self.here().map(range, physical, offset);
          },
          py::arg("range"), py::arg("physical"), py::arg("offset") = 0, WithoutGil())
      .def(
          "unmap",
          [](Manager& self, const VirtualAddressRange& range, std::size_t offset, std::size_t size) {
            self.here().unmap(range, offset, size);
          },
          py::arg("range"), py::arg("offset"), py::arg("size"), WithoutGil())
      .def("set_access", &set_access, py::arg("range"), py::arg("flags"), py::arg("devices") = py::none(),
           py::arg("offset") = 0, py::arg("size") = py::none(), WithoutGil())
      .def(
          "mappings", [](Manager& self, const VirtualAddressRange& range) { return self.here().mappings(range); },
          py::arg("range"), WithoutGil())
      .def("tensor", &tensor_in, py::arg("range"), py::arg("offset"), py::arg("shape"), py::arg("dtype"))
      .def(
          "close", [](Manager& self) { self.here().close(); }, WithoutGil());
}

}  // namespace vmm::bindings
