// What happens in the GPUs' pools, kept for torch: its memory history, its
// trackers of segments and its observers of out-of-memory errors. It owns the
// entries and the contexts (stack traces) of live blocks, and never asks a pool
// for anything.
//
// It listens to the pools only while somebody wants to know. Its mutex is a
// leaf: pools tell it things under their own. Contexts are gathered before any
// lock is taken, since that may run Python, and handed over by the thread.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/util/ApproximateClock.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/sync.h"
#include "core/numbers/observer.h"
#include "core/pool/region_id.h"
#include "process/runtime.h"
#include "torch_adapter/shared_texts.h"
#include "torch_adapter/versions.h"

namespace vmm {

namespace cca = c10::cuda::CUDACachingAllocator;

// The latest entries, up to a number.
template <typename T>
class LatestEntries {
 public:
  void set_capacity(std::size_t entries) { capacity_ = std::max<std::size_t>(entries, 1); }
  void insert(T entry) {
    if (entries_.size() < capacity_) {
      entries_.push_back(std::move(entry));
      return;
    }
    entries_[oldest_] = std::move(entry);
    if (++oldest_ >= entries_.size()) oldest_ = 0;
  }
  // Calls `visit` with each, oldest first.
  template <typename Visit>
  void for_each(const Visit& visit) const {
    for (std::size_t k = oldest_; k < entries_.size(); ++k) visit(entries_[k]);
    for (std::size_t k = 0; k < oldest_; ++k) visit(entries_[k]);
  }
  // Takes all out, for the caller to destroy.
  std::vector<T> clear() {
    oldest_ = 0;
    return std::exchange(entries_, {});
  }

 private:
  std::size_t capacity_ = 1;
  std::size_t oldest_ = 0;
  std::vector<T> entries_;
};

class History final : public PoolObserver {
 public:
  using Context = std::shared_ptr<c10::GatheredContext>;
  using TraceEntry = cca::TraceEntry;

  // The process's one; never destroyed, as contexts hold Python's objects.
  static History& instance();
  // Somebody wants to know what happens: a history is recorded or a tracker is
  // attached. One relaxed load.
  static bool is_on() { return on_.load(std::memory_order_relaxed); }

  // For the time of one call of torch's: what happens in it has this context.
  // To be made before any lock is taken.
  class Scope {
   public:
    // `level`: from which level on a context is wanted.
    explicit Scope(cca::RecordContext level) noexcept {
      if (is_on()) [[unlikely]]
        begin(level);
    }
    ~Scope() {
      if (begun_) [[unlikely]]
        current_ = outer_;
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    void begin(cca::RecordContext level) noexcept;

    Context context_;
    const Context* outer_ = nullptr;
    bool begun_ = false;
  };

  // -- What is wanted --
  void record(bool enabled, cca::CreateContextFn recorder, std::size_t max_entries, cca::RecordContext when,
              bool clear_history, const std::vector<std::string>& skip_actions) VMM_EXCLUDES(mutex_);
  [[nodiscard]] bool is_recording() const { return recording_.load(std::memory_order_relaxed); }
  // Who registers segments with NCCL or the like, and which.
  enum class Registrar : std::uint8_t {
    of_mem_pools,  // torch's process groups: follows their segments alone, whoever comes beside it
    of_all,        // a library, which may register whatever it is told of
  };
  void attach_tracker(cca::AllocatorTraceTracker tracker, Registrar kind) VMM_EXCLUDES(mutex_);
  // Somebody `of_all` is there, or looks at what there is before it follows what comes.
  void expect_registrar_of_all();
  // torch's process groups are `of_all` too: the environment asks for it.
  static bool nccl_registers_all();
  [[nodiscard]] bool has_trackers() const { return has_trackers_.load(std::memory_order_acquire); }
  void attach_out_of_memory_observer(cca::OutOfMemoryObserver observer) VMM_EXCLUDES(mutex_);
  VMM_SINCE_TORCH_2_12(void attach_rejection_observer(cca::OomRejectionObserver observer) VMM_EXCLUDES(mutex_);)
  // Listens to a device whose room was made while somebody wants to know.
  void watch(DeviceRoom& room);

  // -- What the calling thread adds to its entries --
  void push_compile_context(const std::string& context);
  void pop_compile_context();
  static void set_user_metadata(const std::string& metadata);
  static std::string user_metadata();

  // -- What happens --
  void on_event(const Pool& pool, PoolEvent event, Address address, std::size_t bytes, Stream stream) noexcept override;
  void on_provided(int device, const RegionId& region, PoolEvent event, Address address, std::size_t bytes,
                   Stream stream) noexcept override;
  // A request failed. Calls the observers, so no lock may be held; what they
  // throw comes out.
  void out_of_memory(DeviceRoom& room, const Pool& pool, std::size_t bytes, Stream stream) VMM_EXCLUDES(mutex_);
  void annotate(int device, const std::vector<std::pair<std::string, std::string>>& metadata) VMM_EXCLUDES(mutex_);
  // A live block of `pool`, or (nullptr) of another allocator's memory.
  VMM_SINCE_TORCH_2_14(void annotate_block(int device, const RegionId& region, const Pool* pool, Address block,
                                           std::size_t bytes, Stream stream, const std::string& metadata)
                           VMM_EXCLUDES(mutex_);)

