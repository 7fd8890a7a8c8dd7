// SharedMemoryPool's core: models by id under one physical limit. It knows no
// block and no chunk; pools and the ladder do the work.
#pragma once

#include <atomic>
#include <cstddef>
#include <list>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/sync.h"
#include "core/device/device_memory.h"

namespace vmm {

struct ModelSpec {
  std::size_t virtual_capacity = 0;  // bytes; 0: the device's default
  std::size_t page_size = 0;         // 0: chosen by the request
  std::size_t physical_limit = kUnlimited;
  std::size_t floor = 0;
  int priority = 0;
  bool spills = false;  // see DeviceMemory::set_spills()
};

class SharedMemoryPool {
 public:
  // Throws InvalidArgumentError for a limit of 0.
  SharedMemoryPool(DeviceMemory& memory, std::size_t physical_limit);
  SharedMemoryPool(const SharedMemoryPool&) = delete;
  SharedMemoryPool& operator=(const SharedMemoryPool&) = delete;
  ~SharedMemoryPool();

  // ModelExistsError; InvalidArgumentError for an empty id, floors above the limit...
  std::shared_ptr<Pool> register_model(const std::string& model_id, const ModelSpec& spec);
  // ModelNotFoundError; StillInUseError unless `force`.
  void unregister_model(const std::string& model_id, bool force);
  // ModelNotFoundError.
  [[nodiscard]] std::shared_ptr<Pool> model(const std::string& model_id) const;
  [[nodiscard]] bool has_model(const std::string& model_id) const;
  // Ids in order of registration.
  [[nodiscard]] std::vector<std::string> model_ids() const;

  Address allocate_for_model(const std::string& model_id, std::size_t size, Stream stream);
  void deallocate_for_model(const std::string& model_id, std::size_t offset, std::size_t size);
  [[nodiscard]] GlobalMemoryStats global_stats() const;
  // Bytes given back now.
  std::size_t set_physical_limit(std::size_t limit_bytes);
  // For messages: "SharedMemoryPool 1".
  [[nodiscard]] const std::string& name() const { return budget_->name(); }
  [[nodiscard]] std::size_t physical_limit() const { return budget_->limit(); }
  // What pools beside this one on the device never take of it, and never grow into.
  // Returns the bytes given back now by those that had it idle. InvalidArgumentError where
  // it cannot be.
  std::size_t set_floor(std::size_t floor_bytes);
  [[nodiscard]] std::size_t floor() const { return budget_->floor(); }
  // It adds to its models' own, beside pools that stand under none or another.
  void set_priority(int priority);
  [[nodiscard]] int priority() const { return budget_->priority(); }
  // Called when a request of a model finds no memory: see DeviceMemory::set_on_pressure().
  void set_on_pressure(DeviceMemory::OnPressure relieve);
  // Bytes of host memory that models may have for what they spill, at most. Returns the bytes
  // given back now.
  std::size_t set_spill_limit(std::size_t limit_bytes);
  [[nodiscard]] std::size_t spill_limit() const { return spill_->limit(); }
  // Unregisters all models (StillInUseError while one is in use and not
  // `force`) and gives the shelf back.
  void close(bool force);
  [[nodiscard]] bool is_closed() const;
  [[nodiscard]] DeviceMemory& memory() const { return memory_; }
  [[nodiscard]] const Budget& budget() const { return *budget_; }

 private:
  struct Model {
    std::string id;
    std::shared_ptr<Pool> pool;
  };
  using Models = std::list<Model>;

  void require_open() const VMM_REQUIRES(mutex_);
  // But what others hold of its floor stays with them. nullptr, and nothing has changed: as
  // DeviceMemory::try_create_pool() has it.
  std::shared_ptr<Pool> register_unenforced(const std::string& model_id, const ModelSpec& spec, bool has_waited)
      VMM_EXCLUDES(mutex_);
  Models::const_iterator find(const std::string& model_id) const VMM_REQUIRES(mutex_);

  DeviceMemory& memory_;
  std::shared_ptr<Budget> budget_;  // the device's memory keeps it while pools drain
  std::shared_ptr<Budget> spill_;   // of what its models spill
  mutable Mutex mutex_;
  Models models_ VMM_GUARDED_BY(mutex_);  // in order of registration
  std::unordered_map<std::string, Models::const_iterator> by_id_ VMM_GUARDED_BY(mutex_);
  std::atomic<bool> closed_{false};  // changed under the lock; a forked child may ask
};

}  // namespace vmm
