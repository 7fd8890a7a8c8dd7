// The contract that every driver keeps: address space, physical chunks,
// mappings, fences, copies. It owns nothing of the policy above it and knows
// no pool, block or limit. Implementations: cuda_driver (a GPU), host_driver
// (host memory, as strict as CUDA), scripted_driver (tests).
//
// Rules for all calls:
// - Every size, offset and address is in bytes, and a multiple of
//   Capabilities::granularity unless said otherwise.
// - A call that fails changes nothing.
// - Every call may be made from any thread, none calls back, and none waits
//   for the GPU except wait(), synchronize() and read(). The caller's current
//   context and device are as they were afterwards.
// - Once the driver has gone (process exit, a forked child) every call
//   answers StatusCode::driver_gone and does nothing; alive() says so too.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/status.h"
#include "base/units.h"

namespace vmm {

// Where memory lives, or who accesses it.
struct Location {
  enum class Kind : std::uint8_t { device, host };
  Kind kind = Kind::device;
  int device = 0;  // ordinal; meaningless for the host

  static Location on_device(int ordinal) { return {Kind::device, ordinal}; }
  static Location on_host() { return {Kind::host, 0}; }
  friend bool operator==(const Location& a, const Location& b) {
    return a.kind == b.kind && (a.kind == Kind::host || a.device == b.device);
  }
};

enum class Access : std::uint8_t { none, read, read_write };

// A stream of the device; nullptr is the default stream. For CUDA a
// cudaStream_t; the host driver's streams are names only (work is done at once).
using Stream = void*;

// Opaque names given out by a driver; zero / nullptr is never a valid one.
using ChunkHandle = std::uint64_t;
using Fence = void*;

struct Capabilities {
  std::size_t granularity = 0;   // bytes; minimum and recommended page
  std::size_t total_memory = 0;  // bytes of device memory
  bool exportable = false;       // chunks can be exported as file descriptors
  bool host_located = false;     // chunks can live in host memory
  bool gpu_direct_rdma = false;  // chunks can be created for RDMA
  std::string name;              // "NVIDIA H100 80GB HBM3", "host"
};

struct ChunkSpec {
  std::size_t size = 0;
  Location location;
  bool exportable = false;
};

struct MemoryInfo {
  std::size_t free = 0;   // bytes
  std::size_t total = 0;  // bytes
};

class NativePools;

namespace packing {
enum class Step : unsigned int;
struct Job;
}  // namespace packing

class Driver {
 public:
  Driver() = default;
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;
  virtual ~Driver() = default;

  // As torch names its devices: "cuda", "cpu"; "scripted(cpu)".
  [[nodiscard]] virtual std::string name() const = 0;
  [[nodiscard]] virtual bool alive() const = 0;
  // Visible devices (CUDA_VISIBLE_DEVICES honoured); 0 once the driver has gone.
  [[nodiscard]] virtual int device_count() const = 0;
  // invalid_argument: no such device. not_supported: the device lacks what is
  // needed; missing() then names it.
  virtual Status capabilities(int device, Capabilities* out) const = 0;
  // Why this device cannot be used ("" if it can), in words for the user.
  [[nodiscard]] virtual std::string missing(int device) const = 0;

  // -- Address space. Costs 17-37 us at any size (driver_ops); nothing is backed.
  // Reserves [*out, *out + size). `alignment` is a power of two >= granularity;
  // *out is a multiple of it. out_of_memory: no such stretch is free.
  virtual Status reserve(std::size_t size, std::size_t alignment, Address* out) = 0;
  // REQUIRES: exactly a reservation, with nothing mapped in it
  // (invalid_argument else).
  virtual Status unreserve(Address address, std::size_t size) = 0;

  // -- Physical chunks. A fresh chunk reads as zero.
  // out_of_memory: the device (or the host) has no such amount left.
  // not_supported: a location or export that capabilities() denies.
  virtual Status create(const ChunkSpec& spec, ChunkHandle* out) = 0;
  // Gives the chunk back. While it is still mapped somewhere the memory stays
  // until the last unmap, as CUDA does. invalid_argument: unknown or released.
  virtual Status release(ChunkHandle chunk) = 0;

  // -- Mappings. A chunk is mapped whole, at any number of addresses.
  // Maps `chunk` at [address, address + size). Inaccessible until set_access.
  // REQUIRES: inside one reservation and unmapped; `size` is the chunk's own
  // (invalid_argument else).
  virtual Status map(Address address, std::size_t size, ChunkHandle chunk) = 0;
  // Drops every mapping in [address, address + size). REQUIRES: the stretch is
  // made of whole mappings without gaps (invalid_argument else), and no queued
  // work uses it: the driver does not wait, the GPU would fault.
  virtual Status unmap(Address address, std::size_t size) = 0;
  // Gives `who` this access to all of [address, address + size). Costs 33 us a
  // chunk on a GPU, once for a run as for each. REQUIRES: as unmap(); Access::
  // none makes it inaccessible.
  virtual Status set_access(Address address, std::size_t size, Location who, Access access) = 0;

