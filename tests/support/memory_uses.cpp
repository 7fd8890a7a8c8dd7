#include "support/memory_uses.h"

#include "base/units.h"

namespace vmm::testing {

std::string bytes_text(Address address, std::size_t size) {
  return "[" + format_hex(address) + ", " + std::to_string(size) + " bytes]";
}

std::string bytes_text(const Stretch& stretch) {
  return bytes_text(stretch.address, stretch.size) + " (chunk " + std::to_string(stretch.chunk) + " at " +
         std::to_string(stretch.offset) + ")";
}

// -- UseSet

LaneUses& UseSet::of(Lane lane) {
  for (LaneUses& uses : uses_) {
    if (uses.lane == lane) return uses;
  }
  uses_.push_back({lane, 0, 0, 0, 0});
  return uses_.back();
}

void UseSet::note(Lane lane, Seq seq, bool is_write, bool is_replay) {
  LaneUses& uses = of(lane);
  uses.any = seq;
  if (is_write) uses.write = seq;
  if (is_replay) uses.replay = seq;
}

void UseSet::join(const UseSet& other) {
  for (const LaneUses& more : other.uses_) {
    LaneUses& uses = of(more.lane);
    uses.any = std::max(uses.any, more.any);
    uses.write = std::max(uses.write, more.write);
    uses.replay = std::max(uses.replay, more.replay);
    uses.binding = std::max(uses.binding, more.binding);
  }
}

void UseSet::bind(Lane lane) {
  for (LaneUses& uses : uses_) {
    if (uses.lane == lane) uses.binding = uses.any;
  }
}

void UseSet::bind_all() {
  for (LaneUses& uses : uses_) uses.binding = uses.any;
}

void UseSet::bind_replays() {
  for (LaneUses& uses : uses_) uses.binding = std::max(uses.binding, uses.replay);
}

void UseSet::forget(const VectorClock& known) {
  std::erase_if(uses_, [&](const LaneUses& uses) { return known.covers(uses.lane, uses.any); });
}

// -- Chunks and mappings

void MemoryUses::create(ChunkHandle chunk, std::size_t size) {
  ChunkBytes& bytes = chunks_[chunk];
  bytes.size = size;
  bytes.pieces.emplace(0, Piece{});
}

void MemoryUses::drop_if_gone(ChunkHandle chunk) {
  const auto found = chunks_.find(chunk);
  if (found->second.released && found->second.mappings == 0) chunks_.erase(found);
}

void MemoryUses::release(ChunkHandle chunk) {
  chunks_.at(chunk).released = true;
  drop_if_gone(chunk);
}

void MemoryUses::map(Address address, std::size_t size, ChunkHandle chunk) {
  Mapping& mapping = mappings_[address];
  mapping.size = size;
  mapping.chunk = chunk;
  ++chunks_.at(chunk).mappings;
}

void MemoryUses::unmap(Address address, std::size_t size) {
  for (auto at = mappings_.lower_bound(address); at != mappings_.end() && at->first < address + size;) {
    const ChunkHandle chunk = at->second.chunk;
    --chunks_.at(chunk).mappings;
    at = mappings_.erase(at);
    drop_if_gone(chunk);
  }
}

void MemoryUses::set_access(Address address, std::size_t size, int device, Access access) {
  each_mapping(address, size, [&](Address /*at*/, Mapping& mapping) { mapping.access[device] = access; });
}

void MemoryUses::each_mapping(Address address, std::size_t size, const std::function<void(Address, Mapping&)>& visit) {
  auto at = mappings_.upper_bound(address);
  if (at != mappings_.begin() && std::prev(at)->first + std::prev(at)->second.size > address) --at;
  for (; at != mappings_.end() && at->first < address + size; ++at) visit(at->first, at->second);
}

bool MemoryUses::is_accessible(Address address, std::size_t size, int device, Access access) const {
  const Address end = address + size;
  auto at = mappings_.upper_bound(address);
  if (at == mappings_.begin()) return false;
  for (--at; address < end; ++at) {
    if (at == mappings_.end() || at->first > address || at->first + at->second.size <= address) return false;
    const auto given = at->second.access.find(device);
    if (given == at->second.access.end() || given->second < access) return false;
    address = at->first + at->second.size;
  }
  return true;
}

// The piece that begins at `offset`, split off where needed; end() at the end.
std::map<std::size_t, Piece>::iterator MemoryUses::split(ChunkBytes& chunk, std::size_t offset) {
  const auto after = chunk.pieces.lower_bound(offset);
  if (offset >= chunk.size || (after != chunk.pieces.end() && after->first == offset)) return after;
  return chunk.pieces.emplace_hint(after, offset, std::prev(after)->second);
}

void MemoryUses::each_piece(Address address, std::size_t size,
                            const std::function<void(const Stretch&, Piece&)>& visit) {
  each_mapping(address, size, [&](Address at, Mapping& mapping) {
    ChunkBytes& chunk = chunks_.at(mapping.chunk);
    const std::size_t first = address > at ? address - at : 0;
    const std::size_t last = std::min(mapping.size, address + size - at);
    auto piece = split(chunk, first);
    const auto end = split(chunk, last);
    for (; piece != end; ++piece) {
      const auto next = std::next(piece);
      const std::size_t stop = next == chunk.pieces.end() ? chunk.size : next->first;
      visit({at + piece->first, stop - piece->first, mapping.chunk, piece->first}, piece->second);
    }
  });
}

void MemoryUses::each_piece(const std::function<void(Piece&)>& visit) {
  for (auto& [handle, chunk] : chunks_) {
    for (auto& [offset, piece] : chunk.pieces) visit(piece);
  }
}

void MemoryUses::tidy(const VectorClock& known) {
  each_piece([&](Piece& piece) {
    piece.uses.forget(known);
    piece.former.forget(known);
    piece.moved.forget(known);
  });
  const auto without_history = [](const Piece& piece) {
    return piece.block == 0 && piece.uses.empty() && piece.former.empty() && piece.moved.empty();
  };
  for (auto& [handle, chunk] : chunks_) {
    for (auto at = chunk.pieces.begin(); at != chunk.pieces.end();) {
      const auto next = std::next(at);
      if (next == chunk.pieces.end()) break;
      if (at->second.owner == next->second.owner && without_history(at->second) && without_history(next->second)) {
        chunk.pieces.erase(next);
      } else {
        at = next;
      }
    }
  }
}

}  // namespace vmm::testing
