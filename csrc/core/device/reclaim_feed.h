// The ladder's decisions, on their way to whoever follows them: a thread that tells a log, for
// one, as no request runs what others wrote. Of all devices together.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <optional>
#include <string>
#include <thread>

#include "base/sync.h"
#include "core/numbers/reclaim_report.h"
#include "driver/driver.h"

namespace vmm {

class ReclaimFeed {
 public:
  // So many wait to be taken; then the oldest go.
  static constexpr std::size_t kMost = 256;
  struct Told {
    ReclaimDecision decision;
    std::string kind;  // as Driver::name()
    int device = 0;
    std::size_t lost = 0;  // that went before this one, untaken
  };
  // Made when it is asked for first, which takes memory, and never destroyed: a thread may wait for it when the
  // process ends.
  static ReclaimFeed& instance();

  // One follower: from now on decisions are kept for it.
  void follow() VMM_EXCLUDES(mutex_);
  // Nothing is kept any more. What is kept still can be taken, and then take() returns at once.
  void end() VMM_EXCLUDES(mutex_);
  [[nodiscard]] static bool is_followed() { return is_followed_.load(std::memory_order_relaxed); }
  // Without memory to note it, it is lost. Not what the follower's own requests hit: it would tell of
  // itself for ever.
  void put(const ReclaimDecision& decision, const Driver& driver, int device) noexcept VMM_EXCLUDES(mutex_);
  // The oldest, once there is one; nothing: it has ended.
  std::optional<Told> take() VMM_EXCLUDES(mutex_);

 private:
  inline static std::atomic<bool> is_followed_{false};
  Mutex mutex_;  // a leaf
  std::condition_variable_any changed_;
  std::thread::id follower_ VMM_GUARDED_BY(mutex_);  // that took last
  std::deque<Told> untaken_ VMM_GUARDED_BY(mutex_);
  std::size_t lost_ VMM_GUARDED_BY(mutex_) = 0;
};

}  // namespace vmm
