// The fences that a driver has given out. It owns the names: a destroyed or
// invented fence is refused instead of followed; it never knows what an event
// is (the driver's own pointer, or nothing).
//
// Looking a fence up takes no lock: record() and query() cost the driver
// 0.2 us, and a lock that all threads share would cost as much again.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/sync.h"
#include "driver/driver.h"

namespace vmm {

class FenceTable {
 public:
  struct Entry {
    void* event = nullptr;
    int device = 0;
  };

  FenceTable() = default;
  ~FenceTable();
  FenceTable(const FenceTable&) = delete;
  FenceTable& operator=(const FenceTable&) = delete;

  // nullptr once 16 million fences are alive.
  [[nodiscard]] Fence add(const Entry& entry) VMM_EXCLUDES(mutex_);
  // False: no such fence.
  [[nodiscard]] bool find(Fence fence, Entry* out) const;
  [[nodiscard]] bool remove(Fence fence, Entry* out) VMM_EXCLUDES(mutex_);

 private:
  // A fence is its slot's number and, above it, how often the slot has been
  // given out: a slot is used again, a name never.
  static constexpr unsigned kIndexBits = 24;
  static constexpr std::size_t kSlotsPerBlock = 4096;
  static constexpr std::size_t kBlocks = (std::size_t{1} << kIndexBits) / kSlotsPerBlock;

  struct Slot {
    std::atomic<std::uint64_t> name{0};  // 0: free
    std::uint64_t uses = 0;              // changed under the table's lock only
    Entry entry;
  };
  using Block = std::array<Slot, kSlotsPerBlock>;

  [[nodiscard]] Slot* slot_of(Fence fence) const;

  std::array<std::atomic<Block*>, kBlocks> blocks_{};
  Mutex mutex_;
  std::vector<std::size_t> free_ VMM_GUARDED_BY(mutex_);
  std::size_t slots_ VMM_GUARDED_BY(mutex_) = 0;
};

}  // namespace vmm
