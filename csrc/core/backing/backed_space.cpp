#include "core/backing/backed_space.h"

#include <algorithm>
#include <utility>

#include "core/memory/chunk_store.h"

namespace vmm {

BackedSpace::BackedSpace(const PoolContext& context, const SpaceKind& kind, const Belongs& belongs,
                         std::vector<Location> accessors)
    : context_(context),
      kind_(kind),
      owner_(belongs.owner),
      name_(belongs.name),
      id_(belongs.id),
      group_(belongs.group),
      budget_(belongs.budget),
      streams_(belongs.streams),
      accessors_(std::move(accessors)),
      blocks_(belongs.arena),
      placement_(blocks_, kind.page),
      growth_({kind.page, kind.is_uniform, kind.is_range(), kind.is_ordinary(), kind.grows_freely}) {}

void BackedSpace::prepare() {
  blocks_.keep_order(kind_.capacity);
  blocks_.donate({0, kind_.capacity}, kNeutral);
}

void BackedSpace::open(Address base, bool may_return) {
  range_ = std::make_unique<MappedRange>(context_.driver, base, kind_.capacity,
                                         may_return ? &context_.store.dormant() : nullptr);
  base_ = base;
}

// ------------------------------------------------------------------------ taking

Block* BackedSpace::take_range(ByteRange range, BlockState state, std::vector<Piece>* pieces) {
  const std::size_t had = pieces->size();
  Block* whole = nullptr;
  try {
    for (std::size_t at = range.offset; at < range.end();) {
      Block* free = blocks_.free_covering(at);
      VMM_CHECK(free != nullptr, "taking ", range.offset, "+", range.size, ": ", at, " is not free");
      const std::size_t end = std::min(free->end(), range.end());
      pieces->push_back({{at, end - at}, free->tag, free->epoch});
      Block* taken = blocks_.carve(free, at, end - at, state);
      if (whole == nullptr) {
        whole = taken;
      } else {
        blocks_.join(whole, taken);
      }
      at = end;
    }
  } catch (...) {
    if (whole != nullptr) {
      while (pieces->back().range.offset >= whole->end()) pieces->pop_back();
      untake(whole, std::span(*pieces).subspan(had));
    }
    pieces->resize(had);
    throw;
  }
  return whole;
}

void BackedSpace::untake(Block* block, std::span<const Piece> pieces) {
  for (std::size_t k = 0; k < pieces.size(); ++k) {
    Block* rest = k + 1 < pieces.size() ? blocks_.split(block, pieces[k + 1].range.offset) : nullptr;
    blocks_.free(block, pieces[k].tag, pieces[k].epoch);
    block = rest;
  }
}

Block* BackedSpace::take_bare(ByteRange range, BlockState state) {
  Block* const block = blocks_.carve(blocks_.free_covering(range.offset), range.offset, range.size, state);
  bare_bytes_ += range.size;
  return block;
}

void BackedSpace::free_bare(Block* block) {
  bare_bytes_ -= block->size();
  blocks_.free(block, kNeutral, kLongAgo);
}

bool BackedSpace::is_free(ByteRange range) const {
  for (std::size_t at = range.offset; at < range.end();) {
    const Block* free = blocks_.free_covering(at);
    if (free == nullptr) return false;
    at = free->end();
  }
  return true;
}

Epoch BackedSpace::last_use_of(ByteRange range) const {
  Epoch newest = streams_.graphs_end();
  for (std::size_t at = range.offset; at < range.end();) {
    const Block* free = blocks_.free_covering(at);
    if (free == nullptr) {
      at += kind_.page;
      continue;
    }
    if (free->tag != kNeutral) newest = std::max(newest, free->epoch);
    at = free->end();
  }
  return newest;
}

// ------------------------------------------------------------------------ access

bool BackedSpace::allows(const LiveMapping& mapping, Access access) const {
  return std::all_of(accessors_.begin(), accessors_.end(),
                     [&](const Location& who) { return mapping.access_of(who) == access; });
}

void BackedSpace::for_each_chunk_under(const std::vector<ByteRange>& stretches, const EachChunk& each) const {
  for (const ByteRange& stretch : stretches) {
    for (auto at = range_->reaching(stretch.offset); at != range_->live().end() && at->first < stretch.end(); ++at) {
      each(at->second.chunk);
    }
  }
}

Status BackedSpace::leave_no_writable_place(const std::vector<ByteRange>& stretches) {
  Status status;
  for_each_chunk_under(stretches, [&](Chunk* chunk) {
    if (status.ok()) status = context_.store.dormant().ban(chunk);
  });
  if (!status.ok()) may_return_again(stretches);
  return status;
}

void BackedSpace::may_return_again(const std::vector<ByteRange>& stretches) {
  for_each_chunk_under(stretches, [this](Chunk* chunk) { context_.store.dormant().allow(chunk); });
}

Status BackedSpace::add_accessor(Location who) {
  if (std::find(accessors_.begin(), accessors_.end(), who) != accessors_.end()) return {};
  if (const Status status = range_->clear_dormant(); !status.ok()) return status;
  const auto& live = range_->live();
  std::vector<ByteRange> given;
  given.reserve(live.size());  // first: what was given and not noted could not be taken back
  accessors_.reserve(accessors_.size() + 1);
  const auto let_in = [&]() -> Status {
    for (auto first = live.begin(); first != live.end();) {
      // One call a run: cost is per chunk all the same.
      auto last = first;
      std::size_t end = first->first + first->second.chunk->size;
      const Access of_others = first->second.access();
      while (++last != live.end() && last->first == end && last->second.access() == of_others) {
        end += last->second.chunk->size;
      }
      const Access access = of_others == Access::read ? Access::read : Access::read_write;  // sealed
      const ByteRange run{first->first, end - first->first};
      given.push_back(run);
      if (const Status status = range_->set_access(run, who, access); !status.ok()) return status;
      first = last;
    }
    return {};
  };
  // Nor does it keep any: it is none of those whom a seal stops.
  const auto undo = [&] {
    for (const ByteRange& each : given) range_->restore_access(each, who, Access::none);
  };
  try {
    if (const Status status = let_in(); !status.ok()) {
      undo();
      return status;
    }
  } catch (...) {
    undo();
    throw;
  }
  accessors_.push_back(who);
  return {};
}

}  // namespace vmm
