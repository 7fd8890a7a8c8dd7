// Models on their way to sleep, or back, or both at once: a swap. One piece after the other,
// so that others can have, or still have, the memory of those that are not on the bus.
//
// Everything here waits for the GPU, and holds no lock meanwhile.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "base/sync.h"
#include "core/sleep/sleeper.h"

namespace vmm {

// Is called between two pieces; what it throws stops the transfer.
using Look = std::function<void()>;

// Copies under way on one stream, the oldest first, with a point behind each.
class Pieces {
 public:
  // So many are under way at once: while one is done with, the bus works on the next.
  static constexpr std::size_t kMost = 2;

  Pieces() = default;
  Pieces(const Pieces&) = delete;
  Pieces& operator=(const Pieces&) = delete;
  ~Pieces();  // waits for those under way

  // The copies of `index` have been queued on the stream.
  void add(std::size_t index, const StreamUse& by);
  [[nodiscard]] bool empty() const { return under_way_.empty(); }
  [[nodiscard]] bool is_full() const { return under_way_.size() >= kMost; }
  // Whether the oldest is done. Waits for nothing.
  [[nodiscard]] bool is_oldest_done() const { return !empty() && under_way_.front().point->passed(); }
  // Waits for the oldest, which is none of these any more. Throws DriverError, and it is.
  std::size_t wait_for_oldest();

 private:
  struct UnderWay {
    std::size_t index = 0;
    StreamPointPtr point;
  };
  std::deque<UnderWay> under_way_;
};

// Contiguous chunks of one pool that are moved together.
struct Piece {
  std::size_t part = 0;  // whose
  std::vector<LeavingChunk> chunks;
  std::vector<KeptRange> kept;
  std::size_t bytes = 0;  // of the contents
};

// Of at most `most` bytes, or one chunk that is larger.
void append_pieces(std::size_t part, std::vector<LeavingChunk> chunks, std::size_t most, std::vector<Piece>* pieces);

struct PartToSleep {
  std::shared_ptr<Pool> pool;
  Places places;
};

// Pools that go to sleep. Where it fails, or is undone, they are awake again; or, where there
// is no memory for that any more, asleep in part, and nothing is lost: wake them.
class Departure {
 public:
  Departure(Sleeper& sleeper, std::vector<PartToSleep> parts, bool release);
  // They take no requests from now on, and there is room for what they hold. Throws, and
  // they are awake: OutOfMemoryError, InvalidArgumentError, VmmError.
  void begin();
  // Whatever can be done without waiting for the bus; false: nothing can.
  bool advance();
  // Waits for the oldest piece on the bus; false: there is none.
  bool wait();
  // All of it has gone.
  [[nodiscard]] bool is_through() const { return next_ == pieces_.size() && under_way_.empty(); }
  // All is saved. Before finish(): until then it can be undone.
  void secure();
  void finish();
  void undo() noexcept;
  // Whose it is, where any of it is to go; and bytes of the device's memory that are.
  [[nodiscard]] const Pool* model() const { return mine_.empty() ? nullptr : &mine_.front()->model(); }
  [[nodiscard]] std::size_t leaving() const;
  [[nodiscard]] std::size_t done() const { return done_.load(std::memory_order_relaxed); }
  [[nodiscard]] std::size_t total() const { return total_.load(std::memory_order_relaxed); }

 private:
  void plan(bool keeps_unchanged);
  [[nodiscard]] bool may_keep(std::size_t part) const;
  [[nodiscard]] bool uses_unchanged() const;
  // Chunks of one part that go to one backup.
  [[nodiscard]] std::size_t lot_of(std::size_t part, const LeavingChunk& chunk) const;
  [[nodiscard]] Places places_beside_others(std::size_t part) const;
  void make_backups();
  void complete_oldest();
  void note_kept(Piece& piece);

  Sleeper& sleeper_;
  std::vector<PartToSleep> parts_;
  const bool release_;
  PoolList mine_;                                 // of the parts' pools, those that have not ended
  PoolList awake_;                                // of these, those that were awake
  std::vector<std::shared_ptr<Backup>> backups_;  // by lot; nullptr: discarded
  std::vector<std::size_t> next_at_;              // by lot: where its contents go next
  std::vector<Piece> pieces_;
  std::size_t next_ = 0;
  Pieces under_way_;
  std::atomic<std::size_t> done_{0};
  std::atomic<std::size_t> total_{0};
};

// Pools that wake. They take requests once all is there; where it is stopped before, they are
// asleep as before.
class Arrival {
 public:
  enum class Memory : std::uint8_t {
    collected,  // all of it by begin(), and mapped while the first pieces are on the bus
    by_piece,   // as others let go of it
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

  // So many pieces are mapped and not on the bus yet, at most: all of them at once would take
  // longer than what is on the bus, which would be idle then.
  static constexpr std::size_t kMostAhead = 2;

  Sleeper& sleeper_;
  PoolList pools_;
  const Memory memory_;
  PoolList mine_;  // of these, those that this wakes
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

// The whole way, by the thread that runs it; others may look at how far it is.
class Transfer {
 public:
  // Either may be nullptr.
  Transfer(std::unique_ptr<Departure> out, std::unique_ptr<Arrival> in) : out_(std::move(out)), in_(std::move(in)) {}
  // Undoes what was begun and never run.
  ~Transfer();
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;
  // Until all that can be refused has been: without memory for it nothing moves.
  void begin(const Look& look);
  // The rest. REQUIRES: begin() went well. What stops it is thrown, once all is undone
  // that can be.
  void run(const Look& look);
  [[nodiscard]] std::size_t done() const;
  [[nodiscard]] std::size_t total() const;
  // See Arrival.
  Arrival::Waited wait_for(Address address, std::size_t bytes, std::chrono::milliseconds most) {
    return in_ == nullptr ? Arrival::Waited::there : in_->wait_for(address, bytes, most);
  }

 private:
  void move(const Look& look);
  void undo() noexcept;

  const std::unique_ptr<Departure> out_;
  const std::unique_ptr<Arrival> in_;
  bool is_under_way_ = false;
};

}  // namespace vmm
