// torch's CPU kernels in the place of its CUDA kernels. Every operator that has
// both is registered anew for CUDA tensors: what the CUDA kernel would do is
// done by the CPU's, over the same memory (the stand-in's devices are host
// memory), queued on the current stream, or captured by it, like a kernel.
//
// Left as they are: whatever makes or changes tensors without a kernel
// (empty_strided, views, resize_), and copies that CUDA itself can make, for
// those are the allocator's and the stand-in's to do. Operators of CUDA alone
// (cuDNN's, triton's) still launch kernels, and fail.
//
// Loaded by libcudart's stand-in before torch uses a device.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "driver/control.h"
#include "kernels/arguments.h"
#include "kernels/shapes.h"

namespace standin {
namespace {

// -- Which operators.

const std::set<std::string>& kept() {
  static const auto* const kNames = new std::set<std::string>{
      "aten::_copy_from_and_resize",
      "aten::_has_same_storage_numel",
      "aten::_local_scalar_dense",
      "aten::_pin_memory",
      "aten::_reshape_alias",
      "aten::_resize_output_",
      "aten::as_strided",
      "aten::copy_",
      "aten::empty",
      "aten::empty_strided",
      "aten::is_pinned",
      "aten::is_set_to",
      "aten::record_stream",
      "aten::resize_",
      "aten::set_",
  };
  return *kNames;
}

bool is_view(const c10::Argument& result) { return result.alias_info() != nullptr && !result.alias_info()->isWrite(); }

bool is_replaced(const c10::OperatorHandle& op) {
  using c10::DispatchKey;
  const auto& returns = op.schema().returns();
  return op.hasKernelForDispatchKey(DispatchKey::CUDA) &&
         (op.hasKernelForDispatchKey(DispatchKey::CPU) ||
          op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd)) &&
         std::none_of(returns.begin(), returns.end(), is_view) && kept().count(op.operator_name().name) == 0;
}

// -- What takes a kernel's place on the stream.

// By their place among what the operator returns.
using Results = std::vector<std::pair<std::size_t, at::Tensor>>;

struct Launch {
  c10::OperatorHandle op;
  Stack arguments;  // over the devices' memory
  Results results;  // that go into new tensors
};

// The same memory, as the CPU's.
at::Tensor on_cpu(const at::Tensor& tensor) {
  if (!tensor.is_cuda()) {  // its value now
    return tensor.unsafeGetTensorImpl()->is_wrapped_number() ? tensor : tensor.clone();
  }
  TORCH_CHECK(tensor.layout() == at::kStrided, "CUDA stand-in: only dense tensors");
  const auto options = tensor.options().device(at::kCPU);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  at::Tensor alias = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
  if (tensor.is_conj()) alias = alias.conj();
  if (tensor.is_neg()) alias = alias._neg_view();
  return alias;
}

void run(void* data) {
  const auto& launch = *static_cast<const Launch*>(data);
  const at::AutoDispatchBelowADInplaceOrView below;
  Stack stack = launch.arguments;
  launch.op.callBoxed(stack);
  for (const auto& [number, result] : launch.results) result.copy_(stack[number].toTensor());
}

void end(void* data) { delete static_cast<Launch*>(data); }

void add_range(const at::Tensor& tensor, bool writes, std::vector<StandinRange>* ranges) {
  if (!tensor.is_cuda() || tensor.numel() == 0) return;
  std::int64_t last = 0;
  for (std::int64_t k = 0; k < tensor.dim(); ++k) last += (tensor.size(k) - 1) * tensor.stride(k);
  const auto elements = static_cast<std::size_t>(last + 1);
  ranges->push_back(
      {reinterpret_cast<CUdeviceptr>(tensor.data_ptr()), elements * tensor.element_size(), writes ? 1 : 0});
}

// REQUIRES: the tensors' device is the current one.
void launch(const c10::OperatorHandle& op, const Stack& arguments, const Results& results) {
  std::vector<StandinRange> ranges;
  for (std::size_t k = 0; k < arguments.size(); ++k) {
    const bool writes = is_written(op.schema().arguments()[k]);
    for_each_tensor(arguments[k], [&](const at::Tensor& tensor) { add_range(tensor, writes, &ranges); });
  }
  auto* const job = new Launch{op, moved_to(arguments, at::kCPU, on_cpu), {}};
  for (const auto& [number, result] : results) {
    add_range(result, /*writes=*/true, &ranges);
    job->results.emplace_back(number, on_cpu(result));
  }
  const auto name = toString(op.operator_name());
  const auto stream = c10::cuda::getCurrentCUDAStream().stream();
  C10_CUDA_CHECK(cudaSetDevice(c10::cuda::current_device()));  // its context is this thread's now
  C10_CUDA_CHECK(
      static_cast<cudaError_t>(standin_launch(stream, name.c_str(), &run, &end, job, ranges.data(), ranges.size())));
}

// -- The operators.

bool is_new_tensor(const c10::Argument& result) {
  return result.alias_info() == nullptr && result.type()->kind() == c10::TypeKind::TensorType;
}

c10::Device device_of(const Stack& arguments) {
  c10::Device found(at::kCUDA);
  for (const IValue& value : arguments) {
    if (value.isDevice() && value.toDevice().is_cuda()) found = value.toDevice();
    for_each_tensor(value, [&](const at::Tensor& tensor) {
      if (tensor.is_cuda()) found = tensor.device();
    });
  }
  return found.has_index() ? found : c10::Device(at::kCUDA, c10::cuda::current_device());
}

// Where what is returned depends on contents, or is no tensor: the stream is waited for.
void run_at_once(const c10::OperatorHandle& op, const Stack& arguments, c10::Device device, Stack* stack) {
  c10::cuda::getCurrentCUDAStream().synchronize();
  Stack returned = moved_to(arguments, at::kCPU, on_cpu);
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(returned);
  }
  for (const IValue& value : returned) {
    stack->push_back(with_tensors(value, [&](const at::Tensor& tensor) { return tensor.to(device); }));
  }
}

