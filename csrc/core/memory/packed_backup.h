// A backup in pinned host memory by a lossless code (driver/packing.h), which the device does
// and undoes by itself, straight from memory to memory: the bus has less to carry. It knows
// where what was packed stands.
//
// One stretch of bytes, in slabs: first a table with an entry for each unit of memory, then
// what the units became, in lines; none goes over the border of a slab. How much it is depends
// on the contents, so they are looked at before there is room for them.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "core/memory/backup.h"
#include "core/memory/pinned_slabs.h"
#include "driver/packing.h"

namespace vmm {

class PackedBackup final : public Backup {
 public:
  // Bytes of the table, which are taken first.
  static std::size_t table_bytes(const std::vector<Content>& contents);
  // Looks at what is to be saved there, one after the other, by the stream `by`, and waits
  // for that. nullptr: the table would be above the memory's limit. Throws DriverError,
  // std::bad_alloc.
  static std::unique_ptr<PackedBackup> survey(Driver& driver, const std::shared_ptr<PinnedMemory>& memory,
                                              const std::vector<Content>& contents, const StreamUse& by);
  // Of host memory, all in all.
  [[nodiscard]] std::size_t bytes() const { return bytes_; }
  // Takes them: false: that would be above the memory's limit. Throws std::bad_alloc.
  bool take_room() { return slabs_.grow_to(bytes_); }

  // REQUIRES: room was taken; one of the contents, unchanged (else what comes back is neither).
  void save(std::size_t at, Address from, std::size_t size, const StreamUse& by) override;
  void finish() override { slabs_.finish(); }
  void load(std::size_t at, Address to, std::size_t size, const StreamUse& by) override;
  void read(std::size_t at, std::byte* to, std::size_t size) override;
  // A launch costs as it ends, and pieces of 64 MiB are two launches of a slab of what they became
  // and one of a part: 16 GiB woke at 1.23 times the rate of the bus, and at 1.26 in these.
  static constexpr std::size_t kPieceBytes = 256 * kMiB;
  [[nodiscard]] std::size_t piece_bytes() const override { return kPieceBytes; }
  [[nodiscard]] std::string place() const override { return "host, packed"; }
  [[nodiscard]] bool may_be_kept() const override { return true; }

 private:
  PackedBackup(Driver& driver, const std::shared_ptr<PinnedMemory>& memory) : driver_(driver), slabs_(memory) {}
  void make_table(const std::vector<Content>& contents);
  // Gives each unit its place.
  void lay_out();
  // The table's part in one of its slabs.
  packing::Unit* table(std::size_t slab);
  // The first unit that ends behind `at`.
  std::size_t find(std::size_t at);
  // Units of [at, at + size) whose entries are in one slab, and what they became in one too.
  template <typename Each>
  void for_each_job(std::size_t at, Address memory, std::size_t size, const Each& each);
  void run(packing::Step step, std::size_t at, Address memory, std::size_t size, const StreamUse& by);
  void run_on_host(packing::Step step, const packing::Job& job, const StreamUse& by);

  Driver& driver_;
  PinnedSlabs slabs_;
  std::size_t units_ = 0;
  std::size_t bytes_ = 0;
};

}  // namespace vmm
