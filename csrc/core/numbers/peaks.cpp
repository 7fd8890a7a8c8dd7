#include "core/numbers/peaks.h"

#include <algorithm>
#include <limits>

namespace vmm {

Peaks::Seat::Seat(Peaks& peaks) : peaks_(peaks), blocks_(nullptr) {
  const MutexLock lock(peaks_.mutex_);
  enter();
}

Peaks::Seat::~Seat() {
  if (blocks_ != nullptr) return;
  const MutexLock lock(peaks_.mutex_);
  leave();
}

void Peaks::Seat::enter() VMM_NO_THREAD_SAFETY_ANALYSIS {
  // To note that it has room asks for no memory: a block that ends cannot do without.
  auto& with_room = peaks_.with_room_;
  if (with_room.capacity() <= peaks_.seats_.size()) with_room.reserve(2 * peaks_.seats_.size() + 2);
  place_ = peaks_.seats_.size();
  peaks_.seats_.push_back(this);
}

void Peaks::Seat::leave() VMM_NO_THREAD_SAFETY_ANALYSIS {
  for (std::size_t counter = 0; counter < ceiling_.size(); ++counter) {
    peaks_.ceilings_[counter] -= ceiling_[counter].load(std::memory_order_relaxed);
  }
  peaks_.seats_.back()->place_ = place_;
  peaks_.seats_[place_] = peaks_.seats_.back();
  peaks_.seats_.pop_back();
  if (has_room_.load(std::memory_order_relaxed)) peaks_.forget_room(*this);
}

void Peaks::Seat::spread() {
  if (blocks_ == nullptr) return;
  const BlockCounts now = blocks_->counts();
  for (std::size_t k = 0; k < 3; ++k) {
    for (const StatKind kind : kinds_of_block_count(k)) {
      current_[index(kind)].store(now[0][k] + now[1][k], std::memory_order_relaxed);
      current_[index(kind) + 1].store(now[0][k], std::memory_order_relaxed);
      current_[index(kind) + 2].store(now[1][k], std::memory_order_relaxed);
    }
  }
}

void Peaks::Seat::tighten() {
  if (blocks_ != nullptr) blocks_->tighten();
}

void Peaks::transfer(const BlockCounts& counts, BlockSeat& from, const std::array<Seat*, 2>& to) {
  const MutexLock lock(from.seats_.front()->peaks_.mutex_);  // all of them have this one
  for (Seat* const seat : to) {
    Seat* const part = seat == nullptr ? nullptr : from.seat_in(seat->peaks_);
    if (part == nullptr) continue;
    const auto move = [&](std::size_t counter, std::int64_t amount) {
      part->ceiling_[counter].fetch_sub(amount, std::memory_order_relaxed);
      seat->ceiling_[counter].fetch_add(amount, std::memory_order_relaxed);
      seat->current_[counter].fetch_add(amount, std::memory_order_relaxed);
    };
    for (std::size_t k = 0; k < 3; ++k) {
      for (const StatKind kind : kinds_of_block_count(k)) {
        const std::size_t first = Seat::index(kind);
        move(first, counts[0][k] + counts[1][k]);
        move(first + 1, counts[0][k]);
        move(first + 2, counts[1][k]);
      }
    }
  }
  for (std::size_t of_class = 0; of_class < 2; ++of_class) {
    for (std::size_t k = 0; k < 3; ++k) BlockSeat::add(from.counts_[of_class][k], -counts[of_class][k]);
  }
  for (const auto& part : from.seats_) {
    if (part != nullptr) part->spread();
  }
  from.tighten();
}

// ---------------------------------------------------------------- a seat of blocks

// Whoever lowers one of its parts looks at all of them: so they come and go in one step.
BlockSeat::BlockSeat(Peaks& first, Peaks* second) {
  seats_[0].reset(new Peaks::Seat(first, *this));
  if (second != nullptr) seats_[1].reset(new Peaks::Seat(*second, *this));
  const MutexLock lock(first.mutex_);
  seats_[0]->enter();
  try {
    if (second != nullptr) seats_[1]->enter();
  } catch (...) {
    seats_[0]->leave();
    throw;
  }
}

BlockSeat::~BlockSeat() {
  const MutexLock lock(seats_.front()->peaks_.mutex_);
  for (const auto& seat : seats_) {
    if (seat != nullptr) seat->leave();
  }
}

BlockCounts BlockSeat::counts() const {
  BlockCounts values{};
  for (std::size_t of_class = 0; of_class < 2; ++of_class) {
    for (std::size_t k = 0; k < 3; ++k) values[of_class][k] = counts_[of_class][k].load(std::memory_order_relaxed);
  }
  return values;
}

Peaks::Seat* BlockSeat::seat_in(const Peaks& peaks) const {
  for (const auto& seat : seats_) {
    if (seat != nullptr && &seat->peaks_ == &peaks) return seat.get();
  }
  return nullptr;
}

// One class may have had what the other one has left. No lock: at a peak, where each class
// in turn needs all the room that there is, this comes with each block.
bool BlockSeat::has_enough() {
  const std::uint64_t as_of = times_tightened_.load();
  const BlockCounts now = counts();
  for (std::size_t k = 0; k < 3; ++k) {
    const std::array<std::int64_t, 3> of{now[0][k] + now[1][k], now[0][k], now[1][k]};
    for (std::size_t which = 0; which < 3; ++which) {
      if (of[which] > most_[which][k].load(std::memory_order_relaxed)) return false;
    }
  }
  // What one has taken of the other's part, the other asks for from now on.
  for (std::size_t mine = 0; mine < 2; ++mine) {
    for (std::size_t k = 0; k < 3; ++k) {
      if (now[mine][k] <= limits_[mine][k].load(std::memory_order_relaxed)) continue;
      auto& other = limits_[1 - mine][k];
      std::int64_t left = other.load();
      while (left > now[1 - mine][k] && !other.compare_exchange_weak(left, now[1 - mine][k])) {
      }
      left = std::min(left, now[1 - mine][k]);
      rise_to_what_is_left(mine, k, left, as_of);
    }
  }
  return true;
}

// Or it would look closer at each block from now on, which was 430 of 700 instructions. Whoever
// takes room from this seat meanwhile says so before and after, and writes the limits last:
// where that is seen here the limit stays as it was, or as he wrote it; where it is not, he
// writes it after this.
void BlockSeat::rise_to_what_is_left(std::size_t mine, std::size_t k, std::int64_t left, std::uint64_t as_of) {
  if (as_of % 2 != 0) return;
  auto& limit = limits_[mine][k];
  const std::int64_t all = most_[0][k].load(std::memory_order_relaxed);
  const std::int64_t own = most_[1 + mine][k].load(std::memory_order_relaxed);
  std::int64_t raised = std::min(own, all - left);
  const std::int64_t before = limit.exchange(raised);
  if (times_tightened_.load() != as_of) limit.compare_exchange_strong(raised, before);
}

void BlockSeat::look() {
  ++times_looked_;
  if (has_enough()) return;
  for (const auto& seat : seats_) {
    if (seat != nullptr) seat->peaks_.look(*seat);
  }
}

void BlockSeat::note_room() {
  for (const auto& seat : seats_) {
    if (seat != nullptr) seat->peaks_.note_room(*seat);
  }
}

// REQUIRES: the lock that its peaks share is held.
void BlockSeat::tighten() {
  times_tightened_.fetch_add(1);
  for (std::size_t k = 0; k < 3; ++k) {
    std::array<std::int64_t, 3> most{};  // all, small, large
    for (std::size_t which = 0; which < 3; ++which) {
      most[which] = std::numeric_limits<std::int64_t>::max();
      for (const auto& seat : seats_) {
        if (seat == nullptr) continue;
        for (const StatKind kind : kinds_of_block_count(k)) {
          most[which] =
              std::min(most[which], seat->ceiling_[Peaks::Seat::index(kind) + which].load(std::memory_order_relaxed));
        }
      }
      most_[which][k].store(most[which], std::memory_order_relaxed);
    }
    // Half of the room that all have for each class, and what one of them cannot use for
    // the other. Below 0 for one that is about to look.
    const std::int64_t small_now = counts_[0][k].load(std::memory_order_relaxed);
    const std::int64_t room = most[0] - small_now - counts_[1][k].load(std::memory_order_relaxed);
    const std::int64_t large = std::min(most[2], most[0] - std::min(most[1], small_now + room / 2));
    limits_[0][k].store(std::min(most[1], most[0] - large));
    limits_[1][k].store(large);
  }
  times_tightened_.fetch_add(1);
}

// ------------------------------------------------------------------------ the peaks

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
    while (ceilings_[counter] + missing > peak_[counter] && !with_room_.empty()) {
      Seat& latest = *with_room_.back();
      forget_room(latest);
      lower(latest);
    }
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
  if (has_more) note_room_locked(seat);
}

void Peaks::note_room(Seat& seat) {
  const MutexLock lock(mutex_);
  note_room_locked(seat);
}

void Peaks::note_room_locked(Seat& seat) {
  if (!seat.has_room_.load(std::memory_order_relaxed)) {
    seat.has_room_.store(true, std::memory_order_relaxed);
    seat.room_place_ = with_room_.size();
    with_room_.push_back(&seat);
  }
  if (seat.blocks_ == nullptr) return;
  const auto& parts = seat.blocks_->seats_;
  const bool all = std::all_of(parts.begin(), parts.end(), [](const auto& part) {
    return part == nullptr || part->has_room_.load(std::memory_order_relaxed);
  });
  seat.blocks_->has_room_.store(all, std::memory_order_relaxed);
}

void Peaks::forget_room(Seat& seat) {
  with_room_.back()->room_place_ = seat.room_place_;
  with_room_[seat.room_place_] = with_room_.back();
  with_room_.pop_back();
  seat.has_room_.store(false, std::memory_order_relaxed);
  if (seat.blocks_ != nullptr) seat.blocks_->has_room_.store(false, std::memory_order_relaxed);
}

// To what it has: what is left below its ceilings is nobody's.
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
