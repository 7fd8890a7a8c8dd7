// libcuda's entry points: captures and graphs.
#include <cuda.h>

#include <algorithm>

#include "captures.h"
#include "machine.h"
#include "queue.h"

namespace {

using namespace standin;  // NOLINT(google-build-using-namespace)

Graph& graph_of(CUgraph handle, const char* call) {
  auto* const graph = reinterpret_cast<Graph*>(handle);
  if (world().graphs.count(graph) == 0 || !graph->alive) die(call, "of a graph that is no more");
  return *graph;
}

Executable& executable_of(CUgraphExec handle, const char* call) {
  auto* const executable = reinterpret_cast<Executable*>(handle);
  if (world().executables.count(executable) == 0 || !executable->alive) die(call, "of a graph that is no more");
  return *executable;
}

}  // namespace

extern "C" {

// -- Captures.

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  STANDIN_ENTER(Needs::nothing);
  std::swap(thread_mode(), *mode);
  return CUDA_SUCCESS;
}

CUresult cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode mode) {
  STANDIN_ENTER(needs_of(stream));
  const Lock lock(world().mutex);
  return begin_capture(stream_of(stream, __func__), mode);
}

CUresult cuStreamEndCapture(CUstream stream, CUgraph* out) {
  STANDIN_ENTER(needs_of(stream));
  const Lock lock(world().mutex);
  Graph* graph = nullptr;
  const CUresult ended = end_capture(stream_of(stream, __func__), &graph);
  *out = reinterpret_cast<CUgraph>(graph);
  return ended;
}

CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus* out) {
  STANDIN_ENTER(needs_of(handle));
  const Lock lock(world().mutex);
  const Stream& stream = stream_of(handle, __func__);
  if (const CUresult refused = refuse_implicit(stream, /*invalidates=*/false); refused != CUDA_SUCCESS) return refused;
  *out = status_of(stream);
  return CUDA_SUCCESS;
}

CUresult cuStreamGetCaptureInfo(CUstream handle, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph* graph,
                                const CUgraphNode** nodes, const CUgraphEdgeData** edges, std::size_t* count) {
  STANDIN_ENTER(Needs::context);
  const Lock lock(world().mutex);
  const Stream& stream = stream_of(handle, __func__);
  if (const CUresult refused = refuse_implicit(stream, /*invalidates=*/false); refused != CUDA_SUCCESS) return refused;
  if (nodes != nullptr || edges != nullptr || count != nullptr) return CUDA_ERROR_NOT_SUPPORTED;
  *status = status_of(stream);
  if (*status == CU_STREAM_CAPTURE_STATUS_NONE) return CUDA_SUCCESS;
  if (id != nullptr) *id = stream.captured.capture->id;
  if (graph != nullptr) *graph = reinterpret_cast<CUgraph>(stream.captured.capture->graph);
  return CUDA_SUCCESS;
}

// -- Graphs.

CUresult cuGraphGetNodes(CUgraph handle, CUgraphNode* nodes, std::size_t* count) {
  STANDIN_ENTER(Needs::init);
  if (nodes != nullptr) return CUDA_ERROR_NOT_SUPPORTED;
  const Lock lock(world().mutex);
  *count = graph_of(handle, __func__).nodes.size();
  return CUDA_SUCCESS;
}

CUresult cuGraphInstantiate(CUgraphExec* out, CUgraph handle, unsigned long long /*flags*/) {
  STANDIN_ENTER(Needs::context);
  const Lock lock(world().mutex);
  auto* const executable = new Executable;  // a handle: never deleted
  for (const Node& node : graph_of(handle, __func__).nodes) executable->jobs.push_back(node.job);
  world().executables.insert(executable);
  *out = reinterpret_cast<CUgraphExec>(executable);
  return CUDA_SUCCESS;
}

// Its nodes are done one after the other. What is queued outlives the graph.
CUresult cuGraphLaunch(CUgraphExec handle, CUstream stream_handle) {
  STANDIN_ENTER(Needs::context);
  Lock lock(world().mutex);
  Stream& stream = stream_of(stream_handle, __func__);
  const std::vector<JobPtr> jobs = executable_of(handle, __func__).jobs;
  for (const JobPtr& job : jobs) {
    if (const CUresult queued = submit(lock, stream, job); queued != CUDA_SUCCESS) return queued;
  }
  return CUDA_SUCCESS;
}

CUresult cuGraphDestroy(CUgraph handle) {
  STANDIN_ENTER(Needs::init);
  const Lock lock(world().mutex);
  Graph& graph = graph_of(handle, __func__);
  graph.alive = false;
  graph.nodes.clear();
  return CUDA_SUCCESS;
}

CUresult cuGraphExecDestroy(CUgraphExec handle) {
  STANDIN_ENTER(Needs::init);
  const Lock lock(world().mutex);
  Executable& executable = executable_of(handle, __func__);
  executable.alive = false;
  executable.jobs.clear();
  return CUDA_SUCCESS;
}

}  // extern "C"
