// NativeMemoryPool over pools that only count: its own checks, and what it makes of
// a driver's answers. Over CUDA's calls: tests/api/test_native_pools.py.
#include "core/faces/native_memory_pool.h"

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/errors.h"
#include "cpp/lab.h"

namespace vmm::testing {
namespace {

// Addresses without memory behind them.
class CountedPools final : public NativePools {
 public:
  [[nodiscard]] std::string missing_pools(int /*device*/) const override { return missing; }
  Status create_pool(int /*device*/, std::size_t max_bytes, NativePool* out) override {
    if (!next.ok()) return next;
    asked_max = max_bytes;
    *out = 7;
    ++pools;
    return {};
  }
  Status destroy_pool(NativePool pool) override {
    EXPECT_EQ(pool, 7U);
    if (!next.ok()) return next;
    --pools;
    return {};
  }
  Status allocate_from_pool(NativePool /*pool*/, int /*device*/, std::size_t bytes, Stream stream,
                            Address* out) override {
    if (!next.ok()) return next;
    *out = 0x10000U * ++addresses;
    live[*out] = bytes;
    streams.push_back(stream);
    return {};
  }
  Status free_to_pool(int /*device*/, Address address, Stream stream) override {
    if (!next.ok()) return next;
    EXPECT_EQ(live.erase(address), 1U) << "the driver would free what is not there";
    streams.push_back(stream);
    return {};
  }
  Status trim_pool(NativePool /*pool*/, std::size_t keep) override {
    asked();
    reserved = keep;
    return next;
  }
  Status set_release_threshold(NativePool /*pool*/, std::size_t bytes) override {
    asked();
    threshold = bytes;
    return next;
  }
  Status release_threshold(NativePool /*pool*/, std::size_t* out) const override {
    asked();
    *out = threshold;
    return next;
  }
  Status pool_usage(NativePool /*pool*/, NativePoolUsage* out) const override {
    asked();
    *out = {1, 2, reserved, 4};
    return next;
  }

  Status next;                        // what every call answers
  std::function<void()> while_asked;  // within a call that is about the pool itself
  std::string missing;
  std::size_t asked_max = 0;
  std::size_t threshold = 0;
  std::size_t reserved = 3;
  int pools = 0;
  Address addresses = 0;
  std::map<Address, std::size_t> live;
  std::vector<Stream> streams;  // of each allocation and free

 private:
  void asked() const {
    if (while_asked) while_asked();
    EXPECT_EQ(pools, 1) << "asked about a pool that has ended";
  }
};

std::vector<std::string>& reports() {
  static std::vector<std::string> said;
  return said;
}
void report(const char* who, const char* what) noexcept { reports().push_back(std::string(who) + ": " + what); }

class Native : public ::testing::Test {
 protected:
  Native() {
    reports().clear();
    lab_.driver.set_native_pools(pools_);
  }
  ~Native() override {
    pool_.reset();
    EXPECT_EQ(pools_.pools, 0);
    EXPECT_TRUE(pools_.live.empty());
    EXPECT_TRUE(reports().empty()) << reports().front();
  }
  NativeMemoryPool& pool(std::size_t max_bytes = 0) {
    pool_ = std::make_unique<NativeMemoryPool>(lab_.driver, 0, max_bytes, &report);
    return *pool_;
  }

