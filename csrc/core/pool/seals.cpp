// Pool: what may be done with its memory, by everybody, and a tag's space while some of
// it is read-only.
#include <algorithm>

#include "base/errors.h"
#include "core/memory/chunk_store.h"
#include "core/pool/pool.h"

namespace vmm {

SealRule Pool::seal_rule() const { return {name_, kind_.is_range() || is_tag_space(), space_, *directory_, pages_}; }

void Pool::require_whole_chunks(const std::vector<SealedPiece>& pieces, Access access) {
  if (pieces.empty()) return;
  const MutexLock lock(mutex_);
  require_awake();
  if (space_.is_open()) settle_locked();
  static_cast<void>(seal_rule().stretches_to_change(pieces, access));
}

// When anything of this pool was freed last, by a thread or by a stream that recorded it.
Epoch Pool::last_free() const {
  Epoch newest = watched_.last_free();
  for (std::size_t tag = 0; tag < streams_.size(); ++tag) {
    newest = std::max(newest, streams_[static_cast<StreamTag>(tag)].last_free);
  }
  return newest;
}

std::vector<ByteRange> Pool::set_memory_access(const std::vector<SealedPiece>& pieces, Access access, Epoch* wait_for) {
  std::vector<Unchanged> ended;  // backups end with no lock held
  // A thread must not go on with a block that it keeps in a chunk that becomes read-only.
  const StillLock lock(*this, BlockCaches::Kept::gone);
  require_awake();
  if (space_.is_open()) settle_locked();
  if (access == Access::read && is_tag_space()) {
    // What was freed since the caller waited may be written to by queued work still.
    // (A recorded free behind a stream that is captured has no end before the capture's.)
    const Epoch freed = last_free();
    if (!pending_.empty() || !context_.clock.has_passed(freed)) {
      *wait_for = pending_.empty() ? freed : context_.clock.now();
      return {};
    }
  }
  // Runs of chunks that had the same rights, which a failure gives back.
  std::vector<ByteRange> runs;
  std::vector<LiveMapping> former;
  for (const ByteRange& stretch : seal_rule().stretches_to_change(pieces, access)) {
    for (auto at = space_.range().from(stretch.offset); at != space_.range().live().end() && at->first < stretch.end();
         ++at) {
      const LiveMapping& mapping = at->second;
      if (space_.allows(mapping, access)) continue;
      if (!runs.empty() && runs.back().end() == at->first && former.back().rights == mapping.rights) {
        runs.back().size += mapping.chunk->size;
      } else {
        runs.push_back({at->first, mapping.chunk->size});
        former.push_back(mapping);
      }
    }
  }
  if (access != Access::read) {
    for (const ByteRange& run : runs) ended.push_back(sleeping_.take_unchanged(run));
  }
  if (access == Access::read) {
    throw_if_failed(space_.leave_no_writable_place(runs), "unmapping former places of what is to be read-only");
  }
  std::size_t changed = 0;  // runs, and of the next one accessors
  std::size_t of_next = 0;
  // The run that failed half-way as well; the first failure is what is told.
  const auto undo = [&]() VMM_REQUIRES(mutex_) {
    for (std::size_t k = 0; k < runs.size() && k <= changed; ++k) {
      const std::size_t several = k < changed ? space_.accessors().size() : of_next + 1;
      for (std::size_t who = 0; who < several; ++who) {
        const Location& each = space_.accessors()[who];
        space_.range().restore_access(runs[k], each, former[k].access_of(each));
      }
    }
    note_sealed();  // what could not be undone serves nobody
    if (access == Access::read) space_.may_return_again(runs);
  };
  try {
    for (; changed < runs.size(); ++changed, of_next = 0) {
      for (; of_next < space_.accessors().size(); ++of_next) {
        throw_if_failed(space_.range().set_access(runs[changed], space_.accessors()[of_next], access),
                        "changing what may be done with pages of pool '" + name_ + "'");
      }
    }
  } catch (...) {
    undo();
    throw;
  }
  if (access == Access::read_write) space_.may_return_again(runs);
  note_sealed();
  return runs;
}

void Pool::undo_read_only(const std::vector<ByteRange>& stretches) noexcept {
  const MutexLock lock(mutex_);
  if (!space_.is_open()) return;
  MappedRange& range = space_.range();
  const auto let_write = [&](ByteRange chunks) VMM_REQUIRES(mutex_) {
    for (const Location& who : space_.accessors()) range.restore_access(chunks, who, Access::read_write);
  };
  for (const ByteRange& stretch : stretches) {
    if (!sleeping_.is_asleep()) {
      let_write(stretch);
      continue;
    }
    // It went to sleep since, all of it or some, and some may be back.
    for (auto at = range.reaching(stretch.offset); at != range.live().end() && at->first < stretch.end(); ++at) {
      let_write({at->first, at->second.chunk->size});
    }
    sleeping_.let_write(stretch);
  }
  space_.may_return_again(stretches);
  note_sealed();
}

// A tag's space takes requests unless a chunk of it is read-only for somebody: its free
// space may lie there.
void Pool::note_sealed() {
  if (!is_tag_space() || is_closed() || sleeping_.is_asleep()) return;
  const bool any = std::any_of(space_.range().live().begin(), space_.range().live().end(),
                               [&](const auto& each)
                                   VMM_REQUIRES(mutex_) { return !space_.allows(each.second, Access::read_write); });
  life_.store(any ? Life::sealed : Life::open, std::memory_order_release);
  if (any) is_cached_.store(false, std::memory_order_relaxed);
}

bool Pool::reopen() {
  settle_watched();
  const MutexLock lock(mutex_);
  if (!is_sealed()) return !is_closed();
  free_up_space();
  for (auto at = space_.range().live().begin(); at != space_.range().live().end();) {
    const ByteRange chunk{at->first, at->second.chunk->size};
    const bool is_writable = space_.allows(at->second, Access::read_write);
    ++at;  // before it is taken out
    if (!is_writable && space_.is_free(chunk)) context_.store.put(group_, space_.detach(chunk.offset));
  }
  space_.drop_retired();
  note_sealed();
  return !is_sealed();
}

bool Pool::has_read_only(Address address, std::size_t bytes) const {
  const ReadLock lock(*this);
  if (!space_.is_open() || !contains(address)) return false;
  const std::size_t begin = address - base_;
  for (auto at = space_.range().reaching(begin); at != space_.range().live().end() && at->first < begin + bytes; ++at) {
    if (at->second.access() == Access::read) return true;
  }
  return false;
}

bool Pool::is_read_only_now(Address address) const noexcept {
  if (!mutex_.try_lock_to_look()) return false;
  bool is_so = false;
  if (space_.is_open() && contains(address)) {
    const auto at = space_.range().covering(address - base_);
    is_so = at != space_.range().live().end() && at->second.access() == Access::read;
  }
  mutex_.unlock();
  return is_so;
}

bool Pool::is_read_only(Address address, std::size_t bytes) const {
  const ReadLock lock(*this);
  if (!space_.is_open() || !contains(address)) return false;
  // Some of what sleeps may be here: an alias shows it, or it has come back already.
  std::size_t at = address - base_;
  const std::size_t end = at + bytes;
  while (at < end) {
    if (const auto mapping = space_.range().covering(at); mapping != space_.range().live().end()) {
      const ByteRange chunk{mapping->first, mapping->second.chunk->size};
      const bool is_due = sleeping_.is_asleep() && sleeping_.is_to_be_read_only(chunk, mapping->second);
      if (!is_due && mapping->second.access() != Access::read) return false;
      at = chunk.end();
    } else {
      const std::size_t gone = sleeping_.is_asleep() ? sleeping_.end_of_gone_read_only(at) : 0;
      if (gone == 0) return false;
      at = gone;
    }
  }
  return bytes != 0;
}

}  // namespace vmm
