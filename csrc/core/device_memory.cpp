// DeviceMemory: pools' lives, giving back, numbers. The ladder is reclaim.cpp.
#include "core/device_memory.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/errors.h"

namespace vmm {

namespace {

Capabilities capabilities_of(Driver& driver, int device) {
  Capabilities capabilities;
  const std::string missing = driver.missing(device);
  if (!missing.empty()) throw NotAvailableError(missing);
  throw_if_failed(driver.capabilities(device, &capabilities),
                  "asking device " + std::to_string(device) + " for its capabilities");
  return capabilities;
}

}  // namespace

DeviceMemory::DeviceMemory(Driver& driver, AddressSpace& address_space, int device, const Options& options)
    : driver_(driver),
      address_space_(address_space),
      device_(device),
      options_(options),
      capabilities_(capabilities_of(driver, device)),
      budget_("device " + driver.name() + ":" + std::to_string(device), kUnlimited, nullptr),
      store_(driver, device, capabilities_.granularity, options.exportable && capabilities_.exportable),
      fences_(driver, device) {}

DeviceMemory::~DeviceMemory() {
  const MutexLock lock(registry_mutex_);
  for (const auto& pool : pools_) {
    pool->retire();
    pool->end(/*wait=*/true);
  }
  pools_.clear();
  store_.trim_all();
}

// --------------------------------------------------------------------- pools

std::shared_ptr<Pool> DeviceMemory::create_pool(const PoolSpec& spec, Budget* group) {
  PoolSpec complete = spec;
  if (complete.capacity == 0) {
    complete.capacity =
        options_.default_capacity_bytes != 0 ? options_.default_capacity_bytes : 4 * capabilities_.total_memory;
  }
  const PoolContext context{driver_, address_space_, store_,  fences_,
                            peaks_,  options_,       device_, {Location::on_device(device_)}};
  auto pool = std::make_shared<Pool>(context, group == nullptr ? budget_ : *group, complete, this);
  const MutexLock lock(registry_mutex_);
  pools_.push_back(pool);
  return pool;
}

Budget& DeviceMemory::create_group(const std::string& name, std::size_t limit_bytes) {
  const MutexLock lock(registry_mutex_);
  groups_.push_back(std::make_unique<Budget>(name, limit_bytes, &budget_));
  return *groups_.back();
}

void DeviceMemory::close_pool(Pool& pool, bool force) {
  pool.settle(/*wait=*/false);
  if (!force) {
    const std::size_t blocks = pool.live_blocks();
    if (blocks != 0) {
      const std::size_t bytes = pool.live_bytes();
      throw StillInUseError("pool '" + pool.name() + "' still holds " + std::to_string(blocks) + " live blocks, " +
                                format_bytes(bytes) + "; free its tensors and pages first, or force",
                            bytes, blocks);
    }
  }
  pool.retire();
  pool.drop_pages();
  bury_retired(/*wait=*/false);
}

// Ends the retired pools that hold nothing any more. One whose addresses are
// still in use by queued work stays until another time, unless `wait`.
void DeviceMemory::bury_retired(bool wait) {
  for (const auto& pool : pools()) {
    if (!pool->is_retired() || pool->live_blocks() != 0) continue;
    Budget& group = pool->group();
    const bool ended = pool->end(wait);
    store_.trim(group, options_.store_bytes);
    if (!ended) continue;
    const MutexLock lock(registry_mutex_);
    if (std::erase(pools_, pool) != 0) of_ended_pools_.add_totals(pool->statistics());
  }
}

PoolList DeviceMemory::pools() const {
  const MutexLock lock(registry_mutex_);
  return pools_;
}

PoolList DeviceMemory::pools_under(const Budget& group) const {
  const MutexLock lock(registry_mutex_);
  PoolList found;
  for (const auto& pool : pools_) {
    if (pool->budget().stands_under(group)) found.push_back(pool);
  }
  return found;
}

std::shared_ptr<Pool> DeviceMemory::pool_at(Address address) const {
  const MutexLock lock(registry_mutex_);
  for (const auto& pool : pools_) {
    if (pool->contains(address)) return pool;
  }
  return nullptr;
}

bool DeviceMemory::free(AddressSpace& address_space, Address address) {
  Pool* pool = address_space.find(address);
  if (pool == nullptr) return false;
  DeviceMemory* home = pool->home();
  bool drained = false;
  const bool known = pool->free(address, &drained);
  if (drained) home->bury_retired(/*wait=*/false);
  if (home->over_limit_.load(std::memory_order_relaxed)) [[unlikely]]
    home->enforce_limits();
  return known;
}

void DeviceMemory::deallocate_pages(Pool& pool, std::size_t offset, std::size_t size) {
  pool.deallocate_pages(offset, size);
  store_.trim(pool.group(), options_.store_bytes);
  if (over_limit_.load(std::memory_order_relaxed)) enforce_limits();
}

// --------------------------------------------------------------- giving back

std::size_t DeviceMemory::trim(Pool& pool, std::size_t keep) {
  Budget& group = pool.group();
  const std::size_t shelved = store_.shelved_bytes(group);
  pool.shed(keep);
  // A chunk may still be mapped where another pool had it before.
  settle_all(/*wait=*/true);
  pool.count_sync();
  return store_.trim(group, shelved);
}

std::size_t DeviceMemory::empty_cache() {
  const PoolList all = pools();
  for (const auto& pool : all) pool->settle(/*wait=*/true);
  for (const auto& pool : all) pool->shed(0);
  settle_all(/*wait=*/true);
  bury_retired(/*wait=*/true);
  {
    const MutexLock lock(registry_mutex_);
    ++of_ended_pools_.num_sync_all_streams;
  }
  return store_.trim_all();
}

std::size_t DeviceMemory::trim_group(Budget& group) {
  settle_all(/*wait=*/true);
  bury_retired(/*wait=*/true);
  return store_.trim(group, 0);
}

std::size_t DeviceMemory::set_limit(Budget& budget, std::size_t limit_bytes) {
  budget.set_limit(limit_bytes);
  const std::size_t given_back = give_back_excess(budget, /*wait=*/true);
  if (budget.used() > budget.limit()) over_limit_.store(true, std::memory_order_relaxed);
  return given_back;
}

// Gives back what `budget` holds above its limit and does not need: first what
// rests on shelves, then what is idle in pools, lowest priority first.
std::size_t DeviceMemory::give_back_excess(Budget& budget, bool wait) {
  std::size_t given_back = 0;
  const auto excess = [&] {
    const std::size_t used = budget.used();
    const std::size_t most = budget.limit();
    return used > most ? used - most : 0;
  };
  for (int round = 0; round < 2 && excess() != 0; ++round) {
    if (round == 1) {
      for (const auto& pool : in_order_of_yielding(pools_under(budget))) {
        if (excess() == 0) break;
        const std::size_t idle = pool->idle_bytes();
        pool->shed(idle > excess() ? idle - excess() : 0);
      }
      settle_all(wait);
    }
    given_back += store_.trim_under(budget, excess());
  }
  return given_back;
}

// A limit was lowered below what was in use: every free brings it nearer.
void DeviceMemory::enforce_limits() {
  std::vector<Budget*> over;
  const auto note = [&over](Budget& budget) {
    if (budget.used() > budget.limit()) over.push_back(&budget);
  };
  const PoolList all = pools();
  for (const auto& pool : all) note(pool->budget());
  {
    const MutexLock lock(registry_mutex_);
    for (const auto& group : groups_) note(*group);
  }
  note(budget_);
  bool still = false;
  for (Budget* budget : over) {
    give_back_excess(*budget, /*wait=*/false);
    still = still || budget->used() > budget->limit();
  }
  over_limit_.store(still, std::memory_order_relaxed);
}

void DeviceMemory::settle_all(bool wait) {
  for (const auto& pool : pools()) pool->settle(wait);
}

// -------------------------------------------------------------------- numbers

Statistics DeviceMemory::statistics() const {
  Statistics sum;
  const MutexLock lock(registry_mutex_);
  sum.add_totals(of_ended_pools_);
  for (const auto& pool : pools_) sum.add_totals(pool->statistics());
  peaks_.fill_peaks(sum);
  return sum;
}

void DeviceMemory::reset_peaks() {
  const MutexLock lock(registry_mutex_);
  peaks_.reset_peaks();
  for (const auto& pool : pools_) pool->reset_peaks();
}

void DeviceMemory::reset_accumulated() {
  const MutexLock lock(registry_mutex_);
  of_ended_pools_.reset_accumulated();
  for (const auto& pool : pools_) pool->reset_accumulated();
}

// One moment for all pools of the group, so that a chunk on its way from one
// to another counts once.
GlobalMemoryStats DeviceMemory::group_stats(const Budget& group) const {
  GlobalMemoryStats stats;
  stats.physical_limit = group.limit();
  const PoolList pools = pools_under(group);
  const AllLocked locked(pools);
  std::size_t mapped = 0;
  for (const auto& pool : pools) {
    const MemoryStats part = pool->memory_stats_locked();
    mapped += part.physical_usage;
    stats.allocated_bytes += part.allocated_bytes;
    stats.idle_bytes += part.idle_bytes;
    stats.stranded_bytes += part.stranded_bytes;
    stats.quarantined_bytes += part.quarantined_bytes;
  }
  // What is charged and mapped nowhere: shelves, and what is on its way to a
  // request. Of it, what a former address still waits for is quarantined.
  stats.physical_usage = group.used();
  const std::size_t unmapped = stats.physical_usage - std::min(mapped, stats.physical_usage);
  const std::size_t waiting = std::min(store_.quarantined_bytes(group), unmapped);
  stats.store_bytes = unmapped - waiting;
  stats.quarantined_bytes += waiting;
  return stats;
}

void DeviceMemory::check() const {
  const PoolList all = pools();
  std::size_t mapped = 0;
  std::size_t chunks = 0;
  for (const auto& pool : all) {
    pool->check();
    const std::size_t bytes = pool->physical_bytes();
    VMM_CHECK(pool->budget().used() == bytes, "pool ", pool->name(), " maps ", bytes, ", is charged ",
              pool->budget().used());
    mapped += bytes;
    chunks += static_cast<std::size_t>(pool->statistics()[StatKind::segment][0].current);
  }
  const std::size_t shelved = store_.all_shelved_bytes();
  VMM_CHECK(budget_.used() >= mapped + shelved, "device charged ", budget_.used(), ", pools map ", mapped,
            ", shelves hold ", shelved);
  VMM_CHECK(store_.live_chunks() >= chunks, "chunks: alive ", store_.live_chunks(), ", mapped ", chunks);
}

}  // namespace vmm
