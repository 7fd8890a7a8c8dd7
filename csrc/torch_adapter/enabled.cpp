#include "torch_adapter/enabled.h"

#include <atomic>

#include "torch_adapter/torch_kinds.h"

namespace vmm {

namespace {
std::atomic<bool> entry_points_used{false};
}  // namespace

bool is_enabled(DeviceKind kind) { return torch_kind(kind).is_enabled(); }

bool may_allocate(DeviceKind kind) {
  if (is_enabled(kind)) return true;
  const auto is_held = torch_kind(kind).is_held;
  return is_held != nullptr && (is_held() || entry_points_used.load(std::memory_order_relaxed));
}

void note_entry_points_used() {
  if (!entry_points_used.load(std::memory_order_relaxed)) entry_points_used.store(true, std::memory_order_relaxed);
}

}  // namespace vmm
