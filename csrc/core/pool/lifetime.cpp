// Pool: its life: made, pinned while graphs use it, retired, ended.
#include <algorithm>

#include "base/check.h"
#include "base/errors.h"
#include "core/memory/address_space.h"
#include "core/memory/chunk_store.h"
#include "core/pool/pool.h"

namespace vmm {

namespace {

OwnerId next_owner_id() {
  static std::atomic<OwnerId> next{kNobody};
  return ++next;
}

constexpr int kEndAttempts = 3;
constexpr std::size_t kMostCapacity = std::size_t{1} << 46;  // half of the 47-bit address space

}  // namespace

Pool::Pool(const PoolContext& context, Budget& group, const PoolSpec& spec, DeviceMemory* home,
           std::vector<Location> accessors)
    : context_(context),
      name_(spec.name),
      id_(next_owner_id()),
      group_(group),
      keeps_group_(group.weak_from_this().lock()),
      budget_("pool '" + spec.name + "'", spec.physical_limit,
              spec.model == nullptr || spec.is_spill ? &group : &spec.model->budget()),
      home_(home),
      model_(spec.model),
      sharer_(spec.model == nullptr ? &group : nullptr),
      region_(spec.region),
      tag_(spec.tag),
      is_mem_pool_(spec.is_mem_pool),
      no_split_(spec.no_split),
      is_range_(spec.is_range),
      is_spill_(spec.is_spill),
      page_(spec.page_size == 0 ? context.store.granularity() : spec.page_size),
      uniform_(spec.page_size != 0),
      capacity_(0),
      most_(0),
      accessors_(std::move(accessors)),
      large_(arena_),
      placement_(large_, page_),
      slabs_(arena_),
      streams_(context.streams, context.clock),
      growth_({page_, uniform_, is_range_, is_ordinary(), spec.grows_freely}),
      own_peaks_(context.peaks),
      counters_(own_peaks_, context.peaks) {
  const std::size_t granularity = context.store.granularity();
  if (!is_power_of_two(page_) || !is_aligned(page_, granularity)) throw InvalidPageSizeError(page_, granularity);
  if (spec.capacity == 0) throw InvalidArgumentError("capacity 0: a pool needs at least one page");
  if (spec.capacity > kMostCapacity) {
    throw InvalidArgumentError("capacity " + std::to_string(spec.capacity) + " (" + format_bytes(spec.capacity) +
                               ") is above the largest, " + format_bytes(kMostCapacity));
  }
  budget_.set_floor(spec.floor);
  budget_.set_priority(spec.priority);
  capacity_ = align_up(spec.capacity, page_);
  most_ = std::min(capacity_, context_.capabilities.total_memory);
  Peaks* family = model_ == nullptr ? nullptr : model_->family_peaks();
  const MutexLock lock(mutex_);
  large_.keep_order(capacity_);  // these may run out of memory: nothing is to be undone yet
  large_.donate({0, capacity_}, kNeutral);
  const Status status = context_.address_space.reserve(context_.driver, capacity_, this, &base_);
  if (status.code() == StatusCode::out_of_memory) {
    throw OutOfMemoryError("pool '" + name_ + "': no " + format_bytes(capacity_) + " of virtual addresses are left (" +
                               status.text() + "); give pools smaller capacities",
                           capacity_, 0, kMostCapacity, name_);
  }
  if (!status.ok()) {  // or the words, for which there may be no memory, would stand in the way
    throw_if_failed(status, "reserving " + format_bytes(capacity_) + " of addresses for pool '" + name_ + "'");
  }
  try {
    directory_ = std::make_unique<BlockDirectory>(capacity_);
    // In debug mode a use after free is to fault.
    const bool may_return = is_ordinary() && context_.log == nullptr;
    range_ = std::make_unique<MappedRange>(context_.driver, base_, capacity_,
                                           may_return ? &context_.store.dormant() : nullptr);
    if (family != nullptr) counters_.follow_family(*family);
  } catch (...) {
    context_.address_space.unreserve(context_.driver, base_, capacity_).ignore();
    throw;
  }
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
  const StillLock lock(*this, BlockCaches::Kept::gone);
  retire_locked();
}

bool Pool::end() {
  settle_watched();
  std::unique_ptr<Asleep> asleep;  // its backup ends with no lock held
  const MutexLock lock(mutex_);
  if (range_ == nullptr) return true;
  VMM_CHECK(is_retired(), "pool '", name_, "' ends before it is retired");
  settle_locked();
  if (live_blocks_locked() != 0) return false;
  if (asleep_ != nullptr) {
    give_up_spare_slabs();
    if (asleep_->is_busy || !pending_.empty() || !quarantined_.empty()) return false;
    forget_unused();  // all of it, whose contents nobody wants
    count_slabs(SizeClass::large_pool, SizeClass::small_pool);
    asleep = std::move(asleep_);
  }
  if (pinned_) {
    pinned_ = false;
    streams_.graphs_ended();
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
  if (!quarantined_.empty() || !watch_.freed.empty() || watch_.leaving != 0 || range_->has_retired()) return false;
  if (!range_->clear_dormant().ok()) return false;
  VMM_CHECK(range_->live().empty(), "pool '", name_, "' ends with ", range_->live().size(), " chunks");
  counters_.range_ends(range_->mapped_by_driver(), range_->unmapped_by_driver());
  range_.reset();
  set_inactive_split({});
  if (!context_.address_space.unreserve(context_.driver, base_, capacity_).ok()) {
    context_.address_space.unreserve(context_.driver, base_, capacity_).ignore();
  }
  return true;
}

void Pool::pin() {
  const StillLock lock(*this, BlockCaches::Kept::gone);
  pinned_ = true;
  is_cached_.store(false, std::memory_order_relaxed);
}

void Pool::unpin() {
  const MutexLock lock(mutex_);
  if (!pinned_) return;
  pinned_ = false;
  streams_.graphs_ended();
}

bool Pool::is_pinned() const {
  const MutexLock lock(mutex_);
  return pinned_;
}

}  // namespace vmm
