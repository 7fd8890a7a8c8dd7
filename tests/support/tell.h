// What the allocator is told beside requests and frees: which streams there are
// and who reads on them. In the words of today's core, and the one place to
// change when it finds others: programs over the order checker say it through
// these, as the torch adapter does through its own.
//
// Captures need no word here: PrivatePools::begin() and end() announce torch's,
// and nobody announces the others.
#pragma once

#include "core/device_memory.h"
#include "support/work_order.h"

namespace vmm::testing::tell {

// A stream of torch's own: non-blocking, and never destroyed. Told once, at the
// beginning. (Today each pool learns of a stream by its first request.)
inline void of_own_stream(DeviceMemory& /*memory*/, Stream /*stream*/) {}

// A stream that somebody else made and may destroy at any time; told before the
// first request on it and before it is recorded, each time.
inline void of_foreign_stream(DeviceMemory& memory, Stream stream) { memory.fences().add_foreign(stream); }

// The streams of `peer`'s device may use the memory of this one.
inline Status of_peer(DeviceMemory& memory, DeviceMemory& peer) {
  return memory.add_accessor(Location::on_device(peer.device()));
}

// Tensor.record_stream with a stream of `home`'s device.
inline void record_stream(Pool& pool, Address address, Stream stream, DeviceMemory& home) {
  pool.record_stream(address, stream, home.device() == pool.device() ? nullptr : &home.fences());
}

}  // namespace vmm::testing::tell
