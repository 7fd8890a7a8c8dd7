// Pool: while its memory is elsewhere. Addresses, blocks and their numbers stay; chunks
// leave for the group's shelf (going_to_sleep.cpp), and others come to the same offsets
// (waking.cpp). Whoever moves their contents, and waits for what is queued, is core/sleep.
#include "core/pool/asleep.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/errors.h"
#include "core/pool/pool.h"

namespace vmm {

// What is read-only from now on need not be copied again.
Unchanged Pool::unchanged_now() const {
  if (!space_.is_open() || is_closed()) return {};
  Unchanged unchanged = unchanged_.proved_by(space_.range().live());
  for (const auto& [offset, mapping] : space_.range().live()) {
    if (!space_.allows(mapping, Access::read)) continue;
    std::vector<KeptRange> kept = asleep_->kept.within({offset, mapping.chunk->size});
    std::erase_if(kept, [](const KeptRange& each) { return !each.backup->may_be_kept(); });
    if (!kept.empty()) unchanged.add(offset, mapping, kept);
  }
  return unchanged;
}

bool Pool::forget_unchanged() {
  Unchanged ended;  // its backup ends with no lock held
  const MutexLock lock(mutex_);
  std::swap(ended, unchanged_);
  return !ended.empty();
}

void Pool::require_awake() const {
  if (asleep_ == nullptr) return;
  const bool is_all = model().life_.load(std::memory_order_acquire) == Life::asleep;
  throw AsleepError(model().name(), is_all ? "" : tag());
}

void Pool::require_taking() const {
  const MutexLock lock(mutex_);
  require_awake();
}

void Pool::require_there(Address address, std::size_t bytes) const {
  const MutexLock lock(mutex_);
  if (asleep_ == nullptr) return;
  if (asleep_->is_going) require_awake();
  const std::size_t end = address - base_ + bytes;
  auto place = asleep_->gone.lower_bound(end);
  if (place == asleep_->gone.begin()) return;
  --place;
  if (place->first + place->second.size > address - base_) require_awake();
}

// Of chunks that have gone, those over whose borders the block lies.
void Pool::withhold_gone(ByteRange of_block, bool are_pages) {
  auto at = asleep_->gone.upper_bound(of_block.offset);
  if (at != asleep_->gone.begin() && std::prev(at)->first + std::prev(at)->second.size > of_block.offset) --at;
  for (; at != asleep_->gone.end() && at->first < of_block.end(); ++at) {
    const bool is_whole = at->first <= of_block.offset && at->first + at->second.size >= of_block.end();
    if (!is_whole || are_pages) at->second.is_withheld = true;
  }
}

void Pool::withhold_broken_chunks() {
  const MutexLock lock(mutex_);
  if (!space_.is_open()) return;
  space_.withhold_broken_chunks();
  if (asleep_ == nullptr) return;
  const bool is_uniform = kind_.is_uniform;
  if (!is_uniform) {
    for (const auto& [offset, chunk] : asleep_->collected) space_.blocks().add_border(offset);
  }
  for (auto& [offset, place] : asleep_->gone) {
    place.is_withheld = place.is_withheld || is_uniform || space_.is_pinned();
    if (!is_uniform) space_.blocks().add_border(offset);
  }
  for (const Block* block = space_.blocks().stretches().front(); block != nullptr; block = block->next) {
    if (!block->is_nobodys()) withhold_gone(block->range(), block->state == BlockState::pages);
  }
}

// ----------------------------------------------------------------------------- told

std::size_t Pool::live_in(ByteRange range) const {
  std::size_t bytes = 0;
  const auto add = [&](const Block& block) {
    if (!block.is_live() && block.state != BlockState::pages) return;
    const std::size_t begin = std::max<std::size_t>(block.offset, range.offset);
    bytes += std::max(std::min(block.end(), range.end()), begin) - begin;
  };
  for (const Block* block = space_.blocks().covering(range.offset); block != nullptr && block->offset < range.end();
       block = block->next) {
    add(*block);
    if (block->state != BlockState::slab || !slabs_.holds(*block)) continue;
    for (const Block* piece = slabs_.first_piece(*block); piece != nullptr; piece = piece->next) add(*piece);
  }
  return bytes;
}

// On its way most of it may still be there, and a walk over all blocks for each chunk would
// take milliseconds. Then what stays is what others have mapped too, and it may have free
// space about it.
std::size_t Pool::live_elsewhere() const {
  std::size_t live = live_bytes_locked();
  if (asleep_ != nullptr && asleep_->is_busy) return live - std::min(live, space_.range().mapped_bytes());
  for (const auto& [offset, mapping] : space_.range().live()) {
    live -= std::min(live, live_in({offset, mapping.chunk->size}));
  }
  return live;
}

bool Pool::is_asleep() const {
  const MutexLock lock(mutex_);
  return asleep_ != nullptr;
}

bool Pool::read_kept(Address address, std::size_t size, std::byte* to) {
  const ByteRange range{address - base_, size};
  std::vector<KeptRange> kept;  // and their backups, which nobody writes to any more
  {
    const MutexLock lock(mutex_);
    if (asleep_ == nullptr || asleep_->is_busy || !asleep_->kept.missing(range).empty()) return false;
    kept = asleep_->kept.within(range);
  }
  // Takes its time, and no lock: others read meanwhile, and the model may wake.
  for (const KeptRange& each : kept) each.backup->read(each.at, to + (each.offset - range.offset), each.size);
  return true;
}

void Pool::note_place(const std::string& place, bool falls_asleep) {
  const MutexLock lock(mutex_);
  if (asleep_ == nullptr) return;
  asleep_->going_to = place;
  if (falls_asleep) asleep_->place = place;
}

std::set<std::string> Pool::places_of_backups() const {
  const MutexLock lock(mutex_);
  if (asleep_ == nullptr) return {};
  std::set<std::string> places = asleep_->kept.places();
  if (asleep_->is_going) places.insert(asleep_->going_to);
  return places;
}

void Pool::forget_names_of_backups() const noexcept {
  const MutexLock lock(mutex_);
  if (asleep_ != nullptr) asleep_->kept.forget_names();
}

AsleepWhere Pool::asleep_where() const {
  const MutexLock lock(mutex_);
  if (asleep_ == nullptr) return {};
  // What went at other times may be elsewhere, and of what was thrown away there is no backup.
  AsleepWhere where{asleep_->kept.places(), ""};
  if (asleep_->is_discarded) where.contents.insert("discarded");
  if (asleep_->is_going && !asleep_->going_to.empty()) where.contents.insert(asleep_->going_to);
  if (asleep_->is_busy || !asleep_->gone.empty()) where.memory = asleep_->place;  // all of it may still be here
  return where;
}

}  // namespace vmm
