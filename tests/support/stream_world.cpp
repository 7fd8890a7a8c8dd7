// StreamWorld: streams and pools.
#include "support/stream_world.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>

#include "base/errors.h"

namespace vmm::testing {

namespace {

constexpr std::size_t kPage = 2 * kMiB;
constexpr std::size_t kDeviceBytes = 160 * kMiB;
constexpr std::size_t kGroupLimit = 64 * kMiB;
constexpr std::size_t kCapacity = 256 * kMiB;
constexpr std::size_t kFewAddresses = 32 * kMiB;  // where streams soon get in each other's way

Stream handle(std::uintptr_t value) { return reinterpret_cast<Stream>(value); }

Options options(const std::string& debug) {
  Options options;
  if (!debug.empty()) options.debug = parse_debug_mode(debug);
  options.exportable = false;  // a descriptor a chunk
  options.store_bytes = 8 * kMiB;
  return options;
}

std::string model_name(std::size_t pool) { return "model" + std::to_string(pool); }

}  // namespace

const std::array<StreamSlot, kStreamSlots>& stream_slots() {
  using Kind = StreamSlot::Kind;
  static const std::array<StreamSlot, kStreamSlots> kSlots = [] {
    const std::array<StreamSlot, kNamedStreams> named = {{
        {"default", nullptr, 0, Kind::standard},
        {"torch 1", handle(0x110), 0, Kind::own},
        {"torch 2", handle(0x120), 0, Kind::own},
        {"torch 3", handle(0x130), 0, Kind::own},
        {"torch 4", handle(0x140), 0, Kind::own},
        {"per-thread", kPerThread, 0, Kind::per_thread},
        {"per-thread of the other", kPerThread, 0, Kind::of_other_thread},
        {"foreign blocking 1", handle(0x910), 0, Kind::blocking},
        {"foreign blocking 2", handle(0x920), 0, Kind::blocking},
        {"foreign 1", handle(0xA10), 0, Kind::non_blocking},
        {"foreign 2", handle(0xA20), 0, Kind::non_blocking},
        {"default of the peer", nullptr, 1, Kind::standard},
        {"torch 1 of the peer", handle(0x210), 1, Kind::own},
        {"torch 2 of the peer", handle(0x220), 1, Kind::own},
    }};
    std::array<StreamSlot, kStreamSlots> slots;
    std::copy(named.begin(), named.end(), slots.begin());
    for (std::size_t k = 0; k < kCrowd; ++k) {
      slots.at(kNamedStreams + k) = {"torch's of the crowd " + std::to_string(k), handle(0x1000 + k), 0, Kind::own};
    }
    return slots;
  }();
  return kSlots;
}

// -- The other thread

OtherThread::~OtherThread() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void OtherThread::run(const std::function<void()>& work) {
  std::unique_lock<std::mutex> lock(mutex_);
  work_ = &work;
  done_ = false;
  changed_.notify_all();
  changed_.wait(lock, [this] { return done_; });
  if (error_ != nullptr) std::rethrow_exception(std::exchange(error_, nullptr));
}

void OtherThread::loop() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return work_ != nullptr || ends_; });
    if (ends_) return;
    try {
      (*std::exchange(work_, nullptr))();
    } catch (...) {
      error_ = std::current_exception();
    }
    done_ = true;
    changed_.notify_all();
  }
}

// -- The world's life

