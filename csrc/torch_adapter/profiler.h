// What torch's profiler is told of an allocation or a free. With no profiler,
// one look at thread-local state (reportMemoryUsageToProfiler itself takes
// 20 ns even then).
#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstddef>
#include <cstdint>
#include <utility>

#include "process/runtime.h"

namespace vmm {

inline bool profiler_is_on() { return c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE) != nullptr; }

// The bytes of live blocks and of mapped chunks.
inline std::pair<std::size_t, std::size_t> allocated_and_reserved(const DeviceRoom& room) {
  const Statistics statistics = room.memory.statistics();
  return {static_cast<std::size_t>(statistics[StatKind::allocated_bytes][0].current),
          static_cast<std::size_t>(statistics[StatKind::reserved_bytes][0].current)};
}

// `change` in bytes: what was allocated, or minus what is freed.
// REQUIRES: profiler_is_on(). Adds up the device's statistics.
inline void report_to_profiler(const DeviceRoom& room, void* address, std::int64_t change, c10::Device device) {
  if (!c10::memoryProfilingEnabled()) return;
  const auto [allocated, reserved] = allocated_and_reserved(room);
  c10::reportMemoryUsageToProfiler(address, change, allocated, reserved, device);
}

// REQUIRES: profiler_is_on(). The device may have no room at all.
inline void report_out_of_memory_to_profiler(DeviceKind kind, int ordinal, std::size_t bytes, c10::Device device) {
  const DeviceRoom* room = Runtime::made(kind, ordinal);
  if (room == nullptr || Runtime::in_child() || !c10::memoryProfilingEnabled()) return;
  const auto [allocated, reserved] = allocated_and_reserved(*room);
  c10::reportOutOfMemoryToProfiler(static_cast<std::int64_t>(bytes), allocated, reserved, device);
}

}  // namespace vmm
