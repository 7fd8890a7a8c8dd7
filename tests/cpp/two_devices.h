// Two devices of one driver.
#pragma once

#include <memory>
#include <string>

#include "cpp/lab.h"

namespace vmm::testing {

// Neither outlives what the other one still waits for.
class TwoDevices {
 public:
  TwoDevices() {
    lab.memory().set_neighbours([this](int device) { return device == 1 ? &other_->streams() : nullptr; });
    other_->set_neighbours([this](int device) { return device == 0 ? &lab.memory().streams() : nullptr; });
    lab.driver.clear_calls();
  }
  ~TwoDevices() {
    lab.driver.clear_failures();
    lab.driver.release_fences();
    empty_caches();
    other_.reset();
  }
  TwoDevices(const TwoDevices&) = delete;
  TwoDevices& operator=(const TwoDevices&) = delete;

  DeviceMemory& other() { return *other_; }
  std::shared_ptr<Pool> there(const std::string& name, std::size_t limit = kUnlimited) {
    return other_->create_pool(Lab::spec(name, limit), nullptr);
  }
  void empty_caches() {
    lab.memory().empty_cache();
    other_->empty_cache();
  }
  void check() {
    lab.memory().check();
    other_->check();
  }

  Lab lab{spec()};

 private:
  static LabSpec spec() {
    LabSpec spec;
    spec.device_count = 2;
    return spec;
  }
  std::unique_ptr<DeviceMemory> other_ =
      std::make_unique<DeviceMemory>(lab.driver, lab.space, 1, LabSpec::plain_options());
};

}  // namespace vmm::testing
