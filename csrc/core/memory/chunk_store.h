// All physical chunks of a device, or of host memory, of every size: who creates them, keeps the
// unused ones and gives them back, each charged to a budget before the driver
// is asked. It knows no address but those at which a chunk of its was once, and may be
// again (dormant()).
//
// A chunk on a shelf stays charged to its group's budget, so that what the
// store keeps counts against the same limit as what pools have mapped.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "base/status.h"
#include "base/sync.h"
#include "core/memory/chunk.h"
#include "core/memory/dormant_mappings.h"

namespace vmm {

// Chunks by size, unused. Values, no lock: also what a Grant carries. It never asks for
// memory. Of one size the chunk that was put last is taken first.
class ChunkShelf {
 public:
  // REQUIRES: a store made it, and it stands on no shelf.
  void put(Chunk* chunk) noexcept;
  // The largest chunk of at most `size` bytes (exactly `size` when `exact`) that is a
  // multiple of `unit` (0: of any size), or nullptr.
  Chunk* take_at_most(std::size_t size, bool exact, std::size_t unit = 0);
  // What of `size` bytes stays empty where the largest that fit are put side by side.
  [[nodiscard]] std::size_t left_of(std::size_t size) const;
  // The smallest chunk of more than `size` bytes, or nullptr.
  Chunk* take_above(std::size_t size);
  Chunk* take_any();
  // Those that are no multiples of `unit` go to `other`.
  void move_no_units(std::size_t unit, ChunkShelf& other) noexcept;
  // This very chunk, of `size` bytes; false: it is not here. It may be gone for good.
  bool take(const Chunk* chunk, std::size_t size);
  // Of those that nothing maps, removes each that `ends(chunk)` has ended, until at least `want`
  // bytes have gone: the largest that are wanted whole, then for what is left the smallest that
  // holds it. Returns how many. Where all are mapped it looks at none of them until one comes to
  // be unmapped.
  template <typename Ends>
  std::size_t remove_unmapped(std::size_t want, const Ends& ends) {
    const std::uint64_t unmappings = Chunk::unmappings.load(std::memory_order_acquire);
    if (are_mapped_ && unmappings == as_of_) return 0;
    bool is_any_left = false;
    std::size_t gone = 0;
    const auto remove = [&](ChunksBySize::iterator* at) {  // and goes on to the next
      const std::size_t size = (*at)->first;
      if ((*at)->second->mappings.load(std::memory_order_acquire) != 0) return false;
      if (!ends((*at)->second)) {
        is_any_left = true;
        return false;
      }
      *at = by_size_.erase(*at);
      bytes_ -= size;
      gone += size;
      return true;
    };
    for (auto at = by_size_.upper_bound(want); gone < want && at != by_size_.begin();) {
      if ((--at)->first > want - gone) {
        at = by_size_.upper_bound(want - gone);
      } else {
        remove(&at);
      }
    }
    for (auto at = by_size_.upper_bound(want - std::min(want, gone)); gone < want && at != by_size_.end();) {
      if (!remove(&at)) ++at;
    }
    if (gone >= want) return gone;
    are_mapped_ = !is_any_left;
    as_of_ = unmappings;
    return gone;
  }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }
  // Of the chunks for which `is(chunk)`. Walks.
  template <typename Is>
  [[nodiscard]] std::size_t bytes_if(const Is& is) const {
    std::size_t bytes = 0;
    for (const auto& [size, chunk] : by_size_) bytes += is(*chunk) ? size : 0;
    return bytes;
  }

 private:
  Chunk* take(ChunksBySize::const_iterator at);

  ChunksBySize by_size_;
  std::size_t bytes_ = 0;
  bool are_mapped_ = false;  // all of them were, when Chunk::unmappings was `as_of_`
  std::uint64_t as_of_ = 0;
};

class ChunkStore {
 public:
  // Its chunks are in `where`.
  ChunkStore(Driver& driver, Location where, std::size_t granularity, bool exportable)
      : driver_(driver), where_(where), granularity_(granularity), exportable_(exportable), dormant_(driver) {}
  ChunkStore(const ChunkStore&) = delete;
  ChunkStore& operator=(const ChunkStore&) = delete;
  ~ChunkStore();

  // A new chunk charged to `payer`. `refused` (if given) is the budget that
  // had no room, or nullptr when it was the driver.
  Status create(const ChunkSpec& spec, Budget& payer, Chunk** out, Budget** refused);
  // A new chunk for a charge that `payer` already carries.
  Status create_prepaid(const ChunkSpec& spec, Budget& payer, Chunk** out);
  // Gives the chunk back to the driver and refunds its budget; its dormant mappings go
  // first. Where the driver refuses, chunk and charge stay as they are: memory that is
  // still there must count. REQUIRES: nothing maps it any more.
  Status release(Chunk* chunk);

