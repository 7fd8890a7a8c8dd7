// A recorded program run again: a number for each step, the driver's calls
// counted, and nothing left behind however it ends.
#include "core/faces/replay.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "lab.h"

namespace vmm::testing {
namespace {

RecordedStep allocate(std::uint64_t block, std::uint64_t size, std::uint64_t stream = 0) {
  return {true, block, size, stream};
}
RecordedStep release(std::uint64_t block) { return {false, block, 0, 0}; }

class Replay : public ::testing::Test {
 protected:
  Replayed run(const std::vector<RecordedStep>& program) {
    const Replayed done = replay(driver, LabSpec::plain_options(), program);
    EXPECT_EQ(driver.leaks(), "");
    EXPECT_EQ(done.left, 0U);
    return done;
  }

  HostDriver host{{kPage, 64 * kMiB, 1}};
  ScriptedDriver driver{host};
};

TEST_F(Replay, HasANumberForEachStep) {
  const Replayed done = run({allocate(1, 3 * kMiB), allocate(2, 100), release(1), release(2)});
  EXPECT_EQ(done.allocated, (std::vector<std::uint64_t>{3 * kMiB, 3 * kMiB + 512, 512, 0}));
  ASSERT_EQ(done.reserved.size(), 4U);
  for (std::size_t k = 0; k < 4; ++k) EXPECT_GE(done.reserved[k], done.allocated[k]) << k;
  EXPECT_EQ(done.reserved_peak, *std::max_element(done.reserved.begin(), done.reserved.end()));
  EXPECT_EQ(done.allocated_peak, 3 * kMiB + 512);
  EXPECT_EQ(done.refused_at, std::nullopt);
}

TEST_F(Replay, CountsWhatTheDriverIsAskedFor) {
  std::vector<DriverCalls> seen;
  driver.before(Call::release, [&] {
    if (!seen.empty()) return;  // the first release is that of the end
    seen.push_back({driver.count(Call::create), driver.count(Call::release), driver.count(Call::map),
                    driver.count(Call::unmap), driver.count(Call::set_access)});
  });
  const Replayed done = run({allocate(1, 3 * kMiB), allocate(2, 30 * kMiB, 1), release(1), allocate(1, 2 * kMiB)});
  ASSERT_EQ(seen.size(), 1U);
  EXPECT_GT(done.calls.create, 0U);
  EXPECT_EQ(done.calls.create, seen[0].create);
  EXPECT_EQ(done.calls.map, seen[0].map);
  EXPECT_EQ(done.calls.set_access, seen[0].set_access);
  EXPECT_EQ(done.calls.release, 0U);
  EXPECT_EQ(done.driver_calls.back(), done.calls.total());
  EXPECT_TRUE(std::is_sorted(done.driver_calls.begin(), done.driver_calls.end()));
}

TEST_F(Replay, PassesOverWhatIsNotLiveAndWhatIsEmpty) {
  const Replayed done = run({release(7), allocate(1, 0), release(1), allocate(1, kMiB), allocate(1, 2 * kMiB)});
  EXPECT_EQ(done.allocated, (std::vector<std::uint64_t>{0, 0, 0, kMiB, 2 * kMiB}));
}

TEST_F(Replay, EndsWhereAProgramDoesNotFit) {
  const Replayed done = run({allocate(1, 40 * kMiB), allocate(2, 40 * kMiB), release(1)});
  EXPECT_EQ(done.refused_at, 1U);
  EXPECT_EQ(done.allocated, (std::vector<std::uint64_t>{40 * kMiB}));
}

TEST_F(Replay, LeavesNothingWhenTheDriverFails) {
  driver.fail_nth(Call::create, 2, broken(), Repeat::from_then_on);
  EXPECT_THROW(replay(driver, LabSpec::plain_options(), {allocate(1, 3 * kMiB), allocate(2, 30 * kMiB)}), VmmError);
  EXPECT_EQ(driver.leaks(), "");
}

}  // namespace
}  // namespace vmm::testing
