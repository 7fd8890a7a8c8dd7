// Host memory behind the driver's contract: real pages, mapped on demand, as
// strict as CUDA. It owns the memory files, the reservations and the mappings;
// it never knows a pool. Not a mock: what is not mapped, or has no access
// rights, faults.
//
// How it differs from a GPU, all within the contract:
// - Streams are names; work is done before the call returns, so every fence
//   has always passed.
// - A page has one protection for the whole process. It is the strongest
//   access that any location was given, so taking a peer's access away leaves
//   the others theirs.
// - Device memory is an amount that is counted, not a place. Host-located
//   chunks count against what the process may use of the machine's memory. An
//   imported chunk counts nowhere: it is its creator's memory.
// - A process has a number of mappings, for all that it does (vm.max_map_count). Seven
//   eighths are taken here at the most, and what would take more is out_of_memory.
// - Each exportable or imported chunk holds one file descriptor, all others
//   share one a device. Running out of descriptors is out_of_memory.
//
// Forks. The mappings are MAP_SHARED, so that a chunk can stand at several
// addresses; plain fork() would let a child write into its parent's tensors
// (a DataLoader's workers do fork with tensors alive). So in the child every
// mapping becomes a private copy-on-write view at the same address with the
// same rights, and the driver is gone there: what the child has it may use,
// more it does not get. Unlike anonymous memory, a page that the child has not
// written shows what the parent does to it later, its release included: a
// child that needs a tensor must have its parent keep it. Aliases of one chunk
// part ways in the child.
#pragma once

#include <atomic>
#include <cstddef>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/sync.h"
#include "driver/address_book.h"
#include "driver/driver.h"
#include "driver/fence_table.h"
#include "driver/fork_watch.h"
#include "driver/host_arena.h"

namespace vmm {

struct HostDriverOptions {
  std::size_t granularity = 2 * kMiB;  // bytes; a power of two, at least the OS's page
  std::size_t device_bytes = 0;        // bytes a device; 0: 80 % of usable_memory() (host_memory.h)
  int device_count = 1;                // 1 to AddressBook::kMaxDevices
  // Stands before the system's files that are asked for limits; for tests. Used
  // by the constructor alone.
  const char* files_root = "";
};

class HostDriver final : public Driver, private ForkObserver {
 public:
  // Throws InvalidArgumentError.
  explicit HostDriver(const HostDriverOptions& options = {});
  // Unmaps everything that is still reserved: whoever keeps pointers past the
  // driver's life (tensors at process exit) must not destroy it.
  ~HostDriver() override;

  [[nodiscard]] std::string name() const override { return "cpu"; }
  [[nodiscard]] bool alive() const override { return alive_.load(std::memory_order_relaxed); }
  [[nodiscard]] int device_count() const override;
  Status capabilities(int device, Capabilities* out) const override;
  [[nodiscard]] std::string missing(int device) const override;

  Status reserve(std::size_t size, std::size_t alignment, Address* out) override VMM_EXCLUDES(mutex_);
  Status unreserve(Address address, std::size_t size) override VMM_EXCLUDES(mutex_);

  Status create(const ChunkSpec& spec, ChunkHandle* out) override VMM_EXCLUDES(mutex_);
  Status release(ChunkHandle handle) override VMM_EXCLUDES(mutex_);

  Status map(Address address, std::size_t size, ChunkHandle handle) override VMM_EXCLUDES(mutex_);
  Status unmap(Address address, std::size_t size) override VMM_EXCLUDES(mutex_);
  Status set_access(Address address, std::size_t size, Location who, Access access) override VMM_EXCLUDES(mutex_);

  Status export_chunk(ChunkHandle handle, int* fd) override VMM_EXCLUDES(mutex_);
  Status import_chunk(int fd, std::size_t size, ChunkHandle* out) override VMM_EXCLUDES(mutex_);

