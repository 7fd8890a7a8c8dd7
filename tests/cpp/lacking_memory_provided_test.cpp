// Memory that another allocator gives, where the host has no memory to note it: no segment and
// no block is lost.
#include "cpp/lacking_memory.h"

#include <gtest/gtest.h>

#include <cstdint>

#include "cpp/provided_memory_lab.h"

namespace vmm::testing {
namespace {

TEST_F(ProvidedMemoryTest, WithoutHostMemoryNothingIsLost) {
  live.reserve(1000);
  bool has_run_out = true;
  for (long n = 0; has_run_out; ++n) {
    has_run_out = runs_out_at(n, [&] { make({0, 8}); });
    EXPECT_EQ(lab.memory().counted_beside(), made.size());
  }
  has_run_out = true;
  for (std::uint64_t n = 0; has_run_out; ++n) {
    const auto fresh = make({1, n});
    Address block = 0;
    runs_out_at(static_cast<long>(n), [&] { block = fresh->allocate(3 * kMiB, kOne); });
    has_run_out = failures_made != 0;
    if (block != 0) live.push_back(block);
    if (block != 0) free(block);
    fresh->close();
  }
  bool reached = true;
  for (std::uint64_t n = 0; reached; ++n) {
    const auto fresh = make({2, n});
    const Address block = fresh->allocate(3 * kMiB, kOne);
    ProvidedMemory::record_stream(block, kTwo, lab.memory().streams());
    reached = reaches(static_cast<long>(n), [&] { EXPECT_TRUE(ProvidedMemory::free(block)); });
    // It was said, and either it is free or all is as it was.
    if (reports != expected_reports) ProvidedMemory::free(block);
    expected_reports = reports;
    fresh->close();
  }
}

}  // namespace
}  // namespace vmm::testing
