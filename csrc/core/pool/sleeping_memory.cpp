#include "core/pool/sleeping_memory.h"

#include <algorithm>
#include <iterator>
#include <new>

#include "base/check.h"

namespace vmm {

void SleepingMemory::begin() {
  asleep_ = std::make_unique<Asleep>();
  asleep_->is_going = true;
  space_.hold(true);
}

void SleepingMemory::begin_transfer(bool is_going) {
  asleep_->is_busy = true;
  asleep_->is_going = is_going;
  asleep_->going_to.clear();
}

std::unique_ptr<Asleep> SleepingMemory::end(bool goes_on, Unchanged* former) {
  Unchanged unchanged;
  if (goes_on) {
    try {
      unchanged = unchanged_now();
    } catch (const std::bad_alloc&) {
      // Copying again is better than a model of which some parts are awake, and others are not.
      unchanged = {};
    }
  }
  *former = std::exchange(unchanged_, std::move(unchanged));
  VMM_CHECK(asleep_->gone.empty() && asleep_->collected.empty(), "pool '", name_, "' wakes without ",
            asleep_->gone.size(), " chunks");
  space_.hold(false);
  return std::move(asleep_);
}

std::unique_ptr<Asleep> SleepingMemory::drop() {
  forget_unused();  // all of it
  space_.hold(false);
  return std::move(asleep_);
}

// What is read-only from now on need not be copied again.
Unchanged SleepingMemory::unchanged_now() const {
  Unchanged unchanged = unchanged_.proved_by(space_.range().live());
  for (const auto& [offset, mapping] : space_.range().live()) {
    if (!space_.allows(mapping, Access::read)) continue;
    std::vector<KeptRange> kept = asleep_->kept.within({offset, mapping.chunk->size});
    std::erase_if(kept, [](const KeptRange& each) { return !each.backup->may_be_kept(); });
    if (!kept.empty()) unchanged.add(offset, mapping, kept);
  }
  return unchanged;
}

// ------------------------------------------------ rights, and who registers segments

bool SleepingMemory::is_to_be_read_only(ByteRange chunk, const LiveMapping& mapping) const {
  const std::vector<ByteRange>& to_seal = asleep_->to_seal;
  return space_.allows(mapping, Access::read) || std::find(to_seal.begin(), to_seal.end(), chunk) != to_seal.end();
}

// Of chunks that have gone, those over whose borders the block lies.
void SleepingMemory::withhold_gone(ByteRange of_block, bool are_pages) {
  auto at = asleep_->gone.upper_bound(of_block.offset);
  if (at != asleep_->gone.begin() && std::prev(at)->first + std::prev(at)->second.size > of_block.offset) --at;
  for (; at != asleep_->gone.end() && at->first < of_block.end(); ++at) {
    const bool is_whole = at->first <= of_block.offset && at->first + at->second.size >= of_block.end();
    if (!is_whole || are_pages) at->second.is_withheld = true;
  }
}

void SleepingMemory::withhold_broken_chunks() {
  const bool is_uniform = space_.kind().is_uniform;
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

bool SleepingMemory::is_missing(ByteRange range) const {
  if (asleep_->is_going) return true;
  const auto after = asleep_->gone.lower_bound(range.end());
  if (after == asleep_->gone.begin()) return false;
  const auto& [offset, place] = *std::prev(after);
  return offset + place.size > range.offset;
}

std::size_t SleepingMemory::live_in(ByteRange range) const {
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
std::size_t SleepingMemory::elsewhere_of(std::size_t live) const {
  if (asleep_->is_busy) return live - std::min(live, space_.range().mapped_bytes());
  for (const auto& [offset, mapping] : space_.range().live()) {
    live -= std::min(live, live_in({offset, mapping.chunk->size}));
  }
  return live;
}

void SleepingMemory::note_place(const std::string& place, bool falls_asleep) {
  asleep_->going_to = place;
  if (falls_asleep) asleep_->place = place;
}

AsleepWhere SleepingMemory::where() const {
  // What went at other times may be elsewhere, and of what was thrown away there is no backup.
  AsleepWhere where{asleep_->kept.places(), ""};
  if (asleep_->is_discarded) where.contents.insert("discarded");
  if (asleep_->is_going && !asleep_->going_to.empty()) where.contents.insert(asleep_->going_to);
  if (asleep_->is_busy || !asleep_->gone.empty()) where.memory = asleep_->place;  // all of it may still be here
  return where;
}

std::set<std::string> SleepingMemory::places_of_backups() const {
  std::set<std::string> places = asleep_->kept.places();
  if (asleep_->is_going) places.insert(asleep_->going_to);
  return places;
}

}  // namespace vmm
