// Sixteen threads and four models under limits that move, for as many steps as asked for:
// VMM_STEPS (`make soak`: 10^7). Twelve threads allocate, use and free; two put models to
// sleep, swap and wake them; one moves limits, floors and priorities and watches that nobody
// grows above them; one asks for numbers and gives back. Every word of a block names its model
// and the block, so that a lost, a foreign and a former owner's byte all show.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <map>
#include <optional>
#include <random>
#include <thread>

#include "core/faces/shared_memory_pool.h"
#include "cpp/sleep_lab.h"
#include "support/environment.h"

namespace vmm::testing {
namespace {

constexpr std::size_t kModels = 4;
constexpr std::size_t kWorkers = 12;
constexpr std::size_t kSpiller = 3;  // of the models
constexpr std::uint64_t kStepsOfARound = 100000;

class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}
  std::uint64_t below(std::uint64_t n) { return engine_() % n; }

 private:
  std::mt19937_64 engine_;
};

// Whether the memory of a model may be touched, as a program knows it: nobody does from before
// it goes to sleep until it has woken.
class Gate {
 public:
  bool enter() {
    ++inside_;
    if (!closed_) return true;
    --inside_;
    return false;
  }
  void leave() { --inside_; }
  void close() {
    closed_ = true;
    while (inside_ != 0) std::this_thread::yield();
  }
  void open() { closed_ = false; }

 private:
  std::atomic<int> inside_{0};
  std::atomic<bool> closed_{false};
};

struct Block {
  Address address = 0;
  std::size_t bytes = 0;
  std::size_t model = 0;
  std::uint64_t id = 0;
  bool is_written = false;
  std::uint64_t discards = 0;  // of its model, when it was written
};

class MovingLimits : public Sleep {
 protected:
  MovingLimits() {
    for (std::size_t k = 0; k < kModels; ++k) {
      ModelSpec spec;
      spec.virtual_capacity = kGiB;
      spec.spills = k == kSpiller;
      models_[k] = group_.register_model("model" + std::to_string(k), spec);
    }
    // Whoever lacks memory gets what another model has idle, and no more.
    group_.set_on_pressure([this](std::size_t /*bytes*/, const std::shared_ptr<Pool>& asker) {
      std::size_t given = 0;
      for (const auto& model : models_) {
        if (model != asker) given += lab_.memory().trim(*model, 0);
      }
      return given != 0;
    });
  }

  void run(std::uint64_t seed, std::uint64_t steps);

  using Count = std::atomic<std::uint64_t>;
  Count allocated_{0};
  Count spilled_{0};  // of these, in host memory
  Count refused_{0};  // no memory
  Count asleep_{0};   // refused, because the model slept
  Count slept_{0};
  Count woken_{0};
  Count swapped_{0};

 private:
  struct Model {
    Gate gate;
    std::atomic<std::uint64_t> discards{0};
  };

  void run_round(std::uint64_t seed, std::uint64_t steps);
  void work(Random& random, std::size_t worker);
  void allocate(Random& random, std::size_t worker);
  void free(std::vector<Block>& mine, std::size_t index);
  void put_to_sleep(Random& random, std::size_t first);
  void move_limits(Random& random);
  void watch_limit();
  void ask_and_give_back(Random& random);
  void wake_all();

  static std::uint64_t word(const Block& block) { return (block.model + 1) << 56U | block.id; }
  void write(Block& block) const;
  void check(const Block& block) const;
  void touch(Block& block);
  std::vector<PartToSleep> parts(std::size_t model, const Places& places) {
    std::vector<PartToSleep> found;
    for (const auto& member : lab_.memory().family(*models_[model])) found.push_back({member, places});
    return found;
  }
  std::unique_ptr<Arrival> arrival(std::size_t model, Arrival::Memory memory) {
    return std::make_unique<Arrival>(sleeper_, lab_.memory().family(*models_[model]), memory);
  }
  [[nodiscard]] bool is_asleep(std::size_t model) {
    const PoolList family = lab_.memory().family(*models_[model]);
    return std::any_of(family.begin(), family.end(), [](const auto& pool) { return pool->is_asleep(); });
  }

