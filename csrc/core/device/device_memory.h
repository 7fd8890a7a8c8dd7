// All pools of one device: making, finding and ending them, and the way of each request and
// free. It never knows torch, nor how a pool finds room; who yields to whom is the ladder's.
//
// The order in which locks are taken, this file's among all of the process, is in
// docs/design.md. Whoever holds a lock never calls Python and never waits for the
// GPU: whoever has to, waits between two tries, with no lock held (but where the host has no
// memory to note that freed pages wait: Pool::free_pages).
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/errors.h"
#include "base/function_ref.h"
#include "base/sync.h"
#include "core/debug/watch_log.h"
#include "core/device/all_locked.h"
#include "core/device/group_figures.h"
#include "core/device/ladder.h"
#include "core/device/pool_registry.h"
#include "core/device/refusal.h"
#include "core/limits/budget.h"
#include "core/memory/chunk_store.h"
#include "core/memory/guest_memory.h"
#include "core/memory/second_mappings.h"
#include "core/memory/zero_cover.h"
#include "core/options.h"
#include "core/pool/pool.h"

namespace vmm {

class DeviceMemory {
 public:
  // Throws NotAvailableError when the device cannot be used, naming why.
  DeviceMemory(Driver& driver, AddressSpace& address_space, int device, const Options& options);
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  // REQUIRES: no live block in any pool.
  ~DeviceMemory();

  // -- Pools ----------------------------------------------------------------
  // A pool whose limit stands under `group` (nullptr: the device itself).
  // Throws InvalidArgumentError, InvalidPageSizeError, OutOfMemoryError (no
  // address space). capacity 0: default_capacity(), or as much of it as the
  // process has addresses for, from 2 GiB; a capacity that is named is kept. Its floor is
  // reserved from now on; what others hold of it goes by enforce_floor().
  std::shared_ptr<Pool> create_pool(const PoolSpec& spec, Budget* group);
  // The same for whoever has a lock: it waits for no GPU. nullptr: addresses are short, and what
  // has closed may have some still; ask again, with `has_waited`, after settle(wait) without the
  // lock.
  std::shared_ptr<Pool> try_create_pool(const PoolSpec& spec, Budget* group, bool has_waited)
      VMM_EXCLUDES(registry_mutex_);
  // Bytes of addresses: four times the device's memory unless an option says
  // otherwise.
  [[nodiscard]] std::size_t default_capacity() const;
  // The part of `model` for what is made under `tag`, which is not empty: a block of it
  // shares its chunks with none of another tag, or of none. Made when it is first asked
  // for; it ends with the model. Where memory of it is sealed it is another one, which
  // takes requests. Throws InvalidArgumentError where the model is closed,
  // OutOfMemoryError (no address space).
  std::shared_ptr<Pool> tagged(const std::shared_ptr<Pool>& model, const std::string& tag)
      VMM_EXCLUDES(tags_mutex_, registry_mutex_);
  // Bytes allocated under each tag that the model ever had.
  [[nodiscard]] std::map<std::string, std::size_t> tags_of(const Pool& model) const VMM_EXCLUDES(registry_mutex_);
  // A part of `model`, or of a model's tag: memory of a private pool of torch's, which
  // the model pays for and counts. It keeps the model alive. As large as the device, or
  // less where addresses are short, as above.
  std::shared_ptr<Pool> create_part(const std::shared_ptr<Pool>& model, RegionId region, bool no_split,
                                    PoolKind kind = PoolKind::graph);
  // A part of `model`, or of a model's tag, for the addresses of one tensor: `capacity` bytes, backed by
  // explicit pages. page_size 0: chunks that grow with what lies below them.
  // Throws as create_pool().
  std::shared_ptr<Pool> create_range(const std::shared_ptr<Pool>& model, const std::string& name, std::size_t capacity,
                                     std::size_t page_size);
  // A limit for several pools, under the device's own.
  std::shared_ptr<Budget> create_group(const std::string& name, std::size_t limit_bytes) VMM_EXCLUDES(registry_mutex_);
  // No more pools come to the group: it goes when its last pool has drained and
  // its shelf is empty.
  void end_group(const Budget& group) VMM_EXCLUDES(registry_mutex_);
  // Ends pools: all of them or, while one or a part of one holds live blocks,
  // none (StillInUseError), unless `force`: then explicit pages go, those that are
  // held when they are let go of, and a pool ends with its last tensor. Parts end
  // when torch lets go of them. Waits for no GPU and calls nobody: after_closing() does, which
  // follows once whoever closes them has no lock.
  void close_pools(const PoolList& pools, bool force) VMM_NO_THREAD_SAFETY_ANALYSIS;
  void after_closing() VMM_EXCLUDES(registry_mutex_);
  // Both, for who has none.
  void close_pool(Pool& pool, bool force) {
    close_pools({pool.shared_from_this()}, force);
    after_closing();
  }
  // Every pool of the device, those in host memory and closed ones included, in order of
  // registration.
  [[nodiscard]] PoolList pools() const VMM_EXCLUDES(registry_mutex_);
  // Of pools whose memory has come or gone: those that were closed and drained meanwhile end, and what
  // came free above a lowered limit goes back, as with any free.
  void after_transfer(const PoolList& pools) noexcept VMM_EXCLUDES(registry_mutex_);
  // Pools that stand under `group`.
  [[nodiscard]] PoolList pools_under(const Budget& group) const VMM_EXCLUDES(registry_mutex_);
  // The model of `pool` and all its parts.
  [[nodiscard]] PoolList family(const Pool& pool) const VMM_EXCLUDES(registry_mutex_);
  // Whether a part of the model sleeps, or all of it.
  [[nodiscard]] bool is_any_asleep(const Pool& model) const VMM_EXCLUDES(registry_mutex_);
  // The pool that holds `address`, or nullptr.
  [[nodiscard]] std::shared_ptr<Pool> pool_at(Address address) const VMM_EXCLUDES(registry_mutex_);

