// What became of a model's requests that it could not meet by itself: which rungs of the
// reclaim ladder (core/device/ladder) each has climbed, and what they gave. Plain values.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace vmm {

// In the order in which they are climbed.
enum class Rung : std::uint8_t { store, other_models, callbacks, on_pressure, private_pools, queued_work, host_memory };
inline constexpr std::array<const char*, 7> kRungNames = {"store",         "other models", "callbacks",  "on_pressure",
                                                          "private pools", "queued work",  "host memory"};
inline constexpr std::size_t kRungs = kRungNames.size();

enum class StepResult : std::uint8_t {
  passed_over,  // it could not have helped, or nobody is there
  nothing,      // it changed nothing, so the request was not tried again
  in_vain,      // the request was tried again, and still found no memory
  met,
};
inline constexpr std::array<const char*, 4> kStepResultNames = {"passed over", "nothing", "in vain", "met"};

// One rung under one request.
struct ReclaimStep {
  struct Yielded {
    std::string pool;
    std::size_t bytes = 0;
  };
  StepResult result = StepResult::passed_over;
  std::size_t bytes = 0;         // that it gathered for the request, or gave back to the driver
  std::int64_t nanoseconds = 0;  // what was waited for included
  std::vector<Yielded> yielded;  // by whom
};

struct ReclaimDecision {
  std::size_t requested = 0;  // bytes
  std::string asker;          // the model, or a part of it
  std::string refused_by;     // the limit; empty: the driver, or addresses
  std::array<ReclaimStep, kRungs> steps;
  [[nodiscard]] bool is_met() const;
};

// Of one rung, since the model was made. Those that did not pass it over.
struct RungCounts {
  std::uint64_t tried = 0;
  std::uint64_t changed = 0;  // of these: memory came free, or had
  std::uint64_t met = 0;      // of these: the request found what it wanted
  std::uint64_t bytes = 0;
};

struct ReclaimReport {
  std::uint64_t requests = 0;  // that climbed, or had from others what keeps the margin
  std::uint64_t refused = 0;   // of these
  std::array<RungCounts, kRungs> rungs;
  std::vector<ReclaimDecision> latest;  // the oldest first
};

inline bool ReclaimDecision::is_met() const {
  for (const ReclaimStep& step : steps) {
    if (step.result == StepResult::met) return true;
  }
  return false;
}

}  // namespace vmm