  SharedMemoryPool group_{lab_.memory(), 160 * kMiB};
  std::array<std::shared_ptr<Pool>, kModels> models_;
  std::array<Model, kModels> state_;
  std::array<std::vector<Block>, kWorkers> blocks_;
  std::atomic<std::uint64_t> next_id_{1};
  std::atomic<bool> stop_{false};
};

// ------------------------------------------------------------------------- contents

void MovingLimits::write(Block& block) const {
  auto* words = reinterpret_cast<std::uint64_t*>(block.address);
  std::fill(words, words + block.bytes / 8, word(block));
  block.is_written = true;
  block.discards = state_[block.model].discards;
}

void MovingLimits::check(const Block& block) const {
  const auto* words = reinterpret_cast<const std::uint64_t*>(block.address);
  const bool is_discarded = block.is_written && block.discards != state_[block.model].discards;
  for (std::size_t k = 0; k < block.bytes / 8; ++k) {
    if (block.is_written ? words[k] == word(block) : words[k] >> 56U == block.model + 1) continue;
    if (words[k] == 0 && (is_discarded || !block.is_written)) continue;
    throw std::runtime_error("block " + std::to_string(block.id) + " of model " + std::to_string(block.model) +
                             " holds " + format_hex(words[k]) + " at byte " + std::to_string(8 * k) +
                             (block.is_written ? "" : ", and nobody has written to it"));
  }
}

// What it holds is right; it holds its own from now on. While its model sleeps: nothing.
void MovingLimits::touch(Block& block) {
  Gate& gate = state_[block.model].gate;
  if (!gate.enter()) return;
  try {
    check(block);
    if (!block.is_written || block.discards != state_[block.model].discards) write(block);
  } catch (...) {
    gate.leave();
    throw;
  }
  gate.leave();
}

// -------------------------------------------------------------------------- workers

void MovingLimits::allocate(Random& random, std::size_t worker) {
  std::vector<Block>& mine = blocks_[worker];
  Block block;
  block.model = random.below(kModels);
  const std::uint64_t kind = random.below(100);
  const std::size_t most = kind < 70 ? 4 * kKiB : kind < 96 ? 200 * kKiB : 6 * kMiB;
  block.bytes = 512 * (1 + random.below(most / 512));
  block.id = next_id_++;
  Pool* pool = models_[block.model].get();
  std::shared_ptr<Pool> tagged;
  if (block.model == 2 && random.below(2) == 0) {
    tagged = lab_.memory().tagged(models_[2], "weights");
    pool = tagged.get();
  }
  try {
    block.address = lab_.memory().allocate(*pool, block.bytes, stream(0x10 * random.below(3)));
  } catch (const AsleepError&) {
    ++asleep_;
    return;
  } catch (const OutOfMemoryError&) {
    ++refused_;
    for (std::size_t k = mine.size() / 2; k != 0; --k) free(mine, random.below(mine.size()));
    return;
  }
  ++allocated_;
  if (block.model == kSpiller && lab_.memory().pool_at(block.address)->is_spill()) ++spilled_;
  touch(block);
  mine.push_back(block);
}

void MovingLimits::free(std::vector<Block>& mine, std::size_t index) {
  touch(mine[index]);
  const Address address = mine[index].address;
  mine[index] = mine.back();
  mine.pop_back();
  if (!DeviceMemory::free(lab_.space, address)) throw std::runtime_error("a live block is unknown");
}

void MovingLimits::work(Random& random, std::size_t worker) {
  std::vector<Block>& mine = blocks_[worker];
  const std::uint64_t what = random.below(1000);
  if (what < 480 && mine.size() < 60) return allocate(random, worker);
  if (mine.empty()) return;
  const std::size_t index = random.below(mine.size());
  if (what < 940) return free(mine, index);
  if (what < 990) return touch(mine[index]);
  if (const auto pool = lab_.memory().pool_at(mine[index].address); what < 998) {
    pool->record_stream(mine[index].address, stream(0x10 * random.below(3)));
  } else {
    lab_.memory().trim(*models_[mine[index].model], random.below(2) * 4 * kMiB);
  }
}

