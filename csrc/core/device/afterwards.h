// What follows a change that has been made, and is not to be made again.
#pragma once

#include <new>

namespace vmm {

// What `follow` does not do without host memory is left to whoever comes by next.
// REQUIRES: it is noted that it is due (DeviceMemory::over_limit_, kHasEnded, or a shelf that
// is too full).
template <typename Follow>
void afterwards(const Follow& follow) {
  try {
    follow();
  } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): another time
  }
}

}  // namespace vmm
