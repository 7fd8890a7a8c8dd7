// libcuda's entry points: streams, events, and work on memory.
#include <cuda.h>

#include <array>
#include <cstring>
#include <utility>

#include "captures.h"
#include "events.h"
#include "machine.h"
#include "memory.h"
#include "queue.h"

namespace {

using namespace standin;  // NOLINT(google-build-using-namespace)

Memory& memory() { return Memory::instance(); }

void* pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

CUresult submit_job(const char* call, CUstream stream, std::function<void(int)> run, PointPtr* end = nullptr) {
  Lock lock(world().mutex);
  Job job;
  job.call = call;
  job.run = std::move(run);
  return submit(lock, stream_of(stream, call), std::make_shared<const Job>(std::move(job)), {}, end);
}

void finish(const PointPtr& end) {
  Lock lock(world().mutex);
  wait(lock, end);
}

bool is_captured(CUstream stream, const char* call) {
  const Lock lock(world().mutex);
  return status_of(stream_of(stream, call)) != CU_STREAM_CAPTURE_STATUS_NONE;
}

// A copy between any two places. Pageable host memory is read at the call and
// written before it returns, as CUDA does; in a graph it is used at each launch.
CUresult copy(const char* call, CUdeviceptr to, CUdeviceptr from, std::size_t size, int to_device, int from_device,
              CUstream stream) {
  if (size == 0) return CUDA_SUCCESS;
  const bool captured = is_captured(stream, call);
  const bool staged = !captured && memory().place_of(from).kind == Kind::host;
  const bool waits = !captured && memory().place_of(to).kind == Kind::host;
  std::shared_ptr<std::vector<char>> stage;
  if (staged) {
    const auto* const bytes = static_cast<const char*>(pointer(from));
    stage = std::make_shared<std::vector<char>>(bytes, bytes + size);
  }
  const auto run = [=, name = std::string(call)](int device) {
    memory().must_reach(name, to_device < 0 ? device : to_device, to, size, /*writes=*/true, /*across_devices=*/true);
    if (stage == nullptr) {
      memory().must_reach(name, from_device < 0 ? device : from_device, from, size, /*writes=*/false,
                          /*across_devices=*/true);
    }
    std::memmove(pointer(to), stage == nullptr ? pointer(from) : stage->data(), size);
  };
  PointPtr end;
  const CUresult queued = submit_job(call, stream, run, &end);
  if (queued == CUDA_SUCCESS && waits) finish(end);
  return queued;
}

// What CUDA does not answer of a captured stream, nor of the default one while
// a blocking stream is captured. Either ends the capture.
CUresult refuse_question(const Stream& stream) {
  if (const CUresult refused = refuse_captured(stream); refused != CUDA_SUCCESS) return refused;
  return refuse_implicit(stream, /*invalidates=*/true);
}

template <typename Value>
CUresult fill(const char* call, CUdeviceptr address, Value value, std::size_t count, CUstream stream) {
  if (count == 0) return CUDA_SUCCESS;
  if (address % sizeof(Value) != 0) return CUDA_ERROR_INVALID_VALUE;
  return submit_job(call, stream, [=, name = std::string(call)](int device) {
    memory().must_reach(name, device, address, count * sizeof(Value), /*writes=*/true, /*across_devices=*/false);
    if (memory().place_of(address).kind == Kind::host) die(name, "of the host's own memory");
    auto* const first = static_cast<Value*>(pointer(address));
    if constexpr (sizeof(Value) == 1) {
      std::memset(first, value, count);
    } else {
      std::fill(first, first + count, value);
    }
  });
}

}  // namespace

