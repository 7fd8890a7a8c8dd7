// DeviceMemory: making it, its pools, parts and groups, and finding them. How they end is
// ending.cpp, the way of a request allocating.cpp, that of a free freeing.cpp.
#include "core/device/device_memory.h"

#include <algorithm>
#include <utility>

#include "base/errors.h"
#include "core/memory/address_space.h"

namespace vmm {

namespace {

constexpr int kEndAttempts = 3;
// A pool whose capacity nobody named has four times the device's memory:
// addresses are free, and moving chunks needs room to move to.
constexpr std::size_t kCapacityFactor = 4;
// Where a process is short of addresses, such a pool makes do with less, but
// one with fewer than these is of no use.
constexpr std::size_t kLeastCapacity = 2 * kGiB;

Capabilities capabilities_of(Driver& driver, int device) {
  Capabilities capabilities;
  const std::string missing = driver.missing(device);
  if (!missing.empty()) throw NotAvailableError(missing);
  throw_if_failed(driver.capabilities(device, &capabilities),
                  "asking device " + std::to_string(device) + " for its capabilities");
  return capabilities;
}

}  // namespace

DeviceMemory::DeviceMemory(Driver& driver, AddressSpace& address_space, int device, const Options& options)
    : driver_(driver),
      address_space_(address_space),
      device_(device),
      options_(options),
      capabilities_(capabilities_of(driver, device)),
      budget_("device " + driver.name() + ":" + std::to_string(device), kUnlimited, nullptr),
      foreign_budget_("memory of other allocators", kUnlimited, &budget_),
      guest_budget_("models of other devices, asleep here", kUnlimited, &budget_),
      host_budget_("host memory by hand", kUnlimited, nullptr),
      zero_budget_("pages that read as zero", kUnlimited, &budget_),
      spill_budget_("spilled memory", kUnlimited, nullptr),
      store_(driver, Location::on_device(device), capabilities_.granularity,
             options.exportable && capabilities_.exportable),
      spill_store_(driver, Location::on_host(), capabilities_.granularity, /*exportable=*/false),
      guests_(driver, store_, guest_budget_),
      log_(options.debug.is_on() ? std::make_unique<WatchLog>(options.debug) : nullptr),
      streams_(driver, device),
      clock_(streams_),
      caches_(peaks_, clock_, oversize_bytes_),
      ladder_(*this, caches_),
      accessors_{Location::on_device(device)} {
  if (log_ != nullptr) beside_.store(kDebugMode, std::memory_order_relaxed);
}

DeviceMemory::~DeviceMemory() {
  Epoch last_use = kLongAgo;
  {
    const MutexLock lock(registry_mutex_);
    for (const Leaving& leaving : leaving_) last_use = std::max(last_use, leaving.last_use);
  }
  if (last_use != kLongAgo) {  // else nobody waits: a peer may be gone already
    clock_.wait(last_use).ignore();
    for (int attempt = 0; attempt < kEndAttempts; ++attempt) run_passed();
  }
  for (const auto& pool : pools()) {
    pool->close();
    // What the driver refuses once is tried again; what it refuses still stays.
    for (int attempt = 0; attempt < kEndAttempts && !pool->end(); ++attempt) settle(/*wait=*/true);
  }
  const MutexLock lock(registry_mutex_);
  closed_.clear();
  waiting_.clear();
  registry_ = {};
  store_.trim_all();
  spill_store_.trim_all();
}

// --------------------------------------------------------------------- pools

std::size_t DeviceMemory::default_capacity() const {
  const std::size_t chosen = options_.default_capacity_bytes;
  return chosen != 0 ? chosen : std::min(kCapacityFactor * capabilities_.total_memory, kMostCapacity);
}

// One that no device holds could never be backed.
void DeviceMemory::require_page_size(std::size_t page_size) const {
  if (page_size > capabilities_.total_memory && is_power_of_two(page_size)) {
    throw InvalidPageSizeError(page_size, capabilities_.granularity, capabilities_.total_memory);
  }
}

std::shared_ptr<Pool> DeviceMemory::create_pool(const PoolSpec& spec, Budget* group) {
  if (auto pool = try_create_pool(spec, group, /*has_waited=*/false); pool != nullptr) return pool;
  settle(/*wait=*/true);
  return try_create_pool(spec, group, /*has_waited=*/true);
}

std::shared_ptr<Pool> DeviceMemory::try_create_pool(const PoolSpec& spec, Budget* group, bool has_waited) {
  require_page_size(spec.page_size);
  require_floor("pool '" + spec.name + "'", spec.floor);
  Budget& payer = group == nullptr ? budget_ : *group;
  PoolSpec complete = spec;
  if (spec.capacity == 0) complete.capacity = default_capacity();
  try {
    return register_pool(complete, payer);
  } catch (const OutOfMemoryError&) {
    // Of addresses. What has closed may have some still, and queued work before it. (Parts are made
    // under locks, and wait for nobody.)
    if (!has_waited) {
      const MutexLock lock(registry_mutex_);
      if (!waiting_.empty() || !leaving_.empty()) return nullptr;
    }
    if (spec.capacity != 0) throw;
  }
  return register_pool_of_at_most(complete, payer);
}

std::shared_ptr<Pool> DeviceMemory::register_pool(const PoolSpec& spec, Budget& group) {
  // So that no accessor is missed. Not under the registry's: that one is taken by
  // observers, under a pool's.
  const MutexLock lock(accessor_mutex_);
  std::vector<Location> accessors;
  {
    const MutexLock registry_lock(registry_mutex_);
    accessors = accessors_;
  }
  ChunkStore& store = spec.kind == PoolKind::spill ? spill_store_ : store_;
  const PoolContext context{driver_,        address_space_, store,         streams_,  clock_,
                            peaks_,         caches_,        options_,      observer_, oversize_bytes_,
                            within_chunks_, may_be_over_,   capabilities_, device_,   log_.get()};
  auto pool = std::make_shared<Pool>(context, group, spec, this, std::move(accessors));
  const MutexLock registry_lock(registry_mutex_);
  registry_.add(pool);
  return pool;
}

// For a capacity that is ours to choose: half of it, and so on, where the
// process has no such stretch of addresses left. 47 bits hold 407 pools of four
// times 80 GiB; under RLIMIT_AS not even the first may fit.
std::shared_ptr<Pool> DeviceMemory::register_pool_of_at_most(PoolSpec spec, Budget& group) {
  for (const std::size_t wanted = spec.capacity;; spec.capacity = std::max(spec.capacity / 2, kLeastCapacity)) {
    try {
      return register_pool(spec, group);
    } catch (const OutOfMemoryError& error) {
      if (spec.capacity > kLeastCapacity) continue;
      throw OutOfMemoryError(std::string(error.what()) + "; " + format_bytes(wanted) +
                                 " were wanted first; raise the limit on the process' addresses, if there is one "
                                 "(RLIMIT_AS, ulimit -v)",
                             error.requested, error.available, error.limit, error.pool);
    }
  }
}

// Of a part of `model`'s, or, where that is a tag's space, of its model under that tag.
PoolSpec DeviceMemory::part_spec(const std::shared_ptr<Pool>& model, const std::string& name) {
  PoolSpec spec;
  spec.model = model->shared_model();
  spec.model->follow_family_peaks();
  spec.name = model->name() + " (" + name + ")";
  spec.tag = model->tag();
  return spec;
}

std::shared_ptr<Pool> DeviceMemory::create_part(const std::shared_ptr<Pool>& model, RegionId region, bool no_split,
                                                PoolKind kind) {
  model->require_taking();
  PoolSpec spec = part_spec(model, std::to_string(region.first) + ", " + std::to_string(region.second));
  spec.region = region;
  spec.no_split = no_split;
  spec.kind = kind;
  // A part can never hold more than the device, and a process may have very
  // many graphs, each with a pool of its own.
  spec.capacity = std::min(capabilities_.total_memory, model->capacity());
  return register_pool_of_at_most(spec, model->group());
}

std::shared_ptr<Pool> DeviceMemory::create_range(const std::shared_ptr<Pool>& model, const std::string& name,
                                                 std::size_t capacity, std::size_t page_size) {
  model->require_open();
  model->require_taking();
  require_page_size(page_size);
  PoolSpec spec = part_spec(model, name);
  spec.capacity = capacity;
  spec.page_size = page_size;
  spec.kind = PoolKind::range;
  return register_pool(spec, model->group());
}

std::shared_ptr<Pool> DeviceMemory::tagged(const std::shared_ptr<Pool>& model, const std::string& tag) {
  if (tag.empty()) throw InvalidArgumentError("a tag needs a name: it is empty");
  const MutexLock lock(tags_mutex_);
  model->require_open();
  PoolList spaces;
  {
    const MutexLock registry_lock(registry_mutex_);
    spaces = registry_.tagged(*model, tag);
  }
  for (const auto& space : spaces) {
    if (!space->is_sealed()) return space;
  }
  for (const auto& space : spaces) {
    if (!space->reopen()) continue;
    trim_shelf(*space);
    return space;
  }
  // Where some of it is awake, so is what comes to have a tag.
  const PoolList members = family(*model);
  const bool is_partly_awake = std::any_of(members.begin(), members.end(), [](const auto& member) {
    return member->is_tag_space() && !member->is_closed() && !member->is_asleep();
  });
  if (!is_partly_awake) model->require_taking();
  PoolSpec spec = part_spec(model, tag);
  spec.kind = PoolKind::tag;
  spec.tag = tag;
  spec.page_size = model->has_uniform_chunks() ? model->page_size() : 0;
  spec.capacity = std::min(capabilities_.total_memory, model->capacity());
  return register_pool_of_at_most(spec, model->group());
}

std::map<std::string, std::size_t> DeviceMemory::tags_of(const Pool& model) const {
  std::map<std::string, std::size_t> bytes;
  for (const auto& member : family(model)) {
    if (member->tag().empty()) continue;
    bytes[member->tag()] += static_cast<std::size_t>(member->statistics()[StatKind::allocated_bytes][0].current);
  }
  return bytes;
}

void DeviceMemory::watch_streams_of(Location who) {
  if (who.kind == Location::Kind::host || who.device == device_ || neighbours_ == nullptr) return;
  if (DeviceStreams* streams = neighbours_(who.device)) clock_.add_peer(*streams);
}

Status DeviceMemory::add_accessor(Location who) {
  watch_streams_of(who);  // before it can reach anything
  const MutexLock lock(accessor_mutex_);
  PoolList pools;
  {
    // In one step, so that it is in every pool made from now on.
    const MutexLock registry_lock(registry_mutex_);
    if (std::find(accessors_.begin(), accessors_.end(), who) != accessors_.end()) return {};
    pools = *registry_.all().list();
    accessors_.push_back(who);  // last: there may be no memory for the list
  }
  const auto forget = [&] {  // or the next call would take it for let in
    const MutexLock registry_lock(registry_mutex_);
    std::erase(accessors_, who);
  };
  try {
    for (const auto& pool : pools) {
      const Status status = pool->add_accessor(who);
      if (status.ok()) continue;
      forget();
      return status;
    }
    const Status status = second_mappings_.add_accessor(who);
    if (!status.ok()) forget();
    return status;
  } catch (...) {
    forget();
    throw;
  }
}

void DeviceMemory::while_nobody_is_let_in(std::vector<DeviceMemory*> devices, const FunctionRef<void()>& work) {
  // One order for all.
  std::sort(devices.begin(), devices.end(),
            [](const DeviceMemory* a, const DeviceMemory* b) { return a->device_ < b->device_; });
  struct Locked {
    explicit Locked(const std::vector<DeviceMemory*>& of) VMM_NO_THREAD_SAFETY_ANALYSIS : of_(of) {
      for (DeviceMemory* memory : of_) memory->accessor_mutex_.lock();
    }
    Locked(const Locked&) = delete;
    Locked& operator=(const Locked&) = delete;
    ~Locked() VMM_NO_THREAD_SAFETY_ANALYSIS {
      for (DeviceMemory* memory : of_) memory->accessor_mutex_.unlock();
    }
    const std::vector<DeviceMemory*>& of_;
  };
  const Locked locked(devices);
  work();
}

void DeviceMemory::set_observer(PoolObserver* observer, bool follows_blocks) {
  // It is told of each event when it happens, so threads keep no blocks.
  const bool stops = observer != nullptr && follows_blocks;
  if (stops) caches_.stop(BlockCaches::kObserved);
  observer_.store(observer, std::memory_order_release);
  if (!stops) caches_.resume(BlockCaches::kObserved);
}

void DeviceMemory::keep_blocks_within_chunks() {
  const MutexLock lock(within_mutex_);  // a second caller returns when all is done
  if (are_all_within_) return;
  within_chunks_.store(true, std::memory_order_relaxed);
  // What threads keep may lie over several.
  { const BlockCaches::Still still(caches_, BlockCaches::Kept::back); }
  for (const auto& pool : pools()) pool->withhold_broken_chunks();
  are_all_within_ = true;  // last: without host memory the next caller goes on
}

void DeviceMemory::set_oversize(std::size_t bytes) {
  oversize_bytes_.store(bytes, std::memory_order_relaxed);
  // What threads keep was not counted so.
  const BlockCaches::Still still(caches_, BlockCaches::Kept::gone);
}

std::shared_ptr<Budget> DeviceMemory::create_group(const std::string& name, std::size_t limit_bytes) {
  const MutexLock lock(registry_mutex_);
  auto group = std::make_shared<Budget>(name, limit_bytes, &budget_);
  auto spill = std::make_shared<Budget>("spilled memory of " + name, kUnlimited, &spill_budget_);
  groups_.emplace(group.get(), Group{group, std::move(spill), std::make_shared<GroupFigures>()});
  return group;
}

void DeviceMemory::set_on_pressure(const Budget& group, OnPressure relieve) {
  auto called = relieve == nullptr ? nullptr : std::make_shared<const OnPressure>(std::move(relieve));
  // What was called before ends with no lock held: it may be somebody's code.
  const MutexLock lock(registry_mutex_);
  if (const auto found = groups_.find(&group); found != groups_.end()) found->second.on_pressure.swap(called);
}

std::shared_ptr<const DeviceMemory::OnPressure> DeviceMemory::on_pressure_of(const Budget& group) const {
  const MutexLock lock(registry_mutex_);
  const auto found = groups_.find(&group);
  return found == groups_.end() ? nullptr : found->second.on_pressure;
}

std::size_t DeviceMemory::groups() const {
  const MutexLock lock(registry_mutex_);
  return groups_.size();
}

std::shared_ptr<ZeroChunks> DeviceMemory::zero_chunks() {
  const MutexLock lock(registry_mutex_);
  std::shared_ptr<ZeroChunks> chunks = zero_chunks_.lock();
  if (chunks == nullptr) {
    chunks = std::make_shared<ZeroChunks>(store_, budget_, zero_budget_);
    zero_chunks_ = chunks;
  }
  return chunks;
}

void DeviceMemory::add_shared(const Pool& model, std::size_t bytes) {
  const MutexLock lock(registry_mutex_);
  if (bytes != 0) shared_bytes_[model.id()] += bytes;
}

void DeviceMemory::remove_shared(const Pool& model, std::size_t bytes) {
  const MutexLock lock(registry_mutex_);
  const auto at = shared_bytes_.find(model.id());
  if (at != shared_bytes_.end() && (at->second -= bytes) == 0) shared_bytes_.erase(at);
}

std::size_t DeviceMemory::shared_bytes_of(const Pool& model) const {
  const MutexLock lock(registry_mutex_);
  const auto at = shared_bytes_.find(model.id());
  return at == shared_bytes_.end() ? 0 : at->second;
}

std::vector<Location> DeviceMemory::accessors() const {
  const MutexLock lock(registry_mutex_);
  return accessors_;
}

PoolList DeviceMemory::pools() const {
  const MutexLock lock(registry_mutex_);
  return *registry_.all().list();
}

PoolList DeviceMemory::pools_under(const Budget& group) const {
  const MutexLock lock(registry_mutex_);
  PoolList pools = &group == &budget_ ? *registry_.all().list() : registry_.under(group);
  // What of a model is in host memory, the model's budget does not pay for.
  std::erase_if(pools, [&](const auto& pool) { return !pool->budget().stands_under(group); });
  return pools;
}

bool DeviceMemory::is_any_asleep(const Pool& model) const {
  const PoolList members = family(model);
  return std::any_of(members.begin(), members.end(), [](const auto& member) { return member->is_asleep(); });
}

PoolList DeviceMemory::family(const Pool& pool) const {
  const MutexLock lock(registry_mutex_);
  return registry_.family(pool);
}

std::shared_ptr<Pool> DeviceMemory::pool_at(Address address) const {
  const MutexLock lock(registry_mutex_);
  // One that is being made, or is going, is in the one and not in the other.
  auto pool = registry_.find(address_space_.find(address));
  return pool != nullptr && pool->contains(address) ? pool : nullptr;
}

}  // namespace vmm
