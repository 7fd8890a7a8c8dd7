// The one place that knows torch's version. torch's allocator interface grows
// with every minor release; what differs between 2.11 and 2.15 is named here,
// and everything else in this folder reads the same for all of them.
#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/headeronly/version.h>

#include <string_view>

static_assert(TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 11 && TORCH_VERSION_MINOR <= 15,
              "torch_vmm supports torch 2.11 to 2.15");
#if defined(VMM_TORCH_MAJOR) && defined(VMM_TORCH_MINOR)
static_assert(TORCH_VERSION_MAJOR == VMM_TORCH_MAJOR && TORCH_VERSION_MINOR == VMM_TORCH_MINOR,
              "the headers are not those of the torch that setup.py found");
#endif

// Keeps its arguments where torch has what they override or set, drops them
// where it does not.
#if TORCH_VERSION_MINOR >= 12
#define VMM_SINCE_TORCH_2_12(...) __VA_ARGS__
#else
#define VMM_SINCE_TORCH_2_12(...)
#endif
#if TORCH_VERSION_MINOR >= 13
#define VMM_SINCE_TORCH_2_13(...) __VA_ARGS__
#else
#define VMM_SINCE_TORCH_2_13(...)
#endif
#if TORCH_VERSION_MINOR >= 14
#define VMM_SINCE_TORCH_2_14(...) __VA_ARGS__
#else
#define VMM_SINCE_TORCH_2_14(...)
#endif

// Since 2.13 torch notes the size of each cuBLAS workspace beside it.
#define VMM_WORKSPACES_HAVE_SIZES (TORCH_VERSION_MINOR >= 13)

// Up to 2.11 torch's random generator has one flag for all captures, set before
// one begins and cleared when it has ended well (CUDAGeneratorState::capturing_);
// since 2.12 it has a state for each capture.
#define VMM_GENERATOR_HAS_CAPTURE_FLAG (TORCH_VERSION_MINOR <= 11)

// Since 2.13 torch ends the route of a capture that failed (pytorch/pytorch#180395), and since
// 2.14 it releases its region when the graph goes (#190348).
#define VMM_FAILED_CAPTURES_ARE_ENDED (TORCH_VERSION_MINOR >= 13)
#define VMM_FAILED_CAPTURES_ARE_RELEASED (TORCH_VERSION_MINOR >= 14)

namespace vmm {

// The slot of ThreadLocalDebugInfo that holds the thread's models. Up to 2.12
// the slots are a fixed list, with two that torch leaves to tests; since 2.13
// anyone can have one.
#if TORCH_VERSION_MINOR >= 13
inline constexpr std::string_view kModelSlotName = "TORCH_VMM_MODEL";
inline constexpr c10::DebugInfoKind kModelSlot{&kModelSlotName};
#else
inline constexpr c10::DebugInfoKind kModelSlot = c10::DebugInfoKind::TEST_INFO_2;
#endif

// The first byte of the handles by which torch shares memory with other
// processes (ipc_handle).
#if TORCH_VERSION_MINOR >= 13
inline constexpr int kShareableHandleVersion = 3;
#else
inline constexpr int kShareableHandleVersion = 2;
#endif

// torch's version at build time, "2.11.0".
inline constexpr const char* kBuiltForTorch = TORCH_VERSION;

}  // namespace vmm
