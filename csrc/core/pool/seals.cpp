// Pool: what may be done with its memory, by everybody, and a tag's space while some of
// it is read-only.
#include <algorithm>

#include "base/errors.h"
#include "core/memory/chunk_store.h"
#include "core/pool/pool.h"

namespace vmm {

bool Pool::allows(const LiveMapping& mapping, Access access) const {
  return std::all_of(accessors_.begin(), accessors_.end(),
                     [&](const Location& who) { return mapping.access_of(who) == access; });
}

// For a tensor of whose pages only some have memory.
std::string Pool::what_is_not_there(Address address, std::size_t bytes) const {
  return "pool '" + name_ + "': of the " + format_bytes(bytes) + " at " + format_hex(address) +
         " not all is there: commit() what is not, or take what is";
}

// The offsets that `pieces` are, by offset, what touches joined: up to the end of the
// block, or page, in which a tensor's memory ends.
std::vector<ByteRange> Pool::given_memory(const std::vector<SealedPiece>& pieces,
                                          const std::vector<ByteRange>& live) const {
  std::vector<ByteRange> given;
  given.reserve(pieces.size());
  for (const SealedPiece& piece : pieces) {
    const std::size_t begin = piece.address - base_;
    auto at = std::upper_bound(live.begin(), live.end(), begin,
                               [](std::size_t offset, const ByteRange& each) { return offset < each.offset; });
    if (at == live.begin() || (--at)->end() < begin + piece.size) {
      throw InvalidArgumentError(is_range_ ? what_is_not_there(piece.address, piece.size)
                                           : "pool '" + name_ + "': the " + format_bytes(piece.size) + " at " +
                                                 format_hex(piece.address) + " are no live tensor's");
    }
    const std::size_t end = is_range_ ? std::min(align_up(begin + piece.size, page_), at->end()) : at->end();
    given.push_back({begin, (piece.is_last ? end : begin + piece.size) - begin});
  }
  return joined(std::move(given));
}

// What lives in a part: all that is mapped for one tensor, as the next pages of a chunk
// that stays are its too; the blocks of a tag's space.
std::vector<ByteRange> Pool::live_memory() const {
  std::vector<ByteRange> live;
  if (is_range_) {
    for (const auto& [offset, mapping] : range_->live()) append_joined(live, {offset, mapping.chunk->size});
    return live;
  }
  directory_->for_each([&](const Block* block) {
    if (block->is_live()) live.push_back(block->range());
  });
  std::sort(live.begin(), live.end(), [](const ByteRange& a, const ByteRange& b) { return a.offset < b.offset; });
  return live;
}

// The one rule: all that lives in a chunk that is changed has to be given. The chunks
// under `pieces` that do not allow `access`, of explicit pages the others too.
std::vector<ByteRange> Pool::whole_chunks(const std::vector<SealedPiece>& pieces, Access access) const {
  if (range_ == nullptr || (!is_range_ && !is_tag_space())) {
    throw InvalidArgumentError("pool '" + name_ + "': " + format_bytes(pieces.front().size) + " at " +
                               format_hex(pieces.front().address) + " lie among other tensors of the pool, and pages " +
                               "are sealed by whole chunks: make the tensor with torch_vmm.aligned(shape, dtype, " +
                               "device), or all that is to be sealed under a tag of its own (pool.tag(name))");
  }
  const std::vector<ByteRange> live = live_memory();
  const std::vector<ByteRange> given = given_memory(pieces, live);
  std::vector<ByteRange> chunks;
  for (const ByteRange& each : given) {
    for (auto at = range_->covering(each.offset); at != range_->live().end() && at->first < each.end(); ++at) {
      if (is_range_ || !allows(at->second, access)) append_joined(chunks, {at->first, at->second.chunk->size});
    }
  }
  for (const ByteRange& run : chunks) require_given(run, given, live);
  return chunks;
}

// Throws unless all of `live` that lies in `run`, whole chunks, is in `given`.
void Pool::require_given(ByteRange run, const std::vector<ByteRange>& given, const std::vector<ByteRange>& live) const {
  const auto ends_behind = [](std::size_t offset) {
    return [offset](const ByteRange& each) { return each.end() <= offset; };
  };
  for (auto at = std::partition_point(live.begin(), live.end(), ends_behind(run.offset));
       at != live.end() && at->offset < run.end(); ++at) {
    std::size_t begin = std::max(at->offset, run.offset);
    const std::size_t end = std::min(at->end(), run.end());
    const auto covers = std::partition_point(given.begin(), given.end(), ends_behind(begin));
    std::size_t next = end;  // where what is given begins, if it does not cover `begin`
    if (covers != given.end() && covers->offset <= begin) {
      begin = covers->end();
      if (begin >= end) continue;
      if (std::next(covers) != given.end()) next = std::min(end, std::next(covers)->offset);
    } else if (covers != given.end()) {
      next = std::min(end, covers->offset);
    }
    const bool is_same = is_range_ || std::any_of(given.begin(), given.end(), [&](const ByteRange& each) {
                           return each.offset < at->end() && at->offset < each.end();
                         });
    throw InvalidArgumentError(why_not_sealed({begin, next - begin}, is_same));
  }
}

// `is_same`: what is missing is of a tensor of which some is given.
std::string Pool::why_not_sealed(ByteRange missing, bool is_same) const {
  const std::string what = "pool '" + name_ + "': " + format_bytes(missing.size) + " at " +
                           format_hex(base_ + missing.offset) + ", of " + (is_same ? "the same" : "another") +
                           " tensor, share a chunk with what is given and are not among it, and pages are sealed by " +
                           "whole chunks: ";
  if (is_range_ && pages_.covering(missing.offset) == nullptr) {
    return what + "it has given them back, and can take them again; reserve() rows over them first";
  }
  return what + "give these too, or make what is to be sealed with torch_vmm.aligned(shape, dtype, device), or under " +
         "a tag of its own (pool.tag(name))";
}

void Pool::require_whole_chunks(const std::vector<SealedPiece>& pieces) {
  if (pieces.empty()) return;
  const MutexLock lock(mutex_);
  require_awake();
  if (range_ != nullptr) settle_locked();
  static_cast<void>(whole_chunks(pieces, Access::read));
}

// When anything of this pool was freed last, by a thread or by a stream that recorded it.
Epoch Pool::last_free() const {
  Epoch newest = pending_.empty() ? kLongAgo : context_.clock.now();
  if (!watch_.freed.empty()) newest = std::max(newest, watch_.freed.back().epoch);
  for (std::size_t tag = 0; tag < streams_.size(); ++tag) {
    newest = std::max(newest, streams_[static_cast<StreamTag>(tag)].last_free);
  }
  return newest;
}

// A pool that had the memory before could write to it through its dormant mappings.
Status Pool::leave_no_writable_place(const std::vector<ByteRange>& stretches) {
  Status status;
  for (const ByteRange& stretch : stretches) {
    for_each_chunk_under(base_ + stretch.offset, stretch.size, [&](Address /*at*/, Chunk& chunk) {
      if (status.ok()) status = context_.store.dormant().ban(&chunk);
    });
  }
  if (!status.ok()) may_return_again(stretches);
  return status;
}

void Pool::may_return_again(const std::vector<ByteRange>& stretches) {
  for (const ByteRange& stretch : stretches) {
    for_each_chunk_under(base_ + stretch.offset, stretch.size,
                         [&](Address /*at*/, Chunk& chunk) { context_.store.dormant().allow(&chunk); });
  }
}

std::vector<ByteRange> Pool::set_memory_access(const std::vector<SealedPiece>& pieces, Access access, Epoch* wait_for) {
  std::vector<Unchanged> ended;  // backups end with no lock held
  // A thread must not go on with a block that it keeps in a chunk that becomes read-only.
  const StillLock lock(*this, BlockCaches::Kept::gone);
  if (asleep_ != nullptr) throw AsleepError(model().name());
  if (range_ != nullptr) settle_locked();
  if (access == Access::read && is_tag_space()) {
    // What was freed since the caller waited may be written to by queued work still.
    const Epoch freed = last_free();
    if (!context_.clock.has_passed(freed)) {
      *wait_for = freed;
      return {};
    }
  }
  // Runs of chunks that had the same rights, which a failure gives back.
  std::vector<ByteRange> runs;
  std::vector<LiveMapping> former;
  for (const ByteRange& stretch : whole_chunks(pieces, access)) {
    for (auto at = range_->from(stretch.offset); at != range_->live().end() && at->first < stretch.end(); ++at) {
      const LiveMapping& mapping = at->second;
      if (allows(mapping, access)) continue;
      if (!runs.empty() && runs.back().end() == at->first && former.back().rights == mapping.rights) {
        runs.back().size += mapping.chunk->size;
      } else {
        runs.push_back({at->first, mapping.chunk->size});
        former.push_back(mapping);
      }
    }
  }
  if (access != Access::read) {
    for (const ByteRange& run : runs) ended.push_back(unchanged_.take(run));
  }
  if (access == Access::read) {
    throw_if_failed(leave_no_writable_place(runs), "unmapping former places of what is to be read-only");
  }
  for (std::size_t k = 0; k < runs.size(); ++k) {
    for (const Location& who : accessors_) {
      const Status status = range_->set_access(runs[k], who, access);
      if (status.ok()) continue;
      // The run that failed half-way as well; the first failure is what is told.
      for (std::size_t undone = 0; undone <= k; ++undone) {
        for (const Location& each : accessors_) {
          range_->set_access(runs[undone], each, former[undone].access_of(each)).ignore();
          if (undone == k && each == who) break;
        }
      }
      note_sealed();  // what could not be undone serves nobody
      if (access == Access::read) may_return_again(runs);
      throw_if_failed(status, "changing what may be done with pages of pool '" + name_ + "'");
    }
  }
  if (access == Access::read_write) may_return_again(runs);
  note_sealed();
  return runs;
}

void Pool::undo_read_only(const std::vector<ByteRange>& stretches) noexcept {
  const MutexLock lock(mutex_);
  for (const ByteRange& stretch : stretches) {
    for (const Location& who : accessors_) range_->set_access(stretch, who, Access::read_write).ignore();
  }
  may_return_again(stretches);
  note_sealed();
}

// A tag's space takes requests unless a chunk of it is read-only for somebody: its free
// space may lie there.
void Pool::note_sealed() {
  if (!is_tag_space() || is_retired() || asleep_ != nullptr) return;
  const bool any =
      std::any_of(range_->live().begin(), range_->live().end(),
                  [&](const auto& each) VMM_REQUIRES(mutex_) { return !allows(each.second, Access::read_write); });
  life_.store(any ? Life::sealed : Life::open, std::memory_order_release);
  if (any) is_cached_.store(false, std::memory_order_relaxed);
}

bool Pool::reopen() {
  settle_watched();
  const MutexLock lock(mutex_);
  if (!is_sealed()) return !is_retired();
  free_up_space();
  for (auto at = range_->live().begin(); at != range_->live().end();) {
    const ByteRange chunk{at->first, at->second.chunk->size};
    const bool is_writable = allows(at->second, Access::read_write);
    ++at;  // before it is taken out
    if (!is_writable && is_free(chunk)) context_.store.put(group_, detach(chunk.offset, last_use_of(chunk)));
  }
  drop_retired();
  note_sealed();
  return !is_sealed();
}

bool Pool::has_read_only(Address address, std::size_t bytes) const {
  const ReadLock lock(*this);
  if (range_ == nullptr || !contains(address)) return false;
  const std::size_t begin = address - base_;
  for (auto at = range_->reaching(begin); at != range_->live().end() && at->first < begin + bytes; ++at) {
    if (at->second.access() == Access::read) return true;
  }
  return false;
}

bool Pool::is_read_only(Address address, std::size_t bytes) const {
  const ReadLock lock(*this);
  if (range_ == nullptr || !contains(address)) return false;
  std::size_t at = address - base_;
  const std::size_t end = at + bytes;
  if (asleep_ != nullptr && has_gone_read_only({at, bytes})) return true;
  for (auto mapping = range_->covering(at); mapping != range_->live().end() && at < end; ++mapping) {
    if (mapping->first > at || mapping->second.access() != Access::read) return false;
    at = mapping->first + mapping->second.chunk->size;
  }
  return bytes != 0 && at >= end;
}

}  // namespace vmm
