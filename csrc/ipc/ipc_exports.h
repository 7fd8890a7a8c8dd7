// What this process shares: the blocks that other processes may open, and the
// descriptors that keep this possible. It owns the descriptors, one a chunk,
// and never knows torch.
//
// An open descriptor keeps its chunk's memory with the driver, whatever else
// happens to the chunk. So a chunk's is closed when the last shared block on it
// is freed; and when the chunk itself goes back to the driver, in case that a way
// of giving memory back tells of no blocks.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/sync.h"
#include "core/memory/chunk.h"
#include "driver/driver.h"
#include "ipc/ipc_descriptors.h"

namespace vmm {

class IpcExports {
 public:
  // The process's own; never destroyed.
  static IpcExports& instance();

  IpcExports() = default;
  IpcExports(const IpcExports&) = delete;
  IpcExports& operator=(const IpcExports&) = delete;
  // Closes what is still open.
  ~IpcExports();

  // The handle of the memory under a live block: `chunks`, by address. Blocks on
  // the same chunks have the same handle. `version` is that of torch's handles.
  // Throws NotAvailableError where chunks were not made to be shared, and
  // DriverError.
  std::string share(Driver& driver, Address block, const std::vector<ChunkView>& chunks, int version)
      VMM_EXCLUDES(mutex_);
  // To be called before a block is freed, shared or not: nothing is asked of the
  // freeing thread while nothing is shared.
  static void before_free(Address block) noexcept {
    if (any_shared()) [[unlikely]]
      instance().forget(block);
  }
  // To be called before an exported chunk goes back to the driver.
  static void before_release(std::uint64_t chunk) noexcept { instance().forget_chunk(chunk); }
  static bool any_shared() { return shared_blocks_.load(std::memory_order_relaxed) != 0; }
  void forget(Address block) noexcept VMM_EXCLUDES(mutex_);
  void forget_chunk(std::uint64_t number) noexcept VMM_EXCLUDES(mutex_);

  // Descriptors that are open.
  [[nodiscard]] std::size_t open_descriptors() const VMM_EXCLUDES(mutex_);

 private:
  struct Export {
    SharedChunk chunk;
    std::size_t blocks = 0;  // shared blocks that lie on it
  };
  using Chunks = std::vector<std::uint64_t>;  // by number: a handle may be another chunk's by now

  DescriptorServer& server() VMM_REQUIRES(mutex_);
  void export_chunk(Driver& driver, const ChunkView& chunk) VMM_REQUIRES(mutex_);
  void let_go(const Chunks& chunks) VMM_REQUIRES(mutex_);

  static inline std::atomic<std::size_t> shared_blocks_{0};  // of all instances

  mutable Mutex mutex_;
  std::unique_ptr<DescriptorServer> server_ VMM_GUARDED_BY(mutex_);  // from the first share on
  std::unordered_map<Address, Chunks> blocks_ VMM_GUARDED_BY(mutex_);
  std::unordered_map<std::uint64_t, Export> exports_ VMM_GUARDED_BY(mutex_);
};

}  // namespace vmm
