#include "torch_adapter/strict.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <string>
#include <typeinfo>

#include "base/units.h"
#include "torch_adapter/errors.h"
#include "torch_adapter/routing.h"
#include "torch_adapter/torch_kinds.h"

namespace vmm {

namespace {

constexpr const char* kCureOfStrict =
    " Enter a model (with pool:, torch_vmm.use_model(...)); on another thread or in an executor run a function that "
    "torch_vmm.carry() has wrapped.";

// A thread that came in by a call from Python has a handler of torch's that
// keeps warnings for it. On any other the default one writes to stderr, each
// time: there one is enough.
void warn(const std::string& text) {
  const c10::WarningHandler* handler = c10::WarningUtils::get_warning_handler();
  if (typeid(*handler) == typeid(c10::WarningHandler)) {
    static std::atomic<bool> said{false};
    if (!said.exchange(true, std::memory_order_relaxed)) report_swallowed("strict", text.c_str());
    return;
  }
  // No number in it: Python shows equal texts of one line of code once. And no
  // place, so that Python takes its own: the line that called torch.
  c10::warn(c10::Warning(c10::UserWarning(), c10::SourceLocation{nullptr, nullptr, 0}, text, /*verbatim=*/false));
}

}  // namespace

void detail::refuse_outside(DeviceKind kind, int ordinal, std::size_t bytes) {
  if (is_in_model(Runtime::room(kind, ordinal))) return;
  const std::string device = torch_device(kind, ordinal).str();
  if (strictness(kind, ordinal).load(std::memory_order_relaxed) == Strictness::warn) {
    warn("torch_vmm.strict(): a tensor on " + device + " is made outside every model." + kCureOfStrict);
    return;
  }
  throw_torch_error("torch_vmm.strict(): a tensor of " + format_bytes(bytes) + " on " + device +
                    " would be made outside every model." + kCureOfStrict);
}

}  // namespace vmm
