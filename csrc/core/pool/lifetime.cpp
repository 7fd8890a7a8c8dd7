// Pool: its life: made, pinned while graphs use it, closed, ended.
#include <algorithm>

#include "base/check.h"
#include "base/errors.h"
#include "core/memory/address_space.h"
#include "core/memory/chunk_store.h"
#include "core/options.h"
#include "core/pool/pool.h"

namespace vmm {

namespace {

OwnerId next_owner_id() {
  static std::atomic<OwnerId> next{kNobody};
  return ++next;
}

constexpr int kEndAttempts = 3;

}  // namespace

SpaceKind Pool::kind_of(const PoolContext& context, const PoolSpec& spec) {
  const std::size_t granularity = context.store.granularity();
  const std::size_t page = spec.page_size == 0 ? granularity : spec.page_size;
  if (!is_power_of_two(page) || !is_aligned(page, granularity)) throw InvalidPageSizeError(page, granularity);
  if (spec.capacity == 0) throw InvalidArgumentError("capacity 0: a pool needs at least one page");
  if (spec.capacity > kMostCapacity) {
    throw InvalidArgumentError("capacity " + std::to_string(spec.capacity) + " (" + format_bytes(spec.capacity) +
                               ") is above the largest, " + format_bytes(kMostCapacity));
  }
  VMM_CHECK((spec.kind == PoolKind::model) == (spec.model == nullptr), "pool '", spec.name, "' is of kind ",
            static_cast<int>(spec.kind));
  return {.kind = spec.kind,
          .page = page,
          .capacity = align_up(spec.capacity, page),
          .is_uniform = spec.page_size != 0,
          .no_split = spec.no_split,
          .grows_freely = spec.grows_freely,
          .within_chunks = context.within_chunks};
}

Pool::Pool(const PoolContext& context, Budget& group, const PoolSpec& spec, DeviceMemory* home,
           std::vector<Location> accessors)
    : context_(context),
      kind_(kind_of(context, spec)),
      name_(spec.name),
      id_(next_owner_id()),
      group_(group),
      keeps_group_(group.weak_from_this().lock()),
      budget_("pool '" + spec.name + "'", spec.physical_limit,
              spec.model == nullptr || spec.kind == PoolKind::spill ? &group : &spec.model->budget()),
      home_(home),
      model_(spec.model),
      sharer_(spec.model == nullptr ? &group : nullptr),
      region_(spec.region),
      tag_(spec.tag),
      most_(std::min(kind_.capacity, context.capabilities.total_memory)),
      slabs_(arena_),
      streams_(context.streams, context.clock),
      space_(context_, kind_, {*this, name_, id_, group_, budget_, arena_, streams_}, std::move(accessors)),
      watched_(context_, name_, space_, streams_),
      sleeping_(context_, {*this, name_, id_, group_, budget_, is_tag_space()}, space_, slabs_),
      own_peaks_(context.peaks),
      counters_(own_peaks_, context.peaks) {
  budget_.set_floor(spec.floor);
  budget_.set_priority(spec.priority);
  const std::size_t capacity = kind_.capacity;
  Peaks* family = model_ == nullptr ? nullptr : model_->family_peaks();
  const MutexLock lock(mutex_);
  space_.prepare();  // it may run out of memory: nothing is to be undone yet
  const Status status = context_.address_space.reserve(context_.driver, capacity, this, &base_);
  if (status.code() == StatusCode::out_of_memory) {
    throw OutOfMemoryError("pool '" + name_ + "': no " + format_bytes(capacity) + " of virtual addresses are left (" +
                               status.text() + "); give pools smaller capacities",
                           capacity, 0, kMostCapacity, model().name());
  }
  if (!status.ok()) {  // or the words, for which there may be no memory, would stand in the way
    throw_if_failed(status, "reserving " + format_bytes(capacity) + " of addresses for pool '" + name_ + "'");
  }
  try {
    directory_ = std::make_unique<BlockDirectory>(capacity);
    // In debug mode a use after free is to fault.
    space_.open(base_, /*may_return=*/is_ordinary() && context_.log == nullptr);
    if (family != nullptr) counters_.follow_family(*family);
  } catch (...) {
    context_.address_space.unreserve(context_.driver, base_, capacity).ignore();
    throw;
  }
}

Pool::~Pool() {
  // Ended already. No lock is taken then: the last to let go of it may be an
  // observer that looked at all pools, under the lock of another.
  if (!space_.is_open()) return;
  close();
  // Nobody comes after this, so it waits, and what the driver refused once is
  // tried again; what it refuses still stays mapped.
  for (int attempt = 0; attempt < kEndAttempts; ++attempt) {
    if (end()) return;
    context_.clock.wait(context_.clock.now()).ignore();
  }
  const MutexLock lock(mutex_);
  VMM_CHECK(directory_->size() == 0 && pages_.empty(), "pool '", name_, "' ends with live blocks");
  space_.close();
  context_.address_space.unreserve(context_.driver, base_, kind_.capacity).ignore();
}

void Pool::require_open() const {
  if (is_closed()) throw InvalidArgumentError("pool '" + name_ + "' is closed");
}

void Pool::close() {
  const StillLock lock(*this, BlockCaches::Kept::gone);
  close_locked();
}

bool Pool::end() {
  settle_watched();
  std::unique_ptr<Asleep> asleep;  // its backup ends with no lock held
  const MutexLock lock(mutex_);
  if (!space_.is_open()) return true;
  VMM_CHECK(is_closed(), "pool '", name_, "' ends before it is closed");
  settle_locked();
  if (live_blocks_locked() != 0) return false;
  if (sleeping_.is_asleep()) {
    give_up_spare_slabs();
    if (sleeping_.is_busy() || !pending_.empty() || !quarantined_.empty()) return false;
    asleep = sleeping_.drop();
    count_slabs(SizeClass::large_pool, SizeClass::small_pool);
  }
  if (space_.is_pinned()) {
    space_.pin(false);
    streams_.graphs_ended();
  }
  give_up_spare_slabs();
  // The memory goes to the shelf at once; only the addresses have to wait for
  // the work that still uses them.
  space_.shelve_idle_chunks({0, kind_.capacity});
  if (!pending_.empty()) return false;
  if (space_.range().has_retired()) {
    context_.clock.cover(space_.range().last_retired_use());
    space_.drop_retired();
  }
  if (!quarantined_.empty() || watched_.leaving() != 0 || space_.range().has_retired()) return false;
  if (!space_.range().clear_dormant().ok()) return false;
  VMM_CHECK(space_.range().live().empty(), "pool '", name_, "' ends with ", space_.range().live().size(), " chunks");
  counters_.count_device_calls(space_.range().mapped_by_driver(), space_.range().unmapped_by_driver());
  space_.close();
  set_inactive_split({});
  if (!context_.address_space.unreserve(context_.driver, base_, kind_.capacity).ok()) {
    context_.address_space.unreserve(context_.driver, base_, kind_.capacity).ignore();
  }
  return true;
}

void Pool::pin() {
  const StillLock lock(*this, BlockCaches::Kept::gone);
  space_.pin(true);
  is_cached_.store(false, std::memory_order_relaxed);
}

void Pool::unpin() {
  const MutexLock lock(mutex_);
  if (!space_.is_pinned()) return;
  space_.pin(false);
  streams_.graphs_ended();
}

bool Pool::is_pinned() const {
  const MutexLock lock(mutex_);
  return space_.is_pinned();
}

}  // namespace vmm
