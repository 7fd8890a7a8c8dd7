#include "core/memory/host_backup.h"

#include <algorithm>
#include <cstring>

#include "base/errors.h"

namespace vmm {

std::unique_ptr<HostBackup> HostBackup::make(Driver& driver, const std::shared_ptr<PinnedMemory>& memory,
                                             std::size_t bytes) {
  std::unique_ptr<HostBackup> backup(new HostBackup(driver, memory));
  return backup->slabs_.grow_to(bytes) ? std::move(backup) : nullptr;
}

template <typename Each>
void HostBackup::for_each_piece(std::size_t at, std::size_t size, const Each& each) {
  for (std::size_t done = 0; done < size;) {
    const std::size_t within = (at + done) % PinnedMemory::kSlabBytes;
    const std::size_t piece = std::min(size - done, PinnedMemory::kSlabBytes - within);
    each(slabs_.slab((at + done) / PinnedMemory::kSlabBytes).address() + within, done, piece);
    done += piece;
  }
}

void HostBackup::save(std::size_t at, Address from, std::size_t size, const StreamUse& by) {
  for_each_piece(at, size, [&](Address host, std::size_t done, std::size_t piece) {
    throw_if_failed(driver_.copy_async(by.device->device(), host, from + done, piece, by.stream),
                    "saving a model in host memory");
  });
}

void HostBackup::load(std::size_t at, Address to, std::size_t size, const StreamUse& by) {
  for_each_piece(at, size, [&](Address host, std::size_t done, std::size_t piece) {
    throw_if_failed(driver_.copy_async(by.device->device(), to + done, host, piece, by.stream),
                    "loading a model from host memory");
  });
}

void HostBackup::read(std::size_t at, std::byte* to, std::size_t size) {
  for_each_piece(at, size, [&](Address host, std::size_t done, std::size_t piece) {
    std::memcpy(to + done, reinterpret_cast<const std::byte*>(host), piece);  // NOLINT(performance-no-int-to-ptr)
  });
}

}  // namespace vmm
