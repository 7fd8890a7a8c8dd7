#include "driver/host_arena.h"

#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <iterator>

#include "base/units.h"

namespace vmm {
namespace {

// Far more than any machine's memory: a sparse file costs nothing, and a file
// that never fills cannot fragment to the point of refusing.
constexpr std::size_t kArenaBytes = 64 * kTiB;

}  // namespace

Status status_from_errno(const char* call, int error) {
  const char* const name = strerrorname_np(error);
  const bool exhausted = error == ENOMEM || error == EMFILE || error == ENFILE || error == ENOSPC || error == EAGAIN;
  return {exhausted ? StatusCode::out_of_memory : StatusCode::driver_error, call, error,
          name == nullptr ? "unknown errno" : name};
}

HostArena::~HostArena() {
  if (fd_ >= 0) ::close(fd_);
}

Status HostArena::open() {
  const int fd = ::memfd_create("torch_vmm_chunks", MFD_CLOEXEC);
  if (fd < 0) return status_from_errno("memfd_create", errno);
  if (::ftruncate(fd, static_cast<off_t>(kArenaBytes)) != 0) {
    const Status failed = status_from_errno("ftruncate", errno);
    ::close(fd);
    return failed;
  }
  fd_ = fd;
  free_.emplace(0, kArenaBytes);
  return {};
}

Status HostArena::take(std::size_t size, std::size_t* offset) {
  if (fd_ < 0) {
    if (const Status opened = open(); !opened.ok()) return opened;
  }
  for (auto hole = free_.begin(); hole != free_.end(); ++hole) {
    if (hole->second < size) continue;
    *offset = hole->first;
    const std::size_t rest = hole->second - size;
    free_.erase(hole);
    if (rest > 0) free_.emplace(*offset + size, rest);
    return {};
  }
  return {StatusCode::out_of_memory, "take a stretch of the arena"};
}

bool HostArena::empty(int fd, std::size_t offset, std::size_t size) {
  int failed = 0;
  do {
    failed = ::fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                         static_cast<off_t>(size));
  } while (failed != 0 && errno == EINTR);
  return failed == 0;
}

void HostArena::give_back(std::size_t offset, std::size_t size) {
  auto after = free_.lower_bound(offset);
  if (after != free_.end() && after->first == offset + size) {
    size += after->second;
    after = free_.erase(after);
  }
  if (after != free_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == offset) {
      before->second += size;
      return;
    }
  }
  free_.emplace(offset, size);
}

}  // namespace vmm
