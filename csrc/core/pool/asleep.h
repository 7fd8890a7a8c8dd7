// What a pool remembers while its memory is elsewhere: which chunks stood where, and which
// bytes of them are kept in a backup. Values; its owner's lock guards it.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/units.h"
#include "core/memory/backup.h"
#include "core/memory/chunk.h"
#include "core/streams/stream_point.h"

namespace vmm {

// A chunk that leaves or has left: [offset, offset + size) of the pool.
struct PlaceOfChunk {
  std::size_t size = 0;       // bytes
  bool is_read_only = false;  // for everybody: it is to be so again
  bool is_withheld = false;   // from whoever registers segments
};

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
  // Those parts that lie in `range`, by offset, which are not there any more.
  std::vector<KeptRange> take(ByteRange range);
  void forget(ByteRange range) { take(range); }
  // Of `range`, by offset, the stretches that are there, and those that are not.
  [[nodiscard]] std::vector<ByteRange> within(ByteRange range) const;
  [[nodiscard]] std::vector<ByteRange> missing(ByteRange range) const;
  // Any of them, or nullptr.
  [[nodiscard]] const KeptRange* any() const { return by_offset_.empty() ? nullptr : &by_offset_.begin()->second; }

 private:
  std::map<std::size_t, KeptRange> by_offset_;
};

// A chunk that is to leave or to come back, and what of it is kept.
struct LeavingChunk {
  std::size_t offset = 0;
  PlaceOfChunk place;
  std::vector<ByteRange> kept;
  bool is_there = false;  // of one that is to come back: it has, but for contents
  [[nodiscard]] ByteRange range() const { return {offset, place.size}; }
};

struct SleepPlan {
  std::vector<LeavingChunk> chunks;  // by offset
  std::size_t kept_bytes = 0;        // of these
  std::size_t staying_bytes = 0;     // in chunks that others have mapped as well
};

// What became of a wish to go to sleep.
enum class SleepBegun : std::uint8_t {
  anew,   // it was awake
  again,  // it is asleep, perhaps in part: the rest of it goes
  busy,   // a transfer is on its way
  never,  // it has ended
};

struct Asleep {
  // going: what is there may leave, and no request is taken. filling: all of it is back but
  // for contents, which are on their way; requests are taken.
  enum class State : std::uint8_t { going, filling };
  State state = State::going;
  bool is_busy = true;  // a transfer is on its way
  bool was_sealed = false;
  std::string place;                         // of what is kept
  bool is_discarded = false;                 // contents are gone for good: what comes back is zero
  std::map<std::size_t, PlaceOfChunk> gone;  // by offset; where there is memory: none
  std::map<std::size_t, Chunk*> collected;   // to stand there, and not mapped yet
  KeptRanges kept;                           // of what has gone, or is yet to be filled
  std::vector<ByteRange> arriving;           // that copies on their way write to,
  StreamUse filled_by{};                     // on this stream,
  std::vector<ByteRange> dropped;            // of which these have been freed meanwhile
  std::vector<ByteRange> to_seal;            // once what they hold has arrived
};

}  // namespace vmm
