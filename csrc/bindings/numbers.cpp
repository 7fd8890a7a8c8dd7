#include "bindings/numbers.h"

#include <algorithm>
#include <utility>

#include "torch_adapter/statistics.h"

namespace vmm::bindings {

namespace {

const char* state_of(const BlockSnapshot& block) {
  switch (block.state) {
    case BlockSnapshot::State::allocated:
      return "active_allocated";
    case BlockSnapshot::State::pending_free:
      return "active_pending_free";
    case BlockSnapshot::State::inactive:
      return "inactive";
  }
  __builtin_unreachable();
}

py::dict to_dict(const BlockSnapshot& block, Address address) {
  py::dict result;
  result["address"] = address;
  result["size"] = block.size;
  result["requested_size"] = block.requested;
  result["state"] = state_of(block);
  result["frames"] = py::list();
  return result;
}

py::dict to_dict(const DeviceSegment& each) {
  const SegmentSnapshot& segment = each.segment;
  py::dict result;
  result["device"] = each.ordinal;
  result["address"] = segment.address;
  result["total_size"] = segment.total_size;
  result["allocated_size"] = segment.allocated_size;
  result["active_size"] = segment.active_size;
  result["requested_size"] = segment.requested_size;
  result["stream"] = reinterpret_cast<std::intptr_t>(segment.stream);
  result["segment_type"] = segment.size_class == SizeClass::large_pool ? "large" : "small";
  result["segment_pool_id"] = py::make_tuple(each.region.first, each.region.second);
  result["is_expandable"] = true;
  if (!each.tag.empty()) result["tag"] = each.tag;
  result["frames"] = py::list();
  py::list blocks;
  Address address = segment.address;
  for (const BlockSnapshot& block : segment.blocks) {
    blocks.append(to_dict(block, address));
    address += block.size;
  }
  result["blocks"] = std::move(blocks);
  return result;
}

}  // namespace

py::dict to_dict(const Statistics& statistics) {
  py::dict result;
  for (const auto& [key, value] : flatten(statistics)) result[py::str(key)] = value;
  return result;
}

py::tuple to_tuple(const ReclaimDecision& decision) {
  py::list steps;
  for (std::size_t rung = 0; rung < kRungs; ++rung) {
    const ReclaimStep& step = decision.steps.at(rung);
    py::list yielded;
    for (const ReclaimStep::Yielded& each : step.yielded) yielded.append(py::make_tuple(each.pool, each.bytes));
    steps.append(py::make_tuple(kRungNames.at(rung), kStepResultNames.at(static_cast<std::size_t>(step.result)),
                                step.bytes, static_cast<double>(step.nanoseconds) * 1e-9, py::tuple(yielded)));
    if (step.result == StepResult::met) break;
  }
  return py::make_tuple(decision.requested, decision.asker, decision.refused_by, decision.is_met(), py::tuple(steps));
}

py::dict to_dict(const ReclaimReport& report) {
  py::dict rungs;
  for (std::size_t rung = 0; rung < kRungs; ++rung) {
    const RungCounts& counts = report.rungs.at(rung);
    rungs[kRungNames.at(rung)] = py::make_tuple(counts.tried, counts.changed, counts.met, counts.bytes);
  }
  py::list latest;
  for (const ReclaimDecision& decision : report.latest) latest.append(to_tuple(decision));
  py::dict result;
  result["requests"] = report.requests;
  result["refused"] = report.refused;
  result["rungs"] = rungs;
  result["latest"] = latest;
  return result;
}

py::list to_list(const std::vector<DeviceSegment>& segments) {
  py::list result;
  for (const DeviceSegment& each : segments) result.append(to_dict(each));
  return result;
}

std::vector<DeviceSegment> snapshot(const std::vector<std::shared_ptr<Pool>>& pools) {
  std::vector<DeviceSegment> segments;
  for (const auto& pool : pools) {
    for (SegmentSnapshot& segment : pool->snapshot()) {
      segments.push_back({std::move(segment), pool->device(), pool->region(), pool->tag()});
    }
  }
  std::sort(segments.begin(), segments.end(),
            [](const auto& a, const auto& b) { return a.segment.address < b.segment.address; });
  return segments;
}

}  // namespace vmm::bindings
