#include "core/memory/dormant_mappings.h"

#include <iterator>
#include <new>

namespace vmm {

bool DormantMappings::keep(Address address, Chunk* chunk, std::atomic<std::int64_t>* unmapped) {
  const MutexLock lock(mutex_);
  if (!chunk->may_stay_mapped) return false;
  if (by_address_.size() >= kMost && !drop(by_address_.find(by_age_.begin()->second)).ok()) return false;
  const std::uint64_t since = next_++;
  auto of_chunk = by_chunk_.end();
  try {
    by_age_.emplace(since, address);
    of_chunk = by_chunk_.emplace(chunk, address);
    by_address_.emplace(address, Kept{chunk, chunk->size, since, unmapped, of_chunk});
  } catch (const std::bad_alloc&) {
    by_age_.erase(since);
    if (of_chunk != by_chunk_.end()) by_chunk_.erase(of_chunk);
    return false;
  }
  size_.store(by_address_.size(), std::memory_order_relaxed);
  return true;
}

bool DormantMappings::claim(Address address, const Chunk* chunk) {
  if (size() == 0) return false;
  const MutexLock lock(mutex_);
  const auto found = by_address_.find(address);
  if (found == by_address_.end() || found->second.chunk != chunk) return false;
  forget(found);
  return true;
}

DormantMappings::ByAddress::iterator DormantMappings::forget(ByAddress::iterator at) {
  by_chunk_.erase(at->second.of_chunk);
  by_age_.erase(at->second.since);
  const auto next = by_address_.erase(at);
  size_.store(by_address_.size(), std::memory_order_relaxed);
  return next;
}

Status DormantMappings::drop(ByAddress::iterator at) {
  const Status status = driver_.unmap(at->first, at->second.size);
  if (!status.ok() && status.code() != StatusCode::driver_gone) return status;
  at->second.unmapped->fetch_add(1, std::memory_order_relaxed);
  forget(at);
  return {};
}

DormantMappings::ByAddress::iterator DormantMappings::first_reaching_into(Address address) {
  auto at = by_address_.upper_bound(address);
  if (at != by_address_.begin()) {
    const auto before = std::prev(at);
    if (before->first + before->second.size > address) at = before;
  }
  return at;
}

Status DormantMappings::clear(Address address, std::size_t size) {
  if (this->size() == 0) return {};
  const MutexLock lock(mutex_);
  Status refused;
  for (auto at = first_reaching_into(address); at != by_address_.end() && at->first < address + size;) {
    const auto next = std::next(at);
    if (const Status status = drop(at); !status.ok()) refused = status;
    at = next;
  }
  return refused;
}

void DormantMappings::abandon(Address address, std::size_t size) {
  if (clear(address, size).ok()) return;
  const MutexLock lock(mutex_);
  auto at = first_reaching_into(address);
  while (at != by_address_.end() && at->first < address + size) at = forget(at);
}

Status DormantMappings::drop_all_of(Chunk* chunk) {
  for (auto of_chunk = by_chunk_.find(chunk); of_chunk != by_chunk_.end(); of_chunk = by_chunk_.find(chunk)) {
    if (const Status status = drop(by_address_.find(of_chunk->second)); !status.ok()) return status;
  }
  return {};
}

Status DormantMappings::clear_of(Chunk* chunk) {
  if (size() == 0) return {};
  const MutexLock lock(mutex_);
  return drop_all_of(chunk);
}

Status DormantMappings::ban(Chunk* chunk) {
  const MutexLock lock(mutex_);
  if (const Status status = drop_all_of(chunk); !status.ok()) return status;
  chunk->may_stay_mapped = false;
  return {};
}

void DormantMappings::allow(Chunk* chunk) {
  const MutexLock lock(mutex_);
  chunk->may_stay_mapped = true;
}

std::vector<DormantMappings::Dormant> DormantMappings::within(Address address, std::size_t size,
                                                              std::size_t beyond) const {
  std::vector<Dormant> found;
  if (this->size() == 0) return found;
  const MutexLock lock(mutex_);
  for (auto at = by_address_.lower_bound(address); at != by_address_.end() && at->first < address + size; ++at) {
    const Kept& kept = at->second;
    if (at->first + kept.size > address + size + beyond) break;
    // While it is noted here the chunk is there.
    found.push_back({at->first, kept.chunk, kept.size, kept.chunk->content.load(std::memory_order_relaxed)});
  }
  return found;
}

}  // namespace vmm
