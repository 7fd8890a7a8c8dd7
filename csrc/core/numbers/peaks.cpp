#include "core/numbers/peaks.h"

#include <algorithm>
#include <limits>

namespace vmm {

Peaks::Seat::Seat(Peaks& peaks, Of what) : peaks_(peaks), what_(what) {
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

BlockCounts Peaks::Seat::counts() const {
  BlockCounts now{};
  for (std::size_t of_class = 0; of_class < 2; ++of_class) {
    for (std::size_t k = 0; k < 3; ++k) now[of_class][k] = counts_[of_class][k].load(std::memory_order_relaxed);
  }
  return now;
}

void Peaks::Seat::spread() {
  if (what_ == Of::everything) return;
  const BlockCounts now = counts();
  for (std::size_t k = 0; k < 3; ++k) {
    for (const StatKind kind : kinds_of_block_count(k)) {
      current_[index(kind)].store(now[0][k] + now[1][k], std::memory_order_relaxed);
      current_[index(kind) + 1].store(now[0][k], std::memory_order_relaxed);
      current_[index(kind) + 2].store(now[1][k], std::memory_order_relaxed);
    }
  }
}

void Peaks::Seat::tighten() {
  if (what_ == Of::everything) return;
  for (std::size_t k = 0; k < 3; ++k) {
    for (std::size_t which = 0; which < 3; ++which) {
      std::int64_t most = std::numeric_limits<std::int64_t>::max();
      for (const StatKind kind : kinds_of_block_count(k)) {
        most = std::min(most, ceiling_[index(kind) + which].load(std::memory_order_relaxed));
      }
      most_[which][k].store(most, std::memory_order_relaxed);
    }
  }
}

void Peaks::transfer(const BlockCounts& counts, Seat& from, Seat& to) {
  const MutexLock lock(mutex_);
  const auto move = [&](std::size_t counter, std::int64_t amount) {
    from.ceiling_[counter].fetch_sub(amount, std::memory_order_relaxed);
    to.ceiling_[counter].fetch_add(amount, std::memory_order_relaxed);
    to.current_[counter].fetch_add(amount, std::memory_order_relaxed);
  };
  for (std::size_t k = 0; k < 3; ++k) {
    const std::int64_t small = counts[0][k];
    const std::int64_t large = counts[1][k];
    for (const StatKind kind : kinds_of_block_count(k)) {
      const std::size_t first = Seat::index(kind);
      move(first, small + large);
      move(first + 1, small);
      move(first + 2, large);
    }
    Seat::add(from.counts_[0][k], -small);
    Seat::add(from.counts_[1][k], -large);
  }
  from.spread();
  from.tighten();
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
  seat.spread();
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
  seat.tighten();
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
  seat.spread();
  for (std::size_t counter = 0; counter < peak_.size(); ++counter) {
    const std::int64_t room =
        seat.ceiling_[counter].load(std::memory_order_relaxed) - seat.current_[counter].load(std::memory_order_relaxed);
    if (room <= 0) continue;  // below 0: it is about to look
    seat.ceiling_[counter].fetch_sub(room, std::memory_order_relaxed);
    ceilings_[counter] -= room;
  }
  seat.tighten();
}

Peaks::Level Peaks::level(StatKind kind) const {
  const MutexLock lock(mutex_);
  const std::size_t counter = Seat::index(kind);
  Level level;
  for (Seat* seat : seats_) {
    seat->spread();
    level.current += seat->current_.at(counter).load(std::memory_order_relaxed);
  }
  level.peak = std::max(level.current, peak_.at(counter));
  return level;
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
