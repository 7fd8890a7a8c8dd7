// What control groups allow, read from files under a folder of the test's own.
#include "driver/host_memory.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "base/units.h"

namespace vmm {
namespace {

class HostMemoryTest : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = ::testing::TempDir() + "torch_vmm_groups_XXXXXX";
    ASSERT_NE(::mkdtemp(root_.data()), nullptr);
  }
  void TearDown() override { std::filesystem::remove_all(root_); }

  void write(const std::string& file, const std::string& text) const {
    const std::filesystem::path path = root_ + file;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text << "\n";
  }
  void process_is_in(const std::string& lines) const { write("/proc/self/cgroup", lines); }
  [[nodiscard]] std::size_t limit() const { return control_group_limit(root_); }

  std::string root_;
};

TEST_F(HostMemoryTest, WithoutControlGroupsItIsTheMachines) {
  EXPECT_EQ(limit(), kUnlimited);
  const auto pages = static_cast<std::size_t>(::sysconf(_SC_PHYS_PAGES));
  EXPECT_EQ(usable_memory(root_), pages * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)));
}

TEST_F(HostMemoryTest, AContainerSeesItsOwnGroupAsTheRoot) {
  process_is_in("0::/");
  write("/sys/fs/cgroup/memory.max", "536870912");
  EXPECT_EQ(limit(), 512 * kMiB);
  EXPECT_EQ(usable_memory(root_), 512 * kMiB);
}

TEST_F(HostMemoryTest, TheTightestLevelOfVersion2Counts) {
  process_is_in("0::/user.slice/user-0.slice/job");
  write("/sys/fs/cgroup/user.slice/user-0.slice/job/memory.max", "max");
  EXPECT_EQ(limit(), kUnlimited);
  write("/sys/fs/cgroup/user.slice/memory.max", "1073741824");
  EXPECT_EQ(limit(), kGiB);
  write("/sys/fs/cgroup/user.slice/user-0.slice/memory.max", "2147483648");
  EXPECT_EQ(limit(), kGiB) << "the level above is tighter";
  write("/sys/fs/cgroup/user.slice/user-0.slice/job/memory.max", "4096");
  EXPECT_EQ(limit(), 4096U);
}

TEST_F(HostMemoryTest, OthersGroupsDoNotCount) {
  process_is_in("0::/mine");
  write("/sys/fs/cgroup/mine/memory.max", "8192");
  write("/sys/fs/cgroup/min/memory.max", "4096");
  write("/sys/fs/cgroup/mine/child/memory.max", "4096");
  EXPECT_EQ(limit(), 8192U);
}

TEST_F(HostMemoryTest, Version1IsAskedWhereTheMemoryControllerIs) {
  process_is_in("3:cpuset:/a\n4:cpu,memory:/docker/1f\n0::/b");
  write("/sys/fs/cgroup/memory/docker/1f/memory.limit_in_bytes", "2147483648");
  write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712");
  write("/sys/fs/cgroup/memory/a/memory.limit_in_bytes", "4096");
  EXPECT_EQ(limit(), 2 * kGiB);
  write("/sys/fs/cgroup/memory/docker/memory.limit_in_bytes", "1073741824");
  EXPECT_EQ(limit(), kGiB);
}

TEST_F(HostMemoryTest, AVersion1ContainerIsNamedByAPathThatItCannotSee) {
  process_is_in("4:memory:/docker/1f");
  write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "1073741824");
  EXPECT_EQ(limit(), kGiB);
}

TEST_F(HostMemoryTest, AGroupOutsideOfTheProcessViewLeavesTheRoots) {
  process_is_in("0::/../elsewhere");
  write("/sys/fs/cgroup/memory.max", "1073741824");
  write("/sys/fs/elsewhere/memory.max", "4096");
  EXPECT_EQ(limit(), kGiB);
}

TEST_F(HostMemoryTest, NoVersion1LimitIsAboveTheMachines) {
  process_is_in("4:memory:/");
  write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712");
  EXPECT_EQ(usable_memory(root_), usable_memory(root_ + "/nothing"));
}

TEST_F(HostMemoryTest, WhatIsNoNumberIsNoLimit) {
  process_is_in("0::/\nnonsense\n5:memory\n6:memory:relative");
  for (const char* text : {"", "max", "-1", "12x", "99999999999999999999999"}) {
    write("/sys/fs/cgroup/memory.max", text);
    EXPECT_EQ(limit(), kUnlimited) << text;
  }
}

}  // namespace
}  // namespace vmm
