// _C.Device: one device's memory as a whole.
#include <pybind11/stl.h>

#include <algorithm>

#include "base/errors.h"
#include "bindings/bind.h"
#include "bindings/numbers.h"

namespace vmm::bindings {

namespace {

// Rooms live for ever: Python's object is only a name for one.
struct Device {
  DeviceRoom& room;

  [[nodiscard]] DeviceMemory& memory() const {
    Runtime::require_own_process();
    return room.memory;
  }
};

int device_count(const std::string& kind) {
  const DeviceKind parsed = to_kind(kind);
  try {
    return Runtime::device_count(parsed);
  } catch (const NotAvailableError&) {
    return 0;
  }
}

std::pair<std::size_t, std::size_t> memory_info(const Device& device) {
  MemoryInfo info;
  throw_if_failed(device.memory().driver().memory_info(device.room.ordinal, &info), "asking for the free memory");
  return {info.free, info.total};
}

// Without their parts: Python knows models only.
PoolList models_of(PoolList pools) {
  pools.erase(std::remove_if(pools.begin(), pools.end(), [](const auto& pool) { return pool->is_part(); }),
              pools.end());
  return pools;
}

// The last refusal of a device; None where there was none, and no driver is
// loaded to say so.
py::object last_refusal(const std::string& kind, int ordinal) {
  Runtime::require_own_process();
  const DeviceRoom* room = Runtime::made(to_kind(kind), ordinal);
  const std::optional<Refusal> refusal = room == nullptr ? std::nullopt : room->memory.last_refusal();
  if (!refusal.has_value()) return py::none();
  py::list holders;
  for (const Holder& holder : refusal->holders) {
    py::dict each;
    each["name"] = holder.name;
    each["allocated"] = holder.allocated;
    each["idle"] = holder.idle;
    each["stranded"] = holder.stranded;
    each["quarantined"] = holder.quarantined;
    each["floor"] = holder.floor;
    each["reserved"] = holder.reserved;
    holders.append(std::move(each));
  }
  py::dict result;
  result["requested"] = refusal->requested;
  result["available"] = refusal->available;
  result["limit"] = refusal->limit;
  result["pool"] = refusal->pool;
  result["holders"] = std::move(holders);
  result["advice"] = refusal->advice;
  return result;
}

}  // namespace

void bind_device(py::module_& module) {
  py::class_<Device> device(module, "Device");
  device.def_property_readonly("kind", [](const Device& self) { return to_string(self.room.kind); })
      .def_property_readonly("ordinal", [](const Device& self) { return self.room.ordinal; })
      .def_property_readonly("name", [](const Device& self) { return self.room.memory.capabilities().name; })
      .def_property_readonly("granularity", [](const Device& self) { return self.room.memory.granularity(); })
      .def_property_readonly("total_bytes",
                             [](const Device& self) { return self.room.memory.capabilities().total_memory; })
      .def_property_readonly("committed_bytes", [](const Device& self) { return self.room.memory.committed_bytes(); })
      .def_property_readonly("limit", [](const Device& self) { return from_limit(self.room.memory.budget().limit()); })
      .def_property_readonly("live_chunks", [](const Device& self) { return self.room.memory.store().live_chunks(); });
  device
      .def(
          "set_limit",
          [](const Device& self, std::optional<std::size_t> limit) {
            return self.memory().set_limit(self.room.memory.budget(), to_limit(limit));
          },
          py::arg("limit"), WithoutGil())
      .def("memory_info", &memory_info, WithoutGil())
      .def(
          "pools", [](const Device& self) { return models_of(self.memory().pools()); }, WithoutGil())
      .def("statistics",
           [](const Device& self) {
             Statistics numbers;
             {
               const GilReleased released;
               self.memory().refresh_numbers();
               numbers = self.memory().statistics();
             }
             return to_dict(numbers);
           })
      .def(
          "reset_peaks", [](const Device& self) { self.memory().reset_peaks(); }, WithoutGil())
      .def(
          "reset_accumulated", [](const Device& self) { self.memory().reset_accumulated(); }, WithoutGil())
      .def("snapshot",
           [](const Device& self) {
             std::vector<DeviceSegment> segments;
             {
               const GilReleased released;
               segments = snapshot(self.memory().pools());
             }
             return to_list(segments);
           })
      .def(
          "empty_cache", [](const Device& self) { return self.memory().empty_cache(); }, WithoutGil())
      .def(
          "check", [](const Device& self) { self.memory().check(); }, WithoutGil())
      .def("__eq__", [](const Device& self, const Device& other) { return &self.room == &other.room; })
      .def("__hash__", [](const Device& self) { return reinterpret_cast<std::intptr_t>(&self.room); })
      .def("__repr__", [](const Device& self) {
        return "<torch_vmm._C.Device " + std::string(to_string(self.room.kind)) + ":" +
               std::to_string(self.room.ordinal) + ", " + self.room.memory.capabilities().name + ">";
      });

  module.def("last_refusal", &last_refusal, py::arg("kind"), py::arg("ordinal") = 0);
  module.def("device_count", &device_count, py::arg("kind"), WithoutGil());
  module.def(
      "device", [](const std::string& kind, int ordinal) { return Device{to_room(kind, ordinal)}; }, py::arg("kind"),
      py::arg("ordinal") = 0, WithoutGil());
}

}  // namespace vmm::bindings