  Lab lab_;
  CountedPools pools_;
  std::unique_ptr<NativeMemoryPool> pool_;
};

TEST(NativeOnTheHost, SaysThatItNeedsAGpu) {
  Lab lab;
  try {
    const NativeMemoryPool pool(lab.driver, 0, 0, &report);
    FAIL();
  } catch (const NotAvailableError& error) {
    EXPECT_NE(error.reason.find("needs a GPU"), std::string::npos) << error.reason;
  }
}

TEST_F(Native, WhatTheDriverLacksIsNamed) {
  pools_.missing = "the NVIDIA driver is too old: it lacks cuMemPoolCreate";
  try {
    pool();
    FAIL();
  } catch (const NotAvailableError& error) {
    EXPECT_EQ(error.reason, pools_.missing);
  }
}

TEST_F(Native, AFailureToMakeItIsShown) {
  pools_.next = broken();
  EXPECT_THROW(pool(), DriverError);
  pools_.next = {};
}

TEST_F(Native, StreamsReachTheDriver) {
  NativeMemoryPool& made = pool(kMiB);
  EXPECT_EQ(pools_.asked_max, kMiB);
  EXPECT_EQ(made.raw(), 7U);
  const Address address = made.allocate(100, stream(5));
  made.free(address, stream(6));
  EXPECT_EQ(pools_.streams, (std::vector<Stream>{stream(5), stream(6)}));
}

TEST_F(Native, MisuseIsNamed) {
  NativeMemoryPool& made = pool();
  EXPECT_THROW(made.allocate(0, nullptr), InvalidArgumentError);
  const Address address = made.allocate(100, nullptr);
  EXPECT_THROW(made.free(address + 1, nullptr), InvalidArgumentError);
  made.free(address, nullptr);
  try {
    made.free(address, nullptr);
    FAIL();
  } catch (const InvalidArgumentError& error) {
    EXPECT_NE(std::string(error.what()).find(format_hex(address)), std::string::npos);
  }
  made.destroy(/*force=*/false);
  EXPECT_NO_THROW(made.destroy(false));
  EXPECT_TRUE(made.is_destroyed());
  EXPECT_THROW(made.allocate(1, nullptr), InvalidArgumentError);
  EXPECT_THROW(made.free(address, nullptr), InvalidArgumentError);
  EXPECT_THROW(static_cast<void>(made.usage()), InvalidArgumentError);
  EXPECT_THROW(static_cast<void>(made.raw()), InvalidArgumentError);
  EXPECT_THROW(made.trim(0), InvalidArgumentError);
}

TEST_F(Native, TheMaximumIsExact) {
  NativeMemoryPool& made = pool(1000);
  const Address address = made.allocate(600, nullptr);
  try {
    made.allocate(401, nullptr);
    FAIL();
  } catch (const OutOfMemoryError& error) {
    EXPECT_EQ(error.requested, 401U);
    EXPECT_EQ(error.available, 400U);
    EXPECT_EQ(error.limit, 1000U);
  }
  EXPECT_THROW(made.allocate(kUnlimited, nullptr), OutOfMemoryError);
  const Address rest = made.allocate(400, nullptr);
  made.free(address, nullptr);
  made.free(rest, nullptr);
  made.free(made.allocate(1000, nullptr), nullptr);
}

TEST_F(Native, WhatTheDriverRefusesLeavesItAsItWas) {
  NativeMemoryPool& made = pool(1000);
  pools_.next = no_memory();
  EXPECT_THROW(made.allocate(1000, nullptr), OutOfMemoryError);
  pools_.next = broken();
  EXPECT_THROW(made.allocate(1000, nullptr), DriverError);
  pools_.next = {StatusCode::not_supported, "allocate_from_pool on a capturing stream"};
  EXPECT_THROW(made.allocate(1000, nullptr), NotAvailableError);
  pools_.next = {};
  const Address address = made.allocate(1000, nullptr);
  pools_.next = broken();
  EXPECT_THROW(made.free(address, nullptr), DriverError);
  pools_.next = {};
  EXPECT_THROW(made.allocate(1, nullptr), OutOfMemoryError) << "it is still there, and counts";
  made.free(address, nullptr);
}

TEST_F(Native, DestroyingOneInUseIsRefusedUnlessForced) {
  NativeMemoryPool& made = pool();
  made.allocate(100, nullptr);
  made.allocate(50, nullptr);
  try {
    made.destroy(/*force=*/false);
    FAIL();
  } catch (const StillInUseError& error) {
    EXPECT_EQ(error.live_bytes, 150U);
    EXPECT_EQ(error.live_blocks, 2U);
  }
  EXPECT_FALSE(made.is_destroyed());
  made.destroy(/*force=*/true);
  EXPECT_EQ(lab_.driver.count(Call::synchronize), 2U) << "queued work may use them, and their frees are queued too";
  EXPECT_TRUE(pools_.live.empty());
}

TEST_F(Native, ItsEndWaitsForFreesThatAreQueued) {
  NativeMemoryPool& made = pool();
  made.free(made.allocate(100, nullptr), nullptr);
  made.destroy(/*force=*/false);
  EXPECT_EQ(lab_.driver.count(Call::synchronize), 1U);
}

TEST_F(Native, AFailureToDestroyIsShownAndTriedAgain) {
  NativeMemoryPool& made = pool();
  const Address address = made.allocate(100, nullptr);
  pools_.next = broken();
  EXPECT_THROW(made.destroy(/*force=*/true), DriverError);
  pools_.next = {};
  EXPECT_FALSE(made.is_destroyed());
  made.free(address, nullptr);
  made.destroy(/*force=*/false);
}

// The driver is never asked about a pool that it has ended meanwhile.
TEST_F(Native, ItsEndWaitsForWhoAsksAboutIt) {
  using Ask = std::function<void(NativeMemoryPool&)>;
  const std::vector<Ask> all = {
      [](NativeMemoryPool& pool) { static_cast<void>(pool.usage()); },
      [](NativeMemoryPool& pool) { pool.set_release_threshold(512); },
      [](NativeMemoryPool& pool) { static_cast<void>(pool.release_threshold()); },
      [](NativeMemoryPool& pool) { pool.trim(0); },
  };
  for (std::size_t k = 0; k < all.size(); ++k) {
    SCOPED_TRACE(k);
    NativeMemoryPool& made = pool();
    std::future<void> end;
    pools_.while_asked = [&] {
      if (end.valid()) return;
      end = std::async(std::launch::async, [&] { made.destroy(/*force=*/true); });
      EXPECT_EQ(end.wait_for(std::chrono::milliseconds(50)), std::future_status::timeout);
    };
    all[k](made);
    end.get();
    EXPECT_TRUE(made.is_destroyed());
  }
}

TEST_F(Native, ADestructorSaysAndCountsWhatItCouldNotDo) {
  pool();
  const std::uint64_t before = NativeMemoryPool::failures();
  pools_.next = broken();
  pool_.reset();
  EXPECT_EQ(NativeMemoryPool::failures(), before + 1);
  ASSERT_EQ(reports().size(), 1U);
  EXPECT_NE(reports()[0].find("SCRIPTED_UNKNOWN"), std::string::npos) << reports()[0];
  reports().clear();
  pools_.pools = 0;
}

TEST_F(Native, ADeadDriverIsNoFailureOfItsEnd) {
  const std::uint64_t before = NativeMemoryPool::failures();
  pool();
  lab_.driver.go_away();
  pools_.next = broken();
  pool_.reset();
  EXPECT_EQ(NativeMemoryPool::failures(), before);
  pools_.pools = 0;
}

TEST_F(Native, ItsNumbersAreTheDrivers) {
  NativeMemoryPool& made = pool();
  EXPECT_EQ(made.usage().used, 1U);
  EXPECT_EQ(made.usage().used_peak, 2U);
  EXPECT_EQ(made.usage().reserved, 3U);
  EXPECT_EQ(made.usage().reserved_peak, 4U);
  EXPECT_EQ(made.trim(1), 2U) << "given back";
  made.set_release_threshold(512);
  EXPECT_EQ(made.release_threshold(), 512U);
  pools_.next = broken();
  EXPECT_THROW(static_cast<void>(made.usage()), DriverError);
  EXPECT_THROW(made.trim(0), DriverError);
  EXPECT_THROW(made.set_release_threshold(0), DriverError);
  EXPECT_THROW(static_cast<void>(made.release_threshold()), DriverError);
  pools_.next = {};
}

}  // namespace
}  // namespace vmm::testing