void run_into_new_tensors(const c10::OperatorHandle& op, const Stack& arguments, const Shapes& shapes,
                          c10::Device device, Stack* stack) {
  Stack returned = shapes.returns;
  Results results;
  for (std::size_t k = 0; k < returned.size(); ++k) {
    const at::Tensor& shape = shapes.returns[k].toTensor();
    if (!shape.defined()) continue;
    const auto options = shape.options().device(device);
    results.emplace_back(k, at::empty_strided(shape.sizes(), shape.strides(), options));
    returned[k] = results.back().second;
  }
  launch(op, arguments, results);
  stack->insert(stack->end(), returned.begin(), returned.end());
}

// Gives tensors that are passed to be written (`out`) the shape that they will have.
void resize_outputs(const c10::FunctionSchema& schema, const Stack& arguments, const Shapes& shapes) {
  for (std::size_t k = 0; k < arguments.size(); ++k) {
    if (!is_written(schema.arguments()[k]) || !arguments[k].isTensor()) continue;
    const at::Tensor& tensor = arguments[k].toTensor();
    const at::Tensor& shape = shapes.arguments[k].toTensor();
    if (tensor.defined() && tensor.sizes() != shape.sizes()) tensor.resize_(shape.sizes());
  }
}

void run_in_place(const c10::OperatorHandle& op, const Stack& arguments, Stack* stack) {
  launch(op, arguments, {});
  // What is returned is what was passed to be written, in that order.
  std::size_t left = op.schema().returns().size();
  for (std::size_t k = 0; k < arguments.size() && left > 0; ++k) {
    if (!is_written(op.schema().arguments()[k])) continue;
    stack->push_back(arguments[k]);
    --left;
  }
}

void as_kernel(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const Stack arguments = torch::jit::pop(*stack, schema.arguments().size());
  const c10::Device device = device_of(arguments);
  const c10::cuda::CUDAGuard guard(device);
  if (!schema.arguments().empty() && is_written(schema.arguments()[0])) {
    run_in_place(op, arguments, stack);
    return;
  }
  const bool writes = std::any_of(schema.arguments().begin(), schema.arguments().end(), is_written);
  const bool makes_tensors = std::all_of(schema.returns().begin(), schema.returns().end(), is_new_tensor);
  if (!writes && !makes_tensors) {
    run_at_once(op, arguments, device, stack);
    return;
  }
  const Shapes& shapes = shapes_of(op, arguments);
  if (!shapes.known) {
    run_at_once(op, arguments, device, stack);
  } else if (writes) {
    resize_outputs(schema, arguments, shapes);
    run_in_place(op, arguments, stack);
  } else {
    run_into_new_tensors(op, arguments, shapes, device, stack);
  }
}

// -- Copies: CUDA's own where it can make them.

bool is_plain_copy(const at::Tensor& to, const at::Tensor& from) {
  if (!to.is_cuda() || !from.is_cuda()) return true;
  if (to.scalar_type() != from.scalar_type() || to.is_conj() != from.is_conj() || to.is_neg() != from.is_neg() ||
      to.sizes() != from.sizes()) {
    return false;
  }
  return (to.is_contiguous() && from.is_contiguous()) ||
         (to.strides() == from.strides() && to.is_non_overlapping_and_dense());
}

at::Tensor& copy(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  if (is_plain_copy(to, from)) return at::native::copy_(to, from, non_blocking);
  if (to.device() != from.device()) {  // as torch does without peers: what has gaps is gathered first
    at::Tensor whole = at::empty(to.sizes(), to.options());
    at::native::copy_(whole, from.expand_as(to).to(to.scalar_type()).contiguous(), non_blocking);
    return copy(to, whole, non_blocking);
  }
  const c10::cuda::CUDAGuard guard(to.device());
  launch(c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", ""), {to, from.expand_as(to), non_blocking}, {});
  return to;
}

// torch warns of operators that are registered twice.
struct NoWarnings final : c10::WarningHandler {
  void process(const c10::Warning& /*warning*/) override {}
};

[[maybe_unused]] const bool registered = [] {
  NoWarnings nothing;
  const c10::WarningUtils::WarningHandlerGuard quiet(&nothing);
  static auto* const library =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (name.getNamespace() != "aten" || !op || !is_replaced(*op)) continue;
    library->impl(toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&as_kernel>());
  }
  library->impl("copy_", TORCH_FN(copy));
  return true;
}();

}  // namespace
}  // namespace standin
