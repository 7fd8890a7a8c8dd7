#include "torch_adapter/errors.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <exception>

#include "base/units.h"

namespace vmm {

namespace {
constexpr int kMostReports = 8;
}  // namespace

void throw_torch_error(const std::string& message) {
  TORCH_CHECK(false, message);
  __builtin_unreachable();
}

void throw_invalid_pointer(const void* block) {
  throw_torch_error("invalid device pointer: " + format_hex(reinterpret_cast<std::uintptr_t>(block)));
}

void report_swallowed(const char* who, const char* what) noexcept {
  static std::atomic<int> reports{0};
  const int count = reports.fetch_add(1, std::memory_order_relaxed);
  if (count >= kMostReports) return;
  (void)std::fprintf(stderr, "torch_vmm: %s: %s%s\n", who, what,
                     count + 1 == kMostReports ? " (further reports of this kind are left out)" : "");
}

void report_swallowed(const char* who) noexcept {
  try {
    throw;
  } catch (const c10::Error& error) {
    report_swallowed(who, error.what_without_backtrace());
  } catch (const std::exception& error) {
    report_swallowed(who, error.what());
  } catch (...) {
    report_swallowed(who, "an exception of a foreign kind");
  }
}

}  // namespace vmm
