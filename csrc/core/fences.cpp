#include "core/fences.h"

#include <algorithm>
#include <utility>

namespace vmm {

FencePoint::FencePoint(FencePool& pool, Stream stream, bool all_streams)
    : pool_(pool), stream_(stream), all_streams_(all_streams || stream == kPerThreadStream || pool.is_foreign(stream)) {
  is_recorded();
}

FencePoint::~FencePoint() {
  if (fence_ != nullptr) pool_.put_back(fence_);
}

bool FencePoint::is_recorded() {
  if (recorded_.load(std::memory_order_acquire)) return true;
  const MutexLock lock(mutex_);
  if (!recorded_.load(std::memory_order_relaxed) && record_locked()) recorded_.store(true, std::memory_order_release);
  return recorded_.load(std::memory_order_relaxed);
}

bool FencePoint::record_locked() {
  Driver& driver = pool_.driver();
  if (fence_ == nullptr) fence_ = pool_.take();
  if (fence_ != nullptr && !all_streams_.load(std::memory_order_relaxed)) {
    const Status status = driver.record(fence_, stream_);
    if (status.ok()) return true;
    if (status.code() == StatusCode::not_supported) return false;
    all_streams_.store(true, std::memory_order_relaxed);
  }
  if (pool_.is_capturing()) return false;
  if (fence_ != nullptr && driver.record_all(fence_).ok()) return true;
  // The last resort: wait here. Only where the driver can neither record this
  // stream nor all of them (CUDA before 12.5 with a destroyed stream).
  driver.synchronize(pool_.device()).ignore();
  passed_.store(true, std::memory_order_release);
  return true;
}

bool FencePoint::passed() {
  if (passed_.load(std::memory_order_acquire)) return true;
  if (!is_recorded()) return false;
  if (passed_.load(std::memory_order_acquire)) return true;
  // A driver that is gone runs nothing, so nothing is waited for. Any other
  // answer than a clear yes is a no: memory must not leave under queued work.
  const Status status = pool_.driver().query(fence_);
  const bool done = status.ok() || status.code() == StatusCode::driver_gone;
  if (done) passed_.store(true, std::memory_order_release);
  return done;
}

bool FencePoint::wait() {
  if (passed()) return true;
  if (!is_recorded()) return false;
  if (!pool_.driver().wait(fence_).ok()) {
    if (pool_.is_capturing()) return false;
    pool_.driver().synchronize(pool_.device()).ignore();
  }
  passed_.store(true, std::memory_order_release);
  return true;
}

Status FencePoint::order_before(Stream stream) {
  if ((!all_streams_.load(std::memory_order_relaxed) && stream == stream_) || passed()) return {};
  if (!is_recorded()) return {StatusCode::not_supported, "order after work that is being captured"};
  return pool_.driver().stream_wait(stream, fence_);
}

FencePool::~FencePool() {
  MutexLock lock(mutex_);
  for (Fence fence : free_) driver_.destroy_fence(fence).ignore();
}

void FencePool::add_foreign(Stream stream) {
  MutexLock lock(mutex_);
  foreign_.insert(stream);
  any_foreign_.store(true, std::memory_order_release);
}

bool FencePool::is_foreign(Stream stream) {
  if (!any_foreign_.load(std::memory_order_acquire)) return false;
  MutexLock lock(mutex_);
  return foreign_.count(stream) != 0;
}

Fence FencePool::take() {
  {
    MutexLock lock(mutex_);
    if (!free_.empty()) {
      Fence fence = free_.back();
      free_.pop_back();
      return fence;
    }
  }
  Fence fence = nullptr;
  return driver_.create_fence(device_, &fence).ok() ? fence : nullptr;
}

void FencePool::put_back(Fence fence) {
  MutexLock lock(mutex_);
  free_.push_back(fence);
}

void FenceSet::add(FencePointPtr point) {
  if (std::find(points_.begin(), points_.end(), point) == points_.end()) points_.push_back(std::move(point));
}

void FenceSet::add_all(const FenceSet& other) {
  for (const auto& point : other.points_) add(point);
}

bool FenceSet::passed() {
  while (!points_.empty() && points_.back()->passed()) points_.pop_back();
  return points_.empty();
}

bool FenceSet::wait() {
  std::erase_if(points_, [](const FencePointPtr& point) { return point->wait(); });
  return points_.empty();
}

Status FenceSet::order_before(Stream stream) {
  for (const auto& point : points_) {
    if (const Status status = point->order_before(stream); !status.ok()) return status;
  }
  return {};
}

}  // namespace vmm
