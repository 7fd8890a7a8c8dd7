// VirtualMemoryPool's core: one model's memory, or a part of one. It composes its space (addresses and the
// memory under them, BackedSpace), what lies there, its limit and its statistics, under
// one lock. What it cannot get by itself it asks nobody for: device_memory climbs the
// reclaim ladder.
//
// Tensors above 1 MiB, the slabs of 2 MiB that small ones are cut from, and the pages that
// the explicit allocate(offset, size) holds, all come out of the one space. Slabs are taken
// from the top, so that long-lived small blocks do not pin big chunks.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <limits>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/function_ref.h"
#include "base/sync.h"
#include "core/backing/backed_space.h"
#include "core/backing/pool_context.h"
#include "core/backing/shortage.h"
#include "core/backing/space_kind.h"
#include "core/backing/stream_table.h"
#include "core/blocks/explicit_pages.h"
#include "core/blocks/held_ranges.h"
#include "core/blocks/quarantined_blocks.h"
#include "core/blocks/slabs.h"
#include "core/cache/block_caches.h"
#include "core/limits/budget.h"
#include "core/numbers/observer.h"
#include "core/numbers/peaks.h"
#include "core/numbers/pool_counters.h"
#include "core/numbers/stats.h"
#include "core/pool/asleep.h"
#include "core/pool/free_space.h"
#include "core/pool/idle_look.h"
#include "core/pool/pool_checkpoint.h"
#include "core/pool/pool_spec.h"
#include "core/pool/region_id.h"
#include "core/pool/seal_rule.h"
#include "core/pool/sealed_piece.h"
#include "core/pool/sleeping_memory.h"
#include "core/pool/watched_blocks.h"
#include "core/streams/clock.h"
#include "core/streams/device_streams.h"
#include "core/streams/pending_frees.h"
#include "core/streams/recorded_uses.h"

namespace vmm {

class DeviceMemory;
class SharedChunks;

class Pool final : public CachedPool, public std::enable_shared_from_this<Pool>, private SpaceOwner {
 public:
  // `accessors` may access what it maps.
  Pool(const PoolContext& context, Budget& group, const PoolSpec& spec, DeviceMemory* home,
       std::vector<Location> accessors);
  // REQUIRES: ended, or no live block.
  ~Pool();

  // -- Tensors' blocks ---------------------------------------------------
  // An address of at least `bytes` > 0, aligned to 512, usable by work on
  // `stream` at once; 0 when the pool cannot by itself, and `shortage` says why.
  Address try_allocate(std::size_t bytes, Stream stream, Grant* grant, Shortage* shortage) VMM_EXCLUDES(mutex_);
  // The same out of memory that the pool has already, unused, for that stream.
  Address try_allocate_within(std::size_t bytes, Stream stream) VMM_EXCLUDES(mutex_);
  // The same at exactly this address. Throws InvalidRangeError where it is not
  // in the pool or not aligned to 512, AlreadyMappedError where it is taken.
  Address try_allocate_at(Address address, std::size_t bytes, Stream stream, Grant* grant, Shortage* shortage)
      VMM_EXCLUDES(mutex_);
  // Frees a block of try_allocate(); false when `address` is none of its.
  // At once reusable on its own stream; after record_stream() once the work
  // queued on those streams now is done.
  // `drained` is set when that was the last block of a closed pool; the
  // caller then has no right to touch the pool any more but to bury it.
  bool free(Address address, bool* drained) VMM_EXCLUDES(mutex_);
  // `stream` also uses the block that `address` lies in. Ignored for its own stream. `device`
  // is the stream's where that is not the pool's. REQUIRES: the stream is alive,
  // and stays so until the block is freed; torch asks the same.
  void record_stream(Address address, Stream stream, DeviceStreams* device = nullptr) VMM_EXCLUDES(mutex_);
  // Bytes of the live block at `address`, or 0. No lock: whoever asks owns it.
  [[nodiscard]] std::size_t block_size(Address address) const;
  // What was asked for there: bytes, and the stream. Nothing where it is no live block.
  struct Asked {
    std::size_t bytes = 0;
    Stream stream = nullptr;
  };
  [[nodiscard]] std::optional<Asked> asked_at(Address address) const VMM_EXCLUDES(mutex_);

  [[nodiscard]] std::vector<Address> live_addresses() const VMM_EXCLUDES(mutex_);
  // The chunks under [address, address + bytes), by address: for tests.
  [[nodiscard]] std::vector<ChunkView> chunks_under(Address address, std::size_t bytes) const VMM_EXCLUDES(mutex_);
  // The same for another process: from now on they serve no other model.
  [[nodiscard]] std::vector<ChunkView> chunks_to_export(Address address, std::size_t bytes) VMM_EXCLUDES(mutex_);

