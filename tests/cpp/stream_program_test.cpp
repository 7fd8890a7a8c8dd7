// Random programs over streams, right under PyTorch's own allocator, with the
// order of every use judged (support/order_checker.h). The seed is printed; run
// one again with VMM_SEED, longer with VMM_STEPS (`make soak`), and shrink a
// failing one with VMM_SHRINK=1. Below them stand programs that such runs found,
// shrunk, each for one way to break the rule.
#include "support/stream_program.h"
#include "support/environment.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace vmm::testing {
namespace {

using Kind = StreamOp::Kind;
using Program = std::vector<StreamOp>;

// What broke the rule, or "".
std::string broken_by(const Program& program, const char* debug = "") {
  try {
    run_stream_program(program, debug);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

void expect_kept(const Program& program) { EXPECT_EQ(broken_by(program), ""); }

// -- Random programs

// Long programs run as many of this length: a fresh world now and then.
constexpr std::size_t kMostStepsAtOnce = 1000;

// Throws at the first program that breaks the rule.
OrderChecker::Counts run_seeds(std::uint64_t first_seed, std::uint64_t steps, const StreamProgramOptions& options) {
  OrderChecker::Counts sum;
  for (std::uint64_t seed = first_seed; steps != 0; ++seed) {
    const std::size_t now = std::min<std::uint64_t>(steps, kMostStepsAtOnce);
    std::fprintf(stderr, "stream program: VMM_SEED=%llu VMM_STEPS=%zu, %llu steps to go\n",
                 static_cast<unsigned long long>(seed), now, static_cast<unsigned long long>(steps));
    Program program = random_stream_program(seed, now, options);
    // In a child first: the core may abort.
    if (std::getenv("VMM_SHRINK") != nullptr && fails(program, options.debug)) {
      program = shrink(program, options.debug);
      for (const StreamOp& op : program) std::fprintf(stderr, "  %s,\n", to_string(op).c_str());
    }
    const OrderChecker::Counts counts = run_stream_program(program, options.debug);
    sum.reused += counts.reused;
    sum.moved += counts.moved;
    sum.filled += counts.filled;
    sum.unmapped += counts.unmapped;
    sum.launched += counts.launched;
    sum.copied += counts.copied;
    sum.came += counts.came;
    steps -= now;
  }
  return sum;
}

TEST(StreamProgram, KeepsTheOrderOnFixedSeeds) {
  constexpr std::uint64_t kSteps = 25000;
  const OrderChecker::Counts counts = run_seeds(1, kSteps, {});
  // The programs put the rule to the test, or they prove nothing.
  EXPECT_GT(counts.reused, 50U);
  EXPECT_GT(counts.moved, 200U);
  EXPECT_GT(counts.filled, 20U);
  EXPECT_GT(counts.unmapped, 1000U);
  EXPECT_GT(counts.launched, 15U);
  EXPECT_GT(counts.copied, 1U);
  EXPECT_GT(counts.came, 50U);
}

TEST(StreamProgram, KeepsTheOrderOnAFreshSeed) {
  run_seeds(from_environment("VMM_SEED", std::random_device()()), from_environment("VMM_STEPS", 3000), {});
}

// Patterns are written behind what used the memory before and read behind all that may
// still, and what is freed is unmapped behind everybody.
constexpr const char* kDebugModes[] = {"guard", "canary", "guard,sample=1/3", "canary,sample=1/3"};

TEST(StreamProgram, KeepsTheOrderInDebugMode) {
  for (const char* mode : kDebugModes) {
    SCOPED_TRACE(mode);
    run_seeds(1, 2000, {.debug = mode});
  }
}

TEST(StreamProgram, KeepsTheOrderInDebugModeOnAFreshSeed) {
  const std::uint64_t seed = from_environment("VMM_SEED", std::random_device()());
  for (const char* mode : kDebugModes) {
    SCOPED_TRACE(mode);
    run_seeds(seed, from_environment("VMM_STEPS", 1000), {.debug = mode});
  }
}

TEST(StreamProgram, PrintsAnOperationAsCode) {
  EXPECT_EQ(to_string({Kind::allocate, 1, 4096, 0, 0}), "{Kind::allocate, 1, 4096}");
  EXPECT_EQ(to_string({Kind::close_manager}), "{Kind::close_manager}");
}

// A program that uses elsewhere what it allocated on a captured stream comes after what that had
// queued before, as natively: its memory may have been filled there.
TEST(StreamProgram, WhatACapturedStreamAllocatedIsUsedBehindWhatItHadQueued) {
  EXPECT_EQ(broken_by({{Kind::allocate, 0, 2 * kMiB},
                       {Kind::empty_cache},
                       {Kind::close_pool},
                       {Kind::allocate, 0, 2 * kMiB, 3},
                       {Kind::begin_capture, 1, 3},
                       {Kind::allocate, 0, 0, 3},
                       {Kind::use, 1}},
                      "canary"),
            "");
}

// A slab that nobody uses is not among the free blocks yet, but a watched block may get its
// memory: patterns come behind the slab's last readers too. Which allocations a sample
// watches depends on how many came before.
TEST(StreamProgram, PatternsComeBehindTheReadersOfASpareSlab) {
  for (int before = 0; before < 12; ++before) {
    SCOPED_TRACE(before);
    Program program;
    for (int k = 0; k < before; ++k) program.push_back({Kind::allocate, 2, 512, 3});
    const Program rest = {{Kind::pool_limit, 0, 2 * kMiB},
                          {Kind::allocate, 0, 512, 1},
                          {Kind::use, kNewest, 2, 3},
                          {Kind::free, kNewest},
                          {Kind::allocate, 0, 300000, 1}};
    program.insert(program.end(), rest.begin(), rest.end());
    EXPECT_EQ(broken_by(program, "canary,sample=1/3"), "");
  }
}

// -- Memory leaves its stream behind readers that were never recorded

TEST(StreamProgram, AMoveWithinAStreamKeepsTheOldAddressForReadersElsewhere) {
  expect_kept(
      {{Kind::allocate, 3, 2 * kMiB, 1}, {Kind::use, kNewest, 2}, {Kind::free, kNewest}, {Kind::allocate, 3, 1, 1}});
}

TEST(StreamProgram, AThirdStreamGetsMemoryBehindReadersElsewhere) {
  expect_kept({{Kind::allocate, 3, 2 * kMiB, 1},
               {Kind::use, kNewest, 2},
               {Kind::free, kNewest},
               {Kind::allocate, 3, 2 * kMiB, 3}});
}

TEST(StreamProgram, TheDefaultStreamIsAReaderToo) {
  expect_kept({{Kind::allocate, 0, 8 * kMiB, 1},
               {Kind::use, kNewest, 0},
               {Kind::free, kNewest},
               {Kind::allocate, 0, 8 * kMiB, 2}});
}

TEST(StreamProgram, AnotherModelZeroesMemoryBehindReadersElsewhere) {
  expect_kept({{Kind::group_limit, 0, 8 * kMiB},
               {Kind::allocate, 0, 8 * kMiB, 1},
               {Kind::use, kNewest, 2},
               {Kind::free, kNewest},
               {Kind::allocate, 2, 8 * kMiB, 1}});
}

TEST(StreamProgram, TheDriverGetsMemoryBackBehindReadersElsewhere) {
  expect_kept({{Kind::allocate, 0, 1, 2}, {Kind::use, kNewest, 1}, {Kind::free, kNewest}, {Kind::empty_cache}});
}

TEST(StreamProgram, AClosedPoolsMemoryGoesBehindReadersElsewhere) {
  expect_kept({{Kind::allocate, 0, 1, 1}, {Kind::use, kNewest, 2}, {Kind::close_pool}});
}

TEST(StreamProgram, StreamsOfAPeerAreReadersToo) {
  expect_kept({{Kind::add_peers},
               {Kind::allocate, 0, 1, 1},
               {Kind::use, kNewest, 12},
               {Kind::free, kNewest},
               {Kind::empty_cache}});
}

TEST(StreamProgram, TheDefaultStreamWaitsForAPeersThoughBothHaveOneName) {
  expect_kept({{Kind::add_peers},
               {Kind::pool_limit, 0, 8 * kMiB},
               {Kind::allocate, 0, 8 * kMiB, 1},
               {Kind::use, kNewest, 11},
               {Kind::free, kNewest},
               {Kind::allocate, 0, 8 * kMiB, 0},
               {Kind::use, kNewest, 0, kUseWrites}});
}

// -- Streams that come and go, and threads

TEST(StreamProgram, ExplicitPagesOfAStreamThatIsNoMore) {
  expect_kept({{Kind::create_stream, 7},
               {Kind::pages, 0, 0, 15, 7},
               {Kind::use, kNewest, 2},
               {Kind::destroy_stream, 7},
               {Kind::free, kNewest, 0, 1}});
}

// The memory is zeroed for one stream, and what is left of it goes to another one
// of the same name.
TEST(StreamProgram, AStreamMayGetTheHandleOfOneThatIsNoMore) {
  expect_kept({{Kind::allocate, 0, 1, 1},
               {Kind::free, kNewest},
               {Kind::close_pool, 0},
               {Kind::create_stream, 7},
               {Kind::allocate, 2, 4096, 7},
               {Kind::destroy_stream, 7},
               {Kind::create_stream, 7},
               {Kind::allocate, 2, 4096, 7}});
}

TEST(StreamProgram, EachThreadsPerThreadStreamIsAnother) {
  expect_kept({{Kind::allocate, 0, 1, 1},
               {Kind::free, kNewest},
               {Kind::close_pool, 0},
               {Kind::allocate, 2, 4096, 5},
               {Kind::allocate, 2, 4096, 6}});
}

// It was the first thread's stream that waited for the reader.
TEST(StreamProgram, WhatIsLeftOfMovedMemoryGoesToANamesakeBehindItsReadersToo) {
  expect_kept({{Kind::pool_limit, 0, 4 * kMiB},
               {Kind::allocate, 0, 4 * kMiB, 1},
               {Kind::use, kNewest, 2},
               {Kind::free, kNewest},
               {Kind::allocate, 0, 2 * kMiB + 512 * kKiB, 5},
               {Kind::allocate, 0, kMiB + 128 * kKiB, 6}});
}

TEST(StreamProgram, OfTwoStreamsOfOneNameBothWait) {
  expect_kept({{Kind::pool_limit, 0, 4 * kMiB},
               {Kind::allocate, 0, 2 * kMiB, 1},
               {Kind::use, kNewest, 2},
               {Kind::allocate, 0, 2 * kMiB, 1},
               {Kind::use, kNewest, 2},
               {Kind::free, kNewest},
               {Kind::free, kNewest},
               {Kind::allocate, 0, 2 * kMiB, 5},
               {Kind::allocate, 0, 2 * kMiB, 6}});
}

TEST(StreamProgram, AChunkOfTwoStreamsMovesBehindBoth) {
  expect_kept({{Kind::pool_limit, 0, 16 * kMiB},
               {Kind::allocate, 0, 16 * kMiB, 1},
               {Kind::free, kNewest},
               {Kind::allocate_at, 0, 4096, 2, 3},
               {Kind::use, kNewest, 2, kUseWrites},
               {Kind::free, kNewest},
               {Kind::allocate, 0, 16 * kMiB, 1}});
}

// -- Captures and graphs

TEST(StreamProgram, PagesThatAreFreedBesideACaptureThatNobodyAnnounced) {
  expect_kept({{Kind::pages, 0}, {Kind::begin_capture, 0, 1}, {Kind::free, kNewest}, {Kind::end_capture}});
}

TEST(StreamProgram, WhatAGraphLeftQueuedBindsItsOwnStreamToo) {
  expect_kept({{Kind::pin},
               {Kind::allocate, 4, 1, 2},
               {Kind::use, kNewest, 2, kUseWrites},
               {Kind::launch_part, 1},
               {Kind::free, kNewest},
               {Kind::unpin},
               {Kind::allocate, 4, 1, 2}});
}

TEST(StreamProgram, AnotherStreamFindsNoAddressesWhereGraphsUseThem) {
  expect_kept({{Kind::pin},
               {Kind::allocate, 4, 20 * kMiB, 1},
               {Kind::use, kNewest, 1, kUseWrites},
               {Kind::free, kNewest},
               {Kind::empty_cache},
               {Kind::launch_part, 3},
               {Kind::allocate, 4, 20 * kMiB, 2}});
}

TEST(StreamProgram, NorAnAddressThatGraphsUse) {
  expect_kept({{Kind::pin},
               {Kind::allocate, 4, 20 * kMiB, 1},
               {Kind::use, kNewest, 1, kUseWrites},
               {Kind::free, kNewest},
               {Kind::empty_cache},
               {Kind::launch_part, 3},
               {Kind::allocate_at, 4, 4096, 2, 3}});
}

TEST(StreamProgram, PagesThatAreFreedInPartDuringACapture) {
  expect_kept({{Kind::pages, 0, 0, 15, 1},
               {Kind::use, kNewest, 2},
               {Kind::begin_capture, 0, 3, 1},
               {Kind::free, kNewest, 0, 1},
               {Kind::pages, 0, 0, 0, 1},
               {Kind::end_capture}});
}

TEST(StreamProgram, MemoryThatMeltsInACaptureKeepsItsLastUse) {
  expect_kept({{Kind::group_limit, 0, 16 * kMiB},
               {Kind::create_stream, 9},
               {Kind::allocate, 0, 8 * kMiB, 9},
               {Kind::use, kNewest, 9},
               {Kind::free, kNewest},
               {Kind::begin_capture, 0, 1, 1},
               {Kind::allocate, 2, 12 * kMiB, 1},
               {Kind::allocate, 2, 8 * kMiB, 2},
               {Kind::end_capture}});
}

// -- Mappings by hand

TEST(StreamProgram, AccessIsTakenAwayBehindItsUses) {
  expect_kept({{Kind::create_chunk}, {Kind::map_chunk}, {Kind::use_mapping, 0, 1}, {Kind::set_access}});
}

// -- What is kept already

TEST(StreamProgram, AFreedBlockIsAtOnceReusableOnItsStream) {
  expect_kept({{Kind::allocate, 0, 4096, 1},
               {Kind::use, kNewest, 1, kUseWrites},
               {Kind::use, kNewest, 2},
               {Kind::free, kNewest},
               {Kind::allocate, 0, 4096, 1},
               {Kind::use, kNewest, 1, kUseWrites}});
}

TEST(StreamProgram, ARecordedStreamHoldsTheBlock) {
  expect_kept({{Kind::allocate, 0, 4096, 1},
               {Kind::record_stream, kNewest, 2},
               {Kind::use, kNewest, 2},
               {Kind::free, kNewest},
               {Kind::allocate, 0, 4096, 1},
               {Kind::use, kNewest, 1, kUseWrites}});
}

}  // namespace
}  // namespace vmm::testing
