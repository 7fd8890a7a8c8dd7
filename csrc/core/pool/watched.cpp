// Pool: blocks that debug mode watches (WatchedBlocks), from request to free.
//
// A pool of a graph watches nothing: what its memory shows has to stay where it is as long
// as the graph lives, and what is freed within a capture is used again within it.
#include <algorithm>

#include "core/debug/watch_log.h"
#include "core/pool/pool.h"

namespace vmm {

// When what `bytes` are about to be taken from was last used; 0: whatever is about to be
// taken. Placing may move any memory that the stream has freed, and on its way ends pending
// frees and gives up spare slabs, which no free block tells of before.
Epoch Pool::last_use_before(std::size_t bytes, StreamTag tag) const {
  // The very block, where best fit decides; it may have been freed long before the latest.
  const Block* fit = kind_.no_split || bytes == 0 ? nullptr : space_.blocks().best_fit(bytes, tag);
  if (fit != nullptr) return fit->epoch;
  if (!pending_.empty()) return context_.clock.now();
  return space_.free_mapped_bytes() + slabs_.spare_bytes() == 0 ? kLongAgo : streams_[tag].last_free;
}

Address Pool::try_allocate_watched(std::size_t bytes, Stream stream, const std::shared_ptr<const std::string>& stack,
                                   Grant* grant, Shortage* shortage) {
  {
    const GatheredLock lock(*this);
    if (!takes_requests(shortage) || !keeps_limits(shortage)) return 0;
    if (!space_.is_pinned() && bytes <= kind_.capacity - 2 * kPatternBytes && !can_never_hold(bytes, shortage)) {
      const Address address = allocate_watched_locked(bytes, stream, stack, grant, shortage);
      const bool is_short = shortage->bytes != 0 || shortage->wait_for != kLongAgo || !shortage->status.ok();
      if (address != 0 || (is_short && !shortage->no_address_space)) return address;
    }
  }
  // A graph's, or there are no addresses for it.
  *shortage = {};
  const Address address = try_allocate(bytes, stream, grant, shortage);
  if (address != 0) context_.log->missed();
  return address;
}

Address Pool::allocate_watched_locked(std::size_t bytes, Stream stream, const std::shared_ptr<const std::string>& stack,
                                      Grant* grant, Shortage* shortage) {
  settle_locked();
  const StreamTag tag = streams_.tag_of(stream);
  if (!streams_.is_behind(tag, &shortage->wait_for)) return 0;
  const Epoch last_use = last_use_before(watched_.size_anywhere(bytes), tag);
  Block* const block = watched_.take(bytes, tag, last_use, stack, grant, shortage);
  if (block == nullptr) return 0;
  try {
    directory_->insert(block);
  } catch (...) {
    watched_.untake(block);
    throw;
  }
  space_.growth().note_handed_out(block->size());
  begin_block(block, bytes);
  block->state = BlockState::watched;
  return base_ + block->offset;
}

bool Pool::is_being_judged() const {
  const MutexLock lock(mutex_);
  return watched_.is_being_judged();
}

bool Pool::settle_watched() {
  std::vector<WatchedBlocks::Freed> passed;
  {
    const MutexLock lock(mutex_);
    if (!space_.is_open()) return false;
    passed = watched_.take_passed();
  }
  if (passed.empty()) return false;
  for (const WatchedBlocks::Freed& freed : passed) WatchedBlocks::judge(context_, base_, freed);
  const MutexLock lock(mutex_);
  watched_.finish(passed);
  return true;
}

Status Pool::check_watched() {
  std::vector<WatchedBlocks::Freed> live;
  {
    const MutexLock lock(mutex_);
    if (watched_.live() == 0 || !space_.is_open()) return {};
    live = watched_.begin_reading(*directory_);
  }
  const auto end_reading = [this] {
    const MutexLock lock(mutex_);
    watched_.end_reading();
  };
  Status status;
  try {
    // What was queued before they were collected, their patterns too, is done then.
    status = context_.clock.synchronize();
  } catch (...) {
    end_reading();
    throw;
  }
  if (status.ok()) {
    for (const WatchedBlocks::Freed& block : live) WatchedBlocks::judge(context_, base_, block);
  }
  end_reading();
  return status;
}

Address Pool::memory_from(Address address) const {
  const ReadLock lock(*this);
  if (!space_.is_open() || !contains(address)) return base_ + kind_.capacity;
  const std::size_t offset = address - base_;
  const auto next = space_.range().reaching(offset);
  return base_ + (next == space_.range().live().end() ? kind_.capacity : std::max(next->first, offset));
}

}  // namespace vmm
