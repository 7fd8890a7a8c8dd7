// BackedSpace: choosing the chunks that back a place: those that were there before, granted
// ones, the pool's own idle ones, the shelf's, and what is to be created within the limits.
#include <algorithm>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/backing/backed_space.h"
#include "core/memory/chunk_store.h"
#include "core/memory/grant.h"
#include "driver/driver.h"
#include "driver/host_memory.h"

namespace vmm {

// What collect() has chosen so far: it goes back on failure, the host's for want of memory
// too.
struct BackedSpace::Choice {
  struct ToCreate {
    std::size_t placement = 0;  // its index
    std::size_t size = 0;       // bytes
  };
  BackedSpace& space;
  Backing& backing;
  Grant* const grant;
  const Source source;
  const GrowthPolicy::Lack lack;
  std::size_t bare_behind = 0;  // bytes without memory behind the last gap: a chunk may reach into them
  IdleMoves idle{};             // that may be moved here
  IdleChunks odd{};             // of them those that are no units
  Budget* full = nullptr;       // the limit that lets nothing from the shelf in
  std::vector<ToCreate> to_create{};
  std::size_t create_bytes = 0;  // of these, as long as they are to be
  std::size_t charged = 0;       // for those that are not created yet
  bool is_made = false;
  ~Choice() {
    if (is_made) return;
    space.budget_.refund(charged);
    space.put_back(backing, grant);
    backing = {};
  }
};

// Chunks that were there before cost no call of the driver, where they were granted or rest
// on the shelf: of whole units any, else those that fill a gap by themselves, for where such
// fill a part of it, what is between would want sizes that nobody has. One of which
// the request would use less than a quarter is better used elsewhere. Not the pool's own
// idle ones: that broke up free space, and recorded programs ended 0.1 % higher. Returns the
// place that all could fill, if they could be had.
ByteRange BackedSpace::take_returning(const Extent& extent, std::size_t bare_behind, Grant* grant, Backing* backing) {
  ByteRange place{extent.gaps.front().offset, 0};
  bool are_absent = true;
  const auto take = [&](const DormantMappings::Dormant& tile) {
    backing->placements.push_back({tile.address - base_, tile.chunk});  // what is taken has its place
    if (grant != nullptr && grant->chunks.take(tile.chunk, tile.size)) return true;
    if (context_.store.take(group_, budget_, tile.chunk, tile.size)) return true;
    backing->placements.pop_back();
    return false;
  };
  for (const ByteRange& gap : extent.gaps) {
    const std::size_t beyond = gap == extent.gaps.back() ? bare_behind : 0;
    std::vector<DormantMappings::Dormant> tiles = range_->dormant_in(gap, beyond);
    if (extent.unit != 0) {
      for (const DormantMappings::Dormant& tile : tiles) {
        if (is_of_units({tile.address - base_, tile.size}, extent.unit)) take(tile);
      }
      place.size = gap.end() - place.offset;
      continue;
    }
    std::size_t end = gap.offset;
    std::size_t count = 0;
    while (count < tiles.size() && end < gap.end() && tiles[count].address == base_ + end) end += tiles[count++].size;
    const bool is_filled = end >= gap.end() && (end - gap.end()) * 4 <= 3 * tiles[count - 1].size;
    if (!is_filled) {
      are_absent = false;
      continue;
    }
    place.size = end - place.offset;
    tiles.resize(count);
    const std::size_t first = backing->placements.size();
    if (std::all_of(tiles.begin(), tiles.end(), take)) continue;
    for (; backing->placements.size() > first; backing->placements.pop_back()) {
      put_back(backing->placements.back().chunk, grant);
    }
  }
  return are_absent ? place : ByteRange{};
}

bool BackedSpace::has_own_rule() const {
  return kind_.is_uniform || kind_.no_split || !kind_.is_ordinary() || kind_.keeps_within_chunks() || is_pinned_;
}

std::size_t BackedSpace::unit_for(std::size_t bytes) const {
  const int sharers = group_.sharers();
  if (sharers <= 1 || has_own_rule()) return 0;
  std::size_t limit = kUnlimited;
  for (const Budget* level = &group_; level != nullptr; level = level->parent()) {
    limit = std::min(limit, level->limit());
  }
  if (limit >= context_.capabilities.total_memory) return 0;  // none that is ever reached
  limit = std::min(limit, budget_.limit());
  return growth_.unit(limit, static_cast<std::size_t>(sharers), owner_.peak_with(bytes));
}

void BackedSpace::note_units(const Extent& extent, Shortage* shortage) const {
  shortage->unit = unit_for(extent.missing());
  shortage->takes_units = extent.unit != 0;
}

// Bytes without memory right behind the last gap, into which a chunk may reach. None where
// units end: what reached beyond would leave a place that only its like fills.
std::size_t BackedSpace::bare_behind(const Extent& extent) const {
  const Block* behind = extent.block->next;
  const bool is_open = behind != nullptr && behind->state == BlockState::free && behind->tag == kNeutral &&
                       extent.gaps.back().end() == extent.block->end();
  return is_open && extent.unit == 0 && !kind_.is_uniform && !kind_.is_range() ? behind->size() : 0;
}

// A chunk that there is, for what begins the part: granted, the pool's own idle one, which may
// reach `beyond` that far, or the shelf's. Where chunks are units it is one, if a whole one is
// missing; or else, on those terms, one of those that fill the unit.
Chunk* BackedSpace::choose_chunk(ByteRange part, std::size_t beyond, Choice& choice) {
  if (choice.source == Source::fresh) return nullptr;
  const std::size_t unit = choice.lack.unit;
  if (unit != 0 && (part.size < unit || !is_aligned(part.offset, unit))) return choose_to_fill(part, choice);
  const std::size_t largest = growth_.largest_at(part.offset, part.size);
  const bool is_exact = kind_.is_uniform || choice.lack.is_whole;  // chunks of one size alone
  if (choice.grant != nullptr) {
    if (Chunk* const granted = choice.grant->chunks.take_at_most(largest, is_exact, unit)) return granted;
  }
  if (!choice.idle.empty()) {
    std::optional<IdleChunk> move;
    if (kind_.is_uniform) {
      move = choice.idle.take_last();
    } else {
      move = choice.idle.take_most_useful(part.size, largest + beyond, choice.lack.total);
    }
    if (move.has_value()) {
      choice.backing.moves.push_back(*move);
      return move->chunk;
    }
  }
  if (choice.full == nullptr) {
    Chunk* const rested = context_.store.take_at_most(group_, budget_, largest, is_exact, &choice.full, unit);
    if (rested != nullptr) return rested;
  }
  return unit == 0 ? nullptr : choose_to_fill(part, choice);
}

// The next of those that together fill what is missing of the unit to the byte, side by side;
// nullptr: none do. A hole beside them would want a chunk that only its like replaces.
Chunk* BackedSpace::choose_to_fill(ByteRange part, Choice& choice) {
  if (terms_of(choice.grant).fit == ChunkFit::units) return nullptr;
  ChunkShelf& granted = choice.grant->chunks;
  const std::size_t missing = std::min(part.size, align_up(part.offset + 1, choice.lack.unit) - part.offset);
  if (choice.odd.left_of(granted.left_of(missing)) != 0) return nullptr;
  if (Chunk* const chunk = granted.take_at_most(missing, /*exact=*/false)) return chunk;
  const std::optional<IdleChunk> move = choice.odd.take_nearest(missing);
  choice.backing.moves.push_back(*move);
  return move->chunk;
}

// Gives each part of the gap a chunk, or notes that one is to be created for it.
void BackedSpace::fill_gap(ByteRange gap, std::size_t beyond, Choice& choice) {
  std::vector<PlacedChunk>& placements = choice.backing.placements;
  for (std::size_t at = gap.offset; at < gap.end();) {
    const std::size_t remaining = gap.end() - at;
    placements.push_back({at, nullptr});  // first: what is taken has its place
    Chunk* const chunk = choose_chunk({at, remaining}, beyond, choice);
    placements.back().chunk = chunk;
    std::size_t size = 0;
    if (chunk != nullptr) {
      size = chunk->size;
    } else {
      size = std::min(growth_.next_size(choice.lack, at, remaining), growth_.largest_at(at, remaining));
      choice.to_create.push_back({placements.size() - 1, size});
      choice.create_bytes += size;
    }
    at += size;
  }
}

// Bytes of what is to be created that would come of the margin of `level`, which is to stay:
// nobody has looked yet who has idle memory. 0 where there is no room anyhow, in a limit of
// its own either. What floors reserved is their models'.
std::size_t BackedSpace::into_margin(const Choice& choice, Budget** level) const {
  if (!terms_of(choice.grant).keeps_margin || choice.create_bytes == 0 || unit_for(choice.lack.total) == 0) return 0;
  if (choice.create_bytes > budget_.headroom()) return 0;
  std::size_t most = 0;
  for (Budget* at = &group_; at != nullptr; at = at->parent()) {
    if (at->limit() >= context_.capabilities.total_memory) continue;  // none that is ever reached
    const std::size_t open = at->room_beside(GrowthPolicy::margin(at->limit()), budget_);
    if (choice.create_bytes <= open || choice.create_bytes - open <= most) continue;
    most = choice.create_bytes - open;
    *level = at;
  }
  return most;
}

// By how much the last one that is to be created is larger: where the pool grows ahead of need.
std::size_t BackedSpace::ahead_of(const Extent& extent, const Choice& choice) const {
  if (choice.source != Source::grown || choice.to_create.empty()) return 0;
  const auto& [placement, size] = choice.to_create.back();
  if (choice.backing.placements[placement].offset + size != extent.gaps.back().end()) return 0;
  return growth_.ahead(choice.lack, size, {range_->mapped_bytes(), budget_.headroom(), choice.bare_behind});
}

// Creates what is to be. One charge for all: no thread ever holds part of what another one
// could have had whole.
void BackedSpace::create_chunks(const Extent& extent, Choice& choice, Shortage* shortage) {
  Budget* full = nullptr;
  if (const std::size_t beyond = into_margin(choice, &full); beyond != 0) {
    *shortage = {beyond, full, {}};
    shortage->is_margin = true;
    note_units(extent, shortage);
    return;
  }
  std::size_t ahead = ahead_of(extent, choice);
  // Beyond what the host has left the kernel would end the process.
  if (kind_.is_spill() && choice.create_bytes != 0 && choice.create_bytes + ahead > available_memory()) {
    *shortage = Shortage::of_device(choice.create_bytes);
    return;
  }
  Grant* const grant = choice.grant;
  const std::size_t prepaid = grant == nullptr ? 0 : std::min(grant->prepaid_bytes, choice.create_bytes);
  full = budget_.charge(choice.create_bytes + ahead - prepaid);
  if (full != nullptr && ahead != 0) {
    ahead = 0;
    full = budget_.charge(choice.create_bytes - prepaid);
  }
  Status status;
  if (full == nullptr) {
    if (grant != nullptr) grant->prepaid_bytes -= prepaid;
    choice.charged = choice.create_bytes + ahead;
    status = create_charged(choice, ahead);
  }
  if (choice.is_made) return;
  *shortage = {choice.create_bytes, full, status};
  note_units(extent, shortage);
}

// The last one is `ahead` larger, where the driver has that much.
Status BackedSpace::create_charged(Choice& choice, std::size_t ahead) {
  for (const Choice::ToCreate& each : choice.to_create) {
    const std::size_t more = &each == &choice.to_create.back() ? ahead : 0;
    Chunk* chunk = nullptr;
    Status status = context_.store.create_prepaid(context_.store.spec(each.size + more), budget_, &chunk);
    if (more != 0 && !status.ok()) {
      budget_.refund(more);
      choice.charged -= more;
      status = context_.store.create_prepaid(context_.store.spec(each.size), budget_, &chunk);
    }
    if (!status.ok()) return status;
    choice.backing.placements[each.placement].chunk = chunk;
    choice.charged -= chunk->size;
    choice.create_bytes -= each.size;
  }
  choice.is_made = true;
  return {};
}

// Of the chunks that were chosen each stands where it stood before, if what was chosen for
// that place is as large: it is mapped there still, and the driver is asked for nothing. A
// program that repeats itself moves the same chunks each time (a recorded training step 20 at
// its peak, for 49 calls), and asks no more once each has its place.
void BackedSpace::send_home(const Extent& extent, Choice& choice) {
  std::vector<PlacedChunk>& placements = choice.backing.placements;
  std::unordered_map<const Chunk*, std::size_t> places;  // by their index
  for (const ByteRange& gap : extent.gaps) {
    const std::size_t beyond = gap == extent.gaps.back() ? choice.bare_behind : 0;
    for (const DormantMappings::Dormant& home : range_->dormant_in(gap, beyond)) {
      if (places.empty()) {
        for (std::size_t k = 0; k < placements.size(); ++k) places.emplace(placements[k].chunk, k);
      }
      const auto found = places.find(home.chunk);
      if (found == places.end()) continue;
      const auto there = std::lower_bound(placements.begin(), placements.end(), home.address - base_,
                                          [](const PlacedChunk& a, std::size_t offset) { return a.offset < offset; });
      if (there == placements.end() || base_ + there->offset != home.address) continue;
      if (there->chunk->size != home.size) continue;
      std::size_t& place = found->second;
      places[there->chunk] = place;
      std::swap(placements[place].chunk, there->chunk);
      place = static_cast<std::size_t>(there - placements.begin());
    }
  }
}

// Chooses chunks for the gaps. They fill them exactly, but that an idle chunk may
// reach beyond the last one into bare space. On failure everything is where it
// was, and `shortage` says what was missing.
bool BackedSpace::collect(const Extent& extent, const Request& request, Source source, Grant* grant, Backing* backing,
                          Shortage* shortage) {
  GrowthPolicy::Lack lack;
  lack.total = extent.missing();
  lack.is_whole = is_whole(request);
  lack.is_explicit = request.state == BlockState::pages;
  lack.is_contested = group_.sharers() > 1;
  lack.unit = extent.unit;
  if (source == Source::any) owner_.give_up_spare_slabs();
  Choice choice{*this, *backing, grant, source, lack, bare_behind(extent)};
  std::vector<IdleChunk> idle;
  if (source == Source::at_once) idle = idle_at_once(request.tag, growth_.least_move(lack));
  if (source == Source::any) idle = all_idle(request.tag, Idle::movable, lack.total);
  std::erase_if(idle, [&](const IdleChunk& each) {
    if (is_of_units({each.offset, each.chunk->size}, lack.unit)) return false;
    choice.odd.add(each);
    return true;
  });
  choice.idle = IdleMoves(std::move(idle), kind_.page);
  ByteRange returning_to;
  if (source != Source::fresh && !lack.is_whole) {
    returning_to = take_returning(extent, choice.bare_behind, grant, backing);
  }
  const std::vector<PlacedChunk> returning = backing->placements;  // by offset
  auto next = returning.begin();
  for (const ByteRange& gap : extent.gaps) {  // what is left of them
    std::size_t at = gap.offset;
    for (; next != returning.end() && next->offset < gap.end(); ++next) {
      if (next->offset > at) fill_gap({at, next->offset - at}, 0, choice);
      at = next->offset + next->chunk->size;
    }
    const std::size_t beyond = gap == extent.gaps.back() ? choice.bare_behind : 0;
    if (at < gap.end()) fill_gap({at, gap.end() - at}, beyond, choice);
  }
  create_chunks(extent, choice, shortage);
  if (choice.is_made) {
    std::sort(backing->placements.begin(), backing->placements.end(),
              [](const PlacedChunk& a, const PlacedChunk& b) { return a.offset < b.offset; });
    if (source != Source::fresh) send_home(extent, choice);
  } else {
    shortage->returning_to = returning_to;
  }
  return choice.is_made;
}

}  // namespace vmm
