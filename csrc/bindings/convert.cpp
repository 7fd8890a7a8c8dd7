#include <c10/cuda/CUDAStream.h>

#include "base/errors.h"
#include "bindings/bind.h"

namespace vmm::bindings {

DeviceKind to_kind(const std::string& kind) {
  std::string known;
  for (const DeviceKind each : kDeviceKinds) {
    if (kind == to_string(each)) return each;
    known += std::string(known.empty() ? "'" : " or '") + to_string(each) + "'";
  }
  throw InvalidArgumentError("kind of device '" + kind + "': give " + known);
}

DeviceRoom& to_room(const std::string& kind, int ordinal) { return Runtime::room(to_kind(kind), ordinal); }

std::size_t to_chosen_size(std::optional<std::size_t> size, const char* what) {
  if (size == std::size_t{0}) throw InvalidArgumentError(std::string(what) + " 0: give at least one byte");
  return size.value_or(0);
}

std::size_t to_page_size(std::optional<std::size_t> page_size, std::size_t granularity) {
  if (page_size == std::size_t{0}) throw InvalidPageSizeError(0, granularity);
  return page_size.value_or(0);
}

Stream current_stream(DeviceKind kind, int ordinal, std::optional<std::int64_t>* id) {
  if (kind != DeviceKind::cuda) return nullptr;
  static bool is_initialised = false;  // for good, once it is
  if (!is_initialised) {
    is_initialised = py::module_::import("torch.cuda").attr("is_initialized")().cast<bool>();
    if (!is_initialised) return nullptr;
  }
  const c10::cuda::CUDAStream current = c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(ordinal));
  if (id != nullptr) *id = current.id();
  return current.stream();
}

}  // namespace vmm::bindings
