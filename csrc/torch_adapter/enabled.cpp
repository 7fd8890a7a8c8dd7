#include "torch_adapter/enabled.h"

#include <atomic>

#include "torch_adapter/cuda_allocator.h"
#include "torch_adapter/host_allocator.h"

namespace vmm {

namespace {
std::atomic<bool> entry_points_used{false};
}  // namespace

bool is_enabled(DeviceKind kind) {
  return kind == DeviceKind::cuda ? CudaAllocator::is_current() : HostAllocator::is_enabled();
}

bool may_allocate(DeviceKind kind) {
  if (is_enabled(kind)) return true;
  if (kind == DeviceKind::cpu) return false;  // torch takes one allocator of host memory
  // A MemPool shares the object that it was given, and so does whoever is about to make one.
  return CudaAllocator::instance().use_count() > 1 || entry_points_used.load(std::memory_order_relaxed);
}

void note_entry_points_used() {
  if (!entry_points_used.load(std::memory_order_relaxed)) entry_points_used.store(true, std::memory_order_relaxed);
}

}  // namespace vmm
