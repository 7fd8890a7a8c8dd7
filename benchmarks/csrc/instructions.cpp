// A program for callgrind: allocates and frees on host memory, in the core
// alone. It measures nothing itself; benchmarks/instructions.py runs it twice,
// with two counts, and what the longer run adds is what the steps cost.
//
//   instructions CASE STEPS
//
// Both runs begin alike, whatever the count: the same blocks by the same seed.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/device/device_memory.h"
#include "core/faces/memory_pool.h"
#include "core/memory/address_space.h"
#include "driver/host_driver.h"

namespace {

using vmm::Address;
using vmm::kGiB;
using vmm::kMiB;

// Knuth's MMIX generator: the standard library's distributions differ between
// its versions.
class Dice {
 public:
  std::size_t below(std::size_t bound) { return next() % bound; }
  // Uniform in its logarithm, as in hot_path.
  std::size_t between(std::size_t lowest, std::size_t highest) {
    const double share = static_cast<double>(next()) / static_cast<double>(1U << 31);
    return static_cast<std::size_t>(static_cast<double>(lowest) *
                                    std::pow(static_cast<double>(highest) / static_cast<double>(lowest), share));
  }

 private:
  std::size_t next() {
    state_ = state_ * 6364136223846793005ULL + 1442695040888963407ULL;
    return static_cast<std::size_t>(state_ >> 33);
  }
  std::uint64_t state_ = 1;
};

class Bench {
 public:
  Bench() : host_({2 * kMiB, 8 * kGiB, 1}), memory_(host_, space_, 0, options()) {
    vmm::PoolSpec spec;
    spec.name = "bench";
    pool_ = memory_.create_pool(spec, nullptr);
  }

  Address allocate(std::size_t bytes) { return memory_.allocate(*pool_, bytes, nullptr); }
  void free(Address address) {
    if (!vmm::DeviceMemory::free(space_, address)) std::abort();
  }
  vmm::DeviceMemory& memory() { return memory_; }

 private:
  static vmm::Options options() {
    vmm::Options options;
    options.exportable = false;                  // a descriptor a chunk
    options.default_capacity_bytes = 16 * kGiB;  // valgrind has few addresses
    return options;
  }

  vmm::HostDriver host_;
  vmm::AddressSpace space_;
  vmm::DeviceMemory memory_;
  std::shared_ptr<vmm::Pool> pool_;
};

void pair(Bench& bench, long steps) {
  bench.free(bench.allocate(512));  // the slab that it is cut from
  for (long k = 0; k < steps; ++k) bench.free(bench.allocate(512));
}

// Of 20 MiB, where small ones were at a peak beside it: each class has once needed the room
// that there is for both.
void pair_of_both(Bench& bench, long steps) {
  const auto once = [&bench](std::size_t bytes) { bench.free(bench.allocate(bytes)); };
  for (const std::size_t bytes : {std::size_t{512}, 20 * kMiB, std::size_t{512}}) once(bytes);
  for (long k = 0; k < steps; ++k) once(20 * kMiB);
}

// `live` blocks of [lowest, highest] bytes; a step frees one and allocates another. What comes
// is drawn beforehand, as in hot_path: that was 163 instructions of each step.
template <class Source>
void churn(Source& bench, std::size_t live, std::size_t lowest, std::size_t highest, long steps) {
  constexpr std::size_t kTurns = 10;  // that every block is replaced before it counts, about
  struct Operation {
    std::size_t block = 0;
    std::size_t bytes = 0;
  };
  Dice dice;
  std::vector<Operation> operations(16384);
  for (Operation& each : operations) each = {dice.below(live), dice.between(lowest, highest)};
  std::vector<Address> blocks(live);
  for (std::size_t k = 0; k < live; ++k) blocks[k] = bench.allocate(operations[k].bytes);
  for (std::size_t k = 0; k < kTurns * live + static_cast<std::size_t>(steps); ++k) {
    const auto& [which, bytes] = operations[k % operations.size()];
    bench.free(blocks[which]);
    blocks[which] = bench.allocate(bytes);
  }
  for (const Address block : blocks) bench.free(block);
}

// Each step takes 24 MiB more.
void miss(Bench& bench, long steps) {
  std::vector<Address> blocks;
  for (long k = 0; k < steps; ++k) blocks.push_back(bench.allocate(24 * kMiB));
  for (const Address block : blocks) bench.free(block);
}

// Two models under one limit of 25 GiB, of whose memory units are 32 MiB and the last 800 MiB are the margin.
class Shared {
 public:
  static constexpr std::size_t kUnit = 32 * kMiB;
  Shared() : host_({2 * kMiB, 64 * kGiB, 1}), memory_(host_, space_, 0, options()) {}
  vmm::Pool& asker() { return *asker_; }
  vmm::Pool& other() { return *other_; }
  Address allocate(vmm::Pool& pool, std::size_t bytes) { return memory_.allocate(pool, bytes, nullptr); }
  void free(Address address) {
    if (!vmm::DeviceMemory::free(space_, address)) std::abort();
  }
  // What is left of the limit but for `keep` bytes, in whole units.
  Address fill(std::size_t keep) { return allocate(*asker_, (kLimit - keep - group_->used()) / kUnit * kUnit); }

