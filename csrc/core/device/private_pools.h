// The private pools that torch asks for, CUDA graphs' and torch.cuda.MemPool's:
// which requests they serve, who uses them, and when their memory is let go.
// It knows no torch, and no block of theirs.
//
// torch knows such a pool by an id (its region). The model that is open when
// memory is asked for pays for it, so a region has a part in each model, and for
// each tag of a model, that used it: a pool of its own under the model's budget.
//
// Lock order: PrivatePools::mutex_ stands above all of DeviceMemory's.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/sync.h"
#include "core/device/device_memory.h"
#include "core/pool/pool_checkpoint.h"
#include "core/pool/region_id.h"

namespace vmm {

// What the device's owner knows of stream captures.
struct CaptureHooks {
  // The id of the capture that `stream` takes part in now, unique in the
  // process; 0: none, or one that has become invalid. Called with a lock held.
  std::function<std::uint64_t(Stream)> capture_of;
  // Called, with no lock held, when captures turned out to have failed and none
  // is under way.
  std::function<void()> on_failed;
  // Whether torch ends the route of a capture that failed, and whether it releases its region,
  // though late: when its graph goes.
  bool failed_are_ended = false;
  bool failed_are_released = false;
};

// Memory of a region that somebody else provides.
class ForeignMemory {
 public:
  virtual ~ForeignMemory() = default;
  // A CUDA graph uses it, or none any more: it must stay, or may go.
  virtual void set_pinned(bool pinned) noexcept = 0;
  // Nobody asks for more: all goes back, at the latest with its last block.
  virtual void close() noexcept = 0;
  // Blocks made from now on have their segments for themselves.
  virtual void set_no_split() noexcept = 0;
  // A block. Throws OutOfMemoryError where neither what is free nor whoever provides has
  // one. Called with no lock held.
  virtual Address allocate(std::size_t bytes, Stream stream) = 0;
  // A block of what is free for that stream; 0: nothing is.
  virtual Address try_allocate_within(std::size_t bytes, Stream stream) = 0;
};

// The live blocks of all parts of a region at one moment.
struct RegionCheckpoint {
  RegionId region;
  std::vector<std::pair<std::shared_ptr<Pool>, PoolCheckpoint>> parts;
};

class PrivatePools {
 public:
  // Whether a request on this stream, by the calling thread, is for the region.
  using Filter = std::function<bool(Stream)>;

  explicit PrivatePools(DeviceMemory& memory, CaptureHooks hooks = {});
  PrivatePools(const PrivatePools&) = delete;
  PrivatePools& operator=(const PrivatePools&) = delete;
  ~PrivatePools();

  // -- Users. Each that comes has to release() once ---------------------------
  // A torch.cuda.MemPool comes; `foreign` provides the memory unless nullptr. Where a capture
  // runs and the region is there already, it is the capture's graph that comes: it uses the
  // pool (torch 2.15).
  void add_user(RegionId region, std::shared_ptr<ForeignMemory> foreign = nullptr) VMM_EXCLUDES(mutex_);
  // A user goes: of those that routed, whoever ended last; else a MemPool that said so
  // (set_use_on_oom(false)); else a graph that uses it beside its own; else a graph. With the last one all memory
  // goes back that no block holds. Ignores a region that it does not know.
  void release(RegionId region) VMM_EXCLUDES(mutex_);
  // Throws InvalidArgumentError where there is none.
  [[nodiscard]] int use_count(RegionId region) const VMM_EXCLUDES(mutex_);
  // Requests of the default region that found no memory may have what is free
  // here. False is also what a MemPool says right before its release().
  void set_use_on_oom(RegionId region, bool use_on_oom) VMM_EXCLUDES(mutex_);
  // Blocks made from now on have their chunks (or foreign segments) for themselves.
  void set_no_split(RegionId region) VMM_EXCLUDES(mutex_);

