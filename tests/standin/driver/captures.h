// The rules of stream captures: what becomes part of one, what is refused
// while one runs, and what ends it for good. They are CUDA's, as far as torch
// and torch_vmm meet them (docs: "Stream Management", "Graph Management").
// All functions want the world's lock.
#pragma once

#include <cuda.h>

#include "world.h"

namespace standin {

// The calling thread's mode.
CUstreamCaptureMode& thread_mode();

CUresult begin_capture(Stream& stream, CUstreamCaptureMode mode);
CUresult end_capture(Stream& stream, Graph** out);

// The job becomes a node. REQUIRES: the stream is captured.
CUresult capture_job(Stream& stream, JobPtr job);
CUresult capture_record(const Stream& stream, Event& event);
// For a stream or an event that is captured.
CUresult capture_wait(Stream& stream, const Event& event);

// 900, and the end of every capture that this thread may not disturb now.
CUresult refuse_unsafe();
// 906 for the legacy stream while a blocking one is captured.
CUresult refuse_implicit(const Stream& stream, bool invalidates);
// 900 (901 if it had ended so before), and the end of the stream's capture, if there is one.
CUresult refuse_captured(const Stream& stream);
// 907 for an event that was last recorded in a captured stream, and the end of
// that capture; 1 when it has ended since.
CUresult refuse_captured_event(const Event& event);
// As refuse_captured() for all captures of the device.
CUresult refuse_any_capture(int device);

CUstreamCaptureStatus status_of(const Stream& stream);

}  // namespace standin
