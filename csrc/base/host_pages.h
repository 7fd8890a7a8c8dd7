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

}  // namespace vmm
