// Where contents of a pool stand in backups, by their offsets in it: while it sleeps, and
// afterwards as long as they are proved to be unchanged. Values; their owner's lock guards
// them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/units.h"
#include "core/memory/backup.h"
#include "core/memory/mapped_range.h"

namespace vmm {

// [offset, offset + size) of the pool stands at `at` of a backup.
struct KeptRange {
  std::size_t offset = 0;
  std::size_t size = 0;
  std::size_t at = 0;
  std::shared_ptr<Backup> backup;
  [[nodiscard]] std::size_t end() const { return offset + size; }
};

// Ranges of one pool and where they stand, by offset.
class KeptRanges {
 public:
  // REQUIRES: overlaps none that is there.
  void add(const KeptRange& range) { by_offset_.emplace(range.offset, range); }
  // Takes those out again that begin in `range`.
  void remove(ByteRange range) noexcept {
    by_offset_.erase(by_offset_.lower_bound(range.offset), by_offset_.lower_bound(range.end()));
  }
  // The parts that lie in `range`, by offset.
  [[nodiscard]] std::vector<KeptRange> within(ByteRange range) const;
  // The stretches of `range` that are not there.
  [[nodiscard]] std::vector<ByteRange> missing(ByteRange range) const;
  // Only what lies in `wanted`, by offset, stays. Returns what there was: with it a backup may
  // end. Throws std::bad_alloc, and nothing has changed.
  [[nodiscard]] KeptRanges cut_to(const std::vector<ByteRange>& wanted);
  // Of the backups that they are in.
  [[nodiscard]] std::set<std::string> places() const;
  // Backup::forget_name() of all that they are in.
  void forget_names() const noexcept;
  // Any of them, or nullptr.
  [[nodiscard]] const KeptRange* any() const { return by_offset_.empty() ? nullptr : &by_offset_.begin()->second; }

 private:
  // One with several ranges perhaps more than once.
  template <typename Each>
  void for_each_backup(const Each& each) const;
  std::map<std::size_t, KeptRange> by_offset_;
};

// What an awake pool still has in a backup: contents of chunks that nobody has been able to
// write to since they were copied. That is proved by the mapping: it is the same one, and no
// call since has let anyone write to it (MappedRange counts those). Where a chunk comes to
// stand at another address as well, its owner forgets it.
class Unchanged {
 public:
  // Of the chunk at `offset`.
  void add(std::size_t offset, const LiveMapping& mapping, const std::vector<KeptRange>& ranges);
  // Takes those out whose chunks begin in `range`.
  [[nodiscard]] Unchanged take(ByteRange range);
  // Those that what is `live` still proves.
  [[nodiscard]] Unchanged proved_by(const MappedRange::Map& live) const;
  // The parts of `range`, within the chunk at `offset`, that are as they were copied.
  [[nodiscard]] std::vector<KeptRange> within(ByteRange range, std::size_t offset, const LiveMapping& mapping) const;
  [[nodiscard]] bool empty() const { return of_chunks_.empty(); }

 private:
  struct OfChunk {
    std::uint64_t mapping = 0;  // LiveMapping::number
    std::uint64_t times_writable = 0;
    KeptRanges kept;
    [[nodiscard]] bool is_proved_by(const LiveMapping& now) const {
      return now.number == mapping && now.times_writable == times_writable;
    }
  };
  std::map<std::size_t, OfChunk> of_chunks_;  // by offset
};

}  // namespace vmm
