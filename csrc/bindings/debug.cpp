// Debug mode: what is watched, explained and damaged; and where Python was when a watched
// block was allocated.
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "base/errors.h"
#include "bindings/bind.h"
#include "core/debug/watch_log.h"
#include "driver/device_fault.h"
#include "torch_adapter/cuda_allocator.h"

namespace vmm::bindings {

namespace {

constexpr int kMostFrames = 32;

// An attribute of a code object as text; "?" where it has none.
std::string text_of(const py::object& code, const char* name) {
  const auto value = py::reinterpret_steal<py::object>(PyObject_GetAttrString(code.ptr(), name));
  const char* const text = value ? PyUnicode_AsUTF8(value.ptr()) : nullptr;
  if (text == nullptr) PyErr_Clear();
  return text == nullptr ? "?" : text;
}

// Is this one of the package's own modules? They lie beside the extension.
bool is_of_package(const std::string& file) {
  static const std::string folder = [] {
    const std::string library = library_file();
    return library.substr(0, library.rfind('/') + 1);
  }();
  return file.compare(0, folder.size(), folder) == 0 && file.find('/', folder.size()) == std::string::npos;
}

// A line a frame of the calling thread, the innermost first, from the line that called the
// package on. Text, and at once: a handler of signals, and a process whose GPU has gone, can
// still print it. As with torch's memory history the thread takes the GIL for it, with no
// lock held: none where another allocator asks, which may hold one.
std::string python_stack() {
  if (CudaAllocator::is_providing() || !may_run_python()) return "";
  const py::gil_scoped_acquire held;
  const py::error_scope pending;  // an allocation may be made while an exception is on its way
  std::string text;
  auto frame =
      py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyThreadState_GetFrame(PyThreadState_Get())));
  for (int k = 0; k < kMostFrames && frame;) {
    auto* const raw = reinterpret_cast<PyFrameObject*>(frame.ptr());
    const auto code = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(raw)));
    const std::string file = text_of(code, "co_filename");
    if (k != 0 || !is_of_package(file)) {
      if (k++ != 0) text += '\n';
      text += file + ":" + std::to_string(PyFrame_GetLineNumber(raw)) + " in " + text_of(code, "co_name");
    }
    frame = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetBack(raw)));
  }
  return text;
}

// The device's memory where it was ever used and debug mode is on, or nullptr.
DeviceMemory* debugged(DeviceKind kind, int ordinal) {
  Runtime::require_own_process();
  DeviceRoom* room = Runtime::made(kind, ordinal);
  return room == nullptr || room->memory.debug_log() == nullptr ? nullptr : &room->memory;
}

py::dict to_dict(const WatchedBlock& block, const ByteRange& faults) {
  py::dict result;
  result["number"] = block.number;
  result["address"] = block.address;
  result["requested"] = block.requested;
  result["size"] = block.size;
  result["pool"] = block.pool == nullptr ? std::string() : *block.pool;
  result["stream"] = reinterpret_cast<std::uintptr_t>(block.stream);
  result["stack"] = block.stack == nullptr ? std::string() : *block.stack;
  result["is_freed"] = block.freed != 0;
  result["is_unmapped"] = block.is_unmapped;
  result["faults"] = py::make_tuple(faults.offset, faults.end());
  return result;
}

py::dict to_dict(const Damage& damage, const ByteRange& faults) {
  py::dict result;
  result["block"] = to_dict(damage.block, faults);
  result["first"] = damage.first;
  result["bytes"] = damage.bytes;
  result["text"] = to_string(damage) + with_stack(damage.block);
  return result;
}

// And where an access beyond its block faults, which asks for locks and so comes before the GIL.
template <class What>
struct Told {
  What what;
  ByteRange faults;
};

std::vector<Told<Damage>> told(const DeviceMemory& memory, const std::vector<Damage>& damages) {
  std::vector<Told<Damage>> result;
  for (const Damage& damage : damages) result.push_back({damage, memory.faults_beyond(damage.block)});
  return result;
}

