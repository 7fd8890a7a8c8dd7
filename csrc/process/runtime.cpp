#include "process/runtime.h"

#include <pthread.h>

#include <algorithm>

#include "base/check.h"
#include "base/errors.h"
#include "ipc/ipc_exports.h"
#include "process/fault_report.h"

namespace vmm {

namespace {

std::shared_ptr<Pool> make_default_pool(DeviceMemory& memory) {
  PoolSpec spec;
  spec.name = "default";
  return memory.create_pool(spec, nullptr);
}

}  // namespace

DeviceRoom::DeviceRoom(DeviceKind kind, int ordinal, Driver& driver, AddressSpace& address_space,
                       const Options& options)
    : kind(kind),
      ordinal(ordinal),
      memory(driver, address_space, ordinal, options),
      default_pool(make_default_pool(memory)),
      private_pools(memory, hooks_of(kind).captures == nullptr ? CaptureHooks{} : hooks_of(kind).captures(ordinal)) {
  memory.store().set_on_export_end(&IpcExports::before_release);
  memory.set_host_reserve([this](std::size_t bytes) { return sleeper.release_all_host_memory(bytes); });
  const KindHooks& hooks = hooks_of(kind);
  // torch can free memory of its own (tensors that other processes have let go
  // of) when a device has none left.
  if (hooks.free_memory != nullptr) memory.ladder().set_memory_callback(hooks.free_memory);
  if (hooks.out_of_memory != nullptr) {
    memory.set_on_out_of_memory(
        [this, told = hooks.out_of_memory](const Pool& asker, std::size_t bytes, Stream stream) {
          told(*this, asker, bytes, stream);
        });
  }
  if (hooks.shared_by_all != nullptr) {
    sleeper.set_shared_by_all([ordinal, blocks = hooks.shared_by_all] { return blocks(ordinal); });
  }
  if (hooks.census != nullptr) memory.streams().set_census(hooks.census(ordinal));
}

void DeviceRoom::set_outside(const std::shared_ptr<Pool>& pool) {
  const MutexLock lock(mutex_);
  if (pool == nullptr || pool == default_pool) {
    named_.store(nullptr, std::memory_order_release);
    return;
  }
  auto known = std::find(all_named_.begin(), all_named_.end(), pool);
  if (known == all_named_.end()) known = all_named_.insert(all_named_.end(), pool);
  named_.store(&*known, std::memory_order_release);
}

Runtime::Runtime() : options_(Options::from_environment()) {
  address_space_.store(&space_, std::memory_order_release);
  // The drivers watch forks themselves; this one flag spares the hot path a
  // virtual call, and stands before any lock of ours is taken in the child.
  pthread_atfork(nullptr, nullptr, [] {
    if (has_driver_.load(std::memory_order_relaxed)) in_child_.store(true, std::memory_order_relaxed);
  });
}

Runtime& Runtime::instance() {
  require_own_process();
  static Runtime* const runtime = new Runtime;  // never destroyed: tensors outlive static objects
  return *runtime;
}

void Runtime::require_own_process() {
  if (!in_child()) return;
  throw NotAvailableError(
      "this process was forked from one that uses torch_vmm, and neither the GPU nor pools survive a fork: start "
      "workers with the 'spawn' method (torch.multiprocessing.set_start_method('spawn')), or fork before the first "
      "use");
}

NotAvailableError Runtime::no_such_device(DeviceKind kind, int ordinal, int count) {
  const std::string name = to_string(kind);
  const std::string last = name + ":" + std::to_string(count - 1);
  return NotAvailableError("there is no device " + name + ":" + std::to_string(ordinal) + "; " +
                           (count == 0   ? "there is none of this kind"
                            : count == 1 ? "the only one is " + last
                                         : "there are " + name + ":0 to " + last));
}

Driver& Runtime::driver(DeviceKind kind) {
  const MutexLock lock(mutex_);
  return driver_locked(kind);
}

Driver& Runtime::driver_locked(DeviceKind kind) {
  std::unique_ptr<Driver>& driver = drivers_.at(index_of(kind));
  if (driver == nullptr) {
    driver = kind_of(kind).make_driver(options_);
    has_driver_.store(true, std::memory_order_relaxed);
  }
  return *driver;
}

DeviceRoom& Runtime::make_room(DeviceKind kind, int ordinal) {
  require_own_process();
  const MutexLock lock(mutex_);
  if (DeviceRoom* found = made(kind, ordinal); found != nullptr) return *found;
  Driver& driver = driver_locked(kind);
  const int count = driver.device_count();
  if (ordinal < 0 || ordinal >= count || ordinal >= kMostDevices) throw no_such_device(kind, ordinal, count);
  Options options = options_;
  options.exportable = options.exportable && kind_of(kind).is_shared_by_handle;
  auto* room = new DeviceRoom(kind, ordinal, driver, space_, options);  // never destroyed, as the runtime
  room->memory.set_neighbours([kind](int other) { return &Runtime::room(kind, other).memory.streams(); });
  rooms_[index_of(kind)][static_cast<std::size_t>(ordinal)].store(room, std::memory_order_release);
  if (hooks_of(kind).on_made != nullptr) hooks_of(kind).on_made(*room);
  if (options.debug.is_on()) install_fault_report();
  return *room;
}

std::vector<DeviceRoom*> Runtime::all_made(DeviceKind kind) {
  std::vector<DeviceRoom*> rooms;
  for (int ordinal = 0; ordinal < kMostDevices; ++ordinal) {
    if (DeviceRoom* room = made(kind, ordinal); room != nullptr) rooms.push_back(room);
  }
  return rooms;
}

void DeviceRoom::note_closed() {
  const Budget& group = memory.budget();
  for (const auto& pool : memory.pools()) {
    const bool is_model = &pool->group() == &group && !pool->is_part() && !pool->is_closed();
    if (is_model && (pool != default_pool || pool->is_asleep())) return;
  }
  sleeper.host_memory(group)->release_unused();
}

SecondMapping* Runtime::second_mapping_at(const void* address) {
  if (in_child()) return nullptr;
  for (const DeviceKind kind : kDeviceKinds) {
    for (int ordinal = 0; ordinal < kMostDevices; ++ordinal) {
      DeviceRoom* const room = made(kind, ordinal);
      if (room == nullptr) continue;
      if (SecondMapping* found = room->memory.second_mappings().at(reinterpret_cast<Address>(address))) return found;
    }
  }
  return nullptr;
}

DeviceRoom& Runtime::room_of(const DeviceMemory& memory) {
  for (const DeviceKind kind : kDeviceKinds) {
    DeviceRoom* room = made(kind, memory.device());
    if (room != nullptr && &room->memory == &memory) return *room;
  }
  VMM_CHECK(false, "memory of device ", memory.device(), " belongs to no device of this process");
  __builtin_unreachable();
}

}  // namespace vmm
