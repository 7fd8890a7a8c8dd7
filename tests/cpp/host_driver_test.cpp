// What only the host driver does: real faults, forks, one file for many chunks.
// What every driver does is in tests/contract.
#include "driver/host_driver.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/errors.h"
#include "driver/host_memory.h"

namespace vmm {
namespace {

constexpr std::size_t kPage = 2 * kMiB;
const Location kDevice = Location::on_device(0);

// One mapped chunk, or as many as asked for, side by side.
class HostDriverTest : public ::testing::Test {
 protected:
  Address map_chunks(std::size_t count, Access access = Access::read_write) {
    Address at = 0;
    EXPECT_TRUE(driver_.reserve(count * kPage, kPage, &at).ok());
    for (std::size_t k = 0; k < count; ++k) map_one(at + k * kPage);
    EXPECT_TRUE(driver_.set_access(at, count * kPage, kDevice, access).ok());
    return at;
  }
  ChunkHandle map_one(Address at) {
    ChunkHandle chunk = 0;
    EXPECT_TRUE(driver_.create({kPage, kDevice, false}, &chunk).ok());
    EXPECT_TRUE(driver_.map(at, kPage, chunk).ok());
    return chunk;
  }

  HostDriver driver_{HostDriverOptions{kPage, 4 * kGiB, 1}};
};

volatile char* bytes(Address at) { return reinterpret_cast<volatile char*>(at); }

// Runs `work` in a forked child and answers how that ended: its exit code, or
// minus the signal.
int in_child(const std::function<int()>& work) {
  const pid_t child = ::fork();
  if (child == 0) {
    // Sanitizers turn faults into reports; here the bare signal is wanted.
    std::signal(SIGSEGV, SIG_DFL);
    std::signal(SIGBUS, SIG_DFL);
    ::_exit(work());
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

int read_at(Address at) {
  return in_child([at] {
    static_cast<void>(*bytes(at));
    return 0;
  });
}
int write_at(Address at) {
  return in_child([at] {
    *bytes(at) = 1;
    return 0;
  });
}

// The kernel's mappings of the file that all chunks share.
std::size_t chunk_mappings() {
  std::ifstream maps("/proc/self/maps");
  std::size_t count = 0;
  for (std::string line; std::getline(maps, line);)
    count += line.find("torch_vmm_chunks") != std::string::npos ? 1U : 0U;
  return count;
}

TEST_F(HostDriverTest, WhatIsNotMappedFaults) {
  Address at = 0;
  ASSERT_TRUE(driver_.reserve(4 * kPage, kPage, &at).ok());
  EXPECT_EQ(read_at(at), -SIGSEGV);
  map_one(at + kPage);
  ASSERT_TRUE(driver_.set_access(at + kPage, kPage, kDevice, Access::read_write).ok());
  EXPECT_EQ(write_at(at + kPage), 0);
  EXPECT_EQ(read_at(at + kPage - 1), -SIGSEGV);
  EXPECT_EQ(read_at(at + 2 * kPage), -SIGSEGV);
  ASSERT_TRUE(driver_.unmap(at + kPage, kPage).ok());
  EXPECT_EQ(read_at(at + kPage), -SIGSEGV);
}

TEST_F(HostDriverTest, AccessThatWasNotGivenFaults) {
  const Address at = map_chunks(3, Access::none);
  EXPECT_EQ(read_at(at), -SIGSEGV);
  ASSERT_TRUE(driver_.set_access(at, kPage, kDevice, Access::read).ok());
  EXPECT_EQ(read_at(at), 0);
  EXPECT_EQ(write_at(at), -SIGSEGV);
  EXPECT_EQ(read_at(at + kPage), -SIGSEGV);
  ASSERT_TRUE(driver_.set_access(at, 3 * kPage, kDevice, Access::read_write).ok());
  EXPECT_EQ(write_at(at + 2 * kPage), 0);
  ASSERT_TRUE(driver_.set_access(at, 3 * kPage, kDevice, Access::none).ok());
  EXPECT_EQ(read_at(at), -SIGSEGV);
}

TEST_F(HostDriverTest, TheProcessItselfFaultsToo) {
  const Address at = map_chunks(1, Access::read);
  EXPECT_DEATH(*bytes(at) = 1, "");
  EXPECT_EQ(*bytes(at), 0);
}

TEST_F(HostDriverTest, TheStrongestAccessOfAnyLocationCounts) {
  const HostDriverOptions two{kPage, kGiB, 2};
  HostDriver driver(two);
  Address at = 0;
  ChunkHandle chunk = 0;
  ASSERT_TRUE(driver.reserve(kPage, kPage, &at).ok());
  ASSERT_TRUE(driver.create({kPage, kDevice, false}, &chunk).ok());
  ASSERT_TRUE(driver.map(at, kPage, chunk).ok());
  ASSERT_TRUE(driver.set_access(at, kPage, kDevice, Access::read_write).ok());
  ASSERT_TRUE(driver.set_access(at, kPage, Location::on_device(1), Access::read).ok());
  EXPECT_EQ(write_at(at), 0);
  ASSERT_TRUE(driver.set_access(at, kPage, kDevice, Access::none).ok());
  EXPECT_EQ(write_at(at), -SIGSEGV);
  EXPECT_EQ(read_at(at), 0);
  ASSERT_TRUE(driver.set_access(at, kPage, Location::on_device(1), Access::none).ok());
  EXPECT_EQ(read_at(at), -SIGSEGV);
}

TEST_F(HostDriverTest, RightsOfARunThatDifferAreEachKept) {
  const HostDriverOptions two{kPage, kGiB, 2};
  HostDriver driver(two);
  Address at = 0;
  ASSERT_TRUE(driver.reserve(4 * kPage, kPage, &at).ok());
  for (std::size_t k = 0; k < 4; ++k) {
    ChunkHandle chunk = 0;
    ASSERT_TRUE(driver.create({kPage, kDevice, false}, &chunk).ok());
    ASSERT_TRUE(driver.map(at + k * kPage, kPage, chunk).ok());
  }
  ASSERT_TRUE(driver.set_access(at + kPage, 2 * kPage, Location::on_device(1), Access::read_write).ok());
  ASSERT_TRUE(driver.set_access(at, 4 * kPage, kDevice, Access::read).ok());
  EXPECT_EQ(write_at(at), -SIGSEGV);
  EXPECT_EQ(write_at(at + kPage), 0);
  EXPECT_EQ(write_at(at + 2 * kPage), 0);
  EXPECT_EQ(write_at(at + 3 * kPage), -SIGSEGV);
  EXPECT_EQ(read_at(at + 3 * kPage), 0);
}

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

TEST_F(HostDriverTest, ManyChunksNeedFewFilesAndMappings) {
  rlimit old{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &old), 0);
  rlimit few = old;
  few.rlim_cur = 64;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  const Address at = map_chunks(1500);
  EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &old), 0);
  *bytes(at + 1499 * kPage) = 3;
  // 1500 chunks side by side are one kernel mapping, not 1500 of 65530.
  EXPECT_EQ(chunk_mappings(), 1U);
}

TEST_F(HostDriverTest, OutOfFileDescriptorsIsOutOfMemory) {
  rlimit old{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &old), 0);
  rlimit few = old;
  few.rlim_cur = 0;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  ChunkHandle chunk = 0;
  const Status answer = driver_.create({kPage, kDevice, true}, &chunk);
  EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &old), 0);
  EXPECT_EQ(answer.code(), StatusCode::out_of_memory) << answer.text();
  MemoryInfo info;
  ASSERT_TRUE(driver_.memory_info(0, &info).ok());
  EXPECT_EQ(info.free, info.total);
}