py::list to_list(const std::vector<Told<Damage>>& damages) {
  py::list result;
  for (const auto& [damage, faults] : damages) result.append(to_dict(damage, faults));
  return result;
}

const char* to_text(Finding::Where where) {
  switch (where) {
    case Finding::Where::before:
      return "before";
    case Finding::Where::inside:
      return "inside";
    case Finding::Where::beyond:
      return "beyond";
  }
  return "";
}

// Of all devices: whose address it is does not matter to who asks.
py::list explain(std::uintptr_t address) {
  std::vector<Told<Finding>> found;
  {
    const GilReleased released;
    for (const DeviceKind kind : kDeviceKinds) {
      for (int ordinal = 0; ordinal < Runtime::kMostDevices; ++ordinal) {
        DeviceMemory* memory = debugged(kind, ordinal);
        if (memory == nullptr) continue;
        for (const Finding& finding : memory->debug_log()->explain(address)) {
          found.push_back({finding, memory->faults_beyond(finding.block)});
        }
      }
    }
  }
  py::list result;
  for (const auto& [finding, faults] : found) {
    py::dict entry;
    entry["block"] = to_dict(finding.block, faults);
    entry["where"] = to_text(finding.where);
    entry["distance"] = finding.distance;
    entry["is_own"] = finding.is_in_zone;
    entry["text"] = to_string(finding, address) + with_stack(finding.block);
    result.append(std::move(entry));
  }
  return result;
}

py::object report(const std::string& kind, int ordinal, std::size_t most) {
  DeviceMemory* memory = debugged(to_kind(kind), ordinal);
  if (memory == nullptr) return py::none();
  std::vector<Told<WatchedBlock>> blocks;
  WatchLog::Counts counts;
  std::vector<Told<Damage>> damages;
  std::string text;
  {
    const GilReleased released;
    // Asks the driver something: only so is a fault known.
    memory->clock().cover(memory->clock().now());
    memory->clock().poll();
    // What was freed before the GPU was done, and is done now, has not been looked at.
    if (device_fault().load() == nullptr) memory->settle(/*wait=*/false);
    WatchLog& log = *memory->debug_log();
    counts = log.counts();
    damages = told(*memory, log.damages());
    for (const WatchedBlock& block : log.live(most)) blocks.push_back({block, memory->faults_beyond(block)});
    for (const WatchedBlock& block : log.freed_lately(most)) blocks.push_back({block, memory->faults_beyond(block)});
    text = memory->debug_report();
  }
  py::list live;
  py::list freed;
  for (const auto& [block, faults] : blocks) (block.freed == 0 ? live : freed).append(to_dict(block, faults));
  py::dict result;
  result["mode"] = to_string(memory->debug_log()->mode());
  result["watched"] = counts.watched;
  result["missed"] = counts.missed;
  result["damaged"] = counts.damaged;
  result["live"] = counts.live;
  result["blocks"] = std::move(live);
  result["freed"] = std::move(freed);
  result["damages"] = to_list(damages);
  result["text"] = text;
  return result;
}

py::list check(const std::string& kind, int ordinal) {
  DeviceMemory* memory = debugged(to_kind(kind), ordinal);
  if (memory == nullptr) return py::list();
  std::vector<Told<Damage>> damages;
  {
    const GilReleased released;
    damages = told(*memory, memory->check_watched());
  }
  return to_list(damages);
}

}  // namespace

void bind_debug(py::module_& module) {
  WatchLog::set_stack_source(&python_stack);
  module.def("debug_mode", [] { return to_string(Options::from_environment().debug); });
  module.def("debug_explain", &explain, py::arg("address"));
  module.def("debug_report", &report, py::arg("kind"), py::arg("ordinal") = 0, py::arg("most") = 64);
  module.def("debug_check", &check, py::arg("kind"), py::arg("ordinal") = 0);
}

}  // namespace vmm::bindings
