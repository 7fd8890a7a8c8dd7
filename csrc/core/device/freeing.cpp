// DeviceMemory: the way of a free that the thread's cache (device_memory.h) did not take. The
// block's pool; then what the free has made possible: a closed pool ends with its last block, and
// what a limit that was lowered leaves idle goes back.
#include "core/device/afterwards.h"
#include "core/device/device_memory.h"
#include "core/memory/address_space.h"

namespace vmm {

bool DeviceMemory::free_unkept(AddressSpace& address_space, Address address, BlockCaches::Put put) {
  Pool* pool = address_space.find(address);
  if (pool == nullptr) return false;
  DeviceMemory* home = pool->home();
  if (put == BlockCaches::Put::unknown && home->caches_.put(*pool, address)) return true;
  bool drained = false;
  // Its last block may be this one; it stays until it has been looked at.
  std::shared_ptr<Pool> held;
  if (home->over_limit_.load(std::memory_order_relaxed) || home->log_ != nullptr) [[unlikely]]
    held = pool->weak_from_this().lock();
  const ByteRange range{address - pool->base(), held == nullptr ? 0 : held->block_size(address)};
  const bool known = pool->free(address, &drained);
  if (drained) afterwards([&] { home->bury_drained(pool); });
  if (held != nullptr) [[unlikely]]
    afterwards([&] { home->settle_watched(*held); });
  if (home->over_limit_.load(std::memory_order_relaxed)) [[unlikely]]
    afterwards([&] { home->enforce_limits(held.get(), range); });
  return known;
}

void DeviceMemory::deallocate_pages(Pool& pool, std::size_t offset, std::size_t size) {
  pool.deallocate_pages(offset, size);
  afterwards([&] {
    trim_shelf(pool);
    if (over_limit_.load(std::memory_order_relaxed)) enforce_limits(&pool, {offset, size});
  });
}

void DeviceMemory::unhold_pages(Pool& pool, std::size_t offset, std::size_t size) {
  const bool is_drained = pool.unhold_pages(offset, size);
  afterwards([&] {
    if (is_drained) bury_drained(&pool);
    if (pool.is_closed()) trim_shelf(pool);
    if (over_limit_.load(std::memory_order_relaxed)) enforce_limits(&pool, {offset, size});
  });
}

}  // namespace vmm
