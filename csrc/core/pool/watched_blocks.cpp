#include "core/pool/watched_blocks.h"

#include <algorithm>
#include <cstdint>
#include <new>
#include <utility>

#include "base/check.h"
#include "core/debug/watch_log.h"

namespace vmm {

namespace {

std::size_t rounded(std::size_t bytes) { return align_up(std::max<std::size_t>(bytes, 1), kBlockAlignment); }

// Wrong bytes of a pattern that begins `first` bytes from its block's address.
void count_wrong(const std::vector<std::uint8_t>& bytes, std::ptrdiff_t first, Damage* damage) {
  for (std::size_t k = 0; k < bytes.size(); ++k) {
    if (bytes[k] == kPatternByte) continue;
    if (damage->bytes++ == 0) damage->first = first + static_cast<std::ptrdiff_t>(k);
  }
}

}  // namespace

bool WatchedBlocks::is_guard() const { return context_.log->mode().kind == DebugMode::Kind::guard; }

std::size_t WatchedBlocks::size_anywhere(std::size_t bytes) const {
  return is_guard() ? 0 : rounded(bytes) + 2 * kPatternBytes;
}

// ------------------------------------------------------------------------ taking

// Bare addresses for a block's pages and the one behind them, from where the last were
// found on, and at last from the start. Upper half first: what is not watched grows from
// below.
bool WatchedBlocks::find_guarded(std::size_t bytes, std::size_t* offset) {
  const auto [page, capacity] = std::pair(space_.kind().page, space_.kind().capacity);
  if (next_ == 0) next_ = align_down(capacity / 2, page);
  const FreeByOffset& free = space_.blocks().free_blocks();
  const auto find = [&, page = page](std::size_t from, std::size_t until) {
    const Block* at = free.from(from);
    for (; at != nullptr && at->offset < until; at = free.next(at)) {
      if (at->tag != kNeutral) continue;
      const std::size_t begin = align_up(std::max<std::size_t>(at->offset, from), page);
      if (begin >= at->end() || at->end() - begin < bytes) continue;
      *offset = begin;
      return true;
    }
    return false;
  };
  return find(next_, capacity) || find(0, next_);
}

// A block of `size` bytes at the end of pages of its own, and what is around it. nullptr,
// and no `shortage`: no addresses are left.
Block* WatchedBlocks::take_guarded(std::size_t size, StreamTag tag, Around* around, Grant* grant, Shortage* shortage) {
  const std::size_t page = space_.kind().page;
  const std::size_t pages = align_up(size, page);
  std::size_t offset = 0;
  if (!find_guarded(pages + page, &offset)) return nullptr;
  // Taken first: a chunk that is moved under the pages does not reach into them.
  Block* const behind = space_.take_bare({offset + pages, page}, BlockState::guard);
  Block* block = nullptr;
  try {
    BackedSpace::Request request;
    request.size = pages;
    request.where = SpaceRequest::Where::at;
    request.offset = offset;
    request.tag = tag;
    request.state = BlockState::guard;
    block = space_.place_at(request, offset, grant, shortage);
    if (block != nullptr && pages > size) {
      around->before = block;
      block = space_.blocks().split(block, offset + pages - size);
    }
  } catch (...) {
    if (around->before != nullptr) space_.blocks().free(around->before, tag, context_.clock.now());
    space_.free_bare(behind);
    throw;
  }
  if (block == nullptr) {
    space_.free_bare(behind);
    return nullptr;
  }
  around->behind = behind;
  next_ = offset + pages + page;
  if (around->before != nullptr) mapped_bytes_ += around->before->size();
  return block;
}

// The same anywhere, between two patterns.
Block* WatchedBlocks::take_between_patterns(std::size_t size, StreamTag tag, Around* around, Grant* grant,
                                            Shortage* shortage) {
  BackedSpace::Request request;
  request.size = size + 2 * kPatternBytes;
  if (space_.kind().no_split) request.size = align_up(request.size, space_.kind().page);
  request.tag = tag;
  request.state = BlockState::guard;
  Block* const before = space_.place(request, grant, shortage);
  if (before == nullptr) return nullptr;
  Block* block = nullptr;
  try {
    block = space_.blocks().split(before, before->offset + kPatternBytes);
    around->behind = space_.blocks().split(block, block->offset + size);
  } catch (...) {
    if (block != nullptr) space_.blocks().free(block, tag, context_.clock.now());
    space_.blocks().free(before, tag, context_.clock.now());
    throw;
  }
  around->before = before;
  mapped_bytes_ += before->size() + around->behind->size();
  return block;
}

// Writes the patterns around what was asked for, behind `last_use`. Where the stream is
// being captured there are none: a graph would write them again whenever it is replayed.
Status WatchedBlocks::write_patterns(const Block& block, std::size_t requested, Epoch last_use, Around* around) {
  const bool is_bare_behind = space_.range().missing_bytes({block.end(), 1}) != 0;
  const std::size_t front =
      around->before == nullptr ? 0 : std::min<std::size_t>(kPatternBytes, around->before->size());
  const std::size_t beyond = is_bare_behind ? 0 : std::min<std::size_t>(kPatternBytes, around->behind->size());
  const std::size_t back = block.size() - requested + beyond;
  const Address address = space_.range().base() + block.offset;
  if (front + back == 0) return {};
  Status status = streams_.order_behind(block.tag, last_use);
  const auto fill = [&](Address at, std::size_t bytes) {
    if (bytes == 0 || !status.ok()) return;
    status = context_.driver.fill_async(context_.device, at, kPatternByte, bytes, streams_[block.tag].stream);
    streams_.note_zeroing(block.tag);
  };
  fill(address - front, front);
  fill(address + requested, back);
  if (status.code() == StatusCode::not_supported) {
    context_.log->missed();
    return {};
  }
  if (!status.ok()) return status;
  around->front = front;
  around->back = back;
  return {};
}

void WatchedBlocks::note(const Block& block, std::size_t requested, const Around& around,
                         const std::shared_ptr<const std::string>& stack) {
  const Address base = space_.range().base();
  live_.emplace(block.offset, around);
  WatchedBlock watched;
  watched.address = base + block.offset;
  watched.requested = requested;
  watched.size = block.size();
  watched.memory_end = base + (is_guard() ? block.end() : around.behind->end());
  watched.zone_begin = base + (around.before != nullptr ? around.before->range().offset : block.range().offset);
  watched.zone_end = base + around.behind->end();
  watched.front = around.front;
  watched.back = around.back;
  watched.stream = streams_[block.tag].stream;
  if (name_ == nullptr) name_ = std::make_shared<const std::string>(of_pool_);
  watched.pool = name_;
  watched.stack = stack;
  context_.log->began(std::move(watched));
}

Block* WatchedBlocks::take(std::size_t bytes, StreamTag tag, Epoch last_use,
                           const std::shared_ptr<const std::string>& stack, Grant* grant, Shortage* shortage) {
  // Not to whole pages where nothing is split: what is around it fills them.
  const std::size_t size = rounded(bytes);
  Around around;
  Block* const block = is_guard() ? take_guarded(size, tag, &around, grant, shortage)
                                  : take_between_patterns(size, tag, &around, grant, shortage);
  if (block == nullptr) return nullptr;
  block->tag = tag;
  Status status;
  try {
    status = write_patterns(*block, bytes, last_use, &around);
    if (status.ok()) note(*block, bytes, around, stack);
  } catch (...) {
    live_.erase(block->offset);
    context_.log->done(context_.log->freed(space_.range().base() + block->offset), /*is_unmapped=*/false);
    take_back(block, around);
    throw;
  }
  if (status.ok()) return block;
  take_back(block, around);
  *shortage = Shortage::of_driver(bytes, status);
  return nullptr;
}

void WatchedBlocks::untake(Block* block) {
  const auto found = live_.find(block->offset);
  VMM_CHECK(found != live_.end(), "watched block at ", block->offset);
  const Around around = found->second;
  live_.erase(found);
  context_.log->done(context_.log->freed(space_.range().base() + block->offset), /*is_unmapped=*/false);
  take_back(block, around);
}

// Nobody has used it, but for its patterns.
void WatchedBlocks::take_back(Block* block, const Around& around) {
  const std::size_t page = space_.kind().page;
  const std::size_t first = align_down(block->offset, page);
  const ByteRange pages{first, align_up(block->end(), page) - first};
  const Epoch now = context_.clock.now();
  streams_[block->tag].last_free = now;
  free_around(block, around, now);
  if (is_guard()) space_.shelve_idle_chunks(pages);
}

// ----------------------------------------------------------------------- freeing

// Frees the block and what is around it, at once.
void WatchedBlocks::free_around(Block* block, const Around& around, Epoch epoch) {
  const StreamTag tag = block->tag;
  for (Block* piece : {around.before, around.behind, block}) {
    if (piece == nullptr) continue;
    if (space_.range().missing_bytes(piece->range()) != 0) {
      space_.free_bare(piece);
      continue;
    }
    if (piece != block) mapped_bytes_ -= piece->size();
    space_.blocks().free(piece, tag, epoch);
  }
}

void WatchedBlocks::free(Block* block, Epoch epoch) noexcept {
  const auto found = live_.find(block->offset);
  VMM_CHECK(found != live_.end(), "watched block at ", block->offset);
  const Around around = found->second;
  live_.erase(found);
  Freed freed{nullptr,
              is_guard() ? around.behind : nullptr,
              epoch,
              block->offset,
              block->requested,
              around.front,
              around.back,
              context_.log->freed(space_.range().base() + block->offset)};
  // A graph's may be used at any time: nothing is told by what it is.
  bool is_noted = !space_.is_pinned() || readers_ != 0;
  if (is_noted) {
    try {
      freed_.push_back(freed);
    } catch (const std::bad_alloc&) {
      is_noted = false;
    }
  }
  if (!is_noted) {
    free_around(block, around, epoch);
    context_.log->done(freed.number, /*is_unmapped=*/false);
    return;
  }
  Block* whole = block;
  if (around.before != nullptr) {
    mapped_bytes_ -= around.before->size();
    around.before->tag = block->tag;
    space_.blocks().join(around.before, block);
    whole = around.before;
  }
  if (!is_guard()) {
    mapped_bytes_ -= around.behind->size();
    space_.blocks().join(whole, around.behind);
  }
  whole->state = BlockState::quarantined;
  freed_bytes_ += whole->size();
  freed_.back().block = whole;
}

std::vector<WatchedBlocks::Freed> WatchedBlocks::take_passed() {
  std::vector<Freed> passed;
  if (freed_.empty() || readers_ != 0) return passed;
  context_.clock.cover(freed_.front().epoch);  // one tick under way is enough
  context_.clock.poll();
  auto last = freed_.begin();
  while (last != freed_.end() && context_.clock.has_passed(last->epoch)) ++last;
  passed.assign(freed_.begin(), last);
  freed_.erase(freed_.begin(), last);
  being_judged_ += passed.size();
  return passed;
}

void WatchedBlocks::finish(std::span<const Freed> passed) noexcept {
  for (const Freed& freed : passed) {
    --being_judged_;
    const ByteRange range = freed.block->range();
    freed_bytes_ -= range.size;
    space_.blocks().free(freed.block, freed.block->tag, freed.epoch);
    bool is_unmapped = false;
    if (freed.behind != nullptr) {
      space_.free_bare(freed.behind);
      try {
        space_.shelve_idle_chunks(range);
        is_unmapped = space_.range().missing_bytes(range) == range.size;
      } catch (const std::bad_alloc&) {
        // It is idle, and stays where it was: a use of it does not fault.
      }
    }
    context_.log->done(freed.number, is_unmapped);
  }
}

// ----------------------------------------------------------------------- judging

std::vector<WatchedBlocks::Freed> WatchedBlocks::begin_reading(const BlockDirectory& directory) {
  std::vector<Freed> found;
  for (const auto& [offset, around] : live_) {
    const Block* block = directory.find(offset);
    if (block == nullptr || block->offset != offset) continue;  // freed, and in use by a recorded stream
    found.push_back({nullptr, nullptr, kLongAgo, offset, block->requested, around.front, around.back});
  }
  ++readers_;
  return found;
}

void WatchedBlocks::judge(const PoolContext& context, Address base, const Freed& block) noexcept {
  const Address address = base + block.offset;
  Damage damage;
  try {
    std::vector<std::uint8_t> bytes;
    const auto look = [&](Address at, std::size_t size, std::ptrdiff_t first) {
      bytes.resize(size);
      if (size == 0 || !context.driver.read(context.device, bytes.data(), at, size).ok()) return;
      count_wrong(bytes, first, &damage);
    };
    look(address - block.front, block.front, -static_cast<std::ptrdiff_t>(block.front));
    look(address + block.requested, block.back, static_cast<std::ptrdiff_t>(block.requested));
    if (damage.bytes != 0) context.log->damaged(address, damage.first, damage.bytes);
  } catch (const std::bad_alloc&) {
    // Whoever looks has taken it from its pool, and has to give it on.
  }
}

}  // namespace vmm
