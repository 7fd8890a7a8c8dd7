#include "driver/host_arena.h"

#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <set>
#include <string>
#include <utility>

#include "base/sync.h"
#include "base/units.h"

namespace vmm {
namespace {

// Far more than any machine's memory: a sparse file costs nothing, and a file
// that never fills cannot fragment to the point of refusing.
constexpr std::size_t kArenaBytes = 64 * kTiB;

// Bytes of the largest file that this process may make.
std::size_t file_size_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return kUnlimited;
  return static_cast<std::size_t>(limit.rlim_cur);
}

// A status keeps no text of its own, so each value that was ever met stays: a
// process meets one or two.
const char* name_of_limit(std::size_t bytes) {
  static Mutex mutex;
  static auto* const kNames = new std::set<std::string>;
  const MutexLock lock(mutex);
  return kNames->insert("EFBIG, since RLIMIT_FSIZE is " + std::to_string(bytes) + " bytes").first->c_str();
}

Status beyond_limit(std::size_t limit) { return {StatusCode::out_of_memory, "ftruncate", EFBIG, name_of_limit(limit)}; }

}  // namespace

Status status_from_errno(const char* call, int error) {
  const char* const name = strerrorname_np(error);
  const bool exhausted = error == ENOMEM || error == EMFILE || error == ENFILE || error == ENOSPC || error == EAGAIN;
  return {exhausted ? StatusCode::out_of_memory : StatusCode::driver_error, call, error,
          name == nullptr ? "unknown errno" : name};
}

Status resize_file(int fd, std::size_t size) {
  if (const std::size_t limit = file_size_limit(); size > limit) return beyond_limit(limit);
  if (::ftruncate(fd, static_cast<off_t>(size)) != 0) return status_from_errno("ftruncate", errno);
  return {};
}

HostArena::~HostArena() {
  if (fd_ >= 0) ::close(fd_);
}

// Makes the file as long as it may be. A refusal when that adds no stretch of
// `at_least` bytes at its end.
Status HostArena::grow(std::size_t at_least) {
  const std::size_t limit = file_size_limit();
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const std::size_t length = std::min(kArenaBytes, align_down(limit, page));
  if (length > length_) {
    if (const Status resized = resize_file(fd_, length); !resized.ok()) return resized;
    give_back(length_, length - length_);  // first: there may be no memory to note it
    length_ = length;
  }
  const bool enough = !free_.empty() && free_.rbegin()->second >= at_least;
  if (enough) return {};
  if (length_ < kArenaBytes) return beyond_limit(limit);
  return {StatusCode::out_of_memory, "take a stretch of the arena"};
}

std::map<std::size_t, std::size_t>::iterator HostArena::find(std::size_t size) {
  return std::find_if(free_.begin(), free_.end(), [size](const auto& hole) { return hole.second >= size; });
}

Status HostArena::take(std::size_t size, std::size_t* offset) {
  if (fd_ < 0) {
    fd_ = ::memfd_create("torch_vmm_chunks", MFD_CLOEXEC);
    if (fd_ < 0) return status_from_errno("memfd_create", errno);
  }
  auto hole = find(size);
  if (hole == free_.end()) {
    if (const Status grown = grow(size); !grown.ok()) return grown;
    hole = find(size);
  }
  *offset = hole->first;
  // What is left takes over the note: there may be no memory for another one.
  auto note = free_.extract(hole);
  note.key() += size;
  note.mapped() -= size;
  if (note.mapped() > 0) free_.insert(std::move(note));
  return {};
}

bool HostArena::empty(int fd, std::size_t offset, std::size_t size) {
  int failed = 0;
  do {
    failed = ::fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                         static_cast<off_t>(size));
  } while (failed != 0 && errno == EINTR);
  return failed == 0;
}

// In steps, and never by SEEK_HOLE: that one walks every page of what is in use behind
// the stretch, where SEEK_DATA looks one page up.
void HostArena::zero(int fd, std::size_t offset, std::size_t size, void* at) {
  constexpr std::size_t kStep = 64 * kKiB;
  const std::size_t end = offset + size;
  auto* const begin = static_cast<unsigned char*>(at);
  for (std::size_t now = offset; now < end;) {
    const off_t found = ::lseek(fd, static_cast<off_t>(now), SEEK_DATA);
    if (found < 0 && errno == ENXIO) return;
    // A file system that cannot say has data everywhere.
    const std::size_t data = found < 0 ? now : static_cast<std::size_t>(found);
    if (data >= end) return;
    now = std::min(end, align_down(data, kStep) + kStep);
    std::memset(begin + (data - offset), 0, now - data);
  }
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
