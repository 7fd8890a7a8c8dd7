// Pool: the live blocks at one moment, and making them the live blocks again.
// torch.compile's CUDA graph trees go back and forth between such moments, in a
// pool that is pinned: its memory stays where it was, only its blocks change.
#include <algorithm>

#include "base/check.h"
#include "base/errors.h"
#include "core/pool/pool.h"

namespace vmm {

void Pool::require_settled(const char* doing) {
  if (!space_.is_open()) throw VmmError("pool '" + name_ + "' has ended, so its blocks cannot be " + doing);
  settle_locked();
  if (const std::size_t watched = watched_.live() + watched_.leaving(); watched != 0) {
    throw VmmError("pool '" + name_ + "': debug mode watches " + std::to_string(watched) +
                   " of its blocks, live or freed, so its blocks cannot be " + doing);
  }
  if (pending_.empty()) return;
  throw VmmError("pool '" + name_ + "': " + std::to_string(pending_.size()) +
                 " freed blocks are still in use by recorded streams, so its blocks cannot be " + doing);
}

PoolCheckpoint Pool::checkpoint() {
  const StillLock lock(*this, BlockCaches::Kept::back);
  return checkpoint_locked();
}

// Of one that sleeps as well: its blocks are where they are.
PoolCheckpoint Pool::checkpoint_locked() {
  require_settled("recorded");
  PoolCheckpoint found;
  std::vector<const Block*> live;
  directory_->for_each([&live](const Block* block) { live.push_back(block); });
  for (const Block* block : live) {
    const PoolCheckpoint::Entry entry{block->offset, block->size(), block->requested, streams_[block->tag].stream};
    (block->small ? found.small : found.large).push_back(entry);
  }
  const auto by_offset = [](const auto& a, const auto& b) { return a.offset < b.offset; };
  std::sort(found.small.begin(), found.small.end(), by_offset);
  std::sort(found.large.begin(), found.large.end(), by_offset);
  for (const PoolCheckpoint::Entry& entry : found.small) {
    if (!found.slabs.empty() && entry.offset < found.slabs.back().offset + found.slabs.back().size) continue;
    const Block& slab = slabs_.slab_around(entry.offset);
    found.slabs.push_back({slab.offset, slab.size(), 0, entry.stream});
  }
  return found;
}

// Whether it has to change for that. Throws where it has to and cannot.
bool Pool::must_change_for(const PoolCheckpoint& target) {
  if (sleeping_.is_asleep()) {
    if (checkpoint_locked() == target) return false;
    require_awake();
  }
  require_settled("changed");
  for (const auto* entries : {&target.slabs, &target.large}) {
    for (const PoolCheckpoint::Entry& entry : *entries) {
      const std::size_t missing = space_.range().missing_bytes({entry.offset, entry.size});
      if (missing == 0) continue;
      throw VmmError("pool '" + name_ + "': " + format_bytes(missing) + " of the checkpoint's memory at " +
                     format_hex(base_ + entry.offset) + " have left the pool since");
    }
  }
  if (!pages_.empty()) throw VmmError("pool '" + name_ + "' holds explicit pages, which a checkpoint does not know");
  return true;
}

void Pool::require_restorable(const PoolCheckpoint& target) {
  const StillLock lock(*this, BlockCaches::Kept::back);
  (void)must_change_for(target);
}

void Pool::restore(const PoolCheckpoint& target, std::vector<Address>* freed, std::vector<Address>* allocated) {
  const StillLock lock(*this, BlockCaches::Kept::back);
  if (!must_change_for(target)) return;
  std::vector<Block*> live;
  directory_->for_each([&live](Block* block) { live.push_back(block); });
  for (Block* block : live) {
    freed->push_back(base_ + block->offset);
    directory_->remove(block);
    end_block(*block);
    if (block->recorded != 0) recorded_uses_.end(&block->recorded);
    finish_free(block, context_.clock.now());
  }
  give_up_spare_slabs();
  allocated->reserve(allocated->size() + target.large.size() + target.small.size());
  const auto take = [this](const PoolCheckpoint::Entry& entry, BlockState state) VMM_REQUIRES(mutex_) {
    const StreamTag tag = streams_.tag_of(entry.stream, /*is_alive=*/false);  // first: there may be no memory
    space_.blocks().prepare(tag);
    std::vector<Piece> pieces;
    Block* block = space_.take_range({entry.offset, entry.size}, state, &pieces);
    block->tag = tag;
    return block;
  };
  const auto begin = [&](Block* block, const PoolCheckpoint::Entry& entry) VMM_REQUIRES(mutex_) {
    enter(block, entry.requested);
    allocated->push_back(base_ + block->offset);
  };
  for (const PoolCheckpoint::Entry& entry : target.slabs) make_slab(take(entry, BlockState::slab));
  for (const PoolCheckpoint::Entry& entry : target.large) begin(take(entry, BlockState::used), entry);
  for (const PoolCheckpoint::Entry& entry : target.small) {
    Block* block = slabs_.take_at(entry.offset, entry.size, streams_.tag_of(entry.stream, /*is_alive=*/false));
    VMM_CHECK(block != nullptr, "no slab for the block at ", entry.offset);
    begin(block, entry);
  }
}

}  // namespace vmm
