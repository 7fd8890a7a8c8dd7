// Pool: blocks that debug mode watches.
//
// With `guard` a block has pages for itself and stands at their end, with a page of
// addresses without memory behind it. A freed one is unmapped as soon as its fence has
// passed. Addresses are used in turn, so that the ones freed last are the last to be used
// again. Every byte that nobody asked for beside it, up to 512 on each side, has a pattern.
//
// With `canary` a block is placed like any, with 512 bytes of pattern on each side.
//
// Patterns are written on the block's stream, behind whatever else used the memory: whoever
// asks may make the stream wait for that only before the first use of their own. They are
// looked at when the block is freed and the device's clock has passed that, with no lock
// held: nothing queued can write there any more, and nobody else has the memory yet.
//
// A pool of a graph watches nothing: what its memory shows has to stay where it is as long
// as the graph lives, and what is freed within a capture is used again within it.
#include <algorithm>
#include <array>
#include <utility>

#include "base/check.h"
#include "core/debug/watch_log.h"
#include "core/pool/pool.h"

namespace vmm {

// Bare addresses for a block's pages and the one behind them, from where the last were
// found on, and at last from the start. Upper half first: what is not watched grows from
// below.
bool Pool::find_guarded(std::size_t bytes, std::size_t* offset) {
  if (watch_.next == 0) watch_.next = align_down(capacity_ / 2, page_);
  const FreeByOffset& free = large_.free_blocks();
  const auto find = [&](std::size_t from, std::size_t until) VMM_REQUIRES(mutex_) {
    const Block* at = free.from(from);
    for (; at != nullptr && at->offset < until; at = free.next(at)) {
      if (at->tag != kNeutral) continue;
      const std::size_t begin = align_up(std::max<std::size_t>(at->offset, from), page_);
      if (begin >= at->end() || at->end() - begin < bytes) continue;
      *offset = begin;
      return true;
    }
    return false;
  };
  return find(watch_.next, capacity_) || find(0, watch_.next);
}

// A block of `size` bytes at the end of pages of its own, and what is around it. nullptr,
// and no `shortage`: no addresses are left.
Block* Pool::take_guarded(std::size_t size, StreamTag tag, PoolWatch::Around* around, Grant* grant,
                          Shortage* shortage) {
  const std::size_t pages = align_up(size, page_);
  std::size_t offset = 0;
  if (!find_guarded(pages + page_, &offset)) return nullptr;
  // Taken first: a chunk that is moved under the pages does not reach into them.
  Block* const behind = large_.carve(large_.free_covering(offset + pages), offset + pages, page_, BlockState::guard);
  Block* block = nullptr;
  try {
    Request request;
    request.size = pages;
    request.where = Request::Where::at;
    request.offset = offset;
    request.tag = tag;
    request.state = BlockState::guard;
    block = back_and_take(request, offset, grant, shortage);
    if (block != nullptr && pages > size) {
      around->before = block;
      block = large_.split(block, offset + pages - size);
    }
  } catch (...) {
    if (around->before != nullptr) large_.free(around->before, tag, context_.clock.now());
    large_.free(behind, kNeutral, kLongAgo);
    throw;
  }
  if (block == nullptr) {
    large_.free(behind, kNeutral, kLongAgo);
    return nullptr;
  }
  around->behind = behind;
  watch_.next = offset + pages + page_;
  if (around->before != nullptr) watch_.mapped_bytes += around->before->size();
  watch_.bare_bytes += page_;
  return block;
}

// The same anywhere, between two patterns.
Block* Pool::take_between_patterns(std::size_t size, StreamTag tag, PoolWatch::Around* around, Grant* grant,
                                   Shortage* shortage) {
  Request request;
  request.size = size + 2 * kPatternBytes;
  if (no_split_) request.size = align_up(request.size, page_);
  request.tag = tag;
  request.state = BlockState::guard;
  Block* const before = place(request, grant, shortage);
  if (before == nullptr) return nullptr;
  Block* block = nullptr;
  try {
    block = large_.split(before, before->offset + kPatternBytes);
    around->behind = large_.split(block, block->offset + size);
  } catch (...) {
    if (block != nullptr) large_.free(block, tag, context_.clock.now());
    large_.free(before, tag, context_.clock.now());
    throw;
  }
  around->before = before;
  watch_.mapped_bytes += before->size() + around->behind->size();
  return block;
}

// When what `bytes` are about to be taken from was last used; 0: whatever is about to be
// taken. Placing may move any memory that the stream has freed, and on its way ends pending
// frees and gives up spare slabs, which no free block tells of before.
Epoch Pool::last_use_before(std::size_t bytes, StreamTag tag) const {
  // The very block, where best fit decides; it may have been freed long before the latest.
  const Block* fit = no_split_ || bytes == 0 ? nullptr : large_.best_fit(bytes, tag);
  if (fit != nullptr) return fit->epoch;
  if (!pending_.empty()) return context_.clock.now();
  return free_mapped_bytes() + slabs_.spare_bytes() == 0 ? kLongAgo : streams_[tag].last_free;
}

// Writes the patterns around what was asked for, behind `last_use`. Where the stream is
// being captured there are none: a graph would write them again whenever it is replayed.
Status Pool::write_patterns(const Block& block, std::size_t requested, Epoch last_use, PoolWatch::Around* around) {
  const bool is_bare_behind = range_->missing_bytes({block.end(), 1}) != 0;
  const std::size_t front =
      around->before == nullptr ? 0 : std::min<std::size_t>(kPatternBytes, around->before->size());
  const std::size_t beyond = is_bare_behind ? 0 : std::min<std::size_t>(kPatternBytes, around->behind->size());
  const std::size_t back = block.size() - requested + beyond;
  const Address address = base_ + block.offset;
  if (front + back == 0) return {};
  Status status = streams_.order_behind(block.tag, last_use);
  const auto fill = [&](Address at, std::size_t bytes) VMM_REQUIRES(mutex_) {
    if (bytes == 0 || !status.ok()) return;
    status = context_.driver.fill_async(context_.device, at, kPatternByte, bytes, streams_[block.tag].stream);
    streams_.note_zeroing(block.tag);
  };
  fill(address - front, front);
  fill(address + requested, back);
  if (status.code() == StatusCode::not_supported) return {};
  if (!status.ok()) return status;
  around->front = front;
  around->back = back;
  return {};
}

Address Pool::try_allocate_watched(std::size_t bytes, Stream stream, const std::shared_ptr<const std::string>& stack,
                                   Grant* grant, Shortage* shortage) {
  {
    const GatheredLock lock(*this);
    if (!takes_requests(shortage)) return 0;
    if (!pinned_ && bytes <= capacity_ - 2 * kPatternBytes && !can_never_hold(bytes, shortage)) {
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
  const bool is_guard = context_.log->mode().kind == DebugMode::Kind::guard;
  // Not to whole pages where nothing is split: what is around it fills them.
  const std::size_t size = align_up(std::max<std::size_t>(bytes, 1), kBlockAlignment);
  PoolWatch::Around around;
  const Epoch last_use = is_guard ? last_use_before(0, tag) : last_use_before(size + 2 * kPatternBytes, tag);
  Block* const block = is_guard ? take_guarded(size, tag, &around, grant, shortage)
                                : take_between_patterns(size, tag, &around, grant, shortage);
  if (block == nullptr) return 0;
  block->tag = tag;
  const std::size_t offset = block->offset;
  const ByteRange pages{align_down(offset, page_), align_up(offset + size, page_) - align_down(offset, page_)};
  const auto undo = [&]() VMM_REQUIRES(mutex_) {
    const Epoch now = context_.clock.now();
    streams_[tag].last_free = now;
    free_around(block, around, now);
    if (is_guard) shelve_idle_chunks(pages);
  };
  try {
    if (const Status status = write_patterns(*block, bytes, last_use, &around); !status.ok()) {
      undo();
      *shortage = Shortage::of_driver(bytes, status);
      return 0;
    }
    watch_.live.emplace(offset, around);
    WatchedBlock watched;
    watched.address = base_ + offset;
    watched.requested = bytes;
    watched.size = size;
    watched.memory_end = base_ + (is_guard ? offset + size : around.behind->end());
    watched.zone_begin = base_ + (around.before != nullptr ? around.before->range().offset : offset);
    watched.zone_end = base_ + around.behind->end();
    watched.front = around.front;
    watched.back = around.back;
    watched.stream = stream;
    if (watch_.name == nullptr) watch_.name = std::make_shared<const std::string>(name_);
    watched.pool = watch_.name;
    watched.stack = stack;
    context_.log->began(std::move(watched));
    directory_->insert(block);
  } catch (...) {
    watch_.live.erase(offset);
    context_.log->freed(base_ + offset);
    undo();
    throw;
  }
  growth_.note_handed_out(size);
  begin_block(block, bytes);
  block->state = BlockState::watched;
  return base_ + offset;
}

// Frees the block and what is around it, at once.
void Pool::free_around(Block* block, const PoolWatch::Around& around, Epoch epoch) {
  const StreamTag tag = block->tag;
  for (Block* piece : {around.before, around.behind, block}) {
    if (piece == nullptr) continue;
    const bool is_bare = range_->missing_bytes(piece->range()) != 0;
    if (piece != block) (is_bare ? watch_.bare_bytes : watch_.mapped_bytes) -= piece->size();
    large_.free(piece, is_bare ? kNeutral : tag, is_bare ? kLongAgo : epoch);
  }
}

// Its owner has let go of it. Never throws.
void Pool::free_watched(Block* block, Epoch epoch) {
  const auto found = watch_.live.find(block->offset);
  VMM_CHECK(found != watch_.live.end(), "watched block at ", block->offset);
  const PoolWatch::Around around = found->second;
  watch_.live.erase(found);
  context_.log->freed(base_ + block->offset);
  const bool is_guard = context_.log->mode().kind == DebugMode::Kind::guard;
  PoolWatch::Freed freed{
      nullptr, is_guard ? around.behind : nullptr, epoch, block->offset, block->requested, around.front, around.back};
  bool is_noted = !pinned_ || watch_.readers != 0;  // a graph's may be used at any time: nothing is told by what it is
  if (is_noted) {
    try {
      watch_.freed.push_back(freed);
    } catch (const std::bad_alloc&) {
      is_noted = false;
    }
  }
  if (!is_noted) {
    const Address address = base_ + block->offset;
    free_around(block, around, epoch);
    context_.log->unmapped(address);
    return;
  }
  Block* whole = block;
  if (around.before != nullptr) {
    watch_.mapped_bytes -= around.before->size();
    around.before->tag = block->tag;
    large_.join(around.before, block);
    whole = around.before;
  }
  if (!is_guard) {
    watch_.mapped_bytes -= around.behind->size();
    large_.join(whole, around.behind);
  }
  whole->state = BlockState::quarantined;
  watch_.freed_bytes += whole->size();
  watch_.freed.back().block = whole;
}

// Nothing uses it any more.
void Pool::finish_watched(const PoolWatch::Freed& freed) {
  const ByteRange range = freed.block->range();
  watch_.freed_bytes -= range.size;
  large_.free(freed.block, freed.block->tag, freed.epoch);
  if (freed.behind != nullptr) {
    watch_.bare_bytes -= freed.behind->size();
    large_.free(freed.behind, kNeutral, kLongAgo);
    shelve_idle_chunks(range);
  }
  context_.log->unmapped(base_ + freed.offset);
}

namespace {

// Wrong bytes of a pattern that begins `first` bytes from its block's address.
void count_wrong(const std::vector<std::uint8_t>& bytes, std::ptrdiff_t first, Damage* damage) {
  for (std::size_t k = 0; k < bytes.size(); ++k) {
    if (bytes[k] == kPatternByte) continue;
    if (damage->bytes++ == 0) damage->first = first + static_cast<std::ptrdiff_t>(k);
  }
}

}  // namespace

// Reads the patterns around a block and logs what is wrong with them. True: something new
// is. What cannot be read is not judged.
bool Pool::judge(const PoolWatch::Freed& block) const {
  const Address address = base_ + block.offset;
  Damage damage;
  std::vector<std::uint8_t> bytes;
  const auto look = [&](Address at, std::size_t size, std::ptrdiff_t first) {
    bytes.resize(size);
    if (size == 0 || !context_.driver.read(context_.device, bytes.data(), at, size).ok()) return;
    count_wrong(bytes, first, &damage);
  };
  look(address - block.front, block.front, -static_cast<std::ptrdiff_t>(block.front));
  look(address + block.requested, block.back, static_cast<std::ptrdiff_t>(block.requested));
  return damage.bytes != 0 && context_.log->damaged(address, damage.first, damage.bytes);
}

bool Pool::is_being_judged() const {
  const MutexLock lock(mutex_);
  return watch_.leaving != 0 || watch_.readers != 0;
}

bool Pool::settle_watched() {
  std::vector<PoolWatch::Freed> passed;
  {
    const MutexLock lock(mutex_);
    if (watch_.freed.empty() || watch_.readers != 0 || range_ == nullptr) return false;
    context_.clock.cover(watch_.freed.front().epoch);  // one tick under way is enough
    context_.clock.poll();
    auto last = watch_.freed.begin();
    while (last != watch_.freed.end() && context_.clock.has_passed(last->epoch)) ++last;
    if (last == watch_.freed.begin()) return false;
    passed.assign(watch_.freed.begin(), last);
    watch_.freed.erase(watch_.freed.begin(), last);
    watch_.leaving += passed.size();
  }
  for (const PoolWatch::Freed& freed : passed) judge(freed);
  const MutexLock lock(mutex_);
  watch_.leaving -= passed.size();
  for (const PoolWatch::Freed& freed : passed) finish_watched(freed);
  return true;
}

Status Pool::check_watched() {
  std::vector<PoolWatch::Freed> live;
  {
    const MutexLock lock(mutex_);
    if (watch_.live.empty() || range_ == nullptr) return {};
    for (const auto& [offset, around] : watch_.live) {
      const Block* block = directory_->find(offset);
      if (block == nullptr || block->offset != offset) continue;  // freed, and in use by a recorded stream
      live.push_back({nullptr, nullptr, kLongAgo, offset, block->requested, around.front, around.back});
    }
    ++watch_.readers;
  }
  // What was queued before they were collected, their patterns too, is done then.
  const Status status = context_.clock.synchronize();
  if (status.ok()) {
    for (const PoolWatch::Freed& block : live) judge(block);
  }
  const MutexLock lock(mutex_);
  --watch_.readers;
  return status;
}

Address Pool::memory_from(Address address) const {
  const ReadLock lock(*this);
  if (range_ == nullptr || !contains(address)) return base_ + capacity_;
  const std::size_t offset = address - base_;
  const auto next = range_->reaching(offset);
  return base_ + (next == range_->live().end() ? capacity_ : std::max(next->first, offset));
}

}  // namespace vmm