StreamWorld::StreamWorld(const std::string& debug)
    : host_({kPage, kDeviceBytes, 2}), scripted_(host_), driver_(scripted_, /*with_patterns=*/!debug.empty()) {
  static std::atomic<unsigned> worlds{0};
  folder_ = std::filesystem::temp_directory_path() /
            ("vmm_stream_program_" + std::to_string(::getpid()) + "_" + std::to_string(++worlds));
  memory_ = std::make_unique<DeviceMemory>(driver_, space_, 0, options(debug));
  peer_memory_ = std::make_unique<DeviceMemory>(driver_, space_, 1, options(debug));
  sleeper_ = std::make_unique<Sleeper>(*memory_);
  peer_sleeper_ = std::make_unique<Sleeper>(*peer_memory_);
  group_ = std::make_unique<SharedMemoryPool>(*memory_, kGroupLimit);
  CaptureHooks hooks;
  hooks.capture_of = [this](Stream stream) { return driver_.capture_of({stream, 0}); };
  private_pools_ = std::make_unique<PrivatePools>(*memory_, hooks);
  for (const int device : {0, 1}) {
    memory_of(device).streams().set_census(census(device));
    memory_of(device).set_neighbours([this](int other) { return &memory_of(other).streams(); });
  }
  for (std::size_t k = 0; k < kPoolSlots; ++k) open(k);
  open_manager();
}

StreamWorld::~StreamWorld() {
  scripted_.clear_failures();
  end_transfers();
  end_all_graphs();
  unpin_part();
  while (!live_.empty()) free_block(live_.size() - 1, false, 0);
  saved_.reset();
  manager_.reset();
  group_.reset();
  peer_memory_->close_pool(*pools_[kPeerPool], /*force=*/true);  // it may sleep on the first device
  for (auto& pool : pools_) pool.reset();
  private_pools_.reset();
  // Neither device outlives what the other one still waits for.
  memory_->empty_cache();
  peer_memory_->empty_cache();
  memory_.reset();
  peer_memory_.reset();
  sleeper_.reset();  // what sleeps has backups
  peer_sleeper_.reset();
  std::filesystem::remove_all(folder_);
  if (scripted_.leaks().empty()) return;
  std::fprintf(stderr, "leaked: %s\n", scripted_.leaks().c_str());
  std::abort();
}

void StreamWorld::check() {
  driver_.check();
  for (DeviceMemory* memory : {memory_.get(), peer_memory_.get()}) {
    if (transfers_.empty()) {
      memory->check();
    } else {  // what is on its way to a pool that wakes is in no pool's numbers
      for (const auto& pool : memory->pools()) pool->check();
    }
  }
}

