// A program for callgrind: allocates and frees on host memory, in the core
// alone. It measures nothing itself; benchmarks/instructions.py runs it twice,
// with two counts, and what the longer run adds is what the steps cost.
//
//   instructions pair|pair_of_both|churn|large_churn|buffers STEPS
//
// Both runs begin alike, whatever the count: the same blocks by the same seed.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
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

// `live` blocks of [lowest, highest] bytes; a step frees one and allocates another.
template <class Source>
void churn(Source& bench, std::size_t live, std::size_t lowest, std::size_t highest, long steps) {
  constexpr std::size_t kTurns = 10;  // that every block is replaced before it counts, about
  Dice dice;
  const auto size = [&] { return dice.between(lowest, highest); };
  std::vector<Address> blocks(live);
  for (Address& block : blocks) block = bench.allocate(size());
  for (long k = 0; k < static_cast<long>(kTurns * live) + steps; ++k) {
    Address& block = blocks[dice.below(live)];
    bench.free(block);
    block = bench.allocate(size());
  }
  for (const Address block : blocks) bench.free(block);
}

}  // namespace

int main(int count, char** words) {
  const long steps = count == 3 ? std::strtol(words[2], nullptr, 10) : 0;
  const char* what = count == 3 ? words[1] : "";
  if (steps > 0) {
    Bench bench;
    if (std::strcmp(what, "pair") == 0) {
      pair(bench, steps);
      return 0;
    }
    if (std::strcmp(what, "pair_of_both") == 0) {
      pair_of_both(bench, steps);
      return 0;
    }
    if (std::strcmp(what, "churn") == 0) {
      churn(bench, 1000, 512, kMiB, steps);
      return 0;
    }
    if (std::strcmp(what, "buffers") == 0) {
      vmm::MemoryPool pool(bench.memory());
      struct Buffers {
        vmm::MemoryPool& pool;
        Address allocate(std::size_t bytes) { return pool.allocate(bytes, nullptr); }
        void free(Address address) { pool.free(address); }
      } buffers{pool};
      churn(buffers, 200, 2 * kMiB, 32 * kMiB, steps);
      return 0;
    }
    if (std::strcmp(what, "large_churn") == 0) {
      churn(bench, 200, 2 * kMiB, 32 * kMiB, steps);
      return 0;
    }
  }
  std::fprintf(stderr, "usage: instructions pair|pair_of_both|churn|large_churn|buffers STEPS\n");
  return 2;
}
