// Debug mode: watched blocks fault where they should, patterns tell who wrote, and all of
// it counts, yields and ends as other memory does.
#include <gtest/gtest.h>

#include <sys/mman.h>

#include <csetjmp>
#include <csignal>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>

#include "cpp/lab.h"

namespace vmm::testing {
namespace {

const Stream kOne = stream(0x10);
const Stream kTwo = stream(0x20);

LabSpec in_mode(const std::string& mode) {
  LabSpec spec;
  spec.options.debug = parse_debug_mode(mode);
  return spec;
}

// Whether an access to one byte faults.
sigjmp_buf after_fault;
bool faults(Address address, bool writes = false) {
  struct sigaction jump {};
  struct sigaction segv {};
  struct sigaction bus {};
  jump.sa_handler = [](int /*signal*/) { siglongjmp(after_fault, 1); };
  ::sigaction(SIGSEGV, &jump, &segv);
  ::sigaction(SIGBUS, &jump, &bus);
  volatile bool faulted = true;
  if (sigsetjmp(after_fault, 1) == 0) {
    auto* byte = reinterpret_cast<volatile std::uint8_t*>(address);
    const std::uint8_t value = *byte;
    if (writes) *byte = value;
    faulted = false;
  }
  ::sigaction(SIGSEGV, &segv, nullptr);
  ::sigaction(SIGBUS, &bus, nullptr);
  return faulted;
}

WatchLog& log_of(Lab& lab) { return *lab.memory().debug_log(); }

TEST(Guard, ABlockEndsWhereMemoryEnds) {
  Lab lab(in_mode("guard"));
  const auto pool = lab.pool("a");
  for (const std::size_t bytes : {std::size_t{512}, std::size_t{1024}, kMiB, kPage, kPage + 512, 5 * kMiB}) {
    const Address block = lab.allocate(*pool, bytes);
    EXPECT_FALSE(faults(block)) << bytes;
    EXPECT_FALSE(faults(block + bytes - 1)) << bytes;
    EXPECT_TRUE(faults(block + bytes)) << bytes;
    EXPECT_TRUE(faults(block + bytes + kPage - 1)) << bytes;
    EXPECT_EQ(pool->block_size(block), bytes);
  }
}

TEST(Guard, WhatIsFreedFaults) {
  Lab lab(in_mode("guard"));
  const auto pool = lab.pool("a");
  const Address block = lab.allocate(*pool, kMiB);
  lab.free(block);
  EXPECT_TRUE(faults(block));
  EXPECT_TRUE(faults(block + kMiB - 1));
  const Address other = lab.allocate(*pool, kMiB);
  EXPECT_NE(other, block) << "the addresses freed last are the last to be used again";
  EXPECT_TRUE(faults(block));
}

TEST(Guard, WhatQueuedWorkMayUseStaysUntilItsFenceHasPassed) {
  Lab lab(in_mode("guard"));
  const auto pool = lab.pool("a");
  const Address block = lab.allocate(*pool, kMiB, kOne);
  lab.driver.hold_fences(kOne);
  lab.free(block);
  EXPECT_FALSE(faults(block));
  EXPECT_EQ(pool->memory_stats().quarantined_bytes, kPage);
  EXPECT_EQ(pool->memory_stats().allocated_bytes, 0U);
  lab.driver.release_fences();
  lab.memory().settle(/*wait=*/true);
  EXPECT_TRUE(faults(block));
  EXPECT_EQ(pool->memory_stats().physical_usage, 0U);
}

TEST(Guard, RecordedStreamsHoldItToo) {
  Lab lab(in_mode("guard"));
  const auto pool = lab.pool("a");
  const Address block = lab.allocate(*pool, kMiB, kOne);
  pool->record_stream(block, kTwo);
  lab.driver.hold_fences(kTwo);
  lab.free(block);
  EXPECT_FALSE(faults(block));
  lab.driver.release_fences();
  lab.memory().settle(/*wait=*/true);
  EXPECT_TRUE(faults(block));
}

TEST(Guard, CountsAsTheRoundedSizeAndItsPages) {
  Lab lab(in_mode("guard"));
  const auto pool = lab.pool("a");
  lab.allocate(*pool, 1000);
  const MemoryStats stats = pool->memory_stats();
  EXPECT_EQ(stats.allocated_bytes, 1024U);
  EXPECT_EQ(stats.physical_usage, kPage);
  EXPECT_EQ(stats.stranded_bytes, kPage - 1024);
  const Statistics numbers = pool->statistics();
  EXPECT_EQ(numbers[StatKind::requested_bytes][0].current, 1000);
  EXPECT_EQ(numbers[StatKind::reserved_bytes][0].current, static_cast<std::int64_t>(kPage));
  const auto segments = pool->snapshot();
  ASSERT_EQ(segments.size(), 1U);
  EXPECT_EQ(segments[0].total_size, kPage);
  EXPECT_EQ(segments[0].allocated_size, 1024U);
}

TEST(Guard, StaysUnderItsLimitAndYieldsToOthers) {
  Lab lab(in_mode("guard"));
  const auto pool = lab.pool("a", 4 * kPage);
  std::vector<Address> blocks;
  for (int k = 0; k < 4; ++k) blocks.push_back(lab.allocate(*pool, 100));
  EXPECT_THROW(lab.allocate(*pool, 100), OutOfMemoryError);
  lab.free(blocks[0]);
  lab.allocate(*pool, 100);
}

TEST(Guard, WhatWaitsForFencesIsWaitedForBeforeARequestFails) {
  Lab lab(in_mode("guard"));
  const auto pool = lab.pool("a", 4 * kPage);
  const Address block = lab.allocate(*pool, 4 * kPage, kOne);
  lab.driver.hold_fences(kOne);
  lab.free(block);
  lab.allocate(*pool, 4 * kPage, kTwo);
}

TEST(Guard, AddressesAreUsedInTurnAndAgain) {
  Lab lab(in_mode("guard"));
  PoolSpec spec = Lab::spec("a");
  spec.capacity = 16 * kPage;
  const auto pool = lab.pool(spec);
  std::set<Address> seen;
  for (int k = 0; k < 8; ++k) {
    const Address block = lab.allocate(*pool, 512);
    EXPECT_TRUE(seen.insert(block).second) << "block " << k;
    lab.free(block);
  }
  for (int k = 0; k < 20; ++k) lab.free(lab.allocate(*pool, 512));
}

TEST(Guard, WithoutAddressesABlockIsNotWatched) {
  Lab lab(in_mode("guard"));
  PoolSpec spec = Lab::spec("a");
  spec.capacity = 4 * kPage;
  const auto pool = lab.pool(spec);
  for (int k = 0; k < 2; ++k) lab.allocate(*pool, 512);
  EXPECT_EQ(log_of(lab).counts().missed, 0U);
  EXPECT_THROW(lab.allocate(*pool, 512), OutOfMemoryError) << "all addresses are taken";
  PoolSpec larger = Lab::spec("b");
  larger.capacity = 5 * kPage;
  const auto roomy = lab.pool(larger);
  for (int k = 0; k < 2; ++k) lab.allocate(*roomy, 512);
  lab.allocate(*roomy, 512);
  EXPECT_EQ(log_of(lab).counts().missed, 1U);
}

TEST(Guard, AGraphsPoolIsNotWatched) {
  Lab lab(in_mode("guard"));
  const auto pool = lab.pool("a");
  const Address before = lab.allocate(*pool, 512);
  pool->pin();
  lab.allocate(*pool, 512);
  EXPECT_EQ(log_of(lab).counts().watched, 1U);
  EXPECT_EQ(log_of(lab).counts().missed, 1U);
  lab.free(before);
  EXPECT_FALSE(faults(before)) << "a graph may use it";
  pool->unpin();
}

TEST(Guard, AClosedPoolEndsWithItsLastWatchedBlock) {
  Lab lab(in_mode("guard"));
  auto pool = lab.pool("a");
  const Address block = lab.allocate(*pool, 3 * kMiB, kOne);
  lab.driver.hold_fences(kOne);
  lab.memory().close_pool(*pool, /*force=*/true);
  pool.reset();
  lab.free(block);
  EXPECT_EQ(lab.memory().pools().size(), 1U) << "queued work may use it";
  lab.driver.release_fences();
  lab.memory().settle(/*wait=*/true);
  EXPECT_EQ(lab.memory().pools().size(), 0U);
}

TEST(Guard, WorksWithAPageSizeWithoutSplittingAndWithinChunks) {
  Lab lab(in_mode("guard"));
  PoolSpec pages = Lab::spec("pages");
  pages.page_size = 4 * kMiB;
  PoolSpec unsplit = Lab::spec("unsplit");
  unsplit.no_split = true;
  const auto within = lab.memory().create_part(lab.pool("within"), {0, 3}, /*no_split=*/false, PoolKind::mem_pool);
  for (const auto& pool : {lab.pool(pages), lab.pool(unsplit), within}) {
    std::vector<Address> blocks;
    for (const std::size_t bytes : {std::size_t{700}, kMiB, 9 * kMiB}) blocks.push_back(lab.allocate(*pool, bytes));
    for (const Address block : blocks) {
      EXPECT_TRUE(faults(block + pool->block_size(block))) << pool->name();
      lab.free(block);
      EXPECT_TRUE(faults(block)) << pool->name();
    }
  }
}

TEST(Guard, BytesBesideItAreFoundWhenItIsFreed) {
  Lab lab(in_mode("guard"));
  const auto pool = lab.pool("a");
  const Address block = lab.allocate(*pool, 1000);
  *reinterpret_cast<std::uint8_t*>(block + 1003) = 1;
  lab.free(block);
  const auto damages = log_of(lab).damages();
  ASSERT_EQ(damages.size(), 1U);
  EXPECT_EQ(damages[0].first, 1003);
  EXPECT_EQ(damages[0].bytes, 1U);
  EXPECT_EQ(damages[0].block.requested, 1000U);
  EXPECT_NE(to_string(damages[0]).find("3 bytes beyond its end"), std::string::npos) << to_string(damages[0]);
}

// ---------------------------------------------------------------- canary

TEST(Canary, ContentIsLeftAlone) {
  Lab lab(in_mode("canary"));
  const auto pool = lab.pool("a");
  std::vector<std::pair<Address, std::size_t>> blocks;
  for (const std::size_t bytes : {std::size_t{8}, std::size_t{512}, std::size_t{1000}, kMiB, 3 * kMiB}) {
    blocks.emplace_back(lab.allocate(*pool, bytes), bytes);
    Lab::fill(blocks.back().first, bytes, bytes);
  }
  for (const auto& [block, bytes] : blocks) EXPECT_TRUE(Lab::holds(block, bytes, bytes)) << bytes;
  EXPECT_TRUE(lab.memory().check_watched().empty());
  for (const auto& [block, bytes] : blocks) lab.free(block);
  EXPECT_TRUE(lab.memory().check_watched().empty());
  EXPECT_EQ(log_of(lab).counts().live, 0U);
}

TEST(Canary, WhatIsWrittenOutsideIsFoundAtTheFree) {
  for (const std::ptrdiff_t at : {-512, -1, 1000, 1023, 1024, 1535}) {
    Lab lab(in_mode("canary"));
    const auto pool = lab.pool("a");
    const Address block = lab.allocate(*pool, 1000);
    reinterpret_cast<std::uint8_t*>(block)[at] ^= 0xFF;
    EXPECT_EQ(log_of(lab).counts().damaged, 0U);
    lab.free(block);
    const auto damages = log_of(lab).damages();
    ASSERT_EQ(damages.size(), 1U) << at;
    EXPECT_EQ(damages[0].first, at);
    EXPECT_EQ(damages[0].bytes, 1U);
  }
}

TEST(Canary, ACheckFindsItWhileTheBlockLivesAndOnce) {
  Lab lab(in_mode("canary"));
  const auto pool = lab.pool("a");
  const Address block = lab.allocate(*pool, 1000);
  std::memset(reinterpret_cast<void*>(block + 1000), 0, 7);
  EXPECT_EQ(lab.memory().check_watched().size(), 1U);
  lab.free(block);
  ASSERT_EQ(log_of(lab).damages().size(), 1U);
  EXPECT_EQ(log_of(lab).damages()[0].bytes, 7U);
  EXPECT_EQ(log_of(lab).counts().damaged, 1U);
}

TEST(Canary, WhatIsFreedIsLookedAtBehindItsFenceOnly) {
  Lab lab(in_mode("canary"));
  const auto pool = lab.pool("a");
  const Address block = lab.allocate(*pool, 1000, kOne);
  lab.driver.hold_fences(kOne);
  lab.free(block);
  EXPECT_EQ(lab.driver.count(Call::read), 0U);
  reinterpret_cast<std::uint8_t*>(block)[1001] = 0;  // the work that was queued
  lab.driver.release_fences();
  lab.memory().settle(/*wait=*/true);
  EXPECT_EQ(log_of(lab).damages().size(), 1U);
}

TEST(Canary, WhereTheStreamIsCapturedThereAreNone) {
  Lab lab(in_mode("canary"));
  const auto pool = lab.pool("a");
  lab.driver.fail_nth(Call::fill_async, 1, {StatusCode::not_supported, "a capture"}, Repeat::from_then_on);
  const Address block = lab.allocate(*pool, 1000, kOne);
  lab.driver.clear_failures();
  std::memset(reinterpret_cast<void*>(block + 1000), 0, 24);
  lab.free(block);
  EXPECT_TRUE(lab.memory().check_watched().empty());
}

TEST(Canary, MemoryServesAgainOnceItWasLookedAt) {
  Lab lab(in_mode("canary"));
  const auto pool = lab.pool("a");
  for (int k = 0; k < 100; ++k) lab.free(lab.allocate(*pool, 100 * kKiB));
  EXPECT_LE(pool->physical_bytes(), 2 * kPage);
}

// --------------------------------------------------------------- sampling

TEST(Sampling, WatchesOneOfNByAFixedSequence) {
  Lab lab(in_mode("canary,sample=1/10"));
  const auto pool = lab.pool("a");
  const auto run = [&]() {
    for (int k = 0; k < 2000; ++k) DeviceMemory::free(lab.space, lab.memory().allocate(*pool, 512, nullptr));
  };
  std::thread(run).join();
  const std::uint64_t watched = log_of(lab).counts().watched;
  EXPECT_GT(watched, 150U);
  EXPECT_LT(watched, 250U);
  std::thread(run).join();
  EXPECT_GT(log_of(lab).counts().watched, watched + 150) << "each thread counts its own";
  EXPECT_LT(log_of(lab).counts().watched, watched + 250);
  lab.memory().settle(/*wait=*/true);
  lab.memory().check();
}

TEST(Sampling, ThreadsThatEndSoonAreWatchedAsAny) {
  Lab lab(in_mode("canary,sample=1/100"));
  const auto pool = lab.pool("a");
  for (int thread = 0; thread < 500; ++thread) {
    std::thread([&] {
      for (int k = 0; k < 10; ++k) DeviceMemory::free(lab.space, lab.memory().allocate(*pool, 512, nullptr));
    }).join();
  }
  EXPECT_GT(log_of(lab).counts().watched, 20U) << "of 5000";
  EXPECT_LT(log_of(lab).counts().watched, 100U);
  lab.memory().settle(/*wait=*/true);
}

TEST(Canary, EachDamageIsCountedOnceHoweverManyThereAre) {
  Lab lab(in_mode("canary"));
  const auto pool = lab.pool("a");
  std::vector<Address> blocks;
  for (std::size_t k = 0; k < WatchLog::kMostDamages + 4; ++k) {
    blocks.push_back(lab.allocate(*pool, 500));
    reinterpret_cast<std::uint8_t*>(blocks.back())[500] ^= 0xFF;
  }
  ::testing::internal::CaptureStderr();
  lab.memory().check_watched();
  lab.memory().check_watched();
  EXPECT_EQ(log_of(lab).counts().damaged, blocks.size());
  for (const Address block : blocks) lab.free(block);
  lab.memory().settle(/*wait=*/true);
  EXPECT_EQ(log_of(lab).counts().damaged, blocks.size());
  EXPECT_NE(::testing::internal::GetCapturedStderr(), "");
}

TEST(Sampling, WhatIsNotWatchedIsCachedAndPlacedBesideIt) {
  Lab lab(in_mode("guard,sample=1/4"));
  const auto pool = lab.pool("a");
  std::vector<std::pair<Address, std::size_t>> blocks;
  for (std::size_t k = 0; k < 200; ++k) {
    const std::size_t bytes = 512 * (1 + k * 37 % 4000);
    const Address block = lab.memory().allocate(*pool, bytes, nullptr);
    Lab::fill(block, bytes, k);
    blocks.emplace_back(block, bytes);
  }
  for (const WatchedBlock& block : log_of(lab).live(1000)) EXPECT_TRUE(faults(block.address + block.size));
  for (std::size_t k = 0; k < blocks.size(); ++k) {
    EXPECT_TRUE(Lab::holds(blocks[k].first, blocks[k].second, k)) << k;
    EXPECT_TRUE(DeviceMemory::free(lab.space, blocks[k].first));
  }
  lab.memory().settle(/*wait=*/true);
  lab.memory().check();
}

// -------------------------------------------------------------- explaining

TEST(Explaining, NamesTheBlockAndHowFarAway) {
  Lab lab(in_mode("guard"));
  const auto pool = lab.pool("a");
  const Address block = lab.allocate(*pool, 1000);
  const auto first = [&](Address address) { return log_of(lab).explain(address).at(0); };
  EXPECT_EQ(first(block + 10).where, Finding::Where::inside);
  EXPECT_EQ(first(block + 10).distance, 10U);
  EXPECT_EQ(first(block + 1024).where, Finding::Where::beyond);
  EXPECT_EQ(first(block + 1024).distance, 24U);
  EXPECT_EQ(first(block - 4).where, Finding::Where::before);
  EXPECT_EQ(first(block - 4).distance, 4U);
  EXPECT_TRUE(first(block - 4).is_in_zone);
  EXPECT_FALSE(first(block + 64 * kPage).is_in_zone);
  EXPECT_EQ(first(block + 64 * kPage).block.address, block);
  lab.free(block);
  const Finding freed = first(block + 10);
  EXPECT_EQ(freed.block.freed, 1U);
  EXPECT_TRUE(freed.block.is_unmapped);
  EXPECT_EQ(to_string(freed, block + 10).find("0x"), 0U);
  Finding now;
  EXPECT_TRUE(log_of(lab).explain_now(block + 10, &now));
  EXPECT_EQ(now.block.address, block);
  EXPECT_FALSE(log_of(lab).explain_now(block + 64 * kPage, &now));
}

TEST(Explaining, TheReportSaysWhereAccessesFault) {
  Lab lab(in_mode("guard"));
  WatchLog::set_stack_source([] { return std::string("model.py:7 in forward\ntrain.py:3 in <module>"); });
  const auto pool = lab.pool("llama");
  const Address block = lab.allocate(*pool, 1000);
  lab.free(lab.allocate(*pool, 3 * kMiB));
  WatchLog::set_stack_source(nullptr);
  const std::string report = lab.memory().debug_report();
  for (const char* part :
       {"'guard'", "2 allocations watched", "1 of them live", "a live block of 1000 bytes", "pool 'llama'",
        "from 24 bytes beyond its end on", "a freed block of 3145728 bytes", "model.py:7 in forward\n    train.py:3"}) {
    EXPECT_NE(report.find(part), std::string::npos) << part << " in\n" << report;
  }
  const auto live = log_of(lab).live(1);
  const ByteRange range = lab.memory().faults_beyond(live.at(0));
  EXPECT_EQ(range.offset, block + 1024);
  EXPECT_TRUE(faults(range.offset) && faults(range.end() - 1));
}

// ----------------------------------------------- every driver call failing in turn

struct Operation {
  const char* name;
  void (*prepare)(Lab&, const std::shared_ptr<Pool>&, Address*);
  void (*run)(Lab&, const std::shared_ptr<Pool>&, Address*);
  bool throws;
};
void PrintTo(const Operation& operation, std::ostream* out) { *out << operation.name; }

void nothing(Lab& /*lab*/, const std::shared_ptr<Pool>& /*pool*/, Address* /*block*/) {}
void make(Lab& lab, const std::shared_ptr<Pool>& pool, Address* block) {
  *block = lab.memory().allocate(*pool, 3 * kMiB + 100, kOne);
}
void drop(Lab& lab, const std::shared_ptr<Pool>& /*pool*/, Address* block) {
  EXPECT_TRUE(DeviceMemory::free(lab.space, std::exchange(*block, 0)));
}

const Operation kOperations[] = {
    {"allocate", nothing, make, true},
    {"allocate_what_another_stream_left",
     [](Lab& lab, const std::shared_ptr<Pool>& pool, Address* block) {
       *block = lab.memory().allocate(*pool, 12 * kMiB, kTwo);
       lab.driver.hold_fences(kTwo);
       drop(lab, pool, block);
     },
     [](Lab& lab, const std::shared_ptr<Pool>& pool, Address* block) {
       *block = lab.memory().allocate(*pool, 12 * kMiB, kOne);
     },
     true},
    {"free", make, drop, false},
    {"free_under_held_fences",
     [](Lab& lab, const std::shared_ptr<Pool>& pool, Address* block) {
       make(lab, pool, block);
       lab.driver.hold_fences(kOne);
     },
     drop, false},
    {"settle",
     [](Lab& lab, const std::shared_ptr<Pool>& pool, Address* block) {
       make(lab, pool, block);
       lab.driver.hold_fences(kOne);
       drop(lab, pool, block);
       lab.driver.release_fences();
     },
     [](Lab& lab, const std::shared_ptr<Pool>& /*pool*/, Address* /*block*/) { lab.memory().settle(/*wait=*/true); },
     false},
    {"check", make,
     [](Lab& lab, const std::shared_ptr<Pool>& /*pool*/, Address* /*block*/) {
       EXPECT_TRUE(lab.memory().check_watched().empty());
     },
     true},
    {"close", make,
     [](Lab& lab, const std::shared_ptr<Pool>& pool, Address* block) {
       lab.memory().close_pool(*pool, /*force=*/true);
       drop(lab, pool, block);
     },
     false},
};

class DebugSweep : public ::testing::TestWithParam<std::tuple<const char*, Operation>> {
 protected:
  // False when the operation made fewer calls than `n`.
  static bool fail_one(const std::string& mode, const Operation& operation, std::uint64_t n, const Status& status) {
    SCOPED_TRACE("call " + std::to_string(n) + " answers " + status.text());
    Lab lab(in_mode(mode));
    auto pool = lab.pool("a", 16 * kMiB);
    Address block = 0;
    operation.prepare(lab, pool, &block);
    lab.driver.fail_nth_call(n, status);
    bool threw = false;
    try {
      operation.run(lab, pool, &block);
    } catch (const VmmError& error) {
      threw = true;
      const bool is_shortage = dynamic_cast<const OutOfMemoryError*>(&error) != nullptr;
      EXPECT_EQ(is_shortage, status.code() == StatusCode::out_of_memory) << error.what();
    }
    const bool failed = lab.driver.failures() != 0;
    EXPECT_TRUE(!threw || (failed && operation.throws)) << "threw without a reason";
    lab.driver.clear_failures();
    lab.memory().check();
    lab.driver.release_fences();
    if (block != 0) drop(lab, pool, &block);
    if (!pool->is_closed()) {
      const Address again = lab.allocate(*pool, 9 * kMiB, kTwo);
      Lab::fill(again, 9 * kMiB, 5);
      EXPECT_TRUE(Lab::holds(again, 9 * kMiB, 5));
      lab.free(again);
    }
    EXPECT_TRUE(log_of(lab).damages().empty()) << to_string(log_of(lab).damages().at(0));
    lab.memory().settle(/*wait=*/true);
    lab.memory().check();
    pool.reset();
    lab.close();
    return failed;
  }
};

TEST_P(DebugSweep, OneFailingCallLeavesNoTrace) {
  const auto& [mode, operation] = GetParam();
  for (const Status& status : {no_memory(), broken()}) {
    std::uint64_t n = 1;
    while (fail_one(mode, operation, n, status)) {
      ASSERT_LT(++n, 200U);
      if (HasFailure()) break;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(EveryOperation, DebugSweep,
                         ::testing::Combine(::testing::Values("guard", "canary"), ::testing::ValuesIn(kOperations)),
                         [](const auto& each) {
                           return std::string(std::get<0>(each.param)) + "_" + std::get<1>(each.param).name;
                         });

TEST(DebugMode, OffCostsAndKnowsNothing) {
  Lab lab;
  EXPECT_EQ(lab.memory().debug_log(), nullptr);
  EXPECT_EQ(lab.memory().debug_report(), "");
  EXPECT_TRUE(lab.memory().check_watched().empty());
}

// A block that recorded streams use is no longer in the directory, and another one stands in its page.
TEST(Canary, ABlockThatIsPendingIsNotJudgedByAnother) {
  Lab lab(in_mode("canary"));
  const auto pool = lab.pool("a");
  const Address first = lab.allocate(*pool, 4096, kOne);
  pool->record_stream(first, kTwo);
  lab.driver.hold_fences(kTwo);
  lab.free(first);
  lab.allocate(*pool, 100, kOne);
  EXPECT_TRUE(lab.memory().check_watched().empty());
}

TEST(Canary, ManyFreesBehindQueuedWorkMakeFewTicks) {
  Lab lab(in_mode("canary"));
  const auto pool = lab.pool("a");
  std::vector<Address> blocks;
  for (int k = 0; k < 1000; ++k) blocks.push_back(lab.memory().allocate(*pool, 512, kOne));
  lab.driver.hold_fences();
  for (const Address block : blocks) DeviceMemory::free(lab.space, block);
  EXPECT_LE(lab.memory().clock().ticks_under_way(), 2U);
}

}  // namespace
}  // namespace vmm::testing
