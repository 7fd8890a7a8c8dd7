// Pages of the process's own memory, straight from the kernel: for tables that
// grow with a program and are to shrink with it again, which malloc's heap seldom
// does.
#pragma once

#include <cstddef>

namespace vmm {

// `bytes` of addresses without memory, aligned to `alignment`; both are multiples of the
// machine's page, `alignment` a power of two. Throws std::bad_alloc.
void* reserve_pages(std::size_t bytes, std::size_t alignment);
// [begin, begin + bytes) of them, whole pages, are zeros from now on, of which each page
// takes memory once it is touched. Throws std::bad_alloc.
void commit_pages(void* begin, std::size_t bytes);
// [begin, begin + bytes) holds zeros; the memory of the pages that lie wholly in it
// goes back to the kernel. It stays readable.
void discard(void* begin, std::size_t bytes);

// Zeros for a table of which most is never touched, and which is the kernel's again in the
// end. calloc gives such ones only until the first is freed: then glibc keeps them in its
// heap and clears them, and a thousand pools that came and went held 280 MiB more.
class ZeroPages {
 public:
  explicit ZeroPages(std::size_t bytes);  // throws std::bad_alloc
  ZeroPages(const ZeroPages&) = delete;
  ZeroPages& operator=(const ZeroPages&) = delete;
  ~ZeroPages();
  [[nodiscard]] std::byte* begin() const { return begin_; }

 private:
  const std::size_t bytes_;
  std::byte* const begin_;
};

}  // namespace vmm
