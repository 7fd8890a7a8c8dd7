// A backup in pinned host memory. Slabs that are new are made ready ahead of the copies, by
// threads of its own: several touch their pages, and one pins what has been touched.
#pragma once

#include <condition_variable>
#include <exception>
#include <memory>
#include <thread>
#include <vector>

#include "base/sync.h"
#include "core/memory/backup.h"
#include "core/memory/pinned_memory.h"

namespace vmm {

class HostBackup final : public Backup {
 public:
  // nullptr: `bytes` would be above the memory's limit. Throws std::bad_alloc.
  static std::unique_ptr<HostBackup> make(Driver& driver, const std::shared_ptr<PinnedMemory>& memory,
                                          std::size_t bytes);
  ~HostBackup() override;

  void save(std::size_t at, Address from, std::size_t size, const StreamUse& by) override;
  void finish() override {}
  void load(std::size_t at, Address to, std::size_t size, const StreamUse& by) override;
  [[nodiscard]] std::string place() const override { return "host"; }
  [[nodiscard]] bool may_be_kept() const override { return true; }
  void read(std::size_t at, std::byte* to, std::size_t size) override;

 private:
  HostBackup(Driver& driver, std::shared_ptr<PinnedMemory> memory);
  // From `first_new` on they are yet to be made ready. Throws std::bad_alloc.
  void has(std::vector<PinnedMemory::SlabPtr> slabs, std::size_t first_new) VMM_EXCLUDES(mutex_);
  void start_workers() VMM_EXCLUDES(mutex_);
  void touch_slabs() VMM_EXCLUDES(mutex_);
  void pin_slabs() VMM_EXCLUDES(mutex_);
  // Waits for the slab where it is not ready.
  Address slab(std::size_t index) VMM_EXCLUDES(mutex_);
  template <typename Each>
  void for_each_piece(std::size_t at, std::size_t size, const Each& each);

  // A part of a slab that is yet to be touched.
  struct Part {
    PinnedMemory::Slab* slab = nullptr;  // nullptr: there is none left
    std::size_t index = 0;               // of the slab
    std::size_t at = 0;
  };
  Part take_part() VMM_EXCLUDES(mutex_);
  void note_touched(const Part& part) VMM_EXCLUDES(mutex_);
  // The next whose parts have all been touched, once there is one; nullptr: there will be none.
  PinnedMemory::Slab* next_to_pin() VMM_EXCLUDES(mutex_);
  void note_ready() VMM_EXCLUDES(mutex_);

  Driver& driver_;
  const std::shared_ptr<PinnedMemory> memory_;
  Mutex mutex_;  // a leaf
  std::condition_variable_any changed_;
  std::vector<PinnedMemory::SlabPtr> slabs_ VMM_GUARDED_BY(mutex_);
  std::size_t ready_ VMM_GUARDED_BY(mutex_) = 0;             // slabs, the first so many
  std::vector<std::size_t> touched_ VMM_GUARDED_BY(mutex_);  // by slab: parts
  std::size_t next_part_ VMM_GUARDED_BY(mutex_) = 0;         // of all slabs
  bool is_ending_ VMM_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> workers_;
};

}  // namespace vmm