  // Adds the chunks under [address, address + bytes), by address, which are to be mapped
  // again. Throws InvalidArgumentError where the stretch does not begin and end with a
  // chunk.
  void share_chunks(Address address, std::size_t bytes, SharedChunks* out) VMM_EXCLUDES(mutex_);
  // What the chunks under `pieces` allow everybody from now on; all or none. All that lives
  // in these chunks has to be among the pieces, be it of the same tensor. They are explicit
  // pages of one tensor's addresses, or blocks of a tag's space, which takes no requests
  // while any of it is read-only. Returns the stretches that allowed something else before, by offset.
  // Throws InvalidArgumentError where it is neither, DriverError. REQUIRES, for
  // Access::read: no queued work writes to it.
  // `wait_for` is set, and nothing done, where a tag's memory was freed meanwhile and that
  // has not passed: the caller waits, and asks again.
  std::vector<ByteRange> set_memory_access(const std::vector<SealedPiece>& pieces, Access access, Epoch* wait_for)
      VMM_EXCLUDES(mutex_);
  // What such a call has made read-only is writable again.
  void undo_read_only(const std::vector<ByteRange>& stretches) noexcept VMM_EXCLUDES(mutex_);
  // Throws InvalidArgumentError where set_memory_access() would.
  void require_whole_chunks(const std::vector<SealedPiece>& pieces, Access access) VMM_EXCLUDES(mutex_);
  // A tag's space, where nothing is sealed any more but what is idle: that goes to the
  // group's shelf, and the space takes requests again. Returns whether it does.
  bool reopen() VMM_EXCLUDES(mutex_);
  // Whether nobody may write to any byte of it.
  [[nodiscard]] bool is_read_only(Address address, std::size_t bytes) const VMM_EXCLUDES(mutex_);
  // Whether nobody may write to some chunk under it.
  [[nodiscard]] bool has_read_only(Address address, std::size_t bytes) const VMM_EXCLUDES(mutex_);
  // Whether that is so at the address, for a thread that may have been stopped anywhere. False,
  // too, where the pool is being changed just now.
  [[nodiscard]] bool is_read_only_now(Address address) const noexcept VMM_NO_THREAD_SAFETY_ANALYSIS;

  // -- Debug mode ----------------------------------------------------------
  // As try_allocate(), of a block that is watched, where the pool can; `stack`: where.
  // REQUIRES: debug mode is on.
  Address try_allocate_watched(std::size_t bytes, Stream stream, const std::shared_ptr<const std::string>& stack,
                               Grant* grant, Shortage* shortage) VMM_EXCLUDES(mutex_);
  // Looks at the patterns of freed blocks whose fences have passed, and gives their memory
  // on. Waits for nothing but its own look. Returns whether there were any.
  bool settle_watched() VMM_EXCLUDES(mutex_);
  // Some thread looks at patterns of it now: what was freed cannot be had meanwhile.
  [[nodiscard]] bool is_being_judged() const VMM_EXCLUDES(mutex_);
  // Waits for all work and looks at the patterns of those that live.
  Status check_watched() VMM_EXCLUDES(mutex_);
  // The first address from here on with memory, or the end of the pool's.
  [[nodiscard]] Address memory_from(Address address) const VMM_EXCLUDES(mutex_);

