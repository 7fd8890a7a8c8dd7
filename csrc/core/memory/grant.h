// What was gathered elsewhere for one request: chunks, and charges for chunks
// yet to be created. It never knows where they came from.
#pragma once

#include <cstddef>

#include "core/limits/budget.h"
#include "core/memory/chunk_store.h"

namespace vmm {

// What is not used goes back when it ends.
class Grant {
 public:
  Grant(ChunkStore& store, Budget& group, Budget& payer) : store_(store), group_(group), payer_(payer) {}
  Grant(const Grant&) = delete;
  Grant& operator=(const Grant&) = delete;
  ~Grant();

  ChunkShelf chunks;              // charged to the payer
  std::size_t prepaid_bytes = 0;  // charged to the payer, for chunks yet to be created
  // Chunks are of use in whole units (GrowthPolicy::unit()); 0: those did not do or are not
  // wanted, so of any size, and the request is met to the page.
  std::size_t unit = 0;
  // New memory is not to come of the margin (GrowthPolicy::margin()).
  bool keeps_margin = false;

  [[nodiscard]] std::size_t bytes() const { return chunks.bytes() + prepaid_bytes; }
  [[nodiscard]] Budget& payer() const { return payer_; }
  // Where its chunks come from.
  [[nodiscard]] const ChunkStore& store() const { return store_; }

 private:
  ChunkStore& store_;
  Budget& group_;
  Budget& payer_;
};

}  // namespace vmm
