#include "support/random_program.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <stdexcept>
#include <thread>
#include <type_traits>

#include "base/errors.h"
#include "core/faces/shared_memory_pool.h"
#include "core/memory/address_space.h"
#include "core/sleep/transfer.h"
#include "driver/host_driver.h"
#include "support/program_runner.h"
#include "support/scripted_driver.h"

namespace vmm::testing {

namespace {

using Kind = Op::Kind;
constexpr std::array<const char*, 24> kKindNames = {
    "allocate", "free",          "record_stream", "pages",       "first_pages", "free_pages",
    "trim",     "empty_cache",   "pool_limit",    "group_limit", "floor",       "priority",
    "hold",     "release_holds", "fail_call",     "settle",      "reopen",      "threads",
    "pin",      "checkpoint",    "restore",       "sleep",       "wake",        "swap"};

constexpr std::size_t kPools = 5;  // three models under one limit, one pool of its own, and a part of that
constexpr std::size_t kPart = 4;
constexpr std::size_t kModelOfPart = 3;
constexpr std::size_t kStreams = 3;
constexpr std::size_t kCapacity = 512 * kMiB;
constexpr std::size_t kGroupLimit = 96 * kMiB;
constexpr std::size_t kDeviceBytes = 192 * kMiB;
constexpr std::size_t kMostLive = 200;

// `what` is text or a function that makes it: most are never needed.
template <typename What>
void require(bool condition, const What& what) {
  if (condition) return;
  if constexpr (std::is_invocable_v<What>) {
    throw std::runtime_error(what());
  } else {
    throw std::runtime_error(what);
  }
}

Stream stream_of(std::uint64_t number) { return reinterpret_cast<Stream>(number % kStreams * 16); }

// Every word of a live block names its pool (upper 16 bits) and the block, so
// that overlap and a former owner's data both show.
std::uint64_t word(std::uint64_t owner, std::uint64_t block) { return (owner << 48U) | (block & 0xFFFFFFFFFFFFU); }

struct Live {
  std::size_t pool = 0;
  Address address = 0;
  std::size_t size = 0;
  std::uint64_t id = 0;
};

struct Pages {
  std::size_t pool = 0;
  std::size_t offset = 0;
  std::size_t size = 0;
  std::uint64_t id = 0;
};

class World {
 public:
  explicit World(const std::string& debug)
      : host_({kGranularity, kDeviceBytes, 1}),
        driver_(host_),
        memory_(std::make_unique<DeviceMemory>(driver_, space_, 0, options(debug))),
        group_(memory_->create_group("group", kGroupLimit)) {
    driver_.set_wait_on_held(ScriptedDriver::WaitOnHeld::pass);
    for (std::size_t k = 0; k < kPools; ++k) open(k);
  }

  ~World() {
    driver_.clear_failures();
    driver_.release_fences();
    for (const Live& live : live_) DeviceMemory::free(space_, live.address);
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
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  void step(const Op& op) {
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
          pools_[live.pool]->record_stream(live.address, stream_of(op.b));
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
        transfer(op.a % kPart, std::nullopt, op.b == 1, failures);
        break;
      case Kind::wake:
        transfer(std::nullopt, op.a % kPart, false, failures);
        break;
      case Kind::swap:
        if (op.a % kPart != op.b % kPart) transfer(op.a % kPart, op.b % kPart, false, failures);
        break;
    }
  }

