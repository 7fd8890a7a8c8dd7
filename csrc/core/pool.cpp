// Pool: making and ending one, and the hot path of blocks.
#include "core/pool.h"

#include <algorithm>
#include <thread>

#include "base/check.h"
#include "base/errors.h"

namespace vmm {

namespace {

OwnerId next_owner_id() {
  static std::atomic<OwnerId> next{kNobody};
  return ++next;
}

constexpr std::size_t kSlabBytes = 2 * kMiB;
constexpr int kEndAttempts = 3;
// Former mappings that a pool keeps at most before a request waits for the clock.
// Fewer gather as long as ticks pass by themselves; with streams on which no
// fence can stand they never do, and each costs its addresses and a walk.
constexpr std::size_t kMostRetired = 1024;
// Streams that may come and go are bounded by those that have blocks, above this.
constexpr std::size_t kStreamsKept = 64;
constexpr std::size_t kMostCapacity = std::size_t{1} << 46;  // half of the 47-bit address space

}  // namespace

Pool::Pool(const PoolContext& context, Budget& group, const PoolSpec& spec, DeviceMemory* home)
    : context_(context),
      name_(spec.name),
      id_(next_owner_id()),
      group_(group),
      keeps_group_(group.weak_from_this().lock()),
      budget_("pool '" + spec.name + "'", spec.physical_limit, spec.model == nullptr ? &group : &spec.model->budget()),
      home_(home),
      model_(spec.model),
      region_(spec.region),
      no_split_(spec.no_split),
      page_(spec.page_size == 0 ? context.store.granularity() : spec.page_size),
      uniform_(spec.page_size != 0),
      capacity_(0),
      floor_(spec.floor),
      priority_(spec.priority),
      large_(arena_, /*by_offset=*/true),
      own_seat_(own_peaks_),
      seat_(context.peaks) {
  const std::size_t granularity = context.store.granularity();
  if (!is_power_of_two(page_) || !is_aligned(page_, granularity)) throw InvalidPageSizeError(page_, granularity);
  if (spec.capacity == 0) throw InvalidArgumentError("capacity 0: a pool needs at least one page");
  if (spec.capacity > kMostCapacity) {
    throw InvalidArgumentError("capacity " + std::to_string(spec.capacity) + " (" + format_bytes(spec.capacity) +
                               ") is above the largest, " + format_bytes(kMostCapacity));
  }
  if (spec.floor > spec.physical_limit) {
    throw InvalidArgumentError("floor " + format_bytes(spec.floor) + " is above the physical limit " +
                               format_bytes(spec.physical_limit));
  }
  capacity_ = align_up(spec.capacity, page_);
  const Status status = context_.address_space.reserve(context_.driver, capacity_, this, &base_);
  if (status.code() == StatusCode::out_of_memory) {
    throw OutOfMemoryError("pool '" + name_ + "': no " + format_bytes(capacity_) + " of virtual addresses are left (" +
                               status.text() + "); give pools smaller capacities",
                           capacity_, 0, kMostCapacity, name_);
  }
  throw_if_failed(status, "reserving " + format_bytes(capacity_) + " of addresses for pool '" + name_ + "'");
  Peaks* family = model_ == nullptr ? nullptr : model_->family_peaks();
  directory_ = std::make_unique<BlockDirectory>(capacity_);
  const MutexLock lock(mutex_);
  range_ = std::make_unique<MappedRange>(context_.driver, base_, capacity_);
  large_.donate({0, capacity_}, kNeutral);
  streams_.emplace_back();  // tag 0 is neutral
  if (family != nullptr) family_seat_ = std::make_unique<Peaks::Seat>(*family);
}

Pool::~Pool() {
  // Ended already. No lock is taken then: the last to let go of it may be an
  // observer that looked at all pools, under the lock of another.
  if (range_ == nullptr) return;
  retire();
  // Nobody comes after this, so it waits, and what the driver refused once is
  // tried again; what it refuses still stays mapped.
  for (int attempt = 0; attempt < kEndAttempts; ++attempt) {
    if (end()) return;
    context_.clock.wait(context_.clock.now()).ignore();
  }
  const MutexLock lock(mutex_);
  VMM_CHECK(directory_->size() == 0 && pages_.empty(), "pool '", name_, "' ends with live blocks");
  range_.reset();
  context_.address_space.unreserve(context_.driver, base_, capacity_).ignore();
}

void Pool::require_open() const {
  if (is_retired()) throw InvalidArgumentError("pool '" + name_ + "' is closed");
}

void Pool::retire() {
  const BlockCaches::Still still(context_.caches, *this, BlockCaches::Kept::gone);
  const MutexLock lock(mutex_);
  retire_locked();
}

bool Pool::end() {
  const MutexLock lock(mutex_);
  if (range_ == nullptr) return true;
  VMM_CHECK(is_retired(), "pool '", name_, "' ends before it is retired");
  settle_locked();
  if (live_blocks_locked() != 0) return false;
  if (pinned_) {
    pinned_ = false;
    graphs_end_ = context_.clock.now();
  }
  give_up_spare_slabs();
  // The memory goes to the shelf at once; only the addresses have to wait for
  // the work that still uses them.
  shelve_idle_chunks({0, capacity_});
  if (!pending_.empty()) return false;
  if (range_->has_retired()) {
    context_.clock.cover(range_->last_retired_use());
    drop_retired();
  }
  if (!quarantined_.empty() || range_->has_retired()) return false;
  VMM_CHECK(range_->live().empty(), "pool '", name_, "' ends with ", range_->live().size(), " chunks");
  range_.reset();
  set_inactive_split({});
  if (!context_.address_space.unreserve(context_.driver, base_, capacity_).ok()) {
    context_.address_space.unreserve(context_.driver, base_, capacity_).ignore();
  }
  return true;
}

// ---------------------------------------------------------------- streams

StreamUse Pool::use_of(StreamTag tag) const { return {&context_.streams, streams_[tag].stream, streams_[tag].kind}; }

StreamTag Pool::tag_of(Stream stream, bool is_alive) {
  StreamTag tag = latest_tag_;
  if (tag == kNeutral || streams_[tag].stream != stream) {
    const auto known = tags_.find(stream);
    if (known == tags_.end()) {
      tag = tag_without_blocks();
      if (tag == kNeutral) {
        tag = static_cast<StreamTag>(streams_.size());
        streams_.emplace_back().small = std::make_unique<BlockHeap>(arena_, /*by_offset=*/false);
      } else {
        tags_.erase(streams_[tag].stream);
      }
      streams_[tag].stream = stream;
      streams_[tag].kind = StreamKind::unreachable;  // until it is met, below
      streams_[tag].behind_graphs = kLongAgo;
      streams_[tag].behind = kLongAgo;
      streams_[tag].zeroed_by = kLongAgo;
      streams_[tag].zeroed = nullptr;
      tags_.emplace(stream, tag);
    } else {
      tag = known->second;
    }
    latest_tag_ = tag;
  }
  // The handle of a stream that somebody else made may be another stream's by now.
  StreamKind& kind = streams_[tag].kind;
  if (is_alive && (kind == StreamKind::blocking || kind == StreamKind::unreachable)) [[unlikely]]
    kind = context_.streams.meet(stream);
  return tag;
}

// Of many streams, one that has no block left and whose free space nobody uses
// any more: that space may be the next stream's as it stands.
StreamTag Pool::tag_without_blocks() {
  if (streams_.size() <= kStreamsKept) return kNeutral;
  const auto find = [this]() VMM_REQUIRES(mutex_) {
    for (std::size_t tag = 1; tag < streams_.size(); ++tag) {
      const StreamState& state = streams_[tag];
      if (state.blocks == 0 && !state.is_kept && context_.clock.has_passed(std::max(state.last_free, graphs_end_))) {
        return static_cast<StreamTag>(tag);
      }
    }
    return kNeutral;
  };
  if (const StreamTag tag = find(); tag != kNeutral) return tag;
  context_.clock.cover(context_.clock.now());
  context_.clock.poll();
  return find();
}

// The stream's work comes after what `epoch` stands for, and so may use all memory
// that was freed until then.
Status Pool::order_behind(StreamTag tag, Epoch epoch) {
  if (context_.clock.has_passed(epoch)) return {};
  if (const Status status = context_.clock.order_before(use_of(tag), epoch); !status.ok()) return status;
  StreamState& state = streams_[tag];
  state.last_free = std::max(state.last_free, epoch);
  if (!is_lasting(state.kind)) state.behind = std::max(state.behind, epoch);
  return {};
}

// Its memory is being zeroed on the stream, just now.
void Pool::note_zeroing(StreamTag tag) {
  StreamState& state = streams_[tag];
  if (is_lasting(state.kind)) return;
  state.zeroed_by = context_.clock.now();
  state.zeroed = std::make_shared<StreamPoint>(std::vector<StreamUse>{use_of(tag)});
}

// Whether the stream may be given memory of the pool that it may use at once.
// False, with what to wait for, where it has to come after something first and
// the GPU cannot be made to wait.
bool Pool::is_behind(StreamTag tag, Shortage* shortage) {
  if (graphs_end_ != kLongAgo && !is_behind_graphs(tag, shortage)) [[unlikely]]
    return false;
  const StreamState& state = streams_[tag];
  return (state.behind == kLongAgo && state.zeroed_by == kLongAgo) || is_behind_namesakes(tag, shortage);
}

// After a graph has gone, its replays may still use the memory on any stream: a
// stream's work comes after them before it is given any of it.
bool Pool::is_behind_graphs(StreamTag tag, Shortage* shortage) {
  if (context_.clock.has_passed(graphs_end_)) {
    graphs_end_ = kLongAgo;
    return true;
  }
  if (streams_[tag].behind_graphs == graphs_end_) return true;
  if (!order_behind(tag, graphs_end_).ok()) {
    shortage->wait_for = graphs_end_;
    return false;
  }
  if (is_lasting(streams_[tag].kind)) streams_[tag].behind_graphs = graphs_end_;
  return true;
}

bool Pool::is_behind_namesakes(StreamTag tag, Shortage* shortage) {
  StreamState& state = streams_[tag];
  context_.clock.poll();
  if (context_.clock.has_passed(state.behind)) state.behind = kLongAgo;
  if (!context_.clock.order_before(use_of(tag), state.behind).ok()) {
    shortage->wait_for = state.behind;
    return false;
  }
  if (state.zeroed_by == kLongAgo) return true;
  if (context_.clock.has_passed(state.zeroed_by) || state.zeroed->passed()) {
    state.zeroed_by = kLongAgo;
    state.zeroed = nullptr;
    return true;
  }
  if (state.zeroed->order_before(use_of(tag)).ok()) return true;
  shortage->wait_for = state.zeroed_by;
  return false;
}

// ------------------------------------------------------------- statistics

void Pool::count_up(StatKind kind, SizeClass size_class, std::size_t amount) {
  statistics_.increase(kind, size_class, amount);
  own_seat_.rose(kind, size_class, statistics_[kind]);
  seat_.rose(kind, size_class, statistics_[kind]);
  if (family_seat_ != nullptr) family_seat_->rose(kind, size_class, statistics_[kind]);
}

void Pool::count_down(StatKind kind, SizeClass size_class, std::size_t amount) {
  statistics_.decrease(kind, size_class, amount);
  own_seat_.fell(kind, size_class, statistics_[kind]);
  seat_.fell(kind, size_class, statistics_[kind]);
  if (family_seat_ != nullptr) family_seat_->fell(kind, size_class, statistics_[kind]);
}

void Pool::count(StatKind blocks, StatKind bytes, const Block& block, bool up) {
  const SizeClass size_class = block.small ? SizeClass::small_pool : SizeClass::large_pool;
  if (up) {
    count_up(blocks, size_class, 1);
    count_up(bytes, size_class, block.size);
  } else {
    count_down(blocks, size_class, 1);
    count_down(bytes, size_class, block.size);
  }
}

void Pool::count_requested(const Block& block, bool up) {
  const SizeClass size_class = block.small ? SizeClass::small_pool : SizeClass::large_pool;
  if (up) {
    count_up(StatKind::requested_bytes, size_class, block.requested);
  } else {
    count_down(StatKind::requested_bytes, size_class, block.requested);
  }
}

// What changes hands between the small and the large pool has gone from the one
// and come to the other, so `freed` and `allocated` of all rise as well.
void Pool::hand_over(StatKind kind, SizeClass from, SizeClass to, std::size_t how_much) {
  count_down(kind, from, how_much);
  count_up(kind, to, how_much);
}

// A slab's memory is the small pool's, whatever its chunk was mapped for; the
// chunk itself is where the slab is all of it.
void Pool::hand_over_slab(const Block& slab, SizeClass from, SizeClass to) {
  hand_over(StatKind::reserved_bytes, from, to, slab.size);
  const auto chunk = range_->live().find(slab.offset);
  if (chunk == range_->live().end() || chunk->second.chunk->size != slab.size) return;
  hand_over(StatKind::segment, from, to, 1);
}

void Pool::count_oversize(const Block& block, bool up) {
  if (!is_oversize(block.size)) return;
  Stat& stat = statistics_.oversize_allocations;
  up ? stat.increase(1) : stat.decrease(1);
}

void Pool::tell(PoolEvent event, std::size_t offset, std::size_t bytes, Stream stream) const {
  PoolObserver* observer = context_.observer.load(std::memory_order_acquire);
  if (observer == nullptr) [[likely]]
    return;
  const Telling telling(stands_still_);
  observer->on_event(*this, event, base_ + offset, bytes, stream);
}

Pool::ReadLock::ReadLock(const Pool& pool) : pool_(pool) {
  if (!Telling::is_mine()) {
    pool_.mutex_.lock_to_look();
    locked_ = true;
    return;
  }
  while (!pool_.stands_still_.load(std::memory_order_acquire)) {
    if (pool_.mutex_.try_lock_to_look()) {
      locked_ = true;
      return;
    }
    std::this_thread::yield();
  }
}

Pool::ReadLock::~ReadLock() {
  if (locked_) pool_.mutex_.unlock();
}

// The block is a tensor's from now on, or held by the explicit face.
void Pool::begin_block(Block* block, std::size_t requested) {
  block->requested = requested;
  count(StatKind::allocation, StatKind::allocated_bytes, *block, /*up=*/true);
  count(StatKind::active, StatKind::active_bytes, *block, /*up=*/true);
  count_requested(*block, /*up=*/true);
  count_oversize(*block, /*up=*/true);
  ++streams_[block->tag].blocks;
  tell(PoolEvent::alloc, block->offset, requested, streams_[block->tag].stream);
}

// Its owner has let go of it; recorded streams may still use it.
void Pool::end_block(const Block& block) {
  count(StatKind::allocation, StatKind::allocated_bytes, block, /*up=*/false);
  count_oversize(block, /*up=*/false);
  tell(PoolEvent::free_requested, block.offset, block.requested, streams_[block.tag].stream);
}

// Former mappings stand in the way, and queued work may still use them: the
// caller waits for it. False where nothing uses them any more, and the driver
// refuses to drop them.
bool Pool::wait_for_retired(Shortage* shortage) {
  const Epoch last_use = range_->last_retired_use();
  if (context_.clock.has_passed(last_use)) return false;
  shortage->wait_for = last_use;
  return true;
}

bool Pool::is_retired_at(std::size_t offset) const {
  const auto after = retired_blocks_.upper_bound(offset);
  return after != retired_blocks_.begin() && std::prev(after)->second->end() > offset;
}

// The same for one address: true where it is free now. Throws DriverError where the
// driver refuses.
bool Pool::make_way_of_retired(std::size_t offset, Shortage* shortage) {
  if (wait_for_retired(shortage)) return false;
  drop_retired();
  if (!is_retired_at(offset)) return true;
  throw_if_failed(range_->refused(),
                  "dropping a former mapping of pool '" + name_ + "' at offset " + std::to_string(offset));
  return false;
}

// Nobody uses it any more.
void Pool::finish_free(Block* block, Epoch epoch) {
  count(StatKind::active, StatKind::active_bytes, *block, /*up=*/false);
  count_requested(*block, /*up=*/false);
  tell(PoolEvent::free_completed, block->offset, block->requested, streams_[block->tag].stream);
  release_block(block, epoch);
}

void Pool::release_block(Block* block, Epoch epoch) {
  StreamState& stream = streams_[block->tag];
  --stream.blocks;
  stream.last_free = std::max(stream.last_free, epoch);
  if (!block->small) context_.clock.freed(block->size);
  free_block(block, epoch);
}

// --------------------------------------------------------------- hot path

Address Pool::try_allocate(std::size_t bytes, Stream stream, Grant* grant, Shortage* shortage) {
  StreamTag add_shard = kNeutral;
  Address address = allocate_once(bytes, stream, !has_shards(), grant, shortage, &add_shard);
  if (shortage->is_kept_by_threads) {
    // Before any memory is asked for: what threads keep never makes a pool grow.
    *shortage = {};
    context_.caches.gather(*this);
    address = allocate_once(bytes, stream, /*is_gathered=*/true, grant, shortage, &add_shard);
  }
  if (add_shard != kNeutral) context_.caches.add_shard(*this, stream, add_shard);
  return address;
}

// `add_shard`: the stream's tag, where the thread may keep its blocks and does not yet.
Address Pool::allocate_once(std::size_t bytes, Stream stream, bool is_gathered, Grant* grant, Shortage* shortage,
                            StreamTag* add_shard) {
  BlockCaches::Mine mine(context_.caches);
  const MutexLock lock(mutex_);
  require_open();
  if (bytes > capacity_) {  // before it is rounded up: near 2^64 that wraps
    *shortage = {bytes, nullptr, {}, /*no_address_space=*/true};
    return 0;
  }
  if (!pending_.empty()) settle_locked();
  if (range_->retired_count() >= kMostRetired && wait_for_retired(shortage)) return 0;
  const StreamTag tag = tag_of(stream);
  if (!is_behind(tag, shortage)) return 0;
  Request request;
  request.size = rounded(bytes);
  request.tag = tag;
  request.is_gathered = is_gathered;
  const bool is_small = request.size <= kSmallLimitBytes;
  Shard* shard = nullptr;
  if (may_keep(tag) && !is_oversize(request.size)) {
    shard = mine.shard(*this, tag);
    if (shard == nullptr) {
      if (context_.caches.may_keep(*this)) *add_shard = tag;
    } else {
      take_back_locked(shard->take_unwanted());
      if (is_small) shard->want(request.size);
    }
  }
  if (!is_small) forget_large(mine);
  const auto attempt = [&]() VMM_REQUIRES(mutex_) {
    return is_small ? allocate_small(request, grant, shortage) : place(request, grant, shortage);
  };
  Block* block = attempt();
  if (shortage->is_kept_by_threads && mine.is_alone(*this)) {
    // All that is kept is this thread's own: nobody has to be stopped.
    *shortage = {};
    for (Shard* own = mine.shards(*this); own != nullptr; own = own->next.get()) take_back_locked(own->take_all());
    request.is_gathered = true;
    block = attempt();
  }
  if (block == nullptr) return 0;
  if (!is_small) handed_out_ += block->size;
  directory_->insert(block);
  if (shard == nullptr) {
    begin_block(block, bytes);
  } else {
    // What the thread frees later it counts itself: counted here, one seat would rise
    // and the other fall all the time, and each look for room costs 300 ns.
    block->requested = bytes;
    ++streams_[tag].blocks;
    shard->count_allocation(*block, mine.of_device());
    if (!is_small) shard->note_large(block);
  }
  return base_ + block->offset;
}

Address Pool::try_allocate_within(std::size_t bytes, Stream stream) {
  if (bytes > capacity_) return 0;  // before it is rounded up: near 2^64 that wraps
  const std::size_t size = rounded(bytes);
  context_.caches.gather(*this);
  const MutexLock lock(mutex_);
  if (is_retired()) return 0;
  settle_locked();
  const StreamTag tag = tag_of(stream);
  Shortage unused;
  if (!is_behind(tag, &unused)) return 0;
  Block* block = nullptr;
  if (size <= kSmallLimitBytes) {
    Block* free = streams_[tag].small->best_fit(size, tag);
    if (free == nullptr) return 0;
    if (free == streams_[tag].spare_slab) streams_[tag].spare_slab = nullptr;
    block = streams_[tag].small->carve(free, free->offset, size, BlockState::used);
  } else {
    give_up_spare_slabs();
    Request request;
    request.size = size;
    request.tag = tag;
    block = take_backed(request);
    if (block == nullptr) return 0;
  }
  directory_->insert(block);
  begin_block(block, bytes);
  return base_ + block->offset;
}

Address Pool::try_allocate_at(Address address, std::size_t bytes, Stream stream, Grant* grant, Shortage* shortage) {
  const std::size_t offset = address - base_;
  if (!contains(address) || !is_aligned(offset, kBlockAlignment)) {
    throw InvalidRangeError(offset, bytes, capacity_, "no address of pool '" + name_ + "' that is a multiple of 512");
  }
  // What is left is a multiple of 512, so that what fits also fits rounded up.
  if (bytes > capacity_ - offset) throw InvalidRangeError(offset, bytes, capacity_, "beyond the end of the pool");
  const std::size_t size = align_up(std::max<std::size_t>(bytes, 1), kBlockAlignment);
  context_.caches.gather(*this);
  const MutexLock lock(mutex_);
  require_open();
  settle_locked();
  give_up_spare_slabs();
  const StreamTag tag = tag_of(stream);
  if (!is_behind(tag, shortage)) return 0;
  for (std::size_t at = offset; at < offset + size;) {
    const Block* free = large_.free_covering(at);
    if (free == nullptr && is_retired_at(at)) {
      if (make_way_of_retired(at, shortage)) continue;
      return 0;
    }
    // What is free of another stream's is still its graphs'.
    const bool is_graphs = free != nullptr && pinned_ && free->tag != tag && free->tag != kNeutral;
    if (free == nullptr || is_graphs) {
      throw AlreadyMappedError(at, kBlockAlignment,
                               "pool '" + name_ + "': " + format_hex(address) + (is_graphs ? ", by a graph" : ""));
    }
    at = free->end();
  }
  Request request;
  request.size = size;
  request.where = Request::Where::at;
  request.offset = offset;
  request.tag = tag;
  Block* block = place(request, grant, shortage);
  if (block == nullptr) return 0;
  directory_->insert(block);
  begin_block(block, bytes);
  return address;
}

Block* Pool::allocate_small(const Request& request, Grant* grant, Shortage* shortage) {
  BlockHeap& small = *streams_[request.tag].small;
  Block* free = small.best_fit(request.size, request.tag);
  if (free == nullptr) {
    Request of_slab = request;
    of_slab.size = kSlabBytes;
    of_slab.where = Request::Where::high;
    of_slab.state = BlockState::slab;
    Block* slab = place(of_slab, grant, shortage);
    if (slab == nullptr) return nullptr;
    make_slab(slab);
    free = small.best_fit(request.size, request.tag);
  }
  if (free == streams_[request.tag].spare_slab) streams_[request.tag].spare_slab = nullptr;
  return small.carve(free, free->offset, request.size, BlockState::used);
}

// Small blocks are cut from it from now on.
void Pool::make_slab(Block* slab) {
  slabs_.emplace(slab->offset, slab);
  handed_out_ += slab->size;
  streams_[slab->tag].small->donate(slab->range(), slab->tag)->small = true;
  hand_over_slab(*slab, SizeClass::large_pool, SizeClass::small_pool);
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
    directory_->take(block->offset);
    if (!block->small) forget_large(mine);
    const Epoch epoch = context_.clock.now();
    if (block->uses != nullptr) {
      // Other streams read it: it is nobody's until what is queued there is done.
      end_block(*block);
      pending_.add({block, epoch}, *block->uses);
      block->uses.reset();
      block->state = BlockState::pending;
      pending_bytes_ += block->size;
    } else {
      const bool keeps = may_keep(block->tag) && !is_oversize(block->size);
      Shard* const shard = keeps ? mine.shard(*this, block->tag) : nullptr;
      if (keeps && shard == nullptr && context_.caches.may_keep(*this)) {
        self = weak_from_this().lock();
        add_shard = block->tag;
        stream = streams_[block->tag].stream;
      }
      if (shard == nullptr) {
        end_block(*block);
        finish_free(block, epoch);
      } else {
        shard->count_free(*block, mine.of_device());
        release_block(block, epoch);
      }
    }
    *drained = is_retired() && live_blocks_locked() == 0;
  }
  if (self != nullptr) context_.caches.add_shard(*this, stream, add_shard);
  return true;
}

