// What this process has: a driver for each kind of device, one address space, and
// for each device its memory and its default pool, made when first asked for and
// never destroyed, because tensors outlive everything. It knows neither torch nor
// Python.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "base/errors.h"
#include "base/sync.h"
#include "core/device/device_memory.h"
#include "core/device/private_pools.h"
#include "core/memory/address_space.h"
#include "core/options.h"
#include "core/sleep/sleeper.h"
#include "driver/driver.h"
#include "process/device_kind.h"

namespace vmm {

// One device's memory, with what torch's face of it needs at hand.
struct DeviceRoom {
  DeviceRoom(DeviceKind kind, int ordinal, Driver& driver, AddressSpace& address_space, const Options& options);

  const DeviceKind kind;
  const int ordinal;
  DeviceMemory memory;
  // What torch's settings and whoever listens ask of the memory has been done.
  std::atomic<bool> is_set_up{false};
  // From which size on requests count as oversize, as torch said last.
  std::atomic<std::size_t> oversize{0};
  // Of tensors made outside any model's context.
  const std::shared_ptr<Pool> default_pool;
  // CUDA graphs' and torch.cuda.MemPool's.
  PrivatePools private_pools;
  // Of models that sleep.
  Sleeper sleeper{memory};

  // Where tensors go that are made outside any model's context: the model that was named
  // for it, as long as it is open, or the default pool.
  [[nodiscard]] const std::shared_ptr<Pool>& outside() const {
    const std::shared_ptr<Pool>* const named = named_.load(std::memory_order_acquire);
    return named == nullptr || (*named)->is_closed() ? default_pool : *named;
  }
  // A model that stood under no group has been closed: with the last one goes the host memory
  // in which they slept.
  void note_closed();
  // nullptr: the default pool. REQUIRES: of this device.
  void set_outside(const std::shared_ptr<Pool>& pool) VMM_EXCLUDES(mutex_);

 private:
  std::atomic<const std::shared_ptr<Pool>*> named_{nullptr};
  Mutex mutex_;  // a leaf
  // All that were ever named: a thread may be looking at one that no longer is.
  std::deque<std::shared_ptr<Pool>> all_named_ VMM_GUARDED_BY(mutex_);
};

class Runtime {
 public:
  static constexpr int kMostDevices = 64;  // of a kind; torch's own limit

  // The device's room. Throws NotAvailableError that says why there is none:
  // no driver, no such device, something missing, or a forked child; and
  // OutOfMemoryError when there are no addresses for its default pool. Then it
  // is not made, and the next call tries again.
  static DeviceRoom& room(DeviceKind kind, int ordinal) {
    if (DeviceRoom* found = made(kind, ordinal); found != nullptr && !in_child()) [[likely]]
      return *found;
    return instance().make_room(kind, ordinal);
  }
  // The same where it has been made already, or nullptr. Never waits.
  static DeviceRoom* made(DeviceKind kind, int ordinal) {
    if (ordinal < 0 || ordinal >= kMostDevices) return nullptr;
    return rooms_[index_of(kind)][static_cast<std::size_t>(ordinal)].load(std::memory_order_acquire);
  }
  static std::vector<DeviceRoom*> all_made(DeviceKind kind);
  // REQUIRES: of a room of ours.
  static DeviceRoom& room_of(const DeviceMemory& memory);
  static DeviceRoom& room_of(const Pool& pool) { return room_of(*pool.home()); }

  // Devices of a kind; for CUDA loads the driver, and throws NotAvailableError
  // that says why there is none.
  static int device_count(DeviceKind kind) { return instance().driver(kind).device_count(); }
  // What the device has, and what of it is free. Throws NotAvailableError.
  static Status memory_info(DeviceKind kind, int ordinal, MemoryInfo* out) {
    return instance().driver(kind).memory_info(ordinal, out);
  }
  // What a device lacks to be used here, in words; "" if nothing.
  static std::string missing(DeviceKind kind, int ordinal) { return instance().driver(kind).missing(ordinal); }

  // Every pool's addresses, of every device. No lock, no initialisation.
  static Pool* pool_at(const void* address) {
    const AddressSpace* space = address_space_.load(std::memory_order_acquire);
    return space == nullptr ? nullptr : space->find(reinterpret_cast<Address>(address));
  }
  // Who has memory of ours, of any device, mapped at an address that no pool has, or nullptr, in a
  // forked child too.
  static SecondMapping* second_mapping_at(const void* address);
  // Frees a block by its address; false when it is no live block of ours.
  // REQUIRES: not in a forked child.
  static bool free(void* address) {
    AddressSpace* space = address_space_.load(std::memory_order_acquire);
    return space != nullptr && DeviceMemory::free(*space, reinterpret_cast<Address>(address));
  }
  // The same after what the calling thread's cache said of the block (DeviceMemory).
  static bool free_unkept(void* address, BlockCaches::Put put) {
    AddressSpace* space = address_space_.load(std::memory_order_acquire);
    return space != nullptr && DeviceMemory::free_unkept(*space, reinterpret_cast<Address>(address), put);
  }

  // True in a process forked from one that had a driver: nothing of ours works
  // there, and nobody may take a lock that another thread held at the fork.
  static bool in_child() { return in_child_.load(std::memory_order_relaxed); }
  // NotAvailableError in a forked child.
  static void require_own_process();
  // Of the `count` that there are, where `ordinal` is none.
  static NotAvailableError no_such_device(DeviceKind kind, int ordinal, int count);

 private:
  Runtime();
  static Runtime& instance();
  Driver& driver(DeviceKind kind) VMM_EXCLUDES(mutex_);
  Driver& driver_locked(DeviceKind kind) VMM_REQUIRES(mutex_);
  DeviceRoom& make_room(DeviceKind kind, int ordinal) VMM_EXCLUDES(mutex_);

  using Rooms = std::array<std::atomic<DeviceRoom*>, kMostDevices>;
  static inline std::array<Rooms, kDeviceKinds.size()> rooms_{};
  static inline std::atomic<AddressSpace*> address_space_{nullptr};
  static inline std::atomic<bool> has_driver_{false};
  static inline std::atomic<bool> in_child_{false};

  const Options options_;
  AddressSpace space_;
  Mutex mutex_;
  std::array<std::unique_ptr<Driver>, kDeviceKinds.size()> drivers_ VMM_GUARDED_BY(mutex_);
};

}  // namespace vmm
