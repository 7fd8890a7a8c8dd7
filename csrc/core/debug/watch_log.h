// What a device's debug mode knows: which blocks are watched, which were lately, where
// each lay, who allocated it and what was found damaged. It explains addresses and never
// touches the memory; it knows no pool.
//
// Thread-safe; its lock is a leaf. explain_now() takes no lock by force and allocates
// nothing: for a handler of signals.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/sync.h"
#include "base/units.h"
#include "core/options.h"
#include "driver/driver.h"

namespace vmm {

// The byte that stands around a watched block, and how much of it on each side.
inline constexpr std::uint8_t kPatternByte = 0xCB;
inline constexpr std::size_t kPatternBytes = 512;

struct WatchedBlock {
  std::uint64_t number = 0;  // of the device's watched allocations, from 1
  Address address = 0;
  std::size_t requested = 0;  // bytes asked for
  std::size_t size = 0;       // bytes that it counts as: rounded to 512
  // What is nobody else's: its pages and the one without memory behind them, or its
  // patterns too.
  Address zone_begin = 0;
  Address zone_end = 0;
  Address memory_end = 0;    // where its own memory ends: with `guard` a page's end
  std::size_t front = 0;     // bytes of pattern right before `address`; 0: none could be written
  std::size_t back = 0;      // bytes of pattern from address + requested on
  std::uint64_t freed = 0;   // 0: live; else rises with each free
  bool is_unmapped = false;  // freed, and its memory has left these addresses
  bool is_done = false;      // freed, and nobody looks at it any more
  bool is_damaged = false;   // and was counted
  Stream stream = nullptr;
  std::shared_ptr<const std::string> pool;   // its name
  std::shared_ptr<const std::string> stack;  // where it was allocated, a line a frame; nullptr: not known

  [[nodiscard]] Address end() const { return address + requested; }
};

// What was written outside a block that was asked for.
struct Damage {
  WatchedBlock block;
  std::ptrdiff_t first = 0;  // of the first wrong byte, from the block's address
  std::size_t bytes = 0;     // wrong ones
};

// A block near an address.
struct Finding {
  enum class Where : std::uint8_t { before, inside, beyond };
  WatchedBlock block;
  Where where = Where::inside;
  // inside: from the block's address. beyond: from the first byte that was not asked
  // for. before: up to the block's address.
  std::size_t distance = 0;
  bool is_in_zone = false;  // the address is nobody else's, or was
};
// "0x7f0000200000 is 4 bytes beyond ..."; in one line, without the stack.
std::string to_string(const Finding& finding, Address address);
// "a live block of 100 bytes at 0x... (pool 'a', stream 0x0, allocation 17)".
std::string to_string(const WatchedBlock& block);
std::string to_string(const Damage& damage);
// "; allocated at:" and a line a frame; "" where that is not known.
std::string with_stack(const WatchedBlock& block);

class WatchLog {
 public:
  static constexpr std::size_t kMostFreed = 4096;
  static constexpr std::size_t kMostDamages = 256;

  explicit WatchLog(const DebugMode& mode) : mode_(mode) {}
  WatchLog(const WatchLog&) = delete;
  WatchLog& operator=(const WatchLog&) = delete;

  [[nodiscard]] const DebugMode& mode() const { return mode_; }
  // Whether the calling thread's next request is to be watched. Of each thread's own
  // requests, in turn: between two that are, there are 0 to 2 N - 2 others, by a fixed
  // sequence whose mean makes it one of N. With equal steps a program whose turns have a
  // multiple of N requests would always show the same tensors.
  [[nodiscard]] bool picks() const noexcept;

  // Who says where an allocation was made: a line a frame, the innermost first. Called
  // with no lock held. nullptr: nobody.
  using StackSource = std::string (*)();
  static void set_stack_source(StackSource source);
  static std::shared_ptr<const std::string> stack_here();

  // -- What happens ---------------------------------------------------------
  void began(WatchedBlock block) VMM_EXCLUDES(mutex_);
  // Its WatchedBlock::freed; 0: it is not known.
  std::uint64_t freed(Address address) noexcept VMM_EXCLUDES(mutex_);
  // The one that freed() gave the number of is not looked at any more; `is_unmapped`: its
  // memory has left its addresses.
  void done(std::uint64_t number, bool is_unmapped) noexcept VMM_EXCLUDES(mutex_);
  // Could not be watched: no addresses were left for it, or, with canaries, a capture kept
  // patterns from being written.
  void missed() VMM_EXCLUDES(mutex_);
  // Of the block at `address`, live or freed last there, `bytes` around it are wrong. True
  // where that was not known before; then it is said on stderr too.
  bool damaged(Address address, std::ptrdiff_t first, std::size_t bytes) VMM_EXCLUDES(mutex_);

  // -- What is known ----------------------------------------------------------
  struct Counts {
    std::uint64_t watched = 0;  // so far
    std::uint64_t missed = 0;
    std::uint64_t damaged = 0;  // blocks
    std::size_t live = 0;       // now
  };
  [[nodiscard]] Counts counts() const VMM_EXCLUDES(mutex_);
  // The newest first; `most` of each.
  [[nodiscard]] std::vector<WatchedBlock> live(std::size_t most) const VMM_EXCLUDES(mutex_);
  [[nodiscard]] std::vector<WatchedBlock> freed_lately(std::size_t most) const VMM_EXCLUDES(mutex_);
  [[nodiscard]] std::vector<Damage> damages() const VMM_EXCLUDES(mutex_);
  // Blocks that an access to `address` may have been meant for: first those whose own
  // addresses it is, live before freed and newest first, then the nearest live ones below
  // and above.
  [[nodiscard]] std::vector<Finding> explain(Address address) const VMM_EXCLUDES(mutex_);
  // The first of these, for a thread that may have been stopped anywhere. False: none, or
  // the log is being changed just now.
  bool explain_now(Address address, Finding* out) const noexcept VMM_NO_THREAD_SAFETY_ANALYSIS;

 private:
  static Finding finding(const WatchedBlock& block, Address address);
  // Calls `each(block)` for those whose zone holds the address, until it returns false.
  template <typename Each>
  bool for_zones(Address address, const Each& each) const VMM_REQUIRES(mutex_);

  const DebugMode mode_;
  mutable Mutex mutex_;
  Counts counts_ VMM_GUARDED_BY(mutex_);
  std::uint64_t frees_ VMM_GUARDED_BY(mutex_) = 0;
  std::map<Address, WatchedBlock> live_ VMM_GUARDED_BY(mutex_);
  std::deque<WatchedBlock> freed_ VMM_GUARDED_BY(mutex_);  // oldest first, so by `freed`
  std::deque<Damage> damages_ VMM_GUARDED_BY(mutex_);      // oldest first
};

}  // namespace vmm
