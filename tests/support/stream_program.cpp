#include "support/stream_program.h"

#include <array>
#include <utility>

#include "base/units.h"
#include "support/program_runner.h"
#include "support/stream_world.h"

namespace vmm::testing {

namespace {

using OpKind = StreamOp::Kind;

// One name a line would be a page.
// clang-format off
constexpr std::array<const char*, 50> kKindNames = {
    "allocate", "allocate_at", "free", "use", "record_stream", "pages", "first_pages", "hold", "unhold", "wait", "create_stream", "destroy_stream",
    "run", "run_all", "drift", "trim", "empty_cache", "settle", "pool_limit", "group_limit", "close_pool",
    "close_group", "fail_call", "begin_capture", "join_capture", "invalidate_capture", "end_capture", "launch",
    "drop_graph", "open_mempool", "enter_mempool", "leave_mempool", "close_mempool", "pin", "unpin", "launch_part",
    "checkpoint", "restore", "sleep", "wake", "swap", "go_on", "add_peers", "create_chunk", "map_chunk", "use_mapping", "set_access", "unmap_chunk",
    "free_chunk", "close_manager"};
// clang-format on

}  // namespace

std::string to_string(const StreamOp& op) {
  std::string text = "{Kind::" + std::string(kKindNames.at(static_cast<std::size_t>(op.kind)));
  // What is left out is 0.
  const std::array<std::uint64_t, 4> values = {op.a, op.b, op.c, op.d};
  std::size_t count = values.size();
  while (count != 0 && values[count - 1] == 0) --count;
  for (std::size_t k = 0; k < count; ++k) text += ", " + std::to_string(values[k]);
  return text + "}";
}

OrderChecker::Counts run_stream_program(const std::vector<StreamOp>& program, const std::string& debug) {
  OrderChecker::Counts counts;
  on_fresh_thread([&] {
    StreamWorld world(debug);
    run_steps(world, program);
    counts = world.counts();
  });
  return counts;
}

bool fails(const std::vector<StreamOp>& program, const std::string& debug) {
  return ending(program, [&debug](const std::vector<StreamOp>& part) { run_stream_program(part, debug); }) != 0;
}

std::vector<StreamOp> shrink(std::vector<StreamOp> program, const std::string& debug) {
  const auto run = [&debug](const std::vector<StreamOp>& part) { run_stream_program(part, debug); };
  const int wanted = ending(program, run);
  program = shrink_program(std::move(program), run);
  // Then every number: plainer ones, and of blocks those that were made last.
  const auto simplify = [&](std::uint64_t& value, const std::vector<std::uint64_t>& plain) {
    const std::uint64_t was = value;
    if (was < kPoolSlots) return;
    for (const std::uint64_t plainer : plain) {
      value = plainer;
      if (plainer == was || ending(program, run) == wanted) return;
    }
    value = was;
  };
  for (StreamOp& op : program) {
    simplify(op.a, {0, 1, 2, 3, 4, 5, kNewest, kNewest + 1});
    simplify(op.b, {0, 1, 2, 3, 4, 5, 4096, 2 * kMiB, 4 * kMiB});
    simplify(op.c, {0, 1, 2, 3, 4, 5});
    simplify(op.d, {0, 1, 2, 3, 4, 5});
  }
  return shrink_program(std::move(program), run);
}

}  // namespace vmm::testing
