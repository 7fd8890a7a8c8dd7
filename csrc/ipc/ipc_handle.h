// The bytes that name a tensor's memory to another process: torch's own forms,
// so that torch's native allocator can open ours and we can open its, and one
// more. It knows neither CUDA nor torch, and opens nothing.
//
//   version 'c' cudaIpcMemHandle_t                      of cudaMalloc: a foreign provider's
//   version 'e' header, a number a chunk, [sender]      chunks of one size
//   version 'v' count, sizes, a number a chunk, sender  chunks of several sizes
//
// The numbers are descriptors of the process in the header. The version is
// torch's: 2 up to torch 2.12, and 3 since 2.13, where the header of 'e' also
// says whether the chunks are named by descriptors or, across machines, by
// fabric handles. 'v' is ours alone: torch refuses it as an "unexpected or
// illformed shareable handle type".
//
// torch stops reading after the descriptors, so `sender` can follow them. It
// serves receivers of ours that may not take descriptors out of another process
// (ipc_descriptors), and it makes a handle unique where descriptors and process
// ids are used again: both allocators know what they have opened by these bytes.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace vmm {

inline constexpr std::size_t kCudaIpcHandleBytes = 64;

struct SharedChunk {
  std::size_t size = 0;  // bytes
  int fd = -1;           // in the sender
  std::uint64_t id = 0;  // the sender's own name for it; 0 in handles of torch's
};

// Tells a process from all others, and how to ask it for descriptors.
struct IpcSender {
  std::uint64_t started = 0;                // in clock ticks since boot; 0: unknown
  std::array<std::uint8_t, 8> socket{};     // completes its socket's name
  std::array<std::uint8_t, 16> password{};  // shown to it there
};

struct IpcHandle {
  std::string cuda_ipc;             // a cudaIpcMemHandle_t; then nothing below counts
  pid_t pid = 0;                    // of the sender, as it sees itself
  std::vector<SharedChunk> chunks;  // side by side, in this order
  std::optional<IpcSender> sender;  // if it is one of ours
};

// REQUIRES: chunks and a sender, or CUDA's own handle; `version` is 2 or 3. The same chunks always
// give the same bytes.
std::string encode(const IpcHandle& handle, int version);
// Any of the forms above, of either version. Throws InvalidArgumentError that
// says why these bytes are no handle, or NotAvailableError for fabric handles.
IpcHandle decode(const std::string& bytes);

}  // namespace vmm
