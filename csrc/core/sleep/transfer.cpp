#include "core/sleep/transfer.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/errors.h"
#include "core/memory/file_backup.h"
#include "core/sleep/chunk_backup.h"

namespace vmm {

// ------------------------------------------------------------------------- pieces

Pieces::~Pieces() {
  for (const UnderWay& each : under_way_) each.point->wait().ignore();
}

void Pieces::add(std::size_t index, const StreamUse& by) {
  under_way_.push_back({index, std::make_shared<StreamPoint>(std::vector<StreamUse>{by})});
}

std::size_t Pieces::wait_for_oldest() {
  throw_if_failed(under_way_.front().point->wait(), "waiting for copies");
  const std::size_t index = under_way_.front().index;
  under_way_.pop_front();
  return index;
}

void append_pieces(std::size_t part, std::vector<LeavingChunk> chunks, std::size_t most, std::vector<Piece>* pieces) {
  std::size_t bytes = 0;  // of the latest piece's chunks; 0: it is full
  for (LeavingChunk& chunk : chunks) {
    if (bytes == 0 || bytes + chunk.place.size > most) {
      pieces->push_back({part, {}, {}, 0});
      bytes = 0;
    }
    bytes += chunk.place.size;
    for (const ByteRange& range : chunk.kept) pieces->back().bytes += range.size;
    pieces->back().chunks.push_back(std::move(chunk));
  }
}

namespace {

// Calls `copy` for each stretch of it that is one in the pool and in its backup: a copy to
// another GPU takes 20 us to begin, whatever its size.
template <typename Copy>
void for_each_stretch(const std::vector<KeptRange>& kept, const Copy& copy) {
  for (std::size_t first = 0; first < kept.size();) {
    KeptRange all = kept[first];
    for (++first; first < kept.size(); ++first) {
      const KeptRange& next = kept[first];
      const bool is_one =
          next.backup == all.backup && next.offset == all.offset + all.size && next.at == all.at + all.size;
      if (!is_one) break;
      all.size += next.size;
    }
    copy(all);
  }
}

}  // namespace

// ---------------------------------------------------------------------- departure

Departure::Departure(Sleeper& sleeper, std::vector<PartToSleep> parts, bool release)
    : sleeper_(sleeper), parts_(std::move(parts)), release_(release) {}

void Departure::begin() {
  try {
    std::vector<PartToSleep> going;
    going.reserve(parts_.size());  // what has begun is noted
    mine_.reserve(parts_.size());
    awake_.reserve(parts_.size());
    for (PartToSleep& part : parts_) {
      const SleepBegun begun = part.pool->begin_sleep();
      if (begun == SleepBegun::never) continue;
      mine_.push_back(part.pool);
      if (begun == SleepBegun::anew) awake_.push_back(part.pool);
      going.push_back(std::move(part));
    }
    parts_ = std::move(going);
    // Whoever uses their memory has queued that by now, on streams of other libraries too, which
    // no clock knows. Frees of before may leave with it.
    DeviceMemory& memory = sleeper_.memory();
    throw_if_failed(memory.clock().synchronize(), "waiting for queued work that may use the memory");
    memory.settle(/*wait=*/false);  // or a former place of a chunk would look like another user
    plan(/*keeps_unchanged=*/true);
    try {
      make_backups();
    } catch (const OutOfMemoryError&) {
      // The plan itself may hold what there is no room for: copying again is better than failing.
      if (!uses_unchanged()) throw;
      pieces_.clear();
      backups_.clear();
      for (const auto& pool : mine_) pool->forget_unchanged();
      plan(/*keeps_unchanged=*/false);
      make_backups();
    }
  } catch (...) {
    undo();
    throw;
  }
}

namespace {

// Of one to which nothing goes.
std::string in_words(const Place& place) {
  if (place.kind == Place::Kind::discard) return "discarded";
  return place.is_packed ? "host, packed" : "host";
}

}  // namespace

bool Departure::may_keep(std::size_t part) const {
  const Places& places = parts_[part].places;
  return places.size() == 1 && places.front().kind == Place::Kind::host;
}

// What is unchanged of a part is used where all of its read-only memory is: else its backups
// would gather, each for a little.
void Departure::plan(bool keeps_unchanged) {
  const std::vector<Address> everybodys = sleeper_.shared_by_all();
  for (std::size_t part = 0; part < parts_.size(); ++part) {
    Pool& pool = *parts_[part].pool;
    const bool keeps = keeps_unchanged && may_keep(part);
    std::vector<LeavingChunk> chunks = pool.plan_sleep(keeps, everybodys);
    const bool is_changed = std::any_of(chunks.begin(), chunks.end(), [](const LeavingChunk& chunk) {
      return chunk.place.is_read_only && !chunk.kept.empty();
    });
    if (keeps && is_changed) chunks = pool.plan_sleep(/*keeps_unchanged=*/false, everybodys);
    const Places& places = parts_[part].places;
    if (std::any_of(places.begin(), places.end(), [](const Place& place) { return place.is_poisoned; })) {
      for (LeavingChunk& chunk : chunks) chunk.place.is_poisoned = true;
    }
    const bool is_to_device = places.front().kind == Place::Kind::device;
    append_pieces(part, std::move(chunks), is_to_device ? ChunkBackup::kPieceBytes : Backup::kPieceBytes, &pieces_);
  }
}

bool Departure::uses_unchanged() const {
  return std::any_of(pieces_.begin(), pieces_.end(), [](const Piece& piece) {
    return std::any_of(piece.chunks.begin(), piece.chunks.end(),
                       [](const LeavingChunk& chunk) { return !chunk.unchanged.empty(); });
  });
}

std::size_t Departure::lot_of(std::size_t part, const LeavingChunk& chunk) const {
  return 2 * part + (chunk.place.is_read_only && may_keep(part) ? 1 : 0);
}

// A file has all that went there at once. What of the model goes there later, while some of
// that still sleeps, has a file beside it.
Places Departure::places_beside_others(std::size_t part) const {
  Places places = parts_[part].places;
  const PoolList family = sleeper_.memory().family(*parts_[part].pool);
  for (Place& place : places) {
    if (place.kind != Place::Kind::file) continue;
    const std::string named = place.path;
    for (int number = 2;
         std::any_of(family.begin(), family.end(),
                     [&place](const auto& member) { return member->places_of_backups().count(place.path) != 0; });
         ++number) {
      place.path = FileBackup::beside(named, number);
    }
  }
  return places;
}

// One backup for all that go to the same place, and another for what of it is read-only and
// may stay when the rest has been loaded.
void Departure::make_backups() {
  backups_.assign(2 * parts_.size(), nullptr);
  next_at_.assign(2 * parts_.size(), 0);
  std::vector<std::vector<Content>> contents(2 * parts_.size());  // as note_kept() comes to them
  std::size_t total = 0;
  for (const Piece& piece : pieces_) {
    const Address base = parts_[piece.part].pool->base();
    for (const LeavingChunk& chunk : piece.chunks) {
      std::vector<Content>& of_lot = contents[lot_of(piece.part, chunk)];
      for (const ByteRange& range : chunk.kept) of_lot.push_back({base + range.offset, range.size});
    }
    if (parts_[piece.part].places.front().kind != Place::Kind::discard) total += piece.bytes;
  }
  total_.store(total, std::memory_order_relaxed);
  for (const PartToSleep& part : parts_) {
    // What sleeps already is where it is.
    if (std::find(awake_.begin(), awake_.end(), part.pool) == awake_.end()) continue;
    part.pool->note_place(in_words(part.places.front()));
  }
  const std::size_t lots = contents.size();
  std::vector<bool> has_one(lots);
  for (std::size_t first = 0; first < lots; ++first) {
    if (has_one[first]) continue;
    const PartToSleep& of_first = parts_[first / 2];
    const auto is_with_it = [&](std::size_t lot) {
      const PartToSleep& of_lot = parts_[lot / 2];
      return lot % 2 == first % 2 && of_lot.places == of_first.places &&
             &of_lot.pool->group() == &of_first.pool->group();
    };
    std::vector<Content> all;
    std::size_t sum = 0;
    for (std::size_t lot = first; lot < lots; ++lot) {
      if (!is_with_it(lot)) continue;
      has_one[lot] = true;
      next_at_[lot] = sum;
      for (const Content& each : contents[lot]) sum += each.size;
      all.insert(all.end(), contents[lot].begin(), contents[lot].end());
    }
    if (sum == 0) continue;
    const std::shared_ptr<Backup> backup =
        sleeper_.make_backup(places_beside_others(first / 2), all, of_first.pool->group());
    for (std::size_t lot = first; lot < lots; ++lot) {
      if (!is_with_it(lot)) continue;
      backups_[lot] = backup;
      parts_[lot / 2].pool->note_place(backup == nullptr ? "discarded" : backup->place());
    }
  }
}

// Where in the backups each of its ranges goes.
void Departure::note_kept(Piece& piece) {
  for (const LeavingChunk& chunk : piece.chunks) {
    const std::size_t lot = lot_of(piece.part, chunk);
    if (backups_[lot] == nullptr) continue;
    for (const ByteRange& range : chunk.kept) {
      piece.kept.push_back({range.offset, range.size, next_at_[lot], backups_[lot]});
      next_at_[lot] += range.size;
    }
  }
}

std::size_t Departure::leaving() const {
  std::size_t bytes = 0;
  for (const Piece& piece : pieces_) {
    for (const LeavingChunk& chunk : piece.chunks) bytes += chunk.place.size;
  }
  return bytes;
}

bool Departure::advance() {
  if (under_way_.is_oldest_done()) {
    complete_oldest();
    return true;
  }
  if (next_ == pieces_.size() || under_way_.is_full()) return false;
  Piece& piece = pieces_[next_];
  note_kept(piece);
  const Pool& pool = *parts_[piece.part].pool;
  const StreamUse out = sleeper_.out();
  for_each_stretch(piece.kept, [&](const KeptRange& each) {
    each.backup->save(each.at, pool.base() + each.offset, each.size, out);
  });
  under_way_.add(next_, out);
  ++next_;
  return true;
}

bool Departure::wait() {
  if (under_way_.empty()) return false;
  complete_oldest();
  return true;
}

// Its memory is others' from now on.
void Departure::complete_oldest() {
  const Piece& piece = pieces_[under_way_.wait_for_oldest()];
  Pool& pool = *parts_[piece.part].pool;
  for (const LeavingChunk& chunk : piece.chunks) {
    std::vector<KeptRange> kept;
    for (const KeptRange& each : piece.kept) {
      if (each.offset >= chunk.offset && each.offset < chunk.range().end()) kept.push_back(each);
    }
    throw_if_failed(pool.let_go(chunk, kept), "unmapping memory of pool '" + pool.name() + "', which goes to sleep");
  }
  if (!piece.kept.empty()) done_.fetch_add(piece.bytes, std::memory_order_relaxed);
}

void Departure::secure() {
  for (const std::shared_ptr<Backup>& backup : backups_) {
    if (backup != nullptr) backup->finish();
  }
}

void Departure::finish() {
  const PoolList gone = std::exchange(mine_, {});  // whatever comes, it is not undone any more
  for (const auto& pool : gone) pool->end_transfer();
  pieces_.clear();  // whoever keeps this keeps no backup
  backups_.clear();
  if (!release_) return;
  for (const auto& pool : gone) sleeper_.memory().store().trim(pool->group(), 0);
}

void Departure::undo() noexcept {
  // Copies on their way, those of a piece that failed included, are from where it all is still.
  sleeper_.wait_for_copies();
  for (const auto& pool : mine_) pool->end_transfer();
  mine_.clear();
  pieces_.clear();
  backups_.clear();
  try {
    Arrival back(sleeper_, awake_, Arrival::Memory::collected);
    back.begin();
    try {
      while (back.advance() || back.wait()) {
      }
      back.finish();
    } catch (...) {
      back.undo();
      throw;
    }
  } catch (...) {
    // No room, or the driver fails again: what has gone stays asleep, and nothing is lost.
  }
}

// ------------------------------------------------------------------------ arrival

Arrival::Arrival(Sleeper& sleeper, PoolList pools, Memory memory)
    : sleeper_(sleeper), pools_(std::move(pools)), memory_(memory) {}

Arrival::~Arrival() { end_waits(); }

void Arrival::begin() {
  try {
    mine_.reserve(pools_.size());  // what has begun is noted
    for (const auto& pool : pools_) {
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
    std::vector<LeavingChunk> chunks = mine_[part]->plan_wake();
    std::size_t most = Backup::kPieceBytes;
    for (const LeavingChunk& chunk : chunks) {
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
    for (const LeavingChunk& chunk : pieces_[k].chunks) {
      const Address begin = mine_[pieces_[k].part]->base() + chunk.offset;
      awaited_.push_back({begin, begin + chunk.place.size, k});
    }
  }
  std::sort(awaited_.begin(), awaited_.end(), [](const Awaited& a, const Awaited& b) { return a.begin < b.begin; });
}

namespace {

void append_missing(const Piece& piece, std::vector<LeavingChunk>* places) {
  std::copy_if(piece.chunks.begin(), piece.chunks.end(), std::back_inserter(*places),
               [](const LeavingChunk& chunk) { return !chunk.is_there; });
}

}  // namespace

void Arrival::require_room(const Departure& out) const {
  std::size_t bytes = 0;
  for (const Piece& piece : pieces_) {
    for (const LeavingChunk& chunk : piece.chunks) bytes += chunk.is_there ? 0 : chunk.place.size;
  }
  if (bytes != 0) {
    sleeper_.memory().require_room_to_swap(mine_.front()->model(), bytes, out.model(), out.leaving());
  }
}

// One request a pool, so that it is met whole or not at all.
void Arrival::collect_all() {
  std::vector<std::vector<LeavingChunk>> places(mine_.size());
  for (const Piece& piece : pieces_) append_missing(piece, &places[piece.part]);
  for (std::size_t part = 0; part < mine_.size(); ++part) {
    sleeper_.memory().collect_to_wake(*mine_[part], places[part]);
  }
}

// False: not at this moment.
bool Arrival::collect(const Piece& piece, bool is_on_its_way) {
  std::vector<LeavingChunk> places;
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
  for (const LeavingChunk& chunk : piece.chunks) {
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
  for (const LeavingChunk& chunk : piece.chunks) {
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
  if (next_ < mapped_ && !under_way_.is_full()) {
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
  for (const LeavingChunk& chunk : piece.chunks) {
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

void Arrival::finish() {
  rest_backups();
  for (const auto& pool : mine_) pool->end_sleep();
  mine_.clear();
  total_.store(done(), std::memory_order_relaxed);
  pieces_.clear();  // whoever keeps this keeps no backup
  end_waits();
}

// All is still where it was kept.
void Arrival::undo() noexcept {
  {
    const MutexLock lock(mutex_);
    arrived_.assign(arrived_.size(), false);  // whoever asks from now on learns that it goes again
  }
  end_waits();
  sleeper_.wait_for_copies();
  rest_backups();
  for (const auto& pool : mine_) pool->put_back_collected();
  for (const Piece& piece : pieces_) {
    for (const LeavingChunk& chunk : piece.chunks) {
      try {
        mine_[piece.part]->let_go_again(chunk).ignore();
      } catch (...) {
        // No memory to note it: it stays there, and is filled when they are woken again.
      }
    }
  }
  for (const auto& pool : mine_) pool->end_transfer();
  mine_.clear();
  pieces_.clear();
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

// ----------------------------------------------------------------------- transfer

Transfer::~Transfer() {
  if (is_under_way_) undo();
}

void Transfer::begin(const Look& look) {
  if (out_ != nullptr) out_->begin();
  is_under_way_ = true;
  try {
    look();
    if (in_ != nullptr) in_->begin();
    if (in_ != nullptr && out_ != nullptr) in_->require_room(*out_);
    look();
  } catch (...) {
    undo();
    throw;
  }
}

// Both directions at once: what comes takes the memory of what goes.
void Transfer::move(const Look& look) {
  for (;;) {
    bool moves = out_ != nullptr && out_->advance();
    look();
    if (in_ != nullptr && in_->advance(/*is_on_its_way=*/out_ != nullptr && !out_->is_through())) moves = true;
    look();
    // Only then for the bus, which works on at least one more piece meanwhile.
    if (!moves && !(out_ != nullptr && out_->wait()) && !(in_ != nullptr && in_->wait())) return;
  }
}

void Transfer::run(const Look& look) {
  if (!is_under_way_) throw VmmError("a transfer runs once");
  try {
    move(look);
    if (out_ != nullptr) out_->secure();
    look();
    if (out_ != nullptr) out_->finish();
    if (in_ != nullptr) in_->finish();
    is_under_way_ = false;
  } catch (...) {
    undo();
    throw;
  }
}

void Transfer::undo() noexcept {
  is_under_way_ = false;
  if (in_ != nullptr) in_->undo();
  if (out_ != nullptr) out_->undo();
}

std::size_t Transfer::done() const { return (out_ == nullptr ? 0 : out_->done()) + (in_ == nullptr ? 0 : in_->done()); }

std::size_t Transfer::total() const {
  return (out_ == nullptr ? 0 : out_->total()) + (in_ == nullptr ? 0 : in_->total());
}

}  // namespace vmm
