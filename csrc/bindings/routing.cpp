// Whose memory new tensors are.
#include "torch_adapter/routing.h"

#include "bindings/bind.h"
#include "core/device_memory.h"

namespace vmm::bindings {

namespace {

// Python's hold on one stay in a model.
struct Stay {
  ModelContextPtr context;
};

std::shared_ptr<Pool> pool_at(std::uintptr_t address) {
  // The quick table first; only the registries hold a pointer that may be
  // shared, and they are what another thread could be ending the pool under.
  if (Runtime::in_child() || Runtime::pool_at(reinterpret_cast<void*>(address)) == nullptr) return nullptr;
  for (const DeviceKind kind : {DeviceKind::cuda, DeviceKind::cpu}) {
    for (const DeviceRoom* room : Runtime::all_made(kind)) {
      if (auto pool = room->memory.pool_at(address); pool != nullptr) return pool->is_part() ? pool->owner() : pool;
    }
  }
  return nullptr;
}

}  // namespace

void bind_routing(py::module_& module) {
  py::class_<Stay>(module, "ModelContext").def_property_readonly("pool", [](const Stay& self) {
    return pool_of(*self.context);
  });
  // No release of the GIL: neither waits, and the thread stays the same.
  module.def(
      "enter", [](std::shared_ptr<Pool> pool) { return Stay{enter_model(std::move(pool))}; }, py::arg("pool"));
  module.def(
      "leave", [](const Stay& stay) { leave_model(stay.context); }, py::arg("context"));
  module.def(
      "current_pool",
      [](const std::string& kind, int ordinal) -> std::shared_ptr<Pool> {
        return current_pool(to_room(kind, ordinal));
      },
      py::arg("kind"), py::arg("ordinal") = 0, WithoutGil());
  module.def("pool_at", &pool_at, py::arg("address"), WithoutGil());
}

}  // namespace vmm::bindings
