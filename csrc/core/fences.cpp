#include "core/fences.h"

#include <algorithm>
#include <utility>

namespace vmm {

FencePoint::~FencePoint() {
  if (fence_ != nullptr) pool_.put_back(fence_);
}

bool FencePoint::passed() {
  if (passed_.load(std::memory_order_acquire)) return true;
  bool done = fence_ == nullptr;
  if (!done) {
    // A driver that is gone runs nothing, so nothing is waited for. Any other
    // answer than a clear yes is a no: memory must not leave under queued work.
    const Status status = pool_.driver().query(fence_);
    done = status.ok() || status.code() == StatusCode::driver_gone;
  }
  if (done) passed_.store(true, std::memory_order_release);
  return done;
}

void FencePoint::wait() {
  if (passed()) return;
  if (!pool_.driver().wait(fence_).ok()) pool_.driver().synchronize(pool_.device()).ignore();
  passed_.store(true, std::memory_order_release);
}

Status FencePoint::order_before(Stream stream) {
  if ((!all_streams_ && stream == stream_) || passed()) return {};
  return pool_.driver().stream_wait(stream, fence_);
}

FencePool::~FencePool() {
  MutexLock lock(mutex_);
  for (Fence fence : free_) driver_.destroy_fence(fence).ignore();
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

FencePointPtr FencePool::record(Stream stream) {
  Fence fence = take();
  if (fence != nullptr && driver_.record(fence, stream).ok()) {
    return std::make_shared<FencePoint>(*this, fence, stream, /*all_streams=*/false);
  }
  if (fence != nullptr) put_back(fence);
  return record_all();
}

FencePointPtr FencePool::record_all() {
  Fence fence = take();
  if (fence != nullptr && driver_.record_all(fence).ok()) {
    return std::make_shared<FencePoint>(*this, fence, nullptr, /*all_streams=*/true);
  }
  if (fence != nullptr) put_back(fence);
  // The last resort: wait here. Only where the driver can neither record this
  // stream nor all of them (CUDA before 12.5 with a destroyed stream).
  driver_.synchronize(device_).ignore();
  return std::make_shared<FencePoint>(*this, nullptr, nullptr, /*all_streams=*/true);
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

void FenceSet::wait() {
  for (const auto& point : points_) point->wait();
  points_.clear();
}

Status FenceSet::order_before(Stream stream) {
  for (const auto& point : points_) {
    if (const Status status = point->order_before(stream); !status.ok()) return status;
  }
  return {};
}

}  // namespace vmm