void Pool::free_block(Block* block, Epoch epoch) {
  if (block->small) {
    free_small(block, epoch);
  } else {
    large_.free(block, block->tag, epoch);
  }
}

void Pool::free_small(Block* block, Epoch epoch) {
  StreamState& stream = streams_[block->tag];
  Block* free = stream.small->free(block, block->tag, epoch);
  if (free->prev != nullptr || free->next != nullptr) return;
  // The whole slab is free. One is kept, so that a lone small tensor that
  // comes and goes costs no large block each time.
  if (stream.spare_slab == nullptr) {
    stream.spare_slab = free;
  } else {
    give_up_slab(stream, free);
  }
}

void Pool::give_up_slab(StreamState& stream, Block* whole) {
  const auto slab = slabs_.find(whole->offset);
  VMM_CHECK(slab != slabs_.end(), "no slab at ", whole->offset);
  const Epoch epoch = whole->epoch;
  hand_over_slab(*slab->second, SizeClass::small_pool, SizeClass::large_pool);
  stream.small->retract(whole);
  large_.free(slab->second, slab->second->tag, epoch);
  slabs_.erase(slab);
}

void Pool::give_up_spare_slabs() {
  for (StreamState& stream : streams_) {
    if (stream.spare_slab == nullptr) continue;
    give_up_slab(stream, stream.spare_slab);
    stream.spare_slab = nullptr;
  }
}