  // -- Allocation: the pool itself, then the ladder ---------------------------
  // Throw OutOfMemoryError that says who asked for how much, every limit, who
  // holds what and what would help.
  Address allocate(Pool& pool, std::size_t bytes, Stream stream) {
    const Address kept = take_kept(pool, bytes, stream);
    return kept != 0 ? kept : allocate_anew(pool, bytes, stream);
  }
  // Its two parts: what the calling thread keeps, or 0, and the rest of the way.
  [[gnu::always_inline]] Address take_kept(Pool& pool, std::size_t bytes, Stream stream) {
    return beside_.load(std::memory_order_relaxed) == 0 ? caches_.take(pool, bytes, stream) : 0;
  }
  Address allocate_anew(Pool& pool, std::size_t bytes, Stream stream);
  // At exactly this address of the pool.
  Address allocate_at(Pool& pool, Address address, std::size_t bytes, Stream stream);
  // With `refused`, where there is no memory nobody is told of it: 0, and that is what tell()
  // takes. `beside`: other pages that are wanted, all or none with these.
  Address allocate_pages(Pool& pool, std::size_t offset, std::size_t size, Stream stream,
                         std::optional<Refused>* refused = nullptr, Ladder::Beside beside = {});
  // Counts it, tells who wants to know, and throws the OutOfMemoryError.
  [[noreturn]] void tell(Refused refused) VMM_EXCLUDES(refusal_mutex_);
  Address allocate_first(Pool& pool, std::size_t size, Stream stream);
  // Chunks for these places of a pool that is asleep; `beside` what the same wake asks for else.
  void collect_to_wake(Pool& pool, const std::vector<MovedChunk>& places, Ladder::Beside beside = {});
  // Whether the device's memory, and each limit above `payer` as it is at this moment, is that
  // large: otherwise nothing that anybody gives back would do.
  [[nodiscard]] bool could_hold(const Budget& payer, std::size_t bytes) const;
  // Of something else than a pool's request: nobody is told, but it is the last that was refused.
  void note_refusal(Refusal refusal) VMM_EXCLUDES(refusal_mutex_);
  // Notes it and throws it.
  [[noreturn]] void refuse(OutOfMemoryError error) VMM_EXCLUDES(refusal_mutex_);
  // The last request that was refused.
  [[nodiscard]] std::optional<Refusal> last_refusal() const VMM_EXCLUDES(refusal_mutex_);
  // Frees explicit pages; what then rests on the shelf stays bounded.
  void deallocate_pages(Pool& pool, std::size_t offset, std::size_t size);
  // The end of what Pool::hold_pages() began.
  void unhold_pages(Pool& pool, std::size_t offset, std::size_t size);
  // Frees a block by its address; false when no pool here holds it.
  static bool free(AddressSpace& address_space, Address address) {
    const BlockCaches::Put put = BlockCaches::put(address);
    return put == BlockCaches::Put::kept || free_unkept(address_space, address, put);
  }
  // The rest of that way, after what the calling thread's cache said of the block.
  static bool free_unkept(AddressSpace& address_space, Address address, BlockCaches::Put put);

