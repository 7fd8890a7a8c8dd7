#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "base/check.h"
#include "base/errors.h"
#include "base/status.h"
#include "base/sync.h"
#include "base/units.h"

namespace vmm {
namespace {

TEST(Units, AlignsToPowersOfTwo) {
  EXPECT_EQ(align_up(0, 4096), 0U);
  EXPECT_EQ(align_up(1, 4096), 4096U);
  EXPECT_EQ(align_up(4096, 4096), 4096U);
  EXPECT_EQ(align_down(4097, 4096), 4096U);
  EXPECT_TRUE(is_aligned(8 * kGiB, kGiB));
  EXPECT_FALSE(is_aligned(8 * kGiB + 1, 2));
}

TEST(Units, KnowsPowersOfTwo) {
  EXPECT_FALSE(is_power_of_two(0));
  EXPECT_TRUE(is_power_of_two(1));
  EXPECT_TRUE(is_power_of_two(kTiB));
  EXPECT_FALSE(is_power_of_two(3 * kMiB));
  EXPECT_EQ(floor_power_of_two(1), 1U);
  EXPECT_EQ(floor_power_of_two(20 * kMiB), 16 * kMiB);
  EXPECT_EQ(floor_power_of_two(kUnlimited), std::size_t{1} << 63);
}

TEST(Units, SeesSumsThatOverflow) {
  EXPECT_FALSE(sum_overflows(kUnlimited - 1, 1));
  EXPECT_TRUE(sum_overflows(kUnlimited, 1));
  EXPECT_TRUE(sum_overflows(kUnlimited / 2 + 1, kUnlimited / 2 + 1));
}

TEST(Units, JoinsStretchesThatTouch) {
  EXPECT_TRUE(joined({}).empty());
  EXPECT_TRUE(joined({{8, 0}}).empty());
  const std::vector<ByteRange> expected = {{0, 24}, {32, 8}};
  EXPECT_EQ(joined({{32, 8}, {8, 8}, {0, 8}, {12, 12}, {28, 0}}), expected);  // touching, overlapping, empty
  EXPECT_EQ(joined({{0, 24}, {4, 4}, {32, 8}, {32, 8}}), expected);           // one within another
}

TEST(Units, SpellsSizes) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(512), "512 B");
  EXPECT_EQ(format_bytes(2 * kMiB), "2 MiB");
  EXPECT_EQ(format_bytes(19 * kGiB + 800 * kMiB), "19.8 GiB");
  EXPECT_EQ(format_bytes(4096 * kTiB), "4 PiB");
  EXPECT_EQ(format_bytes(kUnlimited), "no limit");
  EXPECT_EQ(format_hex(0x7f0000000000), "0x7f0000000000");
}

TEST(StatusText, NamesTheCallAndTheDriversAnswer) {
  EXPECT_TRUE(Status().ok());
  EXPECT_EQ(Status::okay().text(), "ok");
  EXPECT_EQ(Status(StatusCode::out_of_memory, "cuMemCreate", 2, "CUDA_ERROR_OUT_OF_MEMORY").text(),
            "cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY (2)");
  EXPECT_EQ(Status(StatusCode::not_ready, "query").text(), "query: not ready");
}

TEST(StatusText, HasAWordForEveryCode) {
  for (int code = 0; code <= static_cast<int>(StatusCode::driver_error); ++code) {
    EXPECT_STRNE(to_string(static_cast<StatusCode>(code)), "unknown") << code;
  }
}

TEST(Errors, CarryTheirValues) {
  const InvalidPageSizeError page(3000, 2 * kMiB);
  EXPECT_EQ(page.page_size, 3000U);
  EXPECT_NE(std::string(page.what()).find("2 MiB"), std::string::npos);
  const InvalidRangeError range(1, 2, 3, "why");
  EXPECT_EQ(range.capacity, 3U);
  EXPECT_STREQ(range.what(), "offset 1, size 2, capacity 3: why");
  const ModelNotFoundError model("a", "");
  EXPECT_STREQ(model.what(), "no model 'a'; registered: none");
  const OutOfMemoryError memory("m", 1, 2, 3, "pool");
  EXPECT_EQ(memory.pool, "pool");
}

TEST(Errors, ThrowIfFailedPicksTheKind) {
  EXPECT_NO_THROW(throw_if_failed(Status(), "nothing"));
  EXPECT_THROW(throw_if_failed(Status(StatusCode::driver_gone, "map"), "mapping"), NotAvailableError);
  try {
    throw_if_failed(Status(StatusCode::driver_error, "cuMemMap", 999, "CUDA_ERROR_UNKNOWN"), "mapping a page");
    FAIL();
  } catch (const DriverError& error) {
    EXPECT_EQ(error.call, "cuMemMap");
    EXPECT_EQ(error.code, 999);
    EXPECT_EQ(error.name, "CUDA_ERROR_UNKNOWN");
    EXPECT_STREQ(error.what(), "mapping a page: cuMemMap: CUDA_ERROR_UNKNOWN (999)");
  }
}

TEST(CheckDeathTest, AbortsWithTheValues) {
  const int mapped = 3;
  VMM_CHECK(mapped == 3, "not printed");
  EXPECT_DEATH(VMM_CHECK(mapped == 4, "mapped ", mapped), "broken invariant at .*base_test.cpp.*mapped 3");
}

TEST(MutexLock, IsExclusive) {
  Mutex mutex;
  const auto is_free = [&mutex] {
    bool got = false;
    std::thread([&mutex, &got] {
      if (!mutex.try_lock()) return;
      got = true;
      mutex.unlock();
    }).join();
    return got;
  };
  {
    const MutexLock lock(mutex);
    EXPECT_FALSE(is_free());
  }
  EXPECT_TRUE(is_free());
}

}  // namespace
}  // namespace vmm
