#include "core/device/reclaim_feed.h"

#include <new>
#include <utility>

namespace vmm {

ReclaimFeed& ReclaimFeed::instance() {
  static ReclaimFeed* const kFeed = new ReclaimFeed;
  return *kFeed;
}

void ReclaimFeed::follow() {
  const MutexLock lock(mutex_);
  untaken_.clear();
  lost_ = 0;
  follower_ = {};
  is_followed_.store(true, std::memory_order_relaxed);
}

void ReclaimFeed::end() {
  {
    const MutexLock lock(mutex_);
    is_followed_.store(false, std::memory_order_relaxed);
  }
  changed_.notify_all();
}

void ReclaimFeed::put(const ReclaimDecision& decision, const Driver& driver, int device) noexcept {
  {
    const MutexLock lock(mutex_);
    if (!is_followed() || follower_ == std::this_thread::get_id()) return;
    try {
      untaken_.push_back({decision, driver.name(), device});
    } catch (const std::bad_alloc&) {
      ++lost_;
      return;
    }
    if (untaken_.size() > kMost) {
      untaken_.pop_front();
      ++lost_;
    }
  }
  changed_.notify_all();
}

std::optional<ReclaimFeed::Told> ReclaimFeed::take() {
  const MutexLock lock(mutex_);
  follower_ = std::this_thread::get_id();
  while (untaken_.empty() && is_followed()) changed_.wait(mutex_);
  if (untaken_.empty()) return std::nullopt;
  Told told = std::move(untaken_.front());
  untaken_.pop_front();
  told.lost = std::exchange(lost_, 0);
  return told;
}

}  // namespace vmm