  // -- Asleep (core/sleep moves the contents) ---------------------------------
  // No request is taken from now on, and no memory leaves but by let_go(). Throws
  // NotAvailableError in debug mode, VmmError where a transfer is on its way. Of one that is awake
  // nothing is done where it is entered more often than so many times, those of who asks.
  SleepBegun begin_sleep(int times_entered_here = std::numeric_limits<int>::max()) VMM_EXCLUDES(mutex_);
  // A transfer of one that is asleep begins: true. False: it is awake. Throws VmmError where
  // one is on its way.
  bool begin_transfer() VMM_EXCLUDES(mutex_);
  void end_transfer() VMM_EXCLUDES(mutex_);
  // What is to leave, by offset, once all that was queued before begin_sleep() has passed.
  // Gives what is idle to the group's shelf.
  // `keeps_unchanged`: what a former sleep has left in a backup, and nobody has been able to
  // write to since, stays there and is not copied again.
  // Chunks under blocks that one of `everybodys` lies in stay.
  std::vector<MovedChunk> plan_sleep(bool keeps_unchanged, std::span<const Address> everybodys = {})
      VMM_EXCLUDES(mutex_);
  // What is there for that goes. Returns whether there was any.
  bool forget_unchanged() VMM_EXCLUDES(mutex_);
  // The chunk goes to the group's shelf, and `kept` of it are in the backup. One that others
  // have mapped meanwhile stays. Where the driver refuses, nothing has changed. REQUIRES: no
  // queued work uses it.
  Status let_go(const MovedChunk& leaving, std::span<const KeptRange> kept) VMM_EXCLUDES(mutex_);
  // Undoes map_collected(), as far as the driver lets it. REQUIRES: nothing uses it.
  Status let_go_again(const MovedChunk& place) VMM_EXCLUDES(mutex_);
  // What is to come back: slabs first, as they were made, and the rest by offset; where
  // nothing is used any more, nothing does.
  // `joins`: in fewer chunks than it left in, where it may.
  std::vector<MovedChunk> plan_wake(bool joins) VMM_EXCLUDES(mutex_);
  // Chunks for these places, all or none: an address, or 0 and why not, as try_allocate().
  Address try_collect(std::span<const MovedChunk> places, Grant* grant, Shortage* shortage) VMM_EXCLUDES(mutex_);
  // Those that have not been mapped are the group's again.
  void put_back_collected() VMM_EXCLUDES(mutex_);
  // Maps what was collected for it, emptied on the stream where no content comes to it. With
  // `wait_for` set nothing has been done: the caller waits, and asks again. Where it fails some
  // may be mapped: see let_go_again().
  Status map_collected(const MovedChunk& place, const StreamUse& filled_by, Epoch* wait_for) VMM_EXCLUDES(mutex_);
  // Of what `range` is to hold, that which is wanted.
  [[nodiscard]] std::vector<KeptRange> kept_in(ByteRange range) const VMM_EXCLUDES(mutex_);
  // They have come: what was read-only is so again.
  Status arrived(const MovedChunk& chunk) VMM_EXCLUDES(mutex_);
  // As before begin_sleep(). REQUIRES: nothing is missing.
  void end_sleep() VMM_EXCLUDES(mutex_);
  // The same where it held nothing when it fell asleep, and no transfer is on its way.
  void end_empty_sleep() VMM_EXCLUDES(mutex_);
  [[nodiscard]] bool is_asleep() const VMM_EXCLUDES(mutex_);
  // How often it is entered: so many are about to make tensors in it, on whichever thread.
  void note_entered() { entered_.fetch_add(1, std::memory_order_relaxed); }
  void note_left() { entered_.fetch_sub(1, std::memory_order_release); }
  [[nodiscard]] int times_entered() const { return entered_.load(std::memory_order_acquire); }
  // AsleepError where it takes no requests for that, nor do new parts of it.
  void require_taking() const VMM_EXCLUDES(mutex_);
  // AsleepError where any of [address, address + bytes) has no memory because it sleeps.
  void require_there(Address address, std::size_t bytes) const VMM_EXCLUDES(mutex_);
  // Where what goes now will be, in words. `falls_asleep`: all of it was awake before.
  void note_place(const std::string& place, bool falls_asleep) VMM_EXCLUDES(mutex_);
  // Copies what is kept of [address, address + size) to plain memory; false: not all of it is.
  bool read_kept(Address address, std::size_t size, std::byte* to) VMM_EXCLUDES(mutex_);
  // Of the backups that contents of it are in, or, while it is on its way, go to.
  [[nodiscard]] std::set<std::string> places_of_backups() const VMM_EXCLUDES(mutex_);
  // Backup::forget_name() of these.
  void forget_names_of_backups() const noexcept VMM_EXCLUDES(mutex_);
  [[nodiscard]] AsleepWhere asleep_where() const VMM_EXCLUDES(mutex_);

  // -- A CUDA graph's memory ------------------------------------------------
  // While pinned, no memory moves within the pool or leaves it, and it grows by
  // fresh chunks only: captured work uses the addresses whenever the graph is
  // replayed, on whatever stream.
  void pin() VMM_EXCLUDES(mutex_);
  // What the graphs left queued, on any stream, comes before whatever the memory
  // is used for next.
  void unpin() VMM_EXCLUDES(mutex_);
  // Whether none of its memory may have been anybody's before.
  [[nodiscard]] bool takes_fresh_only() const VMM_EXCLUDES(mutex_) { return kind_.no_split || is_pinned(); }
  [[nodiscard]] bool is_pinned() const VMM_EXCLUDES(mutex_);
  // The live blocks, and making them the live blocks again, each at its
  // address: `freed` are those that were live, `allocated` those that are now.
  // Throw VmmError when a freed block still waits for recorded streams, and when
  // the pool has ended; restore() also when memory of the checkpoint has left it, AsleepError
  // when it sleeps and would change.
  [[nodiscard]] PoolCheckpoint checkpoint() VMM_EXCLUDES(mutex_);
  // Throws where restore() would, of what is known before it changes anything.
  void require_restorable(const PoolCheckpoint& target) VMM_EXCLUDES(mutex_);
  void restore(const PoolCheckpoint& target, std::vector<Address>* freed, std::vector<Address>* allocated)
      VMM_EXCLUDES(mutex_);

  // -- Explicit pages (offset, size in bytes; they cover whole pages) ------
  // The address of `offset`. Throw InvalidRangeError, AlreadyMappedError,
  // NotMappedError.
  // Ordered on `stream`: what the pages held of another model is zeroed there.
  Address try_allocate_pages(std::size_t offset, std::size_t size, Stream stream, Grant* grant, Shortage* shortage)
      VMM_EXCLUDES(mutex_);
  // The same at the first free span.
  Address try_allocate_first(std::size_t size, Stream stream, Grant* grant, Shortage* shortage) VMM_EXCLUDES(mutex_);
  // StillInUseError for pages that are held.
  void deallocate_pages(std::size_t offset, std::size_t size) VMM_EXCLUDES(mutex_);
  // Somebody looks at [offset, offset + size), which allocate() holds: a tensor.
  // Returns its address. Until unhold_pages() these pages stay, in a pool that
  // is closed by force too. Throw InvalidRangeError, NotMappedError.
  Address hold_pages(std::size_t offset, std::size_t size) VMM_EXCLUDES(mutex_);
  // Never throws for a held stretch. True when nothing is left in a closed
  // pool: the caller buries it.
  bool unhold_pages(std::size_t offset, std::size_t size) VMM_EXCLUDES(mutex_);
  // The stretches of [offset, offset + size) that allocate() holds, by offset.
  [[nodiscard]] std::vector<ByteRange> held_pages(std::size_t offset, std::size_t size) const VMM_EXCLUDES(mutex_);
  // Every page of the range is in use (by allocate() or a live tensor).
  [[nodiscard]] bool is_mapped(std::size_t offset, std::size_t size) const VMM_EXCLUDES(mutex_);

