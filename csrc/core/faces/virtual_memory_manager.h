// VirtualMemoryManager: addresses, physical memory and mappings by hand. It
// stands on the same chunks, ranges and budget as the pools; it knows no block
// and no model. Everything it gives out is named by a key and belongs to it
// alone: another manager's objects are refused.
#pragma once

#include <atomic>
#include <cstddef>
#include <map>
#include <memory>
#include <vector>

#include "base/sync.h"
#include "core/blocks/held_ranges.h"
#include "core/device/device_memory.h"
#include "core/memory/mapped_range.h"

namespace vmm {

// [base, base + size), reserved with this alignment.
struct VirtualAddressRange {
  std::uint64_t manager = 0;  // whose it is
  std::uint64_t key = 0;      // which of its: an address may be reserved again
  Address base = 0;
  std::size_t size = 0;
  std::size_t alignment = 0;
  [[nodiscard]] Address end() const { return base + size; }
  [[nodiscard]] bool contains(Address address) const { return address >= base && address < end(); }
  // "VA[0x7f..0x7f.., 4194304 bytes, align=2097152]"
  [[nodiscard]] std::string text() const;
};

struct PhysicalAllocation {
  std::uint64_t manager = 0;
  std::uint64_t key = 0;
  std::uint64_t handle = 0;  // the driver's
  std::size_t size = 0;
  int device = 0;  // -1: host memory
  // "PhysAlloc[handle=0x.., 4194304 bytes, dev=0]"
  [[nodiscard]] std::string text() const;
};

struct MappingRecord {
  std::size_t va_offset = 0;
  std::size_t size = 0;
  std::uint64_t phys_handle = 0;
  Access access = Access::none;
};

class VirtualMemoryManager {
 public:
  explicit VirtualMemoryManager(DeviceMemory& memory);
  VirtualMemoryManager(const VirtualMemoryManager&) = delete;
  VirtualMemoryManager& operator=(const VirtualMemoryManager&) = delete;
  ~VirtualMemoryManager();

  [[nodiscard]] std::size_t granularity() const { return memory_.granularity(); }
  // Bad sizes, alignments, flags and foreign or released objects are
  // InvalidArgumentError (InvalidRangeError for offsets and sizes).
  // alignment 0 given by the caller is an error; kDefaultAlignment means the granularity.
  static constexpr std::size_t kDefaultAlignment = kUnlimited;
  VirtualAddressRange reserve(std::size_t size, std::size_t alignment);
  void release(const VirtualAddressRange& range);  // StillInUseError
  // OutOfMemoryError; NotAvailableError when the location or export is not to be had.
  PhysicalAllocation alloc_physical(std::size_t size, Location location, bool exportable);
  void free_physical(const PhysicalAllocation& physical);  // StillInUseError
  void map(const VirtualAddressRange& range, const PhysicalAllocation& physical,
           std::size_t offset);  // AlreadyMappedError
  // NotMappedError; StillInUseError where something of it is held.
  void unmap(const VirtualAddressRange& range, std::size_t offset, std::size_t size);
  // `size` 0 means up to the end of what is mapped in the range.
  // StillInUseError where what is held would become inaccessible to the manager's own device.
  void set_access(const VirtualAddressRange& range, Access access, const std::vector<Location>& who, std::size_t offset,
                  std::size_t size);
  [[nodiscard]] std::vector<MappingRecord> mappings(const VirtualAddressRange& range) const;
  // REQUIRES nothing: throws NotMappedError unless [offset, offset + size) is
  // mapped without gaps, InvalidArgumentError unless all of it is accessible.
  // Returns its address; the stretch is held until unhold(): unmap(),
  // set_access(none) and release() answer StillInUseError till then.
  Address hold(const VirtualAddressRange& range, std::size_t offset, std::size_t size);
  void unhold(const VirtualAddressRange& range, std::size_t offset, std::size_t size);
  // Gives back all that it made. StillInUseError while something is held.
  void close();
  [[nodiscard]] bool is_closed() const;
  [[nodiscard]] DeviceMemory& memory() const { return memory_; }

 private:
  struct Range {
    std::unique_ptr<MappedRange> mapped;
    std::size_t alignment = 0;
    HeldRanges held;
    std::uint64_t key = 0;
  };
  void require_open() const VMM_REQUIRES(mutex_);
  void wait_for_queued_work(const char* doing) VMM_EXCLUDES(mutex_);
  Range& require_unmappable(const VirtualAddressRange& range, std::size_t offset, std::size_t size)
      VMM_REQUIRES(mutex_);
  void require_nothing_held() const VMM_REQUIRES(mutex_);
  [[nodiscard]] std::vector<ByteRange> require_changeable(const VirtualAddressRange& range, Access access,
                                                          const std::vector<Location>& who, std::size_t offset,
                                                          std::size_t size) VMM_REQUIRES(mutex_);
  Range& find(const VirtualAddressRange& range) const VMM_REQUIRES(mutex_);
  Chunk* find(const PhysicalAllocation& physical) const VMM_REQUIRES(mutex_);
  void require_whole_mappings(const Range& found, const VirtualAddressRange& range, std::size_t offset,
                              std::size_t size, const std::string& doing) VMM_REQUIRES(mutex_);
  static void require_unheld(const Range& found, const VirtualAddressRange& range, ByteRange part,
                             const std::string& doing);
  void require_device(Location location) const;
  static void change_access(MappedRange& mapped, const std::vector<ByteRange>& parts, const std::vector<Location>& who,
                            Access access);
  void require_inside(const VirtualAddressRange& range, std::size_t offset, std::size_t size) const;

  DeviceMemory& memory_;
  std::uint64_t id_;
  mutable Mutex mutex_;
  mutable std::map<Address, Range> ranges_ VMM_GUARDED_BY(mutex_);
  std::map<std::uint64_t, Chunk*> physical_ VMM_GUARDED_BY(mutex_);
  std::uint64_t last_key_ VMM_GUARDED_BY(mutex_) = 0;
  std::atomic<bool> closed_{false};  // changed under the lock; a forked child may ask
};

}  // namespace vmm
