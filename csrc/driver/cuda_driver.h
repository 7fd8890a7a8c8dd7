// The driver's contract kept by a GPU, through the CUDA driver API. It owns the
// primary contexts it has retained, its chunks' handles and the book of what it
// has mapped; it never knows a pool, nor the CUDA runtime or torch, with whom it
// shares the primary context.
//
// - A device's context is made (or joined) when the first call needs it, not
//   before: asking what there is costs no device memory.
// - CUDA is lenient in places (it may map what was freed, or follow an unknown
//   handle). The book refuses what driver.h refuses, before CUDA is asked:
//   about 0.1 us a call, where set_access alone is 33 us.
// - One mapping changes at a time, in the whole process; no other lock is held while CUDA
//   works.
// - copy_async() from or to plain (pageable) host memory is staged by the driver
//   and may wait for the copy; pinned memory never waits.
// - A copy or fill over the border of a chunk that the host may access is issued
//   in pieces: given whole, driver 580 crashes the process in a copy from or to
//   host memory and refuses a fill.
// - No call ends a stream capture. What CUDA would refuse and punish (a query in
//   the strict mode, a record on a captured stream) is asked first or made in
//   the relaxed mode; a fence is never made with cuCtxRecordEvent, and
//   synchronize() never with cuCtxSynchronize: both end every capture of the
//   context. It frees a small block instead, which waits for all streams and
//   leaves captures alone (measured, driver 580).
// - The first fence of a device takes that small block, so that waiting needs no
//   memory when the device has none left.
// - Host-located chunks stand on the NUMA node next to device 0.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/sync.h"
#include "driver/address_book.h"
#include "driver/cuda_api.h"
#include "driver/driver.h"
#include "driver/fence_table.h"
#include "driver/fork_watch.h"
#include "driver/native_pools.h"
#include "driver/refusals.h"

namespace vmm {

inline CUstream stream_of(Stream stream) { return static_cast<CUstream>(stream); }

class CudaDriver final : public Driver, private NativePools, private ForkObserver {
 public:
  // Whether a driver with all that this needs is on the machine; else `why_not`
  // says what is missing. Loads its library, calls nothing in it.
  static bool is_installed(std::string* why_not);
  // nullptr: no usable driver or no visible device, `why_not` says which. Calls
  // cuInit(), makes no context. One device that lacks something does not stop
  // the others: missing(device) tells.
  static std::unique_ptr<Driver> make(std::string* why_not);
  // Lets go of the contexts. What is still mapped stays mapped.
  ~CudaDriver() override;

  [[nodiscard]] std::string name() const override { return "cuda"; }
  // False for good once CUDA has said that it shuts down, and in a forked child.
  [[nodiscard]] bool alive() const override { return !gone_.load(std::memory_order_relaxed); }
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

  Status copy_async(int device, Address to, Address from, std::size_t size, Stream stream) override;
  Status fill_async(int device, Address address, std::uint8_t byte, std::size_t size, Stream stream) override;
  Status read(int device, void* to, Address from, std::size_t size) override VMM_EXCLUDES(context_mutex_);

  // cuda_packing.cpp
  [[nodiscard]] std::string missing_packing(int device) override VMM_EXCLUDES(context_mutex_);
  Status pack_async(int device, packing::Step step, const packing::Job& job, Stream stream) override;

  Status memory_info(int device, MemoryInfo* out) const override;
  bool current_context(const void** out) const override;
  [[nodiscard]] const void* used_context(int device) const override;

  [[nodiscard]] NativePools* native_pools() override { return this; }

 private:
  // cuda_native_pools.cpp
  [[nodiscard]] std::string missing_pools(int device) const override;
  Status create_pool(int device, std::size_t max_bytes, NativePool* out) override;
  Status destroy_pool(NativePool pool) override;
  Status allocate_from_pool(NativePool pool, int device, std::size_t bytes, Stream stream, Address* out) override;
  Status free_to_pool(int device, Address address, Stream stream) override;
  Status trim_pool(NativePool pool, std::size_t keep) override;
  Status set_release_threshold(NativePool pool, std::size_t bytes) override;
  Status release_threshold(NativePool pool, std::size_t* out) const override;
  Status pool_usage(NativePool pool, NativePoolUsage* out) const override;
  Status pool_attribute(NativePool pool, CUmemPool_attribute which, std::size_t* out) const;

