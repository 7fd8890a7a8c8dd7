// Events, and the page of an interprocess one that other processes read. All
// functions want the world's lock.
#pragma once

#include <cuda.h>

#include "world.h"

namespace standin {

// Ends the process when the handle is dead.
Event& event_of(CUevent handle, const char* call);
CUevent handle_of(const Event& event);

CUresult make_event(int device, unsigned flags, CUevent* out);
// Forgets what it stands for; its handle is dead.
void destroy_event(Event& event);
CUresult share_event(Event& event, CUipcEventHandle* out);
CUresult open_event(int device, const CUipcEventHandle& handle, CUevent* out);

CUresult record_event(Lock& lock, Event& event, Stream& stream);
// The same after everything that is queued on the device.
CUresult record_event_everywhere(Lock& lock, Event& event, int device);
// Where the event stands; null: it was never recorded.
PointPtr point_of(const Event& event);

}  // namespace standin
