#include "core/device/provided_memory.h"

#include <algorithm>
#include <array>
#include <limits>
#include <new>
#include <string>
#include <utility>

#include "base/errors.h"
#include "base/units.h"

namespace vmm {

namespace {

// What torch's own allocator asks a provider for.
constexpr std::size_t kSmallBytes = kMiB;
constexpr std::size_t kSmallSegment = 2 * kMiB;
constexpr std::size_t kMediumBytes = 10 * kMiB;
constexpr std::size_t kMediumSegment = 20 * kMiB;

std::size_t segment_size(std::size_t bytes) {
  if (bytes <= kSmallBytes) return kSmallSegment;
  if (bytes < kMediumBytes) return kMediumSegment;
  return align_up(bytes, kSmallSegment);
}

ProvidedSegments& segments() { return ProvidedSegments::instance(); }

}  // namespace

ProvidedMemory::ProvidedMemory(DeviceMemory& memory, RegionId region, std::unique_ptr<SegmentProvider> provider,
                               Report report)
    : memory_(memory),
      region_(region),
      provider_(std::move(provider)),
      report_(report),
      budget_("MemPool (" + std::to_string(region.first) + ", " + std::to_string(region.second) + ")", kUnlimited,
              &memory.foreign_budget()),
      counters_(memory.count_beside()) {}

ProvidedMemory::~ProvidedMemory() { memory_.end_count_beside(*counters_); }

// ----------------------------------------------------------------- allocation

StreamTag ProvidedMemory::known_tag(const Sharers& sharers) const {
  const auto at = tags_.find(sharers);
  return at == tags_.end() ? kNeutral : at->second;
}

StreamTag ProvidedMemory::tag_of(const Sharers& sharers) {
  if (const StreamTag known = known_tag(sharers); known != kNeutral) return known;
  const std::size_t tag = sharers_.size();
  if (tag > std::numeric_limits<StreamTag>::max()) {
    throw VmmError(budget_.name() + " has segments of " + std::to_string(tag - 1) +
                   " streams, counted once for small blocks and once for large ones: no more can be told apart");
  }
  sharers_.push_back(sharers);
  try {
    tags_.emplace(sharers, static_cast<StreamTag>(tag));
  } catch (...) {
    sharers_.pop_back();
    throw;
  }
  return static_cast<StreamTag>(tag);
}

Address ProvidedMemory::carve(Block* free, std::size_t bytes) {
  const std::size_t size = no_split_.load(std::memory_order_relaxed)
                               ? free->size()
                               : align_up(std::max<std::size_t>(bytes, 1), kBlockAlignment);
  const auto noted = live_.emplace(free->offset, nullptr).first;  // first, as there may be no memory for it
  Block* block = nullptr;
  try {
    block = blocks_.carve(free, free->offset, size, BlockState::used);
  } catch (...) {
    live_.erase(noted);
    throw;
  }
  block->requested = bytes;
  block->small = sharers_[block->tag].small;
  noted->second = block;
  counters_->count([&](PoolCounters& counters) { counters.block_began(*block); });
  return block->offset;
}

Address ProvidedMemory::provide(std::size_t bytes, std::string* why) {
  if (const Budget* refused = budget_.charge(bytes); refused != nullptr) {
    *why = "the limit of the " + refused->name() + " is " + format_bytes(refused->limit()) + ", and " +
           format_bytes(refused->used()) + " are in use";
    return 0;
  }
  std::string words;
  try {
    if (const Address segment = provider_->take(bytes, &words); segment != 0) return segment;
  } catch (...) {
    budget_.refund(bytes);
    throw;
  }
  budget_.refund(bytes);
  *why = words.empty() ? "the allocator that it was made with has none"
                       : "the allocator that it was made with says: " + words;
  return 0;
}

Address ProvidedMemory::try_allocate_within(std::size_t bytes, Stream stream) {
  const std::size_t size = align_up(std::max<std::size_t>(bytes, 1), kBlockAlignment);
  const MutexLock lock(mutex_);
  settle();
  const StreamTag tag = known_tag({stream, size <= kSmallBytes});
  Block* const free = tag == kNeutral ? nullptr : blocks_.best_fit(size, tag);
  return free == nullptr ? 0 : carve(free, bytes);
}

Address ProvidedMemory::allocate(std::size_t bytes, Stream stream) {
  if (const Address block = try_allocate_within(bytes, stream); block != 0) return block;
  const std::size_t size = align_up(std::max<std::size_t>(bytes, 1), kBlockAlignment);
  const bool small = size <= kSmallBytes;
  const std::size_t wanted = segment_size(size);
  std::string why;
  Address segment = provide(wanted, &why);
  if (segment == 0 && !memory_.clock().is_capturing()) {
    counters_->count([](PoolCounters& counters) { counters.retried(); });
    // What pools that are gone have left, and what our own hold unused, may be
    // what the provider lacks.
    if (memory_.could_hold(budget_, wanted)) finish_closed(memory_, /*wait=*/true);
    memory_.reclaim_for(budget_, wanted, [&] { return (segment = provide(wanted, &why)) != 0; });
  }
  if (segment == 0) {
    counters_->count([](PoolCounters& counters) { counters.ran_out(); });
    throw OutOfMemoryError(budget_.name() + " got no segment of " + format_bytes(wanted) + ": " + why, bytes,
                           budget_.headroom(), memory_.budget().limit(), budget_.name());
  }
  const ByteRange range{segment, wanted};
  try {
    segments().add(range, shared_from_this(), memory_);
  } catch (...) {
    return_to_provider(range);
    throw;
  }
  counters_->count([&](PoolCounters& counters) {
    counters.mapped(range.size, /*is_oversize=*/false, size_class_of(small));
    counters.count_device_calls(1, 0);
  });
  tell(PoolEvent::segment_map, range, stream);
  tell(PoolEvent::segment_alloc, range, stream);
  Block* free = nullptr;
  try {
    const MutexLock lock(mutex_);
    free = blocks_.donate(range, tag_of({stream, small}));
    return carve(free, bytes);
  } catch (...) {
    if (free == nullptr) let_go(range, size_class_of(small));  // else it is there for the next request
    throw;
  }
}

void ProvidedMemory::return_to_provider(ByteRange segment) noexcept {
  try {
    provider_->give_back(segment.offset);
  } catch (...) {
    report_("giving a MemPool's segments back");
  }
  budget_.refund(segment.size);
}

// Nobody has blocks of it any more, nor queued work that uses it.
void ProvidedMemory::let_go(ByteRange segment, SizeClass size_class) noexcept {
  segments().remove(segment);
  counters_->count([&](PoolCounters& counters) {
    counters.unmapped(segment.size, /*is_oversize=*/false, size_class);
    counters.count_device_calls(0, 1);
  });
  tell(PoolEvent::segment_unmap, segment, nullptr);
  tell(PoolEvent::segment_free, segment, nullptr);
  return_to_provider(segment);
}

bool ProvidedMemory::free_in(Address block) noexcept {
  const auto memory = segments().find(block);
  return memory != nullptr && memory->free_at(block);
}

bool ProvidedMemory::free_at(Address address) noexcept {
  try {
    {
      const MutexLock lock(mutex_);
      const auto at = live_.find(address);
      if (at == live_.end()) return false;
      Block* const block = at->second;
      const Epoch epoch = memory_.clock().now();
      // First, as there may be no memory to note that: then it stays as it was.
      if (block->recorded != 0) pending_.add({block, epoch}, recorded_uses_.of(block->recorded));
      live_.erase(at);
      counters_->count([&](PoolCounters& counters) { counters.block_ended(*block); });
      if (block->recorded == 0) {
        finish_free(block, epoch);
      } else {
        recorded_uses_.end(&block->recorded);
        block->state = BlockState::pending;
        unfinished_.fetch_add(1, std::memory_order_relaxed);
      }
      settle();
      if (!closed_) return true;
      if (is_retract_due_) retract_free_segments();
    }
    give_back();
  } catch (...) {
    report_("free");
  }
  return true;
}

void ProvidedMemory::finish_free(Block* block, Epoch epoch) {
  counters_->count([&](PoolCounters& counters) { counters.block_finished(*block); });
  Block* const free = blocks_.free(block, block->tag, epoch);
  if (!closed_ || pinned_) return;
  try {
    retract_if_whole(free);
  } catch (const std::bad_alloc&) {
    is_retract_due_ = true;
  }
}

void ProvidedMemory::settle() {
  const std::span<const PendingFrees::Freed> passed = pending_.take_passed(memory_.clock());
  for (const auto& [block, epoch] : passed) finish_free(block, epoch);
  unfinished_.fetch_sub(passed.size(), std::memory_order_relaxed);
}

bool ProvidedMemory::record_stream(Address block, Stream stream, DeviceStreams& device) {
  const auto memory = segments().find(block);
  if (memory == nullptr) return false;
  const MutexLock lock(memory->mutex_);
  const auto at = memory->live_.find(block);
  if (at == memory->live_.end()) return false;
  const bool is_own = &device == &memory->memory_.streams();
  if (is_own && memory->sharers_[at->second->tag].stream == stream) return true;
  if (!is_own) memory->memory_.clock().add_peer(device);  // as Pool::record_stream()
  memory->recorded_uses_.add(&at->second->recorded, {&device, stream, device.meet(stream)});
  return true;
}

std::optional<ByteRange> ProvidedMemory::segment_at(Address block) {
  if (block_size(block) == 0) return std::nullopt;
  return segments().segment_at(block);
}

std::size_t ProvidedMemory::block_size(Address block) {
  const auto asked = asked_at(block);
  return asked.has_value() ? asked->size : 0;
}

std::optional<ProvidedMemory::Asked> ProvidedMemory::asked_at(Address block) {
  const auto memory = segments().find(block);
  if (memory == nullptr) return std::nullopt;
  const MutexLock lock(memory->mutex_);
  const auto at = memory->live_.find(block);
  if (at == memory->live_.end()) return std::nullopt;
  const Stream stream = memory->sharers_[at->second->tag].stream;
  return Asked{memory->memory_.device(), memory->region_, at->second->requested, at->second->size(), stream};
}

// ---------------------------------------------------------------- giving back

void ProvidedMemory::retract_if_whole(Block* free) {
  if (free->prev != nullptr || free->next != nullptr) return;
  // Not before those that are ahead of it: then only the first has to be asked about.
  const Epoch ahead = leaving_.empty() ? kLongAgo : leaving_.back().last_use;
  leaving_.push_back({free->range(), std::max({free->epoch, graphs_end_, ahead}), sharers_[free->tag].small});
  unfinished_.fetch_add(1, std::memory_order_relaxed);
  blocks_.retract(free);
}

void ProvidedMemory::retract_free_segments() {
  if (pinned_) return;
  is_retract_due_ = true;
  const std::vector<Block*> heads = blocks_.stretches();  // a copy: retract() changes it
  for (Block* const head : heads) {
    if (head->state == BlockState::free) retract_if_whole(head);
  }
  is_retract_due_ = false;
}

void ProvidedMemory::give_back() noexcept {
  // The provider's own free ends a capture, or waits for the GPU.
  Clock& clock = memory_.clock();
  if (clock.is_capturing()) return;
  const auto self = shared_from_this();  // the last segment's end may be ours
  try {
    std::vector<Leaving> gone;
    bool is_all_gone = false;
    {
      const MutexLock lock(mutex_);
      if (leaving_.empty()) return;
      clock.cover(leaving_.back().last_use);
      clock.poll();
      const auto is_used = [&](const Leaving& each) { return !clock.has_passed(each.last_use); };
      const auto used = std::find_if(leaving_.begin(), leaving_.end(), is_used);
      gone.assign(leaving_.begin(), used);
      leaving_.erase(leaving_.begin(), used);
      is_all_gone = leaving_.empty() && blocks_.stretches().empty();
    }
    for (const Leaving& leaving : gone) {
      unfinished_.fetch_sub(1, std::memory_order_relaxed);
      let_go(leaving.range, size_class_of(leaving.small));
    }
    if (is_all_gone) refresh_numbers();  // nobody asks those that have no segment
  } catch (...) {
    report_("giving a MemPool's segments back");
  }
}

// Whoever follows segments (NCCL registers them) follows these too.
void ProvidedMemory::tell(PoolEvent event, ByteRange range, Stream stream) const noexcept {
  if (PoolObserver* const observer = memory_.observer(); observer != nullptr) [[unlikely]]
    observer->on_provided(memory_.device(), region_, event, range.offset, range.size, stream);
}

void ProvidedMemory::set_pinned(bool pinned) noexcept {
  try {
    const MutexLock lock(mutex_);
    if (pinned_ && !pinned) graphs_end_ = memory_.clock().now();
    pinned_ = pinned;
    is_retract_due_ = is_retract_due_ || closed_;
  } catch (...) {
    report_("pinning a MemPool");
  }
}

// Called with locks held, so the provider is not: finish_closed() follows.
void ProvidedMemory::close() noexcept {
  try {
    const MutexLock lock(mutex_);
    closed_ = true;
    settle();
    retract_free_segments();
  } catch (...) {
    report_("closing a MemPool");
  }
}

void ProvidedMemory::finish_closed(const DeviceMemory& device, bool wait) noexcept {
  if (!any_unfinished()) return;
  std::vector<std::shared_ptr<ProvidedMemory>> all;
  try {
    all = segments().all_of(device);
  } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): they stay unfinished, and whoever comes next tries
  }
  for (const auto& memory : all) memory->finish(wait);
}

