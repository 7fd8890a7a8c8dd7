// How often each entry point was called, and which call shall fail. It knows
// entry points by name only ("cuMemCreate", without the version behind it).
#pragma once

#include <cuda.h>

#include <cstddef>

namespace standin {

// Counts one more call; answers what a test wants it to answer instead.
CUresult count_call(const char* name);

std::size_t calls_of(const char* name);
// The `nth` call from now on (1: the next) answers `code`.
void fail_call(const char* name, std::size_t nth, CUresult code);
// Forgets failures that have not come true.
void fail_no_more();

}  // namespace standin
