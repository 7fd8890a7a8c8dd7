// Which chunk stands where in one reservation. It maps all or nothing, retires a
// mapping whose address queued work may still use, and drops it when the clock has
// passed its last use, or lets it stay, dormant, for the same chunk to come back. It
// never knows a block, a limit or a pool, and has no lock: its owner's lock guards it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "base/status.h"
#include "core/memory/chunk.h"
#include "core/memory/dormant_mappings.h"

namespace vmm {

struct LiveMapping {
  Chunk* chunk = nullptr;
  std::uint64_t number = 0;                         // rises with each mapping of the process
  bool is_withheld = false;                         // from whoever registers segments
  bool is_told = false;                             // to such a one, before it was withheld
  std::vector<std::pair<Location, Access>> rights;  // who was ever given access, and what each has now
  std::uint64_t times_writable = 0;                 // calls since it was mapped that let anyone write

  // Whoever registers segments knows of it, and is told when it goes.
  [[nodiscard]] bool is_to_be_told() const { return !is_withheld || is_told; }
  [[nodiscard]] Access access_of(Location who) const;
  // The strongest that anyone has.
  [[nodiscard]] Access access() const;
};

// A chunk and the offset at which it is to stand.
struct PlacedChunk {
  std::size_t offset = 0;
  Chunk* chunk = nullptr;
};

class MappedRange {
 public:
  using Map = std::map<std::size_t, LiveMapping>;

  // [base, base + size) is a reservation that outlives this object. `dormant`: where what
  // it drops may stay; nullptr: nowhere.
  MappedRange(Driver& driver, Address base, std::size_t size, DormantMappings* dormant = nullptr)
      : driver_(driver), dormant_(dormant), base_(base), size_(size) {}
  MappedRange(const MappedRange&) = delete;
  MappedRange& operator=(const MappedRange&) = delete;
  ~MappedRange();

  // Maps every placement, or none (but for those that the driver, after another
  // refusal, would not take back: they are live, and to be retired), and gives
  // `accessors` read and write over each contiguous run (one call a run: set_access
  // is the dear call). A chunk that is dormant at its place is there already, and stays so
  // where another is refused.
  // REQUIRES: inside the range, on free addresses, sorted by offset.
  Status map(std::span<const PlacedChunk> placements, std::span<const Location> accessors);
  // Unmaps a run of whole mappings in one call. REQUIRES: no gaps in it, and no
  // queued work uses it.
  Status unmap(ByteRange range);
  // Takes the mapping at `offset` out of the range; its address stays mapped
  // and blocked until `last_use` has passed. Returns the chunk, which may
  // already be mapped elsewhere.
  enum class Fate : std::uint8_t {
    leaves,
    may_return,  // and is dormant here then
    in_vain,     // it served no request, and nobody was told of it
  };
  Chunk* retire(std::size_t offset, Epoch last_use, Fate fate = Fate::leaves);
  // Nobody is told of the mapping at `offset`, nor, later, that it goes, unless
  // somebody was told of it before.
  void withhold(std::size_t offset) { live_.at(offset).is_withheld = true; }
  void note_told(std::size_t offset) { live_.at(offset).is_told = true; }
  // Drops the retired mappings whose last use has passed, the oldest first; looks
  // at no other. `before` is told of each stretch once, before it is unmapped or dormant.
  // Returns the stretches that are free addresses now. Throws std::bad_alloc, and nothing
  // has changed.
  std::vector<ByteRange> drop_retired(const Clock& clock, const std::function<void(ByteRange)>& before = nullptr);
  // The chunks that are dormant in `range`, by offset; the last may reach `beyond` bytes
  // beyond it. Whoever asks may own none of them.
  [[nodiscard]] std::vector<DormantMappings::Dormant> dormant_in(ByteRange range, std::size_t beyond = 0) const;
  // Unmaps all that is dormant: the range ends, or others get access to it.
  Status clear_dormant();
  // Chunks that the driver has mapped here and unmapped, those in vain included, since this
  // was last asked to forget them.
  [[nodiscard]] std::int64_t mapped_by_driver() const { return mapped_by_driver_; }
  [[nodiscard]] std::int64_t unmapped_by_driver() const { return unmapped_by_driver_.load(std::memory_order_relaxed); }
  void forget_counts();
  // The newest last use among the retired, or kLongAgo.
  [[nodiscard]] Epoch last_retired_use() const;
  // Changes access over a run of whole live mappings.
  Status set_access(ByteRange range, Location who, Access access);
  // The same where that is undone: what the driver refuses, or has no host memory for, stays.
  void restore_access(ByteRange range, Location who, Access access) noexcept;

  // The stretches of `range` without a live mapping, by offset.
  [[nodiscard]] std::vector<ByteRange> gaps(ByteRange range) const;
  [[nodiscard]] std::size_t missing_bytes(ByteRange range) const;
  // The mapping that covers `offset`, or end().
  [[nodiscard]] Map::const_iterator covering(std::size_t offset) const;
  // The first mapping that ends behind `offset`: the one that covers it, or the next.
  [[nodiscard]] Map::const_iterator reaching(std::size_t offset) const;
  // The first mapping at or after `offset`.
  [[nodiscard]] Map::const_iterator from(std::size_t offset) const { return live_.lower_bound(offset); }
  [[nodiscard]] const Map& live() const { return live_; }
  [[nodiscard]] bool has_retired() const { return !retired_.empty(); }
  [[nodiscard]] std::size_t retired_count() const { return retired_.size(); }
  // Why the driver would not drop one, when it was last asked.
  [[nodiscard]] const Status& refused() const { return refused_; }

  [[nodiscard]] Address base() const { return base_; }
  [[nodiscard]] std::size_t size() const { return size_; }
  [[nodiscard]] std::size_t mapped_bytes() const { return mapped_bytes_; }

 private:
  struct Retired {
    ByteRange range;
    Chunk* chunk = nullptr;
    bool is_to_be_told = false;  // somebody is, that it goes
    bool may_stay = false;
  };
  template <typename Each>
  void for_each_gap(ByteRange range, const Each& each) const;
  void undo(std::span<const PlacedChunk> placements, std::size_t count, const std::vector<bool>& was_dormant,
            Map& fresh);
  Status make_way(std::span<const PlacedChunk> placements, std::vector<bool>* was_dormant);

  Driver& driver_;
  DormantMappings* dormant_;
  Address base_;
  std::size_t size_;
  Map live_;                               // by offset
  std::multimap<Epoch, Retired> retired_;  // by last use
  Status refused_;
  std::size_t mapped_bytes_ = 0;
  std::int64_t mapped_by_driver_ = 0;
  std::atomic<std::int64_t> unmapped_by_driver_{0};  // dormant ones go under another lock
};

}  // namespace vmm
