// How much memory this process has.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <fstream>

namespace vmm::testing {

inline std::size_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  std::size_t all = 0;
  std::size_t resident = 0;
  statm >> all >> resident;
  return resident * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
}

}  // namespace vmm::testing
