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

}  // namespace vmm
