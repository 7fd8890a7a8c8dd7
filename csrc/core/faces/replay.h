// A recorded program of allocations and frees, run again on a device that it has to
// itself, in a pool or, where it is several models', in one for each under one limit: what
// was held after each of them, and what the driver was asked for. The memory is never touched, so on host memory a
// program of 80 GiB needs none. It owns the device for that time; it never knows where the program was recorded.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/options.h"
#include "driver/counting_driver.h"

namespace vmm {

struct RecordedStep {
  bool allocates = true;              // else it frees
  std::uint64_t block = 0;            // a name: whatever was allocated under it last
  std::uint64_t size = 0;             // bytes asked for; an allocation of 0 is none
  std::uint64_t stream = 0;           // a number for each; 0 is the default stream
  std::uint8_t model = 0;             // each has a pool of its own
  std::chrono::microseconds time{0};  // when it was; never earlier than the step before
};

struct Replayed {
  // After each step, in bytes and calls since the start. Shorter than the
  // program where it did not fit.
  std::vector<std::uint64_t> allocated;  // live blocks, as torch rounds them
  std::vector<std::uint64_t> reserved;   // mapped
  std::vector<std::uint64_t> driver_calls;
  DriverCalls calls;               // of the whole program, before what was left is freed
  std::size_t allocated_peak = 0;  // of all models together
  std::size_t reserved_peak = 0;
  std::size_t left = 0;                   // bytes live after all was freed: 0
  std::optional<std::size_t> refused_at;  // the step that found no memory
};

struct ReplayTerms {
  std::size_t limit = kUnlimited;  // bytes, for all models together
  // Steps for which what a stream was given stays queued, as a GPU is behind the program:
  // what was freed may be in use until then. 0: it is never behind.
  std::uint64_t behind = 0;
};

// Runs `program` on device 0 of `driver`. A free of what is not live is passed
// over. Throws InvalidArgumentError for options that cannot be, and
// NotAvailableError.
Replayed replay(Driver& driver, const Options& options, const std::vector<RecordedStep>& program,
                const ReplayTerms& terms = {});

}  // namespace vmm
