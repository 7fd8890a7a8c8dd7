// The memory of one tensor whose pages come and go: who pays, what stays where it
// is, and what a failure leaves behind.
#include "core/faces/tensor_range.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>
#include <set>
#include <vector>

#include "cpp/lab.h"
#include "cpp/lacking_memory.h"

namespace vmm::testing {
namespace {

const Stream kOne = stream(0x10);
const Stream kTwo = stream(0x20);

std::int64_t allocated(Lab& lab, const Pool& model) {
  return lab.memory().statistics_of(model)[StatKind::allocated_bytes][0].current;
}
std::size_t committed_bytes(const TensorRange& range) {
  std::size_t bytes = 0;
  for (const ByteRange& span : range.committed({0, range.capacity()})) bytes += span.size;
  return bytes;
}

TEST(TensorRange, IsPaidAndCountedByItsModel) {
  Lab lab;
  const auto model = lab.pool("a", 16 * kMiB);
  {
    TensorRange range(lab.memory(), model, {"elastic tensor", 64 * kMiB, 0});
    EXPECT_EQ(model->budget().used(), 0U) << "addresses cost nothing";
    range.commit({{0, 5 * kMiB}}, kOne);
    EXPECT_EQ(model->budget().used(), 6 * kMiB);
    EXPECT_EQ(allocated(lab, *model), static_cast<std::int64_t>(6 * kMiB));
    EXPECT_TRUE(range.is_committed({{0, 6 * kMiB}}));
    EXPECT_FALSE(range.is_committed({{0, 6 * kMiB + 1}}));
    lab.memory().check();
    EXPECT_THROW(range.commit({{0, 20 * kMiB}}, kOne), OutOfMemoryError);
    EXPECT_EQ(committed_bytes(range), 6 * kMiB) << "as it was";
    EXPECT_THROW(lab.memory().close_pool(*model, false), StillInUseError);
  }
  lab.memory().empty_cache();
  EXPECT_EQ(model->budget().used(), 0U);
  EXPECT_EQ(lab.memory().family(*model).size(), 1U);
  lab.memory().check();
}

TEST(TensorRange, GrowsInPlaceWithoutTouchingWhatIsThere) {
  Lab lab;
  const auto model = lab.pool("a");
  TensorRange range(lab.memory(), model, {"elastic tensor", 256 * kMiB, 0});
  range.commit({{0, kPage}}, kOne);
  Lab::fill(range.base(), kPage, 1);
  lab.driver.hold_fences(kOne);  // a kernel reads it
  lab.driver.clear_calls();
  range.commit({{0, 200 * kMiB}}, kOne);
  EXPECT_EQ(lab.driver.count(Call::unmap) + lab.driver.count(Call::wait) + lab.driver.count(Call::copy_async), 0U);
  EXPECT_TRUE(Lab::holds(range.base(), kPage, 1));
  EXPECT_TRUE(Lab::is_zero(range.base() + kPage, 199 * kMiB - kPage));
  lab.driver.release_fences();
}

TEST(TensorRange, ChunksGrowWithWhatLiesBelowThem) {
  Lab lab;
  const auto model = lab.pool("a");
  TensorRange range(lab.memory(), model, {"elastic tensor", 512 * kMiB, 0});
  range.commit({{0, 512 * kMiB}}, kOne);
  const auto chunks = range.part()->chunks_under(range.base(), range.capacity());
  EXPECT_LT(chunks.size(), 80U) << "and not one for each of 256 pages";
  for (const ChunkView& chunk : chunks) {
    EXPECT_LE(chunk.size, std::max(kPage, (chunk.address - range.base()) / 16));
  }
  // So whatever its end is cut to, little stays mapped for nothing.
  for (std::size_t keep = 510 * kMiB; keep > 30 * kMiB; keep -= 30 * kMiB) {
    range.decommit({{keep, range.capacity() - keep}});
    lab.memory().settle(/*wait=*/true);
    EXPECT_EQ(committed_bytes(range), keep);
    EXPECT_LE(model->budget().used(), keep + keep / 16 + kPage);
    lab.memory().check();
  }
}

TEST(TensorRange, WhatItGivesBackWaitsForTheClock) {
  Lab lab;
  const auto model = lab.pool("a", 8 * kMiB);
  const auto other = lab.pool("b");
  TensorRange range(lab.memory(), model, {"elastic tensor", 64 * kMiB, 0});
  range.commit({{0, 8 * kMiB}}, kOne);
  lab.meet(kTwo);
  lab.driver.hold_fences(kTwo);  // a reader that nobody recorded
  EXPECT_EQ(range.decommit({{2 * kMiB, 62 * kMiB}}), 6 * kMiB);
  EXPECT_EQ(lab.driver.count(Call::unmap), 0U) << "the reader still uses the address";
  lab.driver.release_fences();
  lab.memory().empty_cache();
  EXPECT_GT(lab.driver.count(Call::unmap), 0U);
  EXPECT_EQ(model->budget().used(), kPage);
  range.commit({{0, 8 * kMiB}}, kOne);  // the same addresses again
  EXPECT_TRUE(range.is_committed({{0, 8 * kMiB}}));
}

TEST(TensorRange, AtItsModelsLimitItTakesTheModelsIdleMemory) {
  Lab lab;
  const auto model = lab.pool("a", 16 * kMiB);
  lab.leave_idle(*model, 16 * kMiB);
  TensorRange range(lab.memory(), model, {"elastic tensor", 64 * kMiB, 0});
  range.commit({{0, 16 * kMiB}}, kOne);
  EXPECT_EQ(model->physical_bytes(), 0U);
  EXPECT_THROW(lab.allocate(*model, kPage), OutOfMemoryError) << "nobody takes what a tensor has";
}

TEST(TensorRange, WhatAnotherModelWroteIsZeroed) {
  Lab lab;
  const auto group = lab.memory().create_group("group", 16 * kMiB);
  const auto secret = lab.pool(Lab::spec("b"), group.get());
  const auto model = lab.pool(Lab::spec("a"), group.get());
  Lab::fill(lab.allocate(*secret, 16 * kMiB), 16 * kMiB, 9);
  for (const Address address : secret->live_addresses()) lab.free(address);
  TensorRange range(lab.memory(), model, {"elastic tensor", 64 * kMiB, 0});
  range.commit({{0, 16 * kMiB}}, kOne);
  EXPECT_TRUE(Lab::is_zero(range.base(), 16 * kMiB));
}

// A chunk that kept a page stays mapped, with what the others held.
TEST(TensorRange, PagesOfAChunkThatStayedBeginAsZeroToo) {
  Lab lab;
  const auto model = lab.pool("a");
  TensorRange range(lab.memory(), model, {"elastic tensor", 256 * kMiB, 0});
  range.commit({{0, 256 * kMiB}}, kOne);
  Lab::fill(range.base(), 256 * kMiB, 5);
  const ByteRange tail{130 * kMiB, 126 * kMiB};
  range.decommit({tail});
  EXPECT_FALSE(range.part()->chunks_under(range.base() + tail.offset, kPage).empty());
  lab.driver.fail_nth(Call::fill_async, 1, broken(), Repeat::from_then_on);
  EXPECT_THROW(range.commit({tail}, kTwo), VmmError);
  lab.driver.clear_failures();
  EXPECT_EQ(range.committed({0, 256 * kMiB}), (std::vector<ByteRange>{{0, tail.offset}}));
  lab.memory().check();
  range.commit({tail}, kTwo);
  EXPECT_TRUE(Lab::is_zero(range.base() + tail.offset, tail.size));
  EXPECT_FALSE(Lab::is_zero(range.base() + tail.offset - kPage, kPage));
}

TEST(TensorRange, OutlivesAModelThatIsClosedByForceAndGrowsNoMore) {
  Lab lab;
  auto model = lab.pool("a");
  auto range = std::make_unique<TensorRange>(lab.memory(), model, TensorRangeSpec{"elastic tensor", 64 * kMiB, 0});
  range->commit({{0, 4 * kMiB}}, kOne);
  Lab::fill(range->base(), 4 * kMiB, 3);
  lab.memory().close_pool(*model, /*force=*/true);
  model = nullptr;
  EXPECT_TRUE(Lab::holds(range->base(), 4 * kMiB, 3));
  EXPECT_THROW(range->commit({{0, 8 * kMiB}}, kOne), InvalidArgumentError);
  range.reset();
  lab.memory().empty_cache();
  EXPECT_EQ(lab.memory().committed_bytes(), 0U);
  EXPECT_TRUE(lab.memory().pools().empty());
}

TEST(TensorRange, OfAClosedModelIsNamedWhereMemoryIsShort) {
  Lab lab;
  const auto group = lab.memory().create_group("group", 8 * kMiB);
  const auto other = lab.pool(Lab::spec("b"), group.get());
  auto model = lab.pool(Lab::spec("a"), group.get());
  const auto range = std::make_unique<TensorRange>(lab.memory(), model, TensorRangeSpec{"elastic tensor", 8 * kMiB, 0});
  range->commit({{0, 6 * kMiB}}, kOne);
  lab.memory().close_pool(*model, /*force=*/true);
  model = nullptr;
  try {
    lab.allocate(*other, 4 * kMiB);
    ADD_FAILURE() << "2 MiB are left";
  } catch (const OutOfMemoryError& error) {
    EXPECT_NE(std::string(error.what()).find("'a (elastic tensor) (closed)' 6 MiB in use"), std::string::npos)
        << error.what();
  }
}

TEST(TensorRange, PagesOfOneSizeGoBackOneByOne) {
  Lab lab;
  const auto model = lab.pool("a");
  TensorRange range(lab.memory(), model, {"sparse tensor", 64 * kMiB, kPage});
  range.commit({{0, 64 * kMiB}}, kOne);
  EXPECT_EQ(range.decommit({{10 * kMiB, 1}}), kPage);
  EXPECT_EQ(range.committed({0, range.capacity()}), (std::vector<ByteRange>{{0, 10 * kMiB}, {12 * kMiB, 52 * kMiB}}));
  EXPECT_EQ(range.decommit({{10 * kMiB, 1}}), 0U);
  lab.memory().empty_cache();
  EXPECT_EQ(model->budget().used(), 62 * kMiB);
}

TEST(TensorRange, PagesThatCannotBeAreRefusedAsThoseOfPoolsAre) {
  Lab lab;
  const auto model = lab.pool("a");
  for (const std::size_t page_size : {64 * kKiB, 3 * kMiB, 2 * kGiB}) {  // the last: more than the device has
    EXPECT_THROW(TensorRange(lab.memory(), model, {"tensor", 8 * kGiB, page_size}), InvalidPageSizeError) << page_size;
  }
  EXPECT_EQ(lab.memory().family(*model).size(), 1U);
}

TEST(TensorRange, NothingLiesBeyondItsEnd) {
  Lab lab;
  const auto model = lab.pool("a");
  TensorRange range(lab.memory(), model, {"elastic tensor", 5 * kMiB, 0});
  EXPECT_EQ(range.capacity(), 6 * kMiB);
  EXPECT_THROW(range.commit({{0, 6 * kMiB + 1}}, kOne), InvalidRangeError);
  EXPECT_THROW(range.commit({{kUnlimited, 2}}, kOne), InvalidRangeError);
  range.commit({{6 * kMiB, 0}}, kOne);
  EXPECT_EQ(committed_bytes(range), 0U);
}

// Each driver call of a growth over two holes fails in turn.
TEST(TensorRange, AFailedCommitLeavesItAsItWas) {
  for (const Call call : {Call::create, Call::map, Call::set_access}) {
    for (std::size_t nth = 1; nth <= 8; ++nth) {
      Lab lab;
      const auto model = lab.pool("a");
      TensorRange range(lab.memory(), model, {"sparse tensor", 64 * kMiB, kPage});
      range.commit({{4 * kMiB, 4 * kMiB}}, kOne);
      Lab::fill(range.base() + 4 * kMiB, 4 * kMiB, 5);
      lab.driver.fail_nth(call, nth, broken());
      bool failed = false;
      try {
        range.commit({{0, 16 * kMiB}}, kOne);
      } catch (const VmmError&) {
        failed = true;
      }
      lab.driver.clear_failures();
      EXPECT_TRUE(Lab::holds(range.base() + 4 * kMiB, 4 * kMiB, 5));
      if (failed) {
        EXPECT_EQ(range.committed({0, range.capacity()}), (std::vector<ByteRange>{{4 * kMiB, 4 * kMiB}}));
      }
      lab.memory().check();
      range.commit({{0, 16 * kMiB}}, kOne);
      EXPECT_TRUE(range.is_committed({{0, 16 * kMiB}}));
    }
  }
}

// A random program against a plain model: which pages have memory, and what each holds.
TEST(TensorRange, ARandomProgram) {
  for (const std::size_t page_size : {std::size_t{0}, kPage}) {
    std::mt19937_64 random(page_size + 7);
    Lab lab;
    const auto model = lab.pool("a", 40 * kMiB);
    constexpr std::size_t kPages = 32;
    TensorRange range(lab.memory(), model, {"tensor", kPages * kPage, page_size});
    std::vector<std::uint64_t> content(kPages, 0);  // seed; 0: no memory
    std::uint64_t seed = 0;
    for (int step = 0; step < 400; ++step) {
      SCOPED_TRACE("page_size " + std::to_string(page_size) + ", step " + std::to_string(step));
      const std::size_t first = random() % kPages;
      const std::size_t count = 1 + random() % (kPages - first);
      const ByteRange where{first * kPage, count * kPage};
      const Stream on = random() % 2 == 0 ? kOne : kTwo;
      if (random() % 8 == 0) lab.memory().empty_cache();
      if (random() % 2 == 0) {
        std::size_t lacking = 0;
        for (std::size_t k = first; k < first + count; ++k) lacking += content[k] == 0 ? 1 : 0;
        bool done = true;
        try {
          range.commit({where}, on);
        } catch (const OutOfMemoryError&) {
          done = false;
        }
        // Uniform pages: exactly as many as the limit has room for.
        std::size_t used = 0;
        for (const std::uint64_t each : content) used += each == 0 ? 0 : 1;
        if (page_size != 0) {
          EXPECT_EQ(done, (used + lacking) * kPage <= 40 * kMiB);
        }
        for (std::size_t k = first; done && k < first + count; ++k) {
          if (content[k] != 0) continue;
          ASSERT_TRUE(Lab::is_zero(range.base() + k * kPage, kPage)) << k;
          content[k] = ++seed;
          Lab::fill(range.base() + k * kPage, kPage, content[k]);
        }
      } else {
        range.decommit({where});
        for (std::size_t k = first; k < first + count; ++k) content[k] = 0;
      }
      lab.memory().check();
      for (std::size_t k = 0; k < kPages; ++k) {
        ASSERT_EQ(range.is_committed({{k * kPage, kPage}}), content[k] != 0) << k;
        if (content[k] == 0) continue;
        ASSERT_TRUE(Lab::holds(range.base() + k * kPage, kPage, content[k])) << k;
      }
    }
  }
}

// ------------------------------------------------- what has no memory reads as zero

TensorRangeSpec sparse(std::size_t capacity) { return {"sparse tensor", capacity, kPage, /*zeros=*/true}; }

TEST(ZerosRange, ReadsAsZeroWithoutMemory) {
  Lab lab;
  const auto model = lab.pool("a", 4 * kMiB);
  {
    TensorRange range(lab.memory(), model, sparse(512 * kMiB));
    EXPECT_EQ(model->budget().used(), 0U);
    EXPECT_TRUE(Lab::is_zero(range.base(), 512 * kMiB));
    EXPECT_EQ(lab.driver.live_chunk_bytes(), (1 + 8) * kPage) << "16 MiB read again and again, and a page";
    EXPECT_EQ(lab.driver.live_mappings(), 32U);
    range.commit({{101 * kMiB, 1}}, kOne);
    EXPECT_EQ(model->budget().used(), kPage);
    Lab::fill(range.base() + 100 * kMiB, kPage, 3);
    EXPECT_TRUE(Lab::is_zero(range.base(), 100 * kMiB));
    EXPECT_TRUE(Lab::is_zero(range.base() + 102 * kMiB, 410 * kMiB));
    range.decommit({{100 * kMiB, kPage}});
    EXPECT_EQ(range.committed({0, range.capacity()}).size(), 0U);
    EXPECT_TRUE(Lab::is_zero(range.base(), 512 * kMiB));
    lab.memory().check();
  }
  lab.memory().empty_cache();
  EXPECT_EQ(lab.memory().committed_bytes(), 0U);
}

TEST(ZerosRange, ShareTheirChunks) {
  Lab lab;
  const auto a = lab.pool("a");
  const auto b = lab.pool("b");
  TensorRange first(lab.memory(), a, sparse(64 * kMiB));
  const std::size_t bytes = lab.driver.live_chunk_bytes();
  TensorRange second(lab.memory(), b, sparse(64 * kMiB));
  EXPECT_EQ(lab.driver.live_chunk_bytes(), bytes);
  EXPECT_EQ(lab.memory().committed_bytes(), bytes) << "the device pays, no model";
}

TEST(ZerosRange, WaitsForReadersBeforeZerosGoAndComeBack) {
  Lab lab;
  const auto model = lab.pool("a");
  TensorRange range(lab.memory(), model, sparse(64 * kMiB));
  lab.meet(kTwo);
  for (int round = 0; round < 2; ++round) {
    const bool commits = round == 0;
    lab.driver.hold_fences(kTwo);
    lab.driver.clear_calls();
    // Waiting lets what is held pass, on this bench.
    commits ? range.commit({{0, 1}}, kOne) : static_cast<void>(range.decommit({{0, 1}}));
    const auto calls = lab.driver.calls();
    const auto wait =
        std::find_if(calls.begin(), calls.end(), [](const auto& call) { return call.call == Call::wait; });
    const auto unmap =
        std::find_if(calls.begin(), calls.end(), [](const auto& call) { return call.call == Call::unmap; });
    EXPECT_TRUE(wait != calls.end() && unmap != calls.end() && wait < unmap);
    lab.driver.release_fences();
  }
}

TEST(ZerosRange, AtItsEndTheAddressesWaitAndNobodyElse) {
  Lab lab;
  const auto model = lab.pool("a");
  {
    TensorRange range(lab.memory(), model, sparse(64 * kMiB));
    range.commit({{0, 8 * kMiB}}, kOne);
    lab.meet(kTwo);
    lab.driver.hold_fences(kTwo);
    lab.driver.clear_calls();
  }
  EXPECT_EQ(lab.driver.count(Call::unmap) + lab.driver.count(Call::wait), 0U) << "a reader still uses the addresses";
  EXPECT_EQ(model->budget().used(), 0U) << "the memory is on the shelf";
  EXPECT_EQ(lab.memory().pools().size(), 2U);
  lab.driver.release_fences();
  lab.allocate(*model, kPage);  // whoever comes by
  EXPECT_EQ(lab.memory().pools().size(), 1U);
}

// A list of all that is committed would grow with it: a table of embeddings has 10^4 pages.
TEST(ZerosRange, GivingAPageBackLooksAtNoOther) {
  std::vector<long> most;
  for (const std::size_t stretches : {8UL, 64UL, 400UL}) {
    Lab lab;
    const auto model = lab.pool("a");
    TensorRange range(lab.memory(), model, sparse(kGiB * 2));
    for (std::size_t k = 0; k < stretches; ++k) range.commit({{2 * k * kPage, kPage}}, kOne);
    lab.driver.clear_calls();
    most.push_back(0);
    for (std::size_t k = 0; k < 4; ++k) {
      most.back() = std::max(most.back(), allocations_of([&] { range.decommit({{2 * k * kPage, 1}}); }));
    }
    EXPECT_TRUE(Lab::is_zero(range.base(), 8 * kPage));
    EXPECT_EQ(lab.driver.count(Call::map), 4U);
  }
  EXPECT_EQ(most[1], most[0]);
  EXPECT_EQ(most[2], most[0]);
}

TEST(ZerosRange, BeyondALimitItReadsAsBefore) {
  Lab lab;
  const auto model = lab.pool("a", 8 * kMiB);
  TensorRange range(lab.memory(), model, sparse(64 * kMiB));
  range.commit({{4 * kMiB, 4 * kMiB}}, kOne);
  Lab::fill(range.base() + 4 * kMiB, 4 * kMiB, 6);
  EXPECT_THROW(range.commit({{0, 2 * kMiB}, {20 * kMiB, 8 * kMiB}}, kOne), OutOfMemoryError);
  EXPECT_EQ(range.committed({0, range.capacity()}), (std::vector<ByteRange>{{4 * kMiB, 4 * kMiB}}));
  EXPECT_TRUE(Lab::holds(range.base() + 4 * kMiB, 4 * kMiB, 6));
  EXPECT_TRUE(Lab::is_zero(range.base(), 4 * kMiB));
  EXPECT_TRUE(Lab::is_zero(range.base() + 8 * kMiB, 56 * kMiB));
}

TEST(ZerosRange, TakesWhatPoolsHaveIdle) {
  LabSpec spec;
  spec.device_bytes = 64 * kMiB;
  Lab lab(spec);
  const auto model = lab.pool("a");
  lab.leave_idle(*model, 64 * kMiB);
  TensorRange range(lab.memory(), model, sparse(kGiB));
  EXPECT_TRUE(Lab::is_zero(range.base(), kGiB));
  lab.leave_idle(*model, 64 * kMiB - lab.memory().committed_bytes());
  range.commit({{34 * kMiB, kPage}}, kOne);  // in the middle of a mapping, whose rest takes a smaller chunk
  Lab::fill(range.base() + 34 * kMiB, kPage, 1);
  EXPECT_TRUE(Lab::is_zero(range.base(), 34 * kMiB));
  EXPECT_TRUE(Lab::is_zero(range.base() + 36 * kMiB, kGiB - 36 * kMiB));
  lab.memory().check();
}

// Every call that making, committing and decommitting make fails in turn, alone or with
// those that follow it: what undoes a failure may fail too.
class ZerosRangeFailures : public ::testing::TestWithParam<std::uint64_t> {};

INSTANTIATE_TEST_SUITE_P(InARow, ZerosRangeFailures, ::testing::Values(1, 2, 3));

TEST_P(ZerosRangeFailures, LeaveNothingThatFaults) {
  std::uint64_t n = 0;
  bool failed = true;
  while (failed) {
    ++n;
    SCOPED_TRACE("call " + std::to_string(n));
    Lab lab;
    const auto model = lab.pool("a");
    for (std::uint64_t k = 0; k < GetParam(); ++k) lab.driver.fail_nth_call(lab.driver.count() + n + k, broken());
    failed = false;
    const auto attempt = [&](const std::function<void()>& step) {
      try {
        step();
      } catch (const VmmError&) {
        failed = true;
      }
      failed = failed || lab.driver.failures() != 0;
    };
    std::unique_ptr<TensorRange> range;
    attempt([&] { range = std::make_unique<TensorRange>(lab.memory(), model, sparse(64 * kMiB)); });
    if (range == nullptr) continue;
    attempt([&] { range->commit({{2 * kMiB, 4 * kMiB}, {30 * kMiB, 1}}, kOne); });
    attempt([&] { range->decommit({{2 * kMiB, 1}}); });
    lab.driver.clear_failures();
    // The next call mends what a failure left.
    range->commit({{40 * kMiB, 1}}, kOne);
    range->decommit({{0, range->capacity()}});
    EXPECT_TRUE(Lab::is_zero(range->base(), 64 * kMiB));
    lab.memory().check();
  }
  EXPECT_GT(n, 40U);
}

// Each allocation of the host's in turn while it commits or decommits, alone or with those
// that follow it: the calls after it work, and all reads as it should.
class ZerosRangeLacksMemory : public ::testing::TestWithParam<long> {};

INSTANTIATE_TEST_SUITE_P(InARow, ZerosRangeLacksMemory, ::testing::Values(1, 2, 1000));

TEST_P(ZerosRangeLacksMemory, AndGoesOnAfterwards) {
  for (const bool commits : {false, true}) {
    bool is_reached = true;
    for (long nth = 0; is_reached; ++nth) {
      SCOPED_TRACE((commits ? "commit, allocation " : "decommit, allocation ") + std::to_string(nth));
      Lab lab;
      const auto model = lab.pool("a");
      TensorRange range(lab.memory(), model, sparse(64 * kMiB));
      range.commit({{0, 8 * kMiB}, {20 * kMiB, 2 * kMiB}}, kOne);
      std::set<Address> filled;
      for (const std::size_t at : {0U, 2U, 4U, 6U, 20U}) filled.insert(range.base() + at * kMiB);
      for (const Address page : filled) Lab::fill(page, kPage, 5);
      const auto step = [&] {
        if (commits) return range.commit({{2 * kMiB, 10 * kMiB}, {40 * kMiB, 4 * kMiB}}, kTwo);
        range.decommit({{2 * kMiB, 2 * kMiB}, {20 * kMiB, 2 * kMiB}});
      };
      runs_out_at(nth, step, GetParam());
      is_reached = failures_made != 0;
      range.commit({{60 * kMiB, 1}}, kOne);
      range.decommit({{60 * kMiB, 1}});
      lab.memory().check();
      for (std::size_t at = 0; at < range.capacity(); at += kPage) {
        const Address page = range.base() + at;
        const bool is_kept = filled.count(page) != 0 && range.is_committed({{at, kPage}});
        ASSERT_TRUE(is_kept ? Lab::holds(page, kPage, 5) : Lab::is_zero(page, 4096)) << format_bytes(at);
      }
    }
  }
}

// Each allocation of the host's in turn.
TEST(ZerosRange, OneThatTheHostHasNoMemoryForLeavesNoTrace) {
  // Those that register a pool are none of its own.
  long registering = 0;
  {
    Lab lab;
    const auto model = lab.pool("a");
    std::unique_ptr<TensorRange> range;
    const TensorRangeSpec plain{"sparse tensor", 64 * kMiB, kPage};
    registering = allocations_of([&] { range = std::make_unique<TensorRange>(lab.memory(), model, plain); }) - 1;
  }
  bool failed = true;
  for (long nth = registering; failed; ++nth) {
    SCOPED_TRACE("allocation " + std::to_string(nth));
    Lab lab;
    const auto model = lab.pool("a");
    std::unique_ptr<TensorRange> range;
    runs_out_at(nth, [&] { range = std::make_unique<TensorRange>(lab.memory(), model, sparse(64 * kMiB)); });
    failed = failures_made != 0;
    range.reset();
    lab.memory().empty_cache();
    EXPECT_EQ(lab.memory().committed_bytes(), 0U);
    EXPECT_EQ(lab.memory().pools().size(), 1U);
  }
}

TEST(TensorRange, EndsWhereTheHostHasNoMemory) {
  for (const bool zeros : {false, true}) {
    // The first ones: what a pool's own lists lack, half-way, it does not take back.
    for (long nth = 0; nth < 2; ++nth) {
      SCOPED_TRACE("allocation " + std::to_string(nth) + ", zeros " + std::to_string(zeros));
      Lab lab;
      const auto model = lab.pool("a");
      auto range =
          std::make_unique<TensorRange>(lab.memory(), model, TensorRangeSpec{"sparse tensor", 64 * kMiB, kPage, zeros});
      range->commit({{0, 8 * kMiB}}, kOne);
      EXPECT_TRUE(reaches(nth, [&] { range.reset(); }));
      lab.memory().empty_cache();
      lab.memory().empty_cache();
      EXPECT_EQ(lab.memory().committed_bytes(), 0U);
      EXPECT_EQ(lab.memory().pools().size(), 1U);
    }
  }
}

TEST(ZerosRange, ARandomProgram) {
  std::mt19937_64 random(11);
  Lab lab;
  const auto model = lab.pool("a", 100 * kMiB);
  constexpr std::size_t kPages = 256;
  TensorRange range(lab.memory(), model, sparse(kPages * kPage));
  std::vector<std::uint64_t> content(kPages, 0);
  std::uint64_t seed = 0;
  for (int step = 0; step < 150; ++step) {
    SCOPED_TRACE("step " + std::to_string(step));
    std::vector<ByteRange> where;
    std::set<std::size_t> pages;
    for (std::size_t k = 1 + random() % 3; k-- > 0;) {
      const std::size_t first = random() % kPages;
      const std::size_t count = 1 + random() % std::min<std::size_t>(12, kPages - first);
      where.push_back({first * kPage + random() % kPage, (count - 1) * kPage + 1});
      where.back().size = std::min(where.back().size, kPages * kPage - where.back().offset);
      for (std::size_t at = align_down(where.back().offset, kPage); at < where.back().end(); at += kPage) {
        pages.insert(at / kPage);
      }
    }
    if (random() % 2 == 0) {
      std::size_t wanted = pages.size();
      for (std::size_t k = 0; k < kPages; ++k) wanted += content[k] != 0 && pages.count(k) == 0 ? 1 : 0;
      const bool fits = wanted * kPage <= 100 * kMiB;
      if (!fits) {
        EXPECT_THROW(range.commit(where, kOne), OutOfMemoryError);
        continue;
      }
      range.commit(where, random() % 2 == 0 ? kOne : kTwo);
      for (const std::size_t k : pages) {
        if (content[k] != 0) continue;
        ASSERT_TRUE(Lab::is_zero(range.base() + k * kPage, kPage)) << k;
        content[k] = ++seed;
        Lab::fill(range.base() + k * kPage, kPage, content[k]);
      }
    } else {
      range.decommit(where);
      for (const std::size_t k : pages) content[k] = 0;
    }
    lab.memory().check();
    for (std::size_t k = 0; k < kPages; ++k) {
      const Address page = range.base() + k * kPage;
      ASSERT_EQ(range.is_committed({{k * kPage, kPage}}), content[k] != 0) << k;
      ASSERT_TRUE(content[k] != 0 ? Lab::holds(page, 4096, content[k]) : Lab::is_zero(page, 4096)) << k;
    }
  }
}

}  // namespace
}  // namespace vmm::testing
