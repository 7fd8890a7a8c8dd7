// A device on a bench: host memory behind a scripted driver, one DeviceMemory
// above it, pools on request. It owns what a test leaves behind and proves at
// its end that the driver got everything back.
//
//   Lab lab;
//   const auto pool = lab.pool("a");
//   const Address block = lab.allocate(*pool, 3 * kMiB);
//   lab.fill(block, 3 * kMiB, 7);
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/errors.h"
#include "core/device/device_memory.h"
#include "core/memory/address_space.h"
#include "driver/host_driver.h"
#include "support/patterns.h"
#include "support/scripted_driver.h"

namespace vmm::testing {

inline constexpr std::size_t kPage = 2 * kMiB;
inline Stream stream(std::uintptr_t name) { return reinterpret_cast<Stream>(name); }
inline std::uint64_t number(Stream name) { return reinterpret_cast<std::uintptr_t>(name); }
inline Status no_memory() { return {StatusCode::out_of_memory, "scripted", 2, "SCRIPTED_OUT_OF_MEMORY"}; }
inline Status broken() { return {StatusCode::driver_error, "scripted", 999, "SCRIPTED_UNKNOWN"}; }

struct LabSpec {
  std::size_t device_bytes = kGiB;
  int device_count = 1;
  std::size_t granularity = kPage;
  Options options = plain_options();

  static Options plain_options() {
    Options options;
    options.exportable = false;  // a descriptor a chunk
    return options;
  }
};

class Lab {
 public:
  explicit Lab(const LabSpec& spec = {})
      : host({spec.granularity, spec.device_bytes, spec.device_count}),
        driver(host),
        memory_(std::make_unique<DeviceMemory>(driver, space, 0, spec.options)) {
    driver.set_wait_on_held(ScriptedDriver::WaitOnHeld::pass);
  }
  ~Lab() {
    if (memory_ != nullptr) close();
  }
  Lab(const Lab&) = delete;
  Lab& operator=(const Lab&) = delete;

  // Frees what the test left, ends every pool, and expects the driver bare.
  void close() {
    driver.clear_failures();
    driver.release_fences();
    for (const Address address : std::set<Address>(live_)) free(address);
    for (const auto& pool : memory_->pools()) pool->drop_pages();
    memory_.reset();
    EXPECT_EQ(driver.leaks(), "");
  }

  DeviceMemory& memory() { return *memory_; }
  // A stream that the device has although no pool has met it.
  void meet(Stream stream) { memory_->streams().meet(stream); }

  // A pool of 1 GiB of addresses (TSan dislikes larger ones).
  static PoolSpec spec(const std::string& name, std::size_t limit = kUnlimited) {
    PoolSpec spec;
    spec.name = name;
    spec.capacity = kGiB;
    spec.physical_limit = limit;
    return spec;
  }
  std::shared_ptr<Pool> pool(const std::string& name, std::size_t limit = kUnlimited) {
    return memory_->create_pool(spec(name, limit), nullptr);
  }
  std::shared_ptr<Pool> pool(const PoolSpec& spec, Budget* group = nullptr) {
    return memory_->create_pool(spec, group);
  }

  Address allocate(Pool& pool, std::size_t bytes, Stream on = nullptr) {
    const Address address = memory_->allocate(pool, bytes, on);
    live_.insert(address);
    memory_->check();
    return address;
  }
  void free(Address address) {
    EXPECT_EQ(live_.erase(address), 1U) << "not allocated here";
    EXPECT_TRUE(DeviceMemory::free(space, address));
    memory_->check();
  }
  // What became live, or ended, past this bench.
  void adopt(Address address) { live_.insert(address); }
  void forget(Address address) { live_.erase(address); }
  // Allocates and frees: leaves `bytes` idle in the pool.
  Address leave_idle(Pool& pool, std::size_t bytes, Stream on = nullptr) {
    const Address address = allocate(pool, bytes, on);
    free(address);
    return address;
  }

  // Content that differs from word to word and from seed to seed.
  static void fill(Address address, std::size_t bytes, std::uint64_t seed) { fill_pattern(address, bytes, seed); }
  // The offset of the first wrong byte, or `bytes`.
  static std::size_t first_wrong(Address address, std::size_t bytes, std::uint64_t seed) {
    return first_wrong_of_pattern(address, bytes, seed);
  }
  static bool holds(Address address, std::size_t bytes, std::uint64_t seed) {
    return first_wrong(address, bytes, seed) == bytes;
  }
  static bool is_zero(Address address, std::size_t bytes) { return is_all_zero(address, bytes); }

  HostDriver host;
  ScriptedDriver driver;
  AddressSpace space;

 private:
  std::unique_ptr<DeviceMemory> memory_;
  std::set<Address> live_;
};

}  // namespace vmm::testing