void StreamWorld::step(const StreamOp& op) {
  using Kind = StreamOp::Kind;
  driver_.at("step " + std::to_string(steps_++) + " " + to_string(op));
  const std::size_t block = block_of(op.a);
  switch (op.kind) {
    case Kind::allocate:
      return allocate(op.a % kPoolSlots, op.b, op.c % kStreamSlots);
    case Kind::allocate_at:
      return allocate_at(op.a % kPoolSlots, op.b, op.c % kStreamSlots, op.d);
    case Kind::free:
      if (!live_.empty()) free_block(block, op.b == 1, op.c);
      return;
    case Kind::use:
      if (!live_.empty()) use_block(block, op.b % kStreamSlots, op.c);
      return;
    case Kind::record_stream:
      if (!live_.empty()) record_stream(block, op.b % kStreamSlots);
      return;
    case Kind::pages:
      return pages(op.a % kPoolSlots, op.b, op.c, op.d % kStreamSlots);
    case Kind::first_pages:
      return first_pages(op.a % kPoolSlots, op.b, op.c % kStreamSlots);
    case Kind::hold:
      if (!live_.empty()) hold(block);
      return;
    case Kind::unhold:
      if (!live_.empty()) unhold(block);
      return;
    case Kind::wait:
      if (may_work(op.a % kStreamSlots) && may_work(op.b % kStreamSlots)) {
        wait(op.a % kStreamSlots, point(op.b % kStreamSlots));
      }
      return;
    case Kind::create_stream:
      return create_stream(op.a % kStreamSlots);
    case Kind::destroy_stream:
      return destroy_stream(op.a % kStreamSlots);
    case Kind::run:
      if (!is_alive(op.a % kStreamSlots)) return;
      return on_thread_of(op.a % kStreamSlots, [&] { driver_.run(ref(op.a), op.b); });
    case Kind::run_all:
      return driver_.run_all();
    case Kind::drift:
      return driver_.drift(op.a);
    case Kind::trim: {
      Pool& pool = *pools_[op.a % kPoolSlots];
      memory_of(pool.device()).trim(pool, op.b);
      return;
    }
    case Kind::empty_cache:
      if (op.a % 2 == 0) private_pools_->sweep();  // as the adapter does
      memory_of(static_cast<int>(op.a % 2)).empty_cache();
      return;
    case Kind::settle:
      pools_[op.a % kPoolSlots]->settle();
      return;
    case Kind::pool_limit: {
      Pool& pool = *pools_[op.a % kPoolSlots];
      memory_of(pool.device()).set_limit(pool.budget(), op.b == 0 ? kUnlimited : op.b);
      return;
    }
    case Kind::group_limit:
      group_->set_physical_limit(std::max(op.b, kPage));
      return;
    case Kind::close_pool:
      return close_pool(op.a % kPoolSlots, op.b == 1);
    case Kind::close_group:
      return close_group(op.b == 1);
    case Kind::fail_call:
      return fail_call(op.a, op.b);
    case Kind::begin_capture:
      return begin_capture(op.a % kGraphSlots, op.b % kStreamSlots, op.c % kRegions, op.d == 1);
    case Kind::join_capture:
      return join_capture(op.a % kGraphSlots, op.b % kStreamSlots);
    case Kind::invalidate_capture:
      return invalidate_capture(op.a % kGraphSlots);
    case Kind::end_capture:
      return end_capture(op.a % kGraphSlots);
    case Kind::launch:
      return launch(op.a % kGraphSlots, op.b % kStreamSlots);
    case Kind::drop_graph:
      return drop_graph(op.a % kGraphSlots);
    case Kind::open_mempool:
      return open_mempool(op.a % kRegions, op.b == 1);
    case Kind::enter_mempool:
      return enter_mempool(op.a % kRegions);
    case Kind::leave_mempool:
      return leave_mempool(op.a % kRegions);
    case Kind::close_mempool:
      return close_mempool(op.a % kRegions);
    case Kind::pin:
      return pin_part();
    case Kind::unpin:
      return unpin_part();
    case Kind::launch_part:
      return launch_part(op.a % kStreamSlots);
    case Kind::checkpoint:
      return checkpoint();
    case Kind::restore:
      return restore();
    case Kind::sleep:
      return transfer(op.a % kPoolSlots, std::nullopt, op.b, op.c);
    case Kind::wake:
      return transfer(std::nullopt, op.a % kPoolSlots, op.b, op.c);
    case Kind::swap:
      return transfer(op.a % kPoolSlots, op.b % kPoolSlots, op.c, op.d);
    case Kind::go_on:
      return go_on(op.a, op.b == 0 ? SteppedTransfer::kToTheEnd : op.b, op.c == 1);
    case Kind::add_peers:
      return add_peers();
    case Kind::create_chunk:
      return create_chunk(op.a);
    case Kind::map_chunk:
      return map_chunk(op.a % kChunkSlots, op.b % kPlaces, op.c == 1);
    case Kind::use_mapping:
      return use_mapping(op.a % kPlaces, op.b % kStreamSlots, op.c);
    case Kind::set_access:
      return set_access(op.a % kPlaces, op.b, static_cast<int>(op.c % 2));
    case Kind::unmap_chunk:
      return unmap_chunk(op.a % kPlaces);
    case Kind::free_chunk:
      return free_chunk(op.a % kChunkSlots);
    case Kind::close_manager:
      return close_manager();
  }
}

std::size_t StreamWorld::block_of(std::uint64_t number) const {
  if (live_.empty()) return 0;
  return number < kNewest ? number % live_.size() : live_.size() - 1 - (number - kNewest) % live_.size();
}

// -- Streams

