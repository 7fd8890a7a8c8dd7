// A file that only the process has that opened it: a forked child closes it before it does
// anything else. A lock (flock) is of all who have the open file, and would be the child's
// as well, after its parent has ended.
#pragma once

#include <sys/types.h>

#include <string>

#include "base/sync.h"
#include "driver/fork_watch.h"

namespace vmm {

class OwnFile final : private ForkObserver {
 public:
  OwnFile() { watch_forks(this); }
  OwnFile(const OwnFile&) = delete;
  OwnFile& operator=(const OwnFile&) = delete;
  ~OwnFile();

  // As open(2), and not inherited by programs; false, and errno says why. What was open is closed.
  bool open(const std::string& path, int flags, mode_t mode = 0) VMM_EXCLUDES(mutex_);
  void close() noexcept VMM_EXCLUDES(mutex_);
  // Removes `path` where it still names the open file: others may have moved it and made their own.
  void unlink(const std::string& path) const noexcept;
  [[nodiscard]] bool is_open() const { return file_ >= 0; }
  // For read(2) and its kind; of none that is open, and in a forked child, -1.
  [[nodiscard]] int descriptor() const { return file_; }

 private:
  void before_fork() override VMM_NO_THREAD_SAFETY_ANALYSIS { mutex_.lock(); }
  void after_fork_in_parent() override VMM_NO_THREAD_SAFETY_ANALYSIS { mutex_.unlock(); }
  void after_fork_in_child() override VMM_NO_THREAD_SAFETY_ANALYSIS;

  Mutex mutex_;  // a leaf: between two forks `file_` is what is open
  int file_ = -1;
};

}  // namespace vmm
