#include "core/streams/device_streams.h"

#include <utility>

namespace vmm {

DeviceStreams::~DeviceStreams() { destroy_free_fences(); }

void DeviceStreams::destroy_free_fences() {
  const MutexLock lock(mutex_);
  const std::size_t before = free_.size();
  std::erase_if(free_, [this](Fence fence) { return driver_.destroy_fence(fence).ok(); });  // or it serves again
  fences_ -= before - free_.size();
}

void DeviceStreams::set_census(StreamCensus census) {
  const MutexLock lock(mutex_);
  census_ = std::move(census);
}

void DeviceStreams::add_permanent(Stream stream) {
  if (permanent_.size() == permanent_.capacity()) permanent_.reserve(2 * permanent_.size() + 1);  // as below
  if (!known_.insert(stream).second) return;
  permanent_.push_back(stream);
  count_.store(permanent_.size() + own_.size() + 1, std::memory_order_relaxed);
}

void DeviceStreams::add_own(Stream stream) {
  const MutexLock lock(mutex_);
  own_.reserve(own_.size() + 1);  // first: it would be known, and in no list
  if (!known_.insert(stream).second) return;
  own_.push_back(stream);
  count_.store(permanent_.size() + own_.size() + 1, std::memory_order_relaxed);
}

void DeviceStreams::take_census() {
  if (census_.permanent == nullptr) return;
  counted_.clear();
  census_.permanent(&counted_);
  if (counted_.size() == permanent_.size()) return;  // they only become more
  for (const Stream stream : counted_) add_permanent(stream);
}

StreamKind DeviceStreams::meet(Stream stream) {
  if (stream == nullptr || stream == kLegacyStream) return StreamKind::default_stream;
  if (stream == kPerThreadStream) return StreamKind::blocking;
  const MutexLock lock(mutex_);
  if (known_.count(stream) != 0) return StreamKind::permanent;
  take_census();
  if (known_.count(stream) != 0) return StreamKind::permanent;
  if (census_.is_blocking == nullptr) {
    if (permanent_.size() >= census_.most_met) return StreamKind::blocking;
    add_permanent(stream);
    return StreamKind::permanent;
  }
  if (census_.is_blocking(stream)) return StreamKind::blocking;
  has_unreachable_.store(true, std::memory_order_release);
  return StreamKind::unreachable;
}

std::vector<Stream> DeviceStreams::to_record() {
  const MutexLock lock(mutex_);
  take_census();
  std::vector<Stream> streams = {nullptr};
  streams.insert(streams.end(), permanent_.begin(), permanent_.end());
  streams.insert(streams.end(), own_.begin(), own_.end());
  return streams;
}

Fence DeviceStreams::take_fence() {
  {
    const MutexLock lock(mutex_);
    if (!free_.empty()) {
      const Fence fence = free_.back();
      free_.pop_back();
      return fence;
    }
    if (free_.capacity() == fences_) free_.reserve(2 * fences_ + 8);
    ++fences_;
  }
  Fence fence = nullptr;
  if (driver_.create_fence(device_, &fence).ok()) return fence;
  const MutexLock lock(mutex_);
  --fences_;
  return nullptr;
}

void DeviceStreams::put_back(Fence fence) noexcept {
  const MutexLock lock(mutex_);
  free_.push_back(fence);
}

}  // namespace vmm
