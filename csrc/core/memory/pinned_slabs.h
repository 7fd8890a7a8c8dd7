// Slabs of pinned memory that one backup holds, as one stretch of bytes. Those that are new
// are made ready ahead of their use by threads of its own: several touch their pages, and one
// pins what has been touched. It knows nothing of what is in them.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "base/sync.h"
#include "core/memory/pinned_memory.h"

namespace vmm {

class PinnedSlabs {
 public:
  explicit PinnedSlabs(std::shared_ptr<PinnedMemory> memory) : memory_(std::move(memory)) {}
  PinnedSlabs(const PinnedSlabs&) = delete;
  PinnedSlabs& operator=(const PinnedSlabs&) = delete;
  ~PinnedSlabs();  // REQUIRES: no copy of them is under way

  // As many as `bytes` need, those that there are included. False: that would be above the
  // memory's limit. Throws std::bad_alloc, and has none more. One thread at a time.
  bool grow_to(std::size_t bytes) VMM_EXCLUDES(mutex_);
  // Waits for it where it is not ready.
  const PinnedMemory::Slab& slab(std::size_t index) VMM_EXCLUDES(mutex_);
  // Waits for all of them: then it has no threads, whose stacks would stay as long as it does.
  void finish();

 private:
  // A slab that is yet to be made ready.
  struct New {
    std::size_t index = 0;
    std::size_t touched = 0;  // parts of it
  };
  // A part of one that is yet to be touched.
  struct Part {
    PinnedMemory::Slab* slab = nullptr;  // nullptr: there is none left
    std::size_t number = 0;              // of the slab among the new ones
    std::size_t at = 0;
  };

  void add(std::vector<PinnedMemory::SlabPtr> slabs) noexcept VMM_EXCLUDES(mutex_);
  // For so many new ones. Where there are no more threads, the caller does it.
  void start_workers(std::size_t count);
  void touch() VMM_EXCLUDES(mutex_);
  void pin() VMM_EXCLUDES(mutex_);
  Part take_part() VMM_EXCLUDES(mutex_);
  void note_touched(const Part& part) VMM_EXCLUDES(mutex_);
  // The next whose parts have all been touched, once there is one; nullptr: there will be none.
  PinnedMemory::Slab* take_touched(std::size_t* index) VMM_EXCLUDES(mutex_);
  void note_ready(std::size_t index) VMM_EXCLUDES(mutex_);

  const std::shared_ptr<PinnedMemory> memory_;
  Mutex mutex_;  // a leaf
  std::condition_variable_any changed_;
  std::vector<PinnedMemory::SlabPtr> slabs_ VMM_GUARDED_BY(mutex_);
  std::vector<bool> is_ready_ VMM_GUARDED_BY(mutex_);   // by slab
  std::vector<New> new_ VMM_GUARDED_BY(mutex_);         // in the order in which they are needed
  std::size_t next_part_ VMM_GUARDED_BY(mutex_) = 0;    // of all new ones, that nobody touches yet
  std::size_t next_to_pin_ VMM_GUARDED_BY(mutex_) = 0;  // of the new ones
  bool is_ending_ VMM_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> workers_;
};

}  // namespace vmm