  // -- Giving back ---------------------------------------------------------
  // Moves idle chunks above its floor into `grant` (charged to its payer): those that come
  // first, then what is idle on any stream, what is used by nobody any more first: their last
  // use travels with the chunks. Nothing is waited for. Returns the bytes moved; `refused` is
  // the limit that would not let them in. `is_gathered`: what threads keep of it has been
  // given back.
  std::size_t surrender(WantedChunks wanted, bool is_gathered, Grant& grant, Budget** refused) VMM_EXCLUDES(mutex_);
  // Whether it may have `bytes` idle that its floors leave to `payer`, and chunks that do for
  // one of these, at a glance.
  [[nodiscard]] bool may_give(const Budget& payer, std::size_t bytes, std::span<const WantedChunks> any_of) const
      VMM_EXCLUDES(mutex_);
  // What is dormant in `place`, of chunks that others had last.
  [[nodiscard]] std::vector<DormantMappings::Dormant> dormant_of_others(ByteRange place) const VMM_EXCLUDES(mutex_);
  // Whether `bytes` addresses in a row have no live block, be they idle, bare or former ones. Walks.
  [[nodiscard]] bool could_place(std::size_t bytes) const VMM_EXCLUDES(mutex_);
  // Puts idle chunks on the group's shelf until at most `keep` idle bytes stay.
  // Returns the bytes moved.
  std::size_t shed(std::size_t keep) VMM_EXCLUDES(mutex_);
  using FreedAt = BackedSpace::FreedAt;
  // The same, of what was freed first before anything else.
  std::size_t shed_oldest(std::size_t keep, const FreedAt& freed_at) VMM_EXCLUDES(mutex_);
  // The same of what queued work uses no more, and of at most `most` bytes: a chunk
  // that is larger than what is left of them stays. Waits for nothing.
  std::size_t shed_unused(std::size_t most, const FreedAt& freed_at) VMM_EXCLUDES(mutex_);
  // Puts idle chunks there until about `want` bytes have been moved. `beneath`: none that one of the floors
  // beneath it keeps.
  std::size_t shed_about(std::size_t want, const Budget* beneath) VMM_EXCLUDES(mutex_);
  // Where a free of `range` may have made chunks idle: there, and where what had waited ends
  // with this call.
  std::vector<ByteRange> came_free_with(ByteRange range) VMM_EXCLUDES(mutex_);
  // As shed_about(), of chunks that reach into `freed`: it looks at no others.
  std::size_t shed_in(std::span<const ByteRange> freed, std::size_t want, const Budget* beneath) VMM_EXCLUDES(mutex_);
  // Finishes what queued work held up, as far as it is done: frees whose streams
  // have passed, former addresses that nothing uses any more. Returns whether
  // anything came free.
  bool settle() VMM_EXCLUDES(mutex_);
  // Blocks the calling thread until no recorded stream uses what was freed until now; what cannot
  // be waited for stays, and all of it while something is captured.
  void wait_for_recorded() VMM_EXCLUDES(mutex_);
  // Drops all explicit pages that nobody holds (a forced unregister). Whether there were any.
  bool drop_pages() VMM_EXCLUDES(mutex_);

  // -- Numbers ---------------------------------------------------------------
  [[nodiscard]] MemoryStats memory_stats() VMM_EXCLUDES(mutex_);  // walks the large free blocks
  [[nodiscard]] MemoryStats memory_stats_locked() VMM_REQUIRES(mutex_);
  [[nodiscard]] Statistics statistics() const VMM_EXCLUDES(mutex_);  // cheap
  [[nodiscard]] std::vector<SegmentSnapshot> snapshot(SnapshotGrain grain = SnapshotGrain::run) const
      VMM_EXCLUDES(mutex_);  // walks
  // Before numbers are told: finishes the frees whose streams have passed (a request
  // that a thread's cache meets does not look), and brings inactive_split and
  // inactive_split_bytes up to date. Walks the large free blocks, never the small ones.
  void refresh_numbers() VMM_EXCLUDES(mutex_);
  [[nodiscard]] std::size_t physical_bytes() const VMM_EXCLUDES(mutex_);
  [[nodiscard]] std::size_t idle_bytes() VMM_EXCLUDES(mutex_);  // walks the large free blocks
  // Live tensors' blocks and explicit pages.
  [[nodiscard]] std::size_t live_bytes() const VMM_EXCLUDES(mutex_);
  [[nodiscard]] std::size_t live_blocks() const VMM_EXCLUDES(mutex_);
  // How often all its free blocks have been looked through, for tests.
  [[nodiscard]] std::size_t times_walked() const VMM_EXCLUDES(mutex_);
  // Streams that it keeps space for, for tests.
  [[nodiscard]] std::size_t streams_known() const VMM_EXCLUDES(mutex_);
  void count_retry() VMM_EXCLUDES(mutex_);
  void count_oom() VMM_EXCLUDES(mutex_);
  void count_sync() VMM_EXCLUDES(mutex_);
  void reset_peaks() VMM_EXCLUDES(mutex_);
  // Returns what was accumulated, without what there is now.
  Statistics reset_accumulated() VMM_EXCLUDES(mutex_);
  // Proves that blocks tile, counters add up and no chunk stands twice.
  // Aborts with the values where they do not. Walks everything.
  void check() const VMM_EXCLUDES(mutex_);

