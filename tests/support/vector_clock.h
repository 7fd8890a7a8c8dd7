// Vector clocks: for each lane of work (a stream's life, from its making on),
// how much of it is meant. "A comes before B" is then one comparison. Values
// only: whose clock it is, and what it means, its holder knows.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace vmm::testing {

using Lane = std::size_t;   // which lane: counted from 0, never used again
using Seq = std::uint64_t;  // which piece of work on it: counted from 1; 0: none

class VectorClock {
 public:
  [[nodiscard]] Seq operator[](Lane lane) const { return lane < seen_.size() ? seen_[lane] : 0; }
  [[nodiscard]] bool covers(Lane lane, Seq seq) const { return seq <= (*this)[lane]; }
  [[nodiscard]] bool covers(const VectorClock& other) const {
    for (Lane lane = 0; lane < other.seen_.size(); ++lane) {
      if (!covers(lane, other.seen_[lane])) return false;
    }
    return true;
  }
  void raise(Lane lane, Seq seq) {
    if (lane >= seen_.size()) seen_.resize(lane + 1);
    seen_[lane] = std::max(seen_[lane], seq);
  }
  void join(const VectorClock& other) {
    for (Lane lane = 0; lane < other.seen_.size(); ++lane) raise(lane, other.seen_[lane]);
  }

 private:
  std::vector<Seq> seen_;
};

}  // namespace vmm::testing
