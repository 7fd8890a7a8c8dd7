#include "core/streams/pending_frees.h"

#include <iterator>
#include <memory>

namespace vmm {

void PendingFrees::add(Freed freed, const std::vector<StreamUse>& uses) {
  std::size_t place = waiting_.size();
  if (unused_.empty()) {
    waiting_.emplace_back();
  } else {
    place = unused_.back();
    unused_.pop_back();
  }
  waiting_[place] = {freed, uses.size()};
  for (const StreamUse& use : uses) {
    queues_[{use.device, StreamPoint::stream_of_fence(use)}].push_back(
        {place, std::make_shared<StreamPoint>(std::vector<StreamUse>{use})});
  }
}

void PendingFrees::take_passed(const Clock& clock, std::vector<Freed>* passed) {
  for (auto queue = queues_.begin(); queue != queues_.end();) {
    auto& entries = queue->second;
    while (!entries.empty()) {
      Waiting& waiting = waiting_[entries.front().waiting];
      if (!entries.front().point->passed(clock.has_passed(waiting.freed.epoch))) break;
      if (--waiting.streams == 0) {
        passed->push_back(waiting.freed);
        unused_.push_back(entries.front().waiting);
      }
      entries.pop_front();
    }
    queue = entries.empty() ? queues_.erase(queue) : std::next(queue);
  }
}

}  // namespace vmm
