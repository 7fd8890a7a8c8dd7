// Runs the contract suite on the GPU: a plain program, so that a server with a
// compiler is enough. No argument, or the device's ordinal and a part of the
// names of the cases to run. One line a case, then "N passed, M failed, K
// skipped"; the exit code is 0 if none failed.
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "contract/contract_lab.h"
#include "contract/driver_contract.h"
#include "driver/cuda_driver.h"

namespace {

using vmm::Driver;
using vmm::Status;
using vmm::StatusCode;
using vmm::Stream;
using vmm::testing::ContractCase;
using vmm::testing::ContractOptions;
using vmm::testing::Lab;

// What the test itself needs of CUDA and the driver does not offer: streams of
// its own and a capture.
struct Cuda {
  decltype(&::cuCtxGetCurrent) get_current = nullptr;
  decltype(&::cuCtxSetCurrent) set_current = nullptr;
  decltype(&::cuDevicePrimaryCtxRetain) retain = nullptr;
  decltype(&::cuDevicePrimaryCtxGetState) state = nullptr;
  decltype(&::cuStreamCreate) stream_create = nullptr;
  decltype(&::cuStreamBeginCapture) begin_capture = nullptr;
  decltype(&::cuStreamEndCapture) end_capture = nullptr;
  decltype(&::cuMemsetD8Async) fill = nullptr;

