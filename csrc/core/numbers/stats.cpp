#include "core/numbers/stats.h"

#include <algorithm>

namespace vmm {

void Statistics::reset_peaks() {
  for (auto& triple : stats) {
    for (Stat& stat : triple) stat.peak = stat.current;
  }
  for (const auto& [name, stat] : kOversizeStats) (this->*stat).peak = (this->*stat).current;
}

void Statistics::reset_accumulated() {
  for (auto& triple : stats) {
    for (Stat& stat : triple) stat.allocated = stat.freed = 0;
  }
  for (const auto& [name, stat] : kOversizeStats) (this->*stat).allocated = (this->*stat).freed = 0;
  for (const auto& [name, count] : kCounts) this->*count = 0;
}

void Statistics::leave_only_accumulated() {
  for (auto& triple : stats) {
    for (Stat& stat : triple) stat.current = stat.peak = 0;
  }
  for (const auto& [name, stat] : kOversizeStats) (this->*stat).current = (this->*stat).peak = 0;
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
  for (const auto& [name, stat] : kOversizeStats) {
    Stat& mine = this->*stat;
    const Stat& theirs = other.*stat;
    mine.current += theirs.current;
    mine.peak += theirs.peak;
    mine.allocated += theirs.allocated;
    mine.freed += theirs.freed;
  }
  for (const auto& [name, count] : kCounts) this->*count += other.*count;
}

void MemoryStats::add(const MemoryStats& part) {
  for (const auto& row : kMemoryFields) {
    if (row.adds_up) std::visit([&](auto field) { this->*field += part.*field; }, row.field);
  }
}

void MemoryStats::subtract(const MemoryStats& part) {
  for (const auto& row : kMemoryFields) {
    if (row.adds_up) std::visit([&](auto field) { this->*field -= part.*field; }, row.field);
  }
}

void Statistics::add_blocks(const BlockCounts& current, const BlockCounts& came) {
  for (std::size_t k = 0; k < kNumbersOfBlocks; ++k) {
    for (const StatKind kind : kinds_of_block_count(k)) {
      for (std::size_t of_class = 0; of_class < 2; ++of_class) {
        for (const std::size_t which : {std::size_t{0}, 1 + of_class}) {
          Stat& stat = (*this)[kind].at(which);
          stat.current += current.at(of_class).at(k);
          stat.allocated += came.at(of_class).at(k);
          stat.freed += came.at(of_class).at(k) - current.at(of_class).at(k);
        }
      }
    }
  }
}

void Statistics::leave_none_below_zero() {
  for (auto& triple : stats) {
    for (Stat& stat : triple) stat.current = std::max<std::int64_t>(stat.current, 0);
  }
}

}  // namespace vmm