  Status create_fence(int device, Fence* out) override;
  Status destroy_fence(Fence fence) override;
  Status record(Fence fence, Stream stream) override;
  Status query(Fence fence) override;
  Status wait(Fence fence) override;
  Status stream_wait(int device, Stream stream, Fence fence) override;
  Status synchronize(int device) override;
  Status create_stream(int device, Stream* out) override;
  Status destroy_stream(int device, Stream stream) override;
  Status pin_host(Address address, std::size_t size) override;
  Status unpin_host(Address address) override;
  [[nodiscard]] bool pins_host() const override { return false; }

  Status copy_async(int device, Address to, Address from, std::size_t size, Stream stream) override;
  Status fill_async(int device, Address address, std::uint8_t byte, std::size_t size, Stream stream) override
      VMM_EXCLUDES(mutex_);
  Status read(int device, void* to, Address from, std::size_t size) override;

  [[nodiscard]] std::string missing_packing(int device) override;
  Status pack_async(int device, packing::Step step, const packing::Job& job, Stream stream) override;

  Status memory_info(int device, MemoryInfo* out) const override VMM_EXCLUDES(mutex_);

 private:
  // Where memory comes from: a device's, or the host's.
  struct Place {
    HostArena arena;
    std::size_t used_bytes = 0;
    std::size_t limit_bytes = 0;
  };
  struct Chunk {
    std::size_t size = 0;
    Place* place = nullptr;  // whose count it is in; nullptr: imported
    int fd = -1;             // the arena's, or its own
    bool own_fd = false;
    bool exportable = false;
    bool released = false;
    std::size_t offset = 0;  // in the file
    std::size_t mappings = 0;
  };
  using Chunks = std::unordered_map<ChunkHandle, Chunk>;

  void before_fork() override;
  void after_fork_in_parent() override;
  void after_fork_in_child() override;

  [[nodiscard]] bool has_device(int device) const { return device >= 0 && device < options_.device_count; }
  [[nodiscard]] bool has_location(Location where) const {
    return where.kind == Location::Kind::host || has_device(where.device);
  }
  Status check_device(int device, const char* call) const;
  Status check_fence(Fence fence, const char* call) const;
  // Of the kernel's mappings, `more` beyond those that there are.
  [[nodiscard]] Status check_pieces(std::size_t more) const VMM_REQUIRES(mutex_);
  // Gives the memory of chunks that nobody names or maps any more to the OS.
  // Emptying takes 0.1 s a GiB, so no lock is held meanwhile.
  void give_back(std::span<const Chunk> chunks) VMM_EXCLUDES(mutex_);
  // The file behind `address`, where in it, and how many bytes from there are one
  // mapping's; nothing where no chunk is mapped.
  struct Stretch {
    int fd = -1;
    std::size_t offset = 0;
    std::size_t size = 0;
  };
  [[nodiscard]] std::optional<Stretch> stretch_at(Address address) const VMM_EXCLUDES(mutex_);
  void zero(Address address, std::size_t size) VMM_EXCLUDES(mutex_);

  HostDriverOptions options_;
  std::atomic<bool> alive_{true};

  mutable Mutex mutex_;
  const std::size_t most_pieces_;
  AddressBook book_ VMM_GUARDED_BY(mutex_);
  // Mappings, and free stretches between and beside them: what the kernel has for them, at
  // the most. It joins some.
  std::size_t pieces_ VMM_GUARDED_BY(mutex_) = 0;
  Chunks chunks_ VMM_GUARDED_BY(mutex_);
  ChunkHandle next_chunk_ VMM_GUARDED_BY(mutex_) = 1;
  std::deque<Place> devices_ VMM_GUARDED_BY(mutex_);
  Place host_ VMM_GUARDED_BY(mutex_);

  std::vector<std::unique_ptr<char>> streams_ VMM_GUARDED_BY(mutex_);  // one's own: their addresses are their names
  FenceTable fences_;                                                  // without events
};

}  // namespace vmm
