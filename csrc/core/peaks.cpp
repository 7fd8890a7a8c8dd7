#include "core/peaks.h"

#include <algorithm>

namespace vmm {

Peaks::Seat::Seat(Peaks& peaks) : peaks_(peaks) {
  const MutexLock lock(peaks_.mutex_);
  peaks_.seats_.push_back(this);
}

Peaks::Seat::~Seat() {
  const MutexLock lock(peaks_.mutex_);
  std::erase(peaks_.seats_, this);
}

void Peaks::Seat::start_from(const Statistics& statistics) {
  const MutexLock lock(peaks_.mutex_);
  for (std::size_t counter = 0; counter < current_.size(); ++counter) {
    const Stat& stat = statistics.stats.at(counter / 3).at(counter % 3);
    current_[counter].store(stat.current, std::memory_order_relaxed);
    peaks_.peak_[counter] = std::max(peaks_.peak_[counter], stat.peak);
    peaks_.share_out(counter, /*may_rise=*/true);
  }
}

void Peaks::look(Seat& seat) {
  const MutexLock lock(mutex_);
  for (std::size_t counter = 0; counter < peak_.size(); ++counter) {
    const std::int64_t current = seat.current_[counter].load(std::memory_order_relaxed);
    if (current > seat.ceiling_[counter].load(std::memory_order_relaxed)) share_out(counter, /*may_rise=*/true);
  }
}

// The room below the peak is shared equally: together the seats can fill it,
// and not exceed it, without looking again.
void Peaks::share_out(std::size_t counter, bool may_rise) {
  std::int64_t total = 0;
  for (const Seat* seat : seats_) total += seat->current_[counter].load(std::memory_order_relaxed);
  peak_[counter] = may_rise ? std::max(peak_[counter], total) : total;
  const std::int64_t share =
      (peak_[counter] - total) / static_cast<std::int64_t>(std::max<std::size_t>(seats_.size(), 1));
  for (Seat* seat : seats_) {
    seat->ceiling_[counter].store(seat->current_[counter].load(std::memory_order_relaxed) + share,
                                  std::memory_order_relaxed);
  }
}

void Peaks::reset_peaks() {
  const MutexLock lock(mutex_);
  for (std::size_t counter = 0; counter < peak_.size(); ++counter) share_out(counter, /*may_rise=*/false);
}

void Peaks::fill_peaks(Statistics& out) const {
  const MutexLock lock(mutex_);
  for (std::size_t kind = 0; kind < kStatKinds; ++kind) {
    for (std::size_t which = 0; which < 3; ++which) {
      Stat& stat = out.stats.at(kind).at(which);
      stat.peak = std::max(stat.current, peak_.at(kind * 3 + which));
    }
  }
}

}  // namespace vmm
