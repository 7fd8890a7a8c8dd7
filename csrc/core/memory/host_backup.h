// A backup in pinned host memory. Slabs that are new are made ahead of the copies, by
// threads of its own.
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
  void has(std::vector<PinnedMemory::SlabPtr> slabs) noexcept VMM_EXCLUDES(mutex_);
  void make_slabs(std::size_t missing);
  void make_next();
  // Waits for the slab where it is being made. Throws std::bad_alloc where it could not be.
  Address slab(std::size_t index) VMM_EXCLUDES(mutex_);
  template <typename Each>
  void for_each_piece(std::size_t at, std::size_t size, const Each& each);

  Driver& driver_;
  const std::shared_ptr<PinnedMemory> memory_;
  Mutex mutex_;  // a leaf
  std::condition_variable_any made_;
  std::vector<PinnedMemory::SlabPtr> slabs_ VMM_GUARDED_BY(mutex_);
  std::size_t next_ VMM_GUARDED_BY(mutex_) = 0;  // slabs from here on are looked at for one to make
  bool has_failed_ VMM_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> makers_;
};

}  // namespace vmm
