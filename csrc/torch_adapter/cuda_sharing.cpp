// CudaAllocator: other devices, other processes, copies.
//
// What the process has opened of others is kept here: one mapping a handle, as
// long as a storage of torch's uses it. torch counts across processes who uses a
// shared block (CudaIPCSentData), so a sender's block outlives its receivers'
// tensors; if the sender ends first, the mapping keeps the memory.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/errors.h"
#include "base/sync.h"
#include "core/device/provided_memory.h"
#include "ipc/imported_range.h"
#include "ipc/ipc_descriptors.h"
#include "ipc/ipc_exports.h"
#include "ipc/ipc_handle.h"
#include "torch_adapter/cuda_allocator.h"
#include "torch_adapter/errors.h"
#include "torch_adapter/out_of_memory.h"

namespace vmm {

namespace {

// Memory of another process. One of the two is set.
struct Opened {
  std::string handle;
  c10::DeviceIndex device = 0;  // whose current it was when it was opened
  std::unique_ptr<ImportedRange> range;
  void* cuda_ipc = nullptr;  // what cudaIpcOpenMemHandle gave
  // Once nobody has it any more: whose work may still use it, and until when.
  std::vector<std::pair<Clock*, Epoch>> last_use;

  [[nodiscard]] void* base() const { return range == nullptr ? cuda_ipc : reinterpret_cast<void*>(range->base()); }
};

class OpenedHandles {
 public:
  // Never destroyed: tensors outlive everything.
  static OpenedHandles& instance() {
    static auto* const kInstance = new OpenedHandles;
    return *kInstance;
  }

  // The memory that `handle` names, opened unless it is. Throws VmmError's and
  // c10::Error.
  std::shared_ptr<void> open(const std::string& handle, c10::DeviceIndex device) VMM_EXCLUDES(mutex_);
  // Kernels of `device` reach what is and will be opened for `peer`.
  void add_peer(c10::DeviceIndex device, c10::DeviceIndex peer) VMM_EXCLUDES(mutex_);
  // Unmaps what a graph's capture kept from being unmapped. True if it did any.
  bool drop_parked() VMM_EXCLUDES(mutex_);

 private:
  struct Entry {
    std::weak_ptr<void> memory;
    Opened* opened = nullptr;
  };
  using Key = std::pair<std::string, c10::DeviceIndex>;

  using Peers = std::vector<std::pair<c10::DeviceIndex, c10::DeviceIndex>>;  // who reaches whom, and only more of it

  static std::unique_ptr<Opened> map(const std::string& handle, c10::DeviceIndex device, const Peers& peers);
  void close(std::unique_ptr<Opened> opened) noexcept VMM_EXCLUDES(mutex_);
  static bool drop(Opened& opened);