  // -- What has happened --
  // Traces of the devices, and annotations, into `info`.
  void add_traces(int devices, cca::SnapshotInfo* info) VMM_EXCLUDES(mutex_);
  // Contexts of segments and blocks, where they are known.
  void add_contexts(std::vector<cca::SegmentInfo>* segments) const VMM_EXCLUDES(mutex_);
  // The entry that marks a snapshot, as torch makes one after each.
  void mark_snapshot(int device, const RegionId& region, std::size_t active_bytes) VMM_EXCLUDES(mutex_);
  // Of the live block at the address, or nullptr.
  [[nodiscard]] Context context_of(Address block) const VMM_EXCLUDES(mutex_);
  // Requests that torch's throw_on_cudamalloc_oom turned down, since the last reset.
  [[nodiscard]] std::int64_t rejections(int device) const {
    return rejections_.at(static_cast<std::size_t>(device)).load(std::memory_order_relaxed);
  }
  void reset_rejections(int device) { rejections_.at(static_cast<std::size_t>(device)).store(0); }

 private:
  using Text = SharedTexts::Text;
  struct Tracker {
    cca::AllocatorTraceTracker call;
    Registrar kind;
  };
  using Trackers = std::vector<Tracker>;
  using Observers = std::vector<cca::OutOfMemoryObserver>;

  // A TraceEntry whose texts are shared: an event costs no copies of them.
  struct Entry {
    TraceEntry::Action action = TraceEntry::ALLOC;
    Address address = 0;
    std::size_t bytes = 0;
    Stream stream = nullptr;
    RegionId region;
    c10::approx_time_t time = 0;
    Context context;
    Text compile_context;  // nullptr: none
    Text user_metadata;    // nullptr: none
    Text owner;            // its model and tag, in words; nullptr: the default pool's, of no tag
  };
  // What a thread has said of its allocations.
  struct ThreadNotes {
    std::vector<Text> compile_contexts;
    Text user_metadata;
  };
  struct ThreadNotesOwner;

  History() = default;
  void update_watch() VMM_EXCLUDES(watch_mutex_, mutex_);
  [[nodiscard]] Context gather(cca::RecordContext level) const;
  static ThreadNotes* notes(bool make);
  // `pool`: nullptr where what it happened to belongs to none.
  void happened(int device, const RegionId& region, const Pool* pool, PoolEvent event, Address address,
                std::size_t bytes, Stream stream) noexcept VMM_EXCLUDES(mutex_);
  Entry make_entry(TraceEntry::Action action, Address address, std::size_t bytes, Stream stream,
                   const RegionId& region) const;
  Text owner_of(const Pool& pool) VMM_REQUIRES(mutex_);
  // Keeps the entry, if wanted, and tells the trackers.
  void keep(int device, const Entry& entry) VMM_REQUIRES(mutex_);
  // `is_of_mem_pool`: of a segment of one that comes or goes, another allocator's too.
  void tell_trackers(int device, const Entry& entry, bool is_of_mem_pool = false) const noexcept VMM_EXCLUDES(mutex_);
  static TraceEntry to_trace_entry(int device, const Entry& entry);

  static inline std::atomic<bool> on_{false};
  static inline thread_local const Context* current_ = nullptr;  // of the innermost Scope
  static inline thread_local ThreadNotes* notes_ = nullptr;

  std::atomic<bool> recording_{false};
  std::atomic<bool> has_trackers_{false};
  std::atomic<bool> follows_blocks_{false};  // one of these does, or the history
  std::atomic<bool> registers_all_{false};   // one of these does
  std::atomic<cca::CreateContextFn> recorder_{nullptr};
  std::atomic<cca::RecordContext> level_{cca::RecordContext::NEVER};
  std::array<std::atomic<std::int64_t>, Runtime::kMostDevices> rejections_{};
  c10::ApproximateClockToUnixTimeConverter clock_;

  Mutex watch_mutex_;  // above those of devices
  mutable Mutex mutex_;
  std::array<LatestEntries<Entry>, Runtime::kMostDevices> entries_ VMM_GUARDED_BY(mutex_);
  LatestEntries<c10::CachingDeviceAllocator::AnnotationEntry> annotations_ VMM_GUARDED_BY(mutex_);
  std::uint32_t skipped_actions_ VMM_GUARDED_BY(mutex_) = 0;  // a bit for each action
  // Of blocks allocated, and of chunks mapped, since contexts are recorded.
  std::unordered_map<Address, Context> block_contexts_ VMM_GUARDED_BY(mutex_);
  std::map<Address, Context> segment_contexts_ VMM_GUARDED_BY(mutex_);
  SharedTexts models_ VMM_GUARDED_BY(mutex_);  // in words, by name
  SharedTexts tags_ VMM_GUARDED_BY(mutex_);    // with their models, by these words
  std::shared_ptr<const Trackers> trackers_ VMM_GUARDED_BY(mutex_) = std::make_shared<const Trackers>();
  Observers out_of_memory_observers_ VMM_GUARDED_BY(mutex_);
  VMM_SINCE_TORCH_2_12(std::vector<cca::OomRejectionObserver> rejection_observers_ VMM_GUARDED_BY(mutex_);)
};

}  // namespace vmm