  // Throws OutOfMemoryError where `bytes` for `in` to wake in could not be had though `out` had
  // given `leaving` of its own, and others what they can. REQUIRES: both are models; `out`
  // may be nullptr.
  void require_room_to_swap(Pool& in, std::size_t bytes, const Pool* out, std::size_t leaving);

  // -- Spilling: memory of models in the host's (spilling.cpp) -----------------
  // A tensor of the model, or of a tag of it, that finds no memory may stand in host memory
  // from now on. Throws NotAvailableError where the device cannot use it.
  void set_spills(Pool& model, bool spills);
  // Throws where it cannot.
  void require_can_spill(const std::string& name) const;
  // Gives back host memory that nobody uses, for spilling so many bytes where the host has no more;
  // returns what went. To be given before any thread asks for memory.
  using HostReserve = std::function<std::size_t(std::size_t bytes)>;
  void set_host_reserve(HostReserve release) { host_reserve_ = std::move(release); }
  // What pays for what models under `group` spill; where that is no group but the device's
  // budget, all models' (this object's).
  [[nodiscard]] std::shared_ptr<Budget> spill_group_of(const Budget& group) VMM_EXCLUDES(registry_mutex_);
  // An address in it for a request of `asker`, or 0. Throws OutOfMemoryError (no addresses),
  // InvalidArgumentError where the model is closed. REQUIRES: the model spills.
  Address allocate_spilled(Pool& asker, std::size_t bytes, Stream stream);

  // -- Giving back to the driver ----------------------------------------------
  // Gives idle chunks of `pool`, and of its parts, back until at most `keep`
  // idle bytes stay.
  // Waits for the work that still uses them. Returns the bytes given back.
  std::size_t trim(Pool& pool, std::size_t keep);
  // The same of what `shed` puts on the group's shelf: for who knows better which
  // chunks a pool can do without.
  std::size_t trim(Pool& pool, const FunctionRef<void()>& shed);
  // The same without a wait.
  std::size_t trim_passed(Pool& pool, const FunctionRef<void()>& shed);
  // All idle memory of every pool, and the shelves.
  std::size_t empty_cache();
  // As trim(), and all of its group's shelf.
  std::size_t empty_cache(Pool& pool);
  // For a request of `bytes` that found no memory and has no model to climb for: others give
  // back what they have idle above their floors, in the order of yielding, first what it
  // lacks, then all. Asks `attempt` again after each, and returns whether it said that all is
  // there. Waits for queued work. `payer`: this device's budget, or one that stands under it.
  bool reclaim_for(const Budget& payer, std::size_t bytes, const FunctionRef<bool()>& attempt);
  // Until what was queued by then is done. No lock is held. Throws DriverError.
  void wait_for(Epoch epoch);
  // Until no thread looks at patterns of debug mode: what was freed cannot be had meanwhile.
  void await_judges();
  // Finishes what queued work held up, in every pool, and what closed pools left
  // behind; with `wait`, waits for it. Returns whether anything came free.
  bool settle(bool wait);
  // The same for somebody who needs it, without a wait for queued work: where no tick covers what was
  // freed, one is made, so that nothing which nobody uses stays for want of one.
  bool settle_covered();
  // New limits, in bytes; what is idle above them is given back now, waiting
  // for the work that still uses it. Returns the bytes given back. Memory in
  // use stays.
  std::size_t set_limit(Budget& budget, std::size_t limit_bytes);
  // What is held above the limit and has come to be idle since that was lowered.
  std::size_t give_back_excess(Budget& budget, bool wait);
  // The same for a floor, of what others have idle that stand under the same limit and
  // should have less now. InvalidArgumentError, and nothing has changed: see Budget.
  std::size_t set_floor(Budget& budget, std::size_t floor_bytes);
  // Gives back what others hold of the floors that `budget` has now; the rest goes as it is
  // freed. Returns the bytes. It may wait for the GPU.
  std::size_t enforce_floor(const Budget& budget);
  // Of a model. One that is closed meanwhile has none.
  std::size_t set_floor(Pool& model, std::size_t floor_bytes);

