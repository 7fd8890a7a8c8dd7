#include "process/device_kind.h"

#include <string>

#include "base/errors.h"
#include "driver/cuda_driver.h"
#include "driver/host_driver.h"

namespace vmm {

namespace {

std::unique_ptr<Driver> make_cuda_driver(const Options& /*options*/) {
  std::string why;
  auto driver = CudaDriver::make(&why);
  if (driver == nullptr) throw NotAvailableError("no CUDA device can be used: " + why);
  return driver;
}

std::unique_ptr<Driver> make_host_driver(const Options& options) {
  HostDriverOptions of_host;
  of_host.device_bytes = options.host_bytes;
  return std::make_unique<HostDriver>(of_host);
}

constexpr std::array<KindOfDevice, kDeviceKinds.size()> kKinds = {{
    {"cuda", &make_cuda_driver, /*is_shared_by_handle=*/true},
    {"cpu", &make_host_driver, /*is_shared_by_handle=*/false},  // torch shares CPU tensors by itself
}};
static_assert(kKinds.back().make_driver != nullptr, "each kind has its row");

// The host's streams are numbers, and a program may have a new one for each request that it
// serves: of 3000 that each had a fence in every point, a pair took 6.5 ms.
StreamCensus host_streams(int) { return {nullptr, nullptr, /*most_met=*/64}; }

std::array<KindHooks, kDeviceKinds.size()>& all_hooks() {
  static std::array<KindHooks, kDeviceKinds.size()> hooks = [] {
    std::array<KindHooks, kDeviceKinds.size()> all{};
    all[index_of(DeviceKind::cpu)].census = &host_streams;
    return all;
  }();
  return hooks;
}

}  // namespace

const KindOfDevice& kind_of(DeviceKind kind) { return kKinds.at(index_of(kind)); }

void set_hooks(DeviceKind kind, const KindHooks& hooks) { all_hooks().at(index_of(kind)) = hooks; }

const KindHooks& hooks_of(DeviceKind kind) { return all_hooks().at(index_of(kind)); }

}  // namespace vmm
