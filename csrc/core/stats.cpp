#include "core/stats.h"

#include <algorithm>

namespace vmm {

void Statistics::reset_peaks() {
  for (auto& triple : stats) {
    for (Stat& stat : triple) stat.peak = stat.current;
  }
}

void Statistics::reset_accumulated() {
  for (auto& triple : stats) {
    for (Stat& stat : triple) stat.allocated = stat.freed = 0;
  }
  num_alloc_retries = num_ooms = num_sync_all_streams = num_device_alloc = num_device_free = 0;
}

void Statistics::add_totals(const Statistics& other) {
  for (std::size_t kind = 0; kind < kStatKinds; ++kind) {
    for (std::size_t which = 0; which < 3; ++which) {
      Stat& mine = stats.at(kind).at(which);
      const Stat& theirs = other.stats.at(kind).at(which);
      mine.current += theirs.current;
      mine.allocated += theirs.allocated;
      mine.freed += theirs.freed;
    }
  }
  num_alloc_retries += other.num_alloc_retries;
  num_ooms += other.num_ooms;
  num_sync_all_streams += other.num_sync_all_streams;
  num_device_alloc += other.num_device_alloc;
  num_device_free += other.num_device_free;
}

void DevicePeaks::Cell::increase(std::int64_t amount) {
  const std::int64_t now = current.fetch_add(amount, std::memory_order_relaxed) + amount;
  std::int64_t highest = peak.load(std::memory_order_relaxed);
  while (now > highest && !peak.compare_exchange_weak(highest, now, std::memory_order_relaxed)) {
  }
}

void DevicePeaks::increase(StatKind kind, SizeClass size_class, std::size_t amount) {
  auto& cells = cells_.at(static_cast<std::size_t>(kind));
  cells[0].increase(static_cast<std::int64_t>(amount));
  cells[size_class == SizeClass::small_pool ? 1 : 2].increase(static_cast<std::int64_t>(amount));
}

void DevicePeaks::decrease(StatKind kind, SizeClass size_class, std::size_t amount) {
  auto& cells = cells_.at(static_cast<std::size_t>(kind));
  cells[0].current.fetch_sub(static_cast<std::int64_t>(amount), std::memory_order_relaxed);
  cells[size_class == SizeClass::small_pool ? 1 : 2].current.fetch_sub(static_cast<std::int64_t>(amount),
                                                                        std::memory_order_relaxed);
}

void DevicePeaks::reset_peaks() {
  for (auto& cells : cells_) {
    for (Cell& cell : cells) cell.peak.store(cell.current.load(std::memory_order_relaxed), std::memory_order_relaxed);
  }
}

void DevicePeaks::fill_peaks(Statistics& out) const {
  for (std::size_t kind = 0; kind < kStatKinds; ++kind) {
    for (std::size_t which = 0; which < 3; ++which) {
      Stat& stat = out.stats.at(kind).at(which);
      stat.peak = std::max(stat.current, cells_.at(kind).at(which).peak.load(std::memory_order_relaxed));
    }
  }
}

}  // namespace vmm