  // -- Routes -----------------------------------------------------------------
  // From now on requests that pass `filter` are served by the region; counts as
  // a user. `current` is the caller's stream; a filter that is false for it is
  // that of a capture which the caller is about to begin there.
  // Throws InvalidArgumentError when there is a route to the region already.
  void begin(RegionId region, Filter filter, Stream current) VMM_EXCLUDES(mutex_);
  // Throws InvalidArgumentError when there is none.
  void end(RegionId region) VMM_EXCLUDES(mutex_);
  // Is any begin..end open, or suspended? One relaxed load.
  [[nodiscard]] bool any_route() const { return route_count_.load(std::memory_order_relaxed) != 0; }
  // The part of `model`, or of a model's tag, that serves a request on `stream` by this
  // thread, made when needed; nullptr: none does. Where the region's memory is foreign,
  // nullptr too, and `foreign` is set. Throws as create_part() does.
  std::shared_ptr<Pool> route(const std::shared_ptr<Pool>& model, Stream stream,
                              std::shared_ptr<ForeignMemory>* foreign = nullptr) VMM_EXCLUDES(mutex_);
  // What stands at addresses of its own and belongs to a capture that takes part in
  // `stream` now: it stays until the region that serves the capture goes, as the
  // region's own memory does. Nothing where no capture is under way there.
  void keep_for_capture(Stream stream, const std::shared_ptr<const void>& kept) VMM_EXCLUDES(mutex_);
  // A block of a part of `model`, or of foreign memory, that serves requests which
  // found no memory elsewhere; 0: none has any. The device's ladder asks.
  Address lend(const Pool& model, std::size_t bytes, Stream stream) VMM_EXCLUDES(mutex_);
  // Ends the routes of captures that have failed: torch says nothing when it
  // could not begin or end one. Closes what could not be for want of host memory. begin(),
  // route(), release() and empty_cache() do so too; others that come by may call it.
  void sweep() VMM_EXCLUDES(mutex_);

  // -- What is in them ----------------------------------------------------------
  // Gives back what is free in the region; nothing while a graph uses it, nor what
  // somebody else provides: that stays with its pool, as natively. Waits for the
  // work that still uses it.
  void empty_cache(RegionId region) VMM_EXCLUDES(mutex_);
  // Its parts, in no order; throws InvalidArgumentError where there is no such region.
  [[nodiscard]] PoolList parts(RegionId region) const VMM_EXCLUDES(mutex_);
  [[nodiscard]] std::unordered_set<Address> live_addresses(RegionId region) const VMM_EXCLUDES(mutex_);
  // Pool::checkpoint() and restore() over all parts. A part that came after the
  // checkpoint is emptied. What a capture recorded on streams and freed is done with by
  // its end (natively without a question; the driver answers only for what is queued on
  // the stream by now, so these wait for that, once a recording).
  [[nodiscard]] RegionCheckpoint checkpoint(RegionId region) const VMM_EXCLUDES(mutex_);
  void restore(const RegionCheckpoint& target, std::vector<Address>* freed, std::vector<Address>* allocated)
      VMM_EXCLUDES(mutex_);

 private:
  // A model, and the tag under which its memory is asked for. Of a part, which keeps both
  // alive.
  using PartKey = std::pair<const Pool*, std::string_view>;
  static PartKey key_of(const Pool& pool) { return {&pool.model(), pool.tag()}; }
  using Parts = std::map<PartKey, std::shared_ptr<Pool>>;
  using Kept = std::set<std::shared_ptr<const void>, std::owner_less<>>;  // each owner once
  // A region, while anybody uses it. use_count = the five kinds of users.
  struct Entry {
    int objects = 0;      // MemPools
    int leaving = 0;      // of these, those that said that their release is next
    int graphs = 0;       // captures begun whose graph has not been released
    int retained = 0;     // graphs of captures that use it beside their own region
    int plain = 0;        // routes of a thread or a stream, open ones
    int plain_ended = 0;  // and ended ones, whose release is due
    bool use_on_oom = false;
    bool no_split = false;
    bool is_kept = false;  // a capture took memory of it beside the graph's own: pinned to its end
    Parts parts;
    std::shared_ptr<ForeignMemory> foreign;
    Kept kept;

    [[nodiscard]] bool is_pinned() const { return graphs > 0 || retained > 0 || is_kept; }
    [[nodiscard]] int use_count() const { return objects + graphs + retained + plain + plain_ended; }
  };
  using Entries = std::map<RegionId, Entry>;

  struct Route {
    RegionId region;
    Filter filter;
    bool is_capture = false;
    // Of captures:
    Stream origin = nullptr;           // where the whole capture began
    std::uint64_t capture = 0;         // that runs on `origin` while the route is good; 0: not seen yet
    bool in_another = false;           // the route is for a part of that capture, which is one of its own
    std::weak_ptr<const void> thread;  // that began it; of one that is suspended: that ended it
    std::vector<RegionId> retained;    // of which torch has said that the capture's graph uses them
    bool has_just_ended = false;       // suspended, and its thread has not come by since
    bool is_in_doubt = false;          // its end() was taken for that of one which has failed
    bool has_failed = false;           // for the sweep that is going on
    // Of a thread's or a stream's: the capture of the same pool that a program had
    // paused and goes on with by this route. One or none.
    std::vector<Route> resumed;
  };

