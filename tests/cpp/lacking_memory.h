// The host's memory runs out at a chosen allocation. For one source file of a
// program: it replaces operator new.
#pragma once

#include <cstdlib>
#include <new>
#include <utility>

#include "support/scripted_driver.h"

namespace vmm::testing {

// Allocations of this thread until one fails; below 0: none does.
inline thread_local long allocations_left = -1;
inline thread_local long failures_left = 0;  // that follow it at once
inline thread_local long failures_made = 0;  // since runs_out_at() was called last

// All allocations of this thread fail, until it ends.
inline void fails_from_here() {
  allocations_left = 0;
  failures_left = 1L << 40;
}

// Runs `step` with the `nth` allocation, from 0, failing, and so many in all from there on.
// Whether it threw bad_alloc.
template <typename Step>
bool runs_out_at(long nth, const Step& step, long times = 1) {
  allocations_left = nth;
  failures_left = times - 1;
  failures_made = 0;
  bool ran_out = false;
  try {
    step();
  } catch (const std::bad_alloc&) {
    ran_out = true;
  } catch (...) {
    allocations_left = -1;
    throw;
  }
  allocations_left = -1;
  return ran_out;
}
// The same of a `step` that throws nothing; whether so many were made.
template <typename Step>
bool reaches(long nth, const Step& step) {
  allocations_left = nth;
  step();
  const bool reached = allocations_left < 0;
  allocations_left = -1;
  return reached;
}

// How many `step` makes.
template <typename Step>
long allocations_of(const Step& step) {
  constexpr long kMany = 1L << 40;
  allocations_left = kMany;
  step();
  return kMany - std::exchange(allocations_left, -1);
}

}  // namespace vmm::testing

[[gnu::noinline]] void* operator new(std::size_t size) {
  if (vmm::testing::allocations_left >= 0 && !vmm::testing::ScriptedDriver::is_in_call() &&
      vmm::testing::allocations_left-- == 0) {
    ++vmm::testing::failures_made;
    if (vmm::testing::failures_left > 0) {
      --vmm::testing::failures_left;
      vmm::testing::allocations_left = 0;
    }
    throw std::bad_alloc();
  }
  if (void* memory = std::malloc(size == 0 ? 1 : size)) return memory;
  throw std::bad_alloc();
}
// The library's own would be the sanitizer's, whose memory std::free() refuses.
[[gnu::noinline]] void* operator new(std::size_t size, const std::nothrow_t& /*tag*/) noexcept {
  return std::malloc(size == 0 ? 1 : size);
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t /*size*/) noexcept { std::free(memory); }