  [[nodiscard]] const std::string& name() const { return name_; }
  // No other pool of the process ever has it.
  [[nodiscard]] OwnerId id() const { return id_; }
  [[nodiscard]] std::size_t capacity() const { return kind_.capacity; }
  [[nodiscard]] std::size_t page_size() const { return kind_.page; }
  // Every chunk is exactly one page (page_size was given).
  [[nodiscard]] bool has_uniform_chunks() const { return kind_.is_uniform; }
  // The addresses of one tensor.
  [[nodiscard]] bool is_range() const { return kind_.is_range(); }
  [[nodiscard]] int device() const { return context_.device; }
  [[nodiscard]] Budget& budget() { return budget_; }
  [[nodiscard]] const Budget& budget() const { return budget_; }
  [[nodiscard]] Budget& group() { return group_; }
  // Where its chunks come from, and rest.
  [[nodiscard]] ChunkStore& store() const { return context_.store; }
  [[nodiscard]] DeviceMemory* home() const { return home_; }
  // The model that this pool is a part of, or itself.
  [[nodiscard]] Pool& model() { return model_ == nullptr ? *this : *model_; }
  [[nodiscard]] const Pool& model() const { return model_ == nullptr ? *this : *model_; }
  [[nodiscard]] std::shared_ptr<Pool> shared_model() { return is_part() ? model_ : shared_from_this(); }
  [[nodiscard]] bool is_part() const { return model_ != nullptr; }
  // What its memory is called, of whatever part; empty: nothing.
  [[nodiscard]] const std::string& tag() const { return tag_; }
  // A part for a tag's tensors: its blocks are as a model's own.
  [[nodiscard]] bool is_tag_space() const { return is_part() && is_ordinary(); }
  // A model or a tag's space: no private pool of torch's, and not one tensor's addresses.
  [[nodiscard]] bool is_ordinary() const { return kind_.is_ordinary(); }
  // A private pool of torch's, or a part of one.
  [[nodiscard]] bool is_private() const { return !(region_ == RegionId{}); }
  // A part whose memory is the host's: what of its model found none on the device.
  [[nodiscard]] bool is_spill() const { return kind_.is_spill(); }
  [[nodiscard]] bool is_mem_pool() const { return kind_.kind == PoolKind::mem_pool; }
  // Whether the model may have such a part; of the model itself.
  [[nodiscard]] bool spills() const { return spills_.load(std::memory_order_relaxed); }
  void set_spills(bool spills) { spills_.store(spills, std::memory_order_relaxed); }
  // A tag's space of which some memory is read-only.
  [[nodiscard]] bool is_sealed() const { return life_.load(std::memory_order_acquire) == Life::sealed; }
  // Whether each block is to lie within one chunk.
  [[nodiscard]] bool keeps_within_chunks() const { return kind_.keeps_within_chunks(); }
  [[nodiscard]] const RegionId& region() const { return region_; }
  // The model's, and so its parts': see Budget.
  [[nodiscard]] std::size_t floor() const { return model().budget_.floor(); }
  [[nodiscard]] int priority() const { return model().budget_.priority(); }
  // Bytes that the model, its parts included, holds above its floor.
  [[nodiscard]] std::size_t bytes_above_floor() const;
  // For a model that gets its first part: from now on the peaks of all of them
  // together are followed.
  void follow_family_peaks() VMM_EXCLUDES(mutex_);
  // What a part that has ended had counted.
  void inherit(const Statistics& of_part) VMM_EXCLUDES(mutex_);
  [[nodiscard]] Statistics inherited() const VMM_EXCLUDES(mutex_);
  // The peaks of the model and its parts together, or nullptr: it has no parts.
  [[nodiscard]] Peaks* family_peaks() const { return family_peaks_.load(std::memory_order_acquire); }
  // Blocks lie within one chunk each from now on: no snapshot of chunks shows those
  // over whose borders live ones lie, and segment_free tells of them only where
  // segment_alloc did.
  void withhold_broken_chunks() VMM_EXCLUDES(mutex_);
  // `who` may access all that is mapped now and later.
  Status add_accessor(Location who) VMM_EXCLUDES(mutex_);
  // InvalidArgumentError, which names the pool, when it is closed.
  void require_open() const;
  // The pool takes no more requests (require_open() throws); it ends when its
  // last block is freed.
  void close() VMM_EXCLUDES(mutex_);
  // REQUIRES: no thread keeps blocks of it, and none can before it is locked.
  void close_locked() VMM_REQUIRES(mutex_) {
    life_.store(Life::closed, std::memory_order_release);
    is_cached_.store(false, std::memory_order_relaxed);
    budget_.set_floor(0);  // it grows no more
  }
  // Of a closed pool without live blocks: gives back all memory at once and
  // then the addresses, as soon as nothing uses them. False: something is still
  // live, or queued work uses it; it may be called again.
  bool end() VMM_EXCLUDES(mutex_);
  [[nodiscard]] bool is_closed() const { return life_.load(std::memory_order_acquire) == Life::closed; }
  [[nodiscard]] bool contains(Address address) const { return address >= base_ && address < base_ + kind_.capacity; }
  // For AllLocked.
  Mutex& mutex() VMM_NO_THREAD_SAFETY_ANALYSIS { return mutex_; }
  std::atomic<bool>& stands_still() { return stands_still_; }
  // As long as this stays the same, nothing here has changed, but for what
  // changes by itself: that waits for queued work.
  [[nodiscard]] std::uint64_t times_locked() const VMM_NO_THREAD_SAFETY_ANALYSIS { return mutex_.times_locked(); }
  [[nodiscard]] bool changes_by_itself_locked() const VMM_REQUIRES(mutex_);
  // The last rung, with every pool locked: gives idle chunks (down to the floors that
  // `payer` does not stand under) and their charge back to the driver, until `limit`
  // (nullptr: never) has room for `want` bytes of the payer's. At last, under a limit, one that
  // lies partly above the floors: what they keep of it stays reserved. Returns the idle bytes
  // that queued work may still use.
  // REQUIRES: no thread keeps blocks (BlockCaches::Still).
  std::size_t melt_locked(const Budget* limit, std::size_t want, const Budget& payer) VMM_REQUIRES(mutex_);
  // REQUIRES for both: no thread keeps blocks (BlockCaches::Still).
  [[nodiscard]] std::size_t live_blocks_locked() const VMM_REQUIRES(mutex_) {
    return directory_->size() + pages_.size();
  }
  [[nodiscard]] std::size_t live_bytes_locked() const VMM_REQUIRES(mutex_);

