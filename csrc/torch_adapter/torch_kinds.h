// What torch has for each kind of device of ours, in one table: another kind is an
// allocator of torch's for it, and an entry here.
#pragma once

#include <c10/core/Device.h>

#include "process/device_kind.h"

namespace vmm {

struct TorchKind {
  c10::DeviceType type;
  // Torch tells its devices by number: "cuda:1". The host is one: "cpu".
  bool is_numbered;
  // Whose capacity torch's sentence for memory that ran out tells; a number follows where there is one.
  const char* holder;
  // What the user calls to have torch's tensors there made by us, and when.
  const char* enable;
  const char* enable_when;
  // We are torch's allocator there.
  bool (*is_enabled)();
  // Torch has the allocator object, though it need not be in use. Never, where that is nullptr.
  bool (*is_held)();
};

const TorchKind& torch_kind(DeviceKind kind);

inline c10::Device torch_device(DeviceKind kind, int ordinal) {
  const TorchKind& of = torch_kind(kind);
  return {of.type, static_cast<c10::DeviceIndex>(of.is_numbered ? ordinal : -1)};
}

}  // namespace vmm