  // -- Sharing with other processes. `*fd` belongs to the caller, who closes it.
  // invalid_argument: the chunk was not created exportable.
  virtual Status export_chunk(ChunkHandle chunk, int* fd) = 0;
  // The imported chunk is released like a created one. `size` is its size.
  virtual Status import_chunk(int fd, std::size_t size, ChunkHandle* out) = 0;

  // -- Fences: points in a stream's work. About 0.2-0.35 us a call.
  virtual Status create_fence(int device, Fence* out) = 0;
  virtual Status destroy_fence(Fence fence) = 0;
  // The fence passes when all work queued on `stream` until now is done. A
  // recorded fence may be recorded again; the newest record counts. On the
  // default stream it covers every blocking stream and every thread's
  // per-thread stream as well: CUDA orders the default stream after them.
  // not_supported: the stream is being captured, or is the default one while a
  // blocking stream is. No capture is ever ended by it.
  virtual Status record(Fence fence, Stream stream) = 0;
  // ok: passed (or never recorded); not_ready: not yet.
  virtual Status query(Fence fence) = 0;
  // Blocks the calling thread until the fence has passed.
  virtual Status wait(Fence fence) = 0;
  // Work queued on `stream` of `device` from now on waits for the fence, which may
  // be another device's; the CPU does not. not_supported: the stream is being
  // captured.
  virtual Status stream_wait(int device, Stream stream, Fence fence) = 0;
  // Blocks the calling thread until the device has done all queued work, on
  // streams known to us or not. Ends no capture, whose work is not queued.
  virtual Status synchronize(int device) = 0;

  // -- Streams of one's own, which wait for no other.
  virtual Status create_stream(int device, Stream* out) = 0;
  // Work that is queued on it ends first; nobody waits for it.
  virtual Status destroy_stream(int device, Stream stream) = 0;

  // -- Plain host memory [address, address + size), whole pages of the machine's that are
  // touched, stays in its place from now on, so that copies run at the bus's rate beside
  // the CPU. 22 ms a GiB, and 20 to undo it. What copies still use is not to be unpinned.
  // out_of_memory, not_supported: it stays as it is, and copies are only slower.
  virtual Status pin_host(Address address, std::size_t size) = 0;
  virtual Status unpin_host(Address address) = 0;
  // Pinning does something there: else nobody need touch the memory first.
  [[nodiscard]] virtual bool pins_host() const { return true; }

  // -- Content. Ordered on `stream` of `device`; any address both can access,
  // any size > 0 (no alignment needed). Either side may be plain host memory;
  // if it is not pinned, CUDA may wait for the copy. Long copies may be issued in
  // pieces: after a failure some may have been done. not_supported: the stream
  // is being captured (a graph must not repeat what we do once).
  virtual Status copy_async(int device, Address to, Address from, std::size_t size, Stream stream) = 0;
  virtual Status fill_async(int device, Address address, std::uint8_t byte, std::size_t size, Stream stream) = 0;

  // Copies [from, from + size) of the device's memory to plain host memory, and waits for
  // that copy alone: it is on no stream that anybody else has, so behind nothing that is
  // queued, and no capture is ended. REQUIRES: no queued work writes there.
  virtual Status read(int device, void* to, Address from, std::size_t size) = 0;

  // -- Packed content (packing.h). Why this device cannot do it ("" if it can), in words for
  // the user. What it needs is made when first asked, which may take half a second.
  [[nodiscard]] virtual std::string missing_packing(int device) = 0;
  // Does `step` to the units of `job`, one at least, in the order of `stream`. REQUIRES:
  // missing_packing() is ""; the units and their bodies are in pinned host memory, and stay
  // there until it is done. not_supported: the stream is being captured.
  virtual Status pack_async(int device, packing::Step step, const packing::Job& job, Stream stream) = 0;

  virtual Status memory_info(int device, MemoryInfo* out) const = 0;

  // -- Contexts, of drivers that have such --
  // The calling thread's, nullptr where it has none. False: nothing is known of it.
  virtual bool current_context(const void** /*out*/) const { return false; }
  // The device's own, which is kept once it has been used; nullptr: it has not been.
  [[nodiscard]] virtual const void* used_context(int /*device*/) const { return nullptr; }

  // How late it is, since any moment; never goes back. About 25 ns. Drivers of tests and
  // replays have a time of their own.
  [[nodiscard]] virtual std::chrono::nanoseconds now() const {
    return std::chrono::steady_clock::now().time_since_epoch();
  }

  // Its own stream-ordered pools (native_pools.h), as long as it lives; nullptr: it
  // has none.
  [[nodiscard]] virtual NativePools* native_pools() { return nullptr; }
};

}  // namespace vmm