void ProvidedMemory::finish(bool wait) noexcept {
  try {
    {
      const MutexLock lock(mutex_);
      settle();  // of one that is open too: what waits for other streams keeps everybody from the fast way
      if (!closed_) return;
    }
    Clock& clock = memory_.clock();
    if (wait && !clock.is_capturing()) clock.wait(clock.now()).ignore();  // what it could not wait for stays
    {
      const MutexLock lock(mutex_);
      settle();
      if (is_retract_due_) retract_free_segments();
    }
    give_back();
  } catch (...) {
    report_("giving a MemPool's segments back");
  }
}

// -------------------------------------------------------------------- numbers

void ProvidedMemory::refresh_numbers() {
  const MutexLock lock(mutex_);
  struct Stranded {
    std::size_t count = 0;
    std::size_t bytes = 0;
  };
  std::array<Stranded, 2> found{};  // by SizeClass
  for (const Block* head : blocks_.stretches()) {
    if (head->next == nullptr && head->state == BlockState::free) continue;  // a segment of which nothing is in use
    for (const Block* block = head; block != nullptr; block = block->next) {
      if (block->state != BlockState::free) continue;
      Stranded& of_class = found.at(static_cast<std::size_t>(size_class_of(sharers_[block->tag].small)));
      ++of_class.count;
      of_class.bytes += block->size();
    }
  }
  counters_->count([&](PoolCounters& counters) {
    for (const SizeClass size_class : {SizeClass::small_pool, SizeClass::large_pool}) {
      const Stranded& of_class = found.at(static_cast<std::size_t>(size_class));
      counters.set(StatKind::inactive_split, size_class, of_class.count);
      counters.set(StatKind::inactive_split_bytes, size_class, of_class.bytes);
    }
  });
}