// In a child, since a limit that was lowered may not be raised again.
int with_file_size_limit(std::size_t bytes, const std::function<int()>& work) {
  return in_child([&] {
    rlimit limit{};
    ::getrlimit(RLIMIT_FSIZE, &limit);
    limit.rlim_cur = bytes;
    std::signal(SIGXFSZ, SIG_DFL);
    if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) return 99;
    return work();
  });
}

TEST_F(HostDriverTest, WorksWithinAFileSizeLimit) {
  EXPECT_EQ(with_file_size_limit(4 * kPage + 17,
                                 [] {
                                   HostDriver driver({kPage, kGiB, 1});
                                   ChunkHandle chunk = 0;
                                   Address at = 0;
                                   if (!driver.create({4 * kPage, kDevice, false}, &chunk).ok()) return 1;
                                   if (!driver.reserve(4 * kPage, kPage, &at).ok()) return 2;
                                   if (!driver.map(at, 4 * kPage, chunk).ok()) return 3;
                                   if (!driver.set_access(at, 4 * kPage, kDevice, Access::read_write).ok()) return 4;
                                   *bytes(at + 4 * kPage - 1) = 1;
                                   // The host's own memory is in another file.
                                   ChunkHandle other = 0;
                                   if (!driver.create({4 * kPage, Location::on_host(), false}, &other).ok()) return 5;
                                   if (!driver.release(other).ok()) return 6;
                                   return driver.create({4 * kPage, Location::on_host(), false}, &other).ok() ? 0 : 7;
                                 }),
            0);
}

