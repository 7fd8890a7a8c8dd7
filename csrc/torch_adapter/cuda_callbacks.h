// What torch and CUDA do for the process' GPUs: the hooks of their kind (see
// process/device_kind.h, which knows no torch).
#pragma once

#include "core/device/private_pools.h"
#include "core/streams/device_streams.h"

namespace vmm {

struct DeviceRoom;

// torch's registered ways of freeing GPU memory when there is none left.
// Runs every FreeMemoryCallback; true if one of them freed something. Does
// nothing unless torch allocates through us: another allocator would be asked
// to free while it holds its own lock.
bool run_cuda_free_memory_callbacks();

// Tells torch's memory history, its observers and the profiler that a request of
// `asker`, for whatever, found no memory. What observers throw comes out.
void tell_cuda_out_of_memory(DeviceRoom& room, const Pool& asker, std::size_t bytes, Stream stream);

// What private_pools has to know of captures on this GPU, and what torch
// leaves undone after a failed one.
CaptureHooks cuda_capture_hooks(int ordinal);

// Which streams torch has on this GPU, and what kind others' are.
StreamCensus cuda_stream_census(int ordinal);

// Lets torch's memory history, if it is on, see what happens on a new device.
void watch_cuda_memory(DeviceRoom& room);

}  // namespace vmm