bool StreamWorld::is_alive(std::size_t number) {
  if (slot(number).kind == StreamSlot::Kind::own &&
      std::find(own_streams_.begin(), own_streams_.end(), number) == own_streams_.end()) {
    driver_.add_stream({slot(number).handle, slot(number).device, false, slot(number).name});
    own_streams_.push_back(number);
  }
  return !slot(number).is_foreign() || lives_[number] % 2 == 1;
}

StreamCensus StreamWorld::census(int device) {
  StreamCensus census;
  census.permanent = [this, device](std::vector<Stream>* found) {
    for (const std::size_t number : own_streams_) {
      if (slot(number).device == device) found->push_back(slot(number).handle);
    }
  };
  // As the adapter answers: to ask a captured stream would end its capture.
  census.is_blocking = [this, device](Stream stream) {
    return driver_.is_blocking({stream, device}) && !driver_.is_blocked({stream, device});
  };
  return census;
}

bool StreamWorld::may_work(std::size_t number) {
  if (!is_alive(number)) return false;
  bool blocked = false;
  on_thread_of(number, [&] { blocked = driver_.is_blocked(ref(number)); });
  return !blocked;
}

void StreamWorld::on_thread_of(std::size_t number, const std::function<void()>& work) {
  if (slot(number).kind == StreamSlot::Kind::of_other_thread) {
    other_thread_.run(work);
  } else {
    work();
  }
}

VectorClock StreamWorld::point(std::size_t number) {
  VectorClock found;
  on_thread_of(number, [&] { found = driver_.point(ref(number)); });
  return found;
}

void StreamWorld::wait(std::size_t number, const VectorClock& point) {
  on_thread_of(number, [&] { driver_.wait(ref(number), point); });
}

// A pool has met it: it was given memory for it, or the stream was recorded.
void StreamWorld::note_met(std::size_t number) {
  if (slot(number).kind == StreamSlot::Kind::non_blocking) {
    has_met_unreachable_.at(static_cast<std::size_t>(slot(number).device)) = true;
  }
}

bool StreamWorld::is_coverable(std::size_t number) const {
  return slot(number).kind != StreamSlot::Kind::non_blocking ||
         has_met_unreachable_.at(static_cast<std::size_t>(slot(number).device));
}

void StreamWorld::create_stream(std::size_t number) {
  if (is_alive(number)) return;
  ++lives_[number];
  driver_.add_stream({slot(number).handle, slot(number).device, slot(number).kind == StreamSlot::Kind::blocking,
                      slot(number).name + (" of life " + std::to_string(lives_[number] / 2 + 1))});
}

void StreamWorld::destroy_stream(std::size_t number) {
  if (!slot(number).is_foreign() || !may_work(number)) return;
  const bool is_recorded = std::any_of(live_.begin(), live_.end(), [&](const Live& live) {
    return std::find(live.recorded.begin(), live.recorded.end(), user(number)) != live.recorded.end();
  });
  if (is_recorded) return;
  driver_.destroy_stream(slot(number).handle);
  ++lives_[number];
}

void StreamWorld::fail_call(std::uint64_t n, std::uint64_t how) {
  const Status error(StatusCode::driver_error, "scripted", 999, "SCRIPTED");
  scripted_.clear_failures();
  if (how == 1) scripted_.fail_nth_call(n + 1, {StatusCode::out_of_memory, "scripted"});
  if (how == 2) scripted_.fail_nth_call(n + 1, error);
  if (how == 3) scripted_.fail_nth(Call::record, 1, error, Repeat::from_then_on);
  if (how == 4) scripted_.fail_nth(Call::fill_async, 1, error);
}

// -- Pools

