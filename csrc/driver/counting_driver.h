// A driver that counts the calls that cost: it wraps another one, passes every
// call on as it is, and owns nothing but the counts. For replays and tests of
// how often the driver is asked; it never decides anything.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>

#include "driver/driver.h"

namespace vmm {

// Calls on chunks and mappings, refused ones included. On a GPU each costs
// microseconds (docs/performance.md); those on streams and fences a fraction of
// one, and a reservation is made once a pool: they are not in here.
struct DriverCalls {
  std::uint64_t create = 0;
  std::uint64_t release = 0;
  std::uint64_t map = 0;
  std::uint64_t unmap = 0;
  std::uint64_t set_access = 0;

  [[nodiscard]] std::uint64_t total() const { return create + release + map + unmap + set_access; }
};

class CountingDriver : public Driver {
 public:
  // REQUIRES: `inner` outlives this.
  explicit CountingDriver(Driver& inner) : inner_(inner) {}

  [[nodiscard]] DriverCalls calls() const { return {create_, release_, map_, unmap_, set_access_}; }

  Status create(const ChunkSpec& spec, ChunkHandle* out) override { return count(create_).create(spec, out); }
  Status release(ChunkHandle chunk) override { return count(release_).release(chunk); }
  Status map(Address address, std::size_t size, ChunkHandle chunk) override {
    return count(map_).map(address, size, chunk);
  }
  Status unmap(Address address, std::size_t size) override { return count(unmap_).unmap(address, size); }
  Status set_access(Address address, std::size_t size, Location who, Access access) override {
    return count(set_access_).set_access(address, size, who, access);
  }

  [[nodiscard]] std::string name() const override { return inner_.name(); }
  [[nodiscard]] bool alive() const override { return inner_.alive(); }
  [[nodiscard]] int device_count() const override { return inner_.device_count(); }
  Status capabilities(int device, Capabilities* out) const override { return inner_.capabilities(device, out); }
  [[nodiscard]] std::string missing(int device) const override { return inner_.missing(device); }
  Status reserve(std::size_t size, std::size_t alignment, Address* out) override {
    return inner_.reserve(size, alignment, out);
  }
  Status unreserve(Address address, std::size_t size) override { return inner_.unreserve(address, size); }
  Status export_chunk(ChunkHandle chunk, int* fd) override { return inner_.export_chunk(chunk, fd); }
  Status import_chunk(int fd, std::size_t size, ChunkHandle* out) override {
    return inner_.import_chunk(fd, size, out);
  }
  Status create_fence(int device, Fence* out) override { return inner_.create_fence(device, out); }
  Status destroy_fence(Fence fence) override { return inner_.destroy_fence(fence); }
  Status record(Fence fence, Stream stream) override { return inner_.record(fence, stream); }
  Status query(Fence fence) override { return inner_.query(fence); }
  Status wait(Fence fence) override { return inner_.wait(fence); }
  Status stream_wait(int device, Stream stream, Fence fence) override {
    return inner_.stream_wait(device, stream, fence);
  }
  Status synchronize(int device) override { return inner_.synchronize(device); }
  Status create_stream(int device, Stream* out) override { return inner_.create_stream(device, out); }
  Status destroy_stream(int device, Stream stream) override { return inner_.destroy_stream(device, stream); }
  Status pin_host(Address address, std::size_t size) override { return inner_.pin_host(address, size); }
  Status unpin_host(Address address) override { return inner_.unpin_host(address); }
  [[nodiscard]] bool pins_host() const override { return inner_.pins_host(); }
  Status copy_async(int device, Address to, Address from, std::size_t size, Stream stream) override {
    return inner_.copy_async(device, to, from, size, stream);
  }
  Status fill_async(int device, Address address, std::uint8_t byte, std::size_t size, Stream stream) override {
    return inner_.fill_async(device, address, byte, size, stream);
  }
  Status read(int device, void* to, Address from, std::size_t size) override {
    return inner_.read(device, to, from, size);
  }
  [[nodiscard]] std::string missing_packing(int device) override { return inner_.missing_packing(device); }
  Status pack_async(int device, packing::Step step, const packing::Job& job, Stream stream) override {
    return inner_.pack_async(device, step, job, stream);
  }
  Status memory_info(int device, MemoryInfo* out) const override { return inner_.memory_info(device, out); }
  bool current_context(const void** out) const override { return inner_.current_context(out); }
  [[nodiscard]] const void* used_context(int device) const override { return inner_.used_context(device); }
  [[nodiscard]] std::chrono::nanoseconds now() const override { return inner_.now(); }
  [[nodiscard]] NativePools* native_pools() override { return inner_.native_pools(); }

 private:
  using Count = std::atomic<std::uint64_t>;
  Driver& count(Count& of) {
    of.fetch_add(1, std::memory_order_relaxed);
    return inner_;
  }

  Driver& inner_;
  Count create_{0};
  Count release_{0};
  Count map_{0};
  Count unmap_{0};
  Count set_access_{0};
};

}  // namespace vmm
