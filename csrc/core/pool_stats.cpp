// Pool: its numbers, its snapshot, and the proof that they add up.
#include <algorithm>
#include <array>
#include <iterator>
#include <set>

#include "base/check.h"
#include "core/pool.h"

namespace vmm {

// Free stretches in chunks that are partly used: of the small pool in slabs,
// of the large pool between blocks. What a pinned pool has free is among them:
// it cannot be given back either.
void Pool::refresh_inactive_split() {
  const MutexLock lock(mutex_);
  if (range_ == nullptr) return;
  give_up_spare_slabs();
  constexpr auto kSmall = static_cast<std::size_t>(SizeClass::small_pool);
  constexpr auto kLarge = static_cast<std::size_t>(SizeClass::large_pool);
  BySizeClass count{};
  BySizeClass bytes{};
  for (const StreamState& stream : streams_) {
    if (stream.small == nullptr) continue;
    for (const Block* block : stream.small->stretches()) {
      for (; block != nullptr; block = block->next) {
        if (block->state != BlockState::free) continue;
        ++count[kSmall];
        bytes[kSmall] += block->size;
      }
    }
  }
  std::set<std::size_t> idle;
  for (const auto& [size, chunks] : idle_chunks(kNeutral, Idle::all)) {
    for (const IdleChunk& chunk : chunks) idle.insert(chunk.offset);
  }
  for (const Block* block : large_.free_blocks()) {
    bool open = false;
    auto at = range_->covering(block->offset);
    if (at == range_->live().end()) at = range_->from(block->offset);
    for (; at != range_->live().end() && at->first < block->end(); ++at) {
      if (idle.count(at->first) != 0) {
        open = false;
        continue;
      }
      const std::size_t end = at->first + at->second.chunk->size;
      if (!open) ++count[kLarge];
      open = std::next(at) != range_->live().end() && std::next(at)->first == end;
      bytes[kLarge] += std::min(end, block->end()) - std::max(at->first, block->offset);
    }
  }
  set_inactive_split(count, bytes);
}

void Pool::set_inactive_split(const BySizeClass& count, const BySizeClass& bytes) {
  const auto set = [this](StatKind kind, SizeClass size_class, std::size_t value) VMM_REQUIRES(mutex_) {
    const auto now = static_cast<std::size_t>(statistics_[kind][1 + static_cast<std::size_t>(size_class)].current);
    if (value < now) count_down(kind, size_class, now - value);
    if (value > now) count_up(kind, size_class, value - now);
  };
  for (const SizeClass size_class : {SizeClass::small_pool, SizeClass::large_pool}) {
    set(StatKind::inactive_split, size_class, count.at(static_cast<std::size_t>(size_class)));
    set(StatKind::inactive_split_bytes, size_class, bytes.at(static_cast<std::size_t>(size_class)));
  }
}

MemoryStats Pool::memory_stats() {
  const MutexLock lock(mutex_);
  return memory_stats_locked();
}

MemoryStats Pool::memory_stats_locked() {
  MemoryStats stats;
  stats.virtual_capacity = capacity_;
  if (range_ == nullptr) return stats;
  settle_locked();
  give_up_spare_slabs();
  stats.physical_usage = range_->mapped_bytes();
  stats.mapped_pages = stats.physical_usage / page_;
  stats.allocated_bytes = static_cast<std::size_t>(statistics_[StatKind::allocated_bytes][0].current);
  stats.quarantined_bytes = pending_bytes_ + quarantined_bytes_;
  for (const auto& [size, chunks] : idle_chunks(kNeutral, Idle::all)) stats.idle_bytes += size * chunks.size();
  stats.stranded_bytes = stats.physical_usage - stats.allocated_bytes - stats.idle_bytes - stats.quarantined_bytes;
  if (stats.physical_usage != 0) {
    stats.fragmentation_ratio = static_cast<double>(stats.stranded_bytes) / static_cast<double>(stats.physical_usage);
  }
  return stats;
}

Statistics Pool::statistics() const {
  const MutexLock lock(mutex_);
  return statistics_;
}

std::size_t Pool::physical_bytes() const {
  const MutexLock lock(mutex_);
  return range_ == nullptr ? 0 : range_->mapped_bytes();
}

std::size_t Pool::idle_bytes() { return memory_stats().idle_bytes; }

std::vector<Address> Pool::live_addresses() const {
  const MutexLock lock(mutex_);
  std::vector<Address> found;
  found.reserve(live_.size());
  live_.for_each([&](std::size_t offset, const Block* /*block*/) { found.push_back(base_ + offset); });
  return found;
}

std::vector<ChunkView> Pool::chunks_under(Address address, std::size_t bytes) const {
  const MutexLock lock(mutex_);
  std::vector<ChunkView> found;
  if (range_ == nullptr || !contains(address)) return found;
  for (auto at = range_->covering(address - base_); at != range_->live().end(); ++at) {
    if (at->first >= address - base_ + bytes) break;
    const Chunk& chunk = *at->second.chunk;
    found.push_back({base_ + at->first, chunk.size, chunk.handle, chunk.exportable});
  }
  return found;
}

std::vector<ChunkView> Pool::chunks_to_export(Address address, std::size_t bytes) {
  {
    const MutexLock lock(mutex_);
    if (range_ != nullptr && contains(address)) {
      for (auto at = range_->covering(address - base_); at != range_->live().end(); ++at) {
        if (at->first >= address - base_ + bytes) break;
        at->second.chunk->exported = true;
      }
    }
  }
  return chunks_under(address, bytes);
}

Status Pool::add_accessor(Location who) {
  const MutexLock lock(mutex_);
  auto& accessors = context_.accessors;
  if (range_ == nullptr || std::find(accessors.begin(), accessors.end(), who) != accessors.end()) return {};
  const auto& live = range_->live();
  for (auto first = live.begin(); first != live.end();) {
    // One call a run: cost is per chunk all the same.
    auto last = first;
    std::size_t end = first->first + first->second.chunk->size;
    while (++last != live.end() && last->first == end) end += last->second.chunk->size;
    const Status status = range_->set_access({first->first, end - first->first}, who, Access::read_write);
    if (!status.ok()) return status;  // given twice is given once: the caller may try again
    first = last;
  }
  accessors.push_back(who);
  return {};
}

void Pool::follow_family_peaks() {
  const MutexLock lock(mutex_);
  if (family_peaks_ != nullptr) return;
  family_peaks_ = std::make_unique<Peaks>();
  family_seat_ = std::make_unique<Peaks::Seat>(*family_peaks_);
  family_seat_->start_from(statistics_);
}

Peaks* Pool::family_peaks() const {
  const MutexLock lock(mutex_);
  return family_peaks_.get();
}

void Pool::inherit(const Statistics& of_part) {
  const MutexLock lock(mutex_);
  inherited_.add_totals(of_part);
}

Statistics Pool::inherited() const {
  const MutexLock lock(mutex_);
  return inherited_;
}

std::size_t Pool::live_bytes() const {
  const MutexLock lock(mutex_);
  return live_bytes_locked();
}

std::size_t Pool::live_bytes_locked() const {
  return static_cast<std::size_t>(statistics_[StatKind::allocated_bytes][0].current);
}

std::size_t Pool::live_blocks() const {
  const MutexLock lock(mutex_);
  return live_blocks_locked();
}

std::size_t Pool::streams_known() const {
  const MutexLock lock(mutex_);
  return streams_.size() - 1;  // without the neutral tag's
}

void Pool::count_retry() {
  const MutexLock lock(mutex_);
  ++statistics_.num_alloc_retries;
}

void Pool::count_oom() {
  const MutexLock lock(mutex_);
  ++statistics_.num_ooms;
}

void Pool::count_sync() {
  const MutexLock lock(mutex_);
  ++statistics_.num_sync_all_streams;
}

void Pool::reset_peaks() {
  const MutexLock lock(mutex_);
  statistics_.reset_peaks();
  inherited_.reset_peaks();
  if (family_peaks_ != nullptr) family_peaks_->reset_peaks();
}

void Pool::reset_accumulated() {
  const MutexLock lock(mutex_);
  statistics_.reset_accumulated();
  inherited_.reset_accumulated();
}

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
      if (mapping->first == offset) begin(offset, mapping->second.number, size_class, stream);
      append(piece, requested, state);
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
      return BlockSnapshot::State::allocated;
    case BlockState::pending:
      return BlockSnapshot::State::pending_free;
    default:
      return BlockSnapshot::State::inactive;
  }
}

