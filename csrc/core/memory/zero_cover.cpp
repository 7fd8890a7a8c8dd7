#include "core/memory/zero_cover.h"

#include <algorithm>
#include <iterator>

namespace vmm {

namespace {

// A chunk of its size serves where at least so many of it fit: or a cover of a few
// pages would make more memory than it saves.
constexpr std::size_t kLeastUses = 16;

}  // namespace

ZeroChunks::~ZeroChunks() {
  for (Chunk* chunk : chunks_) {
    if (chunk == nullptr) continue;
    const bool is_mapped = chunk->mappings.load(std::memory_order_acquire) != 0;
    if (is_mapped || !store_.release(chunk).ok()) store_.put(group_, chunk);
  }
}

Chunk* ZeroChunks::at_most(std::size_t size, Status* why) {
  const MutexLock lock(mutex_);
  for (std::size_t k = kSizes.size(); k-- > 0;) {
    const std::size_t bytes = kSizes.at(k) * granularity();
    if (bytes > size) continue;
    Chunk*& chunk = chunks_.at(k);
    if (chunk != nullptr) return chunk;
    Budget* refused = nullptr;
    *why = store_.create(store_.spec(bytes), payer_, &chunk, &refused);
    if (why->ok()) return chunk;
    chunk = nullptr;
  }
  return nullptr;
}

ZeroCover::Map::const_iterator ZeroCover::touching(std::size_t offset) const {
  auto at = live_.upper_bound(offset);
  if (at != live_.begin() && std::prev(at)->first + std::prev(at)->second.chunk->size > offset) --at;
  return at;
}

bool ZeroCover::covers(ByteRange range) const {
  std::size_t at = range.offset;
  for (auto mapping = touching(at); mapping != live_.end() && at < range.end(); ++mapping) {
    if (mapping->first > at || !mapping->second.is_readable) return false;
    at = mapping->first + mapping->second.chunk->size;
  }
  return at >= range.end();
}

// Aligned to their size, so that a break is met by few smaller ones.
std::size_t ZeroCover::largest_at(std::size_t offset, std::size_t size) const {
  const std::size_t granule = chunks_->granularity();
  std::size_t largest = granule;
  for (const std::size_t granules : ZeroChunks::kSizes) {
    const std::size_t bytes = granules * granule;
    if (offset % bytes == 0 && bytes <= size && bytes * kLeastUses <= std::max(size_, granule * kLeastUses)) {
      largest = bytes;
    }
  }
  return largest;
}

Status ZeroCover::unmap(Map::const_iterator at) {
  Chunk* const chunk = at->second.chunk;
  const Status status = driver_.unmap(base_ + at->first, chunk->size);
  if (!status.ok() && status.code() != StatusCode::driver_gone) return status;
  chunk->note_unmapped();
  bytes_ -= chunk->size;
  live_.erase(at);
  return {};
}

Status ZeroCover::prepare() {
  Status status;
  return chunks_->at_most(chunks_->granularity(), &status) != nullptr ? Status() : status;
}

Status ZeroCover::add_accessor(const Location& who) {
  if (std::find(accessors_.begin(), accessors_.end(), who) != accessors_.end()) return {};
  accessors_.reserve(accessors_.size() + 1);
  for (const auto& [offset, mapping] : live_) {
    const Status status = driver_.set_access(base_ + offset, mapping.chunk->size, who, Access::read);
    if (!status.ok()) return status;
  }
  accessors_.push_back(who);
  return {};
}

// Maps [*at, range.end()), as far as it gets, and makes all of it readable.
Status ZeroCover::map(ByteRange range, std::size_t* at) {
  while (*at < range.end()) {
    Status status;
    Chunk* chunk = chunks_->at_most(largest_at(*at, range.end() - *at), &status);
    if (chunk == nullptr) return status;
    // Noted first: a mapping that there is no room to note would stay for ever.
    const auto noted = live_.emplace(*at, Mapping{chunk}).first;
    if (status = driver_.map(base_ + *at, chunk->size, chunk->handle); !status.ok()) {
      live_.erase(noted);
      return status;
    }
    chunk->note_mapped();
    bytes_ += chunk->size;
    *at += chunk->size;
  }
  // One call for the run.
  for (const Location& who : accessors_) {
    const Status status = driver_.set_access(base_ + range.offset, range.size, who, Access::read);
    if (!status.ok()) return status;
  }
  for (auto mapped = live_.lower_bound(range.offset); mapped != live_.end() && mapped->first < *at; ++mapped) {
    mapped->second.is_readable = true;
  }
  return {};
}

Status ZeroCover::cover(ByteRange range) {
  std::size_t at = range.offset;
  const auto undo = [&] {
    for (auto mapped = live_.lower_bound(range.offset); mapped != live_.end() && mapped->first < at;) {
      const auto next = std::next(mapped);
      unmap(mapped).ignore();
      mapped = next;
    }
  };
  Status status;
  try {
    status = map(range, &at);
  } catch (...) {
    undo();
    throw;
  }
  if (!status.ok()) undo();
  return status;
}

Status ZeroCover::uncover(ByteRange range) {
  auto first = touching(range.offset);
  if (first == live_.end() || first->first >= range.end()) return {};
  const std::size_t begin = first->first;
  std::size_t end = begin;
  while (true) {
    const auto at = live_.lower_bound(begin);
    if (at == live_.end() || at->first >= range.end()) break;
    end = at->first + at->second.chunk->size;
    if (const Status status = unmap(at); !status.ok()) return status;
  }
  if (begin < range.offset) {
    if (const Status status = cover({begin, range.offset - begin}); !status.ok()) return status;
  }
  return end > range.end() ? cover({range.end(), end - range.end()}) : Status();
}

Status ZeroCover::cover_gaps(ByteRange range) {
  std::vector<ByteRange> gaps;
  std::size_t at = range.offset;
  for (auto next = touching(at); next != live_.end() && next->first < range.end();) {
    const auto mapping = next++;
    if (!mapping->second.is_readable) {
      if (const Status status = unmap(mapping); !status.ok()) return status;
      continue;
    }
    if (mapping->first > at) gaps.push_back({at, mapping->first - at});
    at = mapping->first + mapping->second.chunk->size;
  }
  if (at < range.end()) gaps.push_back({at, range.end() - at});
  for (const ByteRange& gap : gaps) {
    if (const Status status = cover(gap); !status.ok()) return status;
  }
  return {};
}

}  // namespace vmm
