#include "driver/fence_table.h"

namespace vmm {

FenceTable::~FenceTable() {
  for (auto& block : blocks_) delete block.load(std::memory_order_relaxed);
}

FenceTable::Slot* FenceTable::slot_of(Fence fence) const {
  const auto name = reinterpret_cast<std::uintptr_t>(fence);
  const std::size_t index = name & ((std::size_t{1} << kIndexBits) - 1);
  Block* const block = blocks_[index / kSlotsPerBlock].load(std::memory_order_acquire);
  if (name == 0 || block == nullptr) return nullptr;
  Slot& slot = (*block)[index % kSlotsPerBlock];
  return slot.name.load(std::memory_order_acquire) == name ? &slot : nullptr;
}

Fence FenceTable::add(const Entry& entry) {
  const MutexLock lock(mutex_);
  std::size_t index = slots_;
  if (!free_.empty()) {
    index = free_.back();
    free_.pop_back();
  } else {
    if (slots_ == kBlocks * kSlotsPerBlock) return nullptr;
    if (free_.capacity() == slots_) free_.reserve(2 * slots_ + 8);  // who gives one back can not do without
    if (slots_ % kSlotsPerBlock == 0) blocks_[slots_ / kSlotsPerBlock].store(new Block, std::memory_order_release);
    ++slots_;
  }
  Slot& slot = (*blocks_[index / kSlotsPerBlock].load(std::memory_order_relaxed))[index % kSlotsPerBlock];
  slot.entry = entry;
  const std::uint64_t name = ++slot.uses << kIndexBits | index;
  slot.name.store(name, std::memory_order_release);
  return reinterpret_cast<Fence>(static_cast<std::uintptr_t>(name));
}

bool FenceTable::find(Fence fence, Entry* out) const {
  const Slot* const slot = slot_of(fence);
  if (slot == nullptr) return false;
  *out = slot->entry;
  return true;
}

bool FenceTable::remove(Fence fence, Entry* out) {
  const MutexLock lock(mutex_);
  Slot* const slot = slot_of(fence);
  if (slot == nullptr) return false;
  *out = slot->entry;
  slot->name.store(0, std::memory_order_release);
  free_.push_back(reinterpret_cast<std::uintptr_t>(fence) & ((std::size_t{1} << kIndexBits) - 1));
  return true;
}

}  // namespace vmm
