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
// A pool counts all kinds, under its lock. A thread's cache counts blocks only, under
// its own (BlockSeat): the five kinds that a block's life moves are three numbers there
// (a cached block is neither live nor active), and what they may rise to is the least
// of what their kinds may.
//
// Exact while one thread at a time allocates. While several do, a peak may be
// off by what they add and free at that moment.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/sync.h"
#include "core/numbers/stats.h"

namespace vmm {

class BlockSeat;

class Peaks {
 public:
  Peaks() : mutex_(own_mutex_) {}
  // Peaks that one BlockSeat counts for share a lock. REQUIRES: `beside` outlives this.
  explicit Peaks(Peaks& beside) : mutex_(beside.mutex_) {}
  Peaks(const Peaks&) = delete;
  Peaks& operator=(const Peaks&) = delete;

  // One pool's counters, or a BlockSeat's part in these peaks. Written by whoever holds
  // the pool's lock, or the cache's, read by all.
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
    void fell(StatKind kind, SizeClass size_class, const StatTriple& triple) {
      const std::size_t first = index(kind);
      const std::size_t part = size_class == SizeClass::small_pool ? 1 : 2;
      current_[first].store(triple[0].current, std::memory_order_relaxed);
      current_[first + part].store(triple[part].current, std::memory_order_relaxed);
      if (!has_room_.load(std::memory_order_relaxed)) [[unlikely]]
        peaks_.note_room(*this);
    }
    // Takes a seat late: the counters stand where `statistics` says, and what
    // was its own peak was the peak of all.
    void start_from(const Statistics& statistics);

   private:
    friend class Peaks;
    friend class BlockSeat;
    Seat(Peaks& peaks, BlockSeat& blocks) : peaks_(peaks), blocks_(&blocks) {}  // that one enters it
    void enter();                                                               // seats_; with the lock held
    void leave();                                                               // the same
    void spread();                                                              // what blocks_ counts to current_
    void tighten();  // what blocks_ compares with to ceiling_
    static constexpr std::size_t index(StatKind kind) { return static_cast<std::size_t>(kind) * 3; }
    bool set(std::size_t counter, std::int64_t value) {
      current_[counter].store(value, std::memory_order_relaxed);
      return value > ceiling_[counter].load(std::memory_order_relaxed);
    }

    Peaks& peaks_;
    BlockSeat* const blocks_;  // nullptr: a pool's own
    std::array<std::atomic<std::int64_t>, kStatKinds * 3> current_{};
    std::array<std::atomic<std::int64_t>, kStatKinds * 3> ceiling_{};
    std::atomic<bool> has_room_{false};  // perhaps, below a ceiling; then it is in with_room_
    std::size_t place_ = 0;              // in seats_
    std::size_t room_place_ = 0;         // in with_room_
  };

  // What `from` counts of `counts` is counted in `to` from now on: a pool's seat in each
  // of its peaks, nullptr for none. REQUIRES: they are held still.
  static void transfer(const BlockCounts& counts, BlockSeat& from,
                       const std::array<Seat*, 2>& to) VMM_NO_THREAD_SAFETY_ANALYSIS;

  void reset_peaks() VMM_EXCLUDES(mutex_);
  // Of one kind, all size classes: what there is now, and the peak so far.
  struct Level {
    std::int64_t current = 0;
    std::int64_t peak = 0;
  };
  [[nodiscard]] Level level(StatKind kind) const VMM_EXCLUDES(mutex_);
  // Writes the peaks (never below the currents) into `out`.
  void fill_peaks(Statistics& out) const VMM_EXCLUDES(mutex_);
  // How often its lock was taken, for tests.
  [[nodiscard]] std::uint64_t times_locked() const { return mutex_.times_locked(); }

 private:
  friend class BlockSeat;
  // Raises the ceilings that `seat` has outgrown.
  void look(Seat& seat) VMM_EXCLUDES(mutex_);
  void note_room(Seat& seat) VMM_EXCLUDES(mutex_);
  void note_room_locked(Seat& seat) VMM_REQUIRES(mutex_);
  void forget_room(Seat& seat) VMM_REQUIRES(mutex_);
  void lower(Seat& seat) VMM_REQUIRES(mutex_);