void Pool::record_stream(Address address, Stream stream, DeviceStreams* device) {
  const bool is_own = device == nullptr || device == &context_.streams;
  if (is_own) device = &context_.streams;
  const MutexLock lock(mutex_);
  Block* block = live_at(address);
  if (block == nullptr) return;
  if (is_own && streams_[block->tag].stream == stream) return;
  // It reads the memory, though it may be no peer (a copy between devices), so the
  // clock has to tell of it.
  if (!is_own) context_.clock.add_peer(*device);
  const StreamUse use{device, stream, device->meet(stream)};
  if (block->uses == nullptr) block->uses = std::make_unique<std::vector<StreamUse>>();
  auto& uses = *block->uses;
  if (std::find(uses.begin(), uses.end(), use) == uses.end()) uses.push_back(use);
}

// --------------------------------------------------- what queued work held up

bool Pool::settle() {
  const MutexLock lock(mutex_);
  return range_ != nullptr && settle_locked();
}

// Of pending frees those whose streams have passed.
bool Pool::finish_passed() {
  if (pending_.empty()) return false;
  pending_.take_passed(context_.clock, &passed_);
  const bool any = !passed_.empty();
  for (const auto& [block, epoch] : passed_) {
    pending_bytes_ -= block->size;
    finish_free(block, epoch);
  }
  passed_.clear();
  return any;
}

bool Pool::settle_locked() {
  bool any = finish_passed();
  any = end_passed_quarantines() || any;
  return drop_retired() || any;
}

}  // namespace vmm
