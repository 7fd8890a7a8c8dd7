#include "support/work_order.h"

#include "base/check.h"

namespace vmm::testing {

// -- Streams

Lane WorkOrder::add_lane(const StreamSpec& spec) {
  LaneState& state = lanes_.emplace_back();
  state.handle = spec.handle;
  state.device = spec.device;
  state.blocking = spec.blocking;
  state.name = spec.name;
  return lanes_.size() - 1;
}

void WorkOrder::add_stream(const StreamSpec& spec) {
  VMM_CHECK(spec.handle != nullptr && spec.handle != kPerThread, "the default streams need no making");
  VMM_CHECK(by_handle_.count(spec.handle) == 0, spec.name, " has the handle of a stream that is alive");
  by_handle_.emplace(spec.handle, add_lane(spec));
}

void WorkOrder::destroy_stream(Stream handle) {
  const auto found = by_handle_.find(handle);
  VMM_CHECK(found != by_handle_.end(), "destroying a stream that is not alive");
  VMM_CHECK(!is_captured(found->second), "destroying ", name_of(found->second), ", which is captured");
  lanes_[found->second].name += " (destroyed)";
  by_handle_.erase(found);
}

std::optional<Lane> WorkOrder::find(StreamRef stream) {
  if (stream.handle == nullptr) {
    const auto found = defaults_.find(stream.device);
    if (found != defaults_.end()) return found->second;
    const Lane lane = add_lane({nullptr, stream.device, false, "default of device " + std::to_string(stream.device)});
    return defaults_.emplace(stream.device, lane).first->second;
  }
  if (stream.handle == kPerThread) {
    const std::pair<int, std::thread::id> key{stream.device, std::this_thread::get_id()};
    const auto found = per_thread_.find(key);
    if (found != per_thread_.end()) return found->second;
    const std::string name = "per-thread " + std::to_string(per_thread_.size() + 1);
    return per_thread_.emplace(key, add_lane({kPerThread, stream.device, true, name})).first->second;
  }
  const auto found = by_handle_.find(stream.handle);
  return found == by_handle_.end() ? std::nullopt : std::optional<Lane>(found->second);
}

// -- Order

std::optional<Lane> WorkOrder::default_lane(int device) const {
  const auto found = defaults_.find(device);
  return found == defaults_.end() ? std::nullopt : std::optional<Lane>(found->second);
}

VectorClock WorkOrder::reach(Lane lane) const {
  const LaneState& own = lanes_[lane];
  VectorClock point = own.after;
  point.raise(lane, own.queued);
  point.join(host_);
  if (own.handle == nullptr) {
    for (Lane other = 0; other < lanes_.size(); ++other) {
      const LaneState& state = lanes_[other];
      if (state.device != own.device || !state.blocking) continue;
      point.join(state.after);
      point.raise(other, state.queued);
    }
  } else if (own.blocking) {
    if (const auto before = default_lane(own.device); before.has_value()) {
      point.join(lanes_[*before].after);
      point.raise(*before, lanes_[*before].queued);
    }
  }
  return point;
}

Seq WorkOrder::queue(Lane lane, bool is_long) {
  VMM_CHECK(!is_captured(lane) && !stands_before_a_capture(lane), "work on ", name_of(lane), " during a capture");
  LaneState& state = lanes_[lane];
  state.after = reach(lane);
  ++state.queued;
  state.works.push_back({state.queued, is_long, state.after});
  return state.queued;
}

void WorkOrder::wait(Lane lane, const VectorClock& point) {
  VMM_CHECK(!is_captured(lane) && !stands_before_a_capture(lane), "a wait on ", name_of(lane), " during a capture");
  lanes_[lane].after.join(reach(lane));
  lanes_[lane].after.join(point);
}

// -- Running

VectorClock WorkOrder::all_of(int device) const {
  VectorClock point;
  for (Lane lane = 0; lane < lanes_.size(); ++lane) {
    if (lanes_[lane].device != device) continue;
    point.raise(lane, lanes_[lane].queued);
    if (!lanes_[lane].works.empty()) point.join(lanes_[lane].works.back().after);
  }
  return point;
}

// The first piece of work that is not done.
const WorkOrder::Work* WorkOrder::next_work(Lane lane) {
  std::deque<Work>& works = lanes_[lane].works;
  while (!works.empty() && done_.covers(lane, works.front().seq)) works.pop_front();
  return works.empty() ? nullptr : &works.front();
}

void WorkOrder::run(Lane lane, std::size_t count) {
  for (; count != 0; --count) {
    const Work* next = next_work(lane);
    if (next == nullptr || !done_.covers(next->after)) return;
    done_.raise(lane, next->seq);
  }
}

void WorkOrder::drift(std::mt19937_64& random) {
  if (lanes_.empty()) return;
  const Lane lane = random() % lanes_.size();
  const Work* next = next_work(lane);
  if (next != nullptr && !next->is_long) run(lane, 1);
}

// -- Captures

CaptureId WorkOrder::begin_capture(Lane lane) {
  VMM_CHECK(lanes_[lane].handle != nullptr, "the default stream cannot be captured");
  captures_.emplace(++last_capture_, true);
  join_capture(lane, last_capture_);
  return last_capture_;
}

void WorkOrder::join_capture(Lane lane, CaptureId capture) {
  VMM_CHECK(!is_captured(lane) && captures_.at(capture), name_of(lane), " cannot join capture ", capture);
  lanes_[lane].capture = capture;
}

void WorkOrder::end_capture(CaptureId capture) {
  VMM_CHECK(captures_.erase(capture) == 1, "no capture ", capture, " runs");
  for (LaneState& state : lanes_) {
    if (state.capture == capture) state.capture = 0;
  }
}

CaptureId WorkOrder::capture_of(Lane lane) const {
  const CaptureId capture = lanes_[lane].capture;
  return capture != 0 && captures_.at(capture) ? capture : 0;
}

bool WorkOrder::stands_before_a_capture(Lane lane) const {
  if (lanes_[lane].handle != nullptr) return false;
  for (const LaneState& state : lanes_) {
    if (state.device == lanes_[lane].device && state.blocking && state.capture != 0) return true;
  }
  return false;
}

}  // namespace vmm::testing