// ------------------------------------------------------------- sleep, limits, numbers

// Of two models one sleeps, then the other in its place, then both are awake.
void MovingLimits::put_to_sleep(Random& random, std::size_t first) {
  const std::size_t one = first + random.below(2);
  const std::size_t other = 2 * first + 1 - one;
  const bool is_discarded = random.below(4) == 0;
  const bool is_by_file = random.below(8) == 0;
  const auto departure = [&](std::size_t model, bool release) {
    const Places places = is_discarded ? discard() : is_by_file ? file("model" + std::to_string(model)) : host();
    return std::make_unique<Departure>(sleeper_, parts(model, places), release);
  };
  const auto transfer = [&](std::unique_ptr<Departure> out, std::unique_ptr<Arrival> in) {
    try {
      Transfer both(std::move(out), std::move(in));
      go(both);
      return true;
    } catch (const OutOfMemoryError&) {
      return false;
    }
  };
  const auto wake = [&](std::size_t model) {
    while (is_asleep(model)) {
      if (stop_) return;  // whoever stopped it wakes it, and opens its gate
      if (transfer(nullptr, arrival(model, Arrival::Memory::collected))) ++woken_;
    }
    state_[model].gate.open();
  };
  const auto note_discard = [&](std::size_t model) {
    if (is_discarded) ++state_[model].discards;
  };
  state_[one].gate.close();
  note_discard(one);
  if (transfer(departure(one, /*release=*/random.below(2) == 0), nullptr)) ++slept_;
  if (random.below(2) == 0) std::this_thread::sleep_for(std::chrono::microseconds(random.below(2000)));
  if (random.below(2) == 0) {
    state_[other].gate.close();
    note_discard(other);
    if (transfer(departure(other, /*release=*/false), arrival(one, Arrival::Memory::by_piece))) {
      ++swapped_;
      if (is_asleep(one)) throw std::runtime_error("a swap has not woken its model");
    }
    if (!is_asleep(one)) state_[one].gate.open();
    wake(other);
  }
  wake(one);
  std::this_thread::sleep_for(std::chrono::microseconds(random.below(20000)));  // it is awake for a while
}

// Above its limit only what was there when that was lowered: it never rises.
void MovingLimits::watch_limit() {
  const Budget& budget = group_.budget();
  std::size_t before = budget.used();
  for (int look = 0; look < 200; ++look) {
    const std::size_t now = budget.used();
    if (now > std::max(before, budget.limit())) {
      throw std::runtime_error("the group holds " + std::to_string(now) + " above its limit " +
                               std::to_string(budget.limit()) + ", and had " + std::to_string(before));
    }
    before = now;
  }
}

void MovingLimits::move_limits(Random& random) {
  Pool& model = *models_[random.below(kModels)];
  switch (random.below(8)) {
    case 0:
      group_.set_physical_limit((40 + random.below(160)) * kMiB);
      break;
    case 1:
      lab_.memory().set_limit(model.budget(), random.below(2) == 0 ? kUnlimited : (8 + random.below(60)) * kMiB);
      break;
    case 2:
      try {
        lab_.memory().set_floor(model, random.below(20) * kMiB);
      } catch (const InvalidArgumentError&) {
        // More than its limit, or than the group has.
      }
      break;
    case 3:
      model.budget().set_priority(static_cast<int>(random.below(3)));
      break;
    case 4:
      group_.set_spill_limit(random.below(64) * kMiB);
      break;
    case 5:
      lab_.driver.hold_fences(stream(0x10));
      break;
    case 6:
      lab_.driver.release_fences();
      break;
    default:
      watch_limit();
  }
}