  void check() {
    const GlobalMemoryStats kept = memory_->group_stats(*group_);  // before anybody else asks its pools
    memory_->check();
    require(driver_.live_chunk_bytes() == memory_->committed_bytes(),
            "driver holds " + std::to_string(driver_.live_chunk_bytes()) + ", charged " +
                std::to_string(memory_->committed_bytes()));
    // Limits: never above, unless they were lowered below what was in use.
    within(*group_, group_high_);
    check_floors();
    for (std::size_t k = 0; k < kPools; ++k) {
      within(pools_[k]->budget(), pool_high_[k]);
      std::size_t allocated = 0;
      std::size_t blocks = 0;
      for (const Live& live : live_) {
        if (live.pool != k) continue;
        allocated += pools_[k]->block_size(live.address);
        ++blocks;
      }
      for (const Pages& range : page_ranges_) allocated += range.pool == k ? range.size : 0;
      require(pools_[k]->live_bytes() == allocated, "pool " + std::to_string(k) + " counts " +
                                                        std::to_string(pools_[k]->live_bytes()) +
                                                        " live bytes, model " + std::to_string(allocated));
      const MemoryStats stats = pools_[k]->memory_stats();
      require(stats.physical_usage ==
                  stats.allocated_bytes + stats.idle_bytes + stats.stranded_bytes + stats.quarantined_bytes,
              "pool " + std::to_string(k) + " does not add up");
      require(stats.stranded_bytes <= stats.physical_usage &&
                  (stats.physical_usage + stats.asleep_bytes != 0 || allocated == 0),
              "stranded bytes wrapped");
    }
    MemoryStats asked;  // each pool by itself
    for (const auto& pool : memory_->pools_under(*group_)) asked.add(pool->memory_stats());
    require(kept.allocated_bytes == asked.allocated_bytes, "the group's figures are old");
    // What queued work held up may have come free meanwhile.
    require(kept.quarantined_bytes != 0 ||
                (kept.idle_bytes == asked.idle_bytes && kept.stranded_bytes == asked.stranded_bytes),
            "the group's idle memory is old");
    const GlobalMemoryStats group = memory_->group_stats(*group_);
    require(group.physical_usage == group.allocated_bytes + group.idle_bytes + group.stranded_bytes +
                                        group.quarantined_bytes + group.store_bytes,
            "the group does not add up");
    require(memory_->debug_log() == nullptr || memory_->debug_log()->damages().empty(), "a pattern was overwritten");
    // One random block's whole content, every step.
    if (!live_.empty()) check_if_awake(live_[random_() % live_.size()]);
  }

 private:
  static constexpr std::size_t kGranularity = 2 * kMiB;

  static Options options(const std::string& debug) {
    Options options;
    options.store_bytes = 8 * kMiB;
    if (!debug.empty()) options.debug = parse_debug_mode(debug);
    return options;
  }
  // Bytes of a block that its owner writes: all of it, or what was asked for where debug
  // mode looks at the rest.
  [[nodiscard]] std::size_t extent(std::size_t size) const {
    return memory_->debug_log() == nullptr ? align_up(size, 512) : align_down(size, 8);
  }

