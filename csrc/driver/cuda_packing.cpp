// The part of CudaDriver that packs memory: kernels, compiled once a device.
#include "driver/cuda_driver.h"
#include "driver/nvrtc.h"
#include "driver/packing.h"

namespace vmm {
namespace {

using packing::Step;

// A survey stays in the device's memory. The others wait for the bus: 32 KiB on their way for
// each block keep it busy, and the rest of the device is other models'.
constexpr packing::u64 kMostSurveying = 1024;
constexpr packing::u64 kMostOnTheBus = 48;

constexpr std::array<const char*, 3> kKernels = {"vmm_survey", "vmm_pack", "vmm_unpack"};

}  // namespace

std::string CudaDriver::missing_packing(int device) {
  if (const Status checked = check_device(device, "missing_packing"); !checked.ok()) {
    const std::string why = missing(device);
    return why.empty() ? checked.text() : why;
  }
  Device& its = device_at(device);
  if (its.packing.back().load(std::memory_order_acquire) != nullptr) return "";
  const Current current(*this, device);
  if (!current.status().ok()) return current.status().text();
  const auto attribute = [&](CUdevice_attribute which) {
    int value = 0;
    answer(api_.cuDeviceGetAttribute(&value, which, its.handle), "cuDeviceGetAttribute").ignore();
    return value;
  };
  if (attribute(CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM) == 0) {
    return its.capabilities.name + " does not reach pinned host memory at the host's own addresses";
  }
  const std::string architecture = "sm_" + std::to_string(attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)) +
                                   std::to_string(attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR));
  Nvrtc compiler;
  std::string code;
  std::string why_not;
  if (!compiler.load(&why_not) || !compiler.compile(packing::text(), architecture, &code, &why_not)) return why_not;
  const Status loaded = load_packing(its, code);
  return loaded.ok() ? "" : "loading kernels for " + architecture + ": " + loaded.text();
}

// It stays for good: the context ends with it.
Status CudaDriver::load_packing(Device& device, const std::string& code) {
  const RelaxedCapture relaxed(api_);
  const MutexLock lock(context_mutex_);
  if (device.packing.back().load(std::memory_order_relaxed) != nullptr) return {};  // another thread was faster
  CUmodule module = nullptr;
  if (const Status loaded = answer(api_.cuModuleLoadData(&module, code.data()), "cuModuleLoadData"); !loaded.ok()) {
    return loaded;
  }
  std::array<CUfunction, kKernels.size()> kernels{};
  for (std::size_t k = 0; k < kKernels.size(); ++k) {
    const Status found = answer(api_.cuModuleGetFunction(&kernels[k], module, kKernels[k]), "cuModuleGetFunction");
    if (found.ok()) continue;
    answer(api_.cuModuleUnload(module), "cuModuleUnload").ignore();
    return found;
  }
  for (std::size_t k = 0; k < kKernels.size(); ++k) device.packing[k].store(kernels[k], std::memory_order_release);
  return {};
}

Status CudaDriver::pack_async(int device, Step step, const packing::Job& job, Stream stream) {
  if (const Status checked = check_device(device, "pack_async"); !checked.ok()) return checked;
  if (job.count == 0) return refuse("packing of nothing");
  const CUfunction kernel = device_at(device).packing[static_cast<std::size_t>(step)].load(std::memory_order_acquire);
  if (kernel == nullptr) return refuse("packing by a device that was not asked for it");
  const Current current(*this, device);
  if (!current.status().ok()) return current.status();
  if (const Status free = check_not_captured(stream, "pack_async on a capturing stream"); !free.ok()) return free;
  const packing::u64 most = step == Step::survey ? kMostSurveying : kMostOnTheBus;
  const auto blocks = static_cast<unsigned>(job.count < most ? job.count : most);
  packing::Job argument = job;
  std::array<void*, 1> arguments = {&argument};
  const RelaxedCapture relaxed(api_);  // the driver may load the kernel only now
  return answer(api_.cuLaunchKernel(kernel, blocks, 1, 1, packing::kLanes, 1, 1, 0, static_cast<CUstream>(stream),
                                    arguments.data(), nullptr),
                "cuLaunchKernel");
}

}  // namespace vmm
