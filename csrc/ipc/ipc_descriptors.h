// File descriptors that go from one process to another: what the sender keeps
// open, and the two ways in which a receiver gets copies. It never touches CUDA
// and never knows what the descriptors are of.
//
// A receiver first takes them out of the sender, as torch does (pidfd_getfd);
// that needs the right to trace the sender, which containers and hardened
// kernels withhold. Then it asks the sender for them, over a Unix socket with an
// abstract name: only processes of the same user that show the password from the
// handle are answered, and both must be in one network namespace.
//
// The sender's side of the socket is a thread that starts with the first
// descriptor. It never ends by itself and does not keep the process alive. In a
// forked child it does not exist, and what it served is closed there: a child
// must not hold memory of its parent's, nor the socket's name.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/sync.h"
#include "driver/fork_watch.h"
#include "ipc/ipc_handle.h"

namespace vmm {

// Owns one descriptor.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(other.release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept;
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() { close(); }

  [[nodiscard]] int get() const { return fd_; }
  [[nodiscard]] bool is_open() const { return fd_ >= 0; }
  int release();
  void close();

 private:
  int fd_ = -1;
};
using Descriptors = std::vector<Descriptor>;

// The sender's side.
class DescriptorServer final : private ForkObserver {
 public:
  // Where there can be no socket (a sandbox), the descriptors are served no less
  // to those who may take them.
  DescriptorServer();
  // Ends the thread and closes everything.
  ~DescriptorServer();

  // Keeps `fd` open until it is removed, and gives it a name that no other gets
  // in this process's life.
  std::uint64_t add(Descriptor fd) VMM_EXCLUDES(mutex_);
  void remove(std::uint64_t id) VMM_EXCLUDES(mutex_);
  [[nodiscard]] std::size_t size() const VMM_EXCLUDES(mutex_);
  // What goes into handles.
  [[nodiscard]] const IpcSender& sender() const { return sender_; }

 private:
  void before_fork() override VMM_NO_THREAD_SAFETY_ANALYSIS { mutex_.lock(); }
  void after_fork_in_parent() override VMM_NO_THREAD_SAFETY_ANALYSIS { mutex_.unlock(); }
  void after_fork_in_child() override VMM_NO_THREAD_SAFETY_ANALYSIS;

  bool listen();
  void serve();
  void answer(const Descriptor& client) VMM_EXCLUDES(mutex_);

  IpcSender sender_;
  Descriptor socket_;
  Descriptor stop_;  // an eventfd that ends the thread
  std::unique_ptr<std::thread> thread_;
  mutable Mutex mutex_;
  std::unordered_map<std::uint64_t, Descriptor> open_ VMM_GUARDED_BY(mutex_);
  std::uint64_t next_id_ VMM_GUARDED_BY(mutex_) = 1;
};

// The receiver's side: copies of the descriptors that a handle names. Each way
// answers "", or why it did not work and what would allow it; `out` is then
// empty.
std::string take_from_process(const IpcHandle& handle, Descriptors* out);
std::string ask_over_socket(const IpcHandle& handle, Descriptors* out);
// One way, then the other. Throws NotAvailableError that gives both reasons.
Descriptors fetch_descriptors(const IpcHandle& handle);

// When a process started, in clock ticks since boot; 0: it cannot be told. With
// the number it tells processes apart where numbers are used again, and where
// another namespace uses the same.
std::uint64_t start_of_process(pid_t pid);

}  // namespace vmm
