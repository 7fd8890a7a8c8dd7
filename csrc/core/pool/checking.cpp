// Pool: the proof that everything adds up: blocks against memory, lists and indexes,
// chunks against what they are charged to, and all of it against the statistics. It walks
// everything, and aborts with the values where they differ.
#include <set>

#include "base/check.h"
#include "core/pool/pool.h"

namespace vmm {

// What a walk over all blocks found: bytes, but for what is named otherwise.
struct Pool::Walked {
  std::size_t used_bytes = 0;
  std::size_t used_blocks = 0;  // blocks
  std::size_t requested = 0;
  std::size_t pending = 0;
  std::size_t quarantined = 0;
  std::size_t slabs = 0;    // slabs
  std::size_t retired = 0;  // blocks
  std::size_t retired_bytes = 0;
  std::size_t kept = 0;      // blocks that threads keep
  std::size_t recorded = 0;  // blocks that other streams used
  std::size_t watched = 0;   // blocks
  std::size_t guard_mapped = 0;
  std::size_t guard_bare = 0;
};

void Pool::check() const {
  const StillLock lock(*this, BlockCaches::Kept::stays);
  if (!space_.is_open()) return;
  space_.blocks().check();
  Walked walked;
  for (const Block* block = space_.blocks().stretches().front(); block != nullptr; block = block->next) {
    count(*block, &walked);
    if (!sleeping_.is_asleep()) check_memory_under(*block, &walked);
    if (block->state != BlockState::slab) continue;
    VMM_CHECK(slabs_.holds(*block), "slab at ", block->offset);
    for (const Block* piece = slabs_.first_piece(*block); piece != nullptr; piece = piece->next) {
      count(*piece, &walked);
    }
  }
  slabs_.check();
  if (!sleeping_.is_asleep()) check_lists(walked);
  check_statistics(walked, check_chunks());
  if (walked.kept == 0 && !sleeping_.is_asleep()) check_free_space(space_, slabs_, taken_bytes());
}

void Pool::count(const Block& block, Walked* walked) const {
  if (block.is_nobodys() || block.state == BlockState::slab) return;
  if (block.state == BlockState::pending) {
    walked->pending += block.size();
    walked->watched += watched_.is_watched(block.offset) ? 1 : 0;
    walked->requested += block.requested;
    return;
  }
  if (block.state == BlockState::quarantined) {
    walked->quarantined += block.size();
    return;
  }
  const bool is_pages = block.state == BlockState::pages;
  VMM_CHECK((is_pages ? pages_.covering(block.offset) : directory_->find(block.offset)) == &block, "live block at ",
            block.offset);
  if (block.state == BlockState::cached) {
    ++walked->kept;
    return;
  }
  walked->used_bytes += block.size();
  walked->requested += block.requested;
  ++walked->used_blocks;
  if (block.recorded != 0) ++walked->recorded;
  if (block.state == BlockState::watched) ++walked->watched;
}

void Pool::check_memory_under(const Block& block, Walked* walked) const {
  switch (const BlockState state = block.state; state) {
    case BlockState::slab:
      ++walked->slabs;
      [[fallthrough]];
    case BlockState::used:
    case BlockState::watched:
    case BlockState::cached:
    case BlockState::pages:
    case BlockState::pending:
    case BlockState::quarantined:
      VMM_CHECK(space_.range().missing_bytes(block.range()) == 0, "nothing under the block at ", block.offset);
      break;
    case BlockState::retired:
      ++walked->retired;
      walked->retired_bytes += block.size();
      VMM_CHECK(space_.range().missing_bytes(block.range()) == block.size(), "a mapping under the retired ",
                block.offset);
      break;
    case BlockState::guard: {
      const std::size_t missing = space_.range().missing_bytes(block.range());
      VMM_CHECK(missing == 0 || missing == block.size(), "the guard at ", block.offset, "+", block.size(), " lacks ",
                missing);
      (missing == 0 ? walked->guard_mapped : walked->guard_bare) += block.size();
      break;
    }
    case BlockState::free:
      // Wholly bare or wholly backed: placement takes the one for the other nowhere.
      VMM_CHECK(space_.range().missing_bytes(block.range()) == (block.tag == kNeutral ? block.size() : 0),
                "free block of tag ", block.tag, " at ", block.offset, "+", block.size(), " lacks ",
                space_.range().missing_bytes(block.range()));
      break;
  }
}

void Pool::check_lists(const Walked& walked) const {
  VMM_CHECK(walked.slabs == slabs_.size() && walked.retired == space_.retired().size() &&
                walked.retired == space_.range().retired_count(),
            "slabs ", walked.slabs, " retired ", walked.retired);
  VMM_CHECK(walked.retired_bytes == space_.retired().bytes(), "retired: walked ", walked.retired_bytes, ", counted ",
            space_.retired().bytes());
  VMM_CHECK(walked.used_blocks + walked.kept == live_blocks_locked(), "blocks: walked ", walked.used_blocks,
            " and kept ", walked.kept, ", indexed ", live_blocks_locked());
  VMM_CHECK(walked.pending == pending_bytes_ && walked.quarantined == quarantined_.bytes() + watched_.leaving_bytes(),
            "pending ", walked.pending, " quarantined ", walked.quarantined);
  VMM_CHECK(walked.watched == watched_.live() && walked.guard_mapped == watched_.mapped_bytes() &&
                walked.guard_bare == space_.bare_bytes(),
            "watched ", walked.watched, " of ", watched_.live(), ", guards ", walked.guard_mapped, " of ",
            watched_.mapped_bytes(), " and ", walked.guard_bare, " of ", space_.bare_bytes());
  VMM_CHECK(walked.recorded == recorded_uses_.size(), "blocks that other streams used: walked ", walked.recorded,
            ", lists ", recorded_uses_.size());
  VMM_CHECK(!space_.has_any_in_vain(), "mappings in vain are left");
  VMM_CHECK(streams_.blocks() == walked.used_blocks + walked.kept + pending_.size(), "blocks: of streams ",
            streams_.blocks(), ", walked ", walked.used_blocks + walked.kept + pending_.size());
}

std::size_t Pool::check_chunks() const {
  std::set<const Chunk*> seen;
  std::size_t mapped = 0;
  for (const auto& [offset, mapping] : space_.range().live()) {
    VMM_CHECK(seen.insert(mapping.chunk).second, "one chunk twice, the second time at ", offset);
    VMM_CHECK(mapping.chunk->charged == &budget_, "the chunk at ", offset, " is charged to ",
              mapping.chunk->charged->name());
    VMM_CHECK(mapping.chunk->content.load() == id_ && mapping.chunk->mappings.load() >= 1, "the chunk at ", offset);
    mapped += mapping.chunk->size;
  }
  VMM_CHECK(mapped == space_.range().mapped_bytes(), "mapped: walked ", mapped, ", counted ",
            space_.range().mapped_bytes());
  return mapped;
}

void Pool::check_statistics(const Walked& walked, std::size_t mapped) const {
  Statistics statistics = counters_.totals();
  own_peaks_.fill_peaks(statistics);
  const auto current = [&statistics](StatKind kind) {
    const StatTriple& triple = statistics[kind];
    VMM_CHECK(triple[0].current == triple[1].current + triple[2].current, "small and large do not add up");
    VMM_CHECK(triple[0].peak >= triple[0].current, "peak below current");
    return static_cast<std::size_t>(triple[0].current);
  };
  VMM_CHECK(current(StatKind::allocated_bytes) == walked.used_bytes, "allocated: walked ", walked.used_bytes);
  VMM_CHECK(current(StatKind::allocation) == walked.used_blocks, "allocations: walked ", walked.used_blocks);
  VMM_CHECK(current(StatKind::active_bytes) == walked.used_bytes + walked.pending, "active: walked ",
            walked.used_bytes + walked.pending);
  VMM_CHECK(current(StatKind::requested_bytes) == walked.requested, "requested: walked ", walked.requested);
  VMM_CHECK(current(StatKind::reserved_bytes) == mapped, "reserved: walked ", mapped);
  VMM_CHECK(current(StatKind::segment) == space_.range().live().size(), "segments: walked ",
            space_.range().live().size());
  VMM_CHECK(counters_.current(StatKind::reserved_bytes, SizeClass::small_pool) ==
                (sleeping_.is_asleep() ? 0 : slabs_.bytes()),
            "reserved for small blocks: slabs of ", slabs_.bytes());
}

}  // namespace vmm
