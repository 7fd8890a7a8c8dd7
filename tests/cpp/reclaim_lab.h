// The bench of tests of the ladder: models under one limit.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "core/numbers/reclaim_report.h"
#include "cpp/lab.h"

namespace vmm::testing {

inline const Stream kOne = stream(0x10);
inline const Stream kTwo = stream(0x20);

// How often somebody waited for the GPU.
inline std::size_t waits_of(const Lab& lab) {
  return lab.driver.count(Call::wait) + lab.driver.count(Call::synchronize);
}
// What became of the model's latest request that climbed.
inline ReclaimDecision latest_of(Lab& lab, const Pool& pool) {
  const ReclaimReport report = lab.memory().ladder().log().report_of(pool.id());
  return report.latest.empty() ? ReclaimDecision{} : report.latest.back();
}

// Two or three models under one limit of 32 MiB.
class Reclaim : public ::testing::Test {
 protected:
  std::shared_ptr<Pool> model(const std::string& name, std::size_t page = kPage, int priority = 0,
                              std::size_t floor = 0) {
    PoolSpec spec = Lab::spec(name);
    spec.page_size = page;
    spec.priority = priority;
    spec.floor = floor;
    return lab_.pool(spec, &group_);
  }
  std::size_t waits() const { return waits_of(lab_); }
  static std::size_t bytes(const std::shared_ptr<Pool>& pool) { return pool->physical_bytes(); }
  ReclaimDecision latest(const Pool& pool) { return latest_of(lab_, pool); }
  // Of each rung, in order, the first letter: passed over, nothing, in vain, met.
  std::string steps(const Pool& pool) {
    std::string letters;
    for (const ReclaimStep& step : latest(pool).steps) {
      letters += *kStepResultNames.at(static_cast<std::size_t>(step.result));
    }
    return letters;
  }

  Lab lab_;
  const std::shared_ptr<Budget> owned_group_ = lab_.memory().create_group("the shared pool", 32 * kMiB);
  Budget& group_ = *owned_group_;
};

}  // namespace vmm::testing