const Block* slab_head(const BlockHeap& small, std::size_t offset) {
  const auto& heads = small.stretches();
  const auto at = std::lower_bound(heads.begin(), heads.end(), offset,
                                   [](const Block* head, std::size_t wanted) { return head->offset < wanted; });
  VMM_CHECK(at != heads.end() && (*at)->offset == offset, "no blocks for the slab at ", offset);
  return *at;
}

}  // namespace

std::vector<SegmentSnapshot> Pool::snapshot(SnapshotGrain grain) const {
  const MutexLock lock(mutex_);
  std::vector<SegmentSnapshot> segments;
  if (range_ == nullptr) return segments;
  SegmentBuilder builder(*range_, grain, segments);
  for (const Block* block = large_.stretches().front(); block != nullptr; block = block->next) {
    Stream stream = streams_[block->tag].stream;
    if (block->state == BlockState::slab) {
      builder.cut();
      for (const Block* piece = slab_head(*streams_[block->tag].small, block->offset); piece != nullptr;
           piece = piece->next) {
        builder.add(piece->offset, piece->size, piece->requested, state_of(*piece), SizeClass::small_pool, stream);
      }
      builder.cut();
      continue;
    }
    if (block->state != BlockState::free && block->state != BlockState::retired) {
      builder.add(block->offset, block->size, block->requested, state_of(*block), SizeClass::large_pool, stream);
      continue;
    }
    // Free space may have holes: only its mapped parts are part of a segment.
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

void Pool::check() const {
  const MutexLock lock(mutex_);
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
  const auto count_block = [&](const Block& block) VMM_REQUIRES(mutex_) {
    if (block.state == BlockState::free || block.state == BlockState::slab || block.state == BlockState::retired) {
      return;
    }
    if (block.state == BlockState::pending) {
      pending += block.size;
      requested += block.requested;
      return;
    }
    if (block.state == BlockState::quarantined) {
      quarantined += block.size;
      return;
    }
    VMM_CHECK(block.state == BlockState::pages || live_.find(block.offset) == &block, "live block at ", block.offset);
    used_bytes += block.size;
    requested += block.requested;
    ++used_blocks;
    if (block.state == BlockState::pages) pages += block.size;
  };
  for (const Block* block = large_.stretches().front(); block != nullptr; block = block->next) {
    count_block(*block);
    switch (block->state) {
      case BlockState::slab:
        ++slabs;
        VMM_CHECK(slabs_.count(block->offset) == 1, "slab at ", block->offset);
        for (const Block* piece = slab_head(*streams_[block->tag].small, block->offset); piece != nullptr;
             piece = piece->next) {
          count_block(*piece);
        }
        [[fallthrough]];
      case BlockState::used:
      case BlockState::pages:
      case BlockState::pending:
      case BlockState::quarantined:
        VMM_CHECK(range_->missing_bytes(block->range()) == 0, "nothing under the block at ", block->offset);
        break;
      case BlockState::retired:
        ++retired;
        VMM_CHECK(range_->missing_bytes(block->range()) == block->size, "a mapping under the retired ", block->offset);
        break;
      case BlockState::free:
        VMM_CHECK(block->tag != kNeutral || range_->missing_bytes(block->range()) == block->size,
                  "memory under the neutral block at ", block->offset);
        break;
    }
  }
  for (const StreamState& stream : streams_) {
    if (stream.small != nullptr) stream.small->check();
  }
  VMM_CHECK(slabs == slabs_.size() && retired == retired_blocks_.size() && retired == range_->retired_count(), "slabs ",
            slabs, " retired ", retired);
  VMM_CHECK(used_blocks == live_.size() + pages_.size(), "blocks: walked ", used_blocks, ", indexed ",
            live_.size() + pages_.size());
  VMM_CHECK(pending == pending_bytes_ && pages == page_bytes_ && quarantined == quarantined_bytes_, "pending ", pending,
            " pages ", pages, " quarantined ", quarantined);
  VMM_CHECK(in_vain_.empty(), "mappings in vain: ", in_vain_.size());
  std::size_t of_streams = 0;
  for (const StreamState& stream : streams_) of_streams += stream.blocks;
  VMM_CHECK(of_streams == used_blocks + pending_.size(), "blocks: of streams ", of_streams, ", walked ",
            used_blocks + pending_.size());
  std::set<const Chunk*> seen;
  std::size_t mapped = 0;
  for (const auto& [offset, mapping] : range_->live()) {
    VMM_CHECK(seen.insert(mapping.chunk).second, "one chunk twice, the second time at ", offset);
    VMM_CHECK(mapping.chunk->charged == &budget_, "the chunk at ", offset, " is charged to ",
              mapping.chunk->charged->name());
    VMM_CHECK(mapping.chunk->content == id_ && mapping.chunk->mappings.load() >= 1, "the chunk at ", offset);
    mapped += mapping.chunk->size;
  }
  VMM_CHECK(mapped == range_->mapped_bytes(), "mapped: walked ", mapped, ", counted ", range_->mapped_bytes());
  const auto current = [this](StatKind kind) VMM_REQUIRES(mutex_) {
    const StatTriple& triple = statistics_[kind];
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
  std::size_t in_slabs = 0;
  for (const auto& [offset, slab] : slabs_) in_slabs += slab->size;
  VMM_CHECK(statistics_[StatKind::reserved_bytes][1].current == static_cast<std::int64_t>(in_slabs),
            "reserved for small blocks: slabs of ", in_slabs);
}

}  // namespace vmm
