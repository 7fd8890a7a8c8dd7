#include "torch_adapter/shared_by_all.h"

#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/core/Allocator.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <tuple>
#include <utility>

#include "torch_adapter/errors.h"
#include "torch_adapter/private_member.h"
#include "torch_adapter/versions.h"

// As ATen/cuda/CUDAContextLight.h has them, which includes headers of cuBLAS and its kind that
// are not wherever torch is (tests/python/test_torch_declarations.py compares).
namespace at::cuda {
#if VMM_WORKSPACES_HAVE_SIZES
struct WorkspaceMapWithMutex {
  std::map<std::tuple<void*, void*>, std::pair<at::DataPtr, size_t>> map;
  std::shared_mutex mutex;
};
#else
struct WorkspaceMapWithMutex {
  std::map<std::tuple<void*, void*>, at::DataPtr> map;
  std::shared_mutex mutex;
};
#endif
void clearCublasWorkspaces();
WorkspaceMapWithMutex& cublas_handle_stream_to_workspace();
WorkspaceMapWithMutex& cublaslt_handle_stream_to_workspace();
size_t getChosenWorkspaceSize();
size_t getCUDABlasLtWorkspaceSize();
void* getCUDABlasLtWorkspace();
}  // namespace at::cuda

namespace vmm {

namespace {

Address address_of(const void* block) { return reinterpret_cast<Address>(block); }

void add_workspaces(at::cuda::WorkspaceMapWithMutex& workspaces, int ordinal, std::vector<Address>* found) {
  const std::shared_lock<std::shared_mutex> lock(workspaces.mutex);
  for (const auto& [key, entry] : workspaces.map) {
#if VMM_WORKSPACES_HAVE_SIZES
    const at::DataPtr& workspace = entry.first;
#else
    const at::DataPtr& workspace = entry;
#endif
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

namespace {

// Where torch's code for cuBLAS's handles and workspaces lies: what it exports of it, and what
// stands beside that. Nothing else there asks for memory.
struct CodeRange {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
};
CodeRange workspace_code() {
  constexpr std::uintptr_t kBeside = 4096;  // the code of the last function
  const auto at = [](auto* function) { return reinterpret_cast<std::uintptr_t>(function); };
  const auto [first, last] =
      std::minmax({at(&at::cuda::clearCublasWorkspaces), at(&at::cuda::cublas_handle_stream_to_workspace),
                   at(&at::cuda::cublaslt_handle_stream_to_workspace), at(&at::cuda::getChosenWorkspaceSize),
                   at(&at::cuda::getCUDABlasLtWorkspaceSize), at(&at::cuda::getCUDABlasLtWorkspace)});
  return {first, last + kBeside};
}

}  // namespace

// By its size, and by the library that asks, a tensor could not be told from one: operators of
// the same library make some.
bool detail::looks_for_workspace(std::size_t bytes, const void* caller) noexcept {
  static const CodeRange code = workspace_code();
  const auto at = reinterpret_cast<std::uintptr_t>(caller);
  if (at < code.begin || at >= code.end) {
    other_callers[at % other_callers.size()].store(caller, std::memory_order_relaxed);
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
