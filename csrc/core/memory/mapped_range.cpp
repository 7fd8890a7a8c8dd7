#include "core/memory/mapped_range.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "base/check.h"

namespace vmm {

namespace {

// Calls `each(first, last)` for every contiguous run of placements.
template <typename Each>
Status for_each_run(std::span<const PlacedChunk> placements, const Each& each) {
  for (std::size_t first = 0; first < placements.size();) {
    std::size_t last = first;
    std::size_t end = placements[first].offset + placements[first].chunk->size;
    while (last + 1 < placements.size() && placements[last + 1].offset == end) {
      ++last;
      end += placements[last].chunk->size;
    }
    if (const Status status = each(placements[first].offset, end - placements[first].offset); !status.ok()) {
      return status;
    }
    first = last + 1;
  }
  return {};
}

}  // namespace

Access LiveMapping::access_of(Location who) const {
  for (const auto& [location, access] : rights) {
    if (location == who) return access;
  }
  return Access::none;
}

Access LiveMapping::access() const {
  Access strongest = Access::none;
  for (const auto& [location, access] : rights) strongest = std::max(strongest, access);
  return strongest;
}

MappedRange::~MappedRange() {
  if (dormant_ != nullptr) dormant_->abandon(base_, size_);
}

// Takes the first `count` back, and what was dormant to where it was. What the driver will
// not let go of is live from now on, and serves nobody.
void MappedRange::undo(std::span<const PlacedChunk> placements, std::size_t count, const std::vector<bool>& was_dormant,
                       Map& fresh) {
  for (std::size_t k = placements.size(); k-- > 0;) {
    const auto& [offset, chunk] = placements[k];
    const Address address = base_ + offset;
    if (!was_dormant[k] && k >= count) continue;
    if (!was_dormant[k] || !dormant_->keep(address, chunk, &unmapped_by_driver_)) {
      const Status undone = driver_.unmap(address, chunk->size);
      if (!undone.ok() && undone.code() != StatusCode::driver_gone) {
        Map::node_type refused = fresh.extract(offset);
        refused.mapped().rights.clear();
        live_.insert(std::move(refused));
        mapped_bytes_ += chunk->size;
        continue;
      }
      unmapped_by_driver_.fetch_add(1, std::memory_order_relaxed);
    }
    chunk->note_unmapped();
  }
}

// Claims what is dormant in its very place, and unmaps whatever else is in the way: before
// anything is mapped, as an unmap between a chunk's map and its set_access costs the driver a
// call more (CudaDriver::unmap()).
Status MappedRange::make_way(std::span<const PlacedChunk> placements, std::vector<bool>* was_dormant) {
  if (dormant_ == nullptr) return {};
  for (std::size_t k = 0; k < placements.size(); ++k) {
    const auto& [offset, chunk] = placements[k];
    if (dormant_->claim(base_ + offset, chunk)) {
      chunk->note_mapped();
      (*was_dormant)[k] = true;
    } else if (const Status status = dormant_->clear(base_ + offset, chunk->size); !status.ok()) {
      return status;
    }
  }
  return {};
}

Status MappedRange::map(std::span<const PlacedChunk> placements, std::span<const Location> accessors) {
  static std::atomic<std::uint64_t> mappings{0};
  // What is mapped has to be noted, so the room for it comes first.
  Map fresh;
  LiveMapping mapping;
  for (const Location& who : accessors) mapping.rights.emplace_back(who, Access::read_write);
  for (const auto& [offset, chunk] : placements) {
    mapping.chunk = chunk;
    mapping.number = mappings.fetch_add(1, std::memory_order_relaxed);
    fresh.emplace_hint(fresh.end(), offset, mapping);
  }
  std::vector<bool> was_dormant(placements.size());
  std::vector<PlacedChunk> to_open;  // the others
  to_open.reserve(placements.size());
  std::size_t count = 0;  // of the placements: the driver has mapped so many, but for the dormant ones
  const auto open_all = [&]() -> Status {
    if (const Status status = make_way(placements, &was_dormant); !status.ok()) return status;
    for (; count < placements.size(); ++count) {
      if (was_dormant[count]) continue;
      const auto& [offset, chunk] = placements[count];
      if (const Status status = driver_.map(base_ + offset, chunk->size, chunk->handle); !status.ok()) return status;
      chunk->note_mapped();
      ++mapped_by_driver_;
      to_open.push_back(placements[count]);
    }
    return for_each_run(to_open, [&](std::size_t offset, std::size_t size) {
      for (const Location& who : accessors) {
        const Status given = driver_.set_access(base_ + offset, size, who, Access::read_write);
        if (!given.ok()) return given;
      }
      return Status();
    });
  };
  try {
    if (const Status status = open_all(); !status.ok()) {
      undo(placements, count, was_dormant, fresh);
      return status;
    }
  } catch (...) {  // a driver may lack memory for its own notes
    undo(placements, count, was_dormant, fresh);
    throw;
  }
  live_.merge(fresh);
  for (const PlacedChunk& placement : placements) mapped_bytes_ += placement.chunk->size;
  return {};
}

Status MappedRange::unmap(ByteRange range) {
  auto found = live_.find(range.offset);
  VMM_CHECK(found != live_.end(), "no mapping at ", range.offset);
  if (const Status status = driver_.unmap(base_ + range.offset, range.size); !status.ok()) return status;
  for (; found != live_.end() && found->first < range.end(); found = live_.erase(found)) {
    unmapped_by_driver_.fetch_add(1, std::memory_order_relaxed);
    found->second.chunk->note_unmapped();
    mapped_bytes_ -= found->second.chunk->size;
  }
  return {};
}

Chunk* MappedRange::retire(std::size_t offset, Epoch last_use, Fate fate) {
  const auto found = live_.find(offset);
  VMM_CHECK(found != live_.end(), "no mapping at ", offset);
  const LiveMapping& mapping = found->second;
  Chunk* const chunk = mapping.chunk;
  const bool is_to_be_told = fate != Fate::in_vain && mapping.is_to_be_told();
  const bool may_stay = dormant_ != nullptr && fate == Fate::may_return &&
                        std::all_of(mapping.rights.begin(), mapping.rights.end(),
                                    [](const auto& right) { return right.second == Access::read_write; });
  retired_.emplace(last_use, Retired{{offset, chunk->size}, chunk, is_to_be_told, may_stay});
  mapped_bytes_ -= chunk->size;
  live_.erase(found);
  return chunk;
}

void MappedRange::forget_counts() {
  mapped_by_driver_ = 0;
  unmapped_by_driver_.store(0, std::memory_order_relaxed);
}

Epoch MappedRange::last_retired_use() const { return retired_.empty() ? kLongAgo : retired_.rbegin()->first; }

std::vector<ByteRange> MappedRange::drop_retired(const Clock& clock, const std::function<void(ByteRange)>& before) {
  std::size_t passed = 0;
  for (auto at = retired_.begin(); at != retired_.end() && clock.has_passed(at->first); ++at) ++passed;
  std::vector<ByteRange> freed;
  freed.reserve(passed);  // first: an address that could not be told of would never be free again
  for (auto at = retired_.begin(); passed > 0; --passed) {
    Retired& retired = at->second;
    if (retired.is_to_be_told && before) before(retired.range);
    retired.is_to_be_told = false;
    const Address address = base_ + retired.range.offset;
    if (!retired.may_stay || !dormant_->keep(address, retired.chunk, &unmapped_by_driver_)) {
      const Status status = driver_.unmap(address, retired.range.size);
      // A failing call keeps the mapping: try again another time.
      if (!status.ok() && status.code() != StatusCode::driver_gone) {
        refused_ = status;
        ++at;
        continue;
      }
      unmapped_by_driver_.fetch_add(1, std::memory_order_relaxed);
    }
    retired.chunk->note_unmapped();
    freed.push_back(retired.range);
    at = retired_.erase(at);
  }
  return freed;
}

std::vector<DormantMappings::Dormant> MappedRange::dormant_in(ByteRange range, std::size_t beyond) const {
  if (dormant_ == nullptr) return {};
  return dormant_->within(base_ + range.offset, range.size, beyond);
}

Status MappedRange::clear_dormant() {
  if (dormant_ == nullptr) return {};
  for (auto& [last_use, retired] : retired_) retired.may_stay = false;
  return dormant_->clear(base_, size_);
}

Status MappedRange::set_access(ByteRange range, Location who, Access access) {
  // Before the call: what it gives has to be noted, and one that fails may have changed some.
  for (auto it = live_.lower_bound(range.offset); it != live_.end() && it->first < range.end(); ++it) {
    auto& rights = it->second.rights;
    const bool is_there =
        std::any_of(rights.begin(), rights.end(), [&](const auto& right) { return right.first == who; });
    if (!is_there) rights.reserve(rights.size() + 1);
    if (access == Access::read_write) ++it->second.times_writable;
  }
  if (const Status status = driver_.set_access(base_ + range.offset, range.size, who, access); !status.ok()) {
    return status;
  }
  for (auto it = live_.lower_bound(range.offset); it != live_.end() && it->first < range.end(); ++it) {
    auto& rights = it->second.rights;
    const auto held = std::find_if(rights.begin(), rights.end(), [&](const auto& right) { return right.first == who; });
    if (held != rights.end()) {
      held->second = access;
    } else {
      rights.emplace_back(who, access);
    }
  }
  return {};
}

void MappedRange::restore_access(ByteRange range, Location who, Access access) noexcept {
  try {
    set_access(range, who, access).ignore();
  } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): as the driver's refusal
  }
}

