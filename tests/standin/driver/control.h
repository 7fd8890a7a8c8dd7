// What tests do to the stand-in, beside CUDA's own calls. Python reaches it
// through ctypes (tests/standin/control.py); host_kernels.cpp links it.
#pragma once

#include <cuda.h>

#include <cstddef>

extern "C" {

// Nothing that is queued on the stream is done until it is released. Of the
// default streams: the current device's, or the first one's.
void standin_hold(CUstream stream);
void standin_release(CUstream stream);

// Queues, or captures, work that does nothing for so long.
CUresult standin_sleep(CUstream stream, double ms);

// What a kernel would be: `function(data)` is called in the stream's order,
// once or, captured, at each launch of the graph; `end(data)` when it never
// will be again. It uses the ranges, and nothing else of the device's memory.
struct StandinRange {
  CUdeviceptr address;
  std::size_t size;  // bytes
  int writes;        // 0: reads only
};
CUresult standin_launch(CUstream stream, const char* name, void (*function)(void*), void (*end)(void*), void* data,
                        const StandinRange* ranges, std::size_t count);

// Calls of an entry point so far, by its name in the documentation.
std::size_t standin_calls(const char* name);
// The nth call of it from now on (1: the next) answers `code` and does nothing.
void standin_fail(const char* name, std::size_t nth, int code);
void standin_fail_no_more();

// For libcudart: counts a call of one of its functions; answers an injected code.
int standin_enter(const char* name);
}
