// Pool: what the threads' caches before it ask of it. A block that a thread keeps
// is still allocated here, and counted where the thread counts.
#include "core/pool/pool.h"

namespace vmm {

Block* Pool::live_at(Address address) const {
  Block* block = contains(address) ? directory_->find(address - base_) : nullptr;
  // In this order: there may be no lock, and what becomes live has its offset first.
  return block != nullptr && block->is_live() && block->offset == address - base_ ? block : nullptr;
}

Block* Pool::live_around(Address address) {
  if (Block* block = live_at(address)) return block;
  if (!space_.is_open() || !contains(address)) return nullptr;
  const std::size_t offset = address - base_;
  Block* block = space_.blocks().covering(offset);
  if (block != nullptr && slabs_.holds(*block)) block = slabs_.piece_at(*block, offset);
  return block == nullptr ? nullptr : live_at(base_ + block->offset);
}

std::size_t Pool::block_size(Address address) const {
  const Block* block = live_at(address);
  if (block == nullptr && contains(address)) {
    // The directory may be changing around it: under the lock it stands still.
    const ReadLock lock(*this);
    block = live_at(address);
  }
  return block == nullptr ? 0 : block->size();
}

std::optional<Pool::Asked> Pool::asked_at(Address address) const {
  const ReadLock lock(*this);
  const Block* const block = contains(address) ? live_at(address) : nullptr;
  if (block == nullptr) return std::nullopt;
  return Asked{block->requested, streams_[block->tag].stream};
}

// Where every event has to be seen when it happens, or the memory is no single
// stream's, nothing is kept.
bool Pool::may_keep(StreamTag tag) {
  if (kind_.is_spill()) return false;  // the bus costs more, and a lowered limit stops no caches for it
  if (life_.load(std::memory_order_acquire) != Life::open || space_.is_pinned() || kind_.no_split ||
      sleeping_.is_asleep() || streams_.graphs_end() != kLongAgo || !is_lasting(streams_[tag].kind))
    return false;
  streams_[tag].is_kept = true;
  is_cached_.store(true, std::memory_order_relaxed);
  return true;
}

// Where the thread keeps, and counts, blocks of that stream and size; nullptr: the pool
// counts. `add_shard` is then the tag where the thread should have such a place.
Shard* Pool::shard_for(BlockCaches::Mine& mine, StreamTag tag, std::size_t size, StreamTag* add_shard) {
  if (is_oversize(size)) return nullptr;
  // Where nothing may be kept there is none.
  if (Shard* const shard = mine.shard(*this, tag)) return shard;
  if (may_keep(tag) && context_.caches.may_keep(*this)) *add_shard = tag;
  return nullptr;
}

void Pool::take_back(Block* first) {
  if (first == nullptr) return;
  const MutexLock lock(mutex_);
  take_back_locked(first);
}

void Pool::take_back_locked(Block* first) {
  while (first != nullptr) {
    Block* block = first;
    first = block->bin_next;
    directory_->remove(block);
    release_block(block, block->epoch);  // of its free: what was queued later is nobody's to wait for
  }
}

// A large block comes or goes: from now on best fit may choose another place than
// that of the one which the thread keeps.
void Pool::forget_large(const BlockCaches::Mine& mine, Shard* shard) {
  if (shard == nullptr || !shard->is_only) shard = mine.shards(*this);
  for (; shard != nullptr; shard = shard->next.get()) {
    if (Block* const kept = shard->forget_large(); kept != nullptr) take_back_locked(kept);
  }
}

void Pool::absorb(const BlockCounts& came, BlockSeat& of_pool, BlockSeat& of_device) {
  const MutexLock lock(mutex_);
  counters_.absorb(came, of_pool, of_device);
}

}  // namespace vmm
