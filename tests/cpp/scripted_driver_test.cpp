#include "support/scripted_driver.h"

#include "core/streams/device_streams.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "driver/host_driver.h"

namespace vmm::testing {
namespace {

constexpr std::size_t kPage = 2 * kMiB;
const Stream kOne = reinterpret_cast<Stream>(0x1);
const Stream kTwo = reinterpret_cast<Stream>(0x2);

Status exhausted() { return {StatusCode::out_of_memory, "scripted"}; }

class ScriptedDriverTest : public ::testing::Test {
 protected:
  Fence recorded(Stream stream) {
    Fence fence = nullptr;
    EXPECT_TRUE(driver_.create_fence(0, &fence).ok());
    EXPECT_TRUE(driver_.record(fence, stream).ok());
    return fence;
  }
  StatusCode create(ChunkHandle* out) { return driver_.create({kPage, Location::on_device(0), false}, out).code(); }
  StatusCode create() {
    ChunkHandle chunk = 0;
    return create(&chunk);
  }

  HostDriver host_{HostDriverOptions{kPage, kGiB, 1}};
  ScriptedDriver driver_{host_};
};

TEST_F(ScriptedDriverTest, FailsTheNthCallOfAKindOnce) {
  driver_.fail_nth(Call::create, 2, exhausted());
  EXPECT_EQ(create(), StatusCode::ok);
  Address at = 0;
  EXPECT_TRUE(driver_.reserve(kPage, kPage, &at).ok()) << "another kind does not count";
  EXPECT_EQ(create(), StatusCode::out_of_memory);
  EXPECT_EQ(create(), StatusCode::ok);
  EXPECT_EQ(driver_.failures(), 1U);
  EXPECT_EQ(driver_.live_chunks(), 2U) << "the failed call did not reach the driver";
}

TEST_F(ScriptedDriverTest, FailsFromThenOn) {
  driver_.fail_nth(Call::create, 2, exhausted(), Repeat::from_then_on);
  EXPECT_EQ(create(), StatusCode::ok);
  EXPECT_EQ(create(), StatusCode::out_of_memory);
  EXPECT_EQ(create(), StatusCode::out_of_memory);
  driver_.clear_failures();
  EXPECT_EQ(create(), StatusCode::ok);
}

TEST_F(ScriptedDriverTest, SweepsOverEveryCall) {
  const auto program = [&]() -> bool {  // true if all went well; leaves nothing
    Address at = 0;
    ChunkHandle chunk = 0;
    if (!driver_.reserve(kPage, kPage, &at).ok()) return false;
    bool good = create(&chunk) == StatusCode::ok;
    if (good) {
      good = driver_.map(at, kPage, chunk).ok();
      if (good) {
        good = driver_.set_access(at, kPage, Location::on_device(0), Access::read).ok();
        driver_.clear_failures();  // undoing is not a part of the sweep
        EXPECT_TRUE(driver_.unmap(at, kPage).ok());
      }
      EXPECT_TRUE(driver_.release(chunk).ok());
    }
    EXPECT_TRUE(driver_.unreserve(at, kPage).ok());
    return good;
  };
  for (std::uint64_t n = 1; n <= 4; ++n) {
    driver_.clear_failures();
    driver_.fail_nth_call(n, exhausted());
    EXPECT_FALSE(program()) << n;
    EXPECT_EQ(driver_.leaks(), "") << n;
  }
  driver_.clear_failures();
  EXPECT_TRUE(program());
}

TEST_F(ScriptedDriverTest, FailsWhatAPredicatePicks) {
  driver_.fail_if([](const CallRecord& call) { return call.call == Call::create && call.a > kPage; }, exhausted());
  ChunkHandle chunk = 0;
  EXPECT_EQ(create(&chunk), StatusCode::ok);
  EXPECT_EQ(driver_.create({2 * kPage, Location::on_device(0), false}, &chunk).code(), StatusCode::out_of_memory);
}

TEST_F(ScriptedDriverTest, GoesAway) {
  driver_.go_away();
  EXPECT_FALSE(driver_.alive());
  EXPECT_EQ(driver_.device_count(), 0);
  EXPECT_NE(driver_.missing(0), "");
  EXPECT_EQ(create(), StatusCode::driver_gone);
  EXPECT_TRUE(host_.alive());
}

TEST_F(ScriptedDriverTest, RecordsAndCounts) {
  ChunkHandle chunk = 0;
  ASSERT_EQ(create(&chunk), StatusCode::ok);
  ASSERT_TRUE(driver_.release(chunk).ok());
  EXPECT_EQ(driver_.release(chunk).code(), StatusCode::invalid_argument);
  EXPECT_EQ(driver_.count(Call::create), 1U);
  EXPECT_EQ(driver_.count(Call::release), 2U);
  EXPECT_EQ(driver_.count(), 3U);
  ASSERT_EQ(driver_.calls(Call::create).size(), 1U);
  EXPECT_EQ(driver_.calls(Call::create)[0].text(), "1 create(0x200000, 0x0, 0x0) -> ok");
  EXPECT_NE(driver_.transcript().find("3 release"), std::string::npos);
  EXPECT_NE(driver_.transcript().find("invalid argument"), std::string::npos);
  driver_.clear_calls();
  EXPECT_EQ(driver_.count(), 0U);
  EXPECT_EQ(driver_.transcript(), "");
}

TEST_F(ScriptedDriverTest, TellsWhatIsAlive) {
  EXPECT_EQ(driver_.leaks(), "");
  Address at = 0;
  ChunkHandle chunk = 0;
  ASSERT_TRUE(driver_.reserve(4 * kPage, kPage, &at).ok());
  ASSERT_EQ(create(&chunk), StatusCode::ok);
  ASSERT_TRUE(driver_.map(at, kPage, chunk).ok());
  ASSERT_TRUE(driver_.map(at + kPage, kPage, chunk).ok());
  const Fence fence = recorded(nullptr);
  EXPECT_EQ(driver_.leaks(), "1 reservation (8 MiB), 1 chunk (2 MiB), 2 mappings (4 MiB), 1 fence");
  EXPECT_EQ(driver_.live_chunk_bytes(), kPage);
  EXPECT_EQ(driver_.live_mapped_bytes(), 2 * kPage);
  ASSERT_TRUE(driver_.unmap(at, 2 * kPage).ok());
  ASSERT_TRUE(driver_.release(chunk).ok());
  ASSERT_TRUE(driver_.unreserve(at, 4 * kPage).ok());
  ASSERT_TRUE(driver_.destroy_fence(fence).ok());
  EXPECT_EQ(driver_.leaks(), "");
}

TEST_F(ScriptedDriverTest, DelaysACall) {
  driver_.delay(Call::create, std::chrono::milliseconds(30));
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(create(), StatusCode::ok);
  EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(30));
}

TEST_F(ScriptedDriverTest, HoldsTheFencesOfOneStream) {
  const Fence before = recorded(kOne);
  driver_.hold_fences(kOne);
  const Fence held = recorded(kOne);
  const Fence free = recorded(kTwo);
  EXPECT_TRUE(driver_.query(before).ok()) << "work before the hold is done";
  EXPECT_EQ(driver_.query(held).code(), StatusCode::not_ready);
  EXPECT_TRUE(driver_.query(free).ok());
  driver_.release_fences(kOne);
  EXPECT_TRUE(driver_.query(held).ok());
}

TEST_F(ScriptedDriverTest, HoldsAllFences) {
  driver_.hold_fences();
  const Fence one = recorded(kOne);
  const Fence two = recorded(kTwo);
  EXPECT_EQ(driver_.query(one).code(), StatusCode::not_ready);
  EXPECT_EQ(driver_.query(two).code(), StatusCode::not_ready);
  driver_.release_fences();
  EXPECT_TRUE(driver_.query(one).ok());
  EXPECT_TRUE(driver_.query(two).ok());
  EXPECT_TRUE(driver_.query(recorded(kOne)).ok()) << "the hold has ended";
}

TEST_F(ScriptedDriverTest, AFenceOnTheDefaultStreamIsHeldByBlockingStreams) {
  driver_.make_blocking(kOne);
  for (const Stream held : {kOne, kPerThreadStream, Stream{nullptr}}) {
    driver_.hold_fences(held);
    const Fence fence = recorded(nullptr);
    EXPECT_EQ(driver_.query(fence).code(), StatusCode::not_ready);
    driver_.release_fences(held);
    EXPECT_TRUE(driver_.query(fence).ok());
  }
  driver_.hold_fences(reinterpret_cast<Stream>(std::uintptr_t{0x70}));
  EXPECT_TRUE(driver_.query(recorded(nullptr)).ok()) << "a stream that is not blocking";
}

TEST_F(ScriptedDriverTest, ACapturedStreamIsNeitherRecordedNorMadeToWait) {
  const Fence fence = recorded(kTwo);
  driver_.make_blocking(kTwo);
  driver_.begin_capture(kOne);
  EXPECT_EQ(driver_.record(fence, kOne).code(), StatusCode::not_supported);
  EXPECT_EQ(driver_.stream_wait(0, kOne, fence).code(), StatusCode::not_supported);
  EXPECT_TRUE(driver_.record(fence, nullptr).ok());
  driver_.begin_capture(kTwo);
  EXPECT_EQ(driver_.record(fence, nullptr).code(), StatusCode::not_supported) << "a blocking stream is captured";
  driver_.end_capture(kOne);
  driver_.end_capture(kTwo);
  EXPECT_TRUE(driver_.record(fence, kOne).ok());
  EXPECT_TRUE(driver_.record(fence, nullptr).ok());
}

TEST_F(ScriptedDriverTest, AStreamThatWaitsIsHeldToo) {
  driver_.hold_fences(kOne);
  const Fence held = recorded(kOne);
  ASSERT_TRUE(driver_.stream_wait(0, kTwo, held).ok());
  const Fence behind = recorded(kTwo);
  EXPECT_EQ(driver_.query(behind).code(), StatusCode::not_ready);
  driver_.release_fences(kOne);
  EXPECT_TRUE(driver_.query(behind).ok());
}

TEST_F(ScriptedDriverTest, WaitBlocksUntilReleased) {
  driver_.hold_fences();
  const Fence fence = recorded(kOne);
  std::atomic<bool> done{false};
  std::thread waiter([&] {
    EXPECT_TRUE(driver_.wait(fence).ok());
    done = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  EXPECT_FALSE(done.load());
  driver_.release_fences();
  waiter.join();
  EXPECT_TRUE(done.load());
}

TEST_F(ScriptedDriverTest, WaitPassesAtOnceIfToldTo) {
  driver_.set_wait_on_held(ScriptedDriver::WaitOnHeld::pass);
  driver_.hold_fences();
  const Fence fence = recorded(kOne);
  EXPECT_EQ(driver_.query(fence).code(), StatusCode::not_ready);
  EXPECT_TRUE(driver_.wait(fence).ok());
  EXPECT_TRUE(driver_.query(fence).ok()) << "what was waited for has passed";
  EXPECT_TRUE(driver_.synchronize(0).ok());
}

TEST_F(ScriptedDriverTest, ChangesCapabilities) {
  driver_.change_capabilities([](Capabilities* capabilities) { capabilities->exportable = false; });
  Capabilities capabilities;
  ASSERT_TRUE(driver_.capabilities(0, &capabilities).ok());
  EXPECT_FALSE(capabilities.exportable);
}

TEST_F(ScriptedDriverTest, SurvivesThreads) {
  driver_.fail_nth(Call::map, 50, exhausted());
  std::atomic<int> failed{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      Address at = 0;
      EXPECT_TRUE(driver_.reserve(kPage, kPage, &at).ok());
      for (int k = 0; k < 50; ++k) {
        ChunkHandle chunk = 0;
        EXPECT_EQ(create(&chunk), StatusCode::ok);
        if (driver_.map(at, kPage, chunk).ok()) {
          EXPECT_TRUE(driver_.unmap(at, kPage).ok());
        } else {
          ++failed;
        }
        EXPECT_TRUE(driver_.release(chunk).ok());
      }
      EXPECT_TRUE(driver_.unreserve(at, kPage).ok());
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failed.load(), 1);
  EXPECT_EQ(driver_.leaks(), "");
}

}  // namespace
}  // namespace vmm::testing
