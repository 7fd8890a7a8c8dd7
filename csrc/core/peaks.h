// The peaks of several pools together: of a device, or of a model and its
// private pools. They are not the sums of the pools' peaks, so they are
// followed at the time of each event, yet no event writes to shared memory:
// each pool has a seat with its own counters and, for each, a ceiling up to
// which it may rise unseen. The ceilings together never exceed the peak. A seat
// that rises above its own gets more from what seats that fell have left below
// theirs; only when nothing is left anywhere is it a new peak.
//
// Twenty shared counters a pair, each a locked add, cost 150 ns of the 370 that
// an allocation and its free took; ten comparisons with own memory cost 6. No
// look walks the seats: each seat that one takes back from had fallen since it
// was last taken from, so a pair costs the same among a thousand pools as in one.
//
// Exact while one thread at a time allocates. While several do, a peak may be
// off by what they add and free at that moment.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/sync.h"
#include "core/stats.h"

namespace vmm {

class Peaks {
 public:
  // One pool's counters. Written by whoever holds the pool's lock, read by all.
  class Seat {
   public:
    explicit Seat(Peaks& peaks);
    Seat(const Seat&) = delete;
    Seat& operator=(const Seat&) = delete;
    ~Seat();

    // `triple` is the pool's own after it has risen or fallen in `size_class`.
    void rose(StatKind kind, SizeClass size_class, const StatTriple& triple) {
      const std::size_t first = index(kind);
      const std::size_t part = size_class == SizeClass::small_pool ? 1 : 2;
      const bool whole = set(first, triple[0].current);
      const bool of_class = set(first + part, triple[part].current);
      if (whole || of_class) [[unlikely]]
        peaks_.look(*this);
    }
    // Takes a seat late: the counters stand where `statistics` says, and what
    // was its own peak was the peak of all.
    void start_from(const Statistics& statistics);

    void fell(StatKind kind, SizeClass size_class, const StatTriple& triple) {
      const std::size_t first = index(kind);
      const std::size_t part = size_class == SizeClass::small_pool ? 1 : 2;
      current_[first].store(triple[0].current, std::memory_order_relaxed);
      current_[first + part].store(triple[part].current, std::memory_order_relaxed);
      if (!has_room_.load(std::memory_order_relaxed)) [[unlikely]]
        peaks_.note_room(*this);
    }

   private:
    friend class Peaks;
    static constexpr std::size_t index(StatKind kind) { return static_cast<std::size_t>(kind) * 3; }
    bool set(std::size_t counter, std::int64_t value) {
      current_[counter].store(value, std::memory_order_relaxed);
      return value > ceiling_[counter].load(std::memory_order_relaxed);
    }

    Peaks& peaks_;
    std::array<std::atomic<std::int64_t>, kStatKinds * 3> current_{};
    std::array<std::atomic<std::int64_t>, kStatKinds * 3> ceiling_{};
    std::atomic<bool> has_room_{false};  // perhaps, below a ceiling; then it is in with_room_
    std::size_t place_ = 0;              // in seats_
  };

  void reset_peaks() VMM_EXCLUDES(mutex_);
  // Writes the peaks (never below the currents) into `out`.
  void fill_peaks(Statistics& out) const VMM_EXCLUDES(mutex_);

 private:
  // Raises the ceilings that `seat` has outgrown.
  void look(Seat& seat) VMM_EXCLUDES(mutex_);
  void note_room(Seat& seat) VMM_EXCLUDES(mutex_);
  void note_room_locked(Seat& seat) VMM_REQUIRES(mutex_);
  void take_back(Seat& seat) VMM_REQUIRES(mutex_);
  void lower(Seat& seat) VMM_REQUIRES(mutex_);

  mutable Mutex mutex_;  // a leaf
  std::vector<Seat*> seats_ VMM_GUARDED_BY(mutex_);
  std::vector<Seat*> with_room_ VMM_GUARDED_BY(mutex_);  // those that may be below a ceiling; the latest last
  std::array<std::int64_t, kStatKinds * 3> ceilings_ VMM_GUARDED_BY(mutex_) = {};  // the sums of all seats'
  std::array<std::int64_t, kStatKinds * 3> peak_ VMM_GUARDED_BY(mutex_) = {};
};

}  // namespace vmm
