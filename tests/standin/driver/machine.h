// What this process pretends to have: devices, their primary contexts, and how
// far CUDA's life has come here. It never knows memory or streams.
//
// STANDIN_DEVICES (1) and STANDIN_DEVICE_BYTES (16 GiB, each) say what there
// is, CUDA_VISIBLE_DEVICES what of it is seen, STANDIN_MEMORY_POOLS=0 that no
// device has memory pools; all are read by the first cuInit() that succeeds. As with CUDA, a child that is forked after
// that has nothing: every call answers CUDA_ERROR_NOT_INITIALIZED there; and once the process has begun to end,
// CUDA_ERROR_DEINITIALIZED.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <string>

namespace standin {

// What an entry point needs before it can do anything.
enum class Needs : unsigned char { nothing, init, context };

// The first thing that every entry point does: counts the call, and answers
// what it has to answer at once: a failure that a test asked for, or why CUDA
// cannot be used.
CUresult enter(const char* call, Needs needs);

// NOLINTNEXTLINE(cppcoreguidelines-macro-usage): returns from the entry point that it names
#define STANDIN_ENTER(needs) \
  if (const CUresult refused = ::standin::enter(__func__, needs); refused != CUDA_SUCCESS) return refused

// What work on a stream needs: one that is named has its own context.
[[nodiscard]] inline Needs needs_of(CUstream stream) {
  const bool has_name = stream != nullptr && stream != CU_STREAM_LEGACY && stream != CU_STREAM_PER_THREAD;
  return has_name ? Needs::init : Needs::context;
}

// A mistake of the caller's that CUDA would crash or corrupt memory on.
[[noreturn]] void die(const std::string& call, const std::string& what);

CUresult initialise();

// REQUIRES for all below: initialise() has succeeded.
int device_count();
std::size_t device_bytes();
bool has_memory_pools();
// The number that the device has without CUDA_VISIBLE_DEVICES.
int physical_device(int device);
[[nodiscard]] inline bool has_device(int device) { return device >= 0 && device < device_count(); }

// -- Primary contexts: one a device. The calling thread has a stack of current ones.
CUcontext primary_context(int device);
// -1: no context of ours.
int device_of(CUcontext context);
void retain(int device);
bool release(int device);  // false: it was not retained
bool is_active(int device);

CUcontext current_context();
// REQUIRES: there is a current context.
int current_device();
void set_current(CUcontext context);
void push_current(CUcontext context);
bool pop_current(CUcontext* out);  // false: none

}  // namespace standin
