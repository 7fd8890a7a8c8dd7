// DeviceMemory: what it tells of all its pools, of a model with its parts and of a
// group, and the proof that it adds up.
#include <algorithm>

#include "base/check.h"
#include "core/device/device_memory.h"
#include "core/device/provided_memory.h"

namespace vmm {

Statistics DeviceMemory::statistics() const {
  Statistics sum;
  PoolList pools;
  {
    const MutexLock lock(registry_mutex_);
    sum.add_totals(counted_before_);
    for (const auto& each : counters_beside_) sum.add_totals(each->statistics());
    pools = *registry_.all().list();
  }
  for (const auto& pool : pools) sum.add_totals(pool->statistics());
  peaks_.fill_peaks(sum);
  return sum;
}

void DeviceMemory::reset_peaks() {
  PoolList pools;
  {
    const MutexLock lock(registry_mutex_);
    peaks_.reset_peaks();
    counted_before_.reset_peaks();
    for (const auto& each : counters_beside_) each->count([](PoolCounters& counters) { counters.reset_peaks(); });
    pools = *registry_.all().list();
  }
  for (const auto& pool : pools) pool->reset_peaks();
}

// Who ends meanwhile is looked at last, or its numbers of before would come back with it.
void DeviceMemory::reset_accumulated() {
  for (const auto& pool : pools()) pool->reset_accumulated();
  const MutexLock lock(registry_mutex_);
  for (const auto& each : counters_beside_) each->count([](PoolCounters& counters) { counters.reset_accumulated(); });
  counted_before_.reset_accumulated();
  ++times_reset_;
}

std::shared_ptr<CountersBeside> DeviceMemory::count_beside() {
  auto counters = std::make_shared<CountersBeside>(peaks_);
  const MutexLock lock(registry_mutex_);
  counters_beside_.push_back(counters);
  return counters;
}

std::size_t DeviceMemory::counted_beside() const {
  const MutexLock lock(registry_mutex_);
  return counters_beside_.size();
}

void DeviceMemory::end_count_beside(const CountersBeside& counters) noexcept {
  const MutexLock lock(registry_mutex_);
  counted_before_.add_totals(counters.statistics());
  std::erase_if(counters_beside_, [&](const auto& each) { return each.get() == &counters; });
}

Statistics DeviceMemory::statistics_of(const Pool& model) const {
  Statistics sum = model.statistics();
  const Peaks* peaks = model.family_peaks();
  if (peaks == nullptr) return sum;
  sum.add_totals(model.inherited());
  for (const auto& member : family(model)) {
    if (member.get() != &model) sum.add_totals(member->statistics());
  }
  peaks->fill_peaks(sum);
  return sum;
}

// Threads are made to stand still once for all of them: for each of a thousand it took 2 ms.
std::vector<MemoryStats> DeviceMemory::stats_of_each(const PoolList& pools) const {
  std::vector<MemoryStats> stats;
  stats.reserve(pools.size());
  const BlockCaches::Still still(caches_, pools, BlockCaches::Kept::back);
  const AllLocked locked(pools);
  for (const auto& pool : pools) stats.push_back(pool->memory_stats_locked());
  return stats;
}

MemoryStats DeviceMemory::memory_stats_of(const Pool& model) const {
  const PoolList members = family(model);
  const std::vector<MemoryStats> parts = stats_of_each(members);
  MemoryStats sum;
  for (std::size_t k = 0; k < parts.size(); ++k) {
    if (!members[k]->is_part()) sum.virtual_capacity = parts[k].virtual_capacity;
    sum.add(parts[k]);
  }
  if (sum.physical_usage != 0) {
    sum.fragmentation_ratio = static_cast<double>(sum.stranded_bytes) / static_cast<double>(sum.physical_usage);
  }
  return sum;
}

void DeviceMemory::reset_peaks_of(const Pool& model) {
  for (const auto& member : family(model)) member->reset_peaks();
}

void DeviceMemory::reset_accumulated_of(const Pool& model) {
  // The device's own totals go on: they are reset by themselves.
  for (const auto& member : family(model)) {
    const Statistics so_far = member->reset_accumulated();
    const MutexLock lock(registry_mutex_);
    counted_before_.add_totals(so_far);
  }
}

void DeviceMemory::refresh_numbers() {
  for (const auto& pool : pools()) pool->refresh_numbers();
  for (const auto& provided : ProvidedMemory::all_of(*this)) provided->refresh_numbers();
}

// One moment for all pools of the group, so that a chunk on its way from one
// to another counts once.
GlobalMemoryStats DeviceMemory::group_stats(const Budget& group) {
  std::shared_ptr<const PoolList> pools;
  std::shared_ptr<GroupFigures> figures;
  std::size_t spilled = 0;
  {
    const MutexLock lock(registry_mutex_);
    pools = registry_.of_group(group);
    if (const auto at = groups_.find(&group); at != groups_.end()) {
      figures = at->second.figures;
      spilled = at->second.spill->used();
    }
  }
  if (figures == nullptr) figures = std::make_shared<GroupFigures>();  // it has ended
  GlobalMemoryStats stats;
  stats.physical_limit = group.limit();
  ChunkStore::Waiting waits;
  const BlockCaches::Still still(caches_, *pools, BlockCaches::Kept::back);
  const MemoryStats mapped = figures->sum(pools, [&] {
    stats.physical_usage = group.used();
    clock_.poll();
    waits = store_.waiting(group, clock_.passed());
  });
  clock_.cover_in_time(waits.newest);  // whoever asks until there is none must not need another's tick
  stats.allocated_bytes = mapped.allocated_bytes;
  stats.idle_bytes = mapped.idle_bytes;
  stats.stranded_bytes = mapped.stranded_bytes;
  stats.asleep_bytes = mapped.asleep_bytes;
  stats.spilled_bytes = spilled;
  // What is charged and mapped nowhere: shelves, and what is on its way to a
  // request. Of it, what a former address still waits for is quarantined.
  const std::size_t unmapped = stats.physical_usage - std::min(mapped.physical_usage, stats.physical_usage);
  const std::size_t waiting = std::min(waits.bytes, unmapped);
  stats.store_bytes = unmapped - waiting;
  stats.quarantined_bytes = mapped.quarantined_bytes + waiting;
  return stats;
}

void DeviceMemory::check() const {
  const PoolList all = pools();
  std::size_t mapped = 0;
  std::size_t chunks = 0;
  std::size_t spilled = 0;
  for (const auto& pool : all) {
    pool->check();
    const std::size_t bytes = pool->physical_bytes();
    std::size_t of_parts = 0;
    for (const auto& part : all) {
      const bool is_paid_here = part->is_part() && !part->is_spill() && &part->model() == pool.get();
      if (is_paid_here) of_parts += part->budget().used();
    }
    VMM_CHECK(pool->budget().used() == bytes + of_parts, "pool ", pool->name(), " maps ", bytes, ", its parts ",
              of_parts, ", and is charged ", pool->budget().used());
    if (pool->is_spill()) {
      spilled += bytes;
      continue;
    }
    mapped += bytes;
    chunks += static_cast<std::size_t>(pool->statistics()[StatKind::segment][0].current);
  }
  const std::size_t shelved = store_.all_shelved_bytes();
  VMM_CHECK(budget_.used() >= mapped + shelved, "device charged ", budget_.used(), ", pools map ", mapped,
            ", shelves hold ", shelved);
  std::size_t beside = 0;
  {
    const MutexLock lock(registry_mutex_);
    for (const auto& each : counters_beside_) {
      beside += static_cast<std::size_t>(each->statistics()[StatKind::reserved_bytes][0].current);
    }
  }
  VMM_CHECK(foreign_budget_.used() == beside, "of other allocators: charged ", foreign_budget_.used(), ", counted ",
            beside);
  VMM_CHECK(spill_budget_.used() == spilled + spill_store_.all_shelved_bytes(), "spilled: charged ",
            spill_budget_.used(), ", mapped ", spilled);
  VMM_CHECK(store_.live_chunks() >= chunks, "chunks: alive ", store_.live_chunks(), ", mapped ", chunks);
}

}  // namespace vmm
