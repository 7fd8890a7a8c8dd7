#include "core/cache/depot.h"

#include <utility>

namespace vmm {

namespace {

// Takes the blocks of `size` out of the chain `*from`.
Depot::Batch take_out(Block** from, std::size_t size) {
  Depot::Batch batch;
  Block* others = nullptr;
  for (Block* block = *from; block != nullptr;) {
    Block* const next = block->bin_next;
    Block*& chain = block->size() == size ? batch.first : others;
    if (&chain == &batch.first) ++batch.count;
    block->bin_next = chain;
    chain = block;
    block = next;
  }
  *from = others;
  return batch;
}

}  // namespace

Block* Depot::put(Block* first) {
  Block* rest = nullptr;
  while (first != nullptr) {
    const std::size_t size = first->size();
    const Batch batch = take_out(&first, size);
    bool is_taken = false;
    if (batch.count >= kLeastBatch) {
      const MutexLock lock(mutex_);
      is_taken = count_ < kMostBatches && bytes_ + batch.count * size <= kMostBytes;
      if (is_taken) {
        batches_.at(count_++) = batch;
        bytes_ += batch.count * size;
        blocks_.fetch_add(batch.count, std::memory_order_relaxed);
      }
    }
    if (!is_taken) rest = join_lists(batch.first, rest);
  }
  return rest;
}

Depot::Batch Depot::take(StreamTag tag, std::size_t size) {
  const MutexLock lock(mutex_);
  for (std::size_t k = 0; k < count_; ++k) {
    Batch& each = batches_.at(k);
    if (each.first->size() != size || each.first->tag != tag) continue;
    const Batch batch = std::exchange(each, batches_.at(--count_));
    bytes_ -= batch.count * size;
    blocks_.fetch_sub(batch.count, std::memory_order_relaxed);
    return batch;
  }
  return {};
}

Block* Depot::take_all() {
  if (is_empty()) return nullptr;
  const MutexLock lock(mutex_);
  Block* all = nullptr;
  while (count_ != 0) all = join_lists(batches_.at(--count_).first, all);
  bytes_ = 0;
  blocks_.store(0, std::memory_order_relaxed);
  return all;
}

}  // namespace vmm
