#include "core/memory/chunk_store.h"

#include <algorithm>
#include <cstdio>

#include "base/check.h"

namespace vmm {

void ChunkShelf::put(Chunk* chunk) {
  by_size_[chunk->size].push_back(chunk);
  bytes_ += chunk->size;
}

namespace {
using BySize = std::map<std::size_t, std::vector<Chunk*>>;
Chunk* pop(BySize& by_size, BySize::iterator at) {
  Chunk* chunk = at->second.back();
  at->second.pop_back();
  if (at->second.empty()) by_size.erase(at);
  return chunk;
}
}  // namespace

Chunk* ChunkShelf::take_at_most(std::size_t size, bool exact) {
  auto at = by_size_.upper_bound(size);
  if (at == by_size_.begin()) return nullptr;
  --at;
  if (exact && at->first != size) return nullptr;
  Chunk* chunk = pop(by_size_, at);
  bytes_ -= chunk->size;
  return chunk;
}

Chunk* ChunkShelf::take_above(std::size_t size) {
  const auto at = by_size_.upper_bound(size);
  if (at == by_size_.end()) return nullptr;
  Chunk* chunk = pop(by_size_, at);
  bytes_ -= chunk->size;
  return chunk;
}

bool ChunkShelf::take(const Chunk* chunk, std::size_t size) {
  const auto of_size = by_size_.find(size);
  if (of_size == by_size_.end()) return false;
  auto& chunks = of_size->second;
  const auto found = std::find(chunks.begin(), chunks.end(), chunk);
  if (found == chunks.end()) return false;
  *found = chunks.back();
  chunks.pop_back();
  if (chunks.empty()) by_size_.erase(of_size);
  bytes_ -= size;
  return true;
}

Chunk* ChunkShelf::take_any() { return by_size_.empty() ? nullptr : take_at_most(by_size_.rbegin()->first, true); }

std::size_t ChunkShelf::mapped_bytes() const {
  std::size_t bytes = 0;
  for (const auto& [size, chunks] : by_size_) {
    for (const Chunk* chunk : chunks) bytes += chunk->mappings.load(std::memory_order_acquire) != 0 ? size : 0;
  }
  return bytes;
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
  auto chunk = std::make_unique<Chunk>();  // first: what there is no room to note would stay for ever
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
  chunk->charged->refund(chunk->size);
  delete chunk;
  return {};
}

void ChunkStore::put(Budget& group, Chunk* chunk) {
  Budget* refused = Budget::transfer(*chunk->charged, group, chunk->size);
  VMM_CHECK(refused == nullptr, "budget ", chunk->charged->name(), " does not stand under ", group.name());
  chunk->charged = &group;
  MutexLock lock(mutex_);
  Shelf& shelf = shelves_[&group];
  // A request of a model whose group has ended meanwhile may still put back what it took.
  if (shelf.keeps_group == nullptr) shelf.keeps_group = group.weak_from_this().lock();
  (chunk->exported ? shelf.exported : shelf.usable).put(chunk);
  if (chunk->exported) release_unmapped(shelf.exported, kUnlimited);
}

Chunk* ChunkStore::take_at_most(Budget& group, Budget& payer, std::size_t size, bool exact, Budget** refused) {
  MutexLock lock(mutex_);
  *refused = nullptr;
  const auto shelf = shelves_.find(&group);
  if (shelf == shelves_.end()) return nullptr;
  Chunk* chunk = shelf->second.usable.take_at_most(size, exact);
  if (chunk == nullptr) return nullptr;
  if (Budget* who = Budget::transfer(group, payer, chunk->size)) {
    *refused = who;
    shelf->second.usable.put(chunk);
    return nullptr;
  }
  chunk->charged = &payer;
  return chunk;
}

bool ChunkStore::take(Budget& group, Budget& payer, Chunk* chunk, std::size_t size) {
  const MutexLock lock(mutex_);
  const auto shelf = shelves_.find(&group);
  if (shelf == shelves_.end() || !shelf->second.usable.take(chunk, size)) return false;
  if (Budget::transfer(group, payer, size) != nullptr) {
    shelf->second.usable.put(chunk);
    return false;
  }
  chunk->charged = &payer;
  return true;
}

// Gives up to about `want` bytes back to the driver. Returns how many.
std::size_t ChunkStore::release_unmapped(ChunkShelf& chunks, std::size_t want) {
  std::size_t given_back = 0;
  std::vector<Chunk*> kept;
  while (given_back < want) {
    Chunk* chunk = chunks.take_any();
    if (chunk == nullptr) break;
    const std::size_t size = chunk->size;
    // A former address may still be in use, and the driver may refuse.
    if (chunk->mappings.load(std::memory_order_acquire) == 0 && release(chunk).ok()) {
      given_back += size;
    } else {
      kept.push_back(chunk);
    }
  }
  for (Chunk* chunk : kept) chunks.put(chunk);
  return given_back;
}

std::size_t ChunkStore::trim_shelf(Shelf& shelf, std::size_t keep_bytes) {
  std::size_t given_back = release_unmapped(shelf.exported, kUnlimited);
  if (shelf.bytes() > keep_bytes) given_back += release_unmapped(shelf.usable, shelf.bytes() - keep_bytes);
  return given_back;
}

std::size_t ChunkStore::trim(Budget& group, std::size_t keep_bytes) {
  MutexLock lock(mutex_);
  const auto shelf = shelves_.find(&group);
  return shelf == shelves_.end() ? 0 : trim_shelf(shelf->second, keep_bytes);
}

std::size_t ChunkStore::trim_under(const Budget& budget, std::size_t want) {
  MutexLock lock(mutex_);
  std::size_t given_back = 0;
  for (auto& [group, shelf] : shelves_) {
    if (given_back >= want) break;
    if (!group->stands_under(budget)) continue;
    const std::size_t more = want - given_back;
    given_back += trim_shelf(shelf, shelf.bytes() > more ? shelf.bytes() - more : 0);
  }
  return given_back;
}

std::size_t ChunkStore::all_shelved_bytes() const {
  MutexLock lock(mutex_);
  std::size_t bytes = 0;
  for (const auto& [group, shelf] : shelves_) bytes += shelf.bytes();
  return bytes;
}

std::size_t ChunkStore::trim_all() {
  MutexLock lock(mutex_);
  std::size_t given_back = 0;
  for (auto& [group, shelf] : shelves_) given_back += trim_shelf(shelf, 0);
  return given_back;
}

std::size_t ChunkStore::shelved_bytes(const Budget& group) const {
  MutexLock lock(mutex_);
  const auto shelf = shelves_.find(&group);
  return shelf == shelves_.end() ? 0 : shelf->second.bytes();
}

std::size_t ChunkStore::quarantined_bytes(const Budget& group) const {
  MutexLock lock(mutex_);
  const auto shelf = shelves_.find(&group);
  return shelf == shelves_.end() ? 0 : shelf->second.usable.mapped_bytes() + shelf->second.exported.mapped_bytes();
}

std::size_t ChunkStore::shelves() const {
  MutexLock lock(mutex_);
  return shelves_.size();
}

bool ChunkStore::forget(const Budget& group) {
  MutexLock lock(mutex_);
  const auto shelf = shelves_.find(&group);
  if (shelf == shelves_.end()) return true;
  if (shelf->second.bytes() != 0) return false;
  shelves_.erase(shelf);
  return true;
}

}  // namespace vmm
