// What one thread keeps of the blocks that were freed: by pool and stream, and
// within them by exact size. A kept block is used again by the work of its own
// stream, in order, so nothing needs to wait for anything; the pool still takes it
// for allocated. It knows neither the pool's space nor its lock.
//
// Everything here is done with the thread's BiasedLock held.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "core/blocks/block.h"
#include "core/cache/biased_lock.h"
#include "core/cache/cached_pool.h"
#include "core/numbers/peaks.h"
#include "core/numbers/pool_counters.h"

namespace vmm {

// What one thread counts of one pool's blocks, of whatever streams: with a seat in the
// peaks for each stream, a thread that takes four in turn took the room below the
// peak from itself again and again, a third of a large block's allocation and free.
class PoolTally {
 public:
  // `of_device`: where the thread counts for all pools of the device.
  PoolTally(CachedPool& pool, BlockSeat& of_device)
      : pool_(pool), of_pool_(pool.own_peaks(), pool.peaks_of_family()), of_device_(of_device) {}

  // A block of `size` bytes, of which `block.requested` were asked for.
  [[gnu::always_inline]] void count_allocation(const Block& block, std::size_t size) {
    const SizeClass size_class = size_class_of(block);
    const std::size_t requested = block.requested;
    auto& came = came_[static_cast<std::size_t>(size_class)];
    came[0] = came[0] + 1;
    came[1] = came[1] + static_cast<std::int64_t>(size);
    came[2] = came[2] + static_cast<std::int64_t>(requested);
    of_pool_.rose(size_class, size, requested);
    of_device_.rose(size_class, size, requested);
  }
  void count_free(const Block& block, std::size_t size) {
    const SizeClass size_class = size_class_of(block);
    const std::size_t requested = block.requested;
    of_pool_.fell(size_class, size, requested);
    of_device_.fell(size_class, size, requested);
  }
  // What it has counted is the pool's own from now on.
  void merge();
  [[nodiscard]] bool has_counted() const { return came() != BlockCounts{} || counts() != BlockCounts{}; }
  // Read by whoever adds up the pool's statistics: all blocks that were ever allocated
  // here, and those less the ones that were freed.
  [[nodiscard]] BlockCounts came() const;
  [[nodiscard]] BlockCounts counts() const { return of_pool_.counts(); }

 private:
  CachedPool& pool_;
  std::array<std::array<Relaxed<std::int64_t>, 3>, 2> came_{};
  BlockSeat of_pool_;  // with the model's parts, where it has any
  BlockSeat& of_device_;
};

// One pool's blocks of one stream.
class Shard {
 public:
  // `tally`: where the thread counts for all streams of the pool.
  Shard(CachedPool& pool, PoolTally& tally, Stream stream, StreamTag tag);
  Shard(const Shard&) = delete;
  Shard& operator=(const Shard&) = delete;
  ~Shard();

  // A kept block of exactly `size` bytes, or nullptr.
  [[nodiscard]] Block* take(std::size_t size) {
    if (size > kSmallLimitBytes) {
      Block* block = freed_large_;
      if (block == nullptr || !is_in_place_ || block->size() != size) return nullptr;
      freed_large_ = nullptr;
      latest_large_ = block;
      return block;
    }
    BlockLink* const kept = place_of(size / kBlockAlignment);
    if (kept == nullptr) return nullptr;
    Block* const block = *kept;
    if (block == nullptr) return nullptr;
    *kept = block->bin_next;
    small_bytes_ -= size;
    return block;
  }
  // Keeps a small one of `size` bytes.
  void put(Block* block, std::size_t size) {
    BlockLink* kept = kept_of(size);
    if (kept == nullptr) {
      kept = &unwanted_;
      ++unwanted_count_;
    }
    block->bin_next = *kept;
    *kept = block;
    small_bytes_ += size;
  }
  // The same of a large one. False where one is kept already, or it cannot be.
  // `is_alone()`: nobody else has blocks of the pool.
  template <typename IsAlone>
  bool put_large(Block* block, const IsAlone& is_alone) {
    const bool is_latest = block == latest_large_;
    if (!is_latest && (freed_large_ != nullptr || !is_alone())) return false;
    freed_large_ = block;
    is_in_place_ = is_latest;
    latest_large_ = nullptr;
    return true;
  }
  // Small blocks of this size were asked for: they are kept from now on.
  void want(std::size_t size) {
    const std::size_t units = size / kBlockAlignment;
    if (units <= kOwnPlaces) {
      wanted_ |= std::uint64_t{1} << (units - 1);
    } else if (const std::size_t place = shared_place(units); units_in_[place] != units) {
      want_at(place, units);
    }
  }
  // Some that were freed elsewhere, linked by `bin_next`. REQUIRES: no others are kept of
  // their size, and it is small.
  void accept(const Depot::Batch& batch);
  // Of large blocks the latest serves the next request of its size, until another one
  // comes or goes: best fit would give that the same place again. Kept for longer,
  // recorded programs held up to 3 % more and asked the driver a third more often. Any
  // other one only waits here for the thread's next large block, which gives it back before
  // it looks for a place: one lock of the pool for both. Where other threads keep blocks
  // of the pool too it does not wait; one that asks for its first finds another place, and
  // has it given back before the pool would grow.
  void note_large(Block* block) { latest_large_ = block; }
  Block* forget_large() {
    latest_large_ = nullptr;
    if (freed_large_ == nullptr) return nullptr;
    freed_large_->bin_next = nullptr;
    return std::exchange(freed_large_, nullptr);
  }
  // More than a thread should keep from others.
  [[nodiscard]] bool is_full() const {
    return is_draining_ || small_bytes_ > kMostSmallBytes || unwanted_count_ > kMostUnwanted;
  }
  // What it should let go of then. `is_alone`: nobody else could want them; then it is
  // all small ones, but a few at each free: 16384 of 512 bytes at once took 5 ms.
  Block* take_excess(bool is_alone);
  // What is kept, linked by `bin_next`.
  Block* take_all();
  // A few small ones, those first of sizes that nobody here asks for any more; nullptr:
  // none is kept.
  Block* take_few();
  // Only of those.
  Block* take_unwanted() { return unwanted_ == nullptr ? nullptr : take_few_unwanted(); }
  // Blocks.
  [[nodiscard]] std::size_t kept() const;