  Mutex mutex_;
  std::map<Key, Entry> entries_ VMM_GUARDED_BY(mutex_);
  Peers peers_ VMM_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<Opened>> parked_ VMM_GUARDED_BY(mutex_);
};

std::shared_ptr<void> OpenedHandles::open(const std::string& handle, c10::DeviceIndex device) {
  drop_parked();
  const auto alive = [&]() VMM_REQUIRES(mutex_) {
    const auto found = entries_.find({handle, device});
    // One whose memory is just being closed is replaced: a chunk may be mapped,
    // and CUDA's handles may be opened, twice.
    return found == entries_.end() ? nullptr : found->second.memory.lock();
  };
  Peers peers;
  {
    const MutexLock lock(mutex_);
    if (auto memory = alive(); memory != nullptr) return memory;
    peers = peers_;
  }
  // No lock is held: the sender may be slow to answer.
  std::unique_ptr<Opened> opened = map(handle, device, peers);
  Opened* const mine = opened.get();
  const std::shared_ptr<void> memory(
      mine->base(), [kept = opened.release()](void*) { instance().close(std::unique_ptr<Opened>(kept)); });
  const MutexLock lock(mutex_);
  // Another thread may have opened it meanwhile: then ours goes again.
  if (auto first = alive(); first != nullptr) return first;
  for (std::size_t k = peers.size(); k < peers_.size(); ++k) {
    if (peers_[k].second != device || mine->range == nullptr) continue;
    throw_if_failed(mine->range->add_accessor(Location::on_device(peers_[k].first)), "peer access to imported memory");
  }
  entries_[{handle, device}] = {memory, mine};
  return memory;
}

std::unique_ptr<Opened> OpenedHandles::map(const std::string& handle, c10::DeviceIndex device, const Peers& peers) {
  auto opened = std::make_unique<Opened>();
  opened->handle = handle;
  opened->device = device;
  const IpcHandle named = decode(handle);
  if (!named.cuda_ipc.empty()) {
    cudaIpcMemHandle_t cuda_handle;
    static_assert(sizeof(cuda_handle) == kCudaIpcHandleBytes);
    std::memcpy(&cuda_handle, named.cuda_ipc.data(), sizeof(cuda_handle));
    C10_CUDA_CHECK(cudaIpcOpenMemHandle(&opened->cuda_ipc, cuda_handle, cudaIpcMemLazyEnablePeerAccess));
    return opened;
  }
  const Descriptors descriptors = fetch_descriptors(named);
  std::vector<ImportedPart> parts;
  for (std::size_t k = 0; k < descriptors.size(); ++k) parts.push_back({descriptors[k].get(), named.chunks[k].size});
  std::vector<Location> accessors = {Location::on_device(device)};
  for (const auto& [who, whose] : peers) {
    if (whose == device) accessors.push_back(Location::on_device(who));
  }
  DeviceRoom& room = Runtime::room(DeviceKind::cuda, device);
  throw_if_failed(ImportedRange::make(room.memory.driver(), parts, accessors, &opened->range),
                  "mapping memory of process " + std::to_string(named.pid));
  return opened;
}

void OpenedHandles::add_peer(c10::DeviceIndex device, c10::DeviceIndex peer) {
  // Held, so that nothing is unmapped meanwhile; let go without the lock, which
  // closing takes.
  std::vector<std::shared_ptr<void>> held;
  const MutexLock lock(mutex_);
  const std::pair<c10::DeviceIndex, c10::DeviceIndex> pair{device, peer};
  if (std::find(peers_.begin(), peers_.end(), pair) != peers_.end()) return;
  for (const auto& [key, entry] : entries_) {
    held.push_back(entry.memory.lock());
    if (key.second != peer || held.back() == nullptr || entry.opened->range == nullptr) continue;
    throw_if_failed(entry.opened->range->add_accessor(Location::on_device(device)), "peer access to imported memory");
  }
  peers_.push_back(pair);
}

// Called when the last storage on it has gone, from anywhere.
void OpenedHandles::close(std::unique_ptr<Opened> opened) noexcept {
  // Inherited through a fork, it is the parent's; nothing of CUDA works here.
  if (Runtime::in_child()) {
    (void)opened.release();
    return;
  }
  try {
    {
      const MutexLock lock(mutex_);
      const auto found = entries_.find({opened->handle, opened->device});
      if (found != entries_.end() && found->second.opened == opened.get()) entries_.erase(found);
    }
    if (opened->range != nullptr) {
      // Nobody told us of the streams that used it.
      for (const Location& who : opened->range->accessors()) {
        Clock& clock = Runtime::room(DeviceKind::cuda, who.device).memory.clock();
        opened->last_use.emplace_back(&clock, clock.now());
      }
    }
    if (!drop(*opened)) {
      const MutexLock lock(mutex_);
      parked_.push_back(std::move(opened));
    }
    drop_parked();
  } catch (...) {
    report_swallowed("closing memory of another process");
    // Mapped for ever is better than unmapped under a kernel.
    (void)opened.release();
  }
}

// Waits for the work that may use it, and unmaps. False where that cannot be
// done now: CUDA closes its own handles only while nothing is being captured.
bool OpenedHandles::drop(Opened& opened) {
  for (const auto& [clock, epoch] : opened.last_use) {
    if (!clock->wait(epoch).ok()) return false;
  }
  if (opened.cuda_ipc != nullptr) {
    if (Runtime::room(DeviceKind::cuda, opened.device).memory.clock().is_capturing()) return false;
    const c10::cuda::CUDAGuard guard(opened.device);
    // At process exit CUDA may have gone, and the memory with it.
    if (cudaIpcCloseMemHandle(std::exchange(opened.cuda_ipc, nullptr)) != cudaSuccess) (void)cudaGetLastError();
  }
  opened.range.reset();
  return true;
}

bool OpenedHandles::drop_parked() {
  std::vector<std::unique_ptr<Opened>> parked;
  {
    const MutexLock lock(mutex_);
    parked.swap(parked_);
  }
  bool any = false;
  for (auto& opened : parked) {
    bool is_dropped = false;
    try {
      is_dropped = drop(*opened);
      if (!is_dropped) {
        const MutexLock lock(mutex_);
        parked_.push_back(std::move(opened));
      }
    } catch (...) {
      report_swallowed("closing memory of another process");
      (void)opened.release();  // as in close()
    }
    any = any || is_dropped;
  }
  return any;
}

// When the device has no memory left, what a capture kept mapped may be given up:
// its sender may have ended, and then it is memory of nobody else's.
class DropParked final : public c10::FreeMemoryCallback {
 public:
  bool Execute() override { return OpenedHandles::instance().drop_parked(); }
};

// Memory that a MemPool's own allocator gave. Where that did not take it from
// cudaMalloc, CUDA refuses, as it does natively.
cca::ShareableHandle share_of_provider(ByteRange segment, Address address) {
  cudaIpcMemHandle_t cuda_handle;
  C10_CUDA_CHECK(cudaIpcGetMemHandle(&cuda_handle, reinterpret_cast<void*>(segment.offset)));
  IpcHandle handle;
  handle.cuda_ipc.assign(reinterpret_cast<const char*>(&cuda_handle), sizeof(cuda_handle));
  cca::ShareableHandle shared;
  shared.offset = static_cast<std::ptrdiff_t>(address - segment.offset);
  shared.handle = encode(handle, kShareableHandleVersion);
  return shared;
}

// Pages may be given back while the receiver still reads them, and what is not a block
// has no length that the handle could tell.
[[noreturn]] void throw_not_to_be_sent(const Pool* pool, Address address) {
  std::string text = "invalid device pointer: " + format_hex(address);
  if (pool != nullptr && !pool->held_pages(align_down(address - pool->base(), pool->page_size()), 1).empty()) {
    text = "tensors over explicit pages (aligned(), elastic(), sparse(), VirtualMemoryPool.tensor(); here at " +
           format_hex(address) + ") cannot be sent to another process: send a copy, tensor.clone()";
  } else {
    text +=
        pool == nullptr && !CudaAllocator::instance()->is_cached()
            ? ": caching is off, and memory that torch_vmm did not allocate is sent to no other process"
            : ": no live block of torch_vmm's is there. An alias() cannot be sent to another process either: send a "
              "copy, tensor.clone()";
  }
  throw_torch_error(text);
}

}  // namespace

// ------------------------------------------------------------- other processes

cca::ShareableHandle CudaAllocator::shareIpcHandle(void* block) {
  const auto address = reinterpret_cast<Address>(block);
  c10::DeviceIndex device = 0;
  try {
    Runtime::require_own_process();
    Pool* pool = Runtime::pool_at(block);
    if (pool == nullptr) {
      if (const auto segment = ProvidedMemory::segment_at(address); segment.has_value()) {
        return share_of_provider(*segment, address);
      }
    }
    const std::size_t bytes = pool == nullptr ? 0 : pool->block_size(address);
    if (bytes == 0) throw_not_to_be_sent(pool, address);
    device = static_cast<c10::DeviceIndex>(pool->device());
    const std::vector<ChunkView> chunks = pool->chunks_to_export(address, bytes);
    VMM_CHECK(!chunks.empty(), "a block of ", bytes, " bytes with nothing under it");
    Driver& driver = Runtime::room_of(*pool).memory.driver();
    cca::ShareableHandle shared;
    shared.offset = static_cast<std::ptrdiff_t>(address - chunks.front().address);
    shared.handle = IpcExports::instance().share(driver, address, chunks, kShareableHandleVersion);
    return shared;
  } catch (const VmmError&) {
    rethrow_as_torch(DeviceKind::cuda, device, 0);
  }
}

std::shared_ptr<void> CudaAllocator::getIpcDevPtr(std::string handle) {
  const c10::DeviceIndex device = current_device();
  try {
    Runtime::require_own_process();
    return OpenedHandles::instance().open(handle, device);
  } catch (const VmmError&) {
    rethrow_as_torch(DeviceKind::cuda, device, 0);
  }
}

// --------------------------------------------------------------- other devices

// torch asks once for each pair, before the first copy between the two.
void CudaAllocator::enablePeerAccess(c10::DeviceIndex device, c10::DeviceIndex peer) {
  // For what cudaMalloc gives; it leaves mapped memory alone.
  const c10::cuda::CUDAGuard guard(device);
  const cudaError_t enabled = cudaDeviceEnablePeerAccess(peer, 0);
  if (enabled == cudaErrorPeerAccessAlreadyEnabled) {
    (void)cudaGetLastError();
  } else {
    C10_CUDA_CHECK(enabled);
  }
  try {
    throw_if_failed(Runtime::room(DeviceKind::cuda, peer).memory.add_accessor(Location::on_device(device)),
                    "letting GPU " + std::to_string(device) + " into the pools of GPU " + std::to_string(peer));
    OpenedHandles::instance().add_peer(device, peer);
  } catch (const VmmError&) {
    rethrow_as_torch(DeviceKind::cuda, peer, 0);
  }
}

// Mapped memory is a peer's only where access was given; without, plain
// cudaMemcpyAsync between devices fails and cudaMemcpyPeerAsync does it.
cudaError_t CudaAllocator::memcpyAsync(void* to, int to_device, const void* from, int from_device, std::size_t bytes,
                                       cudaStream_t stream, bool p2p_enabled) {
  if (p2p_enabled || to_device == from_device) {
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
  }
  return cudaMemcpyPeerAsync(to, to_device, from, from_device, bytes, stream);
}

}  // namespace vmm

namespace c10 {
REGISTER_FREE_MEMORY_CALLBACK(torch_vmm_opened_handles, vmm::DropParked)
}  // namespace c10