 private:
  using Request = BackedSpace::Request;
  using Piece = BackedSpace::Piece;

  static SpaceKind kind_of(const PoolContext& context, const PoolSpec& spec);

  // locking.cpp
  // Held to look at the pool, by an observer too.
  class VMM_SCOPED_CAPABILITY ReadLock {
   public:
    explicit ReadLock(const Pool& pool) VMM_ACQUIRE(pool.mutex_) VMM_NO_THREAD_SAFETY_ANALYSIS;
    ~ReadLock() VMM_RELEASE() VMM_NO_THREAD_SAFETY_ANALYSIS;
    ReadLock(const ReadLock&) = delete;
    ReadLock& operator=(const ReadLock&) = delete;

   private:
    const Pool& pool_;
    bool locked_ = false;
  };
  // Held to change the pool. First what threads keep of it is given back: they may keep
  // some again at once, so this is for who may find too little, not for exact numbers.
  class VMM_SCOPED_CAPABILITY GatheredLock {
   public:
    explicit GatheredLock(const Pool& pool) VMM_ACQUIRE(pool.mutex_);
    ~GatheredLock() VMM_RELEASE();
    GatheredLock(const GatheredLock&) = delete;
    GatheredLock& operator=(const GatheredLock&) = delete;

   private:
    const Pool& pool_;
  };
  // The same, and as long as it is held threads neither take nor keep blocks of the pool.
  class VMM_SCOPED_CAPABILITY StillLock {
   public:
    StillLock(const Pool& pool, BlockCaches::Kept kept) VMM_ACQUIRE(pool.mutex_);
    ~StillLock() VMM_RELEASE();
    StillLock(const StillLock&) = delete;
    StillLock& operator=(const StillLock&) = delete;

   private:
    const Pool& pool_;
    const BlockCaches::Still still_;  // before the pool's lock, and after it
  };

  // cached.cpp: what threads' caches ask of it
  void take_back(Block* first) override VMM_EXCLUDES(mutex_);
  void absorb(const BlockCounts& came, BlockSeat& of_pool, BlockSeat& of_device) override VMM_EXCLUDES(mutex_);
  Peaks& own_peaks() override { return own_peaks_; }
  [[nodiscard]] Peaks* peaks_of_family() const override { return model().family_peaks(); }
  bool may_keep(StreamTag tag) VMM_REQUIRES(mutex_);
  Shard* shard_for(BlockCaches::Mine& mine, StreamTag tag, std::size_t size, StreamTag* add_shard) VMM_REQUIRES(mutex_);
  [[nodiscard]] Block* live_at(Address address) const;
  [[nodiscard]] Block* live_around(Address address) VMM_REQUIRES(mutex_);

