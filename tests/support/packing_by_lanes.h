// The code that packs memory as a GPU runs it: the same text, with the part that is NVRTC's, by
// a thread for each lane of a block. It has a GPU's rules (lanes go on by themselves, and meet)
// and none of its speed.
#pragma once

#include "driver/packing.h"

namespace vmm::testing {

// As packing::run().
void pack_by_lanes(packing::Step step, const packing::Job& job);

}  // namespace vmm::testing
