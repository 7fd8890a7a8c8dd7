// An operator's arguments as a stack of values: finding the tensors in them,
// and putting others in their place.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <optional>

namespace standin {

using c10::IValue;
using torch::jit::Stack;

// `value` with `map(tensor)` in the place of every tensor in it.
template <typename Map>
IValue with_tensors(const IValue& value, const Map& map) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(map(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(tensor.defined() ? map(tensor) : tensor);
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor && tensor->defined() ? std::optional<at::Tensor>(map(*tensor)) : tensor);
    }
    return list;
  }
  return value;
}

template <typename Visit>
void for_each_tensor(const IValue& value, const Visit& visit) {
  (void)with_tensors(value, [&](const at::Tensor& tensor) {
    visit(tensor);
    return tensor;
  });
}

// The same for another kind of device: CUDA devices that are named, too, and no
// generators, which each kind has its own of.
template <typename Map>
Stack moved_to(const Stack& arguments, c10::DeviceType device, const Map& map) {
  Stack found;
  for (const IValue& value : arguments) {
    if (value.isDevice() && value.toDevice().is_cuda()) {
      found.emplace_back(c10::Device(device));
    } else if (value.isGenerator()) {
      found.emplace_back();
    } else {
      found.push_back(with_tensors(value, map));
    }
  }
  return found;
}

inline bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

}  // namespace standin
