// The kinds of device that a process may have, in one table: another kind is a driver
// in driver/ and an entry here. What torch does for a kind's devices, and has done for
// it, the adapter registers; without it they work as they do in tests.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/device/private_pools.h"
#include "core/options.h"
#include "core/streams/device_streams.h"
#include "driver/driver.h"

namespace vmm {

struct DeviceRoom;

enum class DeviceKind : std::uint8_t { cuda, cpu };
inline constexpr std::array kDeviceKinds = {DeviceKind::cuda, DeviceKind::cpu};
inline constexpr std::size_t index_of(DeviceKind kind) { return static_cast<std::size_t>(kind); }

struct KindOfDevice {
  const char* name;  // torch's
  // Throws NotAvailableError that says why there is none here.
  std::unique_ptr<Driver> (*make_driver)(const Options& options);
  // torch shares its memory between processes by handles of ours.
  bool is_shared_by_handle;
};
const KindOfDevice& kind_of(DeviceKind kind);
inline const char* to_string(DeviceKind kind) { return kind_of(kind).name; }

// What torch's face of a kind adds to each of its devices. Any may be nullptr.
struct KindHooks {
  // What private_pools has to know of captures, and what torch leaves undone after a
  // failed one.
  CaptureHooks (*captures)(int ordinal) = nullptr;
  // Which streams torch has, and what kind others' are.
  StreamCensus (*census)(int ordinal) = nullptr;
  // Frees memory that torch can do without; true if it did.
  bool (*free_memory)() = nullptr;
  // Is told, with no lock held, of each request that found no memory.
  void (*out_of_memory)(DeviceRoom& room, const Pool& asker, std::size_t bytes, Stream stream) = nullptr;
  // Addresses of blocks that libraries keep for whoever calls them next: they stay where they
  // are when the model that they were made in sleeps.
  std::vector<Address> (*shared_by_all)(int ordinal) = nullptr;
  // Is told of each device that is made.
  void (*on_made)(DeviceRoom& room) = nullptr;
};
// To be called before the first device of the kind is made.
void set_hooks(DeviceKind kind, const KindHooks& hooks);
const KindHooks& hooks_of(DeviceKind kind);

}  // namespace vmm
