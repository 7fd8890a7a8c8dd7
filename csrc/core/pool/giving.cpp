// Pool: giving away what is idle: to a request of another pool, to the group's shelf, and, at
// the last rung, to the driver.
#include <new>
#include <optional>
#include <set>

#include "base/check.h"
#include "core/memory/chunk_store.h"
#include "core/memory/grant.h"
#include "core/pool/pool.h"

namespace vmm {

IdleLook::Moment Pool::moment() const {
  const std::int64_t live = own_peaks_.level(StatKind::allocated_bytes).current;
  return {space_.growth().handed_out(), space_.growth().freed(), static_cast<std::size_t>(live)};
}

// What threads keep is not live.
bool Pool::may_give(const Budget& payer, std::size_t bytes, std::span<const WantedChunks> any_of) const {
  const std::size_t above = budget_.above_floors(payer);
  if (above < bytes) return false;
  const ReadLock lock(*this);
  if (!space_.is_open() || space_.is_pinned()) return false;
  const std::size_t mapped = space_.range().mapped_bytes();
  const IdleLook::Moment now = moment();
  if (mapped - std::min(mapped, now.live) < bytes) return false;
  if (!pending_.empty()) return true;  // of these nobody knows before they are settled
  const Epoch passed = context_.clock.passed();
  return std::any_of(any_of.begin(), any_of.end(), [&](WantedChunks wanted) VMM_REQUIRES(mutex_) {
    wanted.most = std::min(wanted.most, above);
    return !look_.is_in_vain(wanted, now, passed);
  });
}

// Idle chunks that do for a request of another pool, in the order in which they go.
struct Pool::Candidates {
  explicit Candidates(std::size_t unit) : places(unit) {}
  std::vector<IdleChunk> first;  // that come first, whatever is wanted
  IdleChunks others;
  UnitPlaces places;  // of chunks that only together leave a unit
  bool are_none() const { return first.empty() && others.bytes() == 0 && !places.has_whole(); }
};

Pool::Candidates Pool::candidates_for(const WantedChunks& wanted, IdleLook* look) {
  Candidates found(wanted.unit);
  UnitPlaces places(wanted.unit);
  std::vector<IdleChunk> suitable;
  for (const IdleChunk& each : space_.all_idle(kNeutral, BackedSpace::Idle::movable)) {
    const bool is_of_unit = is_of_units({each.offset, each.chunk->size}, wanted.unit);
    look->see(each.chunk->size);
    if (is_of_unit) look->see_unit(each.chunk->size);
    if (!is_of_unit && places.add(each)) look->see_unit(wanted.unit);
    if (std::max(each.chunk->size, is_of_unit ? 0 : wanted.unit) <= wanted.most) suitable.push_back(each);
  }
  if (wanted.is_unused) suitable = space_.unused_of(std::move(suitable), wanted.but_by);
  std::set<const Chunk*> first;
  for (const DormantMappings::Dormant& each : wanted.first) first.insert(each.chunk);
  for (const IdleChunk& each : suitable) {
    if (!is_of_units({each.offset, each.chunk->size}, wanted.unit)) {
      found.places.add(each);
    } else if (first.count(each.chunk) != 0) {
      found.first.push_back(each);
    } else {
      found.others.add(each);
    }
  }
  return found;
}

// Bytes: 0 where it stays, beneath a floor or as `refused` does not let it in.
std::size_t Pool::hand_to(Grant& grant, const IdleChunk& chosen, Budget** refused) {
  const std::size_t size = chosen.chunk->size;
  if (budget_.above_floors(grant.payer()) < size) return 0;
  *refused = Budget::transfer(budget_, grant.payer(), size);
  if (*refused != nullptr) return 0;
  Chunk* chunk = nullptr;
  try {
    chunk = space_.detach(chosen.offset, MappedRange::Fate::may_return);
  } catch (...) {
    Budget::transfer_back(budget_, grant.payer(), size);
    throw;
  }
  chunk->charged = &grant.payer();
  grant.chunks.put(chunk);
  return size;
}

std::size_t Pool::surrender(WantedChunks wanted, bool is_gathered, Grant& grant, Budget** refused) {
  VMM_CHECK(&context_.store == &grant.store(), "pool '", name_, "' gives chunks of another store");
  *refused = nullptr;
  if (!is_gathered) context_.caches.gather(*this);
  const MutexLock lock(mutex_);
  if (!space_.is_open()) return 0;
  free_up_space();
  wanted.most = std::min(wanted.most, budget_.above_floors(grant.payer()));
  const IdleLook::Moment now = moment();
  if (wanted.is_at_a_glance && look_.is_in_vain(wanted, now, context_.clock.passed())) return 0;
  IdleLook look(now, wanted.unit);
  Candidates candidates = candidates_for(wanted, &look);
  const bool are_none = candidates.are_none();
  std::size_t moved = 0;
  for (const IdleChunk& each : candidates.first) {
    if (*refused == nullptr) moved += hand_to(grant, each, refused);
  }
  while (moved < wanted.bytes && *refused == nullptr) {
    const std::optional<IdleChunk> chosen = candidates.others.take_nearest(wanted.bytes - moved);
    if (!chosen.has_value()) break;
    moved += hand_to(grant, *chosen, refused);  // where not this one, perhaps a smaller one
  }
  while (moved < wanted.bytes && *refused == nullptr) {
    const std::vector<IdleChunk> place = candidates.places.take();
    if (place.empty()) break;
    for (const IdleChunk& each : place) {
      if (*refused == nullptr) moved += hand_to(grant, each, refused);
    }
  }
  if (moved != 0 || !space_.may_move()) {
    look_.forget();
  } else {
    look_.becomes(look);
    if (wanted.is_unused && are_none) look_.note_in_use(wanted, context_.clock.passed());
  }
  space_.drop_retired();
  return moved;
}

std::vector<DormantMappings::Dormant> Pool::dormant_of_others(ByteRange place) const {
  if (place.size == 0) return {};
  const ReadLock lock(*this);
  if (!space_.is_open()) return {};
  std::vector<DormantMappings::Dormant> found = space_.range().dormant_in(place);
  std::erase_if(found, [this](const DormantMappings::Dormant& chunk) { return chunk.holder == id_; });
  return found;
}

bool Pool::could_place(std::size_t bytes) const {
  const MutexLock lock(mutex_);
  if (!space_.is_open()) return false;
  std::size_t run = 0;
  for (const Block* block = space_.blocks().stretches().front(); block != nullptr; block = block->next) {
    const BlockState state = block->state;
    const bool goes = block->is_nobodys() || state == BlockState::pending || state == BlockState::quarantined;
    run = goes ? run + block->size() : 0;
    if (run >= bytes) return true;
  }
  return false;
}

std::size_t Pool::shed(std::size_t keep) {
  const GatheredLock lock(*this);
  if (!space_.is_open()) return 0;
  free_up_space();
  IdleChunks idle(space_.all_idle(kNeutral, BackedSpace::Idle::all));
  const std::size_t above = idle.bytes() - std::min(idle.bytes(), keep);
  return space_.shelve_largest(std::move(idle), above, nullptr);
}

std::size_t Pool::shed_about(std::size_t want, const Budget* beneath) {
  const GatheredLock lock(*this);
  if (!space_.is_open()) return 0;
  free_up_space();
  return space_.shelve_largest(IdleChunks(space_.all_idle(kNeutral, BackedSpace::Idle::all)), want, beneath);
}

std::vector<ByteRange> Pool::came_free_with(ByteRange range) {
  std::vector<ByteRange> freed = {range};
  const MutexLock lock(mutex_);
  if (!space_.is_open()) return freed;
  settle_locked(&freed);
  give_up_spare_slabs(&freed);
  for (ByteRange& each : freed) {
    if (each.size > kSmallLimitBytes) continue;
    // It may have been the last of its slab, which began and ended within this.
    const std::size_t begin = each.offset - std::min(each.offset, kSlabBytes);
    each = {begin, std::min(each.end() + kSlabBytes, kind_.capacity) - begin};
  }
  return freed;
}

std::size_t Pool::shed_in(std::span<const ByteRange> freed, std::size_t want, const Budget* beneath) {
  const MutexLock lock(mutex_);
  return space_.is_open() ? space_.shelve_largest(space_.idle_in(freed), want, beneath) : 0;
}

std::size_t Pool::shed_oldest(std::size_t keep, const FreedAt& freed_at) {
  const GatheredLock lock(*this);
  if (!space_.is_open()) return 0;
  free_up_space();
  const std::vector<IdleChunk> idle = space_.idle_by_age(freed_at);
  std::size_t idle_bytes = 0;
  for (const IdleChunk& each : idle) idle_bytes += each.chunk->size;
  std::size_t moved = 0;
  for (auto oldest = idle.begin(); oldest != idle.end() && idle_bytes > keep; ++oldest) {
    const std::size_t size = space_.shelve(*oldest);
    idle_bytes -= size;
    moved += size;
  }
  space_.drop_retired();
  return moved;
}

std::size_t Pool::shed_unused(std::size_t most, const FreedAt& freed_at) {
  const GatheredLock lock(*this);
  if (!space_.is_open()) return 0;
  context_.clock.cover(context_.clock.now());
  context_.clock.poll();
  free_up_space();
  std::size_t moved = 0;
  for (const IdleChunk& idle : space_.idle_by_age(freed_at)) {
    if (idle.at_once && idle.chunk->size <= most - moved) moved += space_.shelve(idle);
  }
  space_.drop_retired();
  return moved;
}

std::size_t Pool::melt_locked(const Budget* limit, std::size_t want, const Budget& payer) {
  if (!space_.is_open()) return 0;
  free_up_space();
  IdleChunks idle(space_.all_idle(kNeutral, BackedSpace::Idle::all));
  std::size_t in_use = 0;
  while (limit == nullptr || limit->room_for(payer) < want) {
    const std::optional<IdleChunk> chosen = idle.take_nearest(budget_.above_floors(payer));
    if (!chosen.has_value()) break;
    const std::size_t size = chosen->chunk->size;
    // A reservation holds among limits, not against a device that others use as well.
    if (budget_.above_floors(payer) < (limit == nullptr ? size : 1)) continue;
    if (!chosen->at_once) {
      in_use += size;
      continue;
    }
    Chunk* chunk = space_.detach(chosen->offset);
    try {
      space_.drop_retired();
    } catch (const std::bad_alloc&) {
      // Another time: the chunk rests on the shelf until then.
    }
    // Another pool's former mapping, of before the chunk came here, may still
    // stand: then it cannot be released yet and rests on the shelf.
    const bool unmapped = chunk->mappings.load(std::memory_order_acquire) == 0;
    if (!unmapped || !context_.store.release(chunk).ok()) context_.store.put(group_, chunk);
  }
  return in_use;
}

}  // namespace vmm