TEST_F(HostDriverTest, AFileSizeLimitInTheWayIsNamed) {
  EXPECT_EQ(with_file_size_limit(4 * kPage,
                                 [] {
                                   const auto names_limit = [](const Status& status) {
                                     return status.code() == StatusCode::out_of_memory &&
                                            status.text().find("RLIMIT_FSIZE is 8388608 bytes") != std::string::npos;
                                   };
                                   HostDriver driver({kPage, kGiB, 1});
                                   ChunkHandle chunk = 0;
                                   if (!names_limit(driver.create({5 * kPage, kDevice, false}, &chunk))) return 1;
                                   if (!names_limit(driver.create({5 * kPage, kDevice, true}, &chunk))) return 2;
                                   if (!driver.create({4 * kPage, kDevice, true}, &chunk).ok()) return 3;
                                   if (!driver.create({4 * kPage, kDevice, false}, &chunk).ok()) return 4;
                                   if (!names_limit(driver.create({kPage, kDevice, false}, &chunk))) return 5;
                                   MemoryInfo info;
                                   if (!driver.memory_info(0, &info).ok()) return 6;
                                   return info.total - info.free == 8 * kPage ? 0 : 7;
                                 }),
            0);
}

TEST_F(HostDriverTest, ARaisedFileSizeLimitIsUsed) {
  EXPECT_EQ(with_file_size_limit(2 * kPage,
                                 [] {
                                   HostDriver driver({kPage, kGiB, 1});
                                   ChunkHandle chunk = 0;
                                   if (!driver.create({kPage, kDevice, false}, &chunk).ok()) return 1;
                                   if (driver.create({3 * kPage, kDevice, false}, &chunk).ok()) return 2;
                                   rlimit limit{};
                                   ::getrlimit(RLIMIT_FSIZE, &limit);
                                   limit.rlim_cur = 4 * kPage;
                                   if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) return 3;
                                   if (!driver.create({3 * kPage, kDevice, false}, &chunk).ok()) return 4;
                                   // What is there stays when the limit falls.
                                   limit.rlim_cur = 0;
                                   if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) return 5;
                                   if (!driver.release(chunk).ok()) return 6;
                                   return driver.create({3 * kPage, kDevice, false}, &chunk).ok() ? 0 : 7;
                                 }),
            0);
}

TEST_F(HostDriverTest, MemoryIsCountedToTheByte) {
  HostDriver driver({kPage, 3 * kPage + 5, 1});  // rounded down
  MemoryInfo info;
  ASSERT_TRUE(driver.memory_info(0, &info).ok());
  EXPECT_EQ(info.total, 3 * kPage);
  ChunkHandle one = 0;
  ChunkHandle two = 0;
  ChunkHandle three = 0;
  ASSERT_TRUE(driver.create({2 * kPage, kDevice, false}, &one).ok());
  EXPECT_EQ(driver.create({2 * kPage, kDevice, false}, &two).code(), StatusCode::out_of_memory);
  ASSERT_TRUE(driver.create({kPage, kDevice, true}, &two).ok());
  ASSERT_TRUE(driver.memory_info(0, &info).ok());
  EXPECT_EQ(info.free, 0U);
  EXPECT_EQ(driver.create({kPage, kDevice, false}, &three).code(), StatusCode::out_of_memory);
  EXPECT_TRUE(driver.create({kPage, Location::on_host(), false}, &three).ok()) << "the host's memory is another";
  ASSERT_TRUE(driver.release(one).ok());
  ASSERT_TRUE(driver.memory_info(0, &info).ok());
  EXPECT_EQ(info.free, 2 * kPage);
}

