// What the files of this folder have in common. Each binds one subject, and
// converts only: whatever decides lies below.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "base/units.h"
#include "bindings/gil.h"
#include "driver/driver.h"
#include "process/runtime.h"

namespace vmm::bindings {

namespace py = pybind11;

// A call guard.
using WithoutGil = py::call_guard<GilReleased>;

void bind_errors(py::module_& module);
void bind_options(py::module_& module);
void bind_debug(py::module_& module);
void bind_device(py::module_& module);
void bind_pool(py::module_& module);
void bind_shared_memory_pool(py::module_& module);
void bind_virtual_memory_manager(py::module_& module);
void bind_memory_pool(py::module_& module);
void bind_native_memory_pool(py::module_& module);
void bind_install(py::module_& module);
void bind_routing(py::module_& module);
void bind_tensor_alias(py::module_& module);
void bind_tensor_range(py::module_& module);
void bind_placed_memory(py::module_& module);
void bind_replay(py::module_& module);
void bind_sleep(py::module_& module);

// The name of a kind (process/device_kind); InvalidArgumentError for anything else.
DeviceKind to_kind(const std::string& kind);
// The room; NotAvailableError.
DeviceRoom& to_room(const std::string& kind, int ordinal);

// The pool's device; NotAvailableError in a forked child, where its locks may be held
// for ever.
DeviceMemory& home_of(const Pool& pool);
// The same of a pool that is open, else InvalidArgumentError. Numbers can be read of a
// closed one too, as long as its tensors live; anything else is refused in these words.
DeviceMemory& open_home_of(const Pool& pool);

// A limit of None is no limit.
inline std::size_t to_limit(std::optional<std::size_t> limit) { return limit.value_or(kUnlimited); }
inline std::optional<std::size_t> from_limit(std::size_t limit) {
  return limit == kUnlimited ? std::nullopt : std::optional<std::size_t>(limit);
}

// Sizes for which None means "choose" and zero is a mistake: InvalidArgumentError.
std::size_t to_chosen_size(std::optional<std::size_t> size, const char* what);
// None means "choose"; InvalidPageSizeError for zero.
std::size_t to_page_size(std::optional<std::size_t> page_size, std::size_t granularity);

inline Stream to_stream(std::uintptr_t stream) { return reinterpret_cast<Stream>(stream); }
// torch's current stream of the device: the default one until torch has initialised
// CUDA, which this does not, and on the CPU. `id`: torch's own name of it, where there
// is one. REQUIRES: the GIL.
Stream current_stream(DeviceKind kind, int ordinal, std::optional<std::int64_t>* id = nullptr);
// None is the current one.
inline Stream to_stream(std::optional<std::uintptr_t> stream, DeviceKind kind, int ordinal) {
  return stream.has_value() ? to_stream(*stream) : current_stream(kind, ordinal);
}

// A thread that the interpreter did not make may take the GIL: it is there, and not leaving.
inline bool may_run_python() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsInitialized() != 0 && Py_IsFinalizing() == 0;
#else
  return Py_IsInitialized() != 0 && _Py_IsFinalizing() == 0;
#endif
}

// This extension's own file. Throws std::runtime_error.
std::string library_file();

// Objects whose end may wait (a manager with mappings, a shared pool): they are
// destroyed with the GIL released, whoever drops them last, and in a forked
// child, where a lock of theirs may be held for ever, not at all.
template <typename T>
std::shared_ptr<T> destroyed_without_gil(std::unique_ptr<T> object) {
  return std::shared_ptr<T>(object.release(), [](T* last) {
    if (Runtime::in_child()) return;
    if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) {
      const GilReleased released;
      delete last;
    } else {
      delete last;
    }
  });
}

}  // namespace vmm::bindings
