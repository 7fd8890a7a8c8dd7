// The blocks of a pool that debug mode watches. Each has what lies around it for itself:
// bytes before it and behind it that nobody asked for, which are blocks of their own in the
// state `guard`.
//
// With `guard` a block has pages for itself and stands at their end, with a page of
// addresses without memory behind it. A freed one is unmapped as soon as its fence has
// passed. Addresses are used in turn, so that the ones freed last are the last to be used
// again. Every byte that nobody asked for beside it, up to 512 on each side, has a pattern.
//
// With `canary` a block is placed like any, with 512 bytes of pattern on each side.
//
// Patterns are written on the block's stream, behind whatever else used the memory: whoever
// asks may make the stream wait for that only before the first use of their own. They are
// looked at when the block is freed and the device's clock has passed that, with no lock
// held: nothing queued can write there any more, and nobody else has the memory yet.
//
// Its owner's lock guards it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/backing/backed_space.h"
#include "core/backing/stream_table.h"
#include "core/blocks/block.h"
#include "core/blocks/block_directory.h"
#include "core/streams/clock.h"

namespace vmm {

class WatchedBlocks {
 public:
  // A freed one, or one that is looked at: offsets and bytes.
  struct Freed {
    Block* block = nullptr;   // with what was before it, and with `canary` behind it
    Block* behind = nullptr;  // with `guard`: the addresses without memory
    Epoch epoch = kLongAgo;
    std::size_t offset = 0;     // of what was the block
    std::size_t requested = 0;  // bytes
    std::size_t front = 0;      // of pattern before it
    std::size_t back = 0;       // of pattern behind what was asked for
    std::uint64_t number = 0;   // of its free, by the log
  };

  WatchedBlocks(const PoolContext& context, const std::string& of_pool, BackedSpace& space, StreamTable& streams)
      : context_(context), of_pool_(of_pool), space_(space), streams_(streams) {}

  // -- REQUIRES: debug mode is on ------------------------------------------------
  // Bytes, more than `bytes`, that are taken for a block anywhere; 0: it has pages for itself.
  [[nodiscard]] std::size_t size_anywhere(std::size_t bytes) const;
  // A block of at least `bytes` > 0 for the tag, with its patterns, which come behind
  // `last_use`; the log knows of it. nullptr, and why not; without a `shortage`: no addresses
  // are left. `stack`: where. REQUIRES: bytes <= capacity - 2 * kPatternBytes.
  Block* take(std::size_t bytes, StreamTag tag, Epoch last_use, const std::shared_ptr<const std::string>& stack,
              Grant* grant, Shortage* shortage);
  // Undoes that.
  void untake(Block* block);
  // Its owner has let go of it.
  void free(Block* block, Epoch epoch) noexcept;
  // Those that nothing uses any more: to be judged with no lock held, and then finished.
  [[nodiscard]] std::vector<Freed> take_passed();
  void finish(std::span<const Freed> passed) noexcept;
  // Those that live, for the same; nothing of them goes until end_reading().
  [[nodiscard]] std::vector<Freed> begin_reading(const BlockDirectory& directory);
  void end_reading() { --readers_; }
  // Reads the patterns around one of a pool at `base`, and logs what is wrong with them.
  // What cannot be read is not judged, nor for want of memory to. With no lock held.
  static void judge(const PoolContext& context, Address base, const Freed& block) noexcept;

  // -- Of any pool -----------------------------------------------------------------
  [[nodiscard]] bool is_watched(std::size_t offset) const { return !live_.empty() && live_.count(offset) != 0; }
  [[nodiscard]] std::size_t live() const { return live_.size(); }
  // Freed, and their memory not free yet.
  [[nodiscard]] std::size_t leaving() const { return freed_.size() + being_judged_; }
  [[nodiscard]] std::size_t leaving_bytes() const { return freed_bytes_; }
  // The newest of those that nobody looks at yet; kLongAgo: there are none.
  [[nodiscard]] Epoch last_free() const { return freed_.empty() ? kLongAgo : freed_.back().epoch; }
  [[nodiscard]] bool has_freed() const { return !freed_.empty(); }
  [[nodiscard]] bool is_being_judged() const { return being_judged_ != 0 || readers_ != 0; }
  // Of guard blocks with memory.
  [[nodiscard]] std::size_t mapped_bytes() const { return mapped_bytes_; }

 private:
  // What stands around a live one. With `guard`: the first part of its pages, if any, and
  // addresses without memory; with `canary`: memory on both sides.
  struct Around {
    Block* before = nullptr;
    Block* behind = nullptr;
    std::size_t front = 0;  // bytes of pattern before it
    std::size_t back = 0;   // bytes of pattern behind what was asked for
  };
  [[nodiscard]] bool is_guard() const;
  bool find_guarded(std::size_t bytes, std::size_t* offset);
  Block* take_guarded(std::size_t size, StreamTag tag, Around* around, Grant* grant, Shortage* shortage);
  Block* take_between_patterns(std::size_t size, StreamTag tag, Around* around, Grant* grant, Shortage* shortage);
  Status write_patterns(const Block& block, std::size_t requested, Epoch last_use, Around* around);
  void note(const Block& block, std::size_t requested, const Around& around,
            const std::shared_ptr<const std::string>& stack);
  void free_around(Block* block, const Around& around, Epoch epoch);
  void take_back(Block* block, const Around& around);

  const PoolContext& context_;
  const std::string& of_pool_;
  BackedSpace& space_;
  StreamTable& streams_;
  std::unordered_map<std::size_t, Around> live_;  // by the block's offset
  std::deque<Freed> freed_;                       // oldest first
  std::size_t freed_bytes_ = 0;                   // of these, until their memory is free
  std::size_t being_judged_ = 0;                  // out of `freed_`, and being looked at with no lock held
  int readers_ = 0;                               // who look at live ones so
  std::size_t mapped_bytes_ = 0;
  std::size_t next_ = 0;                     // offset from which the next one is placed; 0: not begun
  std::shared_ptr<const std::string> name_;  // the pool's, once there is one
};

}  // namespace vmm