TEST_F(HostDriverTest, DevicesCountApart) {
  HostDriver driver({kPage, 2 * kPage, 2});
  ChunkHandle chunk = 0;
  ASSERT_TRUE(driver.create({2 * kPage, Location::on_device(0), false}, &chunk).ok());
  EXPECT_TRUE(driver.create({2 * kPage, Location::on_device(1), false}, &chunk).ok());
  EXPECT_EQ(driver.create({kPage, Location::on_device(1), false}, &chunk).code(), StatusCode::out_of_memory);
}

TEST_F(HostDriverTest, ReleasedMemoryGoesBackToTheSystem) {
  const auto resident = [] {
    std::ifstream statm("/proc/self/statm");
    std::size_t pages = 0;
    std::size_t in_memory = 0;
    statm >> pages >> in_memory;
    return in_memory * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  };
  Address at = 0;
  ChunkHandle chunk = 0;
  const std::size_t size = 64 * kMiB;
  ASSERT_TRUE(driver_.reserve(size, kPage, &at).ok());
  ASSERT_TRUE(driver_.create({size, kDevice, false}, &chunk).ok());
  ASSERT_TRUE(driver_.map(at, size, chunk).ok());
  ASSERT_TRUE(driver_.set_access(at, size, kDevice, Access::read_write).ok());
  const std::size_t before = resident();
  ASSERT_TRUE(driver_.fill_async(0, at, 1, size, nullptr).ok());
  EXPECT_GT(resident(), before + size / 2);
  ASSERT_TRUE(driver_.unmap(at, size).ok());
  ASSERT_TRUE(driver_.release(chunk).ok());
  EXPECT_LT(resident(), before + size / 2);
}

TEST_F(HostDriverTest, AnImportIsNotCountedAndNeedsItsSize) {
  ChunkHandle chunk = 0;
  int fd = -1;
  ASSERT_TRUE(driver_.create({2 * kPage, kDevice, true}, &chunk).ok());
  ASSERT_TRUE(driver_.export_chunk(chunk, &fd).ok());
  MemoryInfo before;
  ASSERT_TRUE(driver_.memory_info(0, &before).ok());
  ChunkHandle imported = 0;
  EXPECT_EQ(driver_.import_chunk(fd, kPage, &imported).code(), StatusCode::invalid_argument);
  EXPECT_EQ(driver_.import_chunk(0, kPage, &imported).code(), StatusCode::invalid_argument);
  ASSERT_TRUE(driver_.import_chunk(fd, 2 * kPage, &imported).ok());
  MemoryInfo after;
  ASSERT_TRUE(driver_.memory_info(0, &after).ok());
  EXPECT_EQ(after.free, before.free);
  EXPECT_TRUE(driver_.release(imported).ok());
  ::close(fd);
}

TEST_F(HostDriverTest, WhoHoldsAnExportedChunkCannotCutItAway) {
  ChunkHandle chunk = 0;
  Address at = 0;
  int fd = -1;
  ASSERT_TRUE(driver_.create({2 * kPage, kDevice, true}, &chunk).ok());
  ASSERT_TRUE(driver_.reserve(2 * kPage, kPage, &at).ok());
  ASSERT_TRUE(driver_.map(at, 2 * kPage, chunk).ok());
  ASSERT_TRUE(driver_.set_access(at, 2 * kPage, kDevice, Access::read_write).ok());
  ASSERT_TRUE(driver_.export_chunk(chunk, &fd).ok());
  for (const std::size_t size : {std::size_t{0}, kPage, 4 * kPage}) {
    EXPECT_EQ(::ftruncate(fd, static_cast<off_t>(size)), -1) << size;
    EXPECT_EQ(errno, EPERM);
  }
  // Nor forbid the writing that tensors live of.
  EXPECT_EQ(::fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE), -1);
  EXPECT_EQ(::fcntl(fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE), -1);
  EXPECT_EQ(write_at(at + 2 * kPage - 1), 0);
  ::close(fd);
}

