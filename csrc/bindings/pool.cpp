// _C.Pool, and how pools are made and found.
#include "core/pool/pool.h"

#include <pybind11/stl.h>

#include "base/errors.h"
#include "bindings/bind.h"
#include "bindings/numbers.h"
#include "bindings/tensor_view.h"
#include "core/device/device_memory.h"
#include "core/device/reclaim_feed.h"
#include "torch_adapter/errors.h"

namespace vmm::bindings {

DeviceMemory& home_of(const Pool& pool) {
  Runtime::require_own_process();
  return *pool.home();
}

DeviceMemory& open_home_of(const Pool& pool) {
  DeviceMemory& memory = home_of(pool);
  pool.require_open();
  return memory;
}

namespace {

using PoolPtr = std::shared_ptr<Pool>;

// home_of() for explicit pages, which may be the first of its memory.
DeviceMemory& home_for_pages(const Pool& pool) {
  DeviceMemory& memory = home_of(pool);
  initialize_torch(Runtime::room_of(pool));
  return memory;
}

PoolPtr create_pool(const std::string& kind, int ordinal, std::optional<std::size_t> capacity,
                    std::optional<std::size_t> page_size, std::optional<std::size_t> physical_limit,
                    const std::string& name) {
  DeviceMemory& memory = to_room(kind, ordinal).memory;
  PoolSpec spec;
  spec.name = name;
  spec.capacity = to_chosen_size(capacity, "capacity");
  spec.page_size = to_page_size(page_size, memory.granularity());
  spec.physical_limit = to_limit(physical_limit);
  return memory.create_pool(spec, nullptr);
}

void close(Pool& pool, bool force) {
  DeviceMemory& memory = home_of(pool);
  if (pool.is_closed()) return;
  if (Runtime::room_of(pool).default_pool.get() == &pool) {
    throw InvalidArgumentError("the default pool of a device cannot be closed");
  }
  if (&pool.group() != &memory.budget()) {
    throw InvalidArgumentError("pool '" + pool.name() +
                               "' belongs to a SharedMemoryPool: end it with unregister_model()");
  }
  memory.close_pool(pool, force);
  Runtime::room_of(pool).note_closed();
}

py::object tensor_at(const PoolPtr& pool, std::size_t offset, const std::vector<std::int64_t>& shape,
                     py::handle dtype) {
  DeviceMemory& memory = home_of(*pool);
  const std::size_t bytes = tensor_bytes(shape, dtype);
  const Address address = pool->hold_pages(offset, bytes);
  // From here on the tensor's end, or a failure to make it, lets go.
  const std::shared_ptr<void> hold(nullptr, [pool, &memory, offset, bytes](void*) {
    if (Runtime::in_child()) return;
    try {
      memory.unhold_pages(*pool, offset, bytes);
    } catch (...) {
      report_swallowed("the end of a tensor over a pool's pages");
    }
  });
  return make_tensor_of_pages(address, shape, dtype, Runtime::room_of(*pool), hold);
}

// Of the model with its parts, as all numbers of a pool are.
Statistics statistics(const Pool& pool, bool walk) {
  DeviceMemory& memory = home_of(pool);
  if (walk) {
    for (const auto& each : memory.family(pool)) each->refresh_numbers();
  }
  return memory.statistics_of(pool);
}

// A number summed over the model and its parts.
template <typename Number>
std::size_t sum(const Pool& pool, const Number& number) {
  std::size_t result = 0;
  for (const auto& each : home_of(pool).family(pool)) result += number(*each);
  return result;
}

// The getter of a number that is read under the locks of the model's pools.
template <std::size_t (Pool::*number)() const>
py::cpp_function locked_number() {
  return py::cpp_function([](const Pool& self) { return sum(self, [](const Pool& each) { return (each.*number)(); }); },
                          WithoutGil());
}

// The same of what has not spilled.
template <std::size_t (Pool::*number)() const>
py::cpp_function number_here() {
  const auto here = [](const Pool& each) { return each.is_spill() ? std::size_t{0} : (each.*number)(); };
  return py::cpp_function([here](const Pool& self) { return sum(self, here); }, WithoutGil());
}

}  // namespace

void bind_pool(py::module_& module) {
  py::class_<Pool, PoolPtr> pool(module, "Pool");
  pool.def_property_readonly("key", [](const Pool& self) { return reinterpret_cast<std::uintptr_t>(&self); })
      .def_property_readonly("name", &Pool::name)
      .def_property_readonly("tag", &Pool::tag)
      .def_property_readonly("model", [](const PoolPtr& self) { return self->shared_model(); })
      .def_property_readonly("kind", [](const Pool& self) { return to_string(Runtime::room_of(self).kind); })
      .def_property_readonly("ordinal", &Pool::device)
      .def_property_readonly("capacity", &Pool::capacity)
      .def_property_readonly("base_address", &Pool::base)
      .def_property_readonly("page_size", &Pool::page_size)
      .def_property_readonly("priority", &Pool::priority)
      .def_property_readonly("floor", &Pool::floor)
      .def_property_readonly("is_closed", &Pool::is_closed)
      .def_property_readonly("limit", [](const Pool& self) { return from_limit(self.budget().limit()); });
  pool.def_property_readonly("physical_bytes", number_here<&Pool::physical_bytes>())
      .def_property_readonly("live_bytes", locked_number<&Pool::live_bytes>())
      .def_property_readonly("live_bytes_here", number_here<&Pool::live_bytes>())
      .def_property_readonly("live_blocks", locked_number<&Pool::live_blocks>());
  pool.def(
          "tagged", [](const PoolPtr& self, const std::string& tag) { return open_home_of(*self).tagged(self, tag); },
          py::arg("tag"), WithoutGil())
      .def_property_readonly(
          "tags", py::cpp_function([](const Pool& self) { return home_of(self).tags_of(self); }, WithoutGil()));
  pool.def(
          "set_limit",
          [](Pool& self, std::optional<std::size_t> limit) {
            // One that was closed by force while it slept can still be woken, and may need more room for that.
            DeviceMemory& memory = home_of(self);
            if (!memory.is_any_asleep(self)) self.require_open();
            return memory.set_limit(self.budget(), to_limit(limit));
          },
          py::arg("limit"), WithoutGil())
      .def(
          "set_floor", [](Pool& self, std::size_t floor) { return open_home_of(self).set_floor(self, floor); },
          py::arg("floor"), WithoutGil())
      .def_property_readonly("spills", &Pool::spills)
      .def(
          "set_spills", [](Pool& self, bool spills) { open_home_of(self).set_spills(self, spills); }, py::arg("spills"))
      .def(
          "set_priority",
          [](Pool& self, int priority) {
            open_home_of(self);  // of this process, and open
            self.budget().set_priority(priority);
          },
          py::arg("priority"))
      .def(
          "allocate_pages",
          [](Pool& self, std::size_t offset, std::size_t size, std::uintptr_t stream) {
            return home_for_pages(self).allocate_pages(self, offset, size, to_stream(stream));
          },
          py::arg("offset"), py::arg("size"), py::arg("stream") = 0, WithoutGil())
      .def(
          "deallocate_pages",
          [](Pool& self, std::size_t offset, std::size_t size) { home_of(self).deallocate_pages(self, offset, size); },
          py::arg("offset"), py::arg("size"), WithoutGil())
      .def(
          "is_mapped",
          [](const Pool& self, std::size_t offset, std::size_t size) {
            open_home_of(self);
            return self.is_mapped(offset, size);
          },
          py::arg("offset"), py::arg("size"), WithoutGil())
      .def("tensor", &tensor_at, py::arg("offset"), py::arg("shape"), py::arg("dtype"))
      .def(
          "trim", [](Pool& self, std::size_t keep) { return open_home_of(self).trim(self, keep); }, py::arg("keep") = 0,
          WithoutGil())
      .def(
          "empty_cache",
          [](Pool& self) {
            DeviceMemory& memory = open_home_of(self);
            memory.empty_cache(self);
            // Pinned memory that pools of no SharedMemoryPool left, which else nobody gives back.
            if (&self.group() == &memory.budget()) {
              Runtime::room_of(self).sleeper.host_memory(memory.budget())->release_unused();
            }
          },
          WithoutGil())
      .def("memory_stats",
           [](const Pool& self) {
             MemoryStats numbers;
             {
               const GilReleased released;
               numbers = home_of(self).memory_stats_of(self);
             }
             return to_dict(numbers, kMemoryFields);
           })
      .def("reclaim_report",
           [](const Pool& self) {
             ReclaimReport report;
             {
               const GilReleased released;
               report = home_of(self).ladder().log().report_of(self.model().id());
             }
             return to_dict(report);
           })
      .def(
          "statistics",
          [](const Pool& self, bool walk) {
            Statistics numbers;
            {
              const GilReleased released;
              numbers = statistics(self, walk);
            }
            return to_dict(numbers);
          },
          py::arg("walk") = false)
      .def(
          "reset_peaks", [](const Pool& self) { home_of(self).reset_peaks_of(self); }, WithoutGil())
      .def(
          "reset_accumulated", [](const Pool& self) { home_of(self).reset_accumulated_of(self); }, WithoutGil())
      .def("snapshot",
           [](const Pool& self) {
             std::vector<DeviceSegment> segments;
             {
               const GilReleased released;
               segments = snapshot(home_of(self).family(self));
             }
             return to_list(segments);
           })
      .def("close", &close, py::arg("force") = false, WithoutGil())
      .def("__repr__", [](const Pool& self) {
        return "<torch_vmm._C.Pool '" + self.name() + "' on " + to_string(Runtime::room_of(self).kind) + ":" +
               std::to_string(self.device()) + ", " + format_bytes(self.capacity()) + " at " + format_hex(self.base()) +
               ">";
      });

  module.def(
      "follow_reclaims", [] { ReclaimFeed::instance().follow(); }, WithoutGil());
  module.def(
      "end_reclaims", [] { ReclaimFeed::instance().end(); }, WithoutGil());
  module.def("next_reclaim", []() -> std::optional<py::tuple> {
    std::optional<ReclaimFeed::Told> told;
    {
      const GilReleased released;
      told = ReclaimFeed::instance().take();
    }
    if (!told.has_value()) return std::nullopt;
    return py::make_tuple(told->kind, told->device, to_tuple(told->decision), told->lost);
  });
  module.def(
      "default_pool", [](const std::string& kind, int ordinal) { return to_room(kind, ordinal).default_pool; },
      py::arg("kind"), py::arg("ordinal") = 0, WithoutGil());
  module.def(
      "set_default_model",
      [](const std::string& kind, int ordinal, const PoolPtr& pool) {
        if (pool != nullptr) open_home_of(*pool);
        to_room(kind, ordinal).set_outside(pool);
      },
      py::arg("kind"), py::arg("ordinal"), py::arg("pool").none(true), WithoutGil());
  module.def("create_pool", &create_pool, py::arg("kind"), py::arg("ordinal"), py::arg("capacity"),
             py::arg("page_size") = py::none(), py::arg("physical_limit") = py::none(), py::arg("name") = "pool",
             WithoutGil());
}

}  // namespace vmm::bindings
