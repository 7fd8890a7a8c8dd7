// Statistics and snapshots as Python's values, in torch's shapes.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "bindings/bind.h"
#include "core/numbers/reclaim_report.h"
#include "core/numbers/stats.h"
#include "core/pool/region_id.h"

namespace vmm {
class Pool;
}  // namespace vmm

namespace vmm::bindings {

// torch.cuda.memory_stats()'s keys, flat.
py::dict to_dict(const Statistics& statistics);
// A pool's or a group's numbers, by the names of their rows.
template <typename Numbers, std::size_t kRows>
py::dict to_dict(const Numbers& numbers, const std::array<FieldRow<Numbers>, kRows>& rows) {
  py::dict result;
  for (const auto& row : rows) {
    std::visit([&](auto field) { result[row.name] = numbers.*field; }, row.field);
  }
  return result;
}

// By the names of its fields; results and rungs in words.
py::dict to_dict(const ReclaimReport& report);
py::tuple to_tuple(const ReclaimDecision& decision);

// What torch.cuda.memory_snapshot() answers: a list of segments.
struct DeviceSegment {
  SegmentSnapshot segment;
  int ordinal = 0;
  RegionId region;  // of torch's private pool that it belongs to
  std::string tag;  // under which it was made, if any
};
py::list to_list(const std::vector<DeviceSegment>& segments);
// The segments of these pools, by address. Walks them.
std::vector<DeviceSegment> snapshot(const std::vector<std::shared_ptr<Pool>>& pools);

}  // namespace vmm::bindings
