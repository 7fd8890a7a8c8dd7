// A private pool whose memory another allocator gives (a torch.cuda.MemPool that was made
// with NCCL's, say): segments come from a provider and go back to it, blocks are cut from
// them here. It is charged to the device (a limit of torch's is of all memory), to no
// model, and moves nowhere; the device's statistics and snapshots count it.
//
// Provider and driver are called with no lock held: a provider may be Python.
#pragma once

#include <atomic>
#include <compare>
#include <cstddef>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/sync.h"
#include "core/blocks/block_heap.h"
#include "core/device/private_pools.h"
#include "core/device/provided_segments.h"
#include "core/device/segment_provider.h"
#include "core/limits/budget.h"
#include "core/numbers/observer.h"
#include "core/numbers/pool_counters.h"
#include "core/numbers/stats.h"
#include "core/streams/clock.h"
#include "core/streams/pending_frees.h"
#include "core/streams/recorded_uses.h"

namespace vmm {

class ProvidedMemory final : public ForeignMemory, public std::enable_shared_from_this<ProvidedMemory> {
 public:
  // Says what the exception in flight is, where no caller may see it; who ran into it.
  using Report = void (*)(const char* who) noexcept;
  struct Segment {
    RegionId region;
    SegmentSnapshot snapshot;
  };

  // `memory`: the device's, which pays and whose clock and observer it has. It outlives this.
  ProvidedMemory(DeviceMemory& memory, RegionId region, std::unique_ptr<SegmentProvider> provider, Report report);
  ProvidedMemory(const ProvidedMemory&) = delete;
  ProvidedMemory& operator=(const ProvidedMemory&) = delete;
  ~ProvidedMemory() override;

  // False, at once, where no such memory lies at `block`.
  static bool free(Address block) noexcept { return any_segment() && free_in(block); }
  // One relaxed load.
  static bool any_segment() { return ProvidedSegments::any(); }
  // `stream` of `device` also uses the block.
  static bool record_stream(Address block, Stream stream, DeviceStreams& device);
  // The segment, whole, that holds a live block.
  static std::optional<ByteRange> segment_at(Address block);
  // Bytes of the live block, or 0.
  static std::size_t block_size(Address block);
  // What was asked for there, and for which region of which device; nothing where it is no such block.
  struct Asked {
    int device = 0;
    RegionId region;
    std::size_t bytes = 0;
    std::size_t size = 0;  // bytes of the block
    Stream stream = nullptr;
  };
  static std::optional<Asked> asked_at(Address block);

  // Gives the segments of pools that are gone back to their providers, as far as
  // no queued work uses them; with `wait`, waits for that work. Those of a pool
  // that is not gone stay with it: its owner may free them by itself.
  static void finish_closed(const DeviceMemory& device, bool wait) noexcept;
  // There may be something to finish. One relaxed load.
  static bool any_unfinished() { return unfinished_.load(std::memory_order_relaxed) != 0; }
  static std::vector<Segment> snapshot(const DeviceMemory& device);

  // Those that the device has segments of.
  static std::vector<std::shared_ptr<ProvidedMemory>> all_of(const DeviceMemory& device);
  [[nodiscard]] RegionId region() const { return region_; }
  // DeviceMemory::statistics() has them too.
  [[nodiscard]] Statistics statistics() const { return counters_->statistics(); }
  // Brings inactive_split up to date. Walks.
  void refresh_numbers() VMM_EXCLUDES(mutex_);

  // ForeignMemory
  void set_pinned(bool pinned) noexcept override VMM_EXCLUDES(mutex_);
  void close() noexcept override VMM_EXCLUDES(mutex_);
  void set_no_split() noexcept override { no_split_.store(true, std::memory_order_relaxed); }
  // It throws when the device's limit or the provider gives nothing.
  Address allocate(std::size_t bytes, Stream stream) override VMM_EXCLUDES(mutex_);
  Address try_allocate_within(std::size_t bytes, Stream stream) override VMM_EXCLUDES(mutex_);

 private:
  // Whose blocks share segments: those of one stream and size class. Its place is their tag.
  struct Sharers {
    Stream stream = nullptr;
    bool small = false;
    auto operator<=>(const Sharers&) const = default;
  };
  // A segment that goes back when nothing uses it any more.
  struct Leaving {
    ByteRange range;
    Epoch last_use = kLongAgo;
    bool small = false;
  };

  // Frees that recorded streams hold up and segments that queued work does.
  static inline std::atomic<std::size_t> unfinished_{0};
  static bool free_in(Address block) noexcept;

  // kNeutral: no segment was ever theirs.
  [[nodiscard]] StreamTag known_tag(const Sharers& sharers) const VMM_REQUIRES(mutex_);
  StreamTag tag_of(const Sharers& sharers) VMM_REQUIRES(mutex_);
  Address carve(Block* free, std::size_t bytes) VMM_REQUIRES(mutex_);
  // A segment, or 0 and `why`.
  Address provide(std::size_t bytes, std::string* why);
  bool free_at(Address address) noexcept VMM_EXCLUDES(mutex_);
  void finish_free(Block* block, Epoch epoch) VMM_REQUIRES(mutex_);
  void settle() VMM_REQUIRES(mutex_);
  // Takes the segment that this free block is all of out, to go back to its provider.
  void retract_if_whole(Block* free) VMM_REQUIRES(mutex_);
  void retract_free_segments() VMM_REQUIRES(mutex_);
  void tell(PoolEvent event, ByteRange range, Stream stream) const noexcept;
  void return_to_provider(ByteRange segment) noexcept VMM_EXCLUDES(mutex_);
  void let_go(ByteRange segment, SizeClass size_class) noexcept VMM_EXCLUDES(mutex_);
  void give_back() noexcept VMM_EXCLUDES(mutex_);
  void finish(bool wait) noexcept VMM_EXCLUDES(mutex_);

  DeviceMemory& memory_;  // whose clock tells when segments may go
  const RegionId region_;
  const std::unique_ptr<SegmentProvider> provider_;
  const Report report_;
  Budget budget_;
  std::atomic<bool> no_split_{false};

  Mutex mutex_;
  BlockArena arena_ VMM_GUARDED_BY(mutex_);
  RecordedUses recorded_uses_ VMM_GUARDED_BY(mutex_);
  BlockHeap blocks_ VMM_GUARDED_BY(mutex_){arena_};                 // their offsets are addresses
  std::vector<Sharers> sharers_ VMM_GUARDED_BY(mutex_){Sharers{}};  // by tag; [0] is neutral space's
  std::map<Sharers, StreamTag> tags_ VMM_GUARDED_BY(mutex_);
  std::unordered_map<Address, Block*> live_ VMM_GUARDED_BY(mutex_);
  PendingFrees pending_ VMM_GUARDED_BY(mutex_);
  std::deque<Leaving> leaving_ VMM_GUARDED_BY(mutex_);  // what may go first comes first
  bool is_retract_due_ VMM_GUARDED_BY(mutex_) = false;  // there may be whole free segments of a closed one
  Epoch graphs_end_ VMM_GUARDED_BY(mutex_) = kLongAgo;
  bool pinned_ VMM_GUARDED_BY(mutex_) = false;
  bool closed_ VMM_GUARDED_BY(mutex_) = false;
  // The last that is made: what the device has of it ends with this, and with nothing that is half made.
  const std::shared_ptr<CountersBeside> counters_;
};

}  // namespace vmm
