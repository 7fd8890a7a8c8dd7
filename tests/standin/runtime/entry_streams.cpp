// libcudart's entry points: streams, events, captures, graphs. The handles are
// the driver's own.
#include "runtime.h"

using namespace standin;  // NOLINT(google-build-using-namespace): entry points cannot live in it

extern "C" {

// -- Streams.

cudaError_t cudaStreamCreate(cudaStream_t* out) {
  STANDIN_CALL_ON_DEVICE();
  return answer(cuStreamCreate(out, 0));
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned flags) {
  STANDIN_CALL_ON_DEVICE();
  return answer(cuStreamCreate(out, flags));
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned flags, int priority) {
  STANDIN_CALL_ON_DEVICE();
  return answer(cuStreamCreateWithPriority(out, flags, priority));
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  STANDIN_CALL_ON_DEVICE();
  return answer(cuStreamDestroy(stream));
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  STANDIN_CALL_ON_DEVICE();
  return answer(cuStreamGetPriority(stream, priority));
}

cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned* flags) {
  STANDIN_CALL_ON_DEVICE();
  return answer(cuStreamGetFlags(stream, flags));
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  STANDIN_CALL_ON_DEVICE();
  return answer(cuStreamSynchronize(stream));
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  STANDIN_CALL_ON_DEVICE();
  return answer(cuStreamQuery(stream));
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  STANDIN_CALL_ON_DEVICE();
  return answer(cuStreamWaitEvent(stream, event, flags));
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  STANDIN_CALL_ON_DEVICE();
  return answer(cuLaunchHostFunc(stream, function, data));
}

// -- Events.

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned flags) {
  STANDIN_CALL_ON_DEVICE();
  return answer(cuEventCreate(out, flags));
}

cudaError_t cudaEventCreate(cudaEvent_t* out) {
  STANDIN_CALL_ON_DEVICE();
  return answer(cuEventCreate(out, 0));
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  STANDIN_CALL();
  return answer(cuEventDestroy(event));
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  STANDIN_CALL_ON_DEVICE();
  return answer(cuEventRecord(event, stream));
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  STANDIN_CALL_ON_DEVICE();
  return flags == 0 ? answer(cuEventRecord(event, stream)) : refuse_call("external event record");
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  STANDIN_CALL_ON_DEVICE();
  return answer(cuEventQuery(event));
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  STANDIN_CALL_ON_DEVICE();
  return answer(cuEventSynchronize(event));
}

cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t first, cudaEvent_t second) {
  STANDIN_CALL_ON_DEVICE();
  return answer(cuEventElapsedTime(ms, first, second));
}

cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t* out, cudaEvent_t event) {
  STANDIN_CALL_ON_DEVICE();
  static_assert(sizeof(cudaIpcEventHandle_t) == sizeof(CUipcEventHandle));
  return answer(cuIpcGetEventHandle(reinterpret_cast<CUipcEventHandle*>(out), event));
}

cudaError_t cudaIpcOpenEventHandle(cudaEvent_t* out, cudaIpcEventHandle_t handle) {
  STANDIN_CALL_ON_DEVICE();
  return answer(cuIpcOpenEventHandle(out, reinterpret_cast<const CUipcEventHandle&>(handle)));
}

// -- Captures and graphs.

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  STANDIN_CALL();
  return answer(cuThreadExchangeStreamCaptureMode(reinterpret_cast<CUstreamCaptureMode*>(mode)));
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  STANDIN_CALL_ON_DEVICE();
  return answer(cuStreamBeginCapture(stream, static_cast<CUstreamCaptureMode>(mode)));
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* out) {
  STANDIN_CALL_ON_DEVICE();
  return answer(cuStreamEndCapture(stream, out));
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* out) {
  STANDIN_CALL_ON_DEVICE();
  return answer(cuStreamIsCapturing(stream, reinterpret_cast<CUstreamCaptureStatus*>(out)));
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                     std::size_t* count) {
  STANDIN_CALL_ON_DEVICE();
  cuuint64_t number = 0;
  const CUresult result = cuStreamGetCaptureInfo(stream, reinterpret_cast<CUstreamCaptureStatus*>(status), &number,
                                                 graph, nodes, reinterpret_cast<const CUgraphEdgeData**>(edges), count);
  if (id != nullptr) *id = number;
  return answer(result);
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, std::size_t* count) {
  STANDIN_CALL();
  return answer(cuGraphGetNodes(graph, nodes, count));
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* out, cudaGraph_t graph, unsigned long long flags) {
  STANDIN_CALL_ON_DEVICE();
  return answer(cuGraphInstantiate(out, graph, flags));
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* out, cudaGraph_t graph, unsigned long long flags) {
  STANDIN_CALL_ON_DEVICE();
  return answer(cuGraphInstantiate(out, graph, flags));
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  STANDIN_CALL_ON_DEVICE();
  return answer(cuGraphLaunch(graph, stream));
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  STANDIN_CALL();
  return answer(cuGraphDestroy(graph));
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  STANDIN_CALL();
  return answer(cuGraphExecDestroy(graph));
}

}  // extern "C"
