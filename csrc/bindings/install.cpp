// Becoming torch's allocator, and the allocator object itself.
#include "bindings/bind.h"
#include "torch_adapter/cuda_allocator.h"
#include "torch_adapter/cuda_install.h"
#include "torch_adapter/enabled.h"
#include "torch_adapter/host_allocator.h"

namespace vmm::bindings {

void bind_install(py::module_& module) {
  module.def("enable_cuda", &enable_cuda, WithoutGil());
  module.def("enable_host", &HostAllocator::enable, WithoutGil());
  module.def(
      "is_enabled", [](const std::string& kind) { return is_enabled(to_kind(kind)); }, py::arg("kind"));

  // torch.cuda.memory.change_current_allocator() asks its argument for
  // allocator(); torch.cuda.MemPool() takes the answer itself.
  using AllocatorPtr = std::shared_ptr<CudaAllocator>;
  py::class_<CudaAllocator, cca::CUDAAllocator, AllocatorPtr>(module, "CUDAAllocator")
      .def("allocator", [](const AllocatorPtr& self) { return self; });
  module.def("allocator", &CudaAllocator::instance);
}

}  // namespace vmm::bindings
