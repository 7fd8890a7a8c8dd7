// All memory that the process can name in a CUDA call: address space, chunks
// and mappings, blocks of cudaMalloc's kind, pinned host memory. The pages are
// the project's own host driver's. It never knows a stream.
//
// Stricter than CUDA where CUDA would corrupt memory or crash: must_reach()
// ends the process and says why. Addresses of a freed block are never given
// out again, so a use after the free shows for ever.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "driver/address_book.h"
#include "driver/host_driver.h"

namespace standin {

enum class Kind : unsigned char { host, pinned, device };

class Memory {
 public:
  // Made by the first call, for the machine's devices; never destroyed.
  static Memory& instance();

  static constexpr std::size_t kGranularity = 2 * vmm::kMiB;

  // -- Address space, chunks, mappings.
  CUresult reserve(std::size_t size, std::size_t alignment, CUdeviceptr* out);
  CUresult unreserve(CUdeviceptr address, std::size_t size);
  CUresult create(std::size_t size, const CUmemAllocationProp& how, CUmemGenericAllocationHandle* out);
  CUresult release(CUmemGenericAllocationHandle chunk);
  CUresult map(CUdeviceptr address, std::size_t size, CUmemGenericAllocationHandle chunk);
  CUresult unmap(CUdeviceptr address, std::size_t size);
  CUresult set_access(CUdeviceptr address, std::size_t size, const CUmemAccessDesc& who);
  CUresult export_chunk(CUmemGenericAllocationHandle chunk, int* fd);
  CUresult import_chunk(int device, int fd, CUmemGenericAllocationHandle* out);
  CUresult info(int device, std::size_t* free, std::size_t* total);

  // -- Blocks: what cudaMalloc and cudaFree give and take.
  CUresult allocate(int device, std::size_t size, CUdeviceptr* out);
  // REQUIRES: no queued work uses it.
  CUresult free(CUdeviceptr block);
  // -1: no live block begins here.
  int device_of_block(CUdeviceptr block);
  // `device` reaches blocks of `peer`. False: it did already.
  bool enable_peer(int device, int peer);

  // -- Blocks of other processes.
  CUresult share_block(CUdeviceptr inside, CUipcMemHandle* out);
  CUresult open_block(int device, const CUipcMemHandle& handle, CUdeviceptr* out);
  CUresult close_block(CUdeviceptr block);

  // -- Pinned host memory.
  CUresult allocate_host(std::size_t size, void** out);
  CUresult free_host(void* block);
  CUresult pin(void* address, std::size_t size);
  CUresult unpin(void* address);

  // -- What an address is.
  struct Place {
    Kind kind = Kind::host;
    int device = 0;  // whose memory; of pinned memory the first
    CUdeviceptr base = 0;
    std::size_t size = 0;
  };
  Place place_of(CUdeviceptr address);

  // Work of `device` uses [address, address + size): ends the process unless it
  // may. `across_devices`: a copy, which reaches every device's blocks.
  void must_reach(const std::string& call, int device, CUdeviceptr address, std::size_t size, bool writes,
                  bool across_devices);

 private:
  // Kept when it is released, for it may still be mapped.
  struct Chunk {
    vmm::Location location;
    bool released = false;
    std::size_t mappings = 0;
    CUdeviceptr anchor = 0;  // the mapping that was made when there was no such one, while it is there
    // As CUDA does (driver 580, H100 and H200, memory for GPUDirect RDMA): it can be mapped
    // nowhere until it is mapped nowhere, once any access to it changed while it had no anchor.
    bool is_stuck = false;
  };
  struct Block {
    std::size_t size = 0;    // as asked
    std::size_t mapped = 0;  // whole granules
    int device = 0;
    vmm::ChunkHandle chunk = 0;
    int shared = -1;      // what other processes open it by
    bool opened = false;  // another process's
  };
  using Ranges = std::map<CUdeviceptr, std::size_t>;

  Memory(int devices, std::size_t device_bytes);
  // What is wrong with this use, or "".
  std::string problem(int device, CUdeviceptr address, std::size_t size, bool writes, bool across_devices);
  CUresult place_block(int device, std::size_t size, vmm::ChunkHandle chunk, bool opened, CUdeviceptr* out);
  CUresult drop_block(CUdeviceptr address);
  static const std::pair<const CUdeviceptr, std::size_t>* range_at(const Ranges& ranges, CUdeviceptr address);

  std::mutex mutex_;
  vmm::HostDriver host_;
  vmm::AddressBook book_{kGranularity};  // who may use which mapping
  std::map<CUmemGenericAllocationHandle, Chunk> chunks_;
  std::map<CUdeviceptr, Block> blocks_;
  Ranges freed_;   // blocks that were
  Ranges pinned_;  // allocated here or registered
  std::set<CUdeviceptr> host_blocks_;
  std::set<std::pair<int, int>> peers_;
};

}  // namespace standin
