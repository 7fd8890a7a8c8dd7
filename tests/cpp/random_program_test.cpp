// Random programs over pools, models, limits, streams, threads and failing
// driver calls, every invariant after every step. The seed is printed; run one
// again with VMM_SEED, longer with VMM_STEPS (`make soak`: 10^7 steps), and
// shrink a failing one with VMM_SHRINK=1.
#include <gtest/gtest.h>

#include <cstdlib>
#include <random>
#include <string>

#include "support/environment.h"
#include "support/random_program.h"

namespace vmm::testing {
namespace {

// Long programs run as many of this length: a fresh world now and then.
constexpr std::size_t kMostStepsAtOnce = 2000;

ProgramCounts run_seeds(std::uint64_t first_seed, std::uint64_t steps, const ProgramOptions& options) {
  ProgramCounts sum;
  for (std::uint64_t seed = first_seed; steps != 0; ++seed) {
    const std::size_t now = std::min<std::uint64_t>(steps, kMostStepsAtOnce);
    SCOPED_TRACE("VMM_SEED=" + std::to_string(seed) + " VMM_STEPS=" + std::to_string(now));
    std::fprintf(stderr, "random program: VMM_SEED=%llu VMM_STEPS=%zu, %llu steps to go\n",
                 static_cast<unsigned long long>(seed), now, static_cast<unsigned long long>(steps));
    const std::vector<Op> program = random_program(seed, now, options);
    try {
      const ProgramCounts counts = run_program(program, options.debug);
      sum.spilled += counts.spilled;
      sum.sealed += counts.sealed;
      sum.relieved += counts.relieved;
      sum.in_part += counts.in_part;
    } catch (const std::exception& error) {
      std::string text;
      if (std::getenv("VMM_SHRINK") != nullptr) {
        for (const Op& op : shrink(program, options.debug)) text += "\n  " + to_string(op) + ",";
      }
      ADD_FAILURE() << error.what() << text;
      return sum;
    }
    steps -= now;
  }
  return sum;
}

std::uint64_t any_seed() { return from_environment("VMM_SEED", std::random_device()()); }

TEST(RandomProgram, KeepsEveryInvariantOnFixedSeeds) {
  const ProgramCounts counts = run_seeds(1, 4000, {});
  // Or they prove nothing of it.
  EXPECT_GT(counts.spilled, 5U);
  EXPECT_GT(counts.sealed, 2U);
  EXPECT_GT(counts.relieved, 5U);
  EXPECT_GT(counts.in_part, 2U);
}

TEST(RandomProgram, KeepsEveryInvariantOnAFreshSeed) { run_seeds(any_seed(), from_environment("VMM_STEPS", 3000), {}); }

TEST(RandomProgram, KeepsEveryInvariantOnSeedsThatOnceFailed) {
  run_seeds(3248084572, 1000, {});  // a restore of one that sleeps and is as it was
  run_seeds(737, 2000, {});         // a tag is thrown away and cannot wake: pages beside it are as they were
}

TEST(RandomProgram, NeverFailsWithoutFailingCalls) {
  run_seeds(any_seed(), 3000, {.with_threads = true, .with_failures = false});
}

// Debug mode: the same, and no pattern is ever found overwritten.
TEST(RandomProgram, KeepsEveryInvariantWithGuards) {
  run_seeds(1, 1500, {.debug = "guard"});
  run_seeds(any_seed(), 2000, {.debug = "guard,sample=1/3"});
}

TEST(RandomProgram, KeepsEveryInvariantWithCanaries) {
  run_seeds(1, 1500, {.debug = "canary"});
  run_seeds(any_seed(), 2000, {.debug = "canary,sample=1/3"});
}

// The program and its model can fail: a block that someone else wrote shows.
TEST(RandomProgram, PrintsAnOperationAsCode) {
  EXPECT_EQ(to_string({Op::Kind::allocate, 1, 4096, 0}), "{Op::Kind::allocate, 1, 4096, 0}");
}

}  // namespace
}  // namespace vmm::testing
