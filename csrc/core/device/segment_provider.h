// Who gives memory that is not ours: another allocator, asked for whole segments. What
// is cut from them, who pays and when they go back is ProvidedMemory's.
#pragma once

#include <cstddef>
#include <string>

#include "base/units.h"

namespace vmm {

// Called with no lock of ours held: it may be Python, which takes its own and comes back
// to us for memory, or wait for the GPU. Not called while the device captures a graph,
// but to take. Several threads may call it at once.
class SegmentProvider {
 public:
  SegmentProvider() = default;
  SegmentProvider(const SegmentProvider&) = delete;
  SegmentProvider& operator=(const SegmentProvider&) = delete;
  virtual ~SegmentProvider() = default;

  // The address of `bytes` that are the caller's until give_back(); 0: there are none.
  // What the provider says of that goes to `words`, if it says anything: nothing that it
  // throws comes out, and no error of the device stays behind.
  virtual Address take(std::size_t bytes, std::string* words) = 0;
  // `segment`, which take() gave, and which no queued work uses any more. What it throws
  // is reported, and the segment counts as given back.
  virtual void give_back(Address segment) = 0;
};

}  // namespace vmm
