#include "core/pool/seal_rule.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/errors.h"

namespace vmm {

std::string what_is_not_there(const std::string& pool, Address address, std::size_t bytes) {
  return "pool '" + pool + "': of the " + format_bytes(bytes) + " at " + format_hex(address) +
         " not all is there: commit() what is not, or take what is";
}

// The offsets that `pieces` are, by offset, what touches joined: up to the end of the
// block, or page, in which a tensor's memory ends.
std::vector<ByteRange> SealRule::given_memory(const std::vector<SealedPiece>& pieces,
                                              const std::vector<ByteRange>& live) const {
  std::vector<ByteRange> given;
  given.reserve(pieces.size());
  for (const SealedPiece& piece : pieces) {
    const std::size_t begin = piece.address - space_.range().base();
    auto at = std::upper_bound(live.begin(), live.end(), begin,
                               [](std::size_t offset, const ByteRange& each) { return offset < each.offset; });
    if (at == live.begin() || (--at)->end() < begin + piece.size || !is_held({begin, piece.size})) {
      throw InvalidArgumentError(is_range() ? what_is_not_there(pool_, piece.address, piece.size)
                                            : "pool '" + pool_ + "': the " + format_bytes(piece.size) + " at " +
                                                  format_hex(piece.address) + " are no live tensor's");
    }
    const std::size_t end =
        is_range() ? std::min(align_up(begin + piece.size, space_.kind().page), at->end()) : at->end();
    given.push_back({begin, (piece.is_last ? end : begin + piece.size) - begin});
  }
  return joined(std::move(given));
}

// Whether a tensor has all of these pages: a chunk that stays may have others.
bool SealRule::is_held(ByteRange range) const {
  if (!is_range()) return true;
  for (std::size_t at = range.offset; at < range.end();) {
    const Block* const block = pages_.covering(at);
    if (block == nullptr) return false;
    at = block->end();
  }
  return true;
}

// What lives in a part: all that is mapped for one tensor, as the next pages of a chunk
// that stays are its too; the blocks of a tag's space.
std::vector<ByteRange> SealRule::live_memory() const {
  std::vector<ByteRange> live;
  if (is_range()) {
    for (const auto& [offset, mapping] : space_.range().live()) append_joined(live, {offset, mapping.chunk->size});
    return live;
  }
  directory_.for_each([&](const Block* block) {
    if (block->is_live()) live.push_back(block->range());
  });
  std::sort(live.begin(), live.end(), [](const ByteRange& a, const ByteRange& b) { return a.offset < b.offset; });
  return live;
}

// Throws unless all of `live` that lies in `run`, whole chunks, is in `given`.
void SealRule::require_given(ByteRange run, const std::vector<ByteRange>& given,
                             const std::vector<ByteRange>& live) const {
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
    const bool is_same = is_range() || std::any_of(given.begin(), given.end(), [&](const ByteRange& each) {
                           return each.offset < at->end() && at->offset < each.end();
                         });
    throw InvalidArgumentError(why_not_sealed({begin, next - begin}, is_same));
  }
}

// `is_same`: what is missing is of a tensor of which some is given.
std::string SealRule::why_not_sealed(ByteRange missing, bool is_same) const {
  const std::string what =
      "pool '" + pool_ + "': " + format_bytes(missing.size) + " at " +
      format_hex(space_.range().base() + missing.offset) + ", of " + (is_same ? "the same" : "another") +
      " tensor, share a chunk with what is given and are not among it, and pages are sealed by " + "whole chunks: ";
  if (is_range() && pages_.covering(missing.offset) == nullptr) {
    return what + "it has given them back, and can take them again; reserve() rows over them first";
  }
  return what + "give these too, or make what is to be sealed with torch_vmm.aligned(shape, dtype, device), or under " +
         "a tag of its own (pool.tag(name))";
}

std::vector<ByteRange> SealRule::stretches_to_change(const std::vector<SealedPiece>& pieces, Access access) const {
  if (!space_.is_open() || !has_whole_chunks_) {
    throw InvalidArgumentError("pool '" + pool_ + "': " + format_bytes(pieces.front().size) + " at " +
                               format_hex(pieces.front().address) + " lie among other tensors of the pool, and pages " +
                               "are sealed by whole chunks: make the tensor with torch_vmm.aligned(shape, dtype, " +
                               "device), or all that is to be sealed under a tag of its own (pool.tag(name))");
  }
  const std::vector<ByteRange> live = live_memory();
  const std::vector<ByteRange> given = given_memory(pieces, live);
  std::vector<ByteRange> chunks;
  for (const ByteRange& each : given) {
    for (auto at = space_.range().covering(each.offset); at != space_.range().live().end() && at->first < each.end();
         ++at) {
      if (is_range() || !space_.allows(at->second, access)) append_joined(chunks, {at->first, at->second.chunk->size});
    }
  }
  for (const ByteRange& run : chunks) require_given(run, given, live);
  return chunks;
}

}  // namespace vmm