  static constexpr std::size_t kLimit = 25 * kGiB;
  static constexpr std::size_t kMargin = kLimit / 32;

 private:
  static vmm::Options options() {
    vmm::Options options;
    options.exportable = false;
    options.scrub = false;  // the host would write all of it
    return options;
  }
  std::shared_ptr<vmm::Pool> model(const char* name) {
    vmm::PoolSpec spec;
    spec.name = name;
    spec.capacity = kLimit + 4 * kGiB;
    return memory_.create_pool(spec, group_.get());
  }

  vmm::HostDriver host_;
  vmm::AddressSpace space_;
  vmm::DeviceMemory memory_;
  const std::shared_ptr<vmm::Budget> group_ = memory_.create_group("shared", kLimit);
  const std::shared_ptr<vmm::Pool> asker_ = model("asker");
  const std::shared_ptr<vmm::Pool> other_ = model("other");
};

// Each step takes a unit of the margin, of which the other model has nothing idle.
void miss_in_margin(long steps) {
  Shared shared;
  std::vector<Address> blocks = {shared.allocate(shared.other(), 2 * Shared::kUnit), shared.fill(Shared::kMargin)};
  for (long k = 0; k < steps; ++k) blocks.push_back(shared.allocate(shared.asker(), Shared::kUnit));
  for (const Address block : blocks) shared.free(block);
}

// One request, which is met by so many chunks that the other model has idle, of 2 MiB each.
void gather(long steps) {
  Shared shared;
  const std::size_t chunks = static_cast<std::size_t>(steps) + Shared::kUnit / (2 * kMiB);
  std::vector<Address> blocks;
  for (std::size_t k = 0; k < chunks; ++k) blocks.push_back(shared.allocate(shared.other(), 2 * kMiB));
  const Address rest = shared.fill(0);
  for (const Address block : blocks) shared.free(block);
  const Address whole = shared.allocate(shared.asker(), chunks * 2 * kMiB / Shared::kUnit * Shared::kUnit);
  for (const Address block : {rest, whole}) shared.free(block);
}

void buffers(Bench& bench, long steps) {
  vmm::MemoryPool pool(bench.memory());
  struct Buffers {
    vmm::MemoryPool& pool;
    Address allocate(std::size_t bytes) { return pool.allocate(bytes, nullptr); }
    void free(Address address) { pool.free(address); }
  } buffers{pool};
  churn(buffers, 200, 2 * kMiB, 32 * kMiB, steps);
}

template <class Run>
std::function<void(long)> in_bench(const Run& run) {
  return [run](long steps) {
    Bench bench;
    run(bench, steps);
  };
}

const std::map<std::string, std::function<void(long)>> kCases = {
    {"pair", in_bench(pair)},
    {"pair_of_both", in_bench(pair_of_both)},
    {"churn", in_bench([](Bench& bench, long steps) { churn(bench, 1000, 512, kMiB, steps); })},
    {"large_churn", in_bench([](Bench& bench, long steps) { churn(bench, 200, 2 * kMiB, 32 * kMiB, steps); })},
    {"buffers", in_bench(buffers)},
    {"miss", in_bench(miss)},
    {"miss_in_margin", miss_in_margin},
    {"gather", gather},
};

}  // namespace

int main(int count, char** words) {
  const long steps = count == 3 ? std::strtol(words[2], nullptr, 10) : 0;
  const auto found = kCases.find(count == 3 ? words[1] : "");
  if (steps <= 0 || found == kCases.end()) {
    std::fputs("usage: instructions CASE STEPS, of the cases:", stderr);
    for (const auto& [name, run] : kCases) std::fprintf(stderr, " %s", name.c_str());
    std::fputc('\n', stderr);
    return 2;
  }
  found->second(steps);
  return 0;
}
