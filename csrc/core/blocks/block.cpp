#include "core/blocks/block.h"

namespace vmm {

Block* join_lists(Block* first, Block* rest) {
  if (first == nullptr) return rest;
  Block* last = first;
  while (last->bin_next != nullptr) last = last->bin_next;
  last->bin_next = rest;
  return first;
}

}  // namespace vmm
