// RandomWorld: pools, and what is set.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <set>

#include "base/errors.h"
#include "core/faces/seals.h"
#include "support/random_world.h"

namespace vmm::testing {

namespace {

using Kind = Op::Kind;
constexpr std::size_t kGranularity = 2 * kMiB;
constexpr std::size_t kGroupLimit = 96 * kMiB;
constexpr std::size_t kDeviceBytes = 192 * kMiB;
constexpr std::size_t kSpillLimit = 48 * kMiB;
constexpr const char* kTag = "weights";

Options options(const std::string& debug) {
  Options options;
  options.store_bytes = 8 * kMiB;
  if (!debug.empty()) options.debug = parse_debug_mode(debug);
  return options;
}

}  // namespace

RandomWorld::RandomWorld(const std::string& debug)
    : host_({kGranularity, kDeviceBytes, 1}),
      driver_(host_),
      memory_(std::make_unique<DeviceMemory>(driver_, space_, 0, options(debug))),
      group_(memory_->create_group("group", kGroupLimit)) {
  driver_.set_wait_on_held(ScriptedDriver::WaitOnHeld::pass);
  memory_->set_limit(*memory_->spill_group_of(*group_), kSpillLimit);
  memory_->set_on_pressure(
      *group_, [this](std::size_t /*bytes*/, const std::shared_ptr<Pool>& asker) { return relieve(asker); });
  for (std::size_t k = 0; k < kPools; ++k) open(k);
}

RandomWorld::~RandomWorld() {
  driver_.clear_failures();
  driver_.release_fences();
  memory_->set_on_pressure(*group_, nullptr);
  for (const Live& live : live_) DeviceMemory::free(space_, live.address);
  live_.clear();
  saved_.reset();
  for (auto& pool : pools_) {
    if (pool == nullptr) continue;
    pool->drop_pages();
    pool.reset();
  }
  memory_.reset();
  if (!driver_.leaks().empty()) {
    std::fprintf(stderr, "leaked: %s\n", driver_.leaks().c_str());
    std::abort();
  }
}

void RandomWorld::step(const Op& op) {
  const std::uint64_t failures = driver_.failures();
  switch (op.kind) {
    case Kind::allocate:
      allocate(op.a % kPools, op.b, stream_of(op.c), failures);
      break;
    case Kind::free:
      if (!live_.empty()) free_live(op.a % live_.size());
      break;
    case Kind::record_stream:
      if (!live_.empty()) {
        const Live& live = live_[op.a % live_.size()];
        live.home->record_stream(live.address, stream_of(op.b));
      }
      break;
    case Kind::pages:
      pages(op.a % kPools, op.b, op.c, failures);
      break;
    case Kind::first_pages:
      first_pages(op.a % kPools, op.b, failures);
      break;
    case Kind::free_pages:
      if (!page_ranges_.empty()) free_page_range(op.a % page_ranges_.size());
      break;
    case Kind::trim:
      memory_->trim(*pools_[op.a % kPools], op.b);
      break;
    case Kind::empty_cache:
      memory_->empty_cache();
      break;
    case Kind::pool_limit:
      memory_->set_limit(pools_[op.a % kPools]->budget(), op.b == 0 ? kUnlimited : op.b);
      most_claims_ = kUnlimited;
      break;
    case Kind::group_limit:
      memory_->set_limit(*group_, op.b);
      most_claims_ = kUnlimited;
      break;
    case Kind::floor:
      set_floor(op.a % kPart, op.b);
      break;
    case Kind::priority:
      pools_[op.a % kPart]->budget().set_priority(static_cast<int>(op.b));
      break;
    case Kind::hold:
      driver_.hold_fences(stream_of(op.b));
      break;
    case Kind::release_holds:
      driver_.release_fences();
      break;
    case Kind::fail_call:
      driver_.clear_failures();
      driver_.fail_nth_call(op.a + 1, op.b == 1 ? Status(StatusCode::out_of_memory, "scripted")
                                                : Status(StatusCode::driver_error, "scripted", 999, "SCRIPTED"));
      break;
    case Kind::settle:
      pools_[op.a % kPools]->settle();
      break;
    case Kind::reopen:
      reopen(op.a % kPools);
      break;
    case Kind::threads:
      run_threads(op.a, op.b);
      break;
    case Kind::pin:
      op.b == 1 ? pools_[kPart]->pin() : pools_[kPart]->unpin();
      break;
    case Kind::checkpoint:
      checkpoint();
      break;
    case Kind::restore:
      restore();
      break;
    case Kind::sleep:
      transfer(op.a % kPart, std::nullopt, op.b == 1, op.c, failures);
      break;
    case Kind::wake:
      transfer(std::nullopt, op.a % kPart, false, op.c, failures);
      break;
    case Kind::swap:
      if (op.a % kPart != op.b % kPart) transfer(op.a % kPart, op.b % kPart, false, 0, failures);
      break;
    case Kind::spill:
      memory_->set_spills(*pools_[op.a % kPart], op.b == 1);
      break;
    case Kind::spill_limit:
      memory_->set_limit(*memory_->spill_group_of(*group_), op.b);
      break;
    case Kind::seal:
      seal(op.b == 1, failures);
      break;
    case Kind::pressure:
      pressure_ = op.a;
      break;
  }
}

void RandomWorld::set_floor(std::size_t k, std::size_t floor) {
  const std::size_t before = pools_[k]->floor();
  try {
    memory_->set_floor(*pools_[k], floor);
    most_claims_ = kUnlimited;
  } catch (const InvalidArgumentError&) {
    require(pools_[k]->floor() == before, "a floor that was refused");
    require(floor > pools_[k]->budget().limit() || group_->floors() - before + floor > group_->limit(),
            "a floor of " + std::to_string(floor) + " refused");
  }
}

void RandomWorld::open(std::size_t k) {
  most_claims_ = kUnlimited;  // it may have a floor
  ++last_owner_;
  pool_high_[k] = 0;
  if (k == kTagged) {
    pools_[k] = memory_->tagged(pools_[kModelOfTagged], kTag);
    return;
  }
  if (k == kPart) {
    saved_.reset();
    pools_[k] = memory_->create_part(pools_[kModelOfPart], {1, last_owner_}, /*no_split=*/last_owner_ % 4 == 0);
    return;
  }
  PoolSpec spec;
  spec.name = "pool" + std::to_string(k);
  spec.capacity = kCapacity;
  if (k == 1) spec.page_size = 4 * kMiB;
  if (k == 2) spec.floor = 4 * kMiB;
  if (k == 2) spec.priority = 1;
  spec.grows_freely = k == kModelOfPart;
  pools_[k] = memory_->create_pool(spec, k == kModelOfPart ? nullptr : group_.get());
  if (k < 2) memory_->set_spills(*pools_[k], true);
}

void RandomWorld::checkpoint() {
  try {
    PoolCheckpoint now = pools_[kPart]->checkpoint();
    std::vector<Live> blocks;
    std::copy_if(live_.begin(), live_.end(), std::back_inserter(blocks),
                 [](const Live& live) { return live.pool == kPart; });
    saved_ = {std::move(now), std::move(blocks)};
  } catch (const VmmError&) {
    // A freed block still waits for a recorded stream.
  }
}

void RandomWorld::restore() {
  if (!saved_.has_value()) return;
  const auto addresses = [](const std::vector<Live>& blocks) {
    std::set<Address> found;
    for (const Live& live : blocks) {
      if (live.pool == kPart) found.insert(live.address);
    }
    return found;
  };
  std::vector<Address> freed;
  std::vector<Address> allocated;
  try {
    pools_[kPart]->restore(saved_->first, &freed, &allocated);
  } catch (const VmmError&) {
    require(freed.empty() && allocated.empty(), "a refused restore changed something");
    return;
  }
  if (pools_[kPart]->is_asleep()) {  // only what changes nothing is done meanwhile
    require(freed.empty() && allocated.empty(), "a restore changed one that sleeps");
    require(addresses(live_) == addresses(saved_->second), "one that sleeps says that it is as it was");
    return;
  }
  require(std::set<Address>(freed.begin(), freed.end()) == addresses(live_), "freed other blocks than the live ones");
  require(std::set<Address>(allocated.begin(), allocated.end()) == addresses(saved_->second),
          "made other blocks live than those of the checkpoint");
  std::erase_if(live_, [](const Live& live) { return live.pool == kPart; });
  for (Live live : saved_->second) {
    live.id = ++last_id_;
    check_no_former_owner(*live.home, live.address, extent(live.size));
    write(live);
    live_.push_back(live);
  }
}

void RandomWorld::reopen(std::size_t k) {
  if (k == kPart && pools_[kModelOfPart]->is_asleep()) return;
  if (k == kTagged) k = kModelOfTagged;
  if (k == kModelOfPart) close(kPart);
  if (k == kModelOfTagged) close(kTagged);
  close(k);
  open_again(k);
  if (k == kModelOfPart) open_again(kPart);
  if (k == kModelOfTagged) open_again(kTagged);
}

void RandomWorld::close(std::size_t k) {
  for (std::size_t index = 0; index < live_.size();) {
    if (live_[index].pool == k) {
      free_live(index);
    } else {
      ++index;
    }
  }
  if (k != kTagged) memory_->close_pool(*pools_[k], /*force=*/true);  // a tag ends with its model
  std::erase_if(page_ranges_, [&](const Pages& range) { return range.pool == k; });
  pools_[k].reset();
}

void RandomWorld::open_again(std::size_t k) {
  for (int attempt = 0; pools_[k] == nullptr; ++attempt) {
    try {
      open(k);
    } catch (const VmmError&) {
      require(attempt < 3, "a pool cannot be opened");
    }
  }
}

void RandomWorld::seal(bool is_sealed, std::uint64_t failures) {
  if (memory_->debug_log() != nullptr) return;
  std::vector<SealedPiece> pieces;
  for (const Live& live : live_) {
    const bool is_tags = live.home->is_tag_space() && live.home->tag() == kTag;
    if (is_tags && (is_sealed || live.is_sealed)) pieces.push_back({live.address, live.size, true});
  }
  if (pieces.empty()) return;
  try {
    is_sealed ? seal_pages(*memory_, *pools_[kModelOfTagged], pieces)
              : unseal_pages(*memory_, *pools_[kModelOfTagged], pieces);
  } catch (const InvalidArgumentError&) {
    return;  // what was freed there still waits for a recorded stream
  } catch (const AsleepError&) {
    require(is_any_asleep(kModelOfTagged), "one that is awake says that it sleeps");
    return;
  } catch (const VmmError&) {
    require(driver_.failures() != failures, "sealing failed without a failing call");
    return;
  }
  if (is_sealed) ++counts_.sealed;
  for (Live& live : live_) {
    const bool is_piece = std::any_of(pieces.begin(), pieces.end(),
                                      [&](const SealedPiece& piece) { return piece.address == live.address; });
    if (is_piece) live.is_sealed = is_sealed;
  }
}

bool RandomWorld::relieve(const std::shared_ptr<Pool>& asker) {
  const auto is_others = [&](std::size_t k) { return pools_[k] != nullptr && &pools_[k]->model() != asker.get(); };
  try {
    if (pressure_ == 1) {
      std::size_t given = 0;
      for (std::size_t k = 0; k < kModelOfPart; ++k) given += is_others(k) ? memory_->trim(*pools_[k], 0) : 0;
      if (given != 0) ++counts_.relieved;
      return given != 0;
    }
    if (pressure_ == 2) {
      for (std::size_t index = 0; index < live_.size(); ++index) {
        if (!is_others(model_of(live_[index].pool))) continue;
        free_live(index);
        ++counts_.relieved;
        return true;
      }
    }
    for (std::size_t k = 0; pressure_ == 3 && k < kModelOfPart; ++k) {
      const bool is_on_its_way = std::find(on_their_way_.begin(), on_their_way_.end(), k) != on_their_way_.end();
      if (!is_others(k) || is_on_its_way || is_any_asleep(k) || memory_->debug_log() != nullptr) continue;
      transfer(k, std::nullopt, /*is_discarded=*/false, 0, /*failures=*/~std::uint64_t{0});
      if (is_any_asleep(k)) ++counts_.relieved;
      return is_any_asleep(k);
    }
  } catch (const std::exception& error) {
    wrong_in_relief_ = error.what();
  }
  return false;
}

}  // namespace vmm::testing
