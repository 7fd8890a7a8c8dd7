// SleepingMemory: what is to come back, and in what order.
#include <algorithm>
#include <iterator>
#include <utility>

#include "core/pool/coming_chunks.h"
#include "core/pool/sleeping_memory.h"

namespace vmm {

// Chunks of which nothing is used any more need not come back: their addresses are bare.
void SleepingMemory::forget_unused() {
  for (auto at = asleep_->gone.begin(); at != asleep_->gone.end();) {
    const ByteRange range{at->first, at->second.size};
    if (!space_.is_free(range)) {
      ++at;
      continue;
    }
    std::vector<BackedSpace::Piece> pieces;
    Block* const bare = space_.take_range(range, BlockState::retired, &pieces);
    space_.blocks().remove_border(range.offset);  // first: it is one with the bare space below it
    space_.blocks().free(bare, kNeutral, kLongAgo);
    at = asleep_->gone.erase(at);
  }
}

namespace {

// The first `slabs` of them twice as fast as the rest, as small tensors are wanted with the
// large ones beside which they were made; but a few at once. A slab costs a mapping as any
// chunk, and the link next to nothing: of 16 GiB in 3157 tensors on another GPU all slabs at
// once took 10 ms more, 44 without them. Not on the host's bus: beside copies from there a
// mapping takes up to 1 ms and 26 us otherwise, and half of those tensors woke in 218 ms now
// and then, for 160.
std::vector<MovedChunk> slabs_in_turns(std::vector<MovedChunk> chunks, std::size_t slabs) {
  constexpr std::size_t kAtOnce = 16;
  if (slabs <= kAtOnce) return chunks;
  std::size_t total = 0;
  for (std::size_t k = slabs; k < chunks.size(); ++k) total += chunks[k].place.size;
  std::vector<MovedChunk> in_turns;
  in_turns.reserve(chunks.size());
  std::size_t next = 0;
  std::size_t done = 0;
  for (std::size_t k = slabs; k < chunks.size(); ++k) {
    const auto is_due = [&] { return next < kAtOnce || next * (total / kMiB) <= 2 * slabs * (done / kMiB); };
    while (next < slabs && is_due()) in_turns.push_back(std::move(chunks[next++]));
    done += chunks[k].place.size;
    in_turns.push_back(std::move(chunks[k]));
  }
  while (next < slabs) in_turns.push_back(std::move(chunks[next++]));
  return in_turns;
}

}  // namespace

// The blocks are walked once: for each of 177 chunks of 3157 tensors it would be 0.3 million steps.
std::vector<MovedChunk> SleepingMemory::slabs_first(std::vector<MovedChunk> chunks, std::size_t* slabs) const {
  std::vector<MovedChunk> ordered;
  std::vector<MovedChunk> others;
  const Block* block = nullptr;
  for (MovedChunk& each : chunks) {
    block = space_.blocks().covering_from(block, each.offset);
    const bool is_of_slab = block != nullptr && block->state == BlockState::slab;
    (is_of_slab ? ordered : others).push_back(std::move(each));
  }
  *slabs = ordered.size();
  std::reverse(ordered.begin(), ordered.end());  // each stands below the one that was made before it
  std::move(others.begin(), others.end(), std::back_inserter(ordered));
  return ordered;
}

std::vector<MovedChunk> SleepingMemory::plan_to_come(bool joins, KeptRanges* ended) {
  std::vector<MovedChunk> found;
  joins = joins && !space_.has_own_rule();
  const std::size_t unit = joins ? space_.unit_for(0) : 0;
  ComingChunks coming(*asleep_, space_.blocks(), space_.growth(),
                      {space_.kind().page, is_of_tag_, /*is_contested=*/group_.sharers() > 1});
  if (!space_.is_pinned()) {
    owner_.give_up_spare_slabs();
    if (joins) coming.cut_free(unit);
    forget_unused();
    // What has been freed does not come back.
    if (asleep_->kept.any() != nullptr) *ended = asleep_->kept.cut_to(contents());
  }
  if (joins) unit != 0 ? coming.join_units(unit) : coming.join_blocks();
  const auto want = [&](std::size_t offset, const PlaceOfChunk& place, const Chunk* there) {
    MovedChunk chunk{offset, place, {}, {}, there != nullptr};
    for (const KeptRange& each : asleep_->kept.within(chunk.range())) chunk.kept.push_back({each.offset, each.size});
    if (there == nullptr || !chunk.kept.empty() || !is_blanked(*there)) found.push_back(std::move(chunk));
  };
  for (const auto& [offset, place] : asleep_->gone) want(offset, place, nullptr);
  // Those that the driver would not unmap again when a wake was stopped.
  for (const auto& [offset, mapping] : space_.range().live()) {
    const ByteRange range{offset, mapping.chunk->size};
    want(offset, {range.size, is_to_be_read_only(range, mapping)}, mapping.chunk);
  }
  std::size_t slabs = 0;
  std::vector<MovedChunk> wanted = slabs_first(std::move(found), &slabs);
  const KeptRange* const kept = asleep_->kept.any();
  if (kept == nullptr) {  // the GPU zeroes large chunks while the slabs' are mapped, which has nothing else to do
    std::rotate(wanted.begin(), wanted.begin() + static_cast<std::ptrdiff_t>(slabs), wanted.end());
    return wanted;
  }
  if (!kept->backup->is_mapped_beside_copies()) return wanted;
  return slabs_in_turns(std::move(wanted), slabs);
}

}  // namespace vmm
