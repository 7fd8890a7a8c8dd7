#include "core/device/reclaim_log.h"

#include <new>
#include <utility>

namespace vmm {

void ReclaimLog::note(OwnerId model, ReclaimDecision decision) noexcept {
  try {
    const MutexLock lock(mutex_);
    OfModel& found = models_[model];
    found.latest.push_back(std::move(decision));
    if (found.latest.size() > kLatest) found.latest.pop_front();
    const ReclaimDecision& noted = found.latest.back();
    ++found.counts.requests;
    if (!noted.is_met()) ++found.counts.refused;
    for (std::size_t rung = 0; rung < kRungs; ++rung) {
      const ReclaimStep& step = noted.steps.at(rung);
      if (step.result == StepResult::passed_over) continue;
      RungCounts& counts = found.counts.rungs.at(rung);
      ++counts.tried;
      if (step.result != StepResult::nothing) ++counts.changed;
      if (step.result == StepResult::met) ++counts.met;
      counts.bytes += step.bytes;
    }
  } catch (const std::bad_alloc&) {
    return;
  }
}

ReclaimReport ReclaimLog::report_of(OwnerId model) const {
  const MutexLock lock(mutex_);
  const auto found = models_.find(model);
  if (found == models_.end()) return {};
  ReclaimReport report = found->second.counts;
  report.latest.assign(found->second.latest.begin(), found->second.latest.end());
  return report;
}

void ReclaimLog::forget(OwnerId model) {
  const MutexLock lock(mutex_);
  models_.erase(model);
}

}  // namespace vmm
