#include "core/memory/pinned_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <iterator>
#include <new>
#include <utility>

#include "base/errors.h"

namespace vmm {

namespace {

constexpr std::size_t kTouched = 4 * kKiB;  // a page, where the kernel gives no huge ones
constexpr int kPopulateWrite = 23;          // MADV_POPULATE_WRITE: from Linux 5.14 on

}  // namespace

void PinnedMemory::Slab::touch(std::size_t at, std::size_t size) {
  if (!driver_.pins_host()) return;  // 16 ms a slab, and a small model needs few of its pages
  if (::madvise(begin_ + at, size, kPopulateWrite) == 0) return;
  auto* const bytes = reinterpret_cast<volatile std::byte*>(begin_);
  for (const std::size_t end = at + size; at < end; at += kTouched) bytes[at] = std::byte{0};
}

void PinnedMemory::Slab::pin() {
  is_pinned_ = driver_.pin_host(address(), kSlabBytes).ok();
  is_ready_ = true;
}

PinnedMemory::Slab::~Slab() {
  if (is_pinned_) driver_.unpin_host(address()).ignore();
  discard(begin_, kSlabBytes);
}

// Nobody else's pages: a child of a fork has none of them.
void PinnedMemory::reserve_region() {
  places_.reserve(reserved_ + kRegionBytes / kSlabBytes);  // end() asks for no memory
  regions_.reserve(regions_.size() + 1);
  for (std::size_t bytes = kRegionBytes; bytes >= kSlabBytes; bytes /= 2) {
    try {
      regions_.push_back(std::make_unique<ZeroPages>(bytes));
    } catch (const std::bad_alloc&) {
      continue;
    }
    reserved_ += bytes / kSlabBytes;
    std::byte* const begin = regions_.back()->begin();
    ::madvise(begin, bytes, MADV_HUGEPAGE);  // a kernel without has small ones
    ::madvise(begin, bytes, MADV_DONTFORK);
    for (std::size_t at = bytes; at != 0; at -= kSlabBytes) places_.push_back(begin + at - kSlabBytes);
    return;
  }
  throw OutOfMemoryError(
      "the process may have no " + format_bytes(kSlabBytes) +
          " of addresses more (ulimit -v, or strict overcommit) for what is to sleep in the host's " + "memory",
      kSlabBytes, 0, kMostAddresses, "host");
}

std::byte* PinnedMemory::take_place() {
  const MutexLock lock(mutex_);
  if (places_.empty()) reserve_region();
  std::byte* const place = places_.back();
  places_.pop_back();
  return place;
}

PinnedMemory::SlabPtr PinnedMemory::make() {
  std::byte* const place = take_place();
  try {
    return std::make_unique<Slab>(driver_, place);
  } catch (...) {
    const MutexLock lock(mutex_);
    places_.push_back(place);
    throw;
  }
}

void PinnedMemory::pin(Slab& slab) {
  const MutexLock lock(pinning_);
  slab.pin();
}

void PinnedMemory::end(std::vector<SlabPtr> slabs) noexcept {
  for (SlabPtr& slab : slabs) {
    if (slab == nullptr) continue;
    std::byte* const place = slab->begin();
    slab.reset();  // unpinning takes 1 ms
    const MutexLock lock(mutex_);
    places_.push_back(place);
  }
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
  {
    const MutexLock lock(mutex_);
    used_ -= slabs.size();
    for (SlabPtr& slab : slabs) {
      if (slab == nullptr || !slab->is_ready()) continue;
      if (is_closed_ || used_ + unused_.size() >= limit_ / kSlabBytes) continue;
      try {
        unused_.push_back(std::move(slab));
      } catch (...) {
        // No memory to note it: it ends, as above the limit.
      }
    }
  }
  end(std::move(slabs));
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
  std::vector<SlabPtr> excess;
  {
    const MutexLock lock(mutex_);
    limit_ = bytes;
    excess = take_excess(bytes);
  }
  const std::size_t went = excess.size() * kSlabBytes;
  end(std::move(excess));
  return went;
}

std::size_t PinnedMemory::limit() const {
  const MutexLock lock(mutex_);
  return limit_;
}

void PinnedMemory::close() {
  {
    const MutexLock lock(mutex_);
    is_closed_ = true;
  }
  release_unused();
}

std::size_t PinnedMemory::release_unused() {
  std::vector<SlabPtr> excess;
  {
    const MutexLock lock(mutex_);
    excess = take_excess(0);
  }
  const std::size_t went = excess.size() * kSlabBytes;
  end(std::move(excess));
  return went;
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
