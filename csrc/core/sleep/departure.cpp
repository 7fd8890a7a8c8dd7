#include "core/sleep/departure.h"

#include <algorithm>
#include <filesystem>
#include <string>
#include <utility>

#include "base/errors.h"
#include "core/memory/file_backup.h"
#include "core/memory/packed_backup.h"
#include "core/sleep/arrival.h"
#include "core/sleep/chunk_backup.h"

namespace vmm {

Departure::Departure(Sleeper& sleeper, std::vector<PartToSleep> parts, bool release, RequireLeft require_left)
    : sleeper_(sleeper), parts_(std::move(parts)), release_(release), require_left_(std::move(require_left)) {}

// Somebody may come in between the look and the mark, and would see its memory leave: then it is
// looked at again.
SleepBegun Departure::begin_part(const PartToSleep& part) {
  if (require_left_ == nullptr) return part.pool->begin_sleep();
  SleepBegun begun = SleepBegun::entered;
  while (begun == SleepBegun::entered) {
    begun = part.pool->begin_sleep(part.pool->is_asleep() ? 0 : require_left_(*part.pool));
  }
  return begun;
}

void Departure::begin() {
  try {
    std::vector<PartToSleep> going;
    going.reserve(parts_.size());  // what has begun is noted
    mine_.reserve(parts_.size());
    awake_.reserve(parts_.size());
    // All of them first: where one is refused none sleeps even for a moment.
    for (const PartToSleep& part : parts_) {
      if (require_left_ != nullptr && !part.pool->is_asleep()) require_left_(*part.pool);
    }
    for (PartToSleep& part : parts_) {
      const SleepBegun begun = begin_part(part);
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

// What goes there at once.
std::size_t piece_bytes(const Place& place) {
  if (place.kind == Place::Kind::device) return ChunkBackup::kPieceBytes;
  return place.is_packed ? PackedBackup::kPieceBytes : Backup::kPieceBytes;
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
    std::vector<MovedChunk> chunks = pool.plan_sleep(keeps, everybodys);
    const bool is_changed = std::any_of(chunks.begin(), chunks.end(), [](const MovedChunk& chunk) {
      return chunk.place.is_read_only && !chunk.kept.empty();
    });
    if (keeps && is_changed) chunks = pool.plan_sleep(/*keeps_unchanged=*/false, everybodys);
    const Places& places = parts_[part].places;
    if (std::any_of(places.begin(), places.end(), [](const Place& place) { return place.is_poisoned; })) {
      for (MovedChunk& chunk : chunks) chunk.place.is_poisoned = true;
    }
    append_pieces(part, std::move(chunks), piece_bytes(places.front()), &pieces_);
  }
}

bool Departure::uses_unchanged() const {
  return std::any_of(pieces_.begin(), pieces_.end(), [](const Piece& piece) {
    return std::any_of(piece.chunks.begin(), piece.chunks.end(),
                       [](const MovedChunk& chunk) { return !chunk.unchanged.empty(); });
  });
}

std::size_t Departure::lot_of(std::size_t part, const MovedChunk& chunk) const {
  return 2 * part + (chunk.place.is_read_only && may_keep(part) ? 1 : 0);
}

// A file has all that went there at once. What of the model goes there later, while some of
// that still sleeps, has a file beside it.
Places Departure::places_beside_others(std::size_t part) const {
  Places places = parts_[part].places;
  const PoolList family = sleeper_.memory().family(*parts_[part].pool);
  for (Place& place : places) {
    // In a folder each has a name of its own.
    if (std::error_code error; place.kind != Place::Kind::file || std::filesystem::is_directory(place.path, error)) {
      continue;
    }
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
    for (const MovedChunk& chunk : piece.chunks) {
      std::vector<Content>& of_lot = contents[lot_of(piece.part, chunk)];
      for (const ByteRange& range : chunk.kept) of_lot.push_back({base + range.offset, range.size});
    }
    if (parts_[piece.part].places.front().kind != Place::Kind::discard) total += piece.bytes;
  }
  total_.store(total, std::memory_order_relaxed);
  // What sleeps already is where it is, but for what of it goes now.
  const auto note = [&](std::size_t lot, const std::string& place) {
    const std::shared_ptr<Pool>& pool = parts_[lot / 2].pool;
    const bool was_awake = std::find(awake_.begin(), awake_.end(), pool) != awake_.end();
    if (was_awake || !contents[lot].empty()) pool->note_place(place, was_awake);
  };
  for (std::size_t lot = 0; lot < contents.size(); ++lot) note(lot, in_words(parts_[lot / 2].places.front()));
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
    Places places;
    sleeper_.name_file([&] {
      places = places_beside_others(first / 2);
      const auto file = std::find_if(places.begin(), places.end(),
                                     [](const Place& place) { return place.kind == Place::Kind::file; });
      if (file == places.end()) return;
      for (std::size_t lot = first; lot < lots; ++lot) {
        if (is_with_it(lot)) note(lot, file->path);  // nobody else's, whether it comes to that or not
      }
    });
    const std::shared_ptr<Backup> backup = sleeper_.make_backup(places, all, *of_first.pool);
    for (std::size_t lot = first; lot < lots; ++lot) {
      if (!is_with_it(lot)) continue;
      backups_[lot] = backup;
      note(lot, backup == nullptr ? "discarded" : backup->place());
    }
  }
  const auto thrown_away = std::stable_partition(pieces_.begin(), pieces_.end(), [this](const Piece& piece) {
    return std::all_of(piece.chunks.begin(), piece.chunks.end(), [&](const MovedChunk& chunk) {
      return chunk.kept.empty() || backups_[lot_of(piece.part, chunk)] != nullptr;
    });
  });
  until_ = static_cast<std::size_t>(thrown_away - pieces_.begin());
}

// Where in the backups each of its ranges goes.
void Departure::note_kept(Piece& piece) {
  for (const MovedChunk& chunk : piece.chunks) {
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
    for (const MovedChunk& chunk : piece.chunks) bytes += chunk.place.size;
  }
  return bytes;
}

// Whether the next piece may be on its way too.
bool Departure::may_go_on() const {
  if (next_ == until_) return false;
  const Piece& piece = pieces_[next_];
  const std::shared_ptr<Backup>& backup = backups_[lot_of(piece.part, piece.chunks.front())];
  return under_way_.size() < (backup == nullptr ? Backup::kMostUnderWay : backup->most_under_way());
}

// The bus first: what is there leaves while it works.
bool Departure::advance() {
  if (!may_go_on()) {
    if (!under_way_.is_oldest_done()) return false;
    complete_oldest();
    return true;
  }
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
  for (const MovedChunk& chunk : piece.chunks) {
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
  sleeper_.memory().after_transfer(gone);
  if (!release_) return;
  for (const auto& pool : gone) sleeper_.memory().store().trim(pool->group(), 0);
}

void Departure::undo() noexcept {
  // Copies on their way, those of a piece that failed included, are from where it all is still.
  sleeper_.wait_for_queued_work();
  for (const auto& pool : mine_) pool->end_transfer();
  const PoolList all = std::exchange(mine_, {});
  pieces_.clear();
  backups_.clear();
  try {
    Arrival back(sleeper_, awake_, Arrival::Memory::as_it_left);
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
  sleeper_.memory().after_transfer(all);
}

}  // namespace vmm
