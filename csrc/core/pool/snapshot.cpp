// Pool: its segments and blocks, as torch's snapshots show them, and the proof
// that everything adds up. Both walk everything.
#include <algorithm>
#include <set>

#include "base/check.h"
#include "core/pool/pool.h"

namespace vmm {

namespace {

// Collects blocks into segments: one contiguous mapped stretch of one size
// class and one stream each, or one chunk each.
class SegmentBuilder {
 public:
  SegmentBuilder(const MappedRange& range, SnapshotGrain grain, std::vector<SegmentSnapshot>& out)
      : range_(range), grain_(grain), out_(out) {}

  // The next blocks, by offset.
  void add(std::size_t offset, std::size_t size, std::size_t requested, BlockSnapshot::State state,
           SizeClass size_class, Stream stream) {
    if (grain_ == SnapshotGrain::run) {
      if (!open_ || end_ != offset || out_.back().size_class != size_class || out_.back().stream != stream) {
        begin(offset, range_.covering(offset)->second.number, size_class, stream);
      }
      append(size, requested, state);
      return;
    }
    // What a block asked for is told with its first piece.
    while (size != 0) {
      const auto mapping = range_.covering(offset);
      const std::size_t chunk_end = mapping->first + mapping->second.chunk->size;
      const std::size_t piece = std::min(size, chunk_end - offset);
      if (!mapping->second.is_withheld) {
        if (mapping->first == offset) begin(offset, mapping->second.number, size_class, stream);
        append(piece, requested, state);
      }
      offset += piece;
      size -= piece;
      requested = 0;
    }
  }
  // The next block begins a segment of its own.
  void cut() { open_ = false; }

 private:
  void begin(std::size_t offset, std::uint64_t number, SizeClass size_class, Stream stream) {
    out_.emplace_back();
    out_.back().address = range_.base() + offset;
    out_.back().number = number;
    out_.back().size_class = size_class;
    out_.back().stream = stream;
    open_ = true;
    end_ = offset;
  }
  void append(std::size_t size, std::size_t requested, BlockSnapshot::State state) {
    end_ += size;
    SegmentSnapshot& segment = out_.back();
    segment.total_size += size;
    if (state == BlockSnapshot::State::allocated) segment.allocated_size += size;
    if (state != BlockSnapshot::State::inactive) {
      segment.active_size += size;
      segment.requested_size += requested;
    }
    segment.blocks.push_back({size, requested, state});
  }

