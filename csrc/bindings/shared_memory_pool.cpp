// _C.SharedMemoryPool.
#include "core/faces/shared_memory_pool.h"

#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pybind11/stl.h>

#include "bindings/bind.h"
#include "bindings/numbers.h"

namespace vmm::bindings {

namespace {

using SharedPoolPtr = std::shared_ptr<SharedMemoryPool>;

// The pool itself, checked: nothing works in a forked child.
SharedMemoryPool& here(SharedMemoryPool& pool) {
  Runtime::require_own_process();
  return pool;
}
const SharedMemoryPool& here(const SharedMemoryPool& pool) {
  Runtime::require_own_process();
  return pool;
}

SharedPoolPtr make_shared_pool(const std::string& kind, int ordinal, std::size_t physical_limit) {
  // Not by a call guard: an object is entered into pybind's tables under the GIL.
  const GilReleased released;
  return destroyed_without_gil(std::make_unique<SharedMemoryPool>(to_room(kind, ordinal).memory, physical_limit));
}

std::shared_ptr<Pool> register_model(SharedMemoryPool& self, const std::string& model_id,
                                     std::optional<std::size_t> virtual_capacity, std::optional<std::size_t> page_size,
                                     std::optional<std::size_t> physical_limit, std::size_t floor, int priority,
                                     bool spills) {
  ModelSpec spec;
  spec.virtual_capacity = to_chosen_size(virtual_capacity, "virtual_capacity");
  spec.page_size = to_page_size(page_size, self.memory().granularity());
  spec.physical_limit = to_limit(physical_limit);
  spec.floor = floor;
  spec.priority = priority;
  spec.spills = spills;
  return here(self).register_model(model_id, spec);
}

// As a thread that has just begun. Whoever asks for memory is within an operator, beneath autograd:
// there a view is none, and what changes in place is not seen by who saved it for backward.
struct OutsideOperators {
  c10::InferenceMode inference{false};
  c10::impl::ForceDispatchKeyGuard keys{c10::impl::LocalDispatchKeySet(c10::impl::PODLocalDispatchKeySet{})};
};

// function(bytes, pool) as the core calls it, from any thread. What it raises is shown as of
// a destructor, and it has freed nothing; Ctrl-C comes again, in the main thread.
DeviceMemory::OnPressure to_on_pressure(const py::object& function) {
  if (function.is_none()) return nullptr;
  const auto drop = [](py::object* last) {
    if (!may_run_python()) return;  // it stays: nobody may touch it any more
    const py::gil_scoped_acquire gil;
    delete last;
  };
  const std::shared_ptr<py::object> held(new py::object(function), drop);
  return [held](std::size_t bytes, const std::shared_ptr<Pool>& model) {
    if (!may_run_python()) return false;
    const py::gil_scoped_acquire gil;
    const py::error_scope pending;  // an allocation may be made while an exception is on its way
    const OutsideOperators outside;
    try {
      return (*held)(bytes, model).cast<bool>();
    } catch (py::error_already_set& error) {
      const bool is_interrupt = error.matches(PyExc_KeyboardInterrupt);
      error.discard_as_unraisable(*held);
      if (is_interrupt) PyErr_SetInterrupt();  // last: any Python code may raise it
      return false;
    }
  };
}

void set_on_pressure(SharedMemoryPool& self, const py::object& function) {
  DeviceMemory::OnPressure relieve = to_on_pressure(function);
  const GilReleased released;
  here(self).set_on_pressure(std::move(relieve));
}

const char* kind_of(const SharedMemoryPool& self) { return to_string(Runtime::room_of(self.memory()).kind); }

}  // namespace

void bind_shared_memory_pool(py::module_& module) {
  py::class_<SharedMemoryPool, SharedPoolPtr> pool(module, "SharedMemoryPool");
  pool.def(py::init(&make_shared_pool), py::arg("kind"), py::arg("ordinal"), py::arg("physical_limit"))
      .def_property_readonly("kind", &kind_of)
      .def_property_readonly("ordinal", [](const SharedMemoryPool& self) { return self.memory().device(); })
      .def_property_readonly("name", &SharedMemoryPool::name)
      .def_property_readonly("physical_limit", &SharedMemoryPool::physical_limit)
      .def_property_readonly("is_closed", &SharedMemoryPool::is_closed)
      .def(
          "set_physical_limit",
          [](SharedMemoryPool& self, std::size_t limit) { return here(self).set_physical_limit(limit); },
          py::arg("physical_limit"), WithoutGil())
      .def_property_readonly("floor", &SharedMemoryPool::floor)
      .def(
          "set_floor", [](SharedMemoryPool& self, std::size_t floor) { return here(self).set_floor(floor); },
          py::arg("floor"), WithoutGil())
      .def_property_readonly("priority", &SharedMemoryPool::priority)
      .def(
          "set_priority", [](SharedMemoryPool& self, int priority) { here(self).set_priority(priority); },
          py::arg("priority"), WithoutGil());
  pool.def_property_readonly("spill_limit",
                             [](const SharedMemoryPool& self) { return from_limit(here(self).spill_limit()); })
      .def(
          "set_spill_limit",
          [](SharedMemoryPool& self, std::optional<std::size_t> limit) {
            return here(self).set_spill_limit(to_limit(limit));
          },
          py::arg("limit"), WithoutGil());
  pool.def("set_on_pressure", &set_on_pressure, py::arg("function"));
  pool.def("register_model", &register_model, py::arg("model_id"), py::arg("virtual_capacity") = py::none(),
           py::arg("page_size") = py::none(), py::arg("physical_limit") = py::none(), py::arg("floor") = 0,
           py::arg("priority") = 0, py::arg("spills") = false, WithoutGil())
      .def(
          "unregister_model",
          [](SharedMemoryPool& self, const std::string& model_id, bool force) {
            here(self).unregister_model(model_id, force);
          },
          py::arg("model_id"), py::arg("force") = false, WithoutGil())
      .def(
          "model", [](const SharedMemoryPool& self, const std::string& model_id) { return here(self).model(model_id); },
          py::arg("model_id"), WithoutGil())
      .def(
          "has_model",
          [](const SharedMemoryPool& self, const std::string& model_id) { return here(self).has_model(model_id); },
          py::arg("model_id"), WithoutGil())
      .def(
          "model_ids", [](const SharedMemoryPool& self) { return here(self).model_ids(); }, WithoutGil())
      .def(
          "allocate_for_model",
          [](SharedMemoryPool& self, const std::string& model_id, std::size_t size, std::uintptr_t stream) {
            return here(self).allocate_for_model(model_id, size, to_stream(stream));
          },
          py::arg("model_id"), py::arg("size"), py::arg("stream") = 0, WithoutGil())
      .def(
          "deallocate_for_model",
          [](SharedMemoryPool& self, const std::string& model_id, std::size_t offset, std::size_t size) {
            here(self).deallocate_for_model(model_id, offset, size);
          },
          py::arg("model_id"), py::arg("offset"), py::arg("size"), WithoutGil())
      .def("global_stats",
           [](const SharedMemoryPool& self) {
             GlobalMemoryStats numbers;
             {
               const GilReleased released;
               numbers = here(self).global_stats();
             }
             return to_dict(numbers, kGlobalMemoryFields);
           })
      .def(
          "close",
          [](SharedMemoryPool& self, bool force) {
            here(self).close(force);
            Runtime::room_of(self.memory()).sleeper.end_host_memory(self.budget());
          },
          py::arg("force") = false, WithoutGil());
}

}  // namespace vmm::bindings
