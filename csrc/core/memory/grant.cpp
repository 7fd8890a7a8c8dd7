#include "core/memory/grant.h"

namespace vmm {

Grant::~Grant() {
  while (Chunk* chunk = chunks.take_any()) store_.put(group_, chunk);
  if (prepaid_bytes != 0) payer_.refund(prepaid_bytes);
}

}  // namespace vmm
