// What an operator would return, before it has run.
#pragma once

#include "kernels/arguments.h"

namespace standin {

struct Shapes {
  bool known = false;  // false: they depend on contents
  Stack arguments;     // as they are afterwards: an `out` has been resized
  Stack returns;
};

// With tensors of the meta device in the place of CUDA's. May take the GIL.
const Shapes& shapes_of(const c10::OperatorHandle& op, const Stack& arguments);

}  // namespace standin
