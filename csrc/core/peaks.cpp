#include "core/peaks.h"

#include <algorithm>

namespace vmm {

Peaks::Seat::Seat(Peaks& peaks) : peaks_(peaks) {
  const MutexLock lock(peaks_.mutex_);
  place_ = peaks_.seats_.size();
  peaks_.seats_.push_back(this);
}

Peaks::Seat::~Seat() {
  const MutexLock lock(peaks_.mutex_);
  for (std::size_t counter = 0; counter < ceiling_.size(); ++counter) {
    peaks_.ceilings_[counter] -= ceiling_[counter].load(std::memory_order_relaxed);
  }
  peaks_.seats_.back()->place_ = place_;
  peaks_.seats_[place_] = peaks_.seats_.back();
  peaks_.seats_.pop_back();
  if (has_room_.load(std::memory_order_relaxed)) std::erase(peaks_.with_room_, this);
}

void Peaks::Seat::start_from(const Statistics& statistics) {
  for (std::size_t counter = 0; counter < current_.size(); ++counter) {
    current_[counter].store(statistics.stats.at(counter / 3).at(counter % 3).current, std::memory_order_relaxed);
  }
  peaks_.look(*this);
  const MutexLock lock(peaks_.mutex_);
  for (std::size_t counter = 0; counter < current_.size(); ++counter) {
    std::int64_t& peak = peaks_.peak_[counter];
    peak = std::max(peak, statistics.stats.at(counter / 3).at(counter % 3).peak);
  }
}

void Peaks::look(Seat& seat) {
  const MutexLock lock(mutex_);
  bool has_more = false;
  for (std::size_t counter = 0; counter < peak_.size(); ++counter) {
    const std::int64_t current = seat.current_[counter].load(std::memory_order_relaxed);
    const std::int64_t missing = current - seat.ceiling_[counter].load(std::memory_order_relaxed);
    if (missing <= 0) continue;
    // From the latest that fell: of models in turn it is the one before.
    while (ceilings_[counter] + missing > peak_[counter] && !with_room_.empty()) take_back(*with_room_.back());
    ceilings_[counter] += missing;
    peak_[counter] = std::max(peak_[counter], ceilings_[counter]);
    // Half of what nobody has comes on top, so that a seat that rises by little
    // each time seldom looks.
    const std::int64_t more = (peak_[counter] - ceilings_[counter]) / 2;
    seat.ceiling_[counter].store(current + more, std::memory_order_relaxed);
    ceilings_[counter] += more;
    has_more = has_more || more != 0;
  }
  if (has_more && !seat.has_room_.load(std::memory_order_relaxed)) note_room_locked(seat);
}

void Peaks::note_room(Seat& seat) {
  const MutexLock lock(mutex_);
  note_room_locked(seat);
}

void Peaks::note_room_locked(Seat& seat) {
  seat.has_room_.store(true, std::memory_order_relaxed);
  with_room_.push_back(&seat);
}

// What the latest with room has left below its ceilings.
void Peaks::take_back(Seat& seat) {
  with_room_.pop_back();
  seat.has_room_.store(false, std::memory_order_relaxed);
  lower(seat);
}

void Peaks::lower(Seat& seat) {
  for (std::size_t counter = 0; counter < peak_.size(); ++counter) {
    const std::int64_t room =
        seat.ceiling_[counter].load(std::memory_order_relaxed) - seat.current_[counter].load(std::memory_order_relaxed);
    if (room <= 0) continue;  // below 0: it is about to look
    seat.ceiling_[counter].fetch_sub(room, std::memory_order_relaxed);
    ceilings_[counter] -= room;
  }
}

void Peaks::reset_peaks() {
  const MutexLock lock(mutex_);
  for (Seat* seat : seats_) lower(*seat);
  peak_ = ceilings_;
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
