// Streams as queues. Work is done at once, by the thread that submits it, if
// its stream is not held, nothing before it waits and it takes no time; else
// it stays queued, and whoever calls CUDA next does it once it can be done.
// While work is queued that takes time or that waits for another process, a
// thread of its own looks too. Work that takes time is over as soon as somebody
// waits for it: a test that looks what is not yet done has all the time it
// needs, on a slow machine too, and one that waits loses none.
//
// All functions want the world's lock; those that take a Lock give it up while
// work is done.
#pragma once

#include <cuda.h>

#include <vector>

#include "world.h"

namespace standin {

// The stream that a handle names for the calling thread: the default ones of
// the current device are made when they are first named. Ends the process when
// it is dead. REQUIRES: a current context.
Stream& stream_of(CUstream handle, const char* call);
CUstream handle_of(const Stream& stream);
Stream& make_stream(int device, unsigned flags, int priority);
// The device's legacy default stream.
Stream& legacy_stream(int device);

// Queues the job, or makes it part of the stream's capture. `end`, where
// given, is where it is done; null for captured work.
CUresult submit(Lock& lock, Stream& stream, JobPtr job, const std::vector<PointPtr>& after = {},
                PointPtr* end = nullptr);

[[nodiscard]] bool has_passed(const PointPtr& point);
// Does what can be done now.
void pump(Lock& lock);
// Until the point has passed; at once for a null one.
void wait(Lock& lock, const PointPtr& point);
// Until all that is queued on the device is done.
void wait_for_device(Lock& lock, int device);

// The ends of all that is queued on the device now.
std::vector<PointPtr> ends_of(int device);

}  // namespace standin