  [[nodiscard]] std::uint64_t capture_of(Stream stream) const;
  Entry& made_entry(RegionId region) VMM_REQUIRES(mutex_);
  [[nodiscard]] const Entry& known(RegionId region) const VMM_REQUIRES(mutex_);
  bool is_dead(Route& route) VMM_REQUIRES(mutex_);
  bool sweep_locked() VMM_REQUIRES(mutex_);
  bool take_up_suspended(Route& route, std::uint64_t running) VMM_REQUIRES(mutex_);
  // Its graph has gone, though the capture goes on: the region's of which this thread has just ended the route.
  bool drop_abandoned(RegionId region) VMM_REQUIRES(mutex_);
  // This thread has come by: what it ended before, it may go on with.
  void note_thread() VMM_REQUIRES(mutex_);
  // The latest capture that this thread began, or the only one that anybody did, or nullptr.
  Route* capture_of_thread() VMM_REQUIRES(mutex_);
  // Whether torch has said that the capture which takes part in `stream` retains the region.
  [[nodiscard]] bool is_retained(RegionId region, Stream stream, std::uint64_t running) const VMM_REQUIRES(mutex_);
  void suspend(Route& route, bool by_its_own_end) VMM_REQUIRES(mutex_);
  [[nodiscard]] bool is_suspended(RegionId region) const VMM_REQUIRES(mutex_);
  void count_routes() VMM_REQUIRES(mutex_);
  [[nodiscard]] bool any_capture() const VMM_REQUIRES(mutex_);
  // The route of a request on `stream` by this thread, or nullptr.
  Route* serving(Stream stream, std::uint64_t running) VMM_REQUIRES(mutex_);
  // What is left to do once the lock is given up: others are told, what regions kept ends,
  // which may wait for locks that callers of ours hold, and the GPU is waited for where much
  // has been closed.
  void settle_accounts(bool failed) VMM_EXCLUDES(mutex_);
  std::shared_ptr<Pool> part_of(RegionId region, Entry& entry, const std::shared_ptr<Pool>& model) VMM_REQUIRES(mutex_);
  static void set_pinned(const Entry& entry, bool pinned);
  static void pin(const Entry& entry);
  static void keep_for_graphs(Entry& entry);
  // `kind`: Entry::graphs or Entry::retained.
  void add_graph(Entry& entry, int Entry::*kind) VMM_REQUIRES(mutex_);
  void drop_graph(Entry& entry, int Entry::*kind) VMM_REQUIRES(mutex_);
  [[nodiscard]] bool is_end_of_failed(RegionId region, const Route* at) const VMM_REQUIRES(mutex_);
  bool close(const std::shared_ptr<Pool>& part) VMM_REQUIRES(mutex_);
  void close_due() VMM_REQUIRES(mutex_);
  void drop_if_unused(Entries::iterator at) VMM_REQUIRES(mutex_);

  DeviceMemory& memory_;
  const CaptureHooks hooks_;
  std::atomic<std::size_t> route_count_{0};
  mutable Mutex mutex_;
  Entries entries_ VMM_GUARDED_BY(mutex_);
  Kept dropped_ VMM_GUARDED_BY(mutex_);   // by regions that have gone
  std::atomic<bool> has_dropped_{false};  // a request in a region takes no second lock to know
  std::atomic<bool> has_closed_{false};   // parts, since the GPU was waited for, perhaps
  // Parts that nobody uses and that are to be closed: for want of host memory they have not been.
  std::multimap<PartKey, std::shared_ptr<Pool>> closing_ VMM_GUARDED_BY(mutex_);
  std::vector<Route> routes_ VMM_GUARDED_BY(mutex_);  // the latest last
  // Of captures that go on: torch ends the route for a moment, before and after
  // it captures the body of a conditional node, and begins one right after.
  std::vector<Route> suspended_ VMM_GUARDED_BY(mutex_);
  // Of captures that failed and were found so before torch ended their routes: how many.
  std::map<RegionId, int> failed_ VMM_GUARDED_BY(mutex_);
};

}  // namespace vmm
