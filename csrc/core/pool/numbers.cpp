// Pool: its numbers. The proof that they add up is checking.cpp.
#include <algorithm>

#include "core/pool/pool.h"

namespace vmm {

void Pool::refresh_numbers() {
  if (Telling::is_mine()) return;  // an observer reads what it finds
  const BlockCaches::Still still(context_.caches, *this, BlockCaches::Kept::back);
  {
    const ReadLock lock(*this);
    if (!space_.is_open()) return;
    if (pending_.empty() && (sleeping_.is_asleep() || split_as_of_ == times_locked())) return;
  }
  const MutexLock lock(mutex_);
  finish_passed();
  if (space_.is_open() && !sleeping_.is_asleep()) set_inactive_split(free_space());
  split_as_of_ = times_locked();
}

TakenBytes Pool::taken_bytes() const {
  TakenBytes taken;
  taken.of_slabs = counters_.current(StatKind::reserved_bytes, SizeClass::small_pool);
  taken.in_slabs = counters_.current(StatKind::active_bytes, SizeClass::small_pool);
  taken.large = counters_.current(StatKind::active_bytes, SizeClass::large_pool) + quarantined_.bytes() +
                watched_.leaving_bytes() + watched_.mapped_bytes();
  return taken;
}

void Pool::set_inactive_split(const FreeSpace& free) {
  for (const SizeClass size_class : {SizeClass::small_pool, SizeClass::large_pool}) {
    const auto of_class = static_cast<std::size_t>(size_class);
    counters_.set(StatKind::inactive_split, size_class, free.stranded_count.at(of_class));
    counters_.set(StatKind::inactive_split_bytes, size_class, free.stranded_bytes.at(of_class));
  }
}

MemoryStats Pool::memory_stats() {
  const StillLock lock(*this, BlockCaches::Kept::back);
  return memory_stats_locked();
}

bool Pool::changes_by_itself_locked() const {
  return space_.is_open() &&
         (!pending_.empty() || !quarantined_.empty() || watched_.has_freed() || space_.range().has_retired());
}

MemoryStats Pool::memory_stats_locked() {
  MemoryStats stats;
  stats.virtual_capacity = kind_.capacity;
  if (!space_.is_open()) return stats;
  settle_locked();
  if (kind_.is_spill()) {
    stats.spilled_bytes = space_.range().mapped_bytes();
    return stats;
  }
  stats.physical_usage = space_.range().mapped_bytes();
  stats.mapped_pages = stats.physical_usage / kind_.page;
  if (sleeping_.is_asleep()) {  // what of it is still there is somebody's
    stats.allocated_bytes = stats.physical_usage;
    stats.asleep_bytes = sleeping_.elsewhere_of(live_bytes_locked());
    return stats;
  }
  stats.allocated_bytes = live_bytes_locked();
  stats.quarantined_bytes = pending_bytes_ + quarantined_.bytes() + watched_.leaving_bytes();
  stats.idle_bytes = free_space().idle_bytes;
  stats.stranded_bytes = stats.physical_usage - stats.allocated_bytes - stats.idle_bytes - stats.quarantined_bytes;
  if (stats.physical_usage != 0) {
    stats.fragmentation_ratio = static_cast<double>(stats.stranded_bytes) / static_cast<double>(stats.physical_usage);
  }
  return stats;
}

Statistics Pool::statistics() const {
  Statistics sum;
  {
    const BlockCaches::Reading of_threads(context_.caches);
    const ReadLock lock(*this);
    sum = counters_.totals();
    if (space_.is_open()) {
      sum.num_device_alloc += space_.range().mapped_by_driver();
      sum.num_device_free += space_.range().unmapped_by_driver();
    }
    of_threads.add_counts(*this, &sum);
  }
  sum.leave_none_below_zero();
  own_peaks_.fill_peaks(sum);
  return sum;
}

std::size_t Pool::physical_bytes() const {
  const ReadLock lock(*this);
  return !space_.is_open() ? 0 : space_.range().mapped_bytes();
}

std::size_t Pool::bytes_above_floor() const {
  const std::size_t held = model().budget_.used();
  return held - std::min(held, floor());
}

std::size_t Pool::idle_bytes() {
  const StillLock lock(*this, BlockCaches::Kept::back);
  if (!space_.is_open()) return 0;
  settle_locked();
  return sleeping_.is_asleep() ? 0 : free_space().idle_bytes;
}

std::size_t Pool::peak_with(std::size_t bytes) {
  const Peaks::Level allocated = own_peaks_.level(StatKind::allocated_bytes);  // threads' too
  return std::max(static_cast<std::size_t>(allocated.peak), static_cast<std::size_t>(allocated.current) + bytes);
}

void Pool::follow_family_peaks() {
  // Shards that are made from now on follow the family too.
  const StillLock lock(*this, BlockCaches::Kept::gone);
  if (family_peaks_owner_ != nullptr) return;
  family_peaks_owner_ = std::make_unique<Peaks>(context_.peaks);
  counters_.begin_family(*family_peaks_owner_);
  family_peaks_.store(family_peaks_owner_.get(), std::memory_order_release);
}

void Pool::inherit(const Statistics& of_part) {
  const MutexLock lock(mutex_);
  counters_.inherit(of_part);
}

Statistics Pool::inherited() const {
  const ReadLock lock(*this);
  return counters_.inherited();
}

std::size_t Pool::live_bytes() const {
  return static_cast<std::size_t>(statistics()[StatKind::allocated_bytes][0].current);
}

std::size_t Pool::live_bytes_locked() const { return counters_.current(StatKind::allocated_bytes); }

std::size_t Pool::live_blocks() const {
  return static_cast<std::size_t>(statistics()[StatKind::allocation][0].current);
}

std::size_t Pool::times_walked() const {
  const MutexLock lock(mutex_);
  return space_.walks();
}

std::size_t Pool::streams_known() const {
  const MutexLock lock(mutex_);
  return streams_.size() - 1;  // without the neutral tag's
}

void Pool::count_retry() {
  const MutexLock lock(mutex_);
  counters_.retried();
}

void Pool::count_oom() {
  const MutexLock lock(mutex_);
  counters_.ran_out();
}

void Pool::count_sync() {
  const MutexLock lock(mutex_);
  counters_.synchronized();
}

void Pool::reset_peaks() {
  const MutexLock lock(mutex_);
  space_.growth().note_live(peak_with(0));  // what growth goes by is not to be reset
  counters_.reset_peaks();
  if (family_peaks_owner_ != nullptr) family_peaks_owner_->reset_peaks();
}

Statistics Pool::reset_accumulated() {
  const StillLock lock(*this, BlockCaches::Kept::stays);
  Statistics accumulated = counters_.totals();
  counters_.reset_accumulated();
  if (space_.is_open()) {
    accumulated.num_device_alloc += space_.range().mapped_by_driver();
    accumulated.num_device_free += space_.range().unmapped_by_driver();
    space_.range().forget_counts();
  }
  accumulated.leave_only_accumulated();
  return accumulated;
}

}  // namespace vmm
