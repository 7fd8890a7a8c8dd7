#include "ipc/ipc_descriptors.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/errors.h"

namespace vmm::testing {
namespace {

Descriptor memory_file() { return Descriptor(::memfd_create("ipc_descriptors_test", 0)); }

ino_t inode(int fd) {
  struct stat status {};
  return ::fstat(fd, &status) == 0 ? status.st_ino : 0;
}
bool is_open(int fd) { return ::fcntl(fd, F_GETFD) >= 0; }

std::size_t open_descriptors() {
  std::size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
    count += entry.path().empty() ? 0U : 1U;
  return count;
}

bool says(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// A server with some descriptors, and the handle that names them.
class Served : public ::testing::Test {
 protected:
  void serve(std::size_t count) {
    handle.pid = ::getpid();
    handle.sender = server->sender();
    for (std::size_t k = 0; k < count; ++k) {
      Descriptor file = memory_file();
      const int fd = file.get();
      inodes.push_back(inode(fd));
      handle.chunks.push_back({4096, fd, server->add(std::move(file))});
    }
  }
  void expect_copies(const Descriptors& copies) {
    ASSERT_EQ(copies.size(), handle.chunks.size());
    for (std::size_t k = 0; k < copies.size(); ++k) {
      EXPECT_EQ(inode(copies[k].get()), inodes[k]) << k;
      EXPECT_NE(copies[k].get(), handle.chunks[k].fd) << k;
      EXPECT_EQ(::fcntl(copies[k].get(), F_GETFD), FD_CLOEXEC) << k;
    }
  }
  // Runs `check` in a forked child; its answer must be "".
  template <typename Check>
  static void expect_in_child(const Check& check) {
    const pid_t child = ::fork();
    if (child == 0) {
      const std::string wrong = check();
      if (!wrong.empty()) (void)std::fprintf(stderr, "in the child: %s\n", wrong.c_str());
      ::_exit(wrong.empty() ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }

  std::unique_ptr<DescriptorServer> server = std::make_unique<DescriptorServer>();
  IpcHandle handle;
  std::vector<ino_t> inodes;
};

TEST_F(Served, AreHandedOverTheSocket) {
  serve(3);
  Descriptors copies;
  EXPECT_EQ(ask_over_socket(handle, &copies), "");
  expect_copies(copies);
}

TEST_F(Served, AreHandedOverInSeveralMessages) {
  serve(300);
  Descriptors copies;
  EXPECT_EQ(ask_over_socket(handle, &copies), "");
  expect_copies(copies);
}

TEST_F(Served, AreHandedToAnotherProcess) {
  serve(2);
  expect_in_child([&]() -> std::string {
    Descriptors copies;
    std::string wrong = ask_over_socket(handle, &copies);
    if (wrong.empty() && (copies.size() != 2 || inode(copies[1].get()) != inodes[1])) wrong = "other files";
    return wrong;
  });
}

TEST_F(Served, AreHandedToManyAtOnce) {
  serve(5);
  std::vector<std::thread> threads;
  for (int k = 0; k < 8; ++k) {
    threads.emplace_back([&] {
      for (int turn = 0; turn < 50; ++turn) {
        Descriptors copies;
        EXPECT_EQ(ask_over_socket(handle, &copies), "");
        EXPECT_EQ(copies.size(), 5U);
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

// A socket whose patience is limited does not go on by itself after one.
TEST_F(Served, AreHandedOverWhateverSignalsCome) {
  serve(2);
  struct sigaction ignore_it {};
  ignore_it.sa_handler = [](int) {};
  struct sigaction before {};
  ASSERT_EQ(::sigaction(SIGALRM, &ignore_it, &before), 0);
  const itimerval often{{0, 100}, {0, 100}};
  const itimerval never{};
  ASSERT_EQ(::setitimer(ITIMER_REAL, &often, nullptr), 0);
  int failed = 0;
  for (int turn = 0; turn < 2000; ++turn) {
    Descriptors copies;
    failed += ask_over_socket(handle, &copies).empty() ? 0 : 1;
  }
  ASSERT_EQ(::setitimer(ITIMER_REAL, &never, nullptr), 0);
  ASSERT_EQ(::sigaction(SIGALRM, &before, nullptr), 0);
  EXPECT_EQ(failed, 0);
}

TEST_F(Served, AreTakenOutOfTheProcess) {
  serve(3);
  Descriptors copies;
  const std::string why_not = take_from_process(handle, &copies);
  if (says(why_not, "EPERM") || says(why_not, "Linux 5.6")) GTEST_SKIP() << why_not;
  EXPECT_EQ(why_not, "");
  expect_copies(copies);
}

TEST_F(Served, AreAskedForWhereTheyCannotBeTaken) {
  serve(2);
  // As if the number were another process's: taking is not even tried.
  ++handle.sender->started;
  Descriptors copies;
  EXPECT_TRUE(says(take_from_process(handle, &copies), "another one")) << take_from_process(handle, &copies);
  EXPECT_TRUE(copies.empty());
  expect_copies(fetch_descriptors(handle));
}

TEST_F(Served, NeedThePassword) {
  serve(1);
  handle.sender->password[5] ^= 1U;
  Descriptors copies;
  EXPECT_TRUE(says(ask_over_socket(handle, &copies), "did not hand"));
  EXPECT_TRUE(copies.empty());
  // And whoever has it is still served.
  handle.sender->password[5] ^= 1U;
  EXPECT_EQ(ask_over_socket(handle, &copies), "");
}

TEST_F(Served, AreAllOrNone) {
  serve(4);
  server->remove(handle.chunks[2].id);
  EXPECT_EQ(server->size(), 3U);
  EXPECT_FALSE(is_open(handle.chunks[2].fd)) << "closed at once";
  Descriptors copies;
  EXPECT_TRUE(says(ask_over_socket(handle, &copies), "did not hand"));
  EXPECT_TRUE(copies.empty());
}

TEST_F(Served, NamesAreNeverUsedAgain) {
  serve(1);
  server->remove(handle.chunks[0].id);
  const std::uint64_t id = server->add(memory_file());
  EXPECT_NE(id, handle.chunks[0].id);
  server->remove(id + 1000);  // unknown: nothing to do
  EXPECT_EQ(server->size(), 1U);
}

TEST_F(Served, AServerThatHasEndedIsNamed) {
  serve(1);
  server.reset();
  EXPECT_FALSE(is_open(handle.chunks[0].fd));
  ++handle.sender->started;
  try {
    fetch_descriptors(handle);
    FAIL();
  } catch (const NotAvailableError& error) {
    EXPECT_TRUE(says(error.what(), "process " + std::to_string(::getpid()))) << error.what();
    EXPECT_TRUE(says(error.what(), "has ended")) << error.what();
    EXPECT_TRUE(says(error.what(), "network namespace")) << error.what();
  }
}

TEST_F(Served, AProcessThatHasEndedIsNamed) {
  serve(1);
  const pid_t child = ::fork();
  if (child == 0) ::_exit(0);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  handle.pid = child;
  Descriptors copies;
  EXPECT_TRUE(says(take_from_process(handle, &copies), "has ended")) << take_from_process(handle, &copies);
}

TEST_F(Served, ADescriptorThatIsClosedIsNamed) {
  serve(1);
  handle.chunks[0].fd = 1 << 20;
  Descriptors copies;
  const std::string why_not = take_from_process(handle, &copies);
  if (says(why_not, "EPERM") || says(why_not, "Linux 5.6")) GTEST_SKIP() << why_not;
  EXPECT_TRUE(says(why_not, "EBADF")) << why_not;
}

TEST_F(Served, ASenderWithoutTorchVmmCannotBeAsked) {
  serve(1);
  handle.sender.reset();
  Descriptors copies;
  EXPECT_TRUE(says(ask_over_socket(handle, &copies), "does not use torch_vmm"));
}

TEST_F(Served, AForkedChildHoldsNothing) {
  serve(2);
  expect_in_child([&]() -> std::string {
    for (const SharedChunk& chunk : handle.chunks) {
      if (is_open(chunk.fd)) return "it holds the parent's memory";
    }
    return "";
  });
  // A child that lives on holds neither the socket's name.
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    (void)!::write(ready[1], "", 1);
    ::pause();
    ::_exit(0);
  }
  char byte = 0;
  EXPECT_EQ(::read(ready[0], &byte, 1), 1);
  for (const int end : ready) ::close(end);
  server.reset();
  Descriptors copies;
  EXPECT_TRUE(says(ask_over_socket(handle, &copies), "cannot be asked"));
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
}

TEST_F(Served, NothingIsLeftOpen) {
  serve(1);
  Descriptors copies;
  ASSERT_EQ(ask_over_socket(handle, &copies), "");
  copies.clear();
  const std::size_t before = open_descriptors();
  for (int turn = 0; turn < 2000; ++turn) {
    const std::uint64_t id = server->add(memory_file());
    server->remove(id);
  }
  for (int turn = 0; turn < 200; ++turn) {
    ASSERT_EQ(ask_over_socket(handle, &copies), "");
    copies.clear();
  }
  // The server may still be closing its end of the last connection.
  for (int turn = 0; turn < 100 && open_descriptors() > before; ++turn) ::usleep(10000);
  EXPECT_LE(open_descriptors(), before);
}

TEST(StartOfProcess, IsReadBehindAnyName) {
  const std::uint64_t start = start_of_process(::getpid());
  EXPECT_GT(start, 0U);
  ASSERT_EQ(::prctl(PR_SET_NAME, "a) 1 (b 2"), 0);
  EXPECT_EQ(start_of_process(::getpid()), start);
  EXPECT_EQ(start_of_process(1 << 30), 0U) << "no such process";
}

}  // namespace
}  // namespace vmm::testing
