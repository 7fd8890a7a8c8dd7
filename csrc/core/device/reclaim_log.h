// What the ladder has decided of late, by model. It decides nothing itself.
#pragma once

#include <cstddef>
#include <deque>
#include <unordered_map>

#include "base/sync.h"
#include "core/memory/chunk.h"
#include "core/numbers/reclaim_report.h"

namespace vmm {

class ReclaimLog {
 public:
  // So many decisions of a model are kept, beside its counts.
  static constexpr std::size_t kLatest = 32;

  // Without memory to note it, it is not noted: whoever climbs has what it came for.
  void note(OwnerId model, ReclaimDecision decision) noexcept VMM_EXCLUDES(mutex_);
  [[nodiscard]] ReclaimReport report_of(OwnerId model) const VMM_EXCLUDES(mutex_);
  void forget(OwnerId model) VMM_EXCLUDES(mutex_);

 private:
  struct OfModel {
    ReclaimReport counts;  // without decisions
    std::deque<ReclaimDecision> latest;
  };
  mutable Mutex mutex_;                                                 // a leaf
  std::unordered_map<OwnerId, OfModel> models_ VMM_GUARDED_BY(mutex_);  // that ever climbed
};

}  // namespace vmm
