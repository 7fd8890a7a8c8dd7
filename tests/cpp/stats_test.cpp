#include "core/numbers/stats.h"

#include <gtest/gtest.h>

#include <thread>

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

}  // namespace
}  // namespace vmm::testing
