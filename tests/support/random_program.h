// A random program over pools, models, limits, streams, threads and failing
// driver calls, run beside a plain model of what must be true. Every operation
// is a printable value, so a failing program can be shrunk and kept as a test.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace vmm::testing {

struct Op {
  enum class Kind : std::uint8_t {
    allocate,       // a: pool, b: bytes, c: stream
    free,           // a: which live block
    record_stream,  // a: which live block, b: stream
    pages,          // a: pool, b: first page, c: pages
    first_pages,    // a: pool, b: pages
    free_pages,     // a: which page range
    trim,           // a: pool, b: bytes to keep
    empty_cache,
    pool_limit,   // a: pool, b: bytes (0: none)
    group_limit,  // b: bytes
    floor,        // a: pool, b: bytes
    priority,     // a: pool, b: which
    hold,         // b: stream; fences recorded there do not pass
    release_holds,
    fail_call,  // a: how many calls from now, b: 1 out of memory, 2 another error
    settle,     // a: pool
    reopen,     // a: pool: closed by force and made anew
    threads,    // a: seed, b: steps a thread
    pin,        // b: 1 pins the part, 0 unpins it
    checkpoint,
    restore,      // to the last checkpoint
    sleep,        // a: pool, b: 0 keeps its contents, 1 does not, c: 0 whole, 1 only its tag, 2 all but that
    wake,         // a: pool, c: the same
    swap,         // a: pool that sleeps, b: pool that wakes
    spill,        // a: pool, b: 1 may stand in host memory, 0 may not
    spill_limit,  // b: bytes
    seal,         // b: 1 all that was made under the tag, 0 no more
    pressure,     // a: what is done when no memory is left: 0 nothing, 1 trims, 2 frees, 3 a model sleeps
  };
  Kind kind = Kind::settle;
  std::uint64_t a = 0;
  std::uint64_t b = 0;
  std::uint64_t c = 0;
};

// "{Op::Kind::allocate, 1, 4096, 0}": C++ that a named test can hold.
std::string to_string(const Op& op);

struct ProgramOptions {
  bool with_threads = true;
  bool with_failures = true;
  std::string debug = {};  // TORCH_VMM_DEBUG
};

std::vector<Op> random_program(std::uint64_t seed, std::size_t steps, const ProgramOptions& options);

// How often what is rare has come about: where these stay 0, a program proves nothing of it.
struct ProgramCounts {
  std::uint64_t spilled = 0;   // blocks that stood in host memory
  std::uint64_t sealed = 0;    // times that a tag was
  std::uint64_t relieved = 0;  // requests for which others gave way
  std::uint64_t in_part = 0;   // models that slept by tag
};

// Runs the program with every invariant checked after every step. Throws
// std::runtime_error with the step, the operation and what was wrong; a broken
// invariant of the core itself aborts, with the step on stderr.
// `debug`: TORCH_VMM_DEBUG; then no block's patterns may ever be damaged.
ProgramCounts run_program(const std::vector<Op>& program, const std::string& debug = "");

// The smallest program found that still fails (each try in a forked child).
std::vector<Op> shrink(std::vector<Op> program, const std::string& debug = "");

}  // namespace vmm::testing
