#include "core/numbers/pool_counters.h"

namespace vmm {

void PoolCounters::rose(StatKind kind, SizeClass size_class, std::size_t amount) {
  statistics_.increase(kind, size_class, amount);
  own_seat_.rose(kind, size_class, statistics_[kind]);
  seat_.rose(kind, size_class, statistics_[kind]);
  if (family_seat_ != nullptr) family_seat_->rose(kind, size_class, statistics_[kind]);
}

void PoolCounters::fell(StatKind kind, SizeClass size_class, std::size_t amount) {
  statistics_.decrease(kind, size_class, amount);
  own_seat_.fell(kind, size_class, statistics_[kind]);
  seat_.fell(kind, size_class, statistics_[kind]);
  if (family_seat_ != nullptr) family_seat_->fell(kind, size_class, statistics_[kind]);
}

// What changes hands between the small and the large pool has gone from the one
// and come to the other, so `freed` and `allocated` of all rise as well.
void PoolCounters::reclassify(StatKind kind, SizeClass from, SizeClass to, std::size_t amount) {
  fell(kind, from, amount);
  rose(kind, to, amount);
}

void PoolCounters::block_began(const Block& block) {
  const SizeClass size_class = size_class_of(block);
  rose(StatKind::allocation, size_class, 1);
  rose(StatKind::allocated_bytes, size_class, block.size());
  rose(StatKind::active, size_class, 1);
  rose(StatKind::active_bytes, size_class, block.size());
  rose(StatKind::requested_bytes, size_class, block.requested);
  if (block.oversize) statistics_.oversize_allocations.increase(1);
}

void PoolCounters::block_ended(const Block& block) {
  const SizeClass size_class = size_class_of(block);
  fell(StatKind::allocation, size_class, 1);
  fell(StatKind::allocated_bytes, size_class, block.size());
  if (block.oversize) statistics_.oversize_allocations.decrease(1);
}

void PoolCounters::block_finished(const Block& block) {
  const SizeClass size_class = size_class_of(block);
  fell(StatKind::active, size_class, 1);
  fell(StatKind::active_bytes, size_class, block.size());
  fell(StatKind::requested_bytes, size_class, block.requested);
}

void PoolCounters::mapped(std::size_t bytes, bool is_oversize, SizeClass size_class) {
  rose(StatKind::segment, size_class, 1);
  rose(StatKind::reserved_bytes, size_class, bytes);
  if (is_oversize) statistics_.oversize_segments.increase(1);
}

void PoolCounters::unmapped(std::size_t bytes, bool is_oversize, SizeClass size_class) {
  fell(StatKind::segment, size_class, 1);
  fell(StatKind::reserved_bytes, size_class, bytes);
  if (is_oversize) statistics_.oversize_segments.decrease(1);
}

void PoolCounters::slab_changed_hands(std::size_t bytes, bool is_whole_chunk, SizeClass from, SizeClass to) {
  reclassify(StatKind::reserved_bytes, from, to, bytes);
  if (is_whole_chunk) reclassify(StatKind::segment, from, to, 1);
}

void PoolCounters::set(StatKind kind, SizeClass size_class, std::size_t value) {
  const std::size_t now = current(kind, size_class);
  if (value < now) fell(kind, size_class, now - value);
  if (value > now) rose(kind, size_class, value - now);
}

void PoolCounters::absorb(const BlockCounts& came, BlockSeat& of_pool, BlockSeat& of_device) {
  const BlockCounts counts = of_pool.counts();
  statistics_.add_blocks(counts, came);
  Peaks::transfer(counts, of_pool, {&own_seat_, family_seat_.get()});
  Peaks::transfer(counts, of_device, {&seat_, nullptr});
}

void PoolCounters::follow_family(Peaks& family) { family_seat_ = std::make_unique<Peaks::Seat>(family); }

void PoolCounters::begin_family(Peaks& family) {
  follow_family(family);
  Statistics so_far = statistics_;
  own_.fill_peaks(so_far);
  family_seat_->start_from(so_far);
}

void PoolCounters::reset_peaks() {
  statistics_.reset_peaks();
  inherited_.reset_peaks();
  own_.reset_peaks();
}

void PoolCounters::reset_accumulated() {
  statistics_.reset_accumulated();
  inherited_.reset_accumulated();
}

}  // namespace vmm