  // pool.cpp: the path beneath the caches
  bool takes_requests(Shortage* shortage) const VMM_REQUIRES(mutex_);
  // False where a limit above it was lowered below what is held: nothing is handed out until that
  // fits, though free space in chunks that stay could take it. Else these would stay for ever.
  // The device's own limit, torch's fraction, refuses new memory alone, as natively; and a graph's
  // memory goes back to nobody while the graph lives, so a capture goes on in what it has.
  bool keeps_limits(Shortage* shortage) VMM_REQUIRES(mutex_);
  bool can_never_hold(std::size_t bytes, Shortage* shortage) const;
  Address allocate_once(std::size_t bytes, Stream stream, bool is_gathered, Grant* grant, Shortage* shortage,
                        StreamTag* add_shard) VMM_EXCLUDES(mutex_);
  void enter_in_directory(Block* block) VMM_REQUIRES(mutex_);  // pool.cpp alone, as free_block(): they are inline
  // A block begins: found by its address from now on, and counted.
  void enter(Block* block, std::size_t requested) VMM_REQUIRES(mutex_);
  Block* find_block(std::size_t size, StreamTag tag, bool is_gathered, const BlockCaches::Mine& mine, Grant* grant,
                    Shortage* shortage) VMM_REQUIRES(mutex_);
  Block* allocate_small(const Request& request, Grant* grant, Shortage* shortage) VMM_REQUIRES(mutex_);
  void free_block(Block* block, Epoch epoch) VMM_REQUIRES(mutex_);
  void free_slab(const Slabs::Emptied& emptied) VMM_REQUIRES(mutex_);
  // What came free is added to `ended`, unless that is nullptr.
  void give_up_spare_slabs(std::vector<ByteRange>* ended) VMM_REQUIRES(mutex_);
  bool settle_locked(std::vector<ByteRange>* ended = nullptr) VMM_REQUIRES(mutex_);
  bool finish_passed(std::vector<ByteRange>* ended = nullptr) VMM_REQUIRES(mutex_);
  void reclassify(const Block& slab, SizeClass from, SizeClass to) VMM_REQUIRES(mutex_);
  void count_slab(const Block& slab, SizeClass from, SizeClass to) VMM_REQUIRES(mutex_);
  void begin_block(Block* block, std::size_t requested) VMM_REQUIRES(mutex_);
  void end_block(const Block& block) VMM_REQUIRES(mutex_);
  void finish_free(Block* block, Epoch epoch) VMM_REQUIRES(mutex_);
  void release_block(Block* block, Epoch epoch) VMM_REQUIRES(mutex_);
  void take_back_locked(Block* first) VMM_REQUIRES(mutex_);
  // `shard`: one of the thread's here, or nullptr.
  void forget_large(const BlockCaches::Mine& mine, Shard* shard) VMM_REQUIRES(mutex_);
  [[nodiscard]] bool is_oversize(std::size_t bytes) const {
    return bytes >= context_.oversize_bytes.load(std::memory_order_relaxed);
  }
  // What a request takes. REQUIRES: bytes <= capacity().
  [[nodiscard]] std::size_t rounded(std::size_t bytes) const {
    return align_up(std::max<std::size_t>(bytes, 1), kind_.no_split ? kind_.page : kBlockAlignment);
  }
  void make_slab(Block* slab) VMM_REQUIRES(mutex_);
  void make_slabs(Block* slabs) VMM_REQUIRES(mutex_);
  void tell(PoolEvent event, std::size_t offset, std::size_t bytes, Stream stream) const VMM_REQUIRES(mutex_);

  // What its space asks of it, and tells it.
  void free_up_space() override VMM_REQUIRES(mutex_);
  void give_up_spare_slabs() override VMM_REQUIRES(mutex_);
  std::size_t peak_with(std::size_t bytes) override VMM_REQUIRES(mutex_);
  void mapped(const PlacedChunk& placement, Stream stream) override VMM_REQUIRES(mutex_);
  void unmapped(const PlacedChunk& placement) override VMM_REQUIRES(mutex_);
  void addresses_go(ByteRange range) override VMM_REQUIRES(mutex_);
  void addresses_stay(ByteRange range) override VMM_REQUIRES(mutex_);

  // numbers.cpp
  [[nodiscard]] TakenBytes taken_bytes() const VMM_REQUIRES(mutex_);
  [[nodiscard]] FreeSpace free_space() const VMM_REQUIRES(mutex_) {
    return vmm::free_space(space_, slabs_, taken_bytes());
  }
  void set_inactive_split(const FreeSpace& free) VMM_REQUIRES(mutex_);

  // checking.cpp: check(), in steps
  struct Walked;
  void count(const Block& block, Walked* walked) const VMM_REQUIRES(mutex_);
  void check_memory_under(const Block& block, Walked* walked) const VMM_REQUIRES(mutex_);
  void check_lists(const Walked& walked) const VMM_REQUIRES(mutex_);
  std::size_t check_chunks() const VMM_REQUIRES(mutex_);  // bytes of them
  void check_statistics(const Walked& walked, std::size_t mapped) const VMM_REQUIRES(mutex_);

  // seals.cpp
  [[nodiscard]] SealRule seal_rule() const VMM_REQUIRES(mutex_);
  [[nodiscard]] Epoch last_free() const VMM_REQUIRES(mutex_);
  void note_sealed() VMM_REQUIRES(mutex_);