extern "C" {

// -- Streams.

CUresult cuStreamCreateWithPriority(CUstream* out, unsigned flags, int priority) {
  STANDIN_ENTER(Needs::context);
  const Lock lock(world().mutex);
  *out = handle_of(make_stream(current_device(), flags, std::clamp(priority, -5, 0)));
  return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream* out, unsigned flags) {
  STANDIN_ENTER(Needs::context);
  return cuStreamCreateWithPriority(out, flags, 0);
}

// What is queued on it is still done.
CUresult cuStreamDestroy(CUstream handle) {
  STANDIN_ENTER(Needs::context);
  const Lock lock(world().mutex);
  Stream& stream = stream_of(handle, __func__);
  if (stream.legacy) return CUDA_ERROR_INVALID_HANDLE;
  (void)refuse_captured(stream);
  stream.alive = false;
  return CUDA_SUCCESS;
}

// Of the default stream even this ends the captures of blocking ones.
CUresult cuStreamGetPriority(CUstream handle, int* priority) {
  STANDIN_ENTER(Needs::context);
  const Lock lock(world().mutex);
  const Stream& stream = stream_of(handle, __func__);
  if (const CUresult refused = refuse_implicit(stream, true); refused != CUDA_SUCCESS) return refused;
  *priority = stream.priority;
  return CUDA_SUCCESS;
}

CUresult cuStreamGetFlags(CUstream handle, unsigned* flags) {
  STANDIN_ENTER(Needs::context);
  const Lock lock(world().mutex);
  const Stream& stream = stream_of(handle, __func__);
  if (const CUresult refused = refuse_question(stream); refused != CUDA_SUCCESS) return refused;
  *flags = stream.flags;
  return CUDA_SUCCESS;
}

CUresult cuStreamGetId(CUstream handle, unsigned long long* id) {
  STANDIN_ENTER(Needs::context);
  const Lock lock(world().mutex);
  const Stream& stream = stream_of(handle, __func__);
  if (const CUresult refused = refuse_question(stream); refused != CUDA_SUCCESS) return refused;
  *id = reinterpret_cast<std::uintptr_t>(&stream);
  return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream handle) {
  STANDIN_ENTER(Needs::context);
  Lock lock(world().mutex);
  Stream& stream = stream_of(handle, __func__);
  if (const CUresult refused = refuse_question(stream); refused != CUDA_SUCCESS) return refused;
  if (const CUresult refused = refuse_unsafe(); refused != CUDA_SUCCESS) return refused;
  if (stream.legacy) {
    for (const auto& other : world().streams) {
      if (other->device == stream.device && other->blocking()) wait(lock, other->last);
    }
  }
  wait(lock, stream.last);
  return CUDA_SUCCESS;
}

CUresult cuStreamQuery(CUstream handle) {
  STANDIN_ENTER(Needs::context);
  Lock lock(world().mutex);
  Stream& stream = stream_of(handle, __func__);
  if (const CUresult refused = refuse_question(stream); refused != CUDA_SUCCESS) return refused;
  if (const CUresult refused = refuse_unsafe(); refused != CUDA_SUCCESS) return refused;
  pump(lock);
  return has_passed(stream.last) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuStreamWaitEvent(CUstream handle, CUevent event_handle, unsigned /*flags*/) {
  STANDIN_ENTER(Needs::context);
  Lock lock(world().mutex);
  Stream& stream = stream_of(handle, __func__);
  const Event& event = event_of(event_handle, __func__);
  if (stream.captured.capture != nullptr || event.captured.capture != nullptr) return capture_wait(stream, event);
  if (const CUresult refused = refuse_implicit(stream, true); refused != CUDA_SUCCESS) return refused;
  const PointPtr point = point_of(event);
  if (has_passed(point)) return CUDA_SUCCESS;
  Job job;
  job.call = __func__;
  return submit(lock, stream, std::make_shared<const Job>(std::move(job)), {point});
}

CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void* data) {
  STANDIN_ENTER(Needs::context);
  return submit_job(__func__, stream, [=](int) { function(data); });
}

// -- Events.

CUresult cuEventCreate(CUevent* out, unsigned flags) {
  STANDIN_ENTER(Needs::context);
  const Lock lock(world().mutex);
  return make_event(current_device(), flags, out);
}

CUresult cuEventDestroy(CUevent handle) {
  STANDIN_ENTER(Needs::init);
  const Lock lock(world().mutex);
  destroy_event(event_of(handle, __func__));
  return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent handle, CUstream stream_handle) {
  STANDIN_ENTER(Needs::context);
  Lock lock(world().mutex);
  Event& event = event_of(handle, __func__);
  Stream& stream = stream_of(stream_handle, __func__);
  if (event.device != stream.device) return CUDA_ERROR_INVALID_HANDLE;
  return record_event(lock, event, stream);
}

CUresult cuCtxRecordEvent(CUcontext context, CUevent handle) {
  STANDIN_ENTER(Needs::init);
  Lock lock(world().mutex);
  const int device = device_of(context);
  if (device < 0) die(__func__, "of what is no context");
  Event& event = event_of(handle, __func__);
  if (const CUresult refused = refuse_any_capture(device); refused != CUDA_SUCCESS) return refused;
  return record_event_everywhere(lock, event, device);
}

CUresult cuEventQuery(CUevent handle) {
  STANDIN_ENTER(Needs::init);
  Lock lock(world().mutex);
  const Event& event = event_of(handle, __func__);
  if (const CUresult refused = refuse_captured_event(event); refused != CUDA_SUCCESS) return refused;
  if (const CUresult refused = refuse_unsafe(); refused != CUDA_SUCCESS) return refused;
  pump(lock);
  return has_passed(point_of(event)) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuEventSynchronize(CUevent handle) {
  STANDIN_ENTER(Needs::init);
  Lock lock(world().mutex);
  const Event& event = event_of(handle, __func__);
  if (const CUresult refused = refuse_captured_event(event); refused != CUDA_SUCCESS) return refused;
  if (const CUresult refused = refuse_unsafe(); refused != CUDA_SUCCESS) return refused;
  wait(lock, point_of(event));
  return CUDA_SUCCESS;
}

CUresult cuEventElapsedTime(float* ms, CUevent first, CUevent second) {
  STANDIN_ENTER(Needs::init);
  const Lock lock(world().mutex);
  const Event& from = event_of(first, __func__);
  const Event& to = event_of(second, __func__);
  if (((from.flags | to.flags) & CU_EVENT_DISABLE_TIMING) != 0 || !from.point || !to.point) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  if (!has_passed(from.point) || !has_passed(to.point)) return CUDA_ERROR_NOT_READY;
  *ms = std::chrono::duration<float, std::milli>(to.point->at - from.point->at).count();
  return CUDA_SUCCESS;
}

CUresult cuIpcGetEventHandle(CUipcEventHandle* out, CUevent handle) {
  STANDIN_ENTER(Needs::init);
  const Lock lock(world().mutex);
  return share_event(event_of(handle, __func__), out);
}

CUresult cuIpcOpenEventHandle(CUevent* out, CUipcEventHandle handle) {
  STANDIN_ENTER(Needs::context);
  const Lock lock(world().mutex);
  return open_event(current_device(), handle, out);
}

// -- Work on memory.

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, std::size_t size, CUstream stream) {
  STANDIN_ENTER(Needs::context);
  return copy(__func__, to, from, size, -1, -1, stream);
}

CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context,
                           std::size_t size, CUstream stream) {
  STANDIN_ENTER(Needs::context);
  return copy(__func__, to, from, size, device_of(to_context), device_of(from_context), stream);
}

CUresult cuMemsetD8Async(CUdeviceptr address, unsigned char value, std::size_t count, CUstream stream) {
  STANDIN_ENTER(needs_of(stream));
  return fill(__func__, address, value, count, stream);
}

CUresult cuMemsetD16Async(CUdeviceptr address, unsigned short value, std::size_t count, CUstream stream) {
  STANDIN_ENTER(needs_of(stream));
  return fill(__func__, address, value, count, stream);
}

CUresult cuMemsetD32Async(CUdeviceptr address, unsigned value, std::size_t count, CUstream stream) {
  STANDIN_ENTER(needs_of(stream));
  return fill(__func__, address, value, count, stream);
}

}  // extern "C"