  // Is told what happens in the pools from now on; nullptr: nobody is. It
  // outlives this object. One that does not follow blocks is told of segments, and of
  // blocks only what comes to the pools: threads go on keeping some.
  void set_observer(PoolObserver* observer, bool follows_blocks = true) VMM_EXCLUDES(registry_mutex_);
  [[nodiscard]] PoolObserver* observer() const { return observer_.load(std::memory_order_acquire); }
  // Somebody registers segments, whole: from now on, for good, a block lies within
  // one chunk, and memory is not moved under it (but in pools with a page size, of
  // whose chunks, as of explicit pages', no segment_alloc tells). A private pool of
  // torch.cuda.MemPool's does so always.
  void keep_blocks_within_chunks() VMM_EXCLUDES(within_mutex_, registry_mutex_);
  // Requests and chunks of at least so many bytes are counted as oversize. REQUIRES: no less than
  // kSmallLimitBytes.
  void set_oversize(std::size_t bytes);
  // The streams of another device: whoever may access this memory counts for
  // its clock.
  void set_neighbours(std::function<DeviceStreams*(int device)> neighbours) { neighbours_ = std::move(neighbours); }
  // Work of `who` may use what is mapped here from now on.
  void watch_streams_of(Location who);
  // `who` may read and write everything mapped here, now and later. Where it
  // fails it may be called again.
  Status add_accessor(Location who) VMM_EXCLUDES(accessor_mutex_, registry_mutex_);
  // Aliases and the like.
  [[nodiscard]] SecondMappings& second_mappings() { return second_mappings_; }
  // Runs `work` while nobody is let in anywhere on `devices`, of one driver, so that what it
  // maps and enters among the second mappings misses none.
  static void while_nobody_is_let_in(std::vector<DeviceMemory*> devices,
                                     const FunctionRef<void()>& work) VMM_NO_THREAD_SAFETY_ANALYSIS;
  // Called, with no lock held, when a request of a model under `group` found nothing in idle
  // memory, before it climbs on to the last rung or fails: gives up what it can, and says whether to try again.
  // By several threads at once; not while the thread's work is captured, nor for what it
  // asks for itself. It throws nothing. nullptr: nobody is called.
  using OnPressure = std::function<bool(std::size_t bytes, const std::shared_ptr<Pool>& model)>;
  void set_on_pressure(const Budget& group, OnPressure relieve) VMM_EXCLUDES(registry_mutex_);
  // nullptr: there is none.
  [[nodiscard]] std::shared_ptr<const OnPressure> on_pressure_of(const Budget& group) const
      VMM_EXCLUDES(registry_mutex_);
  // Called, with no lock held, once for each request that found no memory, whatever
  // for. What it throws goes to whoever asked.
  using OutOfMemory = std::function<void(const Pool& asker, std::size_t bytes, Stream stream)>;
  void set_on_out_of_memory(OutOfMemory told) { on_out_of_memory_ = std::move(told); }
  // Once all work that is queued now is done, by whoever comes by then, with no lock
  // held: calls `go` until it returns true. Addresses that no pool has go so. Where
  // nothing is queued, at once. Where there is no memory to note it, it waits and goes.
  void once_passed(std::function<bool()> go) noexcept VMM_EXCLUDES(registry_mutex_);
  // What the device shares among all that reads as zero; it lives as long as anyone
  // holds it.
  [[nodiscard]] std::shared_ptr<ZeroChunks> zero_chunks() VMM_EXCLUDES(registry_mutex_);
  // Bytes of other models' memory that `model` has at further addresses, from now on
  // more or less.
  void add_shared(const Pool& model, std::size_t bytes) VMM_EXCLUDES(registry_mutex_);
  void remove_shared(const Pool& model, std::size_t bytes) VMM_EXCLUDES(registry_mutex_);
  [[nodiscard]] std::size_t shared_bytes_of(const Pool& model) const VMM_EXCLUDES(registry_mutex_);
  // Who may access what pools map now.
  [[nodiscard]] std::vector<Location> accessors() const VMM_EXCLUDES(registry_mutex_);

