// What a pool remembers while its memory is elsewhere: which chunks stood where, and which
// bytes of them are kept in a backup. Values; its owner's lock guards it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "base/units.h"
#include "core/memory/chunk.h"
#include "core/pool/kept_ranges.h"

namespace vmm {

// NaN in every floating point format that tensors have, and -1 or the largest in every integer.
inline constexpr std::uint8_t kPoisonByte = 0xFF;

// Where what sleeps is, in words: "host", a path, ... Nothing of one that is awake.
struct AsleepWhere {
  std::set<std::string> contents;  // while they are on their way, where they go
  std::string memory;              // where contents would have gone with the memory that went
  [[nodiscard]] bool is_nothing() const { return contents.empty() && memory.empty(); }
};

// "discarded and host"
inline std::string in_words(const std::set<std::string>& places) {
  std::string words;
  for (const std::string& place : places) words += (words.empty() ? "" : " and ") + place;
  return words;
}

// A chunk that leaves or has left: [offset, offset + size) of the pool.
struct PlaceOfChunk {
  std::size_t size = 0;       // bytes
  bool is_read_only = false;  // for everybody: it is to be so again
  bool is_withheld = false;   // from whoever registers segments
  bool is_poisoned = false;   // what is thrown away of it comes back as kPoisonByte, over and over
  [[nodiscard]] bool is_like(const PlaceOfChunk& other) const {  // but for its size
    return is_read_only == other.is_read_only && is_withheld == other.is_withheld && is_poisoned == other.is_poisoned;
  }
};

// A chunk that a sleep takes away or a wake brings back, and what of it is kept.
struct MovedChunk {
  std::size_t offset = 0;
  PlaceOfChunk place;
  std::vector<ByteRange> kept;       // is to be copied
  std::vector<KeptRange> unchanged;  // is in a backup already
  bool is_there = false;             // of one that is to come back: it has, but for contents
  [[nodiscard]] ByteRange range() const { return {offset, place.size}; }
};

// What became of a wish to go to sleep.
enum class SleepBegun : std::uint8_t {
  anew,     // it was awake
  again,    // it is asleep, perhaps in part: the rest of it goes
  never,    // it has ended, or holds none of the device's memory
  entered,  // nothing: somebody else is about to use it
};

// While there is one the pool takes no requests, and there may be addresses in use that have
// no memory. What is freed meanwhile is nobody's before it has ended, so that what a copy
// writes there harms no one.
struct Asleep {
  bool is_busy = true;                       // a transfer is on its way
  bool is_going = false;                     // to sleep: what is mapped still goes too
  bool is_discarded = false;                 // contents are gone for good: what comes back is zero, or poison
  std::string place;                         // where what it had went when it fell asleep, in words
  std::string going_to;                      // while it is going: where what still goes does
  std::map<std::size_t, PlaceOfChunk> gone;  // by offset; where there is memory: none
  std::map<std::size_t, Chunk*> collected;   // to stand there, and not mapped yet
  KeptRanges kept;                           // of what has gone, and of what comes, until all is there
  std::vector<ByteRange> to_seal;            // chunks that are mapped, once what they hold has arrived

  // Where the chunk over `offset` ends that has gone, read-only; 0: none has.
  [[nodiscard]] std::size_t end_of_gone_read_only(std::size_t offset) const {
    const auto after = gone.upper_bound(offset);
    if (after == gone.begin()) return 0;
    const auto& [begin, chunk] = *std::prev(after);
    return offset < begin + chunk.size && chunk.is_read_only ? begin + chunk.size : 0;
  }
  // Chunks of it have gone, all of them read-only.
  [[nodiscard]] bool has_gone_read_only(ByteRange range) const {
    for (std::size_t at = range.offset; at < range.end();) {
      at = end_of_gone_read_only(at);
      if (at == 0) return false;
    }
    return true;
  }
  // Chunks in `range`, and those that it is a part of, are not to be read-only when they come back.
  void let_write(ByteRange range) {
    auto at = gone.upper_bound(range.offset);
    if (at != gone.begin() && std::prev(at)->first + std::prev(at)->second.size > range.offset) --at;
    for (; at != gone.end() && at->first < range.end(); ++at) at->second.is_read_only = false;
    std::erase_if(to_seal,
                  [range](const ByteRange& each) { return each.offset < range.end() && each.end() > range.offset; });
  }
};

}  // namespace vmm
