// Pool: what may be done with its memory, by everybody, and a tag's space while some of
// it is read-only.
#include <algorithm>

#include "base/errors.h"
#include "core/pool/pool.h"

namespace vmm {

bool Pool::allows(const LiveMapping& mapping, Access access) const {
  return std::all_of(accessors_.begin(), accessors_.end(),
                     [&](const Location& who) { return mapping.access_of(who) == access; });
}

// The chunks under a piece of explicit pages: whole ones, but that the last may end
// past the piece.
ByteRange Pool::whole_pages(const AddressRange& piece) const {
  const std::size_t begin = piece.address - base_;
  std::size_t end = begin;
  bool begins = is_range_ && range_ != nullptr && contains(piece.address);
  if (begins) {
    for (auto at = range_->covering(begin); at != range_->live().end() && at->first < begin + piece.size; ++at) {
      begins = begins && at->first == end;
      end = at->first + at->second.chunk->size;
    }
  }
  if (begins && end < begin + piece.size) {
    throw InvalidArgumentError("pool '" + name_ + "': of the " + format_bytes(piece.size) + " at " +
                               format_hex(piece.address) + " not all is there: commit() what is not, or take what is");
  }
  if (!begins || end < begin + piece.size || end > align_up(begin + piece.size, page_)) {
    throw InvalidArgumentError(
        "pool '" + name_ + "': " + format_bytes(piece.size) + " at " + format_hex(piece.address) +
        " share their chunks with other memory, and pages are " +
        "sealed by whole chunks: make the tensor with torch_vmm.aligned(shape, dtype, device), " +
        "or all that is to be sealed under a tag of its own (pool.tag(name))");
  }
  return {begin, end - begin};
}

// The chunks under the blocks that `pieces` lie in, of which one that has to be changed
// holds no other block.
std::vector<ByteRange> Pool::chunks_of_blocks(const std::vector<AddressRange>& pieces, Access access) const {
  struct Live {
    std::size_t end = 0;
    bool is_given = false;
  };
  std::map<std::size_t, Live> live;  // by offset
  directory_->for_each([&](const Block* block) {
    if (block->is_live()) live[block->offset] = {block->end()};
  });
  for (const AddressRange& piece : pieces) {
    const std::size_t offset = piece.address - base_;
    auto at = live.upper_bound(offset);
    if (at == live.begin() || (--at)->second.end < offset + piece.size) {
      throw InvalidArgumentError("pool '" + name_ + "': the " + format_bytes(piece.size) + " at " +
                                 format_hex(piece.address) + " are no live tensor's");
    }
    at->second.is_given = true;
  }
  std::map<std::size_t, std::size_t> chunks;  // where they begin and end
  for (const auto& [offset, block] : live) {
    if (!block.is_given) continue;
    for (auto at = range_->covering(offset); at != range_->live().end() && at->first < block.end; ++at) {
      if (!allows(at->second, access)) chunks.emplace(at->first, at->first + at->second.chunk->size);
    }
  }
  for (const auto& [offset, block] : live) {
    const auto behind = chunks.lower_bound(block.end);
    if (block.is_given || behind == chunks.begin() || std::prev(behind)->second <= offset) continue;
    throw InvalidArgumentError("pool '" + name_ + "': " + format_bytes(block.end - offset) + " at " +
                               format_hex(base_ + offset) + " share a chunk with the tensors and are not among them, " +
                               "and pages are sealed by whole chunks: give all tensors that were made under the tag, " +
                               "or free the others first");
  }
  std::vector<ByteRange> runs;
  for (const auto& [offset, end] : chunks) append_joined(runs, {offset, end - offset});
  return runs;
}

std::vector<ByteRange> Pool::whole_chunks(const std::vector<AddressRange>& pieces, Access access) const {
  if (is_tag_space() && range_ != nullptr) return chunks_of_blocks(pieces, access);
  std::vector<ByteRange> found;
  found.reserve(pieces.size());
  for (const AddressRange& piece : pieces) found.push_back(whole_pages(piece));
  return found;
}

void Pool::require_whole_chunks(const std::vector<AddressRange>& pieces) {
  const MutexLock lock(mutex_);
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

std::vector<ByteRange> Pool::set_memory_access(const std::vector<AddressRange>& pieces, Access access,
                                               Epoch* wait_for) {
  // A thread must not go on with a block that it keeps in a chunk that becomes read-only.
  const BlockCaches::Still still(context_.caches, *this, BlockCaches::Kept::gone);
  const MutexLock lock(mutex_);
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
  if (!is_tag_space() || is_retired()) return;
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
  settle_locked();
  give_up_spare_slabs();
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
  auto at = range_->covering(begin);
  if (at == range_->live().end()) at = range_->from(begin);
  for (; at != range_->live().end() && at->first < begin + bytes; ++at) {
    if (at->second.access() == Access::read) return true;
  }
  return false;
}

bool Pool::is_read_only(Address address, std::size_t bytes) const {
  const ReadLock lock(*this);
  if (range_ == nullptr || !contains(address)) return false;
  std::size_t at = address - base_;
  const std::size_t end = at + bytes;
  for (auto mapping = range_->covering(at); mapping != range_->live().end() && at < end; ++mapping) {
    if (mapping->first > at || mapping->second.access() != Access::read) return false;
    at = mapping->first + mapping->second.chunk->size;
  }
  return bytes != 0 && at >= end;
}

}  // namespace vmm
