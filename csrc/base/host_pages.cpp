#include "base/host_pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <new>

#include "base/units.h"

namespace vmm {

namespace {

std::size_t page_bytes() {
  static const auto kBytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return kBytes;
}

void* map_pages(std::size_t bytes, int protection) {
  void* const got = ::mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (got == MAP_FAILED) throw std::bad_alloc();
  return got;
}

}  // namespace

void* reserve_pages(std::size_t bytes, std::size_t alignment) {
  // The kernel aligns to its page only: take more and cut both ends.
  const std::size_t asked = bytes + alignment;
  void* const got = map_pages(asked, PROT_NONE);
  const auto begin = reinterpret_cast<std::uintptr_t>(got);
  const std::uintptr_t at = align_up(begin, alignment);
  if (at != begin) ::munmap(got, at - begin);
  if (begin + asked != at + bytes) ::munmap(reinterpret_cast<void*>(at + bytes), begin + asked - (at + bytes));
  return reinterpret_cast<void*>(at);
}

void commit_pages(void* begin, std::size_t bytes) {
  if (::mprotect(begin, bytes, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
}

void discard(void* begin, std::size_t bytes) {
  const auto first = reinterpret_cast<std::uintptr_t>(begin);
  const std::uintptr_t from = align_up(first, page_bytes());
  const std::uintptr_t to = align_down(first + bytes, page_bytes());
  if (from >= to) {
    std::memset(begin, 0, bytes);
    return;
  }
  // A kernel that refuses (locked memory) leaves the pages, which are then cleared.
  if (::madvise(reinterpret_cast<void*>(from), to - from, MADV_DONTNEED) != 0) {
    std::memset(begin, 0, bytes);
    return;
  }
  std::memset(begin, 0, from - first);
  std::memset(reinterpret_cast<void*>(to), 0, first + bytes - to);
}

ZeroPages::ZeroPages(std::size_t bytes)
    : bytes_(bytes), begin_(static_cast<std::byte*>(map_pages(bytes, PROT_READ | PROT_WRITE))) {}

ZeroPages::~ZeroPages() { ::munmap(begin_, bytes_); }

}  // namespace vmm
