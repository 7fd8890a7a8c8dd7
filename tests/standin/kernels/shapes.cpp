#include "kernels/shapes.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided.h>

#include <map>
#include <mutex>
#include <sstream>
#include <string>

namespace standin {
namespace {

void describe(const at::Tensor& tensor, std::ostream& out) {
  out << tensor.device().type() << tensor.scalar_type() << tensor.sizes() << tensor.strides()
      << tensor.unsafeGetTensorImpl()->is_wrapped_number();
}

std::string key_of(const c10::OperatorHandle& op, const Stack& arguments) {
  std::ostringstream out;
  out << op.operator_name();
  for (const IValue& value : arguments) {
    out << ';';
    bool has_tensors = value.isTensorList() || value.isOptionalTensorList() || value.isTensor();
    for_each_tensor(value, [&](const at::Tensor& tensor) { describe(tensor, out); });
    if (!has_tensors && !value.isGenerator()) out << value;
  }
  return out.str();
}

// A number in a tensor of its own keeps its value.
at::Tensor on_meta(const at::Tensor& tensor) {
  if (!tensor.is_cuda()) return tensor;
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

Shapes ask(const c10::OperatorHandle& op, const Stack& arguments) {
  Shapes found;
  found.arguments = moved_to(arguments, at::kMeta, on_meta);
  found.returns = found.arguments;
  try {
    const at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(found.returns);
    found.known = true;
  } catch (const c10::NotImplementedError&) {
  }
  return found;
}

}  // namespace

// Each question once: torch answers many of them in Python, which takes half a millisecond.
const Shapes& shapes_of(const c10::OperatorHandle& op, const Stack& arguments) {
  static std::mutex mutex;
  static auto* const answers = new std::map<std::string, Shapes>;
  const std::string key = key_of(op, arguments);
  {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto known = answers->find(key);
    if (known != answers->end()) return known->second;
  }
  Shapes found = ask(op, arguments);
  const std::lock_guard<std::mutex> lock(mutex);
  return answers->emplace(key, std::move(found)).first->second;
}

}  // namespace standin
