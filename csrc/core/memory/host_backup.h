// A backup in pinned host memory, as the memory was.
#pragma once

#include <memory>

#include "core/memory/backup.h"
#include "core/memory/pinned_slabs.h"

namespace vmm {

class HostBackup final : public Backup {
 public:
  // nullptr: `bytes` would be above the memory's limit. Throws std::bad_alloc.
  static std::unique_ptr<HostBackup> make(Driver& driver, const std::shared_ptr<PinnedMemory>& memory,
                                          std::size_t bytes);

  void save(std::size_t at, Address from, std::size_t size, const StreamUse& by) override;
  void finish() override { slabs_.finish(); }
  void load(std::size_t at, Address to, std::size_t size, const StreamUse& by) override;
  [[nodiscard]] std::string place() const override { return "host"; }
  [[nodiscard]] bool may_be_kept() const override { return true; }
  void read(std::size_t at, std::byte* to, std::size_t size) override;

 private:
  HostBackup(Driver& driver, const std::shared_ptr<PinnedMemory>& memory) : driver_(driver), slabs_(memory) {}
  template <typename Each>
  void for_each_piece(std::size_t at, std::size_t size, const Each& each);

  Driver& driver_;
  PinnedSlabs slabs_;
};

}  // namespace vmm
