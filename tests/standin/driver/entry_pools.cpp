// libcuda's entry points: memory pools, and allocation in the order of streams. A
// block freed on a stream serves that stream at once, any other when the free is
// done there. What a pool holds unused it keeps until it is trimmed or destroyed.
#include <cuda.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "captures.h"
#include "machine.h"
#include "memory.h"
#include "queue.h"

namespace {

using namespace standin;  // NOLINT(google-build-using-namespace)

struct Block {
  CUdeviceptr address = 0;
  std::size_t bytes = 0;     // whole granules
  CUstream freed = nullptr;  // where, while it is unused
  bool is_free = false;      // the stream has come to the free
};

struct Pool {
  int device = 0;
  std::size_t most = 0;  // bytes; 0: no limit
  std::size_t used = 0;
  std::size_t used_peak = 0;
  std::size_t reserved = 0;
  std::size_t reserved_peak = 0;
  cuuint64_t threshold = 0;
  bool destroyed = false;
  std::vector<std::shared_ptr<Block>> unused;
};

struct Pools {
  std::mutex mutex;
  std::set<Pool*> alive;  // none is ever deleted
  std::map<CUdeviceptr, std::pair<Pool*, std::shared_ptr<Block>>> live;
};

Pools& pools() {
  static auto* const kInstance = new Pools;
  return *kInstance;
}

Memory& memory() { return Memory::instance(); }

// REQUIRES for all below: the pools' lock.
Pool* find(CUmemoryPool handle) {
  auto* const pool = reinterpret_cast<Pool*>(handle);
  return pools().alive.count(pool) == 0 ? nullptr : pool;
}

void give_back(Pool& pool, std::size_t keep) {
  for (auto block = pool.unused.begin(); block != pool.unused.end() && pool.reserved > keep;) {
    if (!(*block)->is_free) {
      ++block;
      continue;
    }
    (void)memory().free((*block)->address);
    pool.reserved -= (*block)->bytes;
    block = pool.unused.erase(block);
  }
}

CUresult grow(Pool& pool, std::size_t bytes, std::shared_ptr<Block>* out) {
  if (pool.most != 0 && pool.reserved + bytes > pool.most) give_back(pool, pool.most - std::min(bytes, pool.most));
  if (pool.most != 0 && pool.reserved + bytes > pool.most) return CUDA_ERROR_OUT_OF_MEMORY;
  auto block = std::make_shared<Block>();
  block->bytes = bytes;
  const CUresult got = memory().allocate(pool.device, bytes, &block->address);
  if (got != CUDA_SUCCESS) return got;
  pool.reserved += bytes;
  pool.reserved_peak = std::max(pool.reserved_peak, pool.reserved);
  *out = block;
  return CUDA_SUCCESS;
}

bool is_captured(CUstream stream, const char* call) {
  const Lock lock(world().mutex);
  return status_of(stream_of(stream, call)) != CU_STREAM_CAPTURE_STATUS_NONE;
}

}  // namespace

