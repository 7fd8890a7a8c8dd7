// What torchcomms' hooks do with torch's segments, and what torch 2.15's NCCL process group does: look at what there
// is, then follow what comes and goes, one registration a segment. It stays for good, as torch has no way to detach.
#include <c10/cuda/CUDACachingAllocator.h>

#include <cstddef>
#include <map>

namespace caching = c10::cuda::CUDACachingAllocator;

namespace {

std::map<std::size_t, std::size_t> registered;  // bytes, by address
int unknown_frees = 0;
int registered_twice = 0;
int blocks_told = 0;

void follow(const caching::TraceEntry& entry) {
  using Action = caching::TraceEntry::Action;
  if (entry.action_ == Action::SEGMENT_ALLOC) {
    if (!registered.emplace(entry.addr_, entry.size_).second) ++registered_twice;
  } else if (entry.action_ == Action::SEGMENT_FREE) {
    if (registered.erase(entry.addr_) == 0) ++unknown_frees;
  } else if (entry.action_ == Action::ALLOC) {
    ++blocks_told;
  }
}

}  // namespace

extern "C" {

void look_and_follow() {
  for (const caching::SegmentInfo& segment : caching::snapshot().segments) {
    registered.emplace(segment.address, segment.total_size);
  }
  caching::attachAllocatorTraceTracker(&follow);
}

int mistakes() { return unknown_frees + registered_twice; }
int told_of_blocks() { return blocks_told; }
int registrations() { return static_cast<int>(registered.size()); }

// The place of registration `which`, in order of addresses.
void registration(int which, std::size_t* address, std::size_t* bytes) {
  const auto found = std::next(registered.begin(), which);
  *address = found->first;
  *bytes = found->second;
}
}
