// NVRTC, which compiles kernels while the process runs; found at run time, as the driver is.
// torch's CUDA wheels bring it. It never knows what a kernel is for.
#pragma once

#include <string>

namespace vmm {

class Nvrtc {
 public:
  // Opens the library, which stays open for ever. False: `why_not` says where it was looked for.
  bool load(std::string* why_not);
  // The text's code for one architecture ("sm_90"), as cuModuleLoadData() takes it. False:
  // `why_not` has the compiler's log. REQUIRES: load() went well. Takes half a second.
  bool compile(const char* text, const std::string& architecture, std::string* code, std::string* why_not) const;

 private:
  // nvrtc.h's, of which no toolkit is needed: numbers, and opaque pointers.
  using Program = void*;
  struct Calls {
    int (*create)(Program*, const char* text, const char* name, int headers, const char* const*, const char* const*);
    int (*destroy)(Program*);
    int (*compile)(Program, int options, const char* const*);
    int (*code_size)(Program, std::size_t*);
    int (*code)(Program, char*);
    int (*log_size)(Program, std::size_t*);
    int (*log)(Program, char*);
    const char* (*error)(int);
  };
  bool find_calls(void* library);

  Calls calls_{};
};

}  // namespace vmm
