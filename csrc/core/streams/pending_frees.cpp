#include "core/streams/pending_frees.h"

#include <iterator>
#include <memory>
#include <span>

namespace vmm {

void PendingFrees::add(Freed freed, const std::vector<StreamUse>& uses) {
  const std::size_t place = take_place();
  waiting_[place] = {freed, uses.size()};
  std::size_t queued = 0;
  try {
    for (const StreamUse& use : uses) {
      std::deque<Entry>& entries = queues_[name_of(use)];
      entries.push_back({place, std::make_shared<StreamPoint>(std::vector<StreamUse>{use})});
      ++queued;
    }
  } catch (...) {
    for (const StreamUse& use : std::span(uses).first(queued)) queues_.at(name_of(use)).pop_back();
    std::erase_if(queues_, [](const auto& queue) { return queue.second.empty(); });
    unused_.push_back(place);
    throw;
  }
}

// That it can be given back, and its block told of, has its memory by then.
std::size_t PendingFrees::take_place() {
  if (unused_.empty()) {
    const std::size_t room = 2 * waiting_.size() + 1;
    if (passed_.capacity() == waiting_.size()) passed_.reserve(room);
    if (unused_.capacity() == waiting_.size()) unused_.reserve(room);
    waiting_.emplace_back();
    return waiting_.size() - 1;
  }
  const std::size_t place = unused_.back();
  unused_.pop_back();
  return place;
}

PendingFrees::Name PendingFrees::name_of(const StreamUse& use) {
  return {use.device, StreamPoint::stream_of_fence(use)};
}

std::vector<StreamPointPtr> PendingFrees::last_points() const {
  std::vector<StreamPointPtr> found;
  found.reserve(queues_.size());
  for (const auto& [stream, entries] : queues_) found.push_back(entries.back().point);
  return found;
}

std::span<const PendingFrees::Freed> PendingFrees::take_passed(const Clock& clock) {
  passed_.clear();
  for (auto queue = queues_.begin(); queue != queues_.end();) {
    auto& entries = queue->second;
    while (!entries.empty()) {
      const Entry& first = entries.front();
      Waiting& waiting = waiting_[first.waiting];
      if (!first.point->passed(clock.has_passed(waiting.freed.epoch))) break;
      if (--waiting.streams == 0) {
        passed_.push_back(waiting.freed);
        unused_.push_back(first.waiting);
      }
      entries.pop_front();
    }
    queue = entries.empty() ? queues_.erase(queue) : std::next(queue);
  }
  return passed_;
}

}  // namespace vmm