TEST_F(HostDriverTest, SharesAChunkWithAnotherDriver) {
  HostDriver other({kPage, kGiB, 1});
  ChunkHandle chunk = 0;
  ChunkHandle theirs = 0;
  int fd = -1;
  ASSERT_TRUE(driver_.create({kPage, kDevice, true}, &chunk).ok());
  ASSERT_TRUE(driver_.export_chunk(chunk, &fd).ok());
  ASSERT_TRUE(other.import_chunk(fd, kPage, &theirs).ok());
  ::close(fd);
  Address here = 0;
  Address there = 0;
  ASSERT_TRUE(driver_.reserve(kPage, kPage, &here).ok());
  ASSERT_TRUE(driver_.map(here, kPage, chunk).ok());
  ASSERT_TRUE(driver_.set_access(here, kPage, kDevice, Access::read_write).ok());
  ASSERT_TRUE(other.reserve(kPage, kPage, &there).ok());
  ASSERT_TRUE(other.map(there, kPage, theirs).ok());
  ASSERT_TRUE(other.set_access(there, kPage, kDevice, Access::read).ok());
  *bytes(here + 77) = 5;
  EXPECT_EQ(*bytes(there + 77), 5);
}

TEST_F(HostDriverTest, OptionsAreChecked) {
  EXPECT_THROW(HostDriver(HostDriverOptions{3 * kMiB, kGiB, 1}), InvalidArgumentError);
  EXPECT_THROW(HostDriver(HostDriverOptions{512, kGiB, 1}), InvalidArgumentError);
  EXPECT_THROW(HostDriver(HostDriverOptions{kPage, kPage - 1, 1}), InvalidArgumentError);
  EXPECT_THROW(HostDriver(HostDriverOptions{kPage, kGiB, 0}), InvalidArgumentError);
  EXPECT_THROW(HostDriver(HostDriverOptions{kPage, kGiB, 64}), InvalidArgumentError);
  const HostDriver usual;
  MemoryInfo info;
  ASSERT_TRUE(usual.memory_info(0, &info).ok());
  EXPECT_GT(info.total, 64 * kMiB);
  EXPECT_EQ(info.total % kPage, 0U);
}

TEST_F(HostDriverTest, TheUsualDeviceIsWhatAControlGroupAllows) {
  std::string root = ::testing::TempDir() + "torch_vmm_groups_XXXXXX";
  ASSERT_NE(::mkdtemp(root.data()), nullptr);
  std::filesystem::create_directories(root + "/proc/self");
  std::filesystem::create_directories(root + "/sys/fs/cgroup");
  std::ofstream(root + "/proc/self/cgroup") << "0::/\n";
  std::ofstream(root + "/sys/fs/cgroup/memory.max") << 100 * kMiB << "\n";
  const HostDriver driver({kPage, 0, 1, root.c_str()});
  std::filesystem::remove_all(root);
  MemoryInfo info;
  ASSERT_TRUE(driver.memory_info(0, &info).ok());
  EXPECT_EQ(info.total, 80 * kMiB) << "80 % of it";
}