MappedRange::Map::const_iterator MappedRange::covering(std::size_t offset) const {
  auto after = live_.upper_bound(offset);
  if (after == live_.begin()) return live_.end();
  --after;
  return after->first + after->second.chunk->size > offset ? after : live_.end();
}

MappedRange::Map::const_iterator MappedRange::reaching(std::size_t offset) const {
  const auto at = covering(offset);
  return at != live_.end() ? at : from(offset);
}

// Calls `each(offset, size)` for every stretch of `range` without a mapping.
template <typename Each>
void MappedRange::for_each_gap(ByteRange range, const Each& each) const {
  std::size_t at = range.offset;
  for (auto it = reaching(at); it != live_.end() && it->first < range.end(); ++it) {
    if (it->first > at) each(at, it->first - at);
    at = it->first + it->second.chunk->size;
  }
  if (at < range.end()) each(at, range.end() - at);
}

std::vector<ByteRange> MappedRange::gaps(ByteRange range) const {
  std::vector<ByteRange> found;
  for_each_gap(range, [&found](std::size_t offset, std::size_t size) { found.push_back({offset, size}); });
  return found;
}

std::size_t MappedRange::missing_bytes(ByteRange range) const {
  std::size_t bytes = 0;
  for_each_gap(range, [&bytes](std::size_t /*offset*/, std::size_t size) { bytes += size; });
  return bytes;
}

}  // namespace vmm
