// Whose memory new tensors are.
#include "torch_adapter/routing.h"

#include <c10/util/Exception.h>
#include <pybind11/stl.h>

#include "base/errors.h"
#include "bindings/bind.h"
#include "bindings/stays.h"
#include "bindings/tensor_view.h"
#include "core/device/device_memory.h"
#include "torch_adapter/enabled.h"
#include "torch_adapter/strict.h"
#include "torch_adapter/torch_kinds.h"

namespace vmm::bindings {

namespace {

std::shared_ptr<Pool> pool_at(std::uintptr_t address) {
  // The quick table first; only the registries hold a pointer that may be
  // shared, and they are what another thread could be ending the pool under.
  Runtime::require_own_process();
  if (Runtime::pool_at(reinterpret_cast<void*>(address)) == nullptr) return nullptr;
  for (const DeviceKind kind : kDeviceKinds) {
    for (const DeviceRoom* room : Runtime::all_made(kind)) {
      if (auto pool = room->memory.pool_at(address); pool != nullptr) return pool->shared_model();
    }
  }
  return nullptr;
}

void set_strict(const std::string& kind, int ordinal, const std::string& action) {
  Runtime::require_own_process();
  if (ordinal < 0 || ordinal >= Runtime::kMostDevices) {
    throw NotAvailableError("there is no device " + kind + ":" + std::to_string(ordinal));
  }
  Strictness wanted = Strictness::off;
  if (action == "raise") {
    wanted = Strictness::raise;
  } else if (action == "warn") {
    wanted = Strictness::warn;
  } else if (action != "off") {
    throw InvalidArgumentError("action '" + action + "': give 'raise', 'warn' or 'off'");
  }
  const DeviceKind parsed = to_kind(kind);
  if (wanted != Strictness::off && !may_allocate(parsed)) {
    throw NotEnabledError("strict(): torch_vmm is not torch's allocator on " + kind +
                          ", so it sees no tensor there. Call " + torch_kind(parsed).enable + " first.");
  }
  strictness(parsed, ordinal).store(wanted, std::memory_order_relaxed);
}

}  // namespace

void bind_routing(py::module_& module) {
  bind_stays(module);
  module.def("open_models", &open_models);
  module.def(
      "open_on", [](const std::string& kind, int ordinal) { return open_on(to_room(kind, ordinal)); }, py::arg("kind"),
      py::arg("ordinal"));
  module.def("set_strict", &set_strict, py::arg("kind"), py::arg("ordinal"), py::arg("action"));
  // The model, whatever tag of it is open; and what is open, which may be a tag's space, for
  // a tensor of so many bytes, where strict() lets one be made.
  module.def(
      "current_pool",
      [](const std::string& kind, int ordinal) -> std::shared_ptr<Pool> {
        const std::shared_ptr<Pool>& pool = current_pool(to_room(kind, ordinal));
        return pool->shared_model();
      },
      py::arg("kind"), py::arg("ordinal") = 0, WithoutGil());
  module.def(
      "current_space",
      [](const std::string& kind, int ordinal, std::size_t bytes) -> std::shared_ptr<Pool> {
        DeviceRoom& room = to_room(kind, ordinal);
        try {
          warn_in_python([&] { require_model(room.kind, room.ordinal, bytes); });
        } catch (const c10::Error& error) {  // torch lets no other type through; this is no call of torch's
          throw VmmError(error.what_without_backtrace());
        }
        return current_pool(room);
      },
      py::arg("kind"), py::arg("ordinal"), py::arg("bytes"));
  module.def("pool_at", &pool_at, py::arg("address"), WithoutGil());
}

}  // namespace vmm::bindings
