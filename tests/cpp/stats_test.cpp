#include "core/numbers/stats.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <set>
#include <string>
#include <thread>
#include <type_traits>
#include <variant>

namespace vmm::testing {
namespace {

constexpr auto kBytes = StatKind::allocated_bytes;

TEST(Statistics, FollowCurrentPeakAndTotals) {
  Statistics statistics;
  statistics.increase(kBytes, SizeClass::small_pool, 100);
  statistics.increase(kBytes, SizeClass::large_pool, 50);
  statistics.decrease(kBytes, SizeClass::small_pool, 100);
  const StatTriple& triple = statistics[kBytes];
  EXPECT_EQ(triple[0].current, 50);
  EXPECT_EQ(triple[0].peak, 150);
  EXPECT_EQ(triple[0].allocated, 150);
  EXPECT_EQ(triple[0].freed, 100);
  EXPECT_EQ(triple[1].current, 0);
  EXPECT_EQ(triple[1].peak, 100);
  EXPECT_EQ(triple[2].current, 50);
  EXPECT_EQ(statistics[StatKind::active_bytes][0].current, 0) << "families are apart";
}

TEST(Statistics, ResetsPeaksToTheCurrentsAndTotalsToNothing) {
  Statistics statistics;
  statistics.increase(kBytes, SizeClass::large_pool, 70);
  statistics.decrease(kBytes, SizeClass::large_pool, 30);
  statistics.num_ooms = 2;
  statistics.reset_peaks();
  EXPECT_EQ(statistics[kBytes][0].peak, 40);
  EXPECT_EQ(statistics[kBytes][0].allocated, 70);
  statistics.reset_accumulated();
  EXPECT_EQ(statistics[kBytes][0].allocated, 0);
  EXPECT_EQ(statistics[kBytes][0].freed, 0);
  EXPECT_EQ(statistics[kBytes][0].current, 40) << "what is live stays";
  EXPECT_EQ(statistics.num_ooms, 0);
}

TEST(Statistics, TotalsAddUpButPeaksDoNot) {
  Statistics a;
  Statistics b;
  a.increase(kBytes, SizeClass::small_pool, 10);
  b.increase(kBytes, SizeClass::large_pool, 20);
  b.num_device_alloc = 3;
  Statistics sum;
  sum.add_totals(a);
  sum.add_totals(b);
  EXPECT_EQ(sum[kBytes][0].current, 30);
  EXPECT_EQ(sum[kBytes][1].current, 10);
  EXPECT_EQ(sum[kBytes][2].allocated, 20);
  EXPECT_EQ(sum[kBytes][0].peak, 0);
  EXPECT_EQ(sum.num_device_alloc, 3);
}

TEST(Statistics, EveryNumberBesideTheFamiliesIsAddedAndReset) {
  Statistics one;
  one.num_alloc_retries = 1;
  one.num_ooms = 2;
  one.num_sync_all_streams = 3;
  one.num_device_alloc = 4;
  one.num_device_free = 5;
  for (Stat* stat : {&one.oversize_allocations, &one.oversize_segments}) {
    stat->increase(7);
    stat->decrease(6);
  }
  Statistics sum;
  sum.add_totals(one);
  sum.add_totals(one);
  const auto counts = [&sum] {
    return std::array{sum.num_alloc_retries, sum.num_ooms, sum.num_sync_all_streams, sum.num_device_alloc,
                      sum.num_device_free};
  };
  EXPECT_EQ(counts(), (std::array<std::int64_t, 5>{2, 4, 6, 8, 10}));
  const auto expect_oversize = [&sum](const Stat& expected) {
    for (const Stat& stat : {sum.oversize_allocations, sum.oversize_segments}) {
      EXPECT_EQ(stat.current, expected.current);
      EXPECT_EQ(stat.peak, expected.peak);
      EXPECT_EQ(stat.allocated, expected.allocated);
      EXPECT_EQ(stat.freed, expected.freed);
    }
  };
  expect_oversize({2, 14, 14, 12});
  sum.reset_peaks();
  expect_oversize({2, 2, 14, 12});
  sum.reset_accumulated();
  EXPECT_EQ(counts(), (std::array<std::int64_t, 5>{}));
  expect_oversize({2, 2, 0, 0});
}

// Each row's field holds its row's number: two rows of one field would show the latter's twice.
template <typename Numbers, std::size_t kRows>
void expect_a_row_for_each_field(const std::array<FieldRow<Numbers>, kRows>& rows) {
  Numbers numbers;
  std::set<std::string> names;
  std::size_t number = 0;
  for (const auto& row : rows) {
    names.insert(row.name);
    ++number;
    std::visit([&](auto field) { numbers.*field = static_cast<std::decay_t<decltype(numbers.*field)>>(number); },
               row.field);
  }
  EXPECT_EQ(names.size(), kRows);
  number = 0;
  for (const auto& row : rows) {
    ++number;
    std::visit([&](auto field) { EXPECT_EQ(static_cast<std::size_t>(numbers.*field), number) << row.name; }, row.field);
  }
}

TEST(Fields, HaveARowEach) {
  expect_a_row_for_each_field(kMemoryFields);
  expect_a_row_for_each_field(kGlobalMemoryFields);
}

TEST(MemoryStats, AddUpButForTheCapacityAndTheRatio) {
  const MemoryStats part{.virtual_capacity = 1,
                         .physical_usage = 2,
                         .mapped_pages = 3,
                         .fragmentation_ratio = 0.5,
                         .allocated_bytes = 4,
                         .idle_bytes = 5,
                         .stranded_bytes = 6,
                         .quarantined_bytes = 7};
  MemoryStats sum;
  const auto expect = [&sum](std::size_t times) {
    EXPECT_EQ(sum.virtual_capacity, 0U);
    EXPECT_EQ(sum.physical_usage, 2 * times);
    EXPECT_EQ(sum.mapped_pages, 3 * times);
    EXPECT_EQ(sum.fragmentation_ratio, 0.0);
    EXPECT_EQ(sum.allocated_bytes, 4 * times);
    EXPECT_EQ(sum.idle_bytes, 5 * times);
    EXPECT_EQ(sum.stranded_bytes, 6 * times);
    EXPECT_EQ(sum.quarantined_bytes, 7 * times);
  };
  sum.add(part);
  sum.add(part);
  expect(2);
  sum.subtract(part);
  expect(1);
}

}  // namespace
}  // namespace vmm::testing
