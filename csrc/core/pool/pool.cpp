// Pool: blocks beneath the threads' caches, from request to free.
#include "core/pool/pool.h"

#include <algorithm>

#include "base/check.h"
#include "base/errors.h"

namespace vmm {

namespace {

// Former mappings that a pool keeps at most before a request waits for the clock.
// Fewer gather as long as ticks pass by themselves; with streams on which no
// fence can stand they never do, and each costs its addresses and a walk.
constexpr std::size_t kMostRetired = 1024;

}  // namespace

// Throws where it is closed.
bool Pool::takes_requests(Shortage* shortage) const {
  if (life_.load(std::memory_order_acquire) == Life::open) [[likely]]
    return true;
  require_open();
  require_awake();
  shortage->is_sealed = true;
  return false;
}

bool Pool::keeps_limits(Shortage* shortage) {
  if (!context_.may_be_over.load(std::memory_order_relaxed)) [[likely]]
    return true;
  if (space_.is_pinned()) return true;
  for (Budget* level = &budget_; level->parent() != nullptr; level = level->parent()) {
    if (level->excess() == 0) continue;
    *shortage = {0, level, {}};
    return false;
  }
  return true;
}

// More than it has addresses for, or than the device has memory: no attempt is made, which
// would fill the device with chunks before the driver refuses one.
bool Pool::can_never_hold(std::size_t bytes, Shortage* shortage) const {
  if (bytes <= most_) return false;
  *shortage = bytes > kind_.capacity ? Shortage::of_addresses(bytes) : Shortage::of_device(bytes);
  return true;
}

// ---------------------------------------------------------------- told and counted

void Pool::tell(PoolEvent event, std::size_t offset, std::size_t bytes, Stream stream) const {
  PoolObserver* observer = context_.observer.load(std::memory_order_acquire);
  if (observer == nullptr) [[likely]]
    return;
  const Telling telling(stands_still_);
  observer->on_event(*this, event, base_ + offset, bytes, stream);
}

void Pool::mapped(const PlacedChunk& placement, Stream stream) {
  const std::size_t size = placement.chunk->size;
  placement.chunk->oversize = is_oversize(size);
  counters_.mapped(size, placement.chunk->oversize);
  tell(PoolEvent::segment_map, placement.offset, size, stream);
  if (space_.range().live().at(placement.offset).is_withheld) return;
  if (context_.observer.load(std::memory_order_acquire) != nullptr) space_.range().note_told(placement.offset);
  tell(PoolEvent::segment_alloc, placement.offset, size, stream);
}

void Pool::unmapped(const PlacedChunk& placement) {
  const std::size_t size = placement.chunk->size;
  counters_.unmapped(size, placement.chunk->oversize);
  tell(PoolEvent::segment_unmap, placement.offset, size, nullptr);
  if (counters_.current(StatKind::reserved_bytes) != 0) return;
  directory_->trim();
  if (!sleeping_.is_asleep()) space_.growth().note_empty();  // what sleeps comes back
}

void Pool::addresses_go(ByteRange range) { tell(PoolEvent::segment_free, range.offset, range.size, nullptr); }

void Pool::addresses_stay(ByteRange range) { tell(PoolEvent::segment_alloc, range.offset, range.size, nullptr); }

// The block is a tensor's from now on, or held by the explicit face.
void Pool::begin_block(Block* block, std::size_t requested) {
  block->requested = requested;
  block->oversize = is_oversize(block->size());
  counters_.block_began(*block);
  ++streams_[block->tag].blocks;
  tell(PoolEvent::alloc, block->offset, requested, streams_[block->tag].stream);
}

// Its owner has let go of it; recorded streams may still use it.
void Pool::end_block(const Block& block) {
  counters_.block_ended(block);
  tell(PoolEvent::free_requested, block.offset, block.requested, streams_[block.tag].stream);
}

// Nobody uses it any more.
void Pool::finish_free(Block* block, Epoch epoch) {
  counters_.block_finished(*block);
  tell(PoolEvent::free_completed, block->offset, block->requested, streams_[block->tag].stream);
  release_block(block, epoch);
}

inline void Pool::free_block(Block* block, Epoch epoch) {
  if (!block->small) {
    if (block->state == BlockState::watched) [[unlikely]] {
      watched_.free(block, epoch);
    } else {
      space_.blocks().free(block, block->tag, epoch);
    }
  } else if (const auto emptied = slabs_.free(block, epoch)) {
    free_slab(*emptied);
  }
}

void Pool::release_block(Block* block, Epoch epoch) {
  streams_.block_freed(block->tag, epoch);
  if (!block->small) {
    space_.growth().note_freed(block->size());
    context_.clock.freed(block->size());
  }
  free_block(block, epoch);
}

// Where there is no memory for its entry it is free again.
[[gnu::always_inline]] inline void Pool::enter_in_directory(Block* block) {
  try {
    directory_->insert(block);
  } catch (...) {
    free_block(block, context_.clock.now());
    throw;
  }
  if (!block->small) space_.growth().note_handed_out(block->size());
}

void Pool::enter(Block* block, std::size_t requested) {
  enter_in_directory(block);
  begin_block(block, requested);
}

// ------------------------------------------------------ beneath the caches

Address Pool::try_allocate(std::size_t bytes, Stream stream, Grant* grant, Shortage* shortage) {
  StreamTag add_shard = kNeutral;
  Address address = 0;
  for (bool is_gathered = !has_shards();; is_gathered = true) {
    address = allocate_once(bytes, stream, is_gathered, grant, shortage, &add_shard);
    if (!shortage->is_kept_by_threads) [[likely]]
      break;
    // Before any memory is asked for: what threads keep never makes a pool grow.
    *shortage = {};
    context_.caches.gather(*this);
  }
  if (add_shard != kNeutral) context_.caches.add_shard(*this, stream, add_shard);
  return address;
}

// `add_shard`: the stream's tag, where the thread may keep its blocks and does not yet.
[[gnu::always_inline]] inline Address Pool::allocate_once(std::size_t bytes, Stream stream, bool is_gathered,
                                                          Grant* grant, Shortage* shortage, StreamTag* add_shard) {
  BlockCaches::Mine mine(context_.caches);
  const MutexLock lock(mutex_);
  if (!takes_requests(shortage)) [[unlikely]]
    return 0;
  if (can_never_hold(bytes, shortage)) return 0;  // before it is rounded up: near 2^64 that wraps
  if (!pending_.empty()) settle_locked();
  if (!keeps_limits(shortage)) [[unlikely]]
    return 0;
  // A stream that the thread has a shard for lasts, and has its tag for good.
  Shard* shard = mine.shard(*this, stream);
  const StreamTag tag = shard != nullptr ? shard->tag : streams_.tag_of(stream);
  if (!streams_.is_behind(tag, &shortage->wait_for)) return 0;
  const std::size_t size = rounded(bytes);
  const bool is_small = size <= kSmallLimitBytes;
  if (shard == nullptr || is_oversize(size)) [[unlikely]]
    shard = shard_for(mine, tag, size, add_shard);
  if (shard != nullptr) {
    if (Block* const unwanted = shard->take_unwanted(); unwanted != nullptr) take_back_locked(unwanted);
    if (is_small) shard->want(size);
  }
  if (!is_small) forget_large(mine, shard);
  // At once where there is space with its memory; further looks are find_block()'s.
  Block* block = is_small         ? slabs_.take(size, tag)
                 : kind_.no_split ? nullptr
                                  : space_.placement().take_backed(size, tag);
  if (block == nullptr) [[unlikely]]
    block = find_block(size, tag, is_gathered, mine, grant, shortage);
  if (block == nullptr) return 0;
  enter_in_directory(block);
  if (shard == nullptr) {
    begin_block(block, bytes);
  } else {
    // What the thread frees later it counts itself: counted here, one seat would rise
    // and the other fall all the time, and each look for room costs 300 ns.
    block->requested = bytes;
    block->oversize = false;
    ++streams_[tag].blocks;
    shard->tally.count_allocation(*block, size);
    mine.note(base_ + block->offset, block, shard);
    if (!is_small) shard->note_large(block);
  }
  return base_ + block->offset;
}

// Beyond what the stream's slabs, or its free space, have at hand.
Block* Pool::find_block(std::size_t size, StreamTag tag, bool is_gathered, const BlockCaches::Mine& mine, Grant* grant,
                        Shortage* shortage) {
  if (space_.range().retired_count() >= kMostRetired && space_.must_wait_for_retired(shortage)) return nullptr;
  Request request;
  request.size = size;
  request.tag = tag;
  request.is_gathered = is_gathered;
  const auto attempt = [&]() VMM_REQUIRES(mutex_) {
    return size <= kSmallLimitBytes ? allocate_small(request, grant, shortage) : space_.place(request, grant, shortage);
  };
  Block* block = attempt();
  if (!shortage->is_kept_by_threads || !mine.is_alone(*this)) return block;
  // All that is kept is this thread's own: nobody has to be stopped.
  *shortage = {};
  if (Shard* const shard = mine.shard(*this, tag); shard != nullptr && size <= kSmallLimitBytes) {
    // A few are enough, nearly always: all that was kept, 75 blocks, took 3 us.
    while (Block* const few = shard->take_few()) {
      take_back_locked(few);
      block = slabs_.take(size, tag);
      if (block != nullptr) return block;
    }
  }
  for (Shard* own = mine.shards(*this); own != nullptr; own = own->next.get()) take_back_locked(own->take_all());
  take_back_locked(depot_.take_all());
  request.is_gathered = true;
  return attempt();
}

Address Pool::try_allocate_within(std::size_t bytes, Stream stream) {
  if (bytes > kind_.capacity) return 0;  // before it is rounded up: near 2^64 that wraps
  const std::size_t size = rounded(bytes);
  const GatheredLock lock(*this);
  if (life_.load(std::memory_order_acquire) != Life::open) return 0;
  settle_locked();
  if (Shortage of_limit; !keeps_limits(&of_limit)) return 0;
  const StreamTag tag = streams_.tag_of(stream);
  Epoch unused = kLongAgo;
  if (!streams_.is_behind(tag, &unused)) return 0;
  Block* block = nullptr;
  if (size <= kSmallLimitBytes) {
    block = slabs_.take(size, tag);
    if (block == nullptr && !kind_.no_split && !keeps_within_chunks()) {
      // Anywhere: slabs stand at the top as long as there is memory for one.
      if (Block* slab = space_.placement().take_backed(kSlabBytes, tag, BlockState::slab)) {
        make_slab(slab);
        block = slabs_.take(size, tag);
      }
    }
  } else {
    give_up_spare_slabs();
    if (kind_.no_split) {
      Request request;
      request.size = size;
      request.tag = tag;
      block = space_.take_whole_chunk(request);
    } else {
      block = space_.placement().take_backed(size, tag);
    }
  }
  if (block == nullptr) return 0;
  enter(block, bytes);
  return base_ + block->offset;
}

Address Pool::try_allocate_at(Address address, std::size_t bytes, Stream stream, Grant* grant, Shortage* shortage) {
  const std::size_t offset = address - base_;
  if (!contains(address) || !is_aligned(offset, kBlockAlignment)) {
    throw InvalidRangeError(offset, bytes, kind_.capacity,
                            "no address of pool '" + name_ + "' that is a multiple of 512");
  }
  if (kind_.no_split) {
    throw InvalidRangeError(offset, bytes, kind_.capacity,
                            "pool '" + name_ + "' gives each block whole chunks (no_split), none at an address");
  }
  // What is left is a multiple of 512, so that what fits also fits rounded up.
  if (bytes > kind_.capacity - offset)
    throw InvalidRangeError(offset, bytes, kind_.capacity, "beyond the end of the pool");
  const std::size_t size = align_up(std::max<std::size_t>(bytes, 1), kBlockAlignment);
  const GatheredLock lock(*this);
  if (!takes_requests(shortage)) {
    throw InvalidArgumentError("pool '" + name_ + "' takes no requests while some of its memory is sealed: unseal it");
  }
  free_up_space();
  if (can_never_hold(size, shortage) || !keeps_limits(shortage)) return 0;
  const StreamTag tag = streams_.tag_of(stream);
  if (!streams_.is_behind(tag, &shortage->wait_for)) return 0;
  for (std::size_t at = offset; at < offset + size;) {
    const Block* free = space_.blocks().free_covering(at);
    if (free == nullptr && space_.retired().covers(at)) {
      if (space_.make_way_of_retired(at, shortage)) continue;
      return 0;
    }
    // What is free of another stream's is still its graphs'.
    const bool is_graphs = free != nullptr && space_.is_pinned() && free->tag != tag && free->tag != kNeutral;
    if (free == nullptr || is_graphs) {
      throw AlreadyMappedError(at, kBlockAlignment,
                               "pool '" + name_ + "': " + format_hex(address) + (is_graphs ? ", by a graph" : ""));
    }
    at = free->end();
  }
  if (keeps_within_chunks()) space_.require_within_chunk({offset, size});
  Request request;
  request.size = size;
  request.where = Request::Where::at;
  request.offset = offset;
  request.tag = tag;
  Block* block = space_.place(request, grant, shortage);
  if (block == nullptr) return 0;
  VMM_CHECK(block->offset == offset, "a block for ", offset, " stands at ", block->offset);
  enter(block, bytes);
  return address;
}

Block* Pool::allocate_small(const Request& request, Grant* grant, Shortage* shortage) {
  if (Block* block = slabs_.take(request.size, request.tag)) return block;
  Request of_slab = request;
  of_slab.where = Request::Where::high;
  of_slab.state = BlockState::slab;
  const std::size_t wanted = grant == nullptr ? space_.slabs_at_once(slabs_.size(request.tag)) : 1;
  of_slab.size = wanted * kSlabBytes;
  Block* slab = space_.place(of_slab, grant, shortage);
  if (slab == nullptr && wanted > 1 && !shortage->is_kept_by_threads) {
    *shortage = {};
    of_slab.size = kSlabBytes;
    slab = space_.place(of_slab, grant, shortage);
  }
  if (slab == nullptr) return nullptr;
  make_slabs(slab);
  return slabs_.take(request.size, request.tag);
}

// One or several, side by side.
void Pool::make_slabs(Block* slabs) {
  try {
    while (slabs->size() > kSlabBytes) make_slab(space_.blocks().split(slabs, slabs->end() - kSlabBytes));
  } catch (...) {
    space_.blocks().free(slabs, slabs->tag, context_.clock.now());
    throw;
  }
  make_slab(slabs);
}

// A slab's memory is the small pool's, whatever its chunk was mapped for; the chunk
// itself is where the slab is all of it. While the pool is asleep it may have none, and
// counts with the large pool's.
void Pool::reclassify(const Block& slab, SizeClass from, SizeClass to) {
  if (!sleeping_.is_asleep()) count_slab(slab, from, to);
}

void Pool::count_slab(const Block& slab, SizeClass from, SizeClass to) {
  const auto chunk = space_.range().live().find(slab.offset);
  const bool is_whole_chunk = chunk != space_.range().live().end() && chunk->second.chunk->size == slab.size();
  counters_.slab_changed_hands(slab.size(), is_whole_chunk, from, to);
}

// Small blocks are cut from it from now on.
void Pool::make_slab(Block* slab) {
  try {
    slabs_.donate(slab);
  } catch (...) {
    space_.blocks().free(slab, slab->tag, context_.clock.now());
    throw;
  }
  space_.growth().note_handed_out(slab->size());
  reclassify(*slab, SizeClass::large_pool, SizeClass::small_pool);
}

bool Pool::free(Address address, bool* drained) {
  *drained = false;
  if (!contains(address)) return false;
  StreamTag add_shard = kNeutral;
  Stream stream = nullptr;
  std::shared_ptr<Pool> self;  // with its last block freed, others may end it as soon as the lock is given up
  {
    BlockCaches::Mine mine(context_.caches);
    const MutexLock lock(mutex_);
    Block* block = live_at(address);
    if (block == nullptr) return false;
    const Epoch epoch = context_.clock.now();
    // Other streams read it: it is nobody's until what is queued there is done. First, as
    // there may be no memory to note that: then it is live as before.
    if (block->recorded != 0) pending_.add({block, epoch}, recorded_uses_.of(block->recorded));
    directory_->remove(block);
    if (!block->small) forget_large(mine, nullptr);
    if (block->recorded != 0) {
      end_block(*block);
      recorded_uses_.end(&block->recorded);
      block->state = BlockState::pending;
      pending_bytes_ += block->size();
    } else {
      // One that was counted as oversize, whatever is now, was counted here.
      Shard* const shard = block->oversize ? nullptr : shard_for(mine, block->tag, block->size(), &add_shard);
      if (add_shard != kNeutral) {
        self = weak_from_this().lock();
        stream = streams_[add_shard].stream;
      }
      if (shard == nullptr) {
        end_block(*block);
        finish_free(block, epoch);
      } else {
        shard->tally.count_free(*block, block->size());
        release_block(block, epoch);
      }
    }
    *drained = is_closed() && live_blocks_locked() == 0;
  }
  if (self != nullptr) context_.caches.add_shard(*this, stream, add_shard);
  return true;
}

void Pool::free_slab(const Slabs::Emptied& emptied) {
  space_.growth().note_freed(emptied.slab->size());
  reclassify(*emptied.slab, SizeClass::small_pool, SizeClass::large_pool);
  space_.blocks().free(emptied.slab, emptied.slab->tag, emptied.epoch);
}

void Pool::give_up_spare_slabs(std::vector<ByteRange>* ended) {
  for (const Slabs::Emptied& emptied : slabs_.give_up_spares()) {
    if (ended != nullptr) ended->push_back(emptied.slab->range());
    free_slab(emptied);
  }
}

void Pool::give_up_spare_slabs() { give_up_spare_slabs(nullptr); }

void Pool::free_up_space() {
  settle_locked();
  give_up_spare_slabs();
}

void Pool::record_stream(Address address, Stream stream, DeviceStreams* device) {
  const bool is_own = device == nullptr || device == &context_.streams;
  if (is_own) device = &context_.streams;
  const MutexLock lock(mutex_);
  Block* block = live_around(address);
  if (is_own && block != nullptr && streams_[block->tag].stream == stream) return;
  // It reads the memory, though it may be no peer (a copy between devices), so the
  // clock has to tell of it.
  if (!is_own) context_.clock.add_peer(*device);
  const StreamKind kind = device->meet(stream);
  // Explicit pages leave behind the clock, which covers whatever has been met.
  if (block == nullptr) return;
  recorded_uses_.add(&block->recorded, {device, stream, kind});
}

// --------------------------------------------------- what queued work held up

bool Pool::settle() {
  bool any = false;
  {
    const MutexLock lock(mutex_);
    any = space_.is_open() && settle_locked();
  }
  return settle_watched() || any;  // what recorded streams held up is among these now
}

// Of pending frees those whose streams have passed.
bool Pool::finish_passed(std::vector<ByteRange>* ended) {
  if (pending_.empty()) return false;
  const std::span<const PendingFrees::Freed> passed = pending_.take_passed(context_.clock);
  for (const auto& [block, epoch] : passed) {
    pending_bytes_ -= block->size();
    if (ended != nullptr) ended->push_back(block->range());
    if (watched_.is_watched(block->offset)) block->state = BlockState::watched;
    finish_free(block, epoch);
  }
  return !passed.empty();
}

void Pool::wait_for_recorded() {
  if (context_.clock.is_capturing()) return;  // a wait for the device would pass what is captured too
  std::vector<StreamPointPtr> points;
  {
    const MutexLock lock(mutex_);
    if (!space_.is_open()) return;
    settle_locked();
    points = pending_.last_points();
  }
  for (const StreamPointPtr& point : points) point->wait().ignore();
}

bool Pool::settle_locked(std::vector<ByteRange>* ended) {
  space_.retire_in_vain();
  bool any = finish_passed(ended);
  any = end_passed_quarantines() || any;
  return space_.drop_retired() || any;
}

}  // namespace vmm
