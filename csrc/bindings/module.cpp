// The module torch_vmm._C: its parts, and what it was built from.
#include <dlfcn.h>

#include <stdexcept>

#include "bindings/bind.h"
#include "torch_adapter/enabled.h"
#include "torch_adapter/entry_points.h"
#include "torch_adapter/versions.h"

#ifndef VMM_VERSION
#error "setup.py defines VMM_VERSION"
#endif

namespace vmm::bindings {

std::string library_file() {
  Dl_info info{};
  // Any function of this library tells which file it came from.
  if (dladdr(reinterpret_cast<void*>(&torch_vmm_malloc), &info) == 0 || info.dli_fname == nullptr) {
    throw std::runtime_error("the dynamic linker does not know torch_vmm_malloc");
  }
  return info.dli_fname;
}

}  // namespace vmm::bindings

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace vmm::bindings;
  module.doc() = "What torch_vmm's C++ exports: conversion only, no policy.";
  // torch registers the base of our allocator's class.
  py::module_::import("torch");
  module.attr("__version__") = VMM_VERSION;
  module.attr("built_for_torch") = vmm::kBuiltForTorch;
  module.def("library_path", [] {
    vmm::note_entry_points_used();
    return library_file();
  });
  bind_errors(module);
  bind_options(module);
  bind_pool(module);
  bind_device(module);
  bind_debug(module);
  bind_shared_memory_pool(module);
  bind_sleep(module);
  bind_virtual_memory_manager(module);
  bind_memory_pool(module);
  bind_native_memory_pool(module);
  bind_install(module);
  bind_routing(module);
  bind_tensor_range(module);
  bind_placed_memory(module);
  bind_tensor_alias(module);
  bind_replay(module);
}
