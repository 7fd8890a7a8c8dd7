// Pool: its numbers, its snapshot, and the proof that they add up.
#include <algorithm>
#include <array>
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

}  // namespace vmm