  struct Device {
    CUdevice handle = 0;
    Capabilities capabilities;
    std::string missing;
    std::string missing_pools;
    std::atomic<CUcontext> context{nullptr};           // retained on first use
    std::atomic<CUdeviceptr> to_free{0};               // by synchronize(); 0: none yet
    std::atomic<CUdeviceptr> beside_it{0};             // keeps the driver's page that has room for the next one
    std::atomic<CUstream> reading{nullptr};            // read()'s own; nullptr: none yet
    std::array<std::atomic<CUfunction>, 3> packing{};  // by step; nullptr: not compiled yet
  };
  struct Chunk {
    CUmemGenericAllocationHandle handle = 0;
    std::size_t size = 0;
    bool exportable = false;
    Address anchor = 0;  // of its mappings the one by which its access may change; 0: it has gone
  };
  class Anchors;
  using Chunks = std::unordered_map<ChunkHandle, Chunk>;
  using Devices = std::vector<std::unique_ptr<Device>>;
  // Makes a device's context the calling thread's, for the length of one call.
  class Current {
   public:
    Current(const CudaDriver& driver, int device);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;
    [[nodiscard]] const Status& status() const { return status_; }
    [[nodiscard]] CUcontext context() const { return context_; }

   private:
    const CudaDriver& driver_;
    CUcontext context_ = nullptr;
    bool pushed_ = false;
    Status status_;
  };

  // In whose context host memory is pinned and made: always one that the process uses, as a
  // context on another costs that one hundreds of MiB.
  int device_for_host();

  // For a call that is told a stream: `*current` holds the device's context where the stream does not.
  Status make_current_for(Stream stream, int device, std::optional<Current>* current) const;

  CudaDriver(const CudaApi& api, Devices devices, std::size_t granularity);
  static void ask(const CudaApi& api, int ordinal, Device* device);

  void before_fork() override {}
  void after_fork_in_parent() override {}
  void after_fork_in_child() override { gone_.store(true, std::memory_order_relaxed); }

  [[nodiscard]] bool has_device(int device) const {
    return device >= 0 && static_cast<std::size_t>(device) < devices_.size();
  }
  [[nodiscard]] Device& device_at(int device) const { return *devices_[static_cast<std::size_t>(device)]; }
  Status check_device(int device, const char* call) const;
  Status find_fence(Fence fence, const char* call, FenceTable::Entry* out) const;
  // not_supported while `stream` is being captured: CUDA would take the call into
  // the graph, or end the capture.
  Status check_not_captured(Stream stream, const char* call) const;
  // CUDA's answer; notices when the driver goes.
  Status answer(CUresult result, const char* call) const;
  // REQUIRES: the device's context is current.
  Status provide_block_to_free(Device& device) const;
  Status load_packing(Device& device, const std::string& code) VMM_EXCLUDES(context_mutex_);
  Status reading_stream(Device& device, CUstream* out) VMM_EXCLUDES(context_mutex_);
  Status context_of(int device, CUcontext* out) const VMM_EXCLUDES(context_mutex_);
  [[nodiscard]] CUmemLocation location(Location where) const;
  Status note(const Chunk& chunk, ChunkHandle* out) VMM_EXCLUDES(mutex_);
  void forget_anchor(ChunkHandle chunk, Address address) VMM_REQUIRES(mutex_);
  // Chunks of the run that have no anchor.
  [[nodiscard]] std::vector<Chunk> without_anchor(Address address, std::size_t size) VMM_REQUIRES(mutex_);
  // How much of [address, address + size) may be given to CUDA in one copy.
  [[nodiscard]] std::size_t one_piece(Address address, std::size_t size) const VMM_EXCLUDES(mutex_);

  const CudaApi api_;
  const Devices devices_;
  const std::size_t granularity_;         // bytes; the largest of all devices'
  CUmemLocation host_location_{};         // what a host-located chunk asks for
  std::atomic<int> device_for_host_{-1};  // -1: not asked for yet
  mutable std::atomic<bool> gone_{false};
  mutable Mutex context_mutex_;

  // One change of mappings at a time: whether a chunk has an anchor is looked at before its
  // access changes, and has to be so until then.
  Mutex changing_;
  mutable Mutex mutex_;
  AddressBook book_ VMM_GUARDED_BY(mutex_);
  // Mappings that the host may access; mostly none, and copies need not look.
  std::atomic<std::size_t> host_accessible_{0};
  Chunks chunks_ VMM_GUARDED_BY(mutex_);
  ChunkHandle next_chunk_ VMM_GUARDED_BY(mutex_) = 1;
  FenceTable fences_;  // the event of each
};

}  // namespace vmm
