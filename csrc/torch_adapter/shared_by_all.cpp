#include "torch_adapter/shared_by_all.h"

#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/core/Allocator.h>
#include <dlfcn.h>

#include <map>
#include <mutex>
#include <shared_mutex>
#include <tuple>

#include "torch_adapter/errors.h"
#include "torch_adapter/private_member.h"
#include "torch_adapter/versions.h"

// As ATen/cuda/CUDAContextLight.h has them, which includes headers of cuBLAS and its kind that
// are not wherever torch is (tests/python/test_torch_declarations.py compares).
namespace at::cuda {
struct WorkspaceMapWithMutex {
  std::map<std::tuple<void*, void*>, at::DataPtr> map;
  std::shared_mutex mutex;
};
void clearCublasWorkspaces();
WorkspaceMapWithMutex& cublas_handle_stream_to_workspace();
WorkspaceMapWithMutex& cublaslt_handle_stream_to_workspace();
size_t getChosenWorkspaceSize();
size_t getCUDABlasLtWorkspaceSize();
}  // namespace at::cuda

namespace vmm {

namespace {

Address address_of(const void* block) { return reinterpret_cast<Address>(block); }

void add_workspaces(at::cuda::WorkspaceMapWithMutex& workspaces, int ordinal, std::vector<Address>* found) {
  const std::shared_lock<std::shared_mutex> lock(workspaces.mutex);
  for (const auto& [key, workspace] : workspaces.map) {
    if (workspace.get() != nullptr && workspace.device().index() == ordinal) {
      found->push_back(address_of(workspace.get()));
    }
  }
}

}  // namespace

#if VMM_GENERATOR_HAS_CAPTURE_FLAG
// Up to 2.11 all graphs of a device share two numbers of its generator, which each replay
// writes; later each capture has its own. They are public, the way to them is not.
struct SharedGeneratorState {
  using Type = c10::intrusive_ptr<at::CUDAGeneratorState> at::CUDAGeneratorImpl::*;
  friend Type member_of(SharedGeneratorState which);
};
template struct PrivateMember<SharedGeneratorState, &at::CUDAGeneratorImpl::state_>;
namespace {
void add_generators_numbers(int ordinal, std::vector<Address>* found) {
  const at::Generator& generator = at::cuda::detail::getDefaultCUDAGenerator(static_cast<c10::DeviceIndex>(ordinal));
  const auto& state = generator.get<at::CUDAGeneratorImpl>()->*member_of(SharedGeneratorState{});
  for (const at::TensorBase* numbers : {&state->seed_extragraph_, &state->offset_extragraph_}) {
    if (numbers->defined()) found->push_back(address_of(numbers->const_data_ptr()));
  }
}
}  // namespace
#else
namespace {
void add_generators_numbers(int /*ordinal*/, std::vector<Address>* /*found*/) {}
}  // namespace
#endif

std::vector<Address> blocks_shared_by_all(int ordinal) {
  std::vector<Address> found;
  add_workspaces(at::cuda::cublas_handle_stream_to_workspace(), ordinal, &found);
  add_workspaces(at::cuda::cublaslt_handle_stream_to_workspace(), ordinal, &found);
  add_generators_numbers(ordinal, &found);
  return found;
}

// Tensors are asked for by libtorch_cpu; workspaces by the library that has cuBLAS.
bool detail::looks_for_workspace(std::size_t bytes, const void* caller) noexcept {
  Dl_info asks{};
  Dl_info library{};
  const bool is_known = dladdr(caller, &asks) != 0 &&
                        dladdr(reinterpret_cast<const void*>(&at::cuda::clearCublasWorkspaces), &library) != 0;
  if (!is_known || asks.dli_fbase != library.dli_fbase) {
    const auto hash = reinterpret_cast<std::uintptr_t>(caller) % other_callers.size();
    other_callers[hash].store(caller, std::memory_order_relaxed);
    return false;
  }
  try {
    return bytes == at::cuda::getChosenWorkspaceSize() || bytes == at::cuda::getCUDABlasLtWorkspaceSize();
  } catch (...) {
    report_swallowed("asking torch for the size of cuBLAS workspaces");
    return false;
  }
}

}  // namespace vmm
