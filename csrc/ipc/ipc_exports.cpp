#include "ipc/ipc_exports.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "base/errors.h"

namespace vmm {

IpcExports& IpcExports::instance() {
  static auto* const kInstance = new IpcExports;
  return *kInstance;
}

IpcExports::~IpcExports() {
  const MutexLock lock(mutex_);
  shared_blocks_.fetch_sub(blocks_.size(), std::memory_order_relaxed);
}

DescriptorServer& IpcExports::server() {
  if (server_ == nullptr) server_ = std::make_unique<DescriptorServer>();
  return *server_;
}

void IpcExports::export_chunk(Driver& driver, const ChunkView& chunk) {
  if (const auto found = exports_.find(chunk.number); found != exports_.end()) {
    ++found->second.blocks;
    return;
  }
  int fd = -1;
  throw_if_failed(driver.export_chunk(chunk.handle, &fd), "sharing memory with other processes");
  const std::uint64_t id = server().add(Descriptor(fd));
  exports_[chunk.number] = {{chunk.size, fd, id}, 1};
}

void IpcExports::let_go(const Chunks& chunks) {
  for (const std::uint64_t chunk : chunks) {
    const auto found = exports_.find(chunk);
    if (found == exports_.end() || --found->second.blocks != 0) continue;
    server().remove(found->second.chunk.id);
    exports_.erase(found);
  }
}

std::string IpcExports::share(Driver& driver, Address block, const std::vector<ChunkView>& chunks, int version) {
  for (const ChunkView& chunk : chunks) {
    if (chunk.exportable) continue;
    if (chunk.is_spilled) {
      throw NotAvailableError(
          "this memory cannot be shared with other processes: it was spilled to host memory; copy the tensor once "
          "there "
          "is room on the device, or give its model no spill=\"host\"");
    }
    throw NotAvailableError(
        "this memory cannot be shared with other processes: it was not created exportable, either because "
        "TORCH_VMM_EXPORTABLE=0 is set or because the device cannot export memory");
  }
  Chunks numbers;
  for (const ChunkView& chunk : chunks) numbers.push_back(chunk.number);
  const MutexLock lock(mutex_);
  if (const auto found = blocks_.find(block); found == blocks_.end() || found->second != numbers) {
    Chunks exported;
    try {
      for (const ChunkView& chunk : chunks) {
        export_chunk(driver, chunk);
        exported.push_back(chunk.number);
      }
      if (found == blocks_.end()) {
        blocks_.emplace(block, numbers);
        shared_blocks_.fetch_add(1, std::memory_order_relaxed);
      } else {
        // Another block at the address of one whose end we were not told of.
        let_go(std::exchange(found->second, numbers));
      }
    } catch (...) {
      let_go(exported);
      throw;
    }
  }
  IpcHandle handle;
  handle.pid = ::getpid();
  handle.sender = server().sender();
  for (const std::uint64_t chunk : numbers) handle.chunks.push_back(exports_.at(chunk).chunk);
  return encode(handle, version);
}

void IpcExports::forget(Address block) noexcept {
  const MutexLock lock(mutex_);
  const auto found = blocks_.find(block);
  if (found == blocks_.end()) return;
  let_go(found->second);
  blocks_.erase(found);
  shared_blocks_.fetch_sub(1, std::memory_order_relaxed);
}

void IpcExports::forget_chunk(std::uint64_t number) noexcept {
  const MutexLock lock(mutex_);
  if (exports_.count(number) == 0) return;
  for (auto at = blocks_.begin(); at != blocks_.end();) {
    const Chunks& chunks = at->second;
    if (std::find(chunks.begin(), chunks.end(), number) == chunks.end()) {
      ++at;
      continue;
    }
    let_go(chunks);
    at = blocks_.erase(at);
    shared_blocks_.fetch_sub(1, std::memory_order_relaxed);
  }
}

std::size_t IpcExports::open_descriptors() const {
  const MutexLock lock(mutex_);
  return exports_.size();
}

}  // namespace vmm
