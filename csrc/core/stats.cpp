#include "core/stats.h"

namespace vmm {

void Statistics::reset_peaks() {
  for (auto& triple : stats) {
    for (Stat& stat : triple) stat.peak = stat.current;
  }
  oversize_allocations.peak = oversize_allocations.current;
  oversize_segments.peak = oversize_segments.current;
}

void Statistics::reset_accumulated() {
  for (auto& triple : stats) {
    for (Stat& stat : triple) stat.allocated = stat.freed = 0;
  }
  for (Stat* stat : {&oversize_allocations, &oversize_segments}) stat->allocated = stat->freed = 0;
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
  const auto add = [](Stat& mine, const Stat& theirs) {
    mine.current += theirs.current;
    mine.peak += theirs.peak;
    mine.allocated += theirs.allocated;
    mine.freed += theirs.freed;
  };
  add(oversize_allocations, other.oversize_allocations);
  add(oversize_segments, other.oversize_segments);
  num_alloc_retries += other.num_alloc_retries;
  num_ooms += other.num_ooms;
  num_sync_all_streams += other.num_sync_all_streams;
  num_device_alloc += other.num_device_alloc;
  num_device_free += other.num_device_free;
}

void Statistics::add_blocks(const BlockCounts& current, const BlockCounts& came) {
  for (std::size_t k = 0; k < kKindsOfBlockCount.size(); ++k) {
    const auto& kinds = kKindsOfBlockCount.at(k);
    for (std::size_t of_kind = 0; of_kind < (kinds[0] == kinds[1] ? 1U : 2U); ++of_kind) {
      for (std::size_t of_class = 0; of_class < 2; ++of_class) {
        for (const std::size_t which : {std::size_t{0}, 1 + of_class}) {
          Stat& stat = (*this)[kinds.at(of_kind)].at(which);
          stat.current += current.at(of_class).at(k);
          stat.allocated += came.at(of_class).at(k);
          stat.freed += came.at(of_class).at(k) - current.at(of_class).at(k);
        }
      }
    }
  }
}

}  // namespace vmm
