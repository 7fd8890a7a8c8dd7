#include "core/memory/grant.h"

namespace vmm {

void Grant::shelve() {
  while (Chunk* chunk = chunks.take_any()) store_.put(group_, chunk);
}

Grant::~Grant() {
  shelve();
  if (prepaid_bytes != 0) payer_.refund(prepaid_bytes);
}

}  // namespace vmm
