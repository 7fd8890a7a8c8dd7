#include "driver/nvrtc.h"

#include <dlfcn.h>
#include <link.h>

#include <array>
#include <cstddef>
#include <string_view>
#include <vector>

namespace vmm {

namespace {

// Beside torch's own library: what torch itself compiles kernels with, which knows the
// folder that torch's requirements have NVRTC in.
std::string beside_torch() {
  std::string found;
  const auto look = [](dl_phdr_info* info, std::size_t /*size*/, void* out) {
    constexpr std::string_view kTorch = "/libtorch_cuda.so";
    const std::string_view path = info->dlpi_name == nullptr ? "" : info->dlpi_name;
    if (!path.ends_with(kTorch)) return 0;
    *static_cast<std::string*>(out) = std::string(path.substr(0, path.size() - kTorch.size())) + "/libcaffe2_nvrtc.so";
    return 1;
  };
  ::dl_iterate_phdr(look, &found);
  return found;
}

}  // namespace

bool Nvrtc::load(std::string* why_not) {
  std::vector<std::string> places = {"libnvrtc.so.13", "libnvrtc.so.12"};
  if (const std::string torchs = beside_torch(); !torchs.empty()) places.insert(places.begin(), torchs);
  std::string tried;
  for (const std::string& place : places) {
    void* const library = ::dlopen(place.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library != nullptr && find_calls(library)) return true;
    const char* const reason = library == nullptr ? ::dlerror() : nullptr;
    tried += (tried.empty() ? "" : "; ") + (reason == nullptr ? place + " is not NVRTC" : std::string(reason));
  }
  *why_not = "NVRTC, which compiles the kernels for it and comes with torch for CUDA, was not found: " + tried;
  return false;
}

bool Nvrtc::find_calls(void* library) {
  bool has_all = true;
  const auto find = [&](const char* name, auto* call) {
    *call = reinterpret_cast<std::remove_pointer_t<decltype(call)>>(::dlsym(library, name));
    has_all = has_all && *call != nullptr;
  };
  find("nvrtcCreateProgram", &calls_.create);
  find("nvrtcDestroyProgram", &calls_.destroy);
  find("nvrtcCompileProgram", &calls_.compile);
  find("nvrtcGetCUBINSize", &calls_.code_size);
  find("nvrtcGetCUBIN", &calls_.code);
  find("nvrtcGetProgramLogSize", &calls_.log_size);
  find("nvrtcGetProgramLog", &calls_.log);
  find("nvrtcGetErrorString", &calls_.error);
  return has_all;
}

bool Nvrtc::compile(const char* text, const std::string& architecture, std::string* code, std::string* why_not) const {
  Program program = nullptr;
  std::string doing = "nvrtcCreateProgram";
  int result = calls_.create(&program, text, "packing.h", 0, nullptr, nullptr);
  if (result == 0) {
    const std::string target = "--gpu-architecture=" + architecture;
    const std::array<const char*, 2> options = {target.c_str(), "--std=c++17"};
    doing = "nvrtcCompileProgram for " + architecture;
    result = calls_.compile(program, static_cast<int>(options.size()), options.data());
    std::size_t size = 0;
    if (result == 0 && calls_.code_size(program, &size) == 0 && size != 0) {
      code->resize(size);
      doing = "nvrtcGetCUBIN";
      result = calls_.code(program, code->data());
    } else if (calls_.log_size(program, &size) == 0 && size > 1) {
      std::string log(size, '\0');
      if (calls_.log(program, log.data()) == 0) doing += ": " + std::string(log.c_str());
      if (result == 0) result = -1;  // it has compiled, to nothing
    }
    calls_.destroy(&program);
  }
  if (result != 0) *why_not = "NVRTC failed (" + std::string(calls_.error(result)) + "), " + doing;
  return result == 0;
}

}  // namespace vmm
