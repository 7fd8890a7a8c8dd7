// The bench of tests of the host driver: mapped chunks, and children that look at them.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <functional>

#include "driver/host_driver.h"

namespace vmm {

inline constexpr std::size_t kPage = 2 * kMiB;
inline const Location kDevice = Location::on_device(0);

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

inline volatile char* bytes(Address at) { return reinterpret_cast<volatile char*>(at); }

// Runs `work` in a forked child and answers how that ended: its exit code, or
// minus the signal.
inline int in_child(const std::function<int()>& work) {
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

inline int read_at(Address at) {
  return in_child([at] {
    static_cast<void>(*bytes(at));
    return 0;
  });
}
inline int write_at(Address at) {
  return in_child([at] {
    *bytes(at) = 1;
    return 0;
  });
}

}  // namespace vmm
