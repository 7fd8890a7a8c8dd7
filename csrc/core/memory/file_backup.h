// A backup in a file, with a checksum for each slab of it, past the kernel's cache where the
// file system can. The file is there as long as the backup is; one that a killed process
// left is taken over. In a forked child it has no file.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/memory/backup.h"
#include "core/memory/own_file.h"
#include "core/memory/pinned_memory.h"

namespace vmm {

class FileBackup final : public Backup {
 public:
  // Where what finds the file at `path` in use by its own model goes; `number`: from 2 on.
  [[nodiscard]] static std::string beside(const std::string& path, int number);
  // All its room on the disk is taken now, so that a full one says so before anything
  // moves. `path` may be a folder: then the file's name is chosen. Throws
  // InvalidArgumentError where the file exists and is none of a process that has ended,
  // VmmError where the disk has no such room or it cannot be written.
  FileBackup(Driver& driver, const std::string& path, std::size_t bytes);
  ~FileBackup() override;

  void save(std::size_t at, Address from, std::size_t size, const StreamUse& by) override;
  void finish() override;
  void load(std::size_t at, Address to, std::size_t size, const StreamUse& by) override;
  void rest() noexcept override;
  void read(std::size_t at, std::byte* to, std::size_t size) override;
  void forget_name() noexcept override;
  [[nodiscard]] std::string place() const override { return path_; }

 private:
  static constexpr std::size_t kSlabBytes = PinnedMemory::kSlabBytes;
  static constexpr std::size_t kNoSlab = ~std::size_t{0};

  // Pinned memory between the file and the device, for one slab.
  struct Stage {
    explicit Stage(Driver& driver);
    Stage(const Stage&) = delete;
    Stage& operator=(const Stage&) = delete;
    void await_copies();

    ZeroPages pages{kSlabBytes};
    PinnedMemory::Slab memory;  // of these
    std::size_t slab = kNoSlab;
    bool is_written = true;  // it is in the file
    StreamUse copied_by;     // on which there are copies of it; of no device: none
  };
  using StagePtr = std::unique_ptr<Stage>;

  void open(std::byte* page);
  bool make_marked(int direct, std::byte* page);
  void write_slab() VMM_REQUIRES(mutex_);
  void read_staged(std::size_t at, std::byte* to, std::size_t size) VMM_REQUIRES(mutex_);
  // One that holds the slab, read from the file where need be.
  Stage& staged(std::size_t index) VMM_REQUIRES(mutex_);
  [[nodiscard]] std::size_t size_of(std::size_t index) const VMM_REQUIRES(mutex_);  // bytes in the file
  [[noreturn]] void fail(const std::string& doing, int error) const;

  Driver& driver_;
  std::string path_;
  OwnFile file_;
  const int process_;
  Mutex mutex_;                                 // waits for the disk and for copies of its own: nobody else has it
  StagePtr stage_ VMM_GUARDED_BY(mutex_);       // while something is saved or loaded
  StagePtr unwritten_ VMM_GUARDED_BY(mutex_);   // the last slab, where it could not be written
  std::size_t end_ VMM_GUARDED_BY(mutex_) = 0;  // of what was saved, in bytes
  std::vector<std::uint32_t> checksums_ VMM_GUARDED_BY(mutex_);  // by slab, of those that are written
};

}  // namespace vmm
