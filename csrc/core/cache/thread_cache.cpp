#include "core/cache/thread_cache.h"

#include <algorithm>
#include <utility>

namespace vmm {

void PoolTally::merge() {
  pool_.absorb(came(), of_pool_, of_device_);
  for (auto& of_class : came_) of_class = {0, 0, 0};
}

BlockCounts PoolTally::came() const {
  BlockCounts counts{};
  for (std::size_t of_class = 0; of_class < 2; ++of_class) {
    for (std::size_t k = 0; k < 3; ++k) counts.at(of_class).at(k) = came_.at(of_class).at(k);
  }
  return counts;
}

Shard::Shard(CachedPool& pool, PoolTally& tally, Stream stream, StreamTag tag)
    : pool(pool), tally(tally), stream(stream), tag(tag), base(pool.base()) {
  pool.count_shards(1);
}

Shard::~Shard() { pool.count_shards(-1); }

void Shard::want_at(std::size_t place, std::size_t units) {
  // What is in it is of a size that was wanted before.
  BlockLink& kept = kept_[kOwnPlaces + place];
  if (Block* const first = kept; first != nullptr) {
    for (const Block* block = first; block != nullptr; block = block->bin_next) ++unwanted_count_;
    unwanted_ = join_lists(first, unwanted_);
    kept = nullptr;
  }
  units_in_[place] = static_cast<std::uint16_t>(units);
}

void Shard::accept(const Depot::Batch& batch) {
  const std::size_t size = batch.first->size();
  want(size);
  *kept_of(size) = batch.first;
  small_bytes_ += batch.count * size;
}

void Shard::move(BlockLink* from, std::size_t least_bytes, std::size_t most, Few* to) {
  Block* const first = *from;
  Block* last = nullptr;
  for (Block* block = first; block != nullptr && to->count < most && small_bytes_ > least_bytes;
       block = block->bin_next) {
    last = block;
    small_bytes_ -= block->size();
    ++to->count;
  }
  if (last == nullptr) return;
  *from = last->bin_next;
  last->bin_next = std::exchange(to->first, first);
}

Block* Shard::take_few_unwanted() {
  Few few;
  move(&unwanted_, 0, kFew, &few);
  unwanted_count_ -= few.count;
  return few.first;
}

Block* Shard::take_few() {
  Few few;
  move(&unwanted_, 0, kFew, &few);
  unwanted_count_ -= few.count;
  // From the large ones on, which leave the most space.
  for (auto kept = kept_.rbegin(); kept != kept_.rend() && few.count < kFew; ++kept) move(&*kept, 0, kFew, &few);
  return few.first;
}

Block* Shard::take_excess(bool is_alone) {
  if (is_alone) {
    Block* const few = take_few();
    is_draining_ = small_bytes_ != 0;
    return few;
  }
  is_draining_ = false;
  Few excess;
  move(&unwanted_, 0, kUnlimited, &excess);
  unwanted_count_ = 0;
  if (small_bytes_ > kMostSmallBytes) {
    for (BlockLink& kept : kept_) move(&kept, kKeptBytes, kUnlimited, &excess);
  }
  return excess.first;
}

Block* Shard::take_all() {
  is_draining_ = false;
  // Mostly nothing, where a pool grows: 129 lists looked at were an eighth of what that takes here.
  if (small_bytes_ == 0) return forget_large();
  Block* all = join_lists(std::exchange(unwanted_, nullptr), forget_large());
  for (BlockLink& kept : kept_) {
    all = join_lists(kept, all);
    kept = nullptr;
  }
  unwanted_count_ = 0;
  small_bytes_ = 0;
  return all;
}

std::size_t Shard::kept() const {
  std::size_t count = 0;
  const auto add = [&count](const Block* block) {
    for (; block != nullptr; block = block->bin_next) ++count;
  };
  add(unwanted_);
  for (const BlockLink& kept : kept_) add(kept);
  return count + (freed_large_ == nullptr ? 0 : 1);
}

void ThreadCache::rebuild(std::vector<Entry> empty) noexcept {
  empty.swap(table_);
  for (Entry& entry : empty) {
    if (entry.first != nullptr) table_[slot_of(*entry.pool)] = std::move(entry);
  }
}

Shard& ThreadCache::add(CachedPool& pool, Stream stream, StreamTag tag) {
  PoolTally* const known = tally_of(pool);
  auto fresh = known == nullptr ? std::make_unique<PoolTally>(pool, *of_device_) : nullptr;
  auto shard = std::make_unique<Shard>(pool, known == nullptr ? *fresh : *known, stream, tag);
  if (first_of(pool) == nullptr && (pools_ + 1) * 2 > table_.size()) {
    rebuild(std::vector<Entry>(table_.size() * 2));
  }
  // From here on nothing throws.
  Entry& entry = table_[slot_of(pool)];
  if (entry.pool == nullptr) {
    ++pools_;
    entry.pool = &pool;
    entry.tally = std::move(fresh);
  }
  if (entry.first != nullptr) entry.first->is_only = shard->is_only = false;
  shard->next = std::move(entry.first);
  entry.first = std::move(shard);
  return *(latest_ = entry.first.get());
}

bool ThreadCache::is_alone(const CachedPool& pool) const {
  int own = 0;
  for (const Shard* shard = first_of(pool); shard != nullptr; shard = shard->next.get()) ++own;
  return own == pool.shards();
}

void ThreadCache::remove(const CachedPool& pool) {
  latest_ = nullptr;
  for (Recent& recent : recent_) {
    if (recent.shard != nullptr && &recent.shard->pool == &pool) recent = {};
  }
  std::size_t gap = slot_of(pool);
  if (table_[gap].pool == nullptr) return;
  table_[gap] = {};
  --pools_;
  // What would be looked for over the gap moves into it, and leaves another.
  const std::size_t mask = table_.size() - 1;
  for (std::size_t at = (gap + 1) & mask; table_[at].pool != nullptr; at = (at + 1) & mask) {
    const std::size_t from_home = (at - home(*table_[at].pool)) & mask;
    if (from_home < ((at - gap) & mask)) continue;
    table_[gap] = std::exchange(table_[at], {});
    gap = at;
  }
}

const CachedPool* ThreadCache::any_pool() const {
  const auto entry =
      std::find_if(table_.begin(), table_.end(), [](const Entry& each) { return each.first != nullptr; });
  return entry == table_.end() ? nullptr : &entry->first->pool;
}

std::vector<const CachedPool*> ThreadCache::pools() const {
  std::vector<const CachedPool*> found;
  for (const Entry& entry : table_) {
    if (entry.first != nullptr) found.push_back(&entry.first->pool);
  }
  return found;
}

}  // namespace vmm