  // -- Debug mode (Options::debug) ------------------------------------------------
  // nullptr: it is off.
  [[nodiscard]] WatchLog* debug_log() const { return log_.get(); }
  // Waits for all work, and looks at the patterns of all blocks that are watched. Returns
  // the damages that are known then. Throws DriverError where the driver cannot wait; none
  // where it is off.
  std::vector<Damage> check_watched() VMM_EXCLUDES(registry_mutex_);
  // What is watched, what was lately and where accesses to it fault, in words. "" where
  // it is off.
  [[nodiscard]] std::string debug_report() const VMM_EXCLUDES(registry_mutex_);
  // Where an access beyond the block faults: [first, last), none where it does not.
  [[nodiscard]] ByteRange faults_beyond(const WatchedBlock& block) const VMM_EXCLUDES(registry_mutex_);

  // -- Numbers ------------------------------------------------------------------
  // torch.cuda.memory_stats of the device: totals over pools and what counts beside them, own peaks.
  [[nodiscard]] Statistics statistics() const VMM_EXCLUDES(registry_mutex_);
  void reset_peaks() VMM_EXCLUDES(registry_mutex_);
  void reset_accumulated() VMM_EXCLUDES(registry_mutex_);
  // Counters for memory that is no pool's, in the device's numbers from now on. What they
  // had counted stays there when they end.
  std::shared_ptr<CountersBeside> count_beside() VMM_EXCLUDES(registry_mutex_);
  void end_count_beside(const CountersBeside& counters) noexcept VMM_EXCLUDES(registry_mutex_);
  // Of a model and its parts.
  [[nodiscard]] Statistics statistics_of(const Pool& model) const;
  [[nodiscard]] MemoryStats memory_stats_of(const Pool& model) const;
  // Of each by itself, at one moment. `pools`: in order of registration.
  [[nodiscard]] std::vector<MemoryStats> stats_of_each(const PoolList& pools) const VMM_NO_THREAD_SAFETY_ANALYSIS;
  void reset_peaks_of(const Pool& model);
  void reset_accumulated_of(const Pool& model) VMM_EXCLUDES(registry_mutex_);
  // Brings inactive_split of every pool up to date. Walks.
  void refresh_numbers();
  // Of one moment. Locks for it, in order of registration, the pools of the group
  // that have changed since it was last asked.
  [[nodiscard]] GlobalMemoryStats group_stats(const Budget& group) VMM_EXCLUDES(registry_mutex_);
  // Bytes that the driver, or another allocator, gave and that are still held: what
  // budget() counts.
  [[nodiscard]] std::size_t committed_bytes() const { return budget_.used(); }
  // Proves that pools and store sum to what the driver gave. Walks. REQUIRES:
  // no call under way on another thread.
  void check() const;

  // Blocks of the pool that threads keep for their next requests, freed to everybody
  // who counts.
  [[nodiscard]] std::size_t kept_blocks(const Pool& pool) { return caches_.kept_blocks(pool); }
  // What count_beside() has given and has not ended, for tests.
  [[nodiscard]] std::size_t counted_beside() const VMM_EXCLUDES(registry_mutex_);
  // Groups that there are, for tests.
  [[nodiscard]] std::size_t groups() const VMM_EXCLUDES(registry_mutex_);
  [[nodiscard]] Budget& budget() { return budget_; }
  // Pays for what other allocators gave to private pools: counts under the
  // device's limit.
  [[nodiscard]] Budget& foreign_budget() { return foreign_budget_; }
  // For models of other devices that sleep here.
  [[nodiscard]] GuestMemory& guests() { return guests_; }
  // Pays for host memory that managers of this device made by hand: counted,
  // without a limit, and no part of what the device holds.
  [[nodiscard]] Budget& host_budget() { return host_budget_; }
  [[nodiscard]] ChunkStore& store() { return store_; }
  [[nodiscard]] Driver& driver() const { return driver_; }
  [[nodiscard]] AddressSpace& address_space() const { return address_space_; }
  [[nodiscard]] DeviceStreams& streams() { return streams_; }
  [[nodiscard]] Clock& clock() { return clock_; }
  [[nodiscard]] Ladder& ladder() { return ladder_; }
  [[nodiscard]] int device() const { return device_; }
  [[nodiscard]] std::size_t granularity() const { return capabilities_.granularity; }
  [[nodiscard]] const Capabilities& capabilities() const { return capabilities_; }
  [[nodiscard]] const Options& options() const { return options_; }

