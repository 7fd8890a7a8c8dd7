#include "support/random_program.h"

#include <array>
#include <random>
#include <utility>

#include "base/units.h"
#include "support/program_runner.h"
#include "support/random_world.h"

namespace vmm::testing {

namespace {

using Kind = Op::Kind;
constexpr std::array<const char*, 28> kKindNames = {
    "allocate",    "free",       "record_stream", "pages",   "first_pages", "free_pages", "trim",
    "empty_cache", "pool_limit", "group_limit",   "floor",   "priority",    "hold",       "release_holds",
    "fail_call",   "settle",     "reopen",        "threads", "pin",         "checkpoint", "restore",
    "sleep",       "wake",       "swap",          "spill",   "spill_limit", "seal",       "pressure"};

}  // namespace

std::string to_string(const Op& op) {
  return std::string("{Op::Kind::") + kKindNames.at(static_cast<std::size_t>(op.kind)) + ", " + std::to_string(op.a) +
         ", " + std::to_string(op.b) + ", " + std::to_string(op.c) + "}";
}

std::vector<Op> random_program(std::uint64_t seed, std::size_t steps, const ProgramOptions& options) {
  std::mt19937_64 random(seed);
  std::vector<Op> program;
  program.reserve(steps);
  const auto any = [&](std::uint64_t below) { return random() % below; };
  const auto size = [&]() -> std::uint64_t {
    const std::uint64_t kind = any(100);
    if (kind < 55) return 1 + any(8 * kKiB);
    if (kind < 80) return 1 + any(400 * kKiB);
    if (kind < 98) return 1 + any(4 * kMiB);
    return 1 + any(40 * kMiB);
  };
  while (program.size() < steps) {
    const std::uint64_t what = any(1000);
    if (what < 420) {
      program.push_back({Kind::allocate, any(kPools), size(), any(8) == 0 ? any(kStreams) : 0});
    } else if (what < 745) {
      program.push_back({Kind::free, random(), 0, 0});
    } else if (what < 749) {
      program.push_back({Kind::sleep, kModelOfTagged, any(5) == 0 ? 1U : 0U, 1 + any(2)});
    } else if (what < 756) {
      program.push_back({Kind::sleep, any(kPart), any(5) == 0 ? 1U : 0U, 0});
    } else if (what < 772) {
      program.push_back({Kind::wake, any(kPart), 0, any(4) == 0 ? any(3) : 0});
    } else if (what < 775) {
      program.push_back({Kind::swap, any(kPart), any(kPart), 0});
    } else if (what < 781) {
      program.push_back({Kind::spill, any(kPart), any(2), 0});
    } else if (what < 783) {
      program.push_back({Kind::spill_limit, 0, any(64) * kMiB, 0});
    } else if (what < 788) {
      program.push_back({Kind::seal, 0, any(2), 0});
    } else if (what < 796) {
      program.push_back({Kind::pressure, any(4), 0, 0});
    } else if (what < 810) {
      program.push_back({Kind::record_stream, random(), any(kStreams), 0});
    } else if (what < 840) {
      program.push_back({Kind::pages, any(kPart), any(64), any(3)});
    } else if (what < 860) {
      program.push_back({Kind::first_pages, any(kPart), any(3), 0});
    } else if (what < 905) {
      program.push_back({Kind::free_pages, random(), 0, 0});
    } else if (what < 915) {
      program.push_back({Kind::trim, any(kPools), any(3) * 4 * kMiB, 0});
    } else if (what < 920) {
      program.push_back({Kind::empty_cache, 0, 0, 0});
    } else if (what < 928) {
      program.push_back({Kind::pool_limit, any(kPools), any(3) == 0 ? 0 : (4 + any(60)) * kMiB, 0});
    } else if (what < 932) {
      program.push_back({Kind::floor, any(kPart), any(5) * 4 * kMiB, 0});
    } else if (what < 934) {
      program.push_back({Kind::priority, any(kPart), any(3), 0});
    } else if (what < 938) {
      program.push_back({Kind::group_limit, 0, (40 + any(80)) * kMiB, 0});
    } else if (what < 950) {
      program.push_back({Kind::hold, 0, any(kStreams), 0});
    } else if (what < 962) {
      program.push_back({Kind::release_holds, 0, 0, 0});
    } else if (what < 965) {
      program.push_back({Kind::pin, 0, any(2), 0});
    } else if (what < 968) {
      program.push_back({Kind::checkpoint, 0, 0, 0});
    } else if (what < 972) {
      program.push_back({Kind::restore, 0, 0, 0});
    } else if (what < 985) {
      if (options.with_failures) program.push_back({Kind::fail_call, any(12), 1 + any(2), 0});
    } else if (what < 994) {
      program.push_back({Kind::settle, any(kPools), 0, 0});
    } else if (what < 998) {
      program.push_back({Kind::reopen, any(kPools), 0, 0});
    } else if (options.with_threads) {
      program.push_back({Kind::threads, any(1000000), 60, 0});
    }
  }
  return program;
}

ProgramCounts run_program(const std::vector<Op>& program, const std::string& debug) {
  ProgramCounts counts;
  on_fresh_thread([&] {
    RandomWorld world(debug);
    run_steps(world, program);
    counts = world.counts();
  });
  return counts;
}

std::vector<Op> shrink(std::vector<Op> program, const std::string& debug) {
  return shrink_program(std::move(program), [&debug](const std::vector<Op>& part) { run_program(part, debug); });
}

}  // namespace vmm::testing