std::vector<ProvidedMemory::Segment> ProvidedMemory::snapshot(const DeviceMemory& device) {
  std::vector<Segment> found;
  for (const auto& memory : segments().all_of(device)) {
    const MutexLock lock(memory->mutex_);
    const auto begin_segment = [&](Address address, std::size_t size, bool small, Stream stream) -> SegmentSnapshot& {
      SegmentSnapshot& segment = found.emplace_back(Segment{memory->region_, {}}).snapshot;
      segment.address = address;
      segment.total_size = size;
      segment.size_class = size_class_of(small);
      segment.stream = stream;
      return segment;
    };
    for (const Block* head : memory->blocks_.stretches()) {
      const Sharers& sharers = memory->sharers_[head->tag];
      SegmentSnapshot& segment = begin_segment(head->offset, 0, sharers.small, sharers.stream);
      for (const Block* block = head; block != nullptr; block = block->next) {
        BlockSnapshot& part = segment.blocks.emplace_back();
        part.size = block->size();
        segment.total_size += block->size();
        if (block->state == BlockState::free) continue;
        const bool live = block->state == BlockState::used;
        part.state = live ? BlockSnapshot::State::allocated : BlockSnapshot::State::pending_free;
        part.requested = block->requested;
        segment.active_size += block->size();
        segment.requested_size += block->requested;
        if (live) segment.allocated_size += block->size();
      }
    }
    for (const Leaving& leaving : memory->leaving_) {
      SegmentSnapshot& segment = begin_segment(leaving.range.offset, leaving.range.size, leaving.small, nullptr);
      segment.blocks.emplace_back().size = leaving.range.size;
    }
  }
  return found;
}

std::vector<std::shared_ptr<ProvidedMemory>> ProvidedMemory::all_of(const DeviceMemory& device) {
  return segments().all_of(device);
}

}  // namespace vmm
