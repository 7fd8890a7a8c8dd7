#include "torch_adapter/errors.h"

#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <exception>

#include "base/errors.h"
#include "base/units.h"

namespace vmm {

namespace {
constexpr int kMostReports = 8;

// As torch's messages say it, always with two decimals: "20.00 MiB".
std::string torch_size(std::size_t bytes) {
  if (bytes <= kKiB) return std::to_string(bytes) + " bytes";
  const char* const unit = bytes <= kMiB ? "KiB" : bytes <= kGiB ? "MiB" : "GiB";
  const std::size_t scale = bytes <= kMiB ? kKiB : bytes <= kGiB ? kMiB : kGiB;
  std::array<char, 40> text{};
  (void)std::snprintf(text.data(), text.size(), "%.2f %s", static_cast<double>(bytes) / static_cast<double>(scale),
                      unit);
  return text.data();
}
}  // namespace

void rethrow_as_torch(const DeviceWords& where, std::size_t bytes) {
  try {
    throw;
  } catch (const OutOfMemoryError& error) {
    const std::string text = std::string(where.backend) + " out of memory. Tried to allocate " + torch_size(bytes) +
                             " on " + where.device + ". torch_vmm: " + error.what();
    TORCH_CHECK_WITH(OutOfMemoryError, false, text);
  } catch (const VmmError& error) {
    throw_torch_error("torch_vmm: " + std::string(error.what()));
  }
}

void throw_torch_error(const std::string& message) {
  TORCH_CHECK(false, message);
  __builtin_unreachable();
}

void throw_beyond_exbibyte(const DeviceWords& where) {
  const std::string text =
      std::string(where.backend) + " out of memory. Tried to allocate more than 1EB memory on " + where.device + ".";
  TORCH_CHECK_WITH(OutOfMemoryError, false, text);
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