 private:
  std::shared_ptr<Pool> register_pool(const PoolSpec& spec, Budget& group)
      VMM_EXCLUDES(accessor_mutex_, registry_mutex_);
  void require_page_size(std::size_t page_size) const;
  std::shared_ptr<Pool> spill_space(Pool& asker) VMM_EXCLUDES(tags_mutex_, registry_mutex_);
  std::size_t trim_shelf(ChunkStore& store, Budget& group);
  std::size_t trim_shelf(Pool& pool) { return trim_shelf(pool.store(), pool.group()); }
  void trim_shelves() VMM_EXCLUDES(registry_mutex_);
  static PoolSpec part_spec(const std::shared_ptr<Pool>& model, const std::string& name);
  std::shared_ptr<Pool> register_pool_of_at_most(PoolSpec spec, Budget& group) VMM_EXCLUDES(registry_mutex_);
  // allocating.cpp
  using Attempt = Ladder::Attempt;
  // What `attempt` finds, by itself or up the ladder. Both throw, or, with `refused`, answer 0.
  Address meet(Pool& pool, std::size_t bytes, std::optional<Stream> stream, const Attempt& attempt,
               std::optional<Refused>* refused = nullptr, Ladder::Beside beside = {});
  // After an attempt that lacked `shortage`.
  Address go_on(Pool& pool, std::size_t bytes, std::optional<Stream> stream, const Attempt& attempt, Shortage shortage,
                Ladder::Beside beside = {}, std::optional<Refused>* refused = nullptr);
  Address allocate_in_another_space(Pool& sealed, std::size_t bytes, Stream stream);
  // giving_back.cpp
  std::size_t enforce_limit(Budget& budget);
  void require_floor(const std::string& name, std::size_t floor_bytes) const;
  std::size_t give_idle_back(const Budget& level, const Budget& payer, std::size_t want) VMM_EXCLUDES(registry_mutex_);
  void count_sync() VMM_EXCLUDES(registry_mutex_);
  // After a free of `range` in `freed`, or of nothing that is known (nullptr).
  void enforce_limits(Pool* freed, ByteRange range) VMM_EXCLUDES(registry_mutex_);
  void note_over_limit(const Budget& budget);
  bool give_back_all_excess() VMM_EXCLUDES(registry_mutex_);
  void give_back_excess_above(Pool& pool, ByteRange range);
  bool is_look_due() VMM_EXCLUDES(registry_mutex_);
  // ending.cpp
  void wait_if_much_has_no_fence() VMM_EXCLUDES(registry_mutex_);
  bool bury(const std::shared_ptr<Pool>& pool) VMM_EXCLUDES(registry_mutex_);
  void bury_drained(const Pool* pool) VMM_EXCLUDES(registry_mutex_);
  void bury_with_group(const std::shared_ptr<Pool>& pool) VMM_EXCLUDES(registry_mutex_);
  bool bury_closed() VMM_EXCLUDES(registry_mutex_);
  bool bury_group(const Budget* key) VMM_EXCLUDES(registry_mutex_);
  bool bury_groups() VMM_EXCLUDES(registry_mutex_);
  void tend();
  bool run_passed() VMM_EXCLUDES(registry_mutex_);
  void tend_if_any_wait() {
    if ((beside_.load(std::memory_order_relaxed) & kHasEnded) != 0) [[unlikely]]
      tend();
  }
  // refusing.cpp
  [[nodiscard]] Refused refusal_of(const Ladder::Climb& climb);
  // Pools, and what each had at one moment.
  struct Surveyed {
    PoolList pools;
    std::vector<MemoryStats> stats;
  };
  [[nodiscard]] Surveyed survey(const Budget* under) const;
  [[nodiscard]] std::vector<Holder> holders_under(const Budget* refused, const Pool& asker, const Surveyed& all) const;
  template <typename Most>
  [[nodiscard]] static std::size_t to_spare(const Surveyed& all, const Pool& asker, const Most& most);
  [[nodiscard]] std::size_t could_be_spared(const Budget& level, const Pool& in, const Pool* out) const;
  // debugging.cpp
  Address allocate_in_debug_mode(Pool& pool, std::size_t bytes, Stream stream);
  void settle_watched(Pool& pool);  // outside debug mode nothing
  void report_fault() const noexcept VMM_EXCLUDES(registry_mutex_);

