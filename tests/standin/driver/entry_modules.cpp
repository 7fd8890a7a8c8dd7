// libcuda's entry points: modules and their kernels. There is one module: whatever code is
// loaded, it has the kernels that pack memory, and the host's own code of the same text does
// their work, in the order of the stream.
#include <cuda.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "driver/packing.h"
#include "machine.h"
#include "memory.h"
#include "queue.h"

extern "C" int refuse_missing_call(const char* name);

namespace {

using namespace standin;  // NOLINT(google-build-using-namespace)
using vmm::packing::Step;

struct Kernel {
  const char* name;
  Step step;
};
std::array<Kernel, 3>& kernels() {
  static std::array<Kernel, 3> all = {
      {{"vmm_survey", Step::survey}, {"vmm_pack", Step::pack}, {"vmm_unpack", Step::unpack}}};
  return all;
}

void must_be_pinned(const char* call, CUdeviceptr address) {
  if (Memory::instance().place_of(address).kind != Kind::pinned) die(call, "on host memory that is not pinned");
}

void run(Step step, const vmm::packing::Job& job, int device) {
  constexpr const char* kCall = "cuLaunchKernel";
  must_be_pinned(kCall, job.units);
  must_be_pinned(kCall, job.units + job.count * sizeof(vmm::packing::Unit) - 1);
  for (std::size_t k = 0; k < job.count; ++k) {
    const vmm::packing::Unit& unit = *vmm::packing::unit_of(job, k);
    const std::size_t begin = step == Step::unpack ? std::max(job.begin, unit.at) : unit.at;
    const std::size_t end =
        std::min<std::size_t>(unit.at + unit.size, step == Step::unpack ? job.end : ~std::size_t{0});
    Memory::instance().must_reach(kCall, device, job.memory + (begin - job.at), end - begin, step == Step::unpack,
                                  /*across_devices=*/false);
    if (step != Step::survey) must_be_pinned(kCall, reinterpret_cast<CUdeviceptr>(vmm::packing::body_of(job, unit)));
  }
  vmm::packing::run(step, job, *std::make_unique<vmm::packing::Scratch>());
}

}  // namespace

extern "C" {

// Tables that NVIDIA documents nowhere. NVRTC asks for one wherever there is a driver, and
// takes no for an answer, but for a driver that cannot be asked it is not prepared.
CUresult cuGetExportTable(const void** /*table*/, const CUuuid* /*name*/) {
  STANDIN_ENTER(Needs::nothing);
  return CUDA_ERROR_NOT_FOUND;
}

CUresult cuModuleLoadData(CUmodule* out, const void* code) {
  STANDIN_ENTER(Needs::context);
  if (std::memcmp(code, "\177ELF", 4) != 0) return CUDA_ERROR_INVALID_IMAGE;
  *out = reinterpret_cast<CUmodule>(&kernels());
  return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule /*module*/) {
  STANDIN_ENTER(Needs::context);
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction* out, CUmodule /*module*/, const char* name) {
  STANDIN_ENTER(Needs::context);
  for (Kernel& each : kernels()) {
    if (std::string(each.name) != name) continue;
    *out = reinterpret_cast<CUfunction>(&each);
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_NOT_FOUND;
}

CUresult cuLaunchKernel(CUfunction function, unsigned blocks, unsigned, unsigned, unsigned threads, unsigned, unsigned,
                        unsigned /*shared*/, CUstream stream, void** arguments, void** /*extra*/) {
  STANDIN_ENTER(needs_of(stream));
  const auto is_it = [function](const Kernel& each) {
    return reinterpret_cast<CUfunction>(const_cast<Kernel*>(&each)) == function;
  };
  const auto kernel = std::find_if(kernels().begin(), kernels().end(), is_it);
  if (kernel == kernels().end()) return static_cast<CUresult>(refuse_missing_call(__func__));
  if (blocks == 0 || threads != vmm::packing::kLanes) return CUDA_ERROR_INVALID_VALUE;
  const auto packing = *static_cast<const vmm::packing::Job*>(arguments[0]);
  Lock lock(world().mutex);
  Job job;
  job.call = __func__;
  job.run = [step = kernel->step, packing](int device) { run(step, packing, device); };
  return submit(lock, stream_of(stream, __func__), std::make_shared<const Job>(std::move(job)));
}

}  // extern "C"