void MovingLimits::ask_and_give_back(Random& random) {
  const GlobalMemoryStats stats = group_.global_stats();
  if (stats.physical_usage !=
      stats.allocated_bytes + stats.idle_bytes + stats.stranded_bytes + stats.quarantined_bytes + stats.store_bytes) {
    throw std::runtime_error("the group does not add up");
  }
  if (random.below(20) == 0) sleeper_.release_host_memory(group_.budget());
  if (random.below(20) == 0) lab_.memory().empty_cache();
  if (random.below(20) == 0) lab_.memory().settle(/*wait=*/false);
  std::this_thread::sleep_for(std::chrono::microseconds(200));
}

// --------------------------------------------------------------------------- rounds

void MovingLimits::wake_all() {
  lab_.driver.release_fences();
  group_.set_physical_limit(kGiB);
  for (std::size_t k = 0; k < kModels; ++k) {
    lab_.memory().set_limit(models_[k]->budget(), kUnlimited);
    if (is_asleep(k)) go(*coming(models_[k]));
    state_[k].gate.open();
  }
}

// The threads end with it, so that what they keep is given up now and then, and everything can
// be looked at while nobody is on the way.
void MovingLimits::run_round(std::uint64_t seed, std::uint64_t steps) {
  std::atomic<std::uint64_t> done{0};
  std::vector<std::thread> threads;
  stop_ = false;
  const auto loop = [&](const auto& step) {
    threads.emplace_back([&, step, own = seed * 16 + threads.size()] {
      Random random(own);
      try {
        while (!stop_) step(random);
      } catch (const std::exception& error) {
        stop_ = true;
        ADD_FAILURE() << "VMM_SEED=" << seed << ": " << error.what();
      }
    });
  };
  for (std::size_t worker = 0; worker < kWorkers; ++worker) {
    loop([this, &done, steps, worker](Random& random) {
      work(random, worker);
      if (++done >= steps) stop_ = true;
    });
  }
  loop([this](Random& random) { put_to_sleep(random, 0); });
  loop([this](Random& random) { put_to_sleep(random, 2); });
  loop([this](Random& random) { move_limits(random); });
  loop([this](Random& random) { ask_and_give_back(random); });
  for (std::thread& thread : threads) thread.join();
  wake_all();
  lab_.memory().settle(/*wait=*/true);
  lab_.memory().check();
  for (auto& mine : blocks_) {
    for (Block& block : mine) touch(block);
  }
}

void MovingLimits::run(std::uint64_t seed, std::uint64_t steps) {
  std::printf("moving limits: VMM_SEED=%llu VMM_STEPS=%llu\n", static_cast<unsigned long long>(seed),
              static_cast<unsigned long long>(steps));
  const auto begin = std::chrono::steady_clock::now();
  for (std::uint64_t done = 0; done < steps && !HasFailure(); ++seed) {
    const std::uint64_t now = std::min(steps - done, kStepsOfARound);
    run_round(seed, now);
    done += now;
  }
  for (auto& mine : blocks_) {
    while (!mine.empty()) free(mine, mine.size() - 1);
  }
  const std::chrono::duration<double> time = std::chrono::steady_clock::now() - begin;
  std::printf("%.0f s:", time.count());
  for (const auto& [what, count] :
       std::initializer_list<std::pair<const char*, const Count*>>{{"allocated", &allocated_},
                                                                   {"in host memory", &spilled_},
                                                                   {"refused", &refused_},
                                                                   {"of sleepers", &asleep_},
                                                                   {"slept", &slept_},
                                                                   {"woken", &woken_},
                                                                   {"swapped", &swapped_}}) {
    std::printf(" %s %llu;", what, static_cast<unsigned long long>(*count));
  }
  std::printf("\n");
  group_.close(/*force=*/true);
  EXPECT_EQ(group_.budget().used(), 0U);
}

TEST_F(MovingLimits, HoldOnAFreshSeed) {
  run(from_environment("VMM_SEED", std::random_device()()), from_environment("VMM_STEPS", 20000));
  // Or it proves nothing.
  EXPECT_GT(allocated_, 0U);
  EXPECT_GT(slept_ + swapped_, 0U);
}

}  // namespace
}  // namespace vmm::testing