  Driver& driver_;
  AddressSpace& address_space_;
  int device_;
  Options options_;
  Capabilities capabilities_;
  Budget budget_;
  Budget foreign_budget_;
  Budget guest_budget_;
  Budget host_budget_;
  Budget zero_budget_;
  Budget spill_budget_;  // of all models' spilled memory
  ChunkStore store_;
  ChunkStore spill_store_;  // in host memory
  HostReserve host_reserve_;
  GuestMemory guests_;
  SecondMappings second_mappings_;
  const std::unique_ptr<WatchLog> log_;  // of debug mode
  DeviceStreams streams_;
  Clock clock_;
  std::function<DeviceStreams*(int device)> neighbours_;
  Peaks peaks_;
  mutable BlockCaches caches_;
  Ladder ladder_;
  OutOfMemory on_out_of_memory_;
  std::atomic<PoolObserver*> observer_{nullptr};
  std::atomic<std::size_t> oversize_bytes_{kUnlimited};
  std::atomic<bool> within_chunks_{false};
  std::atomic<bool> over_limit_{false};           // some limit was lowered below what is in use
  std::atomic<bool> may_be_over_{false};          // the same, true also while all are looked at
  std::atomic<std::size_t> frees_over_limit_{0};  // since all that are over were looked at
  std::atomic<bool> is_look_owed_{false};         // at limits, by after_closing()
  // What an allocation has to look at beside the threads' caches: one look for both.
  enum Beside : unsigned {
    kHasEnded = 1,  // pools or groups that are closed wait for queued work, or shelves that are too full
    kDebugMode = 2,
  };
  std::atomic<unsigned> beside_{0};
  std::atomic<Epoch> tended_{kLongAgo};  // what had passed when they were looked at
  std::atomic<std::size_t> tendings_{0};
  std::atomic<std::size_t> held_up_{1};     // pools that were looked at then, or 1
  std::atomic<bool> is_shelf_full_{false};  // one keeps more than it may, of what is still mapped somewhere

  Mutex tags_mutex_;  // one tag's space is made, or models are closed, at a time
  Mutex accessor_mutex_;
  Mutex within_mutex_;
  bool are_all_within_ VMM_GUARDED_BY(within_mutex_) = false;  // and what was there before
  mutable Mutex registry_mutex_;
  PoolRegistry registry_ VMM_GUARDED_BY(registry_mutex_);
  // Of the registry's, those that take no more requests. From one to the other they go as
  // nodes, which takes no memory.
  using Closed = std::map<const Pool*, std::shared_ptr<Pool>>;
  Closed closed_ VMM_GUARDED_BY(registry_mutex_);   // what of theirs is live keeps them
  Closed waiting_ VMM_GUARDED_BY(registry_mutex_);  // they are empty, and queued work holds them up
  std::vector<Location> accessors_ VMM_GUARDED_BY(registry_mutex_);
  struct Group {
    std::shared_ptr<Budget> budget;
    std::shared_ptr<Budget> spill;  // stands beside it
    std::shared_ptr<GroupFigures> figures;
    std::shared_ptr<const OnPressure> on_pressure{};
    bool has_ended = false;  // no more pools come to it
  };
  std::map<const Budget*, Group> groups_ VMM_GUARDED_BY(registry_mutex_);
  struct Leaving {
    Epoch last_use = kLongAgo;
    std::function<bool()> go;
  };
  std::list<Leaving> leaving_ VMM_GUARDED_BY(registry_mutex_);
  std::unordered_map<OwnerId, std::size_t> shared_bytes_ VMM_GUARDED_BY(registry_mutex_);  // of models that have some
  std::weak_ptr<ZeroChunks> zero_chunks_ VMM_GUARDED_BY(registry_mutex_);
  std::vector<std::shared_ptr<CountersBeside>> counters_beside_ VMM_GUARDED_BY(registry_mutex_);
  // What nobody counts any more or ever did: of those that have ended, what was reset of a living
  // one by itself, syncs that no pool asked for.
  Statistics counted_before_ VMM_GUARDED_BY(registry_mutex_);
  std::uint64_t times_reset_ VMM_GUARDED_BY(registry_mutex_) = 0;  // by reset_accumulated()
  mutable Mutex refusal_mutex_;                                    // a leaf
  std::optional<Refusal> last_refusal_ VMM_GUARDED_BY(refusal_mutex_);
};

}  // namespace vmm
