// What children of a process see of the host driver's memory, and what they may do.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "cpp/host_driver_lab.h"

namespace vmm {
namespace {

TEST_F(HostDriverTest, AChildsWritesStayInTheChild) {
  const Address at = map_chunks(3);
  Address alias = 0;
  ASSERT_TRUE(driver_.reserve(kPage, kPage, &alias).ok());
  *bytes(at) = 1;
  *bytes(at + kPage) = 2;
  ASSERT_TRUE(driver_.set_access(at + 2 * kPage, kPage, kDevice, Access::read).ok());
  EXPECT_EQ(in_child([&] {
              if (*bytes(at) != 1 || *bytes(at + kPage) != 2) return 1;
              *bytes(at) = 11;
              std::memset(reinterpret_cast<void*>(at + kPage), 22, kPage);
              return *bytes(at) == 11 && *bytes(at + kPage) == 22 ? 0 : 2;
            }),
            0);
  EXPECT_EQ(*bytes(at), 1);
  EXPECT_EQ(*bytes(at + kPage), 2);
  EXPECT_EQ(write_at(at + 2 * kPage), -SIGSEGV) << "a child keeps the rights its parent had";
}

TEST_F(HostDriverTest, AParentsNewWritesAndUnmapsDoNotBreakTheChild) {
  const Address at = map_chunks(2);
  *bytes(at) = 1;
  int go[2];
  ASSERT_EQ(::pipe(go), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    *bytes(at) = 5;  // its own page now
    char byte = 0;
    if (::read(go[0], &byte, 1) != 1) ::_exit(1);
    static_cast<void>(*bytes(at + kPage));  // still there
    ::_exit(*bytes(at) == 5 ? 0 : 2);
  }
  *bytes(at) = 9;
  ASSERT_TRUE(driver_.unmap(at, 2 * kPage).ok());
  ASSERT_EQ(::write(go[1], "x", 1), 1);
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  ::close(go[0]);
  ::close(go[1]);
}

TEST_F(HostDriverTest, AGrandchildSeesWhatTheChildWrote) {
  const Address at = map_chunks(1);
  *bytes(at) = 1;
  EXPECT_EQ(in_child([&] {
              *bytes(at) = 7;
              const int inner = in_child([&] {
                const bool seen = *bytes(at) == 7;
                *bytes(at) = 8;
                return seen ? 0 : 1;
              });
              return inner == 0 && *bytes(at) == 7 ? 0 : 2;
            }),
            0);
  EXPECT_EQ(*bytes(at), 1);
}

TEST_F(HostDriverTest, InAChildTheDriverHasGone) {
  const Address at = map_chunks(1);
  Fence fence = nullptr;
  ASSERT_TRUE(driver_.create_fence(0, &fence).ok());
  ChunkHandle chunk = 0;
  ASSERT_TRUE(driver_.create({kPage, kDevice, true}, &chunk).ok());
  const int wrong = in_child([&] {
    Capabilities capabilities;
    MemoryInfo info;
    Address out = 0;
    ChunkHandle made = 0;
    Fence other = nullptr;
    int fd = -1;
    const Status answers[] = {
        driver_.capabilities(0, &capabilities),
        driver_.memory_info(0, &info),
        driver_.reserve(kPage, kPage, &out),
        driver_.unreserve(at, kPage),
        driver_.create({kPage, kDevice, false}, &made),
        driver_.release(chunk),
        driver_.map(at, kPage, chunk),
        driver_.unmap(at, kPage),
        driver_.set_access(at, kPage, kDevice, Access::none),
        driver_.export_chunk(chunk, &fd),
        driver_.import_chunk(0, kPage, &made),
        driver_.create_fence(0, &other),
        driver_.destroy_fence(fence),
        driver_.record(fence, nullptr),
        driver_.query(fence),
        driver_.wait(fence),
        driver_.stream_wait(0, nullptr, fence),
        driver_.synchronize(0),
        driver_.copy_async(0, at, at + 64, 8, nullptr),
        driver_.fill_async(0, at, 1, 8, nullptr),
        driver_.read(0, &other, at, 8),
    };
    int count = 0;
    for (const Status& answer : answers) count += answer.code() == StatusCode::driver_gone ? 0 : 1;
    if (driver_.alive() || driver_.device_count() != 0 || driver_.missing(0).empty()) count += 100;
    *bytes(at) = 1;  // nothing was unmapped
    return count;
  });
  EXPECT_EQ(wrong, 0);
  EXPECT_TRUE(driver_.alive());
  EXPECT_TRUE(driver_.query(fence).ok());
}

TEST_F(HostDriverTest, ADriverDestroyedInAChildLeavesTheParentsMemory) {
  auto* const driver = new HostDriver({kPage, kGiB, 1});
  Address at = 0;
  ChunkHandle chunk = 0;
  ASSERT_TRUE(driver->reserve(kPage, kPage, &at).ok());
  ASSERT_TRUE(driver->create({kPage, kDevice, false}, &chunk).ok());
  ASSERT_TRUE(driver->map(at, kPage, chunk).ok());
  ASSERT_TRUE(driver->set_access(at, kPage, kDevice, Access::read_write).ok());
  *bytes(at) = 42;
  EXPECT_EQ(in_child([&] {
              delete driver;
              HostDriver fresh({kPage, kGiB, 1});  // and a child may have its own
              Address out = 0;
              return fresh.reserve(kPage, kPage, &out).ok() ? 0 : 1;
            }),
            0);
  EXPECT_EQ(*bytes(at), 42);
  delete driver;
}

TEST_F(HostDriverTest, ForksWhileOtherThreadsMap) {
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&] {
      Address at = 0;
      EXPECT_TRUE(driver_.reserve(kPage, kPage, &at).ok());
      while (!stop.load()) {
        const ChunkHandle chunk = map_one(at);
        EXPECT_TRUE(driver_.set_access(at, kPage, kDevice, Access::read_write).ok());
        *bytes(at) = 1;
        EXPECT_TRUE(driver_.release(chunk).ok());
        EXPECT_TRUE(driver_.unmap(at, kPage).ok());
      }
    });
  }
  const Address mine = map_chunks(4);
  for (int k = 0; k < 30; ++k) {
    *bytes(mine) = static_cast<char>(k);
    EXPECT_EQ(in_child([&] {
                Fence fence = nullptr;  // takes the locks: none was left behind
                if (driver_.create_fence(0, &fence).code() != StatusCode::driver_gone) return 1;
                const bool seen = *bytes(mine) == static_cast<char>(k);
                *bytes(mine) = 99;
                return seen ? 0 : 2;
              }),
              0);
    EXPECT_EQ(*bytes(mine), static_cast<char>(k));
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace vmm