  CachedPool& pool;
  PoolTally& tally;
  const Stream stream;
  const StreamTag tag;
  const Address base;           // the pool's
  std::unique_ptr<Shard> next;  // of the same pool, another stream's
  bool is_only = true;          // of the thread's in that pool

 private:
  static constexpr std::size_t kMostSmallBytes = 8 * kMiB;
  // What take_excess() leaves where others could want it, who get it in batches of a
  // depot.
  static constexpr std::size_t kKeptBytes = kMostSmallBytes / 2;
  static constexpr std::size_t kMostUnwanted = 64;
  // Blocks that one operation gives back, and looks again: all that was kept, 75 blocks in a
  // mixed program, took 3 us, at one operation in 600. With 8 recorded programs held 0.2 %
  // more.
  static constexpr std::size_t kFew = 16;
  // Up to 32 KiB each size has a place of its own. Above, where a program's sizes are
  // fewer than there could be, 64 places are shared, and who asked last has one: where all
  // sizes shared them, seldom ones drove out those asked for at every turn, and a program
  // of sizes at random took a quarter longer.
  static constexpr std::size_t kOwnPlaces = 64;
  static constexpr std::size_t kSharedPlaces = 64;
  static std::size_t shared_place(std::size_t units) {
    return (static_cast<std::uint32_t>(units) * 0x9E3779B1U) >> 26U;
  }
  static_assert(kSharedPlaces == std::size_t{1} << (32U - 26U));
  // The place of that size, or nullptr: another size has it. An own one is there, and
  // empty, where nobody asked for the size.
  [[nodiscard]] BlockLink* place_of(std::size_t units) {
    if (units <= kOwnPlaces) return &kept_[units - 1];
    const std::size_t place = shared_place(units);
    return units_in_[place] == units ? &kept_[kOwnPlaces + place] : nullptr;
  }
  // Where blocks of that size are kept; nullptr: nobody here asks for it.
  [[nodiscard]] BlockLink* kept_of(std::size_t size) {
    const std::size_t units = size / kBlockAlignment;
    const bool is_wanted = units > kOwnPlaces || (wanted_ >> (units - 1) & 1U) != 0;
    return is_wanted ? place_of(units) : nullptr;
  }
  void want_at(std::size_t place, std::size_t units);
  Block* take_few_unwanted();
  struct Few {
    Block* first = nullptr;  // linked by `bin_next`
    std::size_t count = 0;
  };
  // From the front of a list of kept ones, until there are `most` or no more than
  // `least_bytes` are kept.
  inline void move(BlockLink* from, std::size_t least_bytes, std::size_t most, Few* to);
  Block* latest_large_ = nullptr;  // allocated here, and no other large block came or went since
  Block* freed_large_ = nullptr;   // here, and not the pool's yet
  bool is_in_place_ = false;       // it was the latest
  BlockLink unwanted_ = nullptr;
  std::size_t unwanted_count_ = 0;
  bool is_draining_ = false;
  std::size_t small_bytes_ = 0;  // kept
  std::uint64_t wanted_ = 0;     // of the own places: somebody asked for that size
  std::array<std::uint16_t, kSharedPlaces> units_in_{};
  std::array<BlockLink, kOwnPlaces + kSharedPlaces> kept_{};  // lists by bin_next
};

// The shards of one thread on one device.
class ThreadCache {
 public:
  // `others`: BiasedLock's. It lives as long as this: a free may wait for it that looks
  // here for the block of another device, while this one ends.
  ThreadCache(std::shared_ptr<Mutex> others, Peaks& device_peaks)
      : lock(*others), others_(std::move(others)), of_device_(std::in_place, device_peaks) {}

