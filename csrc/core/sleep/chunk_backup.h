// A backup in chunks of another device's memory, which that device's budget pays.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/device/device_memory.h"
#include "core/memory/backup.h"

namespace vmm {

class ChunkBackup final : public Backup {
 public:
  // `own`: the device that saves there. Throws OutOfMemoryError where `other` has no room,
  // DriverError where the one cannot reach the other.
  ChunkBackup(DeviceMemory& own, DeviceMemory& other, std::size_t bytes);
  ~ChunkBackup() override;

  void save(std::size_t at, Address from, std::size_t size, const StreamUse& by) override;
  void finish() override {}
  void load(std::size_t at, Address to, std::size_t size, const StreamUse& by) override;
  void read(std::size_t at, std::byte* to, std::size_t size) override;
  [[nodiscard]] std::string place() const override;

 private:
  // What is to be given back.
  struct Held {
    Address base = 0;
    std::size_t size = 0;
    std::size_t mapped = 0;
    std::vector<Chunk*> chunks;
  };
  void map_until(std::size_t end);
  void end() noexcept;

  DeviceMemory& own_;
  DeviceMemory& other_;
  const std::shared_ptr<Held> held_ = std::make_shared<Held>();  // made with it: to end takes no memory
  Address base_ = 0;
  std::size_t size_ = 0;    // bytes reserved; 0: nothing is
  std::size_t mapped_ = 0;  // of these, bytes mapped
  std::vector<Chunk*> chunks_;
};

}  // namespace vmm