  void set_floor(std::size_t k, std::size_t floor) {
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

  // What is left of the floors is what it should be, and nobody has grown into it.
  void check_floors() {
    std::size_t reserved = 0;
    for (std::size_t k = 0; k < kModelOfPart; ++k) {
      const Budget& budget = pools_[k]->budget();
      const std::size_t own = std::min(budget.floor(), budget.limit());
      reserved += own - std::min(own, budget.used());
    }
    require(group_->reserved() == reserved, "of the floors " + std::to_string(reserved) + " are left, reserved are " +
                                                std::to_string(group_->reserved()));
    const std::size_t claims = group_->excess_claims();
    require(claims <= most_claims_, "a model has grown into another's floor: " + std::to_string(claims) +
                                        " bytes above the limit, " + std::to_string(most_claims_) + " before");
    most_claims_ = claims;
  }

  void open(std::size_t k) {
    most_claims_ = kUnlimited;  // it may have a floor
    owners_[k] = ++last_owner_;
    pool_high_[k] = 0;
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
    pools_[k] = memory_->create_pool(spec, k == kModelOfPart ? nullptr : group_.get());
  }

  void checkpoint() {
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

  void restore() {
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
    require(std::set<Address>(freed.begin(), freed.end()) == addresses(live_), "freed other blocks than the live ones");
    require(std::set<Address>(allocated.begin(), allocated.end()) == addresses(saved_->second),
            "made other blocks live than those of the checkpoint");
    std::erase_if(live_, [](const Live& live) { return live.pool == kPart; });
    for (Live live : saved_->second) {
      live.id = ++last_id_;
      check_no_former_owner(kPart, live.address, extent(live.size));
      write(live);
      live_.push_back(live);
    }
  }

  void within(const Budget& budget, std::size_t& high) {
    const std::size_t used = budget.used();
    require(used <= budget.limit() || used <= high,
            budget.name() + " holds " + std::to_string(used) + " above its limit " + std::to_string(budget.limit()));
    high = used;
  }

  void write(const Live& live) {
    auto* words = reinterpret_cast<std::uint64_t*>(live.address);
    std::fill(words, words + extent(live.size) / 8, word(owners_[live.pool], live.id));
  }

  void check_content(const Live& live) const {
    const auto* words = reinterpret_cast<const std::uint64_t*>(live.address);
    const std::uint64_t expected = word(owners_[live.pool], live.id);
    for (std::size_t k = 0; k < extent(live.size) / 8; ++k) {
      if (words[k] == expected) continue;
      require(false, "block " + std::to_string(live.id) + " overwritten at byte " + std::to_string(8 * k));
    }
  }

  // While its pool is asleep, perhaps in part, its memory may be elsewhere.
  void check_if_awake(const Live& live) const {
    if (!pools_[live.pool]->is_asleep()) check_content(live);
  }

  // Models go to sleep, wake or both, each with its part; whole, whatever fails.
  void transfer(std::optional<std::size_t> out, std::optional<std::size_t> in, bool is_discarded,
                std::uint64_t failures, bool is_checked = true) {
    const auto family = [this](std::size_t k) { return memory_->family(*pools_[k]); };
    const bool was_awake = out.has_value() && !is_any_asleep(*out);
    if (is_discarded && !was_awake) return;  // of part of it nobody could say what is left
    std::unique_ptr<Departure> departure;
    if (out.has_value()) {
      std::vector<PartToSleep> parts;
      for (const auto& pool : family(*out)) {
        parts.push_back({pool, {{is_discarded ? Place::Kind::discard : Place::Kind::host, "", nullptr}}});
      }
      departure = std::make_unique<Departure>(sleeper_, std::move(parts), /*release=*/last_id_ % 2 == 0);
    }
    std::unique_ptr<Arrival> arrival;
    if (in.has_value()) {
      const auto memory = out.has_value() ? Arrival::Memory::by_piece : Arrival::Memory::collected;
      arrival = std::make_unique<Arrival>(sleeper_, family(*in), memory);
    }
    Transfer transfer(std::move(departure), std::move(arrival));
    bool is_done = false;
    try {
      transfer.begin([] {});
      transfer.run([] {});
      is_done = true;
    } catch (const NotAvailableError&) {
      require(memory_->debug_log() != nullptr, "only debug mode keeps models awake");
    } catch (const OutOfMemoryError&) {
      // Nobody says more than that there is no room.
    } catch (const VmmError&) {
      require(driver_.failures() != failures, "a transfer failed without a failing call");
    }
    if (is_done && in.has_value()) require(!is_any_asleep(*in), "it did not wake");
    if (is_done && out.has_value()) require(is_any_asleep(*out), "it does not sleep");
    if (is_discarded) forget_contents(*out);
    for (const auto& each : {out, in}) {
      if (!each.has_value() || !is_checked) continue;
      for (const Live& live : live_) {
        if (model_of(live.pool) == *each) check_if_awake(live);
      }
    }
  }
  static std::size_t model_of(std::size_t pool) { return pool == kPart ? kModelOfPart : pool; }
  [[nodiscard]] bool is_any_asleep(std::size_t k) const {
    return pools_[k]->is_asleep() || (k == kModelOfPart && pools_[kPart]->is_asleep());
  }
  // Each word of what was thrown away is zero now, or as it was where that failed; all is
  // written anew.
  void forget_contents(std::size_t k) {
    for (int attempt = 0; is_any_asleep(k); ++attempt) {
      if (attempt == 8) {  // no room: its tensors go
        for (std::size_t index = live_.size(); index-- > 0;) {
          if (model_of(live_[index].pool) == k) free_live(index);
        }
        return;
      }
      memory_->empty_cache();
      transfer(std::nullopt, k, false, 0, /*is_checked=*/false);
    }
    for (const Live& live : live_) {
      if (model_of(live.pool) != k) continue;
      const auto* words = reinterpret_cast<const std::uint64_t*>(live.address);
      for (std::size_t at = 0; at < extent(live.size) / 8; ++at) {
        require(words[at] == 0 || words[at] == word(owners_[live.pool], live.id), "what was thrown away is not zero");
      }
      write(live);
    }
    for (const Pages& range : page_ranges_) {
      if (model_of(range.pool) == k)
        write({range.pool, pools_[range.pool]->base() + range.offset, range.size, range.id});
    }
  }

  // Memory given to a pool holds zeros, or what this very pool wrote, or its patterns.
  void check_no_former_owner(std::size_t pool, Address address, std::size_t size) const {
    const auto* words = reinterpret_cast<const std::uint64_t*>(address);
    for (std::size_t k = 0; k < size / 8; ++k) {
      if (words[k] == 0 || words[k] >> 48U == owners_[pool]) continue;
      if (memory_->debug_log() != nullptr && words[k] >> 56U == kPatternByte) continue;
      require(false, "pool " + std::to_string(pool) + " sees another model's data at byte " + std::to_string(8 * k));
    }
  }

  // An out-of-memory error must be true: after it, what is free under the
  // limit that refused is less than what was asked.
  void judge_refusal(std::size_t pool, std::size_t need, const OutOfMemoryError& error, std::uint64_t failures) {
    if (driver_.failures() != failures || error.limit == pools_[pool]->capacity()) return;
    std::size_t room = pools_[pool]->budget().headroom();
    MemoryInfo info;
    require(driver_.memory_info(0, &info).ok(), "memory_info");
    room = std::min(room, info.free);
    require(room < need,
            std::to_string(need) + " refused though " + std::to_string(room) + " could be had: " + error.what());
  }

  void allocate(std::size_t pool, std::size_t bytes, Stream stream, std::uint64_t failures) {
    if (live_.size() >= kMostLive) return;
    Live live{pool, 0, bytes, ++last_id_};
    try {
      live.address = memory_->allocate(*pools_[pool], bytes, stream);
    } catch (const OutOfMemoryError& error) {
      const std::size_t beside = memory_->debug_log() == nullptr ? 0 : 2 * kPatternBytes;
      const std::size_t need = std::max<std::size_t>(align_up(bytes, kBlockAlignment) + beside, 2 * kMiB);
      judge_refusal(pool, align_up(need, pools_[pool]->page_size()), error, failures);
      return;
    } catch (const DriverError&) {
      require(driver_.failures() != failures, "a driver error without a failing call");
      return;
    } catch (const AsleepError&) {
      require(pools_[pool]->is_asleep(), "one that is awake says that it sleeps");
      return;
    }
    require(is_aligned(live.address, 512), "unaligned");
    require(pools_[pool]->contains(live.address), "outside its pool");
    const std::size_t size = align_up(bytes, 512);
    for (const Live& other : live_) {
      require(live.address + size <= other.address || other.address + align_up(other.size, 512) <= live.address,
              [&] { return "block " + std::to_string(live.id) + " overlaps " + std::to_string(other.id); });
    }
    check_no_former_owner(pool, live.address, extent(bytes));
    write(live);
    live_.push_back(live);
  }

  void free_live(std::size_t index) {
    check_if_awake(live_[index]);
    require(DeviceMemory::free(space_, live_[index].address), "a live block is unknown");
    require(!DeviceMemory::free(space_, live_[index].address), "freed twice");
    live_[index] = live_.back();
    live_.pop_back();
  }

  [[nodiscard]] bool pages_used(std::size_t pool, std::size_t offset, std::size_t size) const {
    const Address begin = pools_[pool]->base() + offset;
    for (const Live& live : live_) {
      if (live.pool == pool && live.address < begin + size && begin < live.address + align_up(live.size, 512))
        return true;
    }
    return std::any_of(page_ranges_.begin(), page_ranges_.end(), [&](const Pages& range) {
      return range.pool == pool && range.offset < offset + size && offset < range.offset + range.size;
    });
  }

  void take_pages(std::size_t pool, std::size_t offset, std::size_t size) {
    require(!pages_used(pool, offset, size), "pages given out that are in use");
    require(pools_[pool]->is_mapped(offset, size), "pages not mapped after allocate");
    check_no_former_owner(pool, pools_[pool]->base() + offset, size);
    const Pages range{pool, offset, size, ++last_id_};
    write({pool, pools_[pool]->base() + offset, size, range.id});
    page_ranges_.push_back(range);
  }

  void pages(std::size_t pool, std::uint64_t first, std::uint64_t count, std::uint64_t failures) {
    const std::size_t page = pools_[pool]->page_size();
    const std::size_t offset = first % (kCapacity / page) * page;
    const std::size_t size = std::min((1 + count % 3) * page, kCapacity - offset);
    try {
      memory_->allocate_pages(*pools_[pool], offset, size, stream_of(first));
      take_pages(pool, offset, size);
    } catch (const AlreadyMappedError&) {
      // True whenever the model says so; a pending free may hold pages besides.
    } catch (const OutOfMemoryError& error) {
      judge_refusal(pool, size, error, failures);
    } catch (const AsleepError&) {
      require(pools_[pool]->is_asleep(), "one that is awake says that it sleeps");
    } catch (const DriverError&) {
      require(driver_.failures() != failures, "a driver error without a failing call");
    }
  }

  void first_pages(std::size_t pool, std::uint64_t count, std::uint64_t failures) {
    const std::size_t size = (1 + count % 3) * pools_[pool]->page_size();
    try {
      const Address address = memory_->allocate_first(*pools_[pool], size, stream_of(count));
      take_pages(pool, address - pools_[pool]->base(), size);
    } catch (const OutOfMemoryError& error) {
      judge_refusal(pool, size, error, failures);
    } catch (const AsleepError&) {
      require(pools_[pool]->is_asleep(), "one that is awake says that it sleeps");
    } catch (const DriverError&) {
      require(driver_.failures() != failures, "a driver error without a failing call");
    }
  }

  void free_page_range(std::size_t index) {
    const Pages range = page_ranges_[index];
    check_if_awake({range.pool, pools_[range.pool]->base() + range.offset, range.size, range.id});
    memory_->deallocate_pages(*pools_[range.pool], range.offset, range.size);
    require(!pools_[range.pool]->is_mapped(range.offset, pools_[range.pool]->page_size()), "still mapped after free");
    page_ranges_[index] = page_ranges_.back();
    page_ranges_.pop_back();
  }

  // torch lets go of its private pools some time; here, before the model ends. None is made
  // for a model that sleeps.
  void reopen(std::size_t k) {
    if (k == kPart && pools_[kModelOfPart]->is_asleep()) return;
    if (k == kModelOfPart) close(kPart);
    close(k);
    open_again(k);
    if (k == kModelOfPart) open_again(kPart);
  }

  // Its tensors go, as a model's do; its pages are dropped by force.
  void close(std::size_t k) {
    for (std::size_t index = 0; index < live_.size();) {
      if (live_[index].pool == k) {
        free_live(index);
      } else {
        ++index;
      }
    }
    memory_->close_pool(*pools_[k], /*force=*/true);
    std::erase_if(page_ranges_, [&](const Pages& range) { return range.pool == k; });
    pools_[k].reset();
  }

  void open_again(std::size_t k) {
    for (int attempt = 0; pools_[k] == nullptr; ++attempt) {
      try {
        open(k);
      } catch (const VmmError&) {
        require(attempt < 3, "a pool cannot be opened");
      }
    }
  }

  // Several threads at once, each with its own blocks, over all pools.
  void run_threads(std::uint64_t seed, std::uint64_t steps) {
    constexpr std::size_t kThreads = 4;
    std::array<std::string, kThreads> wrong;
    std::vector<std::thread> threads;
    for (std::size_t number = 0; number < kThreads; ++number) {
      threads.emplace_back([&, number] {
        std::mt19937_64 random(seed * kThreads + number);
        std::vector<Live> mine;
        try {
          for (std::uint64_t k = 0; k < steps; ++k) thread_step(random, mine, number);
          while (!mine.empty()) free_of(mine, mine.size() - 1);
        } catch (const std::exception& error) {
          wrong[number] = error.what();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const std::string& text : wrong) require(text.empty(), text);
  }

  void free_of(std::vector<Live>& mine, std::size_t index) {
    check_content(mine[index]);
    require(DeviceMemory::free(space_, mine[index].address), "a live block is unknown");
    mine[index] = mine.back();
    mine.pop_back();
  }

  void thread_step(std::mt19937_64& random, std::vector<Live>& mine, std::size_t number) {
    const std::uint64_t what = random() % 100;
    if (what < 50 && mine.size() < 12) {
      const std::size_t pool = random() % kPools;
      Live live{pool, 0, 1 + random() % (random() % 4 == 0 ? 5 * kMiB : 100 * kKiB),
                (number + 1) << 40U | random() % kGiB};
      try {
        live.address = memory_->allocate(*pools_[pool], live.size, stream_of(number));
      } catch (const OutOfMemoryError&) {
        return;
      } catch (const DriverError&) {
        return;
      } catch (const AsleepError&) {
        return;
      }
      check_no_former_owner(pool, live.address, extent(live.size));
      write(live);
      mine.push_back(live);
    } else if (what < 96) {
      if (!mine.empty()) free_of(mine, random() % mine.size());
    } else if (what < 98) {
      memory_->trim(*pools_[random() % kPools], 0);
    } else if (what < 99) {
      static_cast<void>(pools_[random() % kPools]->memory_stats());
    } else {
      memory_->empty_cache();
    }
  }

  HostDriver host_;
  ScriptedDriver driver_;
  AddressSpace space_;
  std::unique_ptr<DeviceMemory> memory_;
  std::shared_ptr<Budget> group_;
  Sleeper sleeper_{*memory_};
  std::array<std::shared_ptr<Pool>, kPools> pools_;
  std::array<std::uint64_t, kPools> owners_{};
  std::array<std::size_t, kPools> pool_high_{};
  std::size_t group_high_ = 0;
  std::size_t most_claims_ = 0;  // above the group's limit; kUnlimited: limits or floors have changed
  std::vector<Live> live_;
  std::vector<Pages> page_ranges_;
  std::optional<std::pair<PoolCheckpoint, std::vector<Live>>> saved_;
  std::uint64_t last_id_ = 0;
  std::uint64_t last_owner_ = 0;
  std::mt19937_64 random_{42};
};

}  // namespace

std::string to_string(const Op& op) {
  return std::string("{Op::Kind::") + kKindNames.at(static_cast<std::size_t>(op.kind)) + ", " + std::to_string(op.a) +
         ", " + std::to_string(op.b) + ", " + std::to_string(op.c) + "}";
}

std::vector<Op> random_program(std::uint64_t seed, std::size_t steps, const ProgramOptions& options) {
  std::mt19937_64 random(seed);
  std::vector<Op> program;
  program.reserve(steps);
  const auto any = [&](std::uint64_t below) { return random() % below; };
  const auto size = [&]() -> std::uint64_t {
    const std::uint64_t kind = any(100);
    if (kind < 55) return 1 + any(8 * kKiB);
    if (kind < 80) return 1 + any(400 * kKiB);
    if (kind < 98) return 1 + any(4 * kMiB);
    return 1 + any(40 * kMiB);
  };
  while (program.size() < steps) {
    const std::uint64_t what = any(1000);
    if (what < 420) {
      program.push_back({Kind::allocate, any(kPools), size(), any(8) == 0 ? any(kStreams) : 0});
    } else if (what < 764) {
      program.push_back({Kind::free, random(), 0, 0});
    } else if (what < 770) {
      program.push_back({Kind::sleep, any(kPart), any(5) == 0 ? 1U : 0U, 0});
    } else if (what < 778) {
      program.push_back({Kind::wake, any(kPart), 0, 0});
    } else if (what < 780) {
      program.push_back({Kind::swap, any(kPart), any(kPart), 0});
    } else if (what < 810) {
      program.push_back({Kind::record_stream, random(), any(kStreams), 0});
    } else if (what < 840) {
      program.push_back({Kind::pages, any(kPart), any(64), any(3)});
    } else if (what < 860) {
      program.push_back({Kind::first_pages, any(kPart), any(3), 0});
    } else if (what < 905) {
      program.push_back({Kind::free_pages, random(), 0, 0});
    } else if (what < 915) {
      program.push_back({Kind::trim, any(kPools), any(3) * 4 * kMiB, 0});
    } else if (what < 920) {
      program.push_back({Kind::empty_cache, 0, 0, 0});
    } else if (what < 928) {
      program.push_back({Kind::pool_limit, any(kPools), any(3) == 0 ? 0 : (4 + any(60)) * kMiB, 0});
    } else if (what < 932) {
      program.push_back({Kind::floor, any(kPart), any(5) * 4 * kMiB, 0});
    } else if (what < 934) {
      program.push_back({Kind::priority, any(kPart), any(3), 0});
    } else if (what < 938) {
      program.push_back({Kind::group_limit, 0, (40 + any(80)) * kMiB, 0});
    } else if (what < 950) {
      program.push_back({Kind::hold, 0, any(kStreams), 0});
    } else if (what < 962) {
      program.push_back({Kind::release_holds, 0, 0, 0});
    } else if (what < 965) {
      program.push_back({Kind::pin, 0, any(2), 0});
    } else if (what < 968) {
      program.push_back({Kind::checkpoint, 0, 0, 0});
    } else if (what < 972) {
      program.push_back({Kind::restore, 0, 0, 0});
    } else if (what < 985) {
      if (options.with_failures) program.push_back({Kind::fail_call, any(12), 1 + any(2), 0});
    } else if (what < 994) {
      program.push_back({Kind::settle, any(kPools), 0, 0});
    } else if (what < 998) {
      program.push_back({Kind::reopen, any(kPools), 0, 0});
    } else if (options.with_threads) {
      program.push_back({Kind::threads, any(1000000), 60, 0});
    }
  }
  return program;
}

void run_program(const std::vector<Op>& program, const std::string& debug) {
  on_fresh_thread([&] {
    World world(debug);
    run_steps(world, program);
  });
}

std::vector<Op> shrink(std::vector<Op> program, const std::string& debug) {
  return shrink_program(std::move(program), [&debug](const std::vector<Op>& part) { run_program(part, debug); });
}

}  // namespace vmm::testing