  [[nodiscard]] Shard* find(const CachedPool& pool, Stream stream) {
    if (latest_ != nullptr && &latest_->pool == &pool && latest_->stream == stream) [[likely]]
      return latest_;
    return find_if(pool, [stream](const Shard& shard) { return shard.stream == stream; });
  }
  [[nodiscard]] Shard* find(const CachedPool& pool, StreamTag tag) {
    if (latest_ != nullptr && &latest_->pool == &pool && latest_->tag == tag) [[likely]]
      return latest_;
    return find_if(pool, [tag](const Shard& shard) { return shard.tag == tag; });
  }
  // The first shard of the pool, others behind it by `next`, or nullptr.
  [[nodiscard]] Shard* first_of(const CachedPool& pool) const { return table_[slot_of(pool)].first.get(); }
  // Whether it has shards of the pool: mostly of the one that it used last.
  [[nodiscard]] bool has(const CachedPool& pool) const {
    return (latest_ != nullptr && &latest_->pool == &pool) || first_of(pool) != nullptr;
  }
  // What is counted of the pool here. nullptr where it has no shards.
  [[nodiscard]] PoolTally* tally_of(const CachedPool& pool) const { return table_[slot_of(pool)].tally.get(); }
  // No other thread has shards of the pool.
  [[nodiscard]] bool is_alone(const CachedPool& pool) const;
  // REQUIRES: there is none for that stream.
  Shard& add(CachedPool& pool, Stream stream, StreamTag tag);
  // Ends all shards of the pool. REQUIRES: what is counted of it has been merged.
  void remove(const CachedPool& pool);
  [[nodiscard]] std::vector<const CachedPool*> pools() const;
  // One of them, or nullptr.
  [[nodiscard]] const CachedPool* any_pool() const;
  // The device ends, or the thread, which may still look here. REQUIRES: it has no shards.
  void end() { of_device_.reset(); }

  // -- Blocks that were allocated here lately, and live. A free that finds its own looks
  // neither for the pool nor in its directory: of a thousand models in turn each of
  // those is a page of its own.
  struct Recent {
    Address address = 0;
    Block* block = nullptr;
    Shard* shard = nullptr;
  };
  void note(Address address, Block* block, Shard* shard) { recent_[recent_slot(address)] = {address, block, shard}; }
  // The shard of the block at `address` and the block itself, or nullptr. It is the live
  // one: a block that is no longer, or begins elsewhere now, is found out by its state,
  // and then its offset. In this order: whoever is live elsewhere is not at `address`.
  [[nodiscard]] Shard* find_recent(Address address, Block** block) const {
    const Recent& recent = recent_[recent_slot(address)];
    if (recent.address != address || recent.block == nullptr || recent.block->state != BlockState::used ||
        recent.shard->base + recent.block->offset != address || recent.block->tag != recent.shard->tag)
      return nullptr;
    *block = recent.block;
    return recent.shard;
  }

  BiasedLock lock;

 private:
  static constexpr std::size_t kRecent = 256;
  static std::size_t recent_slot(Address address) {
    return ((address / kBlockAlignment) * 0x9E3779B97F4A7C15ULL) >> (64U - 8U);
  }
  static_assert(kRecent == std::size_t{1} << 8U);
  struct Entry {
    const CachedPool* pool = nullptr;
    std::unique_ptr<PoolTally> tally;
    std::unique_ptr<Shard> first;
  };
  template <typename Is>
  Shard* find_if(const CachedPool& pool, const Is& is) {
    for (Shard* shard = first_of(pool); shard != nullptr; shard = shard->next.get()) {
      if (is(*shard)) return latest_ = shard;
    }
    return nullptr;
  }
  [[nodiscard]] std::size_t home(const CachedPool& pool) const {
    return (reinterpret_cast<std::uintptr_t>(&pool) * 0x9E3779B97F4A7C15ULL >> 32U) & (table_.size() - 1);
  }
  // Where the pool stands, or the first free place for it.
  [[nodiscard]] std::size_t slot_of(const CachedPool& pool) const {
    std::size_t at = home(pool);
    while (table_[at].pool != nullptr && table_[at].pool != &pool) at = (at + 1) & (table_.size() - 1);
    return at;
  }
  void rebuild(std::vector<Entry> empty) noexcept;  // into that one

  const std::shared_ptr<Mutex> others_;
  std::optional<BlockSeat> of_device_;
  Shard* latest_ = nullptr;
  // Open addressing, at most half full: a thousand models in turn find theirs at
  // once.
  std::vector<Entry> table_ = std::vector<Entry>(8);
  std::size_t pools_ = 0;
  std::array<Recent, kRecent> recent_{};
};

}  // namespace vmm
