#include "core/memory/pinned_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <iterator>
#include <utility>

namespace vmm {

namespace {

constexpr std::size_t kTouched = 4 * kKiB;  // a page, where the kernel gives no huge ones

}  // namespace

PinnedMemory::Slab::Slab(Driver& driver) : driver_(driver), pages_(kSlabBytes) {
  ::madvise(pages_.begin(), kSlabBytes, MADV_HUGEPAGE);  // a kernel without has small ones
  auto* const bytes = reinterpret_cast<volatile std::byte*>(pages_.begin());
  for (std::size_t at = 0; at < kSlabBytes; at += kTouched) bytes[at] = std::byte{0};
  is_pinned_ = driver_.pin_host(address(), kSlabBytes).ok();
}

PinnedMemory::Slab::~Slab() {
  if (is_pinned_) driver_.unpin_host(address()).ignore();
}

bool PinnedMemory::take(std::size_t count, std::vector<SlabPtr>* slabs) {
  slabs->clear();
  slabs->reserve(count);
  const MutexLock lock(mutex_);
  if ((used_ + count) > limit_ / kSlabBytes) return false;
  used_ += count;
  while (slabs->size() < count && !unused_.empty()) {
    slabs->push_back(std::move(unused_.back()));
    unused_.pop_back();
  }
  slabs->resize(count);
  return true;
}

void PinnedMemory::put_back(std::vector<SlabPtr> slabs) noexcept {
  const MutexLock lock(mutex_);  // what stays in `slabs` ends after it
  used_ -= slabs.size();
  for (SlabPtr& slab : slabs) {
    if (slab == nullptr) continue;
    if (used_ + unused_.size() >= limit_ / kSlabBytes) continue;
    try {
      unused_.push_back(std::move(slab));
    } catch (...) {
      // No memory to note it: it ends, as above the limit.
    }
  }
}

// Unused slabs, so many that no more than `most` bytes are pinned.
std::vector<PinnedMemory::SlabPtr> PinnedMemory::take_excess(std::size_t most) {
  const std::size_t room = most / kSlabBytes;
  const std::size_t keep = std::min(unused_.size(), room - std::min(room, used_));
  const auto first = unused_.begin() + static_cast<std::ptrdiff_t>(keep);
  std::vector<SlabPtr> excess(std::make_move_iterator(first), std::make_move_iterator(unused_.end()));
  unused_.erase(first, unused_.end());
  return excess;
}

std::size_t PinnedMemory::set_limit(std::size_t bytes) {
  std::vector<SlabPtr> excess;  // before the lock: unpinning takes 1 ms a slab
  const MutexLock lock(mutex_);
  limit_ = bytes;
  excess = take_excess(bytes);
  return excess.size() * kSlabBytes;
}

std::size_t PinnedMemory::limit() const {
  const MutexLock lock(mutex_);
  return limit_;
}

std::size_t PinnedMemory::release_unused() {
  std::vector<SlabPtr> excess;
  const MutexLock lock(mutex_);
  excess = take_excess(0);
  return excess.size() * kSlabBytes;
}

std::size_t PinnedMemory::used_bytes() const {
  const MutexLock lock(mutex_);
  return used_ * kSlabBytes;
}

std::size_t PinnedMemory::unused_bytes() const {
  const MutexLock lock(mutex_);
  return unused_.size() * kSlabBytes;
}

}  // namespace vmm
