// Blocks that were freed while recorded streams may still use them: one queue a
// stream, in the order of the frees. What was queued on a stream passes in that
// order too, so who asks stops at the first that has not passed: ten thousand
// of them cost what one costs (4 ms an allocation when each was asked).
//
// It never looks into a block. Not thread-safe: the pool's lock guards it.
#pragma once

#include <cstddef>
#include <deque>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "core/streams/clock.h"
#include "core/streams/stream_point.h"

namespace vmm {

struct Block;

class PendingFrees {
 public:
  struct Freed {
    Block* block = nullptr;
    Epoch epoch = kLongAgo;  // of the free
  };

  // The block waits for what these streams have queued until now. Throws std::bad_alloc,
  // and it does not wait.
  void add(Freed freed, const std::vector<StreamUse>& uses);
  // Takes out those whose streams have passed; valid until it is called again. Each
  // allocation asks, as natively: a program that has waited gets the memory at once.
  std::span<const Freed> take_passed(const Clock& clock);
  // The last of each stream's: once they have passed, so has all that waits here now.
  [[nodiscard]] std::vector<StreamPointPtr> last_points() const;
  [[nodiscard]] std::size_t size() const { return waiting_.size() - unused_.size(); }
  [[nodiscard]] bool empty() const { return size() == 0; }

 private:
  struct Waiting {
    Freed freed;
    std::size_t streams = 0;  // that have not passed
  };
  struct Entry {
    std::size_t waiting = 0;  // its index
    StreamPointPtr point;
  };
  using Name = std::pair<DeviceStreams*, Stream>;  // of the stream that has the fence

  static Name name_of(const StreamUse& use);
  std::size_t take_place();

  std::map<Name, std::deque<Entry>> queues_;
  std::vector<Waiting> waiting_;
  // Both have room for as many as there are in waiting_.
  std::vector<std::size_t> unused_;  // places there
  std::vector<Freed> passed_;
};

}  // namespace vmm
