// SleepingMemory: on its way back: chunks for what is to come, and each place as it is filled.
#include <algorithm>
#include <span>

#include "core/memory/chunk_store.h"
#include "core/memory/grant.h"
#include "core/options.h"
#include "core/pool/sleeping_memory.h"

namespace vmm {

Status SleepingMemory::let_go_again(const MovedChunk& place) {
  Status first;
  for (auto at = space_.range().from(place.offset);
       at != space_.range().live().end() && at->first < place.range().end();) {
    const ByteRange range{at->first, at->second.chunk->size};
    ++at;  // before it is taken out
    const Status status = send_away(range, place.place.is_poisoned);
    if (!status.ok() && first.ok()) first = status;
  }
  return first;
}

// A chunk for each place, of its size: granted, or on the shelf; else made, in exchange for
// others of the shelf. Several that are smaller would do, and cost less (58 us each; some 46 to
// make one and 40 a 64 MiB to give others back), but that at every sleep and wake from then on:
// 300 of 2 MiB for 13 made a wake take 0.9 s for 0.4.
bool SleepingMemory::collect_into(Backing* backing, std::span<const MovedChunk> places, Grant* grant,
                                  Shortage* shortage) {
  Budget* full = nullptr;
  std::vector<PlacedChunk>& placements = backing->placements;
  std::size_t missing = 0;
  placements.reserve(places.size());
  for (const MovedChunk& each : places) {
    const std::size_t size = each.place.size;
    placements.push_back({each.offset, nullptr});  // first: what is taken has its place
    Chunk*& chunk = placements.back().chunk;
    if (grant != nullptr) chunk = grant->chunks.take_at_most(size, /*exact=*/true);
    if (chunk == nullptr && full == nullptr) {
      chunk = context_.store.take_at_most(group_, budget_, size, /*exact=*/true, &full);
    }
    if (chunk == nullptr) missing += size;
  }
  const std::size_t prepaid = grant == nullptr ? 0 : std::min(grant->prepaid_bytes, missing);
  Budget* refused = budget_.charge(missing - prepaid);
  std::size_t given_back = 0;
  if (refused != nullptr && group_.stands_under(*refused)) {  // which pays for its shelf
    given_back = exchange_shelved(missing - prepaid, missing);
    if (given_back != 0) refused = budget_.charge(missing - prepaid);
  }
  if (refused != nullptr) {
    *shortage = {missing - prepaid, refused, {}};
    return false;
  }
  if (grant != nullptr) grant->prepaid_bytes -= prepaid;
  // Also where there is room for both: else who has just left it there would hold twice its memory.
  if (given_back < missing) exchange_shelved(0, missing - given_back);
  for (std::size_t k = 0; k < places.size(); ++k) {
    Chunk*& chunk = placements[k].chunk;
    if (chunk != nullptr) continue;
    const std::size_t size = places[k].place.size;
    Status status;
    try {
      status = make_prepaid(size, &chunk);
    } catch (...) {
      budget_.refund(missing);
      throw;
    }
    if (!status.ok()) {
      budget_.refund(missing);
      *shortage = Shortage::of_driver(missing, status);
      return false;
    }
    missing -= size;
  }
  return true;
}

// Where the driver has no more, others of the shelf go first, if that is enough.
Status SleepingMemory::make_prepaid(std::size_t size, Chunk** chunk) {
  ChunkStore& store = context_.store;
  const Status status = store.create_prepaid(store.spec(size), budget_, chunk);
  if (status.code() != StatusCode::out_of_memory) return status;
  const std::size_t shelved = store.shelved_bytes(group_);
  MemoryInfo memory;
  if (!context_.driver.memory_info(context_.device, &memory).ok() || memory.free + shelved < size) return status;
  if (shelved == 0 || store.give_back(group_, size) == 0) return status;
  return store.create_prepaid(store.spec(size), budget_, chunk);
}

// Of what still rests on the group's shelf, in sizes that fit no place that was asked for, `bytes`
// go back to the driver, as so much is made in their stead. None where `charge`, for which it is
// done, would not fit with all of them. Returns how many went.
std::size_t SleepingMemory::exchange_shelved(std::size_t charge, std::size_t bytes) {
  const std::size_t shelved = context_.store.shelved_bytes(group_);
  const std::size_t lacks = charge - std::min(charge, budget_.headroom());
  if (shelved == 0 || shelved < lacks) return 0;
  return context_.store.give_back(group_, bytes);
}

bool SleepingMemory::collect(std::span<const MovedChunk> places, Grant* grant, Shortage* shortage) {
  Backing backing;
  try {
    if (collect_into(&backing, places, grant, shortage)) {
      for (const PlacedChunk& each : backing.placements) asleep_->collected.emplace(each.offset, each.chunk);
      return true;
    }
  } catch (...) {
    for (const PlacedChunk& each : backing.placements) asleep_->collected.erase(each.offset);
    space_.put_back(backing, grant);
    throw;
  }
  space_.put_back(backing, grant);
  return false;
}

void SleepingMemory::put_back_collected() {
  for (const auto& [offset, chunk] : asleep_->collected) context_.store.put(group_, chunk);
  asleep_->collected.clear();
}

Status SleepingMemory::map_collected(const MovedChunk& place, const StreamUse& filled_by, Epoch* wait_for) {
  if (place.is_there) {  // it may have lost its rights when it was not unmapped
    std::vector<ByteRange>& to_seal = asleep_->to_seal;
    const bool is_noted = std::find(to_seal.begin(), to_seal.end(), place.range()) != to_seal.end();
    if (place.place.is_read_only && !is_noted) to_seal.push_back(place.range());
    for (const Location& who : space_.accessors()) {
      if (const Status status = space_.range().set_access(place.range(), who, Access::read_write); !status.ok())
        return status;
    }
    const auto there = space_.range().covering(place.offset);
    if (there == space_.range().live().end() || is_blanked(*there->second.chunk)) return {};
    // It was another's, and could neither be filled nor be unmapped again.
    const Status status = blank({there->first, there->second.chunk}, place.place.is_poisoned, filled_by.stream);
    if (status.ok()) there->second.chunk->content.store(id_, std::memory_order_relaxed);
    return status;
  }
  const auto collected = asleep_->collected.find(place.offset);
  if (collected == asleep_->collected.end()) return {};
  const PlacedChunk placed{collected->first, collected->second};
  *wait_for = placed.chunk->last_use;
  // The GPU waits, where it can be made to.
  if (!context_.clock.order_before(filled_by, *wait_for).ok()) return {};
  *wait_for = kLongAgo;
  asleep_->to_seal.reserve(asleep_->to_seal.size() + 1);
  const std::vector<PlacedChunk> placements{placed};
  Status status = space_.range().map(placements, space_.accessors());
  if (status.ok()) status = blank(placed, place.place.is_poisoned, filled_by.stream);
  // What is mapped is the pool's, also where that failed: whoever asked undoes it.
  if (space_.range().live().count(placed.offset) == 0) return status;
  const PlaceOfChunk as_it_was = asleep_->gone.at(placed.offset);  // others may have registered it since it was planned
  asleep_->collected.erase(placed.offset);
  asleep_->gone.erase(placed.offset);
  if (status.ok()) placed.chunk->content.store(id_, std::memory_order_relaxed);  // else it is as it was
  placed.chunk->last_use = kLongAgo;
  if (as_it_was.is_withheld) space_.range().withhold(placed.offset);
  if (as_it_was.is_read_only) asleep_->to_seal.push_back(place.range());
  owner_.mapped(placed, filled_by.stream);
  return status;
}

// Memory that wakes reads as zero, or as poison, where no content comes to it: nobody else's is
// seen, nor what was thrown away.
Status SleepingMemory::blank(const PlacedChunk& placed, bool is_poisoned, Stream stream) {
  const OwnerId content = placed.chunk->content.load(std::memory_order_relaxed);
  const bool may_stay =
      !asleep_->is_discarded && !space_.kind().is_range() && (content == id_ || !context_.options.scrub);
  if (!is_poisoned && (content == kNobody || may_stay)) return {};
  const std::uint8_t byte = is_poisoned ? kPoisonByte : 0;
  return context_.driver.fill_async(context_.device, space_.range().base() + placed.offset, byte, placed.chunk->size,
                                    stream);
}

Status SleepingMemory::arrived(const MovedChunk& chunk) {
  for (auto at = asleep_->to_seal.begin(); at != asleep_->to_seal.end();) {
    if (at->offset < chunk.offset || at->end() > chunk.range().end()) {
      ++at;
      continue;
    }
    if (const Status status = space_.leave_no_writable_place({*at}); !status.ok()) return status;
    for (const Location& who : space_.accessors()) {
      if (const Status status = space_.range().set_access(*at, who, Access::read); !status.ok()) return status;
    }
    at = asleep_->to_seal.erase(at);
  }
  return {};
}

}  // namespace vmm