extern "C" {

CUresult cuMemPoolCreate(CUmemoryPool* out, const CUmemPoolProps* how) {
  STANDIN_ENTER(Needs::init);
  if (how->allocType != CU_MEM_ALLOCATION_TYPE_PINNED || how->location.type != CU_MEM_LOCATION_TYPE_DEVICE) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (!has_device(how->location.id)) return CUDA_ERROR_INVALID_DEVICE;
  auto* const pool = new Pool;
  pool->device = how->location.id;
  pool->most = how->maxSize;
  const std::lock_guard<std::mutex> lock(pools().mutex);
  pools().alive.insert(pool);
  *out = reinterpret_cast<CUmemoryPool>(pool);
  return CUDA_SUCCESS;
}

// What is allocated from it stays until it is freed.
CUresult cuMemPoolDestroy(CUmemoryPool handle) {
  STANDIN_ENTER(Needs::init);
  const std::lock_guard<std::mutex> lock(pools().mutex);
  Pool* const pool = find(handle);
  if (pool == nullptr) die(__func__, "of no pool");
  pool->destroyed = true;
  give_back(*pool, 0);
  pools().alive.erase(pool);
  return CUDA_SUCCESS;
}

CUresult cuMemPoolTrimTo(CUmemoryPool handle, std::size_t keep) {
  STANDIN_ENTER(Needs::init);
  const std::lock_guard<std::mutex> lock(pools().mutex);
  Pool* const pool = find(handle);
  if (pool == nullptr) return CUDA_ERROR_INVALID_VALUE;
  give_back(*pool, keep);
  return CUDA_SUCCESS;
}

CUresult cuMemPoolGetAttribute(CUmemoryPool handle, CUmemPool_attribute which, void* out) {
  STANDIN_ENTER(Needs::init);
  const std::lock_guard<std::mutex> lock(pools().mutex);
  const Pool* const pool = find(handle);
  if (pool == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const std::map<CUmemPool_attribute, cuuint64_t> values = {
      {CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, pool->threshold},     {CU_MEMPOOL_ATTR_USED_MEM_CURRENT, pool->used},
      {CU_MEMPOOL_ATTR_USED_MEM_HIGH, pool->used_peak},         {CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, pool->reserved},
      {CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, pool->reserved_peak},
  };
  const auto found = values.find(which);
  if (found == values.end()) return CUDA_ERROR_INVALID_VALUE;
  *static_cast<cuuint64_t*>(out) = found->second;
  return CUDA_SUCCESS;
}

CUresult cuMemPoolSetAttribute(CUmemoryPool handle, CUmemPool_attribute which, void* value) {
  STANDIN_ENTER(Needs::init);
  const std::lock_guard<std::mutex> lock(pools().mutex);
  Pool* const pool = find(handle);
  if (pool == nullptr || which != CU_MEMPOOL_ATTR_RELEASE_THRESHOLD) return CUDA_ERROR_INVALID_VALUE;
  pool->threshold = *static_cast<const cuuint64_t*>(value);
  return CUDA_SUCCESS;
}

CUresult cuMemAllocFromPoolAsync(CUdeviceptr* out, std::size_t size, CUmemoryPool handle, CUstream stream) {
  STANDIN_ENTER(needs_of(stream));
  if (size == 0) return CUDA_ERROR_INVALID_VALUE;
  if (size > std::size_t{1} << 57U) return CUDA_ERROR_OUT_OF_MEMORY;
  if (is_captured(stream, __func__)) return CUDA_ERROR_NOT_SUPPORTED;  // which CUDA makes a node of the graph
  const std::size_t bytes = vmm::align_up(size, Memory::kGranularity);
  const std::lock_guard<std::mutex> lock(pools().mutex);
  Pool* const pool = find(handle);
  if (pool == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::shared_ptr<Block> block;
  const auto found = std::find_if(pool->unused.begin(), pool->unused.end(), [&](const auto& each) {
    return each->bytes >= bytes && (each->is_free || each->freed == stream);
  });
  if (found != pool->unused.end()) {
    block = std::make_shared<Block>(**found);  // the old one's free may still be queued
    pool->unused.erase(found);
  } else if (const CUresult got = grow(*pool, bytes, &block); got != CUDA_SUCCESS) {
    return got;
  }
  block->is_free = false;
  pools().live[block->address] = {pool, block};
  pool->used += block->bytes;
  pool->used_peak = std::max(pool->used_peak, pool->used);
  *out = block->address;
  return CUDA_SUCCESS;
}

CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream) {
  STANDIN_ENTER(needs_of(stream));
  if (is_captured(stream, __func__)) return CUDA_ERROR_NOT_SUPPORTED;
  Pool* pool = nullptr;
  std::shared_ptr<Block> block;
  {
    const std::lock_guard<std::mutex> lock(pools().mutex);
    const auto found = pools().live.find(address);
    if (found == pools().live.end()) die(__func__, vmm::format_hex(address) + " is no live block of a pool");
    pool = found->second.first;
    block = found->second.second;
    pools().live.erase(found);
    pool->used -= block->bytes;
    block->freed = stream;
    pool->unused.push_back(block);
  }
  Job job;
  job.call = __func__;
  job.run = [pool, block](int /*device*/) {
    const std::lock_guard<std::mutex> lock(pools().mutex);
    block->is_free = true;
    if (pool->destroyed) give_back(*pool, 0);
  };
  Lock lock(world().mutex);
  return submit(lock, stream_of(stream, __func__), std::make_shared<const Job>(std::move(job)));
}

}  // extern "C"