  bool load() {
    void* const library = ::dlopen("libcuda.so.1", RTLD_NOW);
    if (library == nullptr) return false;
    const auto find = [library](auto* function, const char* name) {
      *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(::dlsym(library, name));
      return *function != nullptr;
    };
    return find(&get_current, "cuCtxGetCurrent") && find(&set_current, "cuCtxSetCurrent") &&
           find(&retain, "cuDevicePrimaryCtxRetain") && find(&state, "cuDevicePrimaryCtxGetState") &&
           find(&stream_create, "cuStreamCreate") && find(&begin_capture, "cuStreamBeginCapture_v2") &&
           find(&end_capture, "cuStreamEndCapture") && find(&fill, "cuMemsetD8Async");
  }
};

Cuda g_cuda;

// -- What only CUDA can be asked.

void the_callers_context_is_left_alone(Driver& driver, const ContractOptions& options) {
  CUcontext before = nullptr;
  CONTRACT_CHECK(g_cuda.get_current(&before) == CUDA_SUCCESS);
  for (const CUcontext mine : {before, CUcontext{nullptr}}) {
    CONTRACT_CHECK(g_cuda.set_current(mine) == CUDA_SUCCESS);
    {
      Lab lab(driver, options);
      const vmm::Address at = lab.reserve(lab.granule());
      lab.map(at, lab.create(lab.granule()));
      lab.fill(at, 1, lab.granule());
      CONTRACT_FILLED(lab, at, lab.granule(), 1);
      const vmm::Fence fence = lab.fence();
      CONTRACT_OK(driver.record(fence, options.stream_a));
      CONTRACT_OK(driver.wait(fence));
      lab.unmap(at, lab.granule());
    }
    CUcontext after = nullptr;
    CONTRACT_CHECK(g_cuda.get_current(&after) == CUDA_SUCCESS);
    CONTRACT_CHECK(after == mine);
  }
  CONTRACT_CHECK(g_cuda.set_current(before) == CUDA_SUCCESS);
}

// A graph is being captured in the strictest mode: memory comes and goes, fences
// are asked, and the capture survives.
void a_capture_survives(Driver& driver, const ContractOptions& options) {
  Lab lab(driver, options);
  const std::size_t g = lab.granule();
  const vmm::Address at = lab.reserve(2 * g);
  lab.map(at, lab.create(g));
  const vmm::Fence before = lab.fence();
  CONTRACT_OK(driver.record(before, options.stream_b));
  const auto captured = static_cast<CUstream>(options.stream_a);
  CONTRACT_CHECK(g_cuda.begin_capture(captured, CU_STREAM_CAPTURE_MODE_GLOBAL) == CUDA_SUCCESS);
  const CUresult filled = g_cuda.fill(at, 3, g, captured);
  const vmm::ChunkHandle chunk = lab.create(g);
  lab.map(at + g, chunk);
  const vmm::Fence during = lab.fence();
  const Status refused = driver.record(during, options.stream_a);
  const Status refused_wait = driver.stream_wait(options.device, options.stream_a, before);
  const Status other = driver.record(during, options.stream_b);
  const Status asked = driver.query(before);
  const Status waited = driver.wait(during);
  lab.unmap(at + g, g);
  lab.release(chunk);
  CUgraph graph = nullptr;
  const CUresult ended = g_cuda.end_capture(captured, &graph);
  CONTRACT_CHECK(filled == CUDA_SUCCESS, filled);
  CONTRACT_CHECK(refused.code() == StatusCode::not_supported, refused.text());
  CONTRACT_CHECK(refused_wait.code() == StatusCode::not_supported, refused_wait.text());
  CONTRACT_OK(other);
  CONTRACT_CHECK(asked.ok() || asked.code() == StatusCode::not_ready, asked.text());
  CONTRACT_OK(waited);
  CONTRACT_CHECK(ended == CUDA_SUCCESS && graph != nullptr, ended);
}

void a_forked_child_is_told_so(Driver& driver, const ContractOptions& options) {
  Lab lab(driver, options);
  const pid_t child = ::fork();
  if (child == 0) {
    vmm::MemoryInfo info;
    vmm::Address at = 0;
    const bool told = !driver.alive() && driver.device_count() == 0 &&
                      driver.memory_info(options.device, &info).code() == StatusCode::driver_gone &&
                      driver.reserve(lab.granule(), lab.granule(), &at).code() == StatusCode::driver_gone;
    ::_exit(told ? 0 : 1);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  CONTRACT_CHECK(status == 0, status);
  CONTRACT_CHECK(driver.alive());
}

std::vector<ContractCase> cuda_cases() {
  return {
      {"the_callers_context_is_left_alone", the_callers_context_is_left_alone},
      {"a_capture_survives", a_capture_survives},
      {"a_forked_child_is_told_so", a_forked_child_is_told_so},
  };
}

bool context_is_active(CUdevice device) {
  unsigned flags = 0;
  int active = 0;
  g_cuda.state(device, &flags, &active);
  return active != 0;
}

}  // namespace

int main(int argc, char** argv) {
  ContractOptions options;
  if (argc > 1) options.device = std::atoi(argv[1]);
  const std::string only = argc > 2 ? argv[2] : "";
  std::string why_not;
  const std::unique_ptr<Driver> driver = vmm::CudaDriver::make(&why_not);
  if (driver == nullptr || !g_cuda.load()) {
    std::printf("FAIL make: %s\n0 passed, 1 failed, 0 skipped\n", why_not.c_str());
    return 1;
  }
  vmm::Capabilities capabilities;
  if (!driver->capabilities(options.device, &capabilities).ok()) {
    std::printf("FAIL capabilities: %s\n0 passed, 1 failed, 0 skipped\n", driver->missing(options.device).c_str());
    return 1;
  }
  std::printf("device %d: %s, granularity %s, %s, exportable %d, host-located %d, rdma %d\n", options.device,
              capabilities.name.c_str(), vmm::format_bytes(capabilities.granularity).c_str(),
              vmm::format_bytes(capabilities.total_memory).c_str(), capabilities.exportable, capabilities.host_located,
              capabilities.gpu_direct_rdma);
  int passed = 0;
  int failed = 0;
  int skipped = 0;
  const bool lazy = !context_is_active(options.device);
  std::printf("%s asking makes no context\n", lazy ? "ok" : "FAIL");
  (lazy ? passed : failed) += 1;

  CUcontext context = nullptr;
  g_cuda.retain(&context, options.device);
  g_cuda.set_current(context);
  CUstream streams[2] = {};
  for (CUstream& stream : streams) {
    if (g_cuda.stream_create(&stream, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS) return 2;
  }
  g_cuda.set_current(nullptr);  // the driver brings its own
  options.stream_a = streams[0];
  options.stream_b = streams[1];

  std::vector<ContractCase> cases = vmm::testing::driver_contract_cases();
  for (const ContractCase& more : cuda_cases()) cases.push_back(more);
  for (const ContractCase& contract_case : cases) {
    if (std::string(contract_case.name).find(only) == std::string::npos) continue;
    try {
      contract_case.run(*driver, options);
      std::printf("ok %s\n", contract_case.name);
      ++passed;
    } catch (const vmm::testing::ContractSkip& skip) {
      std::printf("skip %s: %s\n", contract_case.name, skip.what());
      ++skipped;
    } catch (const std::exception& failure) {
      std::printf("FAIL %s: %s\n", contract_case.name, failure.what());
      ++failed;
    }
    std::fflush(stdout);
  }
  std::printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
  return failed == 0 ? 0 : 1;
}