  const MappedRange& range_;
  SnapshotGrain grain_;
  std::vector<SegmentSnapshot>& out_;
  bool open_ = false;
  std::size_t end_ = 0;  // offset
};

BlockSnapshot::State state_of(const Block& block) {
  switch (block.state) {
    case BlockState::used:
    case BlockState::pages:
    case BlockState::slab:
    case BlockState::watched:
      return BlockSnapshot::State::allocated;
    case BlockState::pending:
      return BlockSnapshot::State::pending_free;
    // What a thread keeps is free to torch.
    default:
      return BlockSnapshot::State::inactive;
  }
}

// Free space, and what is beside a watched block: there may be memory under it or not.
bool is_nobodys(const Block& block) {
  const BlockState now = block.state;
  return now == BlockState::free || now == BlockState::retired || now == BlockState::guard;
}

std::size_t requested_of(const Block& block) { return block.is_active() ? block.requested : 0; }

}  // namespace

std::vector<SegmentSnapshot> Pool::snapshot(SnapshotGrain grain) const {
  const BlockCaches::Still still(context_.caches, *this, BlockCaches::Kept::back);
  const ReadLock lock(*this);
  std::vector<SegmentSnapshot> segments;
  if (range_ == nullptr) return segments;
  SegmentBuilder builder(*range_, grain, segments);
  for (const Block* block = large_.stretches().front(); block != nullptr; block = block->next) {
    Stream stream = streams_[block->tag].stream;
    // A slab that is being made has no blocks yet.
    if (block->state == BlockState::slab && slabs_.holds(*block)) {
      builder.cut();
      for (const Block* piece = slabs_.first_piece(*block); piece != nullptr; piece = piece->next) {
        builder.add(piece->offset, piece->size(), requested_of(*piece), state_of(*piece), SizeClass::small_pool,
                    stream);
      }
      builder.cut();
      continue;
    }
    if (!is_nobodys(*block)) {
      builder.add(block->offset, block->size(), requested_of(*block), state_of(*block), SizeClass::large_pool, stream);
      continue;
    }
    // It may have holes: only its mapped parts are part of a segment.
    std::size_t at = block->offset;
    for (const ByteRange& gap : range_->gaps(block->range())) {
      if (gap.offset > at) {
        builder.add(at, gap.offset - at, 0, BlockSnapshot::State::inactive, SizeClass::large_pool, stream);
      }
      builder.cut();
      at = gap.end();
    }
    if (at < block->end()) {
      builder.add(at, block->end() - at, 0, BlockSnapshot::State::inactive, SizeClass::large_pool, stream);
    }
  }
  return segments;
}

void Pool::withhold_broken_chunks() {
  const MutexLock lock(mutex_);
  if (range_ == nullptr) return;
  const bool all = uniform_ || pinned_;  // a checkpoint may bring any block of before back
  for (const auto& [offset, mapping] : range_->live()) {
    if (all) range_->withhold(offset);
    if (!uniform_) large_.add_border(offset);
  }
  for (const Block* block = large_.stretches().front(); block != nullptr; block = block->next) {
    if (is_nobodys(*block)) continue;
    auto at = range_->covering(block->offset);
    const bool is_whole = at->first + at->second.chunk->size >= block->end();
    if (is_whole && block->state != BlockState::pages) continue;
    for (; at != range_->live().end() && at->first < block->end(); ++at) range_->withhold(at->first);
  }
}

void Pool::check() const {
  const StillLock lock(*this, BlockCaches::Kept::stays);
  if (range_ == nullptr) return;
  large_.check();
  std::size_t used_bytes = 0;
  std::size_t used_blocks = 0;
  std::size_t requested = 0;
  std::size_t pending = 0;
  std::size_t pages = 0;
  std::size_t quarantined = 0;
  std::size_t slabs = 0;
  std::size_t retired = 0;
  std::size_t retired_bytes = 0;
  std::size_t kept = 0;
  std::size_t recorded = 0;
  std::size_t watched = 0;
  std::size_t guard_mapped = 0;
  std::size_t guard_bare = 0;
  const auto count_block = [&](const Block& block) VMM_REQUIRES(mutex_) {
    if (is_nobodys(block) || block.state == BlockState::slab) return;
    if (block.state == BlockState::pending) {
      pending += block.size();
      watched += watch_.live.count(block.offset);
      requested += block.requested;
      return;
    }
    if (block.state == BlockState::quarantined) {
      quarantined += block.size();
      return;
    }
    VMM_CHECK(block.state == BlockState::pages || directory_->find(block.offset) == &block, "live block at ",
              block.offset);
    if (block.state == BlockState::cached) {
      ++kept;
      return;
    }
    used_bytes += block.size();
    requested += block.requested;
    ++used_blocks;
    if (block.recorded != 0) ++recorded;
    if (block.state == BlockState::pages) pages += block.size();
    if (block.state == BlockState::watched) ++watched;
  };
  for (const Block* block = large_.stretches().front(); block != nullptr; block = block->next) {
    count_block(*block);
    const BlockState state = block->state;
    switch (state) {
      case BlockState::slab:
        ++slabs;
        VMM_CHECK(slabs_.holds(*block), "slab at ", block->offset);
        for (const Block* piece = slabs_.first_piece(*block); piece != nullptr; piece = piece->next) {
          count_block(*piece);
        }
        [[fallthrough]];
      case BlockState::used:
      case BlockState::watched:
      case BlockState::cached:
      case BlockState::pages:
      case BlockState::pending:
      case BlockState::quarantined:
        VMM_CHECK(range_->missing_bytes(block->range()) == 0, "nothing under the block at ", block->offset);
        break;
      case BlockState::retired:
        ++retired;
        retired_bytes += block->size();
        VMM_CHECK(range_->missing_bytes(block->range()) == block->size(), "a mapping under the retired ",
                  block->offset);
        break;
      case BlockState::guard: {
        const std::size_t missing = range_->missing_bytes(block->range());
        VMM_CHECK(missing == 0 || missing == block->size(), "the guard at ", block->offset, "+", block->size(),
                  " lacks ", missing);
        (missing == 0 ? guard_mapped : guard_bare) += block->size();
        break;
      }
      case BlockState::free:
        // Wholly bare or wholly backed: placement takes the one for the other nowhere.
        VMM_CHECK(range_->missing_bytes(block->range()) == (block->tag == kNeutral ? block->size() : 0),
                  "free block of tag ", block->tag, " at ", block->offset, "+", block->size(), " lacks ",
                  range_->missing_bytes(block->range()));
        break;
    }
  }
  slabs_.check();
  VMM_CHECK(slabs == slabs_.size() && retired == retired_.size() && retired == range_->retired_count(), "slabs ", slabs,
            " retired ", retired);
  VMM_CHECK(retired_bytes == retired_.bytes(), "retired: walked ", retired_bytes, ", counted ", retired_.bytes());
  VMM_CHECK(used_blocks + kept == live_blocks_locked(), "blocks: walked ", used_blocks, " and kept ", kept,
            ", indexed ", live_blocks_locked());
  VMM_CHECK(
      pending == pending_bytes_ && pages == page_bytes_ && quarantined == quarantined_.bytes() + watch_.freed_bytes,
      "pending ", pending, " pages ", pages, " quarantined ", quarantined);
  VMM_CHECK(watched == watch_.live.size() && guard_mapped == watch_.mapped_bytes && guard_bare == watch_.bare_bytes,
            "watched ", watched, " of ", watch_.live.size(), ", guards ", guard_mapped, " of ", watch_.mapped_bytes,
            " and ", guard_bare, " of ", watch_.bare_bytes);
  VMM_CHECK(recorded == recorded_uses_.size(), "blocks that other streams used: walked ", recorded, ", lists ",
            recorded_uses_.size());
  VMM_CHECK(in_vain_.empty(), "mappings in vain: ", in_vain_.size());
  VMM_CHECK(streams_.blocks() == used_blocks + kept + pending_.size(), "blocks: of streams ", streams_.blocks(),
            ", walked ", used_blocks + kept + pending_.size());
  std::set<const Chunk*> seen;
  std::size_t mapped = 0;
  for (const auto& [offset, mapping] : range_->live()) {
    VMM_CHECK(seen.insert(mapping.chunk).second, "one chunk twice, the second time at ", offset);
    VMM_CHECK(mapping.chunk->charged == &budget_, "the chunk at ", offset, " is charged to ",
              mapping.chunk->charged->name());
    VMM_CHECK(mapping.chunk->content.load() == id_ && mapping.chunk->mappings.load() >= 1, "the chunk at ", offset);
    mapped += mapping.chunk->size;
  }
  VMM_CHECK(mapped == range_->mapped_bytes(), "mapped: walked ", mapped, ", counted ", range_->mapped_bytes());
  Statistics statistics = counters_.totals();
  own_peaks_.fill_peaks(statistics);
  const auto current = [&statistics](StatKind kind) {
    const StatTriple& triple = statistics[kind];
    VMM_CHECK(triple[0].current == triple[1].current + triple[2].current, "small and large do not add up");
    VMM_CHECK(triple[0].peak >= triple[0].current, "peak below current");
    return static_cast<std::size_t>(triple[0].current);
  };
  VMM_CHECK(current(StatKind::allocated_bytes) == used_bytes, "allocated: walked ", used_bytes);
  VMM_CHECK(current(StatKind::allocation) == used_blocks, "allocations: walked ", used_blocks);
  VMM_CHECK(current(StatKind::active_bytes) == used_bytes + pending, "active: walked ", used_bytes + pending);
  VMM_CHECK(current(StatKind::requested_bytes) == requested, "requested: walked ", requested);
  VMM_CHECK(current(StatKind::reserved_bytes) == mapped, "reserved: walked ", mapped);
  VMM_CHECK(current(StatKind::segment) == range_->live().size(), "segments: walked ", range_->live().size());
  VMM_CHECK(counters_.current(StatKind::reserved_bytes, SizeClass::small_pool) == slabs_.bytes(),
            "reserved for small blocks: slabs of ", slabs_.bytes());
  if (kept == 0) check_free_space();
}

}  // namespace vmm
