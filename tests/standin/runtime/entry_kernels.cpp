// libcudart's entry points for kernels: they are registered, so that torch's
// libraries load, and do not run. A launch answers cudaErrorNotSupported and
// names the kernel on stderr. But for one: torch.cuda._sleep's, which takes
// kSlowness nanoseconds a cycle unless somebody waits for it (driver/queue.h).
#include <cxxabi.h>

#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "driver/control.h"
#include "runtime.h"

using namespace standin;  // NOLINT(google-build-using-namespace): entry points cannot live in it

namespace {

// How much slower than a GPU's program the stand-in's may be.
constexpr double kSlowness = 200;

struct Kernels {
  std::mutex mutex;
  // Thousands, when torch is loaded; looked through only to say a name.
  std::vector<std::pair<const void*, const char*>> names;
};

Kernels& kernels() {
  static auto* const kInstance = new Kernels;
  return *kInstance;
}

std::string name_of(const void* function) {
  const std::lock_guard<std::mutex> lock(kernels().mutex);
  for (const auto& [known, name] : kernels().names) {
    if (known != function) continue;
    const std::unique_ptr<char, void (*)(void*)> plain(abi::__cxa_demangle(name, nullptr, nullptr, nullptr),
                                                       &std::free);
    return plain == nullptr ? name : plain.get();
  }
  return "a kernel that was never registered";
}

cudaError_t launch(const void* function, void** arguments, cudaStream_t stream) {
  const std::string name = name_of(function);
  if (name != "at::cuda::(anonymous namespace)::spin_kernel(long)") return refuse_call("launch", name.c_str());
  const auto cycles = static_cast<double>(*static_cast<const std::int64_t*>(arguments[0]));
  return answer(standin_sleep(stream, kSlowness * cycles * 1e-6));
}

struct Configuration {
  dim3 grid;
  dim3 block;
  std::size_t shared = 0;
  void* stream = nullptr;
};
thread_local std::vector<Configuration> configurations;

}  // namespace

// The compiler's own calls; no header declares them.
extern "C" {

void** __cudaRegisterFatBinary(void* /*binary*/) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void** /*binary*/) {}
void __cudaUnregisterFatBinary(void** /*binary*/) {}
char __cudaInitModule(void** /*binary*/) { return 1; }
void __cudaRegisterVar(void** /*binary*/, char* /*variable*/, char* /*address*/, const char* /*name*/, int /*external*/,
                       std::size_t /*size*/, int /*constant*/, int /*global*/) {}

void __cudaRegisterFunction(void** /*binary*/, const char* function, char* /*address*/, const char* name,
                            int /*thread_limit*/, uint3* /*tid*/, uint3* /*bid*/, dim3* /*block*/, dim3* /*grid*/,
                            int* /*warp_size*/) {
  const std::lock_guard<std::mutex> lock(kernels().mutex);
  kernels().names.emplace_back(function, name);
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, std::size_t shared, void* stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, std::size_t* shared, void* stream) {
  const Configuration& last = configurations.back();
  *grid = last.grid;
  *block = last.block;
  *shared = last.shared;
  *static_cast<void**>(stream) = last.stream;
  configurations.pop_back();
  return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t* out, const void* function) {
  *out = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 /*grid*/, dim3 /*block*/, void** arguments,
                               std::size_t /*shared*/, cudaStream_t stream) {
  STANDIN_CALL_ON_DEVICE();
  return launch(kernel, arguments, stream);
}

cudaError_t cudaLaunchKernel(const void* function, dim3 /*grid*/, dim3 /*block*/, void** arguments,
                             std::size_t /*shared*/, cudaStream_t stream) {
  STANDIN_CALL_ON_DEVICE();
  return launch(function, arguments, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* how, const void* function, void** arguments) {
  STANDIN_CALL_ON_DEVICE();
  return launch(function, arguments, how->stream);
}

cudaError_t cudaFuncSetAttribute(const void* /*function*/, cudaFuncAttribute /*which*/, int /*value*/) {
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* out, const void* /*function*/, int /*block*/,
                                                                   std::size_t /*shared*/, unsigned /*flags*/) {
  *out = 1;
  return cudaSuccess;
}

}  // extern "C"
