// The world in which random programs run: pools, models and limits over a scripted driver,
// and a plain model beside them of what must be true. The program itself is made in
// random_program.cpp.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "core/device/device_memory.h"
#include "core/memory/address_space.h"
#include "core/sleep/transfer.h"
#include "driver/host_driver.h"
#include "support/random_program.h"
#include "support/scripted_driver.h"

namespace vmm::testing {

// Pools, by number: three models under one limit, one pool of its own, a part of that, and a tag of
// the first model.
inline constexpr std::size_t kPools = 6;
inline constexpr std::size_t kPart = 4;
inline constexpr std::size_t kModelOfPart = 3;
inline constexpr std::size_t kTagged = 5;
inline constexpr std::size_t kModelOfTagged = 0;
inline constexpr std::size_t kStreams = 3;
inline constexpr std::size_t kCapacity = 512 * kMiB;  // of addresses, each

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

inline Stream stream_of(std::uint64_t number) { return reinterpret_cast<Stream>(number % kStreams * 16); }

// Every word of a live block names its pool (upper 16 bits) and the block, so
// that overlap and a former owner's data both show.
inline std::uint64_t word(std::uint64_t owner, std::uint64_t block) {
  return (owner << 48U) | (block & 0xFFFFFFFFFFFFU);
}

class RandomWorld {
 public:
  explicit RandomWorld(const std::string& debug);
  ~RandomWorld();
  RandomWorld(const RandomWorld&) = delete;
  RandomWorld& operator=(const RandomWorld&) = delete;

  void step(const Op& op);
  void check();
  [[nodiscard]] const ProgramCounts& counts() const { return counts_; }

 private:
  struct Live {
    std::size_t pool = 0;
    Address address = 0;
    std::size_t size = 0;
    std::uint64_t id = 0;
    std::shared_ptr<Pool> home;  // the pool itself, or another of its model's: in host memory, or beside what is sealed
    bool is_sealed = false;
    bool is_zero = false;  // thrown away, and not written since
  };
  struct Pages {
    std::size_t pool = 0;
    std::size_t offset = 0;
    std::size_t size = 0;
    std::uint64_t id = 0;
    bool is_zero = false;  // the same
  };

  // random_world.cpp: pools, and what is set
  void set_floor(std::size_t k, std::size_t floor);
  void open(std::size_t k);
  void checkpoint();
  void restore();
  // torch lets go of its private pools some time; here, before the model ends. None is made
  // for a model that sleeps.
  void reopen(std::size_t k);
  // Its tensors go, as a model's do; its pages are dropped by force.
  void close(std::size_t k);
  void open_again(std::size_t k);
  void seal(bool is_sealed, std::uint64_t failures);
  // What the program does when a request of `asker` finds no memory.
  bool relieve(const std::shared_ptr<Pool>& asker);

  // random_world_blocks.cpp: blocks, explicit pages, threads
  void allocate(std::size_t pool, std::size_t bytes, Stream stream, std::uint64_t failures);
  void free_live(std::size_t index);
  [[nodiscard]] bool pages_used(std::size_t pool, std::size_t offset, std::size_t size) const;
  void take_pages(std::size_t pool, std::size_t offset, std::size_t size);
  // `request` returns the offset of what it was given; what it was not must have a reason.
  template <typename Request>
  void request_pages(std::size_t pool, std::size_t size, std::uint64_t failures, const Request& request);
  void pages(std::size_t pool, std::uint64_t first, std::uint64_t count, std::uint64_t failures);
  void first_pages(std::size_t pool, std::uint64_t count, std::uint64_t failures);
  void free_page_range(std::size_t index);
  [[nodiscard]] Live as_block(const Pages& range) const {
    return {range.pool,   pools_[range.pool]->base() + range.offset, range.size, range.id, pools_[range.pool], false,
            range.is_zero};
  }
  // Several threads at once, each with its own blocks, over all pools.
  void run_threads(std::uint64_t seed, std::uint64_t steps);
  void free_of(std::vector<Live>& mine, std::size_t index);
  void thread_step(std::mt19937_64& random, std::vector<Live>& mine, std::size_t number);

  // random_world_sleep.cpp: models that sleep
  // Models go to sleep, wake or both, each with its parts: all of them, or those that an operation
  // names; whole, whatever fails.
  void transfer(std::optional<std::size_t> out, std::optional<std::size_t> in, bool is_discarded, std::uint64_t which,
                std::uint64_t failures, bool is_checked = true);
  static std::size_t model_of(std::size_t pool) {
    return pool == kPart ? kModelOfPart : pool == kTagged ? kModelOfTagged : pool;
  }
  [[nodiscard]] PoolList parts_of(std::size_t k, std::uint64_t which) const;
  static bool is_any_asleep(const PoolList& pools);
  [[nodiscard]] bool is_any_asleep(std::size_t k) const { return is_any_asleep(parts_of(k, 0)); }
  // Each word of what was thrown away is zero now, or as it was where that failed; all is
  // written anew.
  void forget_contents(std::size_t k);

  // random_world_checks.cpp: what must be true
  // What is left of the floors is what it should be, and nobody has grown into it.
  void check_floors();
  void within(const Budget& budget, std::size_t& high);
  // Bytes of a block that its owner writes: all of it, or what was asked for where debug
  // mode looks at the rest.
  [[nodiscard]] std::size_t extent(std::size_t size) const;
  void write(const Live& live);
  void check_content(const Live& live) const;
  // While its pool is asleep, perhaps in part, its memory may be elsewhere.
  void check_if_awake(const Live& live) const;
  // Memory given to a pool holds zeros, or what this very pool wrote, or its patterns.
  void check_no_former_owner(const Pool& home, Address address, std::size_t size) const;
  void check_bytes_of_pools() const;
  // An out-of-memory error must be true: after it, what is free under the
  // limit that refused is less than what was asked.
  void judge_refusal(std::size_t pool, std::size_t need, const OutOfMemoryError& error, std::uint64_t failures);

  HostDriver host_;
  ScriptedDriver driver_;
  AddressSpace space_;
  std::unique_ptr<DeviceMemory> memory_;
  std::shared_ptr<Budget> group_;
  Sleeper sleeper_{*memory_};
  std::array<std::shared_ptr<Pool>, kPools> pools_;
  std::uint64_t pressure_ = 0;             // what is done when no memory is left
  std::vector<std::size_t> on_their_way_;  // models
  std::string wrong_in_relief_;
  ProgramCounts counts_;
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

}  // namespace vmm::testing