  // sharing.cpp
  using EachChunk = FunctionRef<void(Address, Chunk&)>;
  void for_each_chunk_under(Address address, std::size_t bytes, const EachChunk& each) const VMM_REQUIRES(mutex_);

  // watched.cpp
  Epoch last_use_before(std::size_t bytes, StreamTag tag) const VMM_REQUIRES(mutex_);
  Address allocate_watched_locked(std::size_t bytes, Stream stream, const std::shared_ptr<const std::string>& stack,
                                  Grant* grant, Shortage* shortage) VMM_REQUIRES(mutex_);

  // asleep.cpp
  void end_sleep_locked(std::unique_ptr<Asleep>* ended, Unchanged* former) VMM_REQUIRES(mutex_);
  void begin_transfer_locked(bool is_going) VMM_REQUIRES(mutex_);
  void count_slabs(SizeClass from, SizeClass to) VMM_REQUIRES(mutex_);
  void require_awake() const VMM_REQUIRES(mutex_);  // AsleepError

  // checkpoint.cpp
  [[nodiscard]] PoolCheckpoint checkpoint_locked() VMM_REQUIRES(mutex_);
  bool must_change_for(const PoolCheckpoint& target) VMM_REQUIRES(mutex_);
  void require_settled(const char* doing) VMM_REQUIRES(mutex_);

  // pages.cpp
  [[nodiscard]] std::vector<ByteRange> mapped_in(ByteRange range) const VMM_REQUIRES(mutex_);
  Address take_pages(ByteRange range, Stream stream, Grant* grant, Shortage* shortage) VMM_REQUIRES(mutex_);
  [[nodiscard]] ByteRange page_range(std::size_t offset, std::size_t size) const;
  [[nodiscard]] std::size_t first_unfree(ByteRange range) const VMM_REQUIRES(mutex_);
  void require_pages(ByteRange range, const std::string& doing) const VMM_REQUIRES(mutex_);
  void free_pages(ByteRange range) VMM_REQUIRES(mutex_);
  void quarantine(ByteRange range, Epoch epoch) VMM_REQUIRES(mutex_);
  void end_quarantine(QuarantinedBlocks::Freed freed, StreamTag tag) VMM_REQUIRES(mutex_);
  bool end_passed_quarantines() VMM_REQUIRES(mutex_);
  bool make_way(std::size_t at, StreamTag tag, Shortage* shortage) VMM_REQUIRES(mutex_);

  PoolContext context_;
  const SpaceKind kind_;
  std::string name_;
  OwnerId id_;
  Budget& group_;
  const std::shared_ptr<const Budget> keeps_group_;  // nullptr: it is the device's own
  Budget budget_;
  DeviceMemory* home_;
  const std::shared_ptr<Pool> model_;
  const Budget::Sharer sharer_;  // unless it is a model's part
  const RegionId region_;
  const std::string tag_;
  std::atomic<bool> spills_{false};
  std::atomic<int> entered_{0};
  const std::size_t most_;  // bytes that it could ever hold: its addresses, or all of the device's memory
  enum class Life : std::uint8_t { open, sealed, asleep, closed };
  std::atomic<Life> life_{Life::open};  // one look for all of it at a request

  mutable std::atomic<bool> stands_still_{false};  // see Telling

  mutable Mutex mutex_;
  [[nodiscard]] IdleLook::Moment moment() const VMM_REQUIRES(mutex_);
  struct Candidates;  // for surrender()
  Candidates candidates_for(const WantedChunks& wanted, IdleLook* look) VMM_REQUIRES(mutex_);
  std::size_t hand_to(Grant& grant, const IdleChunk& chosen, Budget** refused) VMM_REQUIRES(mutex_);
  IdleLook look_ VMM_GUARDED_BY(mutex_);
  BlockArena arena_ VMM_GUARDED_BY(mutex_);
  Slabs slabs_ VMM_GUARDED_BY(mutex_);
  StreamTable streams_ VMM_GUARDED_BY(mutex_);
  BackedSpace space_ VMM_GUARDED_BY(mutex_);
  ExplicitPages pages_ VMM_GUARDED_BY(mutex_);
  HeldRanges held_ VMM_GUARDED_BY(mutex_);  // of explicit pages
  RecordedUses recorded_uses_ VMM_GUARDED_BY(mutex_);
  PendingFrees pending_ VMM_GUARDED_BY(mutex_);
  QuarantinedBlocks quarantined_ VMM_GUARDED_BY(mutex_);  // freed pages
  WatchedBlocks watched_ VMM_GUARDED_BY(mutex_);
  SleepingMemory sleeping_ VMM_GUARDED_BY(mutex_);
  std::size_t pending_bytes_ VMM_GUARDED_BY(mutex_) = 0;
  std::uint64_t split_as_of_ VMM_GUARDED_BY(mutex_) = 0;  // times_locked() when inactive_split was worked out
  Peaks own_peaks_;
  std::unique_ptr<Peaks> family_peaks_owner_ VMM_GUARDED_BY(mutex_);  // of a model with parts
  std::atomic<Peaks*> family_peaks_{nullptr};                         // the same
  PoolCounters counters_ VMM_GUARDED_BY(mutex_);
};

}  // namespace vmm
