// The part of CudaDriver that is the CUDA driver's own stream-ordered pools.
#include "driver/cuda_driver.h"

namespace vmm {
namespace {

CUmemoryPool pool_of(NativePool pool) { return reinterpret_cast<CUmemoryPool>(static_cast<std::uintptr_t>(pool)); }

}  // namespace

std::string CudaDriver::missing_pools(int device) const {
  const std::string why = missing(device);
  return why.empty() ? device_at(device).missing_pools : why;
}

Status CudaDriver::create_pool(int device, std::size_t max_bytes, NativePool* out) {
  if (const Status checked = check_device(device, "create_pool"); !checked.ok()) return checked;
  if (!device_at(device).missing_pools.empty()) return {StatusCode::not_supported, "create_pool"};
  const Current current(*this, device);
  if (!current.status().ok()) return current.status();
  CUmemPoolProps asked{};
  asked.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
  asked.handleTypes = CU_MEM_HANDLE_TYPE_NONE;
  asked.location = location(Location::on_device(device));
  // The driver holds whole granules.
  asked.maxSize = sum_overflows(max_bytes, granularity_) ? 0 : align_up(max_bytes, granularity_);
  CUmemoryPool made = nullptr;
  const RelaxedCapture relaxed(api_);
  const Status created = answer(api_.cuMemPoolCreate(&made, &asked), "cuMemPoolCreate");
  if (created.ok()) *out = reinterpret_cast<std::uintptr_t>(made);
  return created;
}

Status CudaDriver::destroy_pool(NativePool pool) {
  if (!alive()) return {StatusCode::driver_gone, "destroy_pool"};
  const RelaxedCapture relaxed(api_);
  return answer(api_.cuMemPoolDestroy(pool_of(pool)), "cuMemPoolDestroy");
}

// A stream that was made knows its context; the driver's own three are the current one's.
// Each question that is not asked saves 9 to 18 ns of some 300 (benchmarks/buffers).
Status CudaDriver::make_current_for(Stream stream, int device, std::optional<Current>* current) const {
  const auto last_of_driver = reinterpret_cast<std::uintptr_t>(CU_STREAM_PER_THREAD);
  if (reinterpret_cast<std::uintptr_t>(stream) > last_of_driver) return {};
  return current->emplace(*this, device).status();
}

Status CudaDriver::allocate_from_pool(NativePool pool, int device, std::size_t bytes, Stream stream, Address* out) {
  if (const Status checked = check_device(device, "allocate_from_pool"); !checked.ok()) return checked;
  std::optional<Current> current;
  if (const Status ready = make_current_for(stream, device, &current); !ready.ok()) return ready;
  // A graph would make it anew at each launch, where only the graph knows it.
  const Status free = check_not_captured(stream, "allocate_from_pool on a capturing stream");
  if (!free.ok()) return free;
  CUdeviceptr got = 0;
  const RelaxedCapture relaxed(api_);
  const Status allocated =
      answer(api_.cuMemAllocFromPoolAsync(&got, bytes, pool_of(pool), stream_of(stream)), "cuMemAllocFromPoolAsync");
  if (allocated.ok()) *out = got;
  return allocated;
}

Status CudaDriver::free_to_pool(int device, Address address, Stream stream) {
  if (const Status checked = check_device(device, "free_to_pool"); !checked.ok()) return checked;
  std::optional<Current> current;
  if (const Status ready = make_current_for(stream, device, &current); !ready.ok()) return ready;
  Status freed;
  {
    const RelaxedCapture relaxed(api_);
    freed = answer(api_.cuMemFreeAsync(address, stream_of(stream)), "cuMemFreeAsync");
  }
  if (freed.ok()) [[likely]]
    return freed;
  // No graph can free what none has allocated: the driver refuses, and the capture goes on.
  const Status free = check_not_captured(stream, "free_to_pool on a capturing stream");
  return free.ok() ? freed : free;
}

Status CudaDriver::trim_pool(NativePool pool, std::size_t keep) {
  if (!alive()) return {StatusCode::driver_gone, "trim_pool"};
  const RelaxedCapture relaxed(api_);
  return answer(api_.cuMemPoolTrimTo(pool_of(pool), keep), "cuMemPoolTrimTo");
}

Status CudaDriver::set_release_threshold(NativePool pool, std::size_t bytes) {
  if (!alive()) return {StatusCode::driver_gone, "set_release_threshold"};
  cuuint64_t value = bytes;
  return answer(api_.cuMemPoolSetAttribute(pool_of(pool), CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &value),
                "cuMemPoolSetAttribute");
}

Status CudaDriver::release_threshold(NativePool pool, std::size_t* out) const {
  return pool_attribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, out);
}

Status CudaDriver::pool_attribute(NativePool pool, CUmemPool_attribute which, std::size_t* out) const {
  if (!alive()) return {StatusCode::driver_gone, "pool_attribute"};
  cuuint64_t value = 0;
  const Status asked = answer(api_.cuMemPoolGetAttribute(pool_of(pool), which, &value), "cuMemPoolGetAttribute");
  if (asked.ok()) *out = value;
  return asked;
}

Status CudaDriver::pool_usage(NativePool pool, NativePoolUsage* out) const {
  NativePoolUsage usage;
  Status asked = pool_attribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &usage.used);
  if (asked.ok()) asked = pool_attribute(pool, CU_MEMPOOL_ATTR_USED_MEM_HIGH, &usage.used_peak);
  if (asked.ok()) asked = pool_attribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &usage.reserved);
  if (asked.ok()) asked = pool_attribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, &usage.reserved_peak);
  if (asked.ok()) *out = usage;
  return asked;
}

}  // namespace vmm
