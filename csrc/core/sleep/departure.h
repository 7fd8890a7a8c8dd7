// Models on their way to sleep, one piece after the other, so that others can have the memory of
// those that have gone.
//
// Everything here waits for the GPU, and holds no lock meanwhile.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "core/sleep/pieces.h"
#include "core/sleep/sleeper.h"

namespace vmm {

struct PartToSleep {
  std::shared_ptr<Pool> pool;
  Places places;
};

// Pools that go to sleep. Where it fails, or is undone, they are awake again; or, where there
// is no memory for that any more, asleep in part, and nothing is lost: wake them.
class Departure {
 public:
  // `require_left` (none: nobody is asked) throws where somebody else is about to use a pool that is
  // awake, and returns how often whoever asks is in it.
  using RequireLeft = std::function<int(const Pool&)>;
  Departure(Sleeper& sleeper, std::vector<PartToSleep> parts, bool release, RequireLeft require_left = nullptr);
  // They take no requests from now on, and there is room for what they hold. Throws, and
  // they are awake: OutOfMemoryError, InvalidArgumentError, VmmError; and what `require_left` does.
  void begin();
  // Whatever can be done without waiting for the bus; false: nothing can. What is thrown away
  // stays until throw_away().
  bool advance();
  // Waits for the oldest piece on the bus; false: there is none.
  bool wait();
  // All of it has gone.
  [[nodiscard]] bool is_through() const { return next_ == pieces_.size() && under_way_.empty(); }
  // What is thrown away goes from now on, when all else has gone: that cannot be undone.
  void throw_away() { until_ = pieces_.size(); }
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
  SleepBegun begin_part(const PartToSleep& part);
  void plan(bool keeps_unchanged);
  [[nodiscard]] bool may_keep(std::size_t part) const;
  [[nodiscard]] bool uses_unchanged() const;
  // Chunks of one part that go to one backup.
  [[nodiscard]] std::size_t lot_of(std::size_t part, const MovedChunk& chunk) const;
  [[nodiscard]] Places places_beside_others(std::size_t part) const;
  void make_backups();
  [[nodiscard]] bool may_go_on() const;
  void complete_oldest();
  void note_kept(Piece& piece);

  Sleeper& sleeper_;
  std::vector<PartToSleep> parts_;
  const bool release_;
  const RequireLeft require_left_;
  PoolList mine_;                                 // of the parts' pools, those that have not ended
  PoolList awake_;                                // of these, those that were awake
  std::vector<std::shared_ptr<Backup>> backups_;  // by lot; nullptr: discarded
  std::vector<std::size_t> next_at_;              // by lot: where its contents go next
  std::vector<Piece> pieces_;
  std::size_t next_ = 0;
  std::size_t until_ = 0;  // of the pieces: what is thrown away follows
  Pieces under_way_;
  std::atomic<std::size_t> done_{0};
  std::atomic<std::size_t> total_{0};
};

}  // namespace vmm
