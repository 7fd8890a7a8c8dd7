#include "core/device/provided_segments.h"

#include <iterator>
#include <utility>

#include "core/device/provided_memory.h"

namespace vmm {

ProvidedSegments& ProvidedSegments::instance() {
  static auto* const kInstance = new ProvidedSegments;
  return *kInstance;
}

void ProvidedSegments::add(ByteRange range, const std::shared_ptr<ProvidedMemory>& memory, const DeviceMemory& device) {
  const MutexLock lock(mutex_);
  Segment& segment = segments_[range.offset];
  try {
    const auto holder = holders_.try_emplace(memory.get(), Holder{memory, &device}).first;
    ++holder->second.segments;
    segment = {range.size, holder};
  } catch (...) {
    segments_.erase(range.offset);
    throw;
  }
  count_.store(segments_.size(), std::memory_order_relaxed);
}

void ProvidedSegments::remove(ByteRange range) {
  std::shared_ptr<ProvidedMemory> last;  // may end here, outside of the lock
  const MutexLock lock(mutex_);
  const auto at = segments_.find(range.offset);
  Holder& holder = at->second.holder->second;
  if (--holder.segments == 0) {
    last = std::move(holder.memory);
    holders_.erase(at->second.holder);
  }
  segments_.erase(at);
  count_.store(segments_.size(), std::memory_order_relaxed);
}

ProvidedSegments::Segments::iterator ProvidedSegments::holding(Address address) {
  const auto after = segments_.upper_bound(address);
  if (after == segments_.begin()) return segments_.end();
  const auto at = std::prev(after);
  return address - at->first < at->second.size ? at : segments_.end();
}

std::shared_ptr<ProvidedMemory> ProvidedSegments::find(Address address) {
  if (!any()) return nullptr;
  const MutexLock lock(mutex_);
  const auto at = holding(address);
  return at == segments_.end() ? nullptr : at->second.holder->second.memory;
}

std::optional<ByteRange> ProvidedSegments::segment_at(Address address) {
  const MutexLock lock(mutex_);
  const auto at = holding(address);
  if (at == segments_.end()) return std::nullopt;
  return ByteRange{at->first, at->second.size};
}

std::vector<std::shared_ptr<ProvidedMemory>> ProvidedSegments::all_of(const DeviceMemory& device) {
  std::vector<std::shared_ptr<ProvidedMemory>> found;
  if (!any()) return found;
  const MutexLock lock(mutex_);
  for (const auto& [memory, holder] : holders_) {
    if (holder.device == &device) found.push_back(holder.memory);
  }
  return found;
}

}  // namespace vmm
