#include "core/pool/free_space.h"

#include <algorithm>
#include <iterator>

#include "base/check.h"
#include "core/numbers/stats.h"

namespace vmm {

namespace {

constexpr auto kSmall = static_cast<std::size_t>(SizeClass::small_pool);
constexpr auto kLarge = static_cast<std::size_t>(SizeClass::large_pool);

// A large free block, or a spare slab, which is free in all but name.
struct FreeSpan {
  ByteRange range;
  SizeClass size_class = SizeClass::large_pool;
};

std::size_t shared_bytes(ByteRange a, ByteRange b) {
  const std::size_t begin = std::max(a.offset, b.offset);
  const std::size_t end = std::min(a.end(), b.end());
  return end > begin ? end - begin : 0;
}

// By offset.
std::vector<FreeSpan> free_spans(const BackedSpace& space, const Slabs& slabs) {
  std::vector<FreeSpan> spans;
  spans.reserve(space.blocks().free_blocks().size() + slabs.size());
  for (const Block* block : space.blocks().free_blocks()) spans.push_back({block->range(), SizeClass::large_pool});
  const auto of_blocks = static_cast<std::ptrdiff_t>(spans.size());
  slabs.for_each_spare([&](const Block& spare) { spans.push_back({spare.range(), SizeClass::small_pool}); });
  const auto by_offset = [](const FreeSpan& a, const FreeSpan& b) { return a.range.offset < b.range.offset; };
  std::sort(spans.begin() + of_blocks, spans.end(), by_offset);
  std::inplace_merge(spans.begin(), spans.begin() + of_blocks, spans.end(), by_offset);
  return spans;
}

}  // namespace

// Of a run of adjacent free spans only the chunks that begin before it or end
// after it are used by anybody else; whatever is mapped between them is idle.
FreeSpace free_space(const BackedSpace& space, const Slabs& slabs, const TakenBytes& taken) {
  space.note_walk();
  FreeSpace free;
  free.stranded_count[kSmall] = slabs.stranded_pieces();
  const std::size_t spare_bytes = slabs.spare_bytes();
  free.stranded_bytes[kSmall] = taken.of_slabs - taken.in_slabs - spare_bytes;

  std::size_t stranded_in_runs = 0;
  const std::vector<FreeSpan> spans = free_spans(space, slabs);
  using At = std::vector<FreeSpan>::const_iterator;
  const auto strand = [&](At first, At last, std::size_t begin, std::size_t end) {
    FreeSpace::BySizeClass bytes{};
    for (; first != last; ++first) {
      bytes.at(static_cast<std::size_t>(first->size_class)) += shared_bytes(first->range, {begin, end - begin});
    }
    for (const std::size_t of_class : {kSmall, kLarge}) {
      free.stranded_bytes.at(of_class) += bytes.at(of_class);
      free.stranded_count.at(of_class) += bytes.at(of_class) != 0 ? 1 : 0;
      stranded_in_runs += bytes.at(of_class);
    }
  };
  for (At first = spans.begin(); first != spans.end();) {
    At last = std::next(first);
    while (last != spans.end() && last->range.offset == std::prev(last)->range.end()) ++last;
    const std::size_t run_begin = first->range.offset;
    const std::size_t run_end = std::prev(last)->range.end();
    if (space.is_pinned()) {
      // Graphs may use all of it at any time.
      std::size_t at = run_begin;
      for (const ByteRange& gap : space.range().gaps({run_begin, run_end - run_begin})) {
        if (gap.offset > at) strand(first, last, at, gap.offset);
        at = gap.end();
      }
      if (at < run_end) strand(first, last, at, run_end);
    } else {
      std::size_t low_end = run_begin;
      if (const auto at = space.range().covering(run_begin);
          at != space.range().live().end() && at->first < run_begin) {
        low_end = std::min(run_end, at->first + at->second.chunk->size);
        strand(first, last, run_begin, low_end);
      }
      if (const auto at = space.range().covering(run_end - 1);
          low_end != run_end && at != space.range().live().end() && at->first + at->second.chunk->size > run_end) {
        strand(first, last, std::max(low_end, at->first), run_end);
      }
    }
    first = last;
  }
  const std::size_t free_bytes = space.range().mapped_bytes() - taken.large - taken.of_slabs + spare_bytes;
  free.idle_bytes = free_bytes - stranded_in_runs;
  return free;
}

void check_free_space(const BackedSpace& space, const Slabs& slabs, const TakenBytes& taken) {
  const FreeSpace told = free_space(space, slabs, taken);
  const std::vector<FreeSpan> spans = free_spans(space, slabs);
  FreeSpace walked;
  walked.stranded_bytes[kSmall] = slabs.check();
  auto first = spans.begin();
  for (const auto& [offset, mapping] : space.range().live()) {
    const ByteRange chunk{offset, mapping.chunk->size};
    while (first != spans.end() && first->range.end() <= offset) ++first;
    FreeSpace::BySizeClass parts{};
    for (auto at = first; at != spans.end() && at->range.offset < chunk.end(); ++at) {
      parts.at(static_cast<std::size_t>(at->size_class)) += shared_bytes(at->range, chunk);
    }
    if (!space.is_pinned() && parts[kSmall] + parts[kLarge] == chunk.size) {
      walked.idle_bytes += chunk.size;
    } else {
      walked.stranded_bytes[kSmall] += parts[kSmall];
      walked.stranded_bytes[kLarge] += parts[kLarge];
    }
  }
  VMM_CHECK(told.idle_bytes == walked.idle_bytes && told.stranded_bytes == walked.stranded_bytes, "idle ",
            told.idle_bytes, ", walked ", walked.idle_bytes, "; stranded small ", told.stranded_bytes[kSmall],
            ", walked ", walked.stranded_bytes[kSmall], "; large ", told.stranded_bytes[kLarge], ", walked ",
            walked.stranded_bytes[kLarge]);
}

}  // namespace vmm
