#include "core/memory/own_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <utility>

namespace vmm {

OwnFile::~OwnFile() {
  close();
  unwatch_forks(this);
}

bool OwnFile::open(const std::string& path, int flags, mode_t mode) {
  close();
  const MutexLock lock(mutex_);
  file_ = ::open(path.c_str(), flags | O_CLOEXEC, mode);
  return file_ >= 0;
}

void OwnFile::close() noexcept {
  const MutexLock lock(mutex_);
  if (const int file = std::exchange(file_, -1); file >= 0) ::close(file);
}

void OwnFile::unlink(const std::string& path) const noexcept {
  struct stat ours {};
  struct stat named {};
  const bool are_there = ::fstat(descriptor(), &ours) == 0 && ::lstat(path.c_str(), &named) == 0;
  if (are_there && ours.st_dev == named.st_dev && ours.st_ino == named.st_ino) ::unlink(path.c_str());
}

void OwnFile::after_fork_in_child() {
  if (const int file = std::exchange(file_, -1); file >= 0) ::close(file);
  mutex_.unlock();
}

}  // namespace vmm
