// What was gathered elsewhere for one request: chunks, and charges for chunks
// yet to be created. It never knows where they came from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "core/limits/budget.h"
#include "core/memory/chunk_store.h"
#include "core/memory/dormant_mappings.h"

namespace vmm {

// With what a request is met where its pool's chunks are units (GrowthPolicy::unit()); whatever
// is missing then is created.
enum class ChunkFit : std::uint8_t {
  units,   // units alone, and none where a part of one is missing
  filled,  // chunks of other sizes too, side by side within the place of a unit
  apart,   // that, or where it would take of the margin on granted units alone, elsewhere
  any,     // and where that is in vain to the page, or on whole chunks of any size elsewhere
};

// On which terms a request is met: without a grant these.
struct Terms {
  ChunkFit fit = ChunkFit::units;
  bool keeps_margin = true;  // new memory does not come of the margin (GrowthPolicy::margin())
};

// Which idle chunks of others a request is after.
struct WantedChunks {
  std::size_t bytes = 0;                              // about so many
  std::size_t unit = 0;                               // that leave whole units (is_of_units()); 0: any
  std::size_t most = kUnlimited;                      // each no larger
  std::span<const DormantMappings::Dormant> first{};  // these, whatever `bytes` says
  bool is_unused = false;                             // no queued work uses it, as far as the clock knows
  std::optional<Stream> but_by{};                     // but this one's
  bool is_at_a_glance = false;                        // no pool is looked through for them twice
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
  Terms terms{ChunkFit::any, /*keeps_margin=*/false};

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

inline Terms terms_of(const Grant* grant) { return grant == nullptr ? Terms{} : grant->terms; }

}  // namespace vmm
