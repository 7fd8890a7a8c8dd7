#include "core/faces/shared_memory_pool.h"

#include <atomic>
#include <iterator>
#include <utility>

#include "base/errors.h"
#include "core/device/afterwards.h"

namespace vmm {

namespace {
std::string group_name() {
  static std::atomic<int> next{0};
  return "SharedMemoryPool " + std::to_string(++next);
}
}  // namespace

SharedMemoryPool::SharedMemoryPool(DeviceMemory& memory, std::size_t physical_limit) : memory_(memory) {
  if (physical_limit == 0) throw InvalidArgumentError("physical_limit 0: models need at least one page");
  budget_ = memory.create_group(group_name(), physical_limit);
  spill_ = memory.spill_group_of(*budget_);
}

SharedMemoryPool::~SharedMemoryPool() {
  try {
    close(/*force=*/true);
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the driver has gone, or there is no host memory
  }
}

void SharedMemoryPool::require_open() const {
  if (closed_) throw InvalidArgumentError("the SharedMemoryPool is closed");
}

SharedMemoryPool::Models::const_iterator SharedMemoryPool::find(const std::string& model_id) const {
  if (const auto found = by_id_.find(model_id); found != by_id_.end()) return found->second;
  std::string known;
  for (const auto& [id, pool] : models_) known += (known.empty() ? "'" : ", '") + id + "'";
  throw ModelNotFoundError(model_id, known);
}

std::shared_ptr<Pool> SharedMemoryPool::register_model(const std::string& model_id, const ModelSpec& spec) {
  // With no lock held where the GPU may be waited for: here, and below.
  std::shared_ptr<Pool> pool = register_unenforced(model_id, spec, /*has_waited=*/false);
  if (pool == nullptr) {
    memory_.settle(/*wait=*/true);
    pool = register_unenforced(model_id, spec, /*has_waited=*/true);
  }
  if (spec.floor != 0) memory_.enforce_floor(pool->budget());
  return pool;
}

std::shared_ptr<Pool> SharedMemoryPool::register_unenforced(const std::string& model_id, const ModelSpec& spec,
                                                            bool has_waited) {
  const MutexLock lock(mutex_);
  require_open();
  if (model_id.empty()) throw InvalidArgumentError("model_id is empty: give the model a name");
  if (by_id_.count(model_id) != 0) throw ModelExistsError(model_id);
  PoolSpec pool_spec;
  pool_spec.name = model_id;
  pool_spec.capacity = spec.virtual_capacity;
  pool_spec.page_size = spec.page_size;
  pool_spec.physical_limit = spec.physical_limit;
  pool_spec.floor = spec.floor;
  pool_spec.priority = spec.priority;
  if (spec.spills) memory_.require_can_spill(model_id);
  models_.push_back({model_id, nullptr});  // first: a pool that could not be noted would stay
  const auto model = std::prev(models_.end());
  const auto undo = [&]() VMM_REQUIRES(mutex_) {
    by_id_.erase(model_id);
    models_.erase(model);
  };
  try {
    by_id_.emplace(model_id, model);
    model->pool = memory_.try_create_pool(pool_spec, budget_.get(), has_waited);
  } catch (...) {
    undo();
    throw;
  }
  if (model->pool == nullptr) {
    undo();
    return nullptr;
  }
  model->pool->set_spills(spec.spills);
  return model->pool;
}

void SharedMemoryPool::unregister_model(const std::string& model_id, bool force) {
  {
    const MutexLock lock(mutex_);
    require_open();
    const auto model = find(model_id);
    memory_.close_pools({model->pool}, force);
    by_id_.erase(model_id);
    models_.erase(model);
  }
  memory_.after_closing();
}

std::shared_ptr<Pool> SharedMemoryPool::model(const std::string& model_id) const {
  const MutexLock lock(mutex_);
  require_open();
  return find(model_id)->pool;
}

bool SharedMemoryPool::has_model(const std::string& model_id) const {
  const MutexLock lock(mutex_);
  return by_id_.count(model_id) != 0;
}

std::vector<std::string> SharedMemoryPool::model_ids() const {
  const MutexLock lock(mutex_);
  std::vector<std::string> ids;
  ids.reserve(models_.size());
  for (const auto& [id, pool] : models_) ids.push_back(id);
  return ids;
}

Address SharedMemoryPool::allocate_for_model(const std::string& model_id, std::size_t size, Stream stream) {
  return memory_.allocate_first(*model(model_id), size, stream);
}

void SharedMemoryPool::deallocate_for_model(const std::string& model_id, std::size_t offset, std::size_t size) {
  memory_.deallocate_pages(*model(model_id), offset, size);
}

GlobalMemoryStats SharedMemoryPool::global_stats() const {
  GlobalMemoryStats stats = memory_.group_stats(*budget_);
  const MutexLock lock(mutex_);
  stats.num_models = models_.size();
  return stats;
}

std::size_t SharedMemoryPool::set_physical_limit(std::size_t limit_bytes) {
  {
    const MutexLock lock(mutex_);
    require_open();
  }
  if (limit_bytes == 0) throw InvalidArgumentError("physical_limit 0: models need at least one page");
  return memory_.set_limit(*budget_, limit_bytes);
}

std::size_t SharedMemoryPool::set_floor(std::size_t floor_bytes) {
  {
    const MutexLock lock(mutex_);
    require_open();
  }
  const std::size_t given_back = memory_.set_floor(*budget_, floor_bytes);
  const MutexLock lock(mutex_);
  if (closed_) budget_->set_floor(0);  // meanwhile
  return given_back;
}

void SharedMemoryPool::set_priority(int priority) {
  const MutexLock lock(mutex_);
  require_open();
  budget_->set_priority(priority);
}

void SharedMemoryPool::set_on_pressure(DeviceMemory::OnPressure relieve) {
  {
    const MutexLock lock(mutex_);
    require_open();
  }
  memory_.set_on_pressure(*budget_, std::move(relieve));
  const MutexLock lock(mutex_);
  if (closed_) memory_.set_on_pressure(*budget_, nullptr);  // meanwhile
}

std::size_t SharedMemoryPool::set_spill_limit(std::size_t limit_bytes) {
  {
    const MutexLock lock(mutex_);
    require_open();
  }
  return memory_.set_limit(*spill_, limit_bytes);
}

void SharedMemoryPool::close(bool force) {
  {
    const MutexLock lock(mutex_);
    if (closed_) return;
    PoolList pools;
    for (const auto& [id, pool] : models_) pools.push_back(pool);
    memory_.close_pools(pools, force);  // all, or none
    by_id_.clear();
    models_.clear();
    closed_ = true;
    budget_->set_floor(0);
  }
  memory_.after_closing();
  memory_.set_on_pressure(*budget_, nullptr);
  memory_.end_group(*budget_);
  afterwards([&] { memory_.settle(/*wait=*/true); });
}

bool SharedMemoryPool::is_closed() const { return closed_.load(std::memory_order_acquire); }

}  // namespace vmm
