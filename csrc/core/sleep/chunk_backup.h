// A backup in chunks of another device's memory, which that device's budget pays.
#pragma once

#include <memory>
#include <string>

#include "core/device/device_memory.h"
#include "core/memory/backup.h"
#include "core/memory/guest_memory.h"

namespace vmm {

class ChunkBackup final : public Backup {
 public:
  // `own`: the device that saves there; `model`: whose it is, for the words. Throws OutOfMemoryError
  // where `other` has no room, DriverError where the one cannot reach the other.
  ChunkBackup(DeviceMemory& own, DeviceMemory& other, std::size_t bytes, const std::string& model);
  ~ChunkBackup() override;

  void save(std::size_t at, Address from, std::size_t size, const StreamUse& by) override;
  void finish() override {}
  void load(std::size_t at, Address to, std::size_t size, const StreamUse& by) override;
  void read(std::size_t at, std::byte* to, std::size_t size) override;
  // The link to another GPU carries 64 MiB in 0.17 ms, and the calls for its chunks take as long.
  static constexpr std::size_t kPieceBytes = 256 * kMiB;
  [[nodiscard]] std::size_t piece_bytes() const override { return kPieceBytes; }
  // An unmap waits for what the link has been given, up to 2 ms: with two pieces there the link
  // stood still for each chunk but the first of a piece, 30 us each.
  [[nodiscard]] std::size_t most_under_way() const override { return 64; }
  [[nodiscard]] bool is_mapped_beside_copies() const override { return true; }
  [[nodiscard]] std::string place() const override;

 private:
  void let_go() noexcept;
  // Calls `each(address, done, bytes)` for every stretch of addresses of [at, at + size).
  template <typename Each>
  void for_each_stretch(std::size_t at, std::size_t size, const Each& each) const;

  DeviceMemory& own_;
  DeviceMemory& other_;
  const std::shared_ptr<GuestMemory::Places> places_ = std::make_shared<GuestMemory::Places>();
  std::size_t opened_ = 0;  // of the places, so many
};

}  // namespace vmm
