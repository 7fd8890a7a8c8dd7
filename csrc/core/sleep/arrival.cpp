#include "core/sleep/arrival.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

#include "base/errors.h"
#include "core/sleep/departure.h"

namespace vmm {

Arrival::Arrival(Sleeper& sleeper, PoolList pools, Memory memory)
    : sleeper_(sleeper), pools_(std::move(pools)), memory_(memory) {}

Arrival::~Arrival() { end_waits(); }

void Arrival::begin() {
  try {
    mine_.reserve(pools_.size());  // what has begun is noted
    for (const auto& pool : pools_) {
      any_held_ = any_held_ || !pool->asleep_where().is_nothing();
      if (pool->begin_transfer()) mine_.push_back(pool);
    }
    plan();
    if (memory_ != Memory::by_piece) collect_all();
  } catch (...) {
    undo();
    throw;
  }
}

void Arrival::plan() {
  for (std::size_t part = 0; part < mine_.size(); ++part) {
    std::vector<MovedChunk> chunks = mine_[part]->plan_wake(/*joins=*/memory_ != Memory::as_it_left);
    std::size_t most = Backup::kPieceBytes;
    for (const MovedChunk& chunk : chunks) {
      const std::vector<KeptRange> kept = mine_[part]->kept_in(chunk.range());
      if (kept.empty()) continue;
      most = kept.front().backup->piece_bytes();
      break;
    }
    append_pieces(part, std::move(chunks), most, &pieces_);
  }
  std::size_t total = 0;
  for (const Piece& piece : pieces_) total += piece.bytes;
  total_.store(total, std::memory_order_relaxed);
  const MutexLock lock(mutex_);
  arrived_.resize(pieces_.size());
  for (std::size_t k = 0; k < pieces_.size(); ++k) {
    for (const MovedChunk& chunk : pieces_[k].chunks) {
      const Address begin = mine_[pieces_[k].part]->base() + chunk.offset;
      awaited_.push_back({begin, begin + chunk.place.size, k});
    }
  }
  std::sort(awaited_.begin(), awaited_.end(), [](const Awaited& a, const Awaited& b) { return a.begin < b.begin; });
}

namespace {

void append_missing(const Piece& piece, std::vector<MovedChunk>* places) {
  std::copy_if(piece.chunks.begin(), piece.chunks.end(), std::back_inserter(*places),
               [](const MovedChunk& chunk) { return !chunk.is_there; });
}

}  // namespace

void Arrival::require_room(const Departure& out) const {
  std::size_t bytes = 0;
  for (const Piece& piece : pieces_) {
    for (const MovedChunk& chunk : piece.chunks) bytes += chunk.is_there ? 0 : chunk.place.size;
  }
  if (bytes != 0) {
    sleeper_.memory().require_room_to_swap(mine_.front()->model(), bytes, out.model(), out.leaving());
  }
}

// One request a pool, so that it is met whole or not at all.
void Arrival::collect_all() {
  std::vector<std::vector<MovedChunk>> places(mine_.size());
  for (const Piece& piece : pieces_) append_missing(piece, &places[piece.part]);
  const auto bytes_of = [&places](std::size_t part) {
    return std::accumulate(places[part].begin(), places[part].end(), std::size_t{0},
                           [](std::size_t sum, const MovedChunk& each) { return sum + each.place.size; });
  };
  Ladder::Beside beside;
  for (std::size_t part = 1; part < mine_.size(); ++part) beside.to_come += bytes_of(part);
  for (std::size_t part = 0; part < mine_.size(); ++part) {
    sleeper_.memory().collect_to_wake(*mine_[part], places[part], beside);
    beside.there += bytes_of(part);
    if (part + 1 < mine_.size()) beside.to_come -= bytes_of(part + 1);
  }
}

// False: not at this moment.
bool Arrival::collect(const Piece& piece, bool is_on_its_way) {
  std::vector<MovedChunk> places;
  append_missing(piece, &places);
  Pool& pool = *mine_[piece.part];
  Shortage shortage;
  if (places.empty() || pool.try_collect(places, nullptr, &shortage) != 0) return true;
  if (is_on_its_way) return false;
  sleeper_.memory().collect_to_wake(pool, places);
  return true;
}

void Arrival::map_next() {
  const Piece& piece = pieces_[mapped_];
  Pool& pool = *mine_[piece.part];
  for (const MovedChunk& chunk : piece.chunks) {
    for (;;) {
      Epoch wait_for = kLongAgo;
      throw_if_failed(pool.map_collected(chunk, sleeper_.in(), &wait_for),
                      "mapping memory of pool '" + pool.name() + "', which wakes");
      if (wait_for == kLongAgo) break;
      throw_if_failed(sleeper_.memory().clock().wait(wait_for), "waiting for queued work that may use the memory");
    }
  }
  ++mapped_;
}

void Arrival::load_next() {
  Piece& piece = pieces_[next_];
  Pool& pool = *mine_[piece.part];
  const StreamUse in = sleeper_.in();
  for (const MovedChunk& chunk : piece.chunks) {
    const std::vector<KeptRange> kept = pool.kept_in(chunk.range());
    piece.kept.insert(piece.kept.end(), kept.begin(), kept.end());
  }
  std::sort(piece.kept.begin(), piece.kept.end(),
            [](const KeptRange& a, const KeptRange& b) { return a.offset < b.offset; });
  for_each_stretch(
      piece.kept, [&](const KeptRange& each) { each.backup->load(each.at, pool.base() + each.offset, each.size, in); });
  under_way_.add(next_, in);
  ++next_;
}

// The bus first: what comes next is mapped while it works.
bool Arrival::advance(bool is_on_its_way) {
  if (under_way_.is_oldest_done()) {
    complete_oldest();
    return true;
  }
  // What nothing comes to is on no bus: it is mapped as fast as that goes, and zeroed behind it.
  if (next_ < mapped_ && (under_way_.size() < Backup::kMostUnderWay || pieces_[next_].bytes == 0)) {
    load_next();
    return true;
  }
  if (mapped_ == pieces_.size() || mapped_ - next_ >= kMostAhead) return false;
  if (memory_ == Memory::by_piece && !collect(pieces_[mapped_], is_on_its_way)) return false;
  map_next();
  return true;
}

bool Arrival::wait() {
  if (under_way_.empty()) return false;
  complete_oldest();
  return true;
}

void Arrival::complete_oldest() {
  const std::size_t index = under_way_.wait_for_oldest();
  const Piece& piece = pieces_[index];
  Pool& pool = *mine_[piece.part];
  for (const MovedChunk& chunk : piece.chunks) {
    throw_if_failed(pool.arrived(chunk), "making memory of pool '" + pool.name() + "' read-only again");
  }
  done_.fetch_add(piece.bytes, std::memory_order_relaxed);
  {
    const MutexLock lock(mutex_);
    arrived_[index] = true;
  }
  changed_.notify_all();
}

// Of one that has several parts, some may sleep on.
void Arrival::rest_backups() noexcept {
  const Backup* latest = nullptr;
  for (const Piece& piece : pieces_) {
    for (const KeptRange& each : piece.kept) {
      if (each.backup.get() != latest) each.backup->rest();
      latest = each.backup.get();
    }
  }
}

// What held nothing is in no list of what sleeps, and wakes with the last part that held any.
void Arrival::wake_empty_parts(const Pool& model) const {
  const PoolList parts = sleeper_.memory().family(model);
  const auto is_empty = [](const auto& part) { return part->asleep_where().is_nothing(); };
  if (!std::all_of(parts.begin(), parts.end(), is_empty)) return;
  for (const auto& part : parts) part->end_empty_sleep();
}

void Arrival::finish() {
  rest_backups();
  for (const auto& pool : mine_) pool->end_sleep();
  const PoolList awake = std::exchange(mine_, {});
  if (any_held_ && !awake.empty()) {
    try {
      wake_empty_parts(awake.front()->model());  // all are one model's
    } catch (const std::bad_alloc&) {
      // They sleep on, and wake when they are named.
    }
  }
  total_.store(done(), std::memory_order_relaxed);
  pieces_.clear();  // whoever keeps this keeps no backup
  end_waits();
  sleeper_.memory().after_transfer(awake);
}

// All is still where it was kept.
void Arrival::undo() noexcept {
  {
    const MutexLock lock(mutex_);
    arrived_.assign(arrived_.size(), false);  // whoever asks from now on learns that it goes again
  }
  end_waits();
  sleeper_.wait_for_queued_work();
  rest_backups();
  for (const auto& pool : mine_) pool->put_back_collected();
  for (const Piece& piece : pieces_) {
    for (const MovedChunk& chunk : piece.chunks) {
      try {
        mine_[piece.part]->let_go_again(chunk).ignore();
      } catch (...) {
        // No memory to note it: it stays there, and is filled when they are woken again.
      }
    }
  }
  for (const auto& pool : mine_) pool->end_transfer();
  const PoolList asleep = std::exchange(mine_, {});
  pieces_.clear();
  sleeper_.memory().after_transfer(asleep);
}

Arrival::Waited Arrival::wait_for(Address address, std::size_t bytes, std::chrono::milliseconds most) {
  const auto until = std::chrono::steady_clock::now() + most;
  const MutexLock lock(mutex_);
  for (;;) {
    auto at = std::partition_point(awaited_.begin(), awaited_.end(),
                                   [address](const Awaited& each) { return each.end <= address; });
    while (at != awaited_.end() && at->begin < address + bytes && arrived_[at->piece]) ++at;
    if (at == awaited_.end() || at->begin >= address + bytes) return Waited::there;
    if (has_ended_) return Waited::ended;
    if (changed_.wait_until(mutex_, until) == std::cv_status::timeout) return Waited::not_yet;
  }
}

void Arrival::end_waits() {
  {
    const MutexLock lock(mutex_);
    has_ended_ = true;
  }
  changed_.notify_all();
}

}  // namespace vmm
