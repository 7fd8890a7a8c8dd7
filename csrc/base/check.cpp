#include "base/check.h"

#include <cstdio>
#include <cstdlib>

namespace vmm::detail {

void check_failed(const char* file, int line, const char* condition, const std::string& values) {
  std::fprintf(stderr, "torch_vmm: broken invariant at %s:%d: %s %s\n", file, line, condition, values.c_str());
  std::fflush(stderr);
  std::abort();
}

}  // namespace vmm::detail