void StreamWorld::open(std::size_t pool) {
  // A failing call may be due.
  for (int attempt = 0;; ++attempt) {
    try {
      if (pool < kGroupPools) {
        ModelSpec spec;
        spec.virtual_capacity = kCapacity;
        if (pool == 1) spec.page_size = 2 * kPage;
        if (pool == 2) spec.virtual_capacity = kFewAddresses;
        if (pool == 2) spec.floor = 2 * kPage;
        if (pool == 2) spec.priority = 1;
        pools_[pool] = group_->register_model(model_name(pool), spec);
      } else if (pool == kTagOfFirst) {
        pools_[pool] = memory_->tagged(pools_[0], kTag);
      } else if (pool == kPartOfPlain) {
        part_region_ = std::make_shared<Region>();
        pools_[pool] = memory_->create_part(pools_[kPlainPool], {1, 1000 + ++last_name_}, /*no_split=*/false);
      } else {
        PoolSpec spec;
        spec.name = "pool" + std::to_string(pool);
        spec.capacity = pool == kPlainPool ? kFewAddresses : kCapacity;
        spec.grows_freely = pool == kPlainPool;
        pools_[pool] = (pool == kPeerPool ? peer_memory_ : memory_)->create_pool(spec, nullptr);
      }
      return;
    } catch (const VmmError&) {
      if (attempt == 3) throw;
    }
  }
}

// What ends with a pool that is closed by force: its pages. Its tensors end too,
// or live on.
void StreamWorld::end_blocks_of(std::size_t pool, bool keeps_tensors) {
  for (std::size_t k = 0; k < live_.size();) {
    Live& live = live_[k];
    if (live.pool != pool) {
      ++k;
    } else if (live.held) {
      live.pool = kPoolSlots;  // until it is let go of
      ++k;
    } else if (live.pages) {
      owe(live, false);
      driver_.take_back_pages(live.address, live.size);
      live_.erase(live_.begin() + static_cast<std::ptrdiff_t>(k));
    } else if (keeps_tensors) {
      live.pool = kPoolSlots;
      ++k;
    } else {
      free_block(k, false, 0);
    }
  }
}

void StreamWorld::end_pool(std::size_t pool, bool keeps_tensors) {
  // It may end pinned: its graphs have gone with it.
  if (pool == kPartOfPlain) forget_pin();
  end_blocks_of(pool, keeps_tensors);
  if (pool < kGroupPools) {
    group_->unregister_model(model_name(pool), /*force=*/true);
  } else {
    memory_of(pools_[pool]->device()).close_pool(*pools_[pool], /*force=*/true);
  }
  pools_[pool].reset();
}

// It ends with its model.
void StreamWorld::end_tag(bool keeps_tensors) {
  end_blocks_of(kTagOfFirst, keeps_tensors);
  pools_[kTagOfFirst].reset();
}

void StreamWorld::close_pool(std::size_t pool, bool keeps_tensors) {
  if (pool == kPartOfPlain && pools_[kPlainPool]->is_asleep()) return;  // none is made for a model that sleeps
  // torch lets go of a private pool some time; here, before its model ends.
  if (pool == kPlainPool) end_pool(kPartOfPlain, keeps_tensors);
  if (pool == kTagOfFirst) pool = 0;
  if (pool == 0) end_tag(keeps_tensors);
  end_pool(pool, keeps_tensors);
  open(pool);
  if (pool == kPlainPool) open(kPartOfPlain);
  if (pool == 0) open(kTagOfFirst);
}

void StreamWorld::close_group(bool keeps_tensors) {
  end_tag(keeps_tensors);
  for (std::size_t k = 0; k < kGroupPools; ++k) end_blocks_of(k, keeps_tensors);
  group_->close(/*force=*/true);
  for (std::size_t k = 0; k < kGroupPools; ++k) pools_[k].reset();
  group_ = std::make_unique<SharedMemoryPool>(*memory_, kGroupLimit);
  for (std::size_t k = 0; k < kGroupPools; ++k) open(k);
  open(kTagOfFirst);
}

std::uint64_t StreamWorld::number_of(const std::shared_ptr<Pool>& pool) {
  auto& [known, number] = pool_numbers_[pool.get()];
  if (known.lock() != pool) {
    known = pool;
    number = ++last_pool_;
  }
  return number;
}

}  // namespace vmm::testing
