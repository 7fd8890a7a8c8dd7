#include "core/memory/chunk_store.h"

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <new>
#include <utility>

#include "base/check.h"

namespace vmm {

void ChunkShelf::put(Chunk* chunk) noexcept {
  if (chunk->mappings.load(std::memory_order_acquire) == 0) are_mapped_ = false;
  by_size_.insert(std::move(chunk->shelf_place));
  bytes_ += chunk->size;
}

Chunk* ChunkShelf::take(ChunksBySize::const_iterator at) {
  Chunk* chunk = at->second;
  chunk->shelf_place = by_size_.extract(at);
  bytes_ -= chunk->size;
  return chunk;
}

Chunk* ChunkShelf::take_at_most(std::size_t size, bool exact, std::size_t unit) {
  for (auto at = by_size_.upper_bound(size); at != by_size_.begin(); at = by_size_.lower_bound(at->first)) {
    --at;
    if (exact && at->first != size) return nullptr;
    if (unit == 0 || is_aligned(at->first, unit)) return take(at);
  }
  return nullptr;
}

std::size_t ChunkShelf::left_of(std::size_t size) const {
  for (auto at = by_size_.upper_bound(size); size != 0 && at != by_size_.begin();) {
    if ((--at)->first > size) {
      at = by_size_.upper_bound(size);
    } else {
      size -= at->first;
    }
  }
  return size;
}

Chunk* ChunkShelf::take_above(std::size_t size) {
  const auto at = by_size_.upper_bound(size);
  return at == by_size_.end() ? nullptr : take_at_most(at->first, true);
}

bool ChunkShelf::take(const Chunk* chunk, std::size_t size) {
  const auto [first, last] = by_size_.equal_range(size);
  const auto found = std::find_if(first, last, [chunk](const auto& entry) { return entry.second == chunk; });
  if (found == last) return false;
  take(found);
  return true;
}

Chunk* ChunkShelf::take_any() { return by_size_.empty() ? nullptr : take(std::prev(by_size_.end())); }

void ChunkShelf::move_no_units(std::size_t unit, ChunkShelf& other) noexcept {
  for (auto at = by_size_.begin(); at != by_size_.end();) {
    const auto each = at++;
    if (!is_aligned(each->first, unit)) other.put(take(each));
  }
}

ChunkStore::~ChunkStore() {
  trim_all();
  const std::size_t left = live_chunks();
  // Whoever still owns chunks here outlives its store: a bug of ours, but no
  // reason to end the user's process while it is leaving.
  if (left != 0 && driver_.alive()) std::fprintf(stderr, "torch_vmm: chunk store ends with %zu chunks alive\n", left);
}

Status ChunkStore::create(const ChunkSpec& spec, Budget& payer, Chunk** out, Budget** refused) {
  if (Budget* who = payer.charge(spec.size)) {
    if (refused != nullptr) *refused = who;
    return {StatusCode::out_of_memory, "charge the limit"};
  }
  if (refused != nullptr) *refused = nullptr;
  try {
    const Status status = create_prepaid(spec, payer, out);
    if (!status.ok()) payer.refund(spec.size);
    return status;
  } catch (...) {
    payer.refund(spec.size);
    throw;
  }
}

Status ChunkStore::create_prepaid(const ChunkSpec& spec, Budget& payer, Chunk** out) {
  static std::atomic<std::uint64_t> numbers{0};
  // First: what there is no room to note would stay for ever.
  auto chunk = std::make_unique<Chunk>();
  ChunksBySize place;
  chunk->shelf_place = place.extract(place.emplace(spec.size, chunk.get()));
  ChunkHandle handle = 0;
  if (const Status status = driver_.create(spec, &handle); !status.ok()) return status;
  chunk->handle = handle;
  chunk->number = numbers.fetch_add(1, std::memory_order_relaxed) + 1;
  chunk->size = spec.size;
  chunk->exportable = spec.exportable;
  chunk->charged = &payer;
  live_chunks_.fetch_add(1, std::memory_order_relaxed);
  *out = chunk.release();
  return {};
}

Status ChunkStore::release(Chunk* chunk) {
  VMM_CHECK(chunk->mappings.load(std::memory_order_acquire) == 0, "chunk of ", chunk->size, " bytes is mapped");
  if (const Status status = dormant_.clear_of(chunk); !status.ok()) return status;
  if (chunk->exported && on_export_end_ != nullptr) on_export_end_(chunk->number);
  const Status status = driver_.release(chunk->handle);
  // When the driver has gone, all its memory has.
  if (!status.ok() && status.code() != StatusCode::driver_gone) return status;
  live_chunks_.fetch_sub(1, std::memory_order_relaxed);
  if (chunk->is_shelved) {
    chunk->charged->refund_shelved(chunk->size);
  } else {
    chunk->charged->refund(chunk->size);
  }
  delete chunk;
  return {};
}

ChunkStore::Shelf* ChunkStore::shelf_for(Budget& group) noexcept {
  try {
    Shelf& shelf = shelves_[&group];
    // A request of a model whose group has ended meanwhile may still put back what it took.
    if (shelf.keeps_group == nullptr) shelf.keeps_group = group.weak_from_this().lock();
    return &shelf;
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void ChunkStore::put(Budget& group, Chunk* chunk) noexcept {
  group.shelve(*chunk->charged, chunk->size);
  chunk->charged = &group;
  chunk->is_shelved = true;
  MutexLock lock(mutex_);
  Shelf* const shelf = shelf_for(group);
  ChunkShelf& chunks = shelf == nullptr ? without_shelf_ : chunk->exported ? shelf->exported : shelf->usable;
  chunks.put(chunk);
  if (shelf == nullptr || chunk->exported) release_unmapped(chunks, kUnlimited);
}

namespace {

// Off the group's shelf: nullptr, and the payer pays; or who refused.
Budget* charge_to(Chunk* chunk, Budget& group, Budget& payer) {
  Budget* const refused = group.unshelve(payer, chunk->size);
  if (refused != nullptr) return refused;
  chunk->charged = &payer;
  chunk->is_shelved = false;
  return nullptr;
}

}  // namespace

Chunk* ChunkStore::take_at_most(Budget& group, Budget& payer, std::size_t size, bool exact, Budget** refused,
                                std::size_t unit) {
  MutexLock lock(mutex_);
  *refused = nullptr;
  const auto shelf = shelves_.find(&group);
  if (shelf == shelves_.end()) return nullptr;
  Chunk* chunk = shelf->second.usable.take_at_most(size, exact, unit);
  if (chunk == nullptr) return nullptr;
  *refused = charge_to(chunk, group, payer);
  if (*refused == nullptr) return chunk;
  shelf->second.usable.put(chunk);
  return nullptr;
}

bool ChunkStore::take(Budget& group, Budget& payer, Chunk* chunk, std::size_t size) {
  const MutexLock lock(mutex_);
  const auto shelf = shelves_.find(&group);
  if (shelf == shelves_.end() || !shelf->second.usable.take(chunk, size)) return false;
  if (charge_to(chunk, group, payer) == nullptr) return true;
  shelf->second.usable.put(chunk);
  return false;
}

// Gives up to about `want` bytes back to the driver. Returns how many.
std::size_t ChunkStore::release_unmapped(ChunkShelf& chunks, std::size_t want) {
  // A former address may still be in use, and the driver may refuse.
  return chunks.remove_unmapped(want, [this](Chunk* chunk) { return release(chunk).ok(); });
}

std::size_t ChunkStore::trim_shelf(Shelf& shelf, std::size_t want) {
  const std::size_t exported = release_unmapped(shelf.exported, kUnlimited);
  return exported + (want > exported ? release_unmapped(shelf.usable, want - exported) : 0);
}

std::size_t ChunkStore::give_back(Budget& group, std::size_t want) {
  MutexLock lock(mutex_);
  const std::size_t given_back = release_unmapped(without_shelf_, kUnlimited);
  const auto shelf = shelves_.find(&group);
  return given_back + (shelf == shelves_.end() ? 0 : trim_shelf(shelf->second, want));
}

std::size_t ChunkStore::trim(Budget& group, std::size_t keep_bytes) {
  MutexLock lock(mutex_);
  const std::size_t given_back = release_unmapped(without_shelf_, kUnlimited);
  const auto shelf = shelves_.find(&group);
  if (shelf == shelves_.end()) return given_back;
  const std::size_t bytes = shelf->second.bytes();
  return given_back + trim_shelf(shelf->second, bytes - std::min(bytes, keep_bytes));
}

std::size_t ChunkStore::trim_under(const Budget& budget, std::size_t want) {
  MutexLock lock(mutex_);
  std::size_t given_back = release_unmapped(without_shelf_, kUnlimited);
  for (auto& [group, shelf] : shelves_) {
    if (given_back >= want) break;
    if (!group->stands_under(budget)) continue;
    given_back += trim_shelf(shelf, want - given_back);
  }
  return given_back;
}

std::size_t ChunkStore::all_shelved_bytes() const {
  MutexLock lock(mutex_);
  std::size_t bytes = without_shelf_.bytes();
  for (const auto& [group, shelf] : shelves_) bytes += shelf.bytes();
  return bytes;
}

std::size_t ChunkStore::shelved_under(const Budget& budget) const {
  MutexLock lock(mutex_);
  std::size_t bytes = without_shelf_.bytes_if([&](const Chunk& chunk) { return chunk.charged->stands_under(budget); });
  for (const auto& [group, shelf] : shelves_) bytes += group->stands_under(budget) ? shelf.bytes() : 0;
  return bytes;
}

std::size_t ChunkStore::trim_all() {
  MutexLock lock(mutex_);
  std::size_t given_back = release_unmapped(without_shelf_, kUnlimited);
  for (auto& [group, shelf] : shelves_) given_back += trim_shelf(shelf, kUnlimited);
  return given_back;
}

std::size_t ChunkStore::shelved_bytes(const Budget& group) const {
  MutexLock lock(mutex_);
  const std::size_t without = without_shelf_.bytes_if([&](const Chunk& chunk) { return chunk.charged == &group; });
  const auto shelf = shelves_.find(&group);
  return without + (shelf == shelves_.end() ? 0 : shelf->second.bytes());
}

ChunkStore::Waiting ChunkStore::waiting(const Budget& group, Epoch passed) const {
  Waiting all;
  const auto waits = [&](const Chunk& chunk) {
    if (chunk.charged != &group || chunk.mappings.load(std::memory_order_acquire) == 0) return false;
    if (chunk.last_use <= passed) return false;
    all.newest = std::max(all.newest, chunk.last_use);
    return true;
  };
  MutexLock lock(mutex_);
  all.bytes = without_shelf_.bytes_if(waits);
  if (const auto shelf = shelves_.find(&group); shelf != shelves_.end()) {
    all.bytes += shelf->second.usable.bytes_if(waits) + shelf->second.exported.bytes_if(waits);
  }
  return all;
}

std::size_t ChunkStore::shelves() const {
  MutexLock lock(mutex_);
  return shelves_.size();
}

bool ChunkStore::forget(const Budget& group) {
  MutexLock lock(mutex_);
  release_unmapped(without_shelf_, kUnlimited);
  if (without_shelf_.bytes_if([&](const Chunk& chunk) { return chunk.charged == &group; }) != 0) return false;
  const auto shelf = shelves_.find(&group);
  if (shelf == shelves_.end()) return true;
  if (shelf->second.bytes() != 0) return false;
  shelves_.erase(shelf);
  return true;
}

}  // namespace vmm
