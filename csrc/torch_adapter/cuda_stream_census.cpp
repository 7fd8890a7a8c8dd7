// Which streams torch has on a GPU, for the device's clock.
//
// torch makes its streams in pools of 32, a pool a priority, all when the first
// one is asked for, and never destroys them. A stream is named by a number: its
// place in the pool, the priority, and a last bit that is 1 (c10/cuda/
// CUDAStream.cpp, the same in 2.11 to 2.15; tests/adapter and tests/gpu hold this
// against streams that torch hands out). So all of them can be asked for without
// taking one from the pool, which would change what the program gets.
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <tuple>
#include <vector>

#include "driver/device_fault.h"
#include "torch_adapter/cuda_callbacks.h"

namespace vmm {

namespace {

constexpr int kStreamsPerPool = 32;
constexpr int kPlaceShift = 5;

c10::StreamId stream_id(int pool, int place) {
  return (static_cast<c10::StreamId>(place) << kPlaceShift) | (static_cast<c10::StreamId>(pool) << 1) | 1;
}

int count_pools(int ordinal) {
  (void)c10::cuda::getDefaultCUDAStream(static_cast<c10::DeviceIndex>(ordinal));  // torch counts its priorities then
  const auto [lowest, highest] = c10::cuda::CUDAStream::priority_range();
  return lowest - highest + 1;
}

void permanent_streams(int ordinal, std::vector<Stream>* out) {
  static const int pools = count_pools(ordinal);
  for (int pool = 1; pool <= pools; ++pool) {
    for (int place = 0; place < kStreamsPerPool; ++place) {
      const c10::Stream stream(c10::Stream::UNSAFE, {c10::kCUDA, static_cast<c10::DeviceIndex>(ordinal)},
                               stream_id(pool, place));
      cudaStream_t handle = c10::cuda::CUDAStream(c10::cuda::CUDAStream::UNCHECKED, stream).stream();
      if (handle == nullptr) return;  // no pools yet
      out->push_back(handle);
    }
  }
}

// After error 700 torch's functions throw for ever, and no stream has work any more: none
// are told of, so that debug mode can still say what it knows.
void permanent_streams_if_alive(int ordinal, std::vector<Stream>* out) {
  try {
    permanent_streams(ordinal, out);
  } catch (const c10::Error&) {
    if (cudaStreamQuery(nullptr) != cudaErrorIllegalAddress) throw;
    note_device_fault("cudaStreamQuery");
  }
}

// Asking a stream that is being captured for its flags ends the capture. Such a
// one counts as not blocking until it is met again.
bool is_blocking(Stream stream) {
  auto* const handle = static_cast<cudaStream_t>(stream);
  auto capturing = cudaStreamCaptureStatusNone;
  unsigned flags = 0;
  const bool known = cudaStreamIsCapturing(handle, &capturing) == cudaSuccess &&
                     capturing == cudaStreamCaptureStatusNone && cudaStreamGetFlags(handle, &flags) == cudaSuccess;
  if (!known) (void)cudaGetLastError();  // torch would take it for its own call's
  return known && (flags & cudaStreamNonBlocking) == 0;
}

}  // namespace

StreamCensus cuda_stream_census(int ordinal) {
  return {[ordinal](std::vector<Stream>* out) { permanent_streams_if_alive(ordinal, out); }, &is_blocking};
}

}  // namespace vmm
