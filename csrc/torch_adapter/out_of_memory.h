// Running out of memory in torch's words: the sentence that torch's native
// allocator says, which programs match, and ours on lines of its own beneath it.
#pragma once

#include <cstddef>
#include <string>

#include "process/runtime.h"

namespace vmm {

// What the sentence tells of a device, in bytes.
struct DeviceFigures {
  std::size_t total = 0;  // of the device; 0: not known, and nothing is said of the device
  std::size_t free = 0;
  std::size_t allowed = kUnlimited;  // for this process
  std::size_t allocated = 0;
  std::size_t in_private_pools = 0;  // of what is allocated
  std::size_t reserved = 0;
};

// "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity
// of 79.19 GiB of which ..." Native lists other processes after that where NVML
// is to hand; this does not.
std::string out_of_memory_sentence(DeviceKind kind, int ordinal, std::size_t bytes, const DeviceFigures& figures);

// Called in a catch block: throws the exception in flight as torch's own.
// vmm::OutOfMemoryError becomes c10::OutOfMemoryError (torch.OutOfMemoryError in
// Python), everything else of vmm's a c10::Error. `bytes` were asked for.
[[noreturn]] void rethrow_as_torch(DeviceKind kind, int ordinal, std::size_t bytes);

// torch's own refusal of requests that no device could ever meet.
inline constexpr std::size_t kExbibyte = std::size_t{1} << 60;
[[noreturn]] void throw_beyond_exbibyte(DeviceKind kind, int ordinal, std::size_t bytes);

}  // namespace vmm
