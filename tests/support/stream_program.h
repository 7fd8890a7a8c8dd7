// Random programs over streams: several models, private pools, graphs, foreign
// streams, two devices, and readers of every kind, over the order checker. They
// are right under PyTorch's own allocator by construction (stream_world.h says
// how), so whatever the checker finds is the allocator's.
//
// Every operation is a printable value, so a failing program can be shrunk and
// kept as a named test.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "support/order_checker.h"

namespace vmm::testing {

struct StreamOp {
  enum class Kind : std::uint8_t {
    // Blocks, by number among those that are live now, the oldest first; from
    // kNewest on counted from the other end.
    allocate,       // a: pool, b: bytes, c: stream
    allocate_at,    // a: pool, b: bytes, c: stream, d: where, in half pages
    free,           // a: block, b: 1 by the other thread, c: of explicit pages only the first c (0: all)
    use,            // a: block, b: stream, c: kUse... flags
    record_stream,  // a: block, b: stream
    pages,          // a: pool, b: first page, c: pages more than one, d: stream
    first_pages,    // a: pool, b: pages more than one, c: stream
    hold,           // a: block: a tensor shows these pages; they outlive their pool
    unhold,         // a: block
    // Streams
    wait,            // a: stream that waits, b: for which
    create_stream,   // a: stream
    destroy_stream,  // a: stream
    run,             // a: stream, b: how much of its work gets done
    run_all,
    drift,  // a: seed: from now on work gets done at driver calls; 0: no more
    // Giving back
    trim,         // a: pool, b: bytes to keep
    empty_cache,  // a: device
    settle,       // a: pool
    pool_limit,   // a: pool, b: bytes (0: none)
    group_limit,  // b: bytes
    close_pool,   // a: pool: closed by force and made anew, b: 1 while its tensors live
    close_group,  // b: 1 while tensors live
    // a: how many calls from now, b: 1 out of memory, 2 another error, 3 from now on
    // every record and 4 the next fill, by another error; 0: nothing fails any more
    fail_call,
    // Captures and graphs. Region 0: nobody announces the capture.
    begin_capture,       // a: graph, b: stream, c: region, d: 1: CUDA refuses, after torch has announced it
    join_capture,        // a: graph, b: stream
    invalidate_capture,  // a: graph
    end_capture,         // a: graph
    launch,              // a: graph, b: stream
    drop_graph,          // a: graph
    // torch.cuda.MemPool
    open_mempool,   // a: region, b: 1 serves requests that found no memory
    enter_mempool,  // a: region
    leave_mempool,  // a: region
    close_mempool,  // a: region
    // A part of a model, pinned by hand
    pin,
    unpin,
    launch_part,  // a: stream: all that was used of it while pinned
    checkpoint,
    restore,
    // Models that sleep, with their parts. how: 0 thrown away, 1 in a file, 2 on the other
    // device, 3 in the host's memory; +8 only the tag, +16 all but that; +24 gives its
    // memory back to the driver. looks: how far it gets by this step; 0: to its end.
    sleep,  // a: pool, b: how, c: looks
    wake,   // a: pool, b: 0 all, 1 only the tag, 2 all but that, c: looks
    swap,   // a: pool that sleeps, b: pool that wakes, c: how, d: looks
    go_on,  // a: transfer, b: looks, c: 1: it is stopped there
    // Two devices; mappings by hand (virtual_memory_manager.h)
    add_peers,
    create_chunk,  // a: bytes
    map_chunk,     // a: chunk, b: place, c: 1 for the peer too
    use_mapping,   // a: place, b: stream, c: flags
    set_access,    // a: place, b: 0 none, 1 read, 2 read and write, c: device
    unmap_chunk,   // a: place
    free_chunk,    // a: chunk
    close_manager,
  };
  Kind kind = Kind::run_all;
  std::uint64_t a = 0;
  std::uint64_t b = 0;
  std::uint64_t c = 0;
  std::uint64_t d = 0;
};

inline constexpr std::uint64_t kNewest = 1000000;  // kNewest + n: the n-th from the end

// Flags of uses.
inline constexpr std::uint64_t kUseWrites = 1;
inline constexpr std::uint64_t kUseIsLong = 2;   // a long kernel
inline constexpr std::uint64_t kUseIsSmall = 4;  // of the first 512 bytes only

// "{Kind::allocate, 1, 4096, 0, 0}": C++ that a named test can hold.
std::string to_string(const StreamOp& op);

struct StreamProgramOptions {
  bool with_failures = true;  // failing driver calls
  bool with_foreign = true;   // streams that somebody else makes and destroys
  bool with_captures = true;
  bool with_peers = true;
  bool with_sleep = true;
  std::string debug = {};  // TORCH_VMM_DEBUG
};

std::vector<StreamOp> random_stream_program(std::uint64_t seed, std::size_t steps, const StreamProgramOptions& options);

// Runs the program; after every step both the checker and the allocator's own
// invariants are asked. Throws as run_steps() does. Returns how often the rule
// had something to forbid.
OrderChecker::Counts run_stream_program(const std::vector<StreamOp>& program, const std::string& debug = "");

// Whether it throws or aborts, found out in a forked child.
bool fails(const std::vector<StreamOp>& program, const std::string& debug = "");

// The smallest program found that still fails.
std::vector<StreamOp> shrink(std::vector<StreamOp> program, const std::string& debug = "");

}  // namespace vmm::testing
