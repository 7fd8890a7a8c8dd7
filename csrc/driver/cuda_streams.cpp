// The part of CudaDriver that works on streams: fences, copies, fills.
#include "driver/cuda_driver.h"

#include <iterator>

namespace vmm {
namespace {

CUevent event_of(const FenceTable::Entry& entry) { return static_cast<CUevent>(entry.event); }

}  // namespace

// -- Fences.

Status CudaDriver::find_fence(Fence fence, const char* call, FenceTable::Entry* out) const {
  if (!alive()) return gone(call);
  return fences_.find(fence, out) ? Status::okay() : refuse("an unknown fence");
}

Status CudaDriver::check_not_captured(Stream stream, const char* call) const {
  CUstreamCaptureStatus capturing = CU_STREAM_CAPTURE_STATUS_NONE;
  const Status asked = answer(api_.cuStreamIsCapturing(stream_of(stream), &capturing), "cuStreamIsCapturing");
  if (!asked.ok()) return asked;
  if (capturing != CU_STREAM_CAPTURE_STATUS_NONE) return {StatusCode::not_supported, call};
  return {};
}

Status CudaDriver::create_fence(int device, Fence* out) {
  if (const Status checked = check_device(device, "create_fence"); !checked.ok()) return checked;
  const Current current(*this, device);
  if (!current.status().ok()) return current.status();
  provide_block_to_free(device_at(device)).ignore();
  CUevent event = nullptr;
  const Status created = answer(api_.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
  if (!created.ok()) return created;
  const Fence fence = fences_.add({event, device});
  if (fence == nullptr) {
    answer(api_.cuEventDestroy(event), "cuEventDestroy").ignore();
    return {StatusCode::out_of_memory, "create_fence"};
  }
  *out = fence;
  return {};
}

Status CudaDriver::destroy_fence(Fence fence) {
  if (!alive()) return gone("destroy_fence");
  FenceTable::Entry entry;
  if (!fences_.remove(fence, &entry)) return refuse("an unknown fence");
  const Current current(*this, entry.device);
  if (!current.status().ok()) return current.status();
  return answer(api_.cuEventDestroy(event_of(entry)), "cuEventDestroy");
}

Status CudaDriver::record(Fence fence, Stream stream) {
  static constexpr const char* kCall = "record on a capturing stream";
  FenceTable::Entry entry;
  if (const Status found = find_fence(fence, "record", &entry); !found.ok()) return found;
  const Current current(*this, entry.device);
  if (!current.status().ok()) return current.status();
  if (const Status free = check_not_captured(stream, kCall); !free.ok()) return free;
  const Status recorded = answer(api_.cuEventRecord(event_of(entry), stream_of(stream)), "cuEventRecord");
  if (!recorded.ok()) return recorded;
  // Where a capture began in between, the event is part of it: asking it would
  // end the capture, recording it once more is fine.
  return check_not_captured(stream, kCall);
}

Status CudaDriver::query(Fence fence) {
  FenceTable::Entry entry;
  if (const Status found = find_fence(fence, "query", &entry); !found.ok()) return found;
  const Current current(*this, entry.device);
  if (!current.status().ok()) return current.status();
  const RelaxedCapture relaxed(api_);
  return answer(api_.cuEventQuery(event_of(entry)), "cuEventQuery");
}

Status CudaDriver::wait(Fence fence) {
  FenceTable::Entry entry;
  if (const Status found = find_fence(fence, "wait", &entry); !found.ok()) return found;
  const Current current(*this, entry.device);
  if (!current.status().ok()) return current.status();
  const RelaxedCapture relaxed(api_);
  return answer(api_.cuEventSynchronize(event_of(entry)), "cuEventSynchronize");
}

// The default stream is the current device's, so it is the waiting stream's device
// that is made current, not the fence's.
Status CudaDriver::stream_wait(int device, Stream stream, Fence fence) {
  FenceTable::Entry entry;
  if (const Status found = find_fence(fence, "stream_wait", &entry); !found.ok()) return found;
  if (const Status checked = check_device(device, "stream_wait"); !checked.ok()) return checked;
  const Current current(*this, device);
  if (!current.status().ok()) return current.status();
  if (const Status free = check_not_captured(stream, "stream_wait on a capturing stream"); !free.ok()) return free;
  return answer(api_.cuStreamWaitEvent(stream_of(stream), event_of(entry), 0), "cuStreamWaitEvent");
}

Status CudaDriver::provide_block_to_free(Device& device) const {
  if (device.to_free.load(std::memory_order_relaxed) != 0) return {};
  CUdeviceptr block = 0;
  const RelaxedCapture relaxed(api_);
  // The driver cuts small blocks from a page of 2 MiB. With another one in it the page stays when
  // the block is freed, and has room for the next on a GPU that is full by then.
  if (device.beside_it.load(std::memory_order_relaxed) == 0) {
    CUdeviceptr beside = 0;
    if (const Status got = answer(api_.cuMemAlloc(&beside, 1), "cuMemAlloc"); !got.ok()) return got;
    CUdeviceptr nothing = 0;
    if (!device.beside_it.compare_exchange_strong(nothing, beside)) {
      answer(api_.cuMemFree(beside), "cuMemFree").ignore();
    }
  }
  if (const Status got = answer(api_.cuMemAlloc(&block, 1), "cuMemAlloc"); !got.ok()) return got;
  CUdeviceptr none = 0;
  if (device.to_free.compare_exchange_strong(none, block)) return {};
  return answer(api_.cuMemFree(block), "cuMemFree");  // another thread was faster
}

Status CudaDriver::synchronize(int device) {
  if (const Status checked = check_device(device, "synchronize"); !checked.ok()) return checked;
  const Current current(*this, device);
  if (!current.status().ok()) return current.status();
  Device& its = device_at(device);
  if (const Status provided = provide_block_to_free(its); !provided.ok()) return provided;
  const RelaxedCapture relaxed(api_);
  const CUdeviceptr block = its.to_free.exchange(0);
  if (block != 0) {
    if (const Status waited = answer(api_.cuMemFree(block), "cuMemFree"); !waited.ok()) return waited;
    provide_block_to_free(its).ignore();  // the next wait may find room for it
    return {};
  }
  // Another thread is waiting with the one there was.
  CUdeviceptr own = 0;
  if (const Status got = answer(api_.cuMemAlloc(&own, 1), "cuMemAlloc"); !got.ok()) return got;
  return answer(api_.cuMemFree(own), "cuMemFree");
}

// -- Streams of one's own, and pinned memory.

Status CudaDriver::create_stream(int device, Stream* out) {
  if (const Status checked = check_device(device, "create_stream"); !checked.ok()) return checked;
  const Current current(*this, device);
  if (!current.status().ok()) return current.status();
  const RelaxedCapture relaxed(api_);
  CUstream made = nullptr;
  const Status created = answer(api_.cuStreamCreate(&made, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  if (created.ok()) *out = made;
  return created;
}

Status CudaDriver::destroy_stream(int device, Stream stream) {
  if (const Status checked = check_device(device, "destroy_stream"); !checked.ok()) return checked;
  const Current current(*this, device);
  if (!current.status().ok()) return current.status();
  return answer(api_.cuStreamDestroy(stream_of(stream)), "cuStreamDestroy");
}

// For all contexts: what is saved there next may be another device's. Kernels reach it too.
Status CudaDriver::pin_host(Address address, std::size_t size) {
  if (const Status checked = check_device(0, "pin"); !checked.ok()) return checked;
  const Current current(*this, device_for_host());
  if (!current.status().ok()) return current.status();
  const RelaxedCapture relaxed(api_);
  void* const begin = reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr)
  return answer(api_.cuMemHostRegister(begin, size, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP),
                "cuMemHostRegister");
}

Status CudaDriver::unpin_host(Address address) {
  if (!alive()) return gone("unpin");
  const Current current(*this, device_for_host());
  if (!current.status().ok()) return current.status();
  const RelaxedCapture relaxed(api_);
  void* const begin = reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr)
  return answer(api_.cuMemHostUnregister(begin), "cuMemHostUnregister");
}

// -- Content.

std::size_t CudaDriver::one_piece(Address address, std::size_t size) const {
  if (host_accessible_.load(std::memory_order_relaxed) == 0) return size;
  const MutexLock lock(mutex_);
  const auto& mappings = book_.mappings();
  const auto here = book_.mapping_at(address);
  const bool kind = here != mappings.end() && here->second.access() != Access::none;
  for (auto next = mappings.upper_bound(address); next != mappings.end() && next->first - address < size; ++next) {
    if ((next->second.access() != Access::none) != kind) return next->first - address;
  }
  return size;
}

Status CudaDriver::copy_async(int device, Address to, Address from, std::size_t size, Stream stream) {
  if (const Status checked = check_device(device, "copy_async"); !checked.ok()) return checked;
  if (size == 0) return refuse("copy of size zero");
  const Current current(*this, device);
  if (!current.status().ok()) return current.status();
  if (const Status free = check_not_captured(stream, "copy_async on a capturing stream"); !free.ok()) return free;
  for (std::size_t done = 0; done < size;) {
    const std::size_t piece = one_piece(from + done, one_piece(to + done, size - done));
    const Status issued = answer(api_.cuMemcpyAsync(to + done, from + done, piece, stream_of(stream)), "cuMemcpyAsync");
    if (!issued.ok()) return issued;
    done += piece;
  }
  return {};
}

Status CudaDriver::fill_async(int device, Address address, std::uint8_t byte, std::size_t size, Stream stream) {
  if (const Status checked = check_device(device, "fill_async"); !checked.ok()) return checked;
  if (size == 0) return refuse("fill of size zero");
  const Current current(*this, device);
  if (!current.status().ok()) return current.status();
  if (const Status free = check_not_captured(stream, "fill_async on a capturing stream"); !free.ok()) return free;
  for (std::size_t done = 0; done < size;) {
    const std::size_t piece = one_piece(address + done, size - done);
    const Status issued =
        answer(api_.cuMemsetD8Async(address + done, byte, piece, stream_of(stream)), "cuMemsetD8Async");
    if (!issued.ok()) return issued;
    done += piece;
  }
  return {};
}

// A stream that nobody else has, which waits for no other: made once, for good.
Status CudaDriver::reading_stream(Device& device, CUstream* out) {
  *out = device.reading.load(std::memory_order_acquire);
  if (*out != nullptr) return {};
  const MutexLock lock(context_mutex_);
  *out = device.reading.load(std::memory_order_relaxed);
  if (*out != nullptr) return {};
  const Status made = answer(api_.cuStreamCreate(out, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  if (made.ok()) device.reading.store(*out, std::memory_order_release);
  return made;
}

Status CudaDriver::read(int device, void* to, Address from, std::size_t size) {
  if (const Status checked = check_device(device, "read"); !checked.ok()) return checked;
  if (size == 0) return refuse("read of size zero");
  const Current current(*this, device);
  if (!current.status().ok()) return current.status();
  const RelaxedCapture relaxed(api_);
  CUstream stream = nullptr;
  if (const Status made = reading_stream(device_at(device), &stream); !made.ok()) return made;
  for (std::size_t done = 0; done < size;) {
    const std::size_t piece = one_piece(from + done, size - done);
    const Status issued = answer(
        api_.cuMemcpyAsync(reinterpret_cast<CUdeviceptr>(to) + done, from + done, piece, stream), "cuMemcpyAsync");
    if (!issued.ok()) return issued;
    done += piece;
  }
  return answer(api_.cuStreamSynchronize(stream), "cuStreamSynchronize");
}

}  // namespace vmm