// With none left the process could not even give anything back.
TEST_F(HostDriverTest, TheLastMappingsOfTheProcessAreLeftToOthers) {
  const std::size_t page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  HostDriver driver(HostDriverOptions{page, kMiB, 1});
  const std::size_t most = most_mappings();
  if (most > 1000000) GTEST_SKIP() << "this kernel allows " << most << " mappings: too many to make";
  ChunkHandle chunk = 0;
  ASSERT_TRUE(driver.create({page, kDevice, false}, &chunk).ok());
  // The one chunk at every second page, so that the kernel can join none, and side by side.
  for (const std::size_t step : {2 * page, page}) {
    Address at = 0;
    ASSERT_TRUE(driver.reserve(2 * most * page, page, &at).ok());
    std::size_t count = 0;
    Status status;
    while (status = driver.map(at + count * step, page, chunk), status.ok()) ++count;
    EXPECT_EQ(status.code(), StatusCode::out_of_memory);
    EXPECT_NE(status.text().find("vm.max_map_count"), std::string::npos) << status.text();
    EXPECT_GE(count, most / (2 * step / page) - most / 8);
    EXPECT_LT(count * (step / page), most);
    // Others can map, and what is there can go, one by one and from the middle.
    std::thread([] { std::vector<char> memory(kMiB * 8, 'x'); }).join();
    for (std::size_t k = 1; k < count; k += 2) ASSERT_TRUE(driver.unmap(at + k * step, page).ok());
    for (std::size_t k = 0; k < count; k += 2) ASSERT_TRUE(driver.unmap(at + k * step, page).ok());
    ASSERT_TRUE(driver.unreserve(at, 2 * most * page).ok());
  }
  EXPECT_TRUE(driver.release(chunk).ok());
}

// What is counted comes back whatever goes first.
TEST(HostDriver, MappingsAreCountedAsTheyComeAndGo) {
  std::string root = ::testing::TempDir() + "torch_vmm_maps_XXXXXX";
  ASSERT_NE(::mkdtemp(root.data()), nullptr);
  std::filesystem::create_directories(root + "/proc/sys/vm");
  std::ofstream(root + "/proc/sys/vm/max_map_count") << "80\n";
  HostDriver driver(HostDriverOptions{kPage, kGiB, 1, root.c_str()});
  std::filesystem::remove_all(root);
  ChunkHandle chunk = 0;
  ASSERT_TRUE(driver.create({kPage, kDevice, false}, &chunk).ok());
  std::mt19937_64 random(1);
  for (int round = 0; round < 30; ++round) {
    Address at = 0;
    ASSERT_TRUE(driver.reserve(200 * kPage, kPage, &at).ok());
    std::vector<bool> mapped(200);
    for (int step = 0; step < 400; ++step) {
      const std::size_t k = random() % 200;
      if (mapped.at(k)) {
        ASSERT_TRUE(driver.unmap(at + k * kPage, kPage).ok());
        mapped.at(k) = false;
      } else {
        const Status status = driver.map(at + k * kPage, kPage, chunk);
        mapped.at(k) = status.ok();
        // Mappings and the stretches between them: 70.
        std::size_t pieces = 0;
        for (std::size_t j = 0; j < 200; ++j) pieces += mapped.at(j) || j == 0 || mapped.at(j - 1) ? 1 : 0;
        ASSERT_LE(pieces, 70U);
        ASSERT_TRUE(status.ok() || pieces >= 69);
      }
    }
    for (std::size_t k = 0; k < 200; ++k) {
      ASSERT_TRUE(!mapped.at(k) || driver.unmap(at + k * kPage, kPage).ok());
    }
    ASSERT_TRUE(driver.unreserve(at, 200 * kPage).ok());
  }
  // As many as at first.
  Address at = 0;
  ASSERT_TRUE(driver.reserve(70 * kPage, kPage, &at).ok());
  for (std::size_t k = 0; k < 70; ++k) ASSERT_TRUE(driver.map(at + k * kPage, kPage, chunk).ok()) << k;
  ASSERT_TRUE(driver.unmap(at, 70 * kPage).ok());
  ASSERT_TRUE(driver.unreserve(at, 70 * kPage).ok());
  ASSERT_TRUE(driver.release(chunk).ok());
}

TEST_F(HostDriverTest, WhatWasMappedGoesWithTheDriver) {
  Address at = 0;
  {
    HostDriver driver({kPage, kGiB, 1});
    ChunkHandle chunk = 0;
    ASSERT_TRUE(driver.reserve(4 * kPage, kPage, &at).ok());
    ASSERT_TRUE(driver.create({kPage, kDevice, false}, &chunk).ok());
    ASSERT_TRUE(driver.map(at, kPage, chunk).ok());
    ASSERT_TRUE(driver.set_access(at, kPage, kDevice, Access::read_write).ok());
    EXPECT_EQ(read_at(at), 0);
  }
  EXPECT_EQ(read_at(at), -SIGSEGV);
}

}  // namespace
}  // namespace vmm
