#include "torch_adapter/errors.h"

#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstdio>
#include <exception>

#include "base/errors.h"

namespace vmm {

namespace {
constexpr int kMostReports = 8;
}  // namespace

void rethrow_as_torch(const DeviceWords& where, std::size_t bytes) {
  try {
    throw;
  } catch (const OutOfMemoryError& error) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, where.backend, " out of memory. Tried to allocate ",
                     c10::CachingAllocator::format_size(bytes), " on ", where.device, ". torch_vmm: ", error.what());
  } catch (const VmmError& error) {
    TORCH_CHECK(false, "torch_vmm: ", error.what());
  }
}

void throw_beyond_exbibyte(const DeviceWords& where) {
  TORCH_CHECK_WITH(OutOfMemoryError, false, where.backend, " out of memory. Tried to allocate more than 1EB memory.");
  __builtin_unreachable();
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
