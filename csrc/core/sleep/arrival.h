// Models on their way back, one piece after the other, so that what is there can be used, and
// others still have the memory of those that are not on the bus.
//
// Everything here waits for the GPU, and holds no lock meanwhile.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <vector>

#include "base/sync.h"
#include "core/sleep/pieces.h"
#include "core/sleep/sleeper.h"

namespace vmm {

class Departure;

// Pools that wake. They take requests once all is there; where it is stopped before, they are
// asleep as before.
class Arrival {
 public:
  enum class Memory : std::uint8_t {
    collected,   // all of it by begin(), and mapped while the first pieces are on the bus
    by_piece,    // as others let go of it
    as_it_left,  // as collected, in the very chunks that have just left: nothing is asked of the driver
  };
  Arrival(Sleeper& sleeper, PoolList pools, Memory memory);
  ~Arrival();
  // Throws OutOfMemoryError, and they are asleep as before.
  void begin();
  // The same where it will find none, though `out` goes whole.
  void require_room(const Departure& out) const;
  // Whatever can be done without waiting for the bus; false: nothing can. Where there is no
  // memory for the next piece others give what they can, unless some is `on_its_way`.
  bool advance(bool is_on_its_way = false);
  // Waits for the oldest piece on the bus; false: there is none.
  bool wait();
  void finish();
  void undo() noexcept;
  // Until what is at [address, address + bytes) is there, or it has ended without, or some
  // time has gone. Any thread.
  enum class Waited : std::uint8_t { there, ended, not_yet };
  Waited wait_for(Address address, std::size_t bytes, std::chrono::milliseconds most) VMM_EXCLUDES(mutex_);
  void end_waits() VMM_EXCLUDES(mutex_);
  [[nodiscard]] std::size_t done() const { return done_.load(std::memory_order_relaxed); }
  [[nodiscard]] std::size_t total() const { return total_.load(std::memory_order_relaxed); }

 private:
  void plan();
  void collect_all();
  bool collect(const Piece& piece, bool is_on_its_way);
  void map_next();
  void load_next();
  void complete_oldest();
  void rest_backups() noexcept;
  void wake_empty_parts(const Pool& model) const;

  // So many pieces are mapped and not on the bus yet, at most: all of them at once would take
  // longer than what is on the bus, which would be idle then.
  static constexpr std::size_t kMostAhead = 2;

  Sleeper& sleeper_;
  PoolList pools_;
  const Memory memory_;
  PoolList mine_;          // of these, those that this wakes
  bool any_held_ = false;  // of these, when they fell asleep
  std::vector<Piece> pieces_;
  std::size_t mapped_ = 0;  // pieces that have their memory
  std::size_t next_ = 0;    // of these, those whose copies have been queued
  Pieces under_way_;
  std::atomic<std::size_t> done_{0};
  std::atomic<std::size_t> total_{0};

  struct Awaited {
    Address begin = 0;
    Address end = 0;
    std::size_t piece = 0;
  };
  Mutex mutex_;  // a leaf
  std::condition_variable_any changed_;
  std::vector<Awaited> awaited_ VMM_GUARDED_BY(mutex_);
  std::vector<bool> arrived_ VMM_GUARDED_BY(mutex_);  // by piece
  bool has_ended_ VMM_GUARDED_BY(mutex_) = false;
};

}  // namespace vmm
