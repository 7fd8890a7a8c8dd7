#include "core/pool/kept_ranges.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace vmm {

std::vector<KeptRange> KeptRanges::within(ByteRange range) const {
  std::vector<KeptRange> found;
  auto at = by_offset_.upper_bound(range.offset);
  if (at != by_offset_.begin() && std::prev(at)->second.end() > range.offset) --at;
  for (; at != by_offset_.end() && at->first < range.end(); ++at) {
    const KeptRange& whole = at->second;
    const std::size_t begin = std::max(whole.offset, range.offset);
    const std::size_t end = std::min(whole.end(), range.end());
    found.push_back({begin, end - begin, whole.at + (begin - whole.offset), whole.backup});
  }
  return found;
}

template <typename Each>
void KeptRanges::for_each_backup(const Each& each) const {
  Backup* latest = nullptr;
  for (const auto& [offset, range] : by_offset_) {
    if (range.backup.get() != latest) each(*range.backup);
    latest = range.backup.get();
  }
}

std::set<std::string> KeptRanges::places() const {
  std::set<std::string> found;
  for_each_backup([&found](const Backup& backup) { found.insert(backup.place()); });
  return found;
}

void KeptRanges::forget_names() const noexcept {
  for_each_backup([](Backup& backup) { backup.forget_name(); });
}

KeptRanges KeptRanges::cut_to(const std::vector<ByteRange>& wanted) {
  KeptRanges left;
  for (const ByteRange& range : wanted) {
    for (const KeptRange& part : within(range)) left.add(part);
  }
  by_offset_.swap(left.by_offset_);
  return left;
}

std::vector<ByteRange> KeptRanges::missing(ByteRange range) const {
  std::vector<ByteRange> found;
  std::size_t begin = range.offset;
  auto at = by_offset_.upper_bound(range.offset);
  if (at != by_offset_.begin()) --at;
  for (; at != by_offset_.end() && at->first < range.end(); ++at) {
    if (at->second.end() <= begin) continue;
    if (at->first > begin) found.push_back({begin, at->first - begin});
    begin = at->second.end();
  }
  if (begin < range.end()) found.push_back({begin, range.end() - begin});
  return found;
}

// ---------------------------------------------------------------------- unchanged

void Unchanged::add(std::size_t offset, const LiveMapping& mapping, const std::vector<KeptRange>& ranges) {
  OfChunk of_chunk{mapping.number, mapping.times_writable, {}};
  for (const KeptRange& each : ranges) of_chunk.kept.add(each);
  of_chunks_.insert_or_assign(offset, std::move(of_chunk));
}

Unchanged Unchanged::take(ByteRange range) {
  Unchanged taken;
  const auto last = of_chunks_.lower_bound(range.end());
  for (auto at = of_chunks_.lower_bound(range.offset); at != last;) taken.of_chunks_.insert(of_chunks_.extract(at++));
  return taken;
}

Unchanged Unchanged::proved_by(const MappedRange::Map& live) const {
  Unchanged proved;
  for (const auto& [offset, of_chunk] : of_chunks_) {
    const auto now = live.find(offset);
    if (now != live.end() && of_chunk.is_proved_by(now->second)) proved.of_chunks_.emplace(offset, of_chunk);
  }
  return proved;
}

std::vector<KeptRange> Unchanged::within(ByteRange range, std::size_t offset, const LiveMapping& mapping) const {
  const auto found = of_chunks_.find(offset);
  if (found == of_chunks_.end() || !found->second.is_proved_by(mapping)) return {};
  return found->second.kept.within(range);
}

}  // namespace vmm
