// Pool: its segments and blocks, as torch's snapshots show them, and which blocks live. Walks
// everything.
#include <algorithm>

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

std::size_t requested_of(const Block& block) { return block.is_active() ? block.requested : 0; }

}  // namespace

std::vector<SegmentSnapshot> Pool::snapshot(SnapshotGrain grain) const {
  const BlockCaches::Still still(context_.caches, *this, BlockCaches::Kept::back);
  const ReadLock lock(*this);
  std::vector<SegmentSnapshot> segments;
  if (!space_.is_open() || sleeping_.is_asleep()) return segments;
  SegmentBuilder builder(space_.range(), grain, segments);
  for (const Block* block = space_.blocks().stretches().front(); block != nullptr; block = block->next) {
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
    if (!block->is_nobodys()) {
      builder.add(block->offset, block->size(), requested_of(*block), state_of(*block), SizeClass::large_pool, stream);
      continue;
    }
    // It may have holes: only its mapped parts are part of a segment.
    std::size_t at = block->offset;
    for (const ByteRange& gap : space_.range().gaps(block->range())) {
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

std::vector<Address> Pool::live_addresses() const {
  const ReadLock lock(*this);
  std::vector<Address> found;
  directory_->for_each([&](const Block* block) {
    if (block->is_live()) found.push_back(base_ + block->offset);
  });
  return found;
}

}  // namespace vmm
