// Private pools and other allocators' memory where the host has no memory to note what happens:
// nothing is lost, and nothing half begun.
#include "cpp/lacking_memory.h"

#include <gtest/gtest.h>

#include <cstdint>

#include "cpp/private_pools_lab.h"

namespace vmm::testing {
namespace {

TEST_F(PrivatePoolsTest, ACaptureThatTheHostHasNoMemoryForNeverBegan) {
  lab.free(allocate(kMiB, a));
  bool has_run_out = true;
  for (long n = 0; has_run_out; ++n) {
    has_run_out = runs_out_at(n, [&] { pools.begin(kGraph, only(b), a); });
    EXPECT_EQ(lab.memory().clock().is_capturing(), !has_run_out) << n;
    EXPECT_EQ(pools.any_route(), !has_run_out) << n;
    if (has_run_out) EXPECT_FALSE(exists(kGraph)) << n;
  }
  captures[a] = ++last_capture;
  end_capture(kGraph, a);
  pools.release(kGraph);
  expect_nothing_left();
}

}  // namespace
}  // namespace vmm::testing