  // Is told, before the driver gets an exported chunk back, of its number: what
  // keeps it open for other processes would keep its memory. It may be called
  // under any pool's lock. To be given before any chunk is made.
  using ExportEnd = void (*)(std::uint64_t number);
  void set_on_export_end(ExportEnd told) { on_export_end_ = told; }

  // Puts an unused chunk on the shelf of `group`, which from now on pays. One
  // that was exported serves nobody any more: it goes back to the driver as soon
  // as nothing maps it; and so does one for which there is no memory to make the
  // group's shelf. REQUIRES: the chunk's budget stands under `group`.
  void put(Budget& group, Chunk* chunk) noexcept VMM_EXCLUDES(mutex_);
  // A shelved chunk of `group`, charged to `payer` (which stands under it), or
  // nullptr; `refused` as above.
  Chunk* take_at_most(Budget& group, Budget& payer, std::size_t size, bool exact, Budget** refused,
                      std::size_t unit = 0) VMM_EXCLUDES(mutex_);
  // The same for this very chunk of `size` bytes, where it rests there and may be taken.
  bool take(Budget& group, Budget& payer, Chunk* chunk, std::size_t size) VMM_EXCLUDES(mutex_);
  // Releases shelved chunks of `group` that nothing maps, until at most
  // `keep_bytes` stay. Returns the bytes given back.
  std::size_t trim(Budget& group, std::size_t keep_bytes) VMM_EXCLUDES(mutex_);
  // The same until `want` bytes have gone: a few more, or fewer where there are no more.
  std::size_t give_back(Budget& group, std::size_t want) VMM_EXCLUDES(mutex_);
  // Of every group that stands under `budget`: up to about `want` bytes.
  std::size_t trim_under(const Budget& budget, std::size_t want) VMM_EXCLUDES(mutex_);
  // The same for every group: when the device itself has run out.
  std::size_t trim_all() VMM_EXCLUDES(mutex_);

  [[nodiscard]] std::size_t shelved_bytes(const Budget& group) const VMM_EXCLUDES(mutex_);
  [[nodiscard]] std::size_t all_shelved_bytes() const VMM_EXCLUDES(mutex_);
  // Of all groups that stand under `budget`.
  [[nodiscard]] std::size_t shelved_under(const Budget& budget) const VMM_EXCLUDES(mutex_);
  struct Waiting {
    std::size_t bytes = 0;
    Epoch newest = kLongAgo;  // of their last uses
  };
  // Of one group's, what is still mapped at a former address and was used after the epoch `passed`.
  [[nodiscard]] Waiting waiting(const Budget& group, Epoch passed) const VMM_EXCLUDES(mutex_);
  // Ends the shelf of a group that ends; false while something rests on it.
  bool forget(const Budget& group) VMM_EXCLUDES(mutex_);

  [[nodiscard]] std::size_t granularity() const { return granularity_; }
  [[nodiscard]] ChunkSpec spec(std::size_t size) const { return {size, where_, exportable_}; }
  // Shelves and chunks that exist now, for tests.
  [[nodiscard]] std::size_t shelves() const VMM_EXCLUDES(mutex_);
  [[nodiscard]] DormantMappings& dormant() { return dormant_; }
  [[nodiscard]] std::size_t live_chunks() const { return live_chunks_.load(std::memory_order_relaxed); }

 private:
  struct Shelf {
    std::shared_ptr<const Budget> keeps_group;  // nullptr: the device's own
    ChunkShelf usable;
    ChunkShelf exported;  // to be released
    [[nodiscard]] std::size_t bytes() const { return usable.bytes() + exported.bytes(); }
  };
  Shelf* shelf_for(Budget& group) noexcept VMM_REQUIRES(mutex_);
  std::size_t trim_shelf(Shelf& shelf, std::size_t want) VMM_REQUIRES(mutex_);
  std::size_t release_unmapped(ChunkShelf& chunks, std::size_t want) VMM_REQUIRES(mutex_);

  Driver& driver_;
  const Location where_;
  std::size_t granularity_;
  bool exportable_;
  DormantMappings dormant_;  // beneath mutex_, above the driver's alone
  ExportEnd on_export_end_ = nullptr;
  std::atomic<std::size_t> live_chunks_{0};
  mutable Mutex mutex_;
  std::map<const Budget*, Shelf> shelves_ VMM_GUARDED_BY(mutex_);
  ChunkShelf without_shelf_ VMM_GUARDED_BY(mutex_);  // to be released; their groups pay
};

}  // namespace vmm
