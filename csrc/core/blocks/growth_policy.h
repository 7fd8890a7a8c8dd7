// How a pool grows: whether a request that lacks memory is met by new memory or by
// what the pool has idle, and of what size new chunks are. It is told numbers and the
// time, and answers numbers, in bytes: it never knows a chunk, a limit, a driver or a lock.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>

#include "base/units.h"
#include "core/blocks/move_debt.h"

namespace vmm {

// Whether a chunk there leaves, when it goes, what any other may fill; 0: all do.
constexpr bool is_of_units(ByteRange place, std::size_t unit) {
  return unit == 0 || (is_aligned(place.offset, unit) && is_aligned(place.size, unit));
}

class GrowthPolicy {
 public:
  // What the pool is, for as long as it lives.
  struct Kind {
    std::size_t page = 0;       // every size is a multiple of it
    bool is_uniform = false;    // every chunk is exactly one page
    bool is_range = false;      // one tensor's addresses
    bool is_ordinary = true;    // a model's or a tag's: no graph uses it, and it is no range
    bool grows_freely = false;  // takes new memory rather than moves what is idle
  };
  explicit GrowthPolicy(const Kind& kind) : kind_(kind) {}

  // -- What it goes by -------------------------------------------------------
  // Large blocks, slabs and pages that were handed out, and that came back: on the
  // path of every one of them.
  void note_handed_out(std::size_t bytes) { handed_out_ += bytes; }
  void note_freed(std::size_t bytes) { freed_ += bytes; }
  [[nodiscard]] std::size_t handed_out() const { return handed_out_; }
  // Since nothing was mapped last.
  [[nodiscard]] std::size_t freed() const { return freed_; }
  // So much is or was live at once.
  void note_live(std::size_t bytes) { peak_live_ = std::max(peak_live_, bytes); }
  // Nothing is mapped any more.
  void note_empty() {
    handed_out_when_empty_ = handed_out_;
    freed_ = 0;
  }
  // So many chunks were moved under a request, after grows() had been asked.
  void note_moves(std::size_t chunks) { move_debt_.add(chunks); }

  // -- What it decides -------------------------------------------------------
  // A request that lacks memory.
  struct Lack {
    std::size_t total = 0;      // of it all
    bool is_whole = false;      // one chunk is to back it
    bool is_explicit = false;   // pages that were asked for by their offset: to the byte
    bool is_contested = false;  // other models take from the same limit
    std::size_t unit = 0;       // what chunks are multiples of (unit()); 0: they are of any size
  };
  // Whether a pool that would then have `mapped` bytes takes new memory, though idle
  // chunks could perhaps be moved under the request: a move costs as much as a new
  // chunk, and comes again and again in a pool that has no slack at all.
  [[nodiscard]] bool grows(std::size_t mapped, std::chrono::nanoseconds now);
  // Whether it takes what other streams have freed before it grows; and that it did, or asked
  // whether it could, for so much time.
  [[nodiscard]] bool takes_others() const { return kind_.grows_freely && taken_ < kWorthTaking; }
  void note_taken(std::chrono::nanoseconds cost) { taken_ += cost; }
  // The idle chunks that are worth a move while new memory may still be had are of
  // this size at least.
  [[nodiscard]] std::size_t least_move(const Lack& lack) const;
  // The largest chunk that may stand at `offset`, where `remaining` bytes are missing.
  [[nodiscard]] std::size_t largest_at(std::size_t offset, std::size_t remaining) const;
  // The next new chunk, where `remaining` bytes are missing from `offset` on.
  [[nodiscard]] std::size_t next_size(const Lack& lack, std::size_t offset, std::size_t remaining) const;
  // What it has was loaded, and little of that has been freed: weights, most likely.
  [[nodiscard]] bool holds_what_stays() const;
  // Where what stays is put together, all of it known, its contents kept or thrown away: so many
  // bytes of several blocks in one chunk, and so many slabs. 0 and 1: it is no pool of what stays;
  // 0 and few: others want what is freed.
  [[nodiscard]] std::size_t shared_by_what_stays(bool is_contested, bool is_kept) const;
  [[nodiscard]] std::size_t slabs_of_what_stays(bool is_contested) const;
  // Where `sharers` models take from one limit: what the chunks of one that had `peak` bytes
  // live are multiples of, in size and place, so that any may stand for any other. Bytes, a
  // power of two; 0: it has too few.
  [[nodiscard]] std::size_t unit(std::size_t limit, std::size_t sharers, std::size_t peak) const;
  // The last of a limit that models share, in bytes: new memory comes of it once nobody has
  // idle memory that would do.
  [[nodiscard]] static std::size_t margin(std::size_t limit);
  // What there is beyond a request.
  struct Beyond {
    std::size_t mapped = 0;       // by the pool
    std::size_t headroom = 0;     // that the limits still allow
    std::size_t bare_behind = 0;  // addresses behind the request with nothing under them
  };
  // By how much the last new chunk, of `size` bytes, may go beyond the request: no
  // further than the bare space behind it, and nothing where others want the memory too.
  [[nodiscard]] std::size_t ahead(const Lack& lack, std::size_t size, const Beyond& beyond) const;

  // How many slabs a stream that has `slabs` of them, all in use, has made at once.
  [[nodiscard]] std::size_t slabs_at_once(std::size_t slabs, const Beyond& beyond) const;

 private:
  // Each time before it grows, or moves what is idle. What eight chunks cost. With RMM's random allocations, up to 1
  // GiB on four streams, it comes to 31 GiB in 32,000 operations and asks ever less; without a bound it held 25, and
  // each 4000 operations asked 70 times, 77 us each where torch has made its 128 streams.
  static constexpr std::chrono::nanoseconds kWorthTaking = std::chrono::microseconds(480);
  [[nodiscard]] std::size_t size_of_what_stays() const;

  const Kind kind_;
  std::size_t handed_out_ = 0;             // so far
  std::size_t handed_out_when_empty_ = 0;  // of these, when nothing was mapped last
  std::size_t freed_ = 0;                  // since then
  std::size_t peak_live_ = 0;              // as far as growth has been told
  std::chrono::nanoseconds taken_{0};      // on what others had, since it grew last
  MoveDebt move_debt_;
};

}  // namespace vmm
