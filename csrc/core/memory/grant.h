// What was gathered elsewhere for one request: chunks, and charges for chunks
// yet to be created. It never knows where they came from.
#pragma once

#include <cstddef>
#include <span>

#include "core/limits/budget.h"
#include "core/memory/chunk_store.h"
#include "core/memory/dormant_mappings.h"

namespace vmm {

// Which idle chunks of others a request is after.
struct WantedChunks {
  std::size_t bytes = 0;                              // about so many
  std::size_t unit = 0;                               // that leave whole units (is_of_units()); 0: any
  std::size_t most = kUnlimited;                      // each no larger
  std::span<const DormantMappings::Dormant> first{};  // these, whatever `bytes` says
};

// What is not used goes back when it ends.
class Grant {
 public:
  Grant(ChunkStore& store, Budget& group, Budget& payer) : store_(store), group_(group), payer_(payer) {}
  Grant(const Grant&) = delete;
  Grant& operator=(const Grant&) = delete;
  ~Grant();

  ChunkShelf chunks;              // charged to the payer
  std::size_t prepaid_bytes = 0;  // charged to the payer, for chunks yet to be created
  // On which terms the request is met; without a grant both are so.
  bool units_only = false;    // where its pool's chunks are units: not by others, nor to the page
  bool keeps_margin = false;  // new memory does not come of the margin (GrowthPolicy::margin())

  // Its chunks go to the group's shelf.
  void shelve();
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