  Mutex own_mutex_;  // unless it shares another's
  Mutex& mutex_;     // a leaf
  std::vector<Seat*> seats_ VMM_GUARDED_BY(mutex_);
  std::vector<Seat*> with_room_ VMM_GUARDED_BY(mutex_);  // those that may be below a ceiling; the latest last
  std::array<std::int64_t, kStatKinds * 3> ceilings_ VMM_GUARDED_BY(mutex_) = {};  // the sums of all seats'
  std::array<std::int64_t, kStatKinds * 3> peak_ VMM_GUARDED_BY(mutex_) = {};
};

// What one thread's cache counts of blocks, in one or two peaks at once. Written by
// whoever holds the cache's lock, read by all. A thread counts for the device in one
// seat, whatever pool its blocks are of: with one a pool, a thousand models in turn
// took the room below the device's peak from each other, 500 ns a pair.
class BlockSeat {
 public:
  // `second`: nullptr, or peaks that share the first's lock.
  explicit BlockSeat(Peaks& first, Peaks* second = nullptr) VMM_NO_THREAD_SAFETY_ANALYSIS;
  BlockSeat(const BlockSeat&) = delete;
  BlockSeat& operator=(const BlockSeat&) = delete;
  ~BlockSeat() VMM_NO_THREAD_SAFETY_ANALYSIS;

  // A block was allocated, or freed. (As calls, two of rose() were 20 more of a pair's 412
  // instructions.)
  [[gnu::always_inline]] void rose(SizeClass size_class, std::size_t bytes, std::size_t requested) {
    const auto mine = static_cast<std::size_t>(size_class);
    const unsigned more = raise(mine, 0, 1) | raise(mine, 1, static_cast<std::int64_t>(bytes)) |
                          raise(mine, 2, static_cast<std::int64_t>(requested));
    if (more != 0) [[unlikely]]
      look();
  }
  void fell(SizeClass size_class, std::size_t bytes, std::size_t requested) {
    auto& counts = counts_[static_cast<std::size_t>(size_class)];
    add(counts[0], -1);
    add(counts[1], -static_cast<std::int64_t>(bytes));
    add(counts[2], -static_cast<std::int64_t>(requested));
    if (!has_room_.load(std::memory_order_relaxed)) [[unlikely]]
      note_room();
  }
  // Those that were allocated less those that were freed: below 0 where a thread frees
  // what others allocate.
  [[nodiscard]] BlockCounts counts() const;
  // How often a number was above what it may rise to, for tests.
  [[nodiscard]] std::uint64_t times_looked() const { return times_looked_; }

 private:
  friend class Peaks;
  static void add(std::atomic<std::int64_t>& counter, std::int64_t amount) {
    counter.store(counter.load(std::memory_order_relaxed) + amount, std::memory_order_relaxed);
  }
  // One number of one class. Not 0: it is above what it may rise to.
  unsigned raise(std::size_t mine, std::size_t k, std::int64_t by) {
    const std::int64_t now = counts_[mine][k].load(std::memory_order_relaxed) + by;
    counts_[mine][k].store(now, std::memory_order_relaxed);
    // No branch for each: of three, one is enough.
    return static_cast<unsigned>(now > limits_[mine][k].load(std::memory_order_relaxed));
  }
  void look();
  [[nodiscard]] bool has_enough();
  void rise_to_what_is_left(std::size_t mine, std::size_t k, std::int64_t left, std::uint64_t as_of);
  void note_room();
  void tighten();
  [[nodiscard]] Peaks::Seat* seat_in(const Peaks& peaks) const;

  std::array<std::array<std::atomic<std::int64_t>, 3>, 2> counts_{};
  std::atomic<bool> has_room_{false};  // each of seats_ has
  // What each class may rise to before it is looked closer: no more than its ceilings, and
  // both together no more than those of all, so that one comparison does for both.
  std::array<std::array<std::atomic<std::int64_t>, 3>, 2> limits_{};
  std::array<std::array<std::atomic<std::int64_t>, 3>, 3> most_{};  // what that is shared out of: all, small, large
  std::atomic<std::uint64_t> times_tightened_{0};                   // twice; odd while it goes on
  std::uint64_t times_looked_ = 0;                                  // of whoever counts
  std::array<std::unique_ptr<Peaks::Seat>, 2> seats_;               // what Peaks works with
};

}  // namespace vmm
