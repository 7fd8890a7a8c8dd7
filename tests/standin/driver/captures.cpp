#include "captures.h"

#include <algorithm>
#include <utility>

#include "queue.h"

namespace standin {
namespace {

// What was refused because of a capture that is lost already is told so.
CUresult invalidate(Capture& capture, CUresult why) {
  if (capture.invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  capture.invalidated = true;
  return why;
}

void join(Stream& stream, const Captured& where) {
  stream.captured = where;
  where.capture->streams.push_back(&stream);
}

// Is every node before one of `last`?
bool covers(const Graph& graph, const std::set<std::size_t>& last) {
  std::vector<bool> seen(graph.nodes.size());
  std::vector<std::size_t> open(last.begin(), last.end());
  while (!open.empty()) {
    const std::size_t node = open.back();
    open.pop_back();
    if (seen[node]) continue;
    seen[node] = true;
    open.insert(open.end(), graph.nodes[node].after.begin(), graph.nodes[node].after.end());
  }
  return std::all_of(seen.begin(), seen.end(), [](bool one) { return one; });
}

}  // namespace

CUstreamCaptureMode& thread_mode() {
  thread_local CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  return mode;
}

CUresult begin_capture(Stream& stream, CUstreamCaptureMode mode) {
  if (stream.legacy) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  if (stream.captured.capture != nullptr) return CUDA_ERROR_ILLEGAL_STATE;
  auto capture = std::make_shared<Capture>();
  capture->id = world().next_capture++;
  capture->mode = mode;
  capture->thread = std::this_thread::get_id();
  capture->origin = &stream;
  capture->graph = new Graph;  // a handle: never deleted
  world().graphs.insert(capture->graph);
  world().captures.push_back(capture);
  join(stream, {capture, {}});
  return CUDA_SUCCESS;
}

CUresult end_capture(Stream& stream, Graph** out) {
  *out = nullptr;
  const CapturePtr capture = stream.captured.capture;
  if (capture == nullptr) return CUDA_ERROR_ILLEGAL_STATE;
  if (capture->origin != &stream) return invalidate(*capture, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
  const bool its_thread =
      capture->mode == CU_STREAM_CAPTURE_MODE_RELAXED || capture->thread == std::this_thread::get_id();
  const bool joined = covers(*capture->graph, stream.captured.frontier);
  const bool whole = its_thread && joined && !capture->invalidated;
  capture->ended = true;
  for (Stream* const member : capture->streams) member->captured = {};
  auto& running = world().captures;
  running.erase(std::find(running.begin(), running.end(), capture));
  if (whole) {
    *out = capture->graph;
    return CUDA_SUCCESS;
  }
  capture->graph->alive = false;
  capture->graph->nodes.clear();
  if (!its_thread) return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
  return capture->invalidated ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
}

CUresult capture_job(Stream& stream, JobPtr job) {
  auto& [capture, frontier] = stream.captured;
  if (capture->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  auto& nodes = capture->graph->nodes;
  nodes.push_back({std::move(job), frontier});
  frontier = {nodes.size() - 1};
  return CUDA_SUCCESS;
}

CUresult capture_record(const Stream& stream, Event& event) {
  if (stream.captured.capture->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  event.captured = stream.captured;
  return CUDA_SUCCESS;
}

CUresult capture_wait(Stream& stream, const Event& event) {
  const CapturePtr& mine = stream.captured.capture;
  const CapturePtr& its = event.captured.capture;
  if (mine != nullptr && mine->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (its == nullptr) {
    if (event.point == nullptr) return CUDA_SUCCESS;  // never recorded
    return invalidate(*mine, CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
  }
  if (its->ended) return CUDA_ERROR_INVALID_VALUE;
  if (its->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (mine == nullptr) {
    if (stream.legacy) return invalidate(*its, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    join(stream, event.captured);
    return CUDA_SUCCESS;
  }
  if (mine != its) {
    its->invalidated = true;
    return invalidate(*mine, CUDA_ERROR_STREAM_CAPTURE_MERGE);
  }
  stream.captured.frontier.insert(event.captured.frontier.begin(), event.captured.frontier.end());
  return CUDA_SUCCESS;
}

CUresult refuse_unsafe() {
  if (thread_mode() == CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_SUCCESS;
  CUresult answer = CUDA_SUCCESS;
  for (const CapturePtr& capture : world().captures) {
    if (capture->mode == CU_STREAM_CAPTURE_MODE_RELAXED) continue;
    const bool mine = capture->thread == std::this_thread::get_id();
    const bool everybodys =
        capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL && thread_mode() == CU_STREAM_CAPTURE_MODE_GLOBAL;
    if (!mine && !everybodys) continue;
    capture->invalidated = true;
    answer = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  return answer;
}

CUresult refuse_implicit(const Stream& stream, bool invalidates) {
  if (!stream.legacy) return CUDA_SUCCESS;
  CUresult answer = CUDA_SUCCESS;
  for (const CapturePtr& capture : world().captures) {
    for (const Stream* const member : capture->streams) {
      if (member->device != stream.device || !member->blocking()) continue;
      answer = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
      if (invalidates) capture->invalidated = true;
    }
  }
  return answer;
}

CUresult refuse_captured(const Stream& stream) {
  const CapturePtr& capture = stream.captured.capture;
  return capture == nullptr ? CUDA_SUCCESS : invalidate(*capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
}

CUresult refuse_captured_event(const Event& event) {
  const CapturePtr& capture = event.captured.capture;
  if (capture == nullptr) return CUDA_SUCCESS;
  if (capture->ended) return CUDA_ERROR_INVALID_VALUE;
  capture->invalidated = true;
  return CUDA_ERROR_CAPTURED_EVENT;
}

CUresult refuse_any_capture(int device) {
  CUresult answer = CUDA_SUCCESS;
  for (const CapturePtr& capture : world().captures) {
    const auto& members = capture->streams;
    const bool here = std::any_of(members.begin(), members.end(), [&](const Stream* s) { return s->device == device; });
    if (!here) continue;
    capture->invalidated = true;
    answer = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  return answer;
}

CUstreamCaptureStatus status_of(const Stream& stream) {
  const CapturePtr& capture = stream.captured.capture;
  if (capture == nullptr) return CU_STREAM_CAPTURE_STATUS_NONE;
  return capture->invalidated ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

}  // namespace standin
