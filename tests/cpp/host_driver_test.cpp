// What only the host driver does: real faults, one file for many chunks. Forks are in
// host_driver_fork_test.cpp, what every driver does in tests/contract.
#include "driver/host_driver.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

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
#include "cpp/host_driver_lab.h"
#include "driver/host_memory.h"
#include "support/resident_bytes.h"

namespace vmm {
namespace {

using testing::resident_bytes;

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
  Address at = 0;
  ChunkHandle chunk = 0;
  const std::size_t size = 64 * kMiB;
  ASSERT_TRUE(driver_.reserve(size, kPage, &at).ok());
  ASSERT_TRUE(driver_.create({size, kDevice, false}, &chunk).ok());
  ASSERT_TRUE(driver_.map(at, size, chunk).ok());
  ASSERT_TRUE(driver_.set_access(at, size, kDevice, Access::read_write).ok());
  const std::size_t before = resident_bytes();
  ASSERT_TRUE(driver_.fill_async(0, at, 1, size, nullptr).ok());
  EXPECT_GT(resident_bytes(), before + size / 2);
  ASSERT_TRUE(driver_.unmap(at, size).ok());
  ASSERT_TRUE(driver_.release(chunk).ok());
  EXPECT_LT(resident_bytes(), before + size / 2);
}

TEST_F(HostDriverTest, ZeroingTouchesNoPageThatNobodyTouched) {
  const std::size_t size = 32 * kPage;
  const Address at = map_chunks(32);
  const std::size_t before = resident_bytes();
  ASSERT_TRUE(driver_.fill_async(0, at, 0, size, nullptr).ok());
  EXPECT_LT(resident_bytes(), before + size / 16);
}

// Beside a plain array, over chunks whose places in the file are in no order, one of them
// in a file of its own.
TEST_F(HostDriverTest, ZeroingMeansWhatItMeansForAnyMemory) {
  constexpr std::size_t kCount = 6;
  constexpr std::size_t kSize = kCount * kPage;
  Address at = 0;
  ASSERT_TRUE(driver_.reserve(kSize, kPage, &at).ok());
  for (const std::size_t k : {3U, 0U, 5U, 1U, 4U}) map_one(at + k * kPage);
  ChunkHandle exportable = 0;
  ASSERT_TRUE(driver_.create({kPage, kDevice, true}, &exportable).ok());
  ASSERT_TRUE(driver_.map(at + 2 * kPage, kPage, exportable).ok());
  ASSERT_TRUE(driver_.set_access(at, kSize, kDevice, Access::read_write).ok());
  std::vector<unsigned char> expected(kSize);
  std::mt19937_64 random(1);  // NOLINT(cert-msc32-c,cert-msc51-cpp)
  for (int step = 0; step < 400; ++step) {
    const std::size_t begin = random() % kSize;
    const std::size_t most = step % 3 == 0 ? kSize : 100 * kKiB;
    const std::size_t size = std::min(kSize - begin, random() % most + 1);
    const auto byte = static_cast<std::uint8_t>(step % 2 == 0 ? 0 : step);
    ASSERT_TRUE(driver_.fill_async(0, at + begin, byte, size, nullptr).ok());
    std::memset(expected.data() + begin, byte, size);
    ASSERT_EQ(std::memcmp(expected.data(), reinterpret_cast<void*>(at), kSize), 0) << "step " << step;
    // Whole chunks without a page again, now and then.
    if (step % 40 != 39) continue;
    const std::size_t k = random() % kCount;
    if (k == 2) continue;
    ASSERT_TRUE(driver_.unmap(at + k * kPage, kPage).ok());
    map_one(at + k * kPage);
    ASSERT_TRUE(driver_.set_access(at + k * kPage, kPage, kDevice, Access::read_write).ok());
    std::memset(expected.data() + k * kPage, 0, kPage);
  }
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
