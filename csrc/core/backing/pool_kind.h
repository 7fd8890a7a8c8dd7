// What a pool is for, as long as it lives. (What another allocator provides is no pool.)
#pragma once

#include <cstdint>

namespace vmm {

enum class PoolKind : std::uint8_t {
  model,     // a model's own; the device's default; a pool of buffers
  tag,       // a part of a model: what is made under a tag
  graph,     // a part: a private pool of torch's
  mem_pool,  // a part: the same, of a torch.cuda.MemPool; libraries register what it holds, of before they came too
  range,     // a part: one tensor's addresses, held by explicit pages, which begin as zero, whoever had them
  spill,     // a part: what the model spills; its chunks are the host's, and so is the budget that pays
};

}  // namespace vmm
