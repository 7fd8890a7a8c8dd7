#include "core/streams/stream_point.h"

#include <algorithm>

namespace vmm {

// Both after the constructor without arguments: where they throw, the fences go back.
StreamPoint::StreamPoint(const std::vector<StreamUse>& uses) : StreamPoint() {
  const MutexLock lock(mutex_);
  for (const StreamUse& use : uses) {
    add(*use.device, stream_of_fence(use));
    // Nobody may touch its handle later on.
    if (use.kind == StreamKind::unreachable && parts_.back().state != Part::State::recorded) {
      parts_.back().state = Part::State::no_fence;
    }
  }
}

StreamPoint::StreamPoint(const std::vector<DeviceStreams*>& devices) : StreamPoint() {
  const MutexLock lock(mutex_);
  for (DeviceStreams* device : devices) {
    for (Stream stream : device->to_record()) append(*device, stream);  // each once: of 1032 a search takes 246 us
    if (device->has_unreachable()) parts_.push_back({device, nullptr, nullptr, Part::State::no_fence});
  }
}

StreamPoint::~StreamPoint() {
  const MutexLock lock(mutex_);
  for (const Part& part : parts_) {
    if (part.fence != nullptr) part.device->put_back(part.fence);
  }
}

void StreamPoint::add(DeviceStreams& device, Stream stream) {
  const bool known = std::any_of(parts_.begin(), parts_.end(), [&](const Part& part) {
    return part.device == &device && part.stream == stream && part.state != Part::State::no_fence;
  });
  if (!known) append(device, stream);
}

void StreamPoint::append(DeviceStreams& device, Stream stream) {
  parts_.push_back({&device, stream, nullptr, Part::State::failed});
  try_record(parts_.back());
}

bool StreamPoint::try_record(Part& part) {
  if (part.state == Part::State::recorded || part.state == Part::State::no_fence) {
    return part.state == Part::State::recorded;
  }
  if (part.fence == nullptr) part.fence = part.device->take_fence();
  if (part.fence == nullptr) return false;
  const Status status = part.device->driver().record(part.fence, part.stream);
  if (status.ok()) {
    part.state = Part::State::recorded;
  } else {
    part.state = status.code() == StatusCode::not_supported ? Part::State::captured : Part::State::failed;
  }
  return status.ok();
}

bool StreamPoint::record_all() {
  bool all = true;
  for (Part& part : parts_) all = try_record(part) && all;
  return all;
}

bool StreamPoint::is_recorded() {
  const MutexLock lock(mutex_);
  return record_all();
}

bool StreamPoint::has_unreachable() {
  const MutexLock lock(mutex_);
  return std::any_of(parts_.begin(), parts_.end(),
                     [](const Part& part) { return part.state == Part::State::no_fence; });
}

bool StreamPoint::passed(bool queued_is_done) {
  const MutexLock lock(mutex_);
  return passed_locked(queued_is_done);
}

bool StreamPoint::passed_locked(bool queued_is_done) {
  while (!parts_.empty()) {
    Part& part = parts_.back();
    if (!part.device->driver().alive()) {
      // A driver that is gone runs nothing.
      parts_.clear();
      return true;
    }
    const bool recorded = try_record(part);
    const bool done = queued_is_done && part.state != Part::State::captured;
    // Any other answer than a clear yes is a no: memory must not leave under
    // queued work.
    if (!done && (!recorded || !part.device->driver().query(part.fence).ok())) return false;
    if (part.fence != nullptr) part.device->put_back(part.fence);
    parts_.pop_back();
  }
  return true;
}

Status StreamPoint::wait() {
  for (;;) {
    DeviceStreams* device = nullptr;
    Fence fence = nullptr;
    {
      const MutexLock lock(mutex_);
      if (passed_locked(/*queued_is_done=*/false)) return {};
      const Part& part = parts_.back();
      device = part.device;
      if (part.state == Part::State::recorded) fence = part.fence;
    }
    // Whoever finds meanwhile that it has passed may give the fence away: then
    // this waits longer than it must, never shorter.
    if (fence != nullptr && device->driver().wait(fence).ok()) continue;
    if (const Status done = synchronize(*device); !done.ok()) return done;
  }
}

// All work of the device is done, so every part of it has passed.
Status StreamPoint::synchronize(DeviceStreams& device) {
  const Status done = device.driver().synchronize(device.device());
  if (!done.ok() && done.code() != StatusCode::driver_gone) return done;
  const MutexLock lock(mutex_);
  std::erase_if(parts_, [&](const Part& part) {
    if (part.device != &device) return false;
    if (part.fence != nullptr) device.put_back(part.fence);
    return true;
  });
  return {};
}

Status StreamPoint::order_before(const StreamUse& later) {
  const MutexLock lock(mutex_);
  if (parts_.empty()) return {};
  // A name that may mean another stream tomorrow is not remembered, nor taken to
  // mean the stream that had it when it was recorded.
  const bool lasting = is_lasting(later.kind);
  if (lasting && std::find(later_.begin(), later_.end(), later) != later_.end()) return {};
  if (!record_all()) return {StatusCode::not_supported, "order after work that has no fence"};
  for (const Part& part : parts_) {
    if (lasting && part.device == later.device && part.stream == later.stream) continue;
    const Status status = part.device->driver().stream_wait(later.device->device(), later.stream, part.fence);
    if (!status.ok()) return status;
  }
  if (lasting) later_.push_back(later);
  return {};
}

}  // namespace vmm
