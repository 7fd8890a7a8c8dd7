#include "torch_adapter/cuda_allocator.h"

#include <c10/core/AllocatorConfig.h>
#include <c10/core/impl/GPUTrace.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/Exception.h>
#include <c10/util/env.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <utility>

#include "base/errors.h"
#include "base/units.h"
#include "core/device/ladder.h"
#include "core/device/provided_memory.h"
#include "ipc/ipc_exports.h"
#include "torch_adapter/cuda_callbacks.h"
#include "torch_adapter/current_device.h"
#include "torch_adapter/errors.h"
#include "torch_adapter/history.h"
#include "torch_adapter/mempool_provider.h"
#include "torch_adapter/out_of_memory.h"
#include "torch_adapter/profiler.h"
#include "torch_adapter/routing.h"
#include "torch_adapter/shared_by_all.h"
#include "torch_adapter/statistics.h"
#include "torch_adapter/strict.h"

namespace vmm {

namespace {

c10::Device cuda_device(int ordinal) { return {c10::kCUDA, static_cast<c10::DeviceIndex>(ordinal)}; }

inline void trace_allocation(void* block) {
  const c10::impl::PyInterpreter* interpreter = c10::impl::GPUTrace::get_trace();
  if (interpreter != nullptr) [[unlikely]] {
    (*interpreter)->trace_gpu_memory_allocation(c10::kCUDA, reinterpret_cast<std::uintptr_t>(block));
  }
}

inline void trace_free(void* block) {
  const c10::impl::PyInterpreter* interpreter = c10::impl::GPUTrace::get_trace();
  if (interpreter != nullptr) [[unlikely]] {
    (*interpreter)->trace_gpu_memory_deallocation(c10::kCUDA, reinterpret_cast<std::uintptr_t>(block));
  }
}

// What is made while the cache is disabled comes from CUDA itself and goes
// back there, past all counters.
void free_uncached(void* block) {
  if (block == nullptr || Runtime::in_child()) return;
  trace_free(block);
  C10_CUDA_CHECK_WARN(cudaFree(block));
}

// Sets a flag of the thread for as long as it lives.
class WhileSet {
 public:
  explicit WhileSet(bool& flag) : flag_(flag), was_set_(std::exchange(flag, true)) {}
  WhileSet(const WhileSet&) = delete;
  WhileSet& operator=(const WhileSet&) = delete;
  ~WhileSet() { flag_ = was_set_; }

 private:
  bool& flag_;
  const bool was_set_;
};

// What the calling thread takes and frees is told to no profiler: it is the memory of a
// torch.cuda.MemPool of another allocator, which tells of its own blocks.
thread_local bool provides = false;
bool is_profiled() { return profiler_is_on() && !provides; }

// While the other allocator asks: native holds its device's lock then. So on_pressure is not
// called, nor a stack of Python's taken: whoever has the GIL may be waiting for that lock.
class Providing {
 public:
  Providing() : told_(provides) {}

 private:
  const WhileSet told_;
  const Ladder::NoRelief no_relief_;
};

bool is_native_current() { return cca::get()->name() == "native"; }

std::atomic<bool> cuda_malloc_async_was_asked{false};

// The calling thread's torch finds native's name in our place.
thread_local bool answers_as_native = false;

// torch reads its settings when the first is needed, and throws, each time, when
// they name a backend and whoever allocates then has another name. So settings
// that name one are read before we have taken its place. What is wrong with them
// torch says itself, when it needs them.
void read_backend_setting() {
  auto settings = c10::utils::get_env("PYTORCH_CUDA_ALLOC_CONF");
  if (!settings.has_value()) settings = c10::utils::get_env("PYTORCH_ALLOC_CONF");
  if (!settings.has_value() || settings->find("backend") == std::string::npos) return;
  if (cca::get()->name() == "cudaMallocAsync") cuda_malloc_async_was_asked.store(true, std::memory_order_relaxed);
  try {
    (void)cca::CUDAAllocatorConfig::per_process_memory_fraction();
    (void)c10::CachingAllocator::AcceleratorAllocatorConfig::max_split_size();
  } catch (const c10::Error&) {
  }
}

void warn_of_cuda_malloc_async() {
  c10::warn(c10::Warning(c10::UserWarning(), c10::SourceLocation{nullptr, nullptr, 0},
                         "torch_vmm: backend:cudaMallocAsync has no effect: torch_vmm is the allocator, and takes "
                         "memory from the driver itself.",
                         /*verbatim=*/false));
}

// Whoever looks for errors with compute-sanitizer wants to see each tensor as
// an allocation of its own. torch takes either name on every platform.
bool caching_is_ruled_out() {
  static const bool kRuledOut = c10::utils::check_env("PYTORCH_NO_CUDA_MEMORY_CACHING") == true ||
                                c10::utils::check_env("PYTORCH_NO_HIP_MEMORY_CACHING") == true;
  return kRuledOut;
}

void* allocate_uncached(std::size_t bytes) {
  if (bytes == 0) return nullptr;
  void* block = nullptr;
  C10_CUDA_CHECK(cudaMalloc(&block, bytes));
  trace_allocation(block);
  return block;
}

// Bytes of the live block at the address, or 0. Memory that a MemPool's own
// allocator provides is asked first: it may have come out of a pool of ours.
std::size_t block_size(void* block) {
  if (const std::size_t bytes = ProvidedMemory::block_size(reinterpret_cast<Address>(block)); bytes != 0) return bytes;
  const Pool* pool = Runtime::pool_at(block);
  return pool == nullptr ? 0 : pool->block_size(reinterpret_cast<Address>(block));
}

// What the calling thread's cache says of a block that is freed.
[[gnu::always_inline]] inline BlockCaches::Put keep_freed(void* block) {
  return ProvidedMemory::any_segment() ? BlockCaches::Put::unknown : BlockCaches::put(reinterpret_cast<Address>(block));
}

// The rest of its way.
bool free_live(void* block, BlockCaches::Put put) {
  return ProvidedMemory::free(reinterpret_cast<Address>(block)) || Runtime::free_unkept(block, put);
}

// Nobody is to be told of a free, before it or after.
bool is_unwatched() {
  return !IpcExports::any_shared() && c10::impl::GPUTrace::get_trace() == nullptr && !History::is_on() &&
         !profiler_is_on();
}

// The profiler counts what blocks take, not what was asked for.
void report_allocation(const DeviceRoom& room, void* block) {
  report_to_profiler(room, block, static_cast<std::int64_t>(block_size(block)), cuda_device(room.ordinal));
}

// Frees a block and tells the profiler, with the totals after it.
bool free_and_report(void* block) {
  const auto address = reinterpret_cast<Address>(block);
  const auto provided = ProvidedMemory::asked_at(address);
  const Pool* pool = Runtime::pool_at(block);
  if (!provided.has_value() && pool == nullptr) return false;
  const std::size_t bytes = provided.has_value() ? provided->size : pool->block_size(address);
  const int ordinal = provided.has_value() ? provided->device : pool->device();
  if (!free_live(block, BlockCaches::Put::unknown)) return false;  // with its last block the pool may be gone
  if (const DeviceRoom* room = Runtime::made(DeviceKind::cuda, ordinal); room != nullptr) {
    report_to_profiler(*room, block, -static_cast<std::int64_t>(bytes), cuda_device(ordinal));
  }
  return true;
}

// torch takes no smaller max_split_size.
constexpr std::size_t kLeastOversize = 20 * kMiB;

// From which size on torch's setting has requests counted as oversize: it may change.
void watch_oversize(DeviceRoom& room) {
  const std::size_t bytes = c10::CachingAllocator::AcceleratorAllocatorConfig::max_split_size();
  if (room.oversize.exchange(bytes, std::memory_order_relaxed) != bytes) [[unlikely]]
    room.memory.set_oversize(bytes);
}

// Once for each device, before its first allocation: what torch's settings and
// whoever listens ask of its memory.
void set_up(DeviceRoom& room) {
  watch_oversize(room);
  room.is_set_up.store(true, std::memory_order_relaxed);
  know_contexts_of(room.memory.driver());
  History::instance().watch(room);
}

DeviceRoom& room_of(c10::DeviceIndex device) {
  DeviceRoom& room = Runtime::room(DeviceKind::cuda, device);
  if (!room.is_set_up.load(std::memory_order_relaxed)) [[unlikely]]
    set_up(room);
  return room;
}

// Out of the private pool that torch routes this request to, or the model's
// own pool. `part` is then the private one.
void* allocate_routed(DeviceRoom& room, std::size_t bytes, Stream stream, std::shared_ptr<Pool>* part) {
  const std::shared_ptr<Pool>& model = current_pool(room);
  if (room.private_pools.any_route() && !provides) [[unlikely]] {
    std::shared_ptr<ForeignMemory> foreign;
    *part = room.private_pools.route(model, stream, &foreign);
    if (*part != nullptr) return reinterpret_cast<void*>(room.memory.allocate(**part, bytes, stream));
    if (foreign != nullptr) return reinterpret_cast<void*>(foreign->allocate(bytes, stream));
    return reinterpret_cast<void*>(room.memory.allocate(*model, bytes, stream));
  }
  return reinterpret_cast<void*>(room.memory.allocate_anew(*model, bytes, stream));
}

// Out of what the calling thread keeps, or nullptr. The history is not asked here: while
// anybody listens nothing is kept.
[[gnu::always_inline]] inline void* take_kept(c10::DeviceIndex device, std::size_t bytes, Stream stream) {
  DeviceRoom* const room = Runtime::made(DeviceKind::cuda, device);
  if (room == nullptr || !room->is_set_up.load(std::memory_order_relaxed) || room->private_pools.any_route() ||
      ProvidedMemory::any_unfinished()) [[unlikely]]
    return nullptr;
  void* const block = reinterpret_cast<void*>(room->memory.take_kept(*current_pool(*room), bytes, stream));
  if (block == nullptr) [[unlikely]]
    return nullptr;
  trace_allocation(block);
  if (is_profiled()) [[unlikely]]
    report_allocation(*room, block);
  return block;
}

// The way of a request that no kept block serves.
[[gnu::noinline]] void* allocate_anew(c10::DeviceIndex device, std::size_t bytes, cudaStream_t stream) {
  if (bytes >= kExbibyte) throw_beyond_exbibyte(DeviceKind::cuda, device, bytes);
  const History::Scope scope(cca::RecordContext::STATE);
  std::shared_ptr<Pool> part;
  try {
    DeviceRoom& room = room_of(device);
    if (bytes > kLeastOversize) watch_oversize(room);
    if (ProvidedMemory::any_unfinished()) [[unlikely]]
      ProvidedMemory::finish_closed(room.memory, /*wait=*/false);
    void* block = allocate_routed(room, bytes, stream, &part);
    trace_allocation(block);
    if (is_profiled()) [[unlikely]]
      report_allocation(room, block);
    return block;
  } catch (const OutOfMemoryError& error) {
    // Not made: there were no addresses for its default pool.
    DeviceRoom* room = error.is_told ? nullptr : Runtime::made(DeviceKind::cuda, device);
    if (room != nullptr) {
      tell_cuda_out_of_memory(*room, part != nullptr ? *part : *current_pool(*room), bytes, stream);
    }
    rethrow_as_torch(DeviceKind::cuda, device, bytes);
  } catch (const VmmError&) {
    rethrow_as_torch(DeviceKind::cuda, device, bytes);
  }
}

// The way of a free that the thread's cache does not take.
[[gnu::noinline]] void free_unkept(void* block, BlockCaches::Put put) {
  IpcExports::before_free(reinterpret_cast<Address>(block));
  const History::Scope scope(cca::RecordContext::ALL);
  const bool freed = is_profiled() ? free_and_report(block) : free_live(block, put);
  if (!freed) {
    report_swallowed("free", (format_hex(reinterpret_cast<Address>(block)) + " is no live block of a pool").c_str());
  }
}

// REQUIRES: not 0 bytes.
[[gnu::always_inline]] inline void* allocate_some(c10::DeviceIndex device, std::size_t bytes, cudaStream_t stream) {
  require_model(DeviceKind::cuda, device, bytes);
  void* const kept = take_kept(device, bytes, stream);
  return kept != nullptr ? kept : allocate_anew(device, bytes, stream);
}

// In the default pool, whatever model is open.
void* allocate_for_all(c10::DeviceIndex device, std::size_t bytes, cudaStream_t stream) {
  const DeviceRoom& room = Runtime::room(DeviceKind::cuda, device);
  if (current_pool(room) == room.default_pool) return allocate_some(device, bytes, stream);
  const ModelContextPtr context = enter_model(room.default_pool);
  try {
    void* const block = allocate_some(device, bytes, stream);
    leave_model(context);
    return block;
  } catch (...) {
    leave_model(context);
    throw;
  }
}

// Number 0 is each device's default stream, which CUDA calls nullptr: no need to ask.
inline cudaStream_t current_stream(c10::DeviceIndex device) {
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream(device);
  return stream.id() == 0 ? nullptr : stream.stream();
}

}  // namespace

bool run_cuda_free_memory_callbacks() {
  if (!CudaAllocator::is_current()) return false;
  bool freed = false;
  for (const auto& name : c10::FreeCudaMemoryCallbacksRegistry()->Keys()) {
    freed |= c10::FreeCudaMemoryCallbacksRegistry()->Create(name)->Execute();
  }
  return freed;
}

void tell_cuda_out_of_memory(DeviceRoom& room, const Pool& asker, std::size_t bytes, Stream stream) {
  const History::Scope scope(cca::RecordContext::STATE);
  if (is_profiled()) {
    report_out_of_memory_to_profiler(DeviceKind::cuda, room.ordinal, align_up(bytes, kBlockAlignment),
                                     cuda_device(room.ordinal));
  }
  History::instance().out_of_memory(room, asker, bytes, stream);
}

// The base's own functions are never reached: whatever would call them is
// overridden.
CudaAllocator::CudaAllocator()
    : CUDAPluggableAllocator(
          [](std::size_t, int, cudaStream_t) -> void* {
            throw_torch_error("torch_vmm: the base's malloc is not used");
          },
          [](void*, std::size_t, int, cudaStream_t) {}) {
  read_backend_setting();
}

void CudaAllocator::enable(bool value) {
  is_enabled_.store(value, std::memory_order_relaxed);
  is_cached_.store(value && !caching_is_ruled_out(), std::memory_order_relaxed);
}

const std::shared_ptr<CudaAllocator>& CudaAllocator::instance() {
  static const auto* const kInstance = new std::shared_ptr<CudaAllocator>(new CudaAllocator);
  return *kInstance;
}

std::string CudaAllocator::name() { return answers_as_native ? "native" : "torch_vmm"; }

bool CudaAllocator::is_current() { return cca::get() == instance().get(); }

bool CudaAllocator::is_providing() { return provides; }

void* CudaAllocator::allocate_at_entry_point(int device, std::size_t bytes, cudaStream_t stream) {
  TORCH_CHECK(device >= 0 && device < Runtime::kMostDevices, "torch_vmm_malloc: there is no device cuda:", device);
  std::optional<Providing> providing;
  if (is_native_current() || is_asking_provider()) providing.emplace();
  return allocate_on(static_cast<c10::DeviceIndex>(device), bytes, stream);
}

void CudaAllocator::free_at_entry_point(void* block) noexcept {
  std::optional<Providing> providing;
  if (is_native_current() || is_asking_provider()) providing.emplace();
  free_block(block);
}

void CudaAllocator::init(int device_count) {
  if (initialized()) return;
  {
    // The environment may name a backend only now.
    const WhileSet as_native(answers_as_native);
    read_backend_setting();
  }
  device_count_.store(device_count, std::memory_order_relaxed);
  // torch's swap leaves the registry that torch.accelerator reads alone; this
  // is the one place that every way of swapping us in comes through.
  if (is_current()) c10::SetAllocator(c10::kCUDA, this, 0);
  if (cuda_malloc_async_was_asked.load(std::memory_order_relaxed)) warn_of_cuda_malloc_async();
  enable(isEnabled());
  is_initialized_.store(true, std::memory_order_release);
  for (DeviceRoom* room : Runtime::all_made(DeviceKind::cuda)) set_up(*room);
  const double fraction = cca::CUDAAllocatorConfig::per_process_memory_fraction();
  if (fraction >= 1.0) return;
  for (int device = 0; device < device_count; ++device)
    setMemoryFraction(fraction, static_cast<c10::DeviceIndex>(device));
}

c10::DeviceIndex CudaAllocator::current_device() const {
  return device_count_.load(std::memory_order_relaxed) == 1 ? c10::DeviceIndex{0} : current_cuda_device();
}

// ------------------------------------------------------------------ allocation

void* CudaAllocator::allocate_on(c10::DeviceIndex device, std::size_t bytes, cudaStream_t stream) {
  return bytes == 0 ? nullptr : allocate_some(device, bytes, stream);
}

void CudaAllocator::free_block(void* block) noexcept {
  // Memory inherited through a fork is the parent's to free.
  if (block == nullptr || Runtime::in_child()) return;
  try {
    trace_free(block);
    auto put = BlockCaches::Put::unknown;
    if (!IpcExports::any_shared() && !is_profiled()) [[likely]] {
      put = keep_freed(block);
      if (put == BlockCaches::Put::kept) [[likely]]
        return;
    }
    free_unkept(block, put);
  } catch (...) {
    report_swallowed("free");
  }
}

c10::DataPtr CudaAllocator::allocate(std::size_t bytes) {
  const c10::DeviceIndex device = current_device();
  if (!is_cached()) [[unlikely]] {
    if (bytes >= kExbibyte) throw_beyond_exbibyte(DeviceKind::cuda, device, bytes);
    void* block = allocate_uncached(bytes);
    return {block, block, &free_uncached, cuda_device(device)};
  }
  if (bytes == 0) return {nullptr, nullptr, &free_block, cuda_device(device)};
  if (is_for_workspace(bytes, __builtin_return_address(0))) [[unlikely]] {
    void* block = allocate_for_all(device, bytes, current_stream(device));
    return {block, block, &free_block, cuda_device(device)};
  }
  void* block = allocate_some(device, bytes, current_stream(device));
  return {block, block, &free_block, cuda_device(device)};
}

c10::DeleterFnPtr CudaAllocator::raw_deleter() const { return is_cached() ? &free_block : &free_uncached; }

void* CudaAllocator::raw_alloc(std::size_t bytes) {
  const c10::DeviceIndex device = current_device();
  return raw_alloc_with_stream(bytes, current_stream(device));
}

void* CudaAllocator::raw_alloc_with_stream(std::size_t bytes, cudaStream_t stream) {
  if (is_current()) return is_cached() ? allocate_on(current_device(), bytes, stream) : allocate_uncached(bytes);
  // The provider of a torch.cuda.MemPool of another allocator, which goes on
  // looking for memory elsewhere when it is given none.
  const Providing providing;
  try {
    return allocate_on(current_device(), bytes, stream);
  } catch (const c10::OutOfMemoryError&) {
    return nullptr;
  }
}

void CudaAllocator::raw_delete(void* block) {
  if (block == nullptr || Runtime::in_child()) return;
  // Whoever is told needs to know first that it is a live block. Else one look finds
  // it and frees it.
  if (is_unwatched()) [[likely]] {
    try {
      const BlockCaches::Put put = keep_freed(block);
      if (put == BlockCaches::Put::kept || free_live(block, put)) [[likely]]
        return;
    } catch (...) {
      report_swallowed("free");
      return;
    }
  } else if (block_size(block) != 0) {
    std::optional<Providing> providing;
    if (!is_current()) providing.emplace();
    free_block(block);
    return;
  }
  // Nor is a block that was freed before, nor an address inside one.
  if (is_cached() || Runtime::pool_at(block) != nullptr) throw_invalid_pointer(block);
  free_uncached(block);
}

void CudaAllocator::recordStream(const c10::DataPtr& block, c10::cuda::CUDAStream stream) {
  if (block.get() == nullptr) return;
  const bool is_own = block.get_deleter() == &free_block;
  Pool* pool = Runtime::pool_at(block.get());
  // A block of another allocator (shared by another process, say) is its own
  // allocator's business, as in torch. What others show of ours is ours: a buffer,
  // of which a view taken in by DLPack may begin anywhere, and an alias.
  SecondMapping* const second = is_own || pool != nullptr ? nullptr : Runtime::second_mapping_at(block.get());
  if (!is_own && pool == nullptr && second == nullptr) return;
  Runtime::require_own_process();
  DeviceStreams& device = room_of(stream.device_index()).memory.streams();
  if (is_own && ProvidedMemory::record_stream(reinterpret_cast<Address>(block.get()), stream.stream(), device)) return;
  if (second != nullptr) second->record_stream(stream.stream(), device);
  if (pool == nullptr) return;
  pool->record_stream(reinterpret_cast<Address>(block.get()), stream.stream(), &device);
}

VMM_SINCE_TORCH_2_13(c10::DataPtr CudaAllocator::allocateWithAddress(std::size_t bytes, void* address) {
  const c10::DeviceIndex device = current_device();
  if (bytes == 0) return {nullptr, nullptr, &free_block, cuda_device(device)};
  if (!is_cached()) throw_torch_error("torch_vmm: allocateWithAddress: caching is disabled");
  Pool* const pool = Runtime::pool_at(address);
  if (pool == nullptr || pool->device() != device) {
    throw_torch_error("torch_vmm: allocateWithAddress: no pool of GPU " + std::to_string(device) + " holds " +
                      format_hex(reinterpret_cast<Address>(address)));
  }
  const History::Scope scope(cca::RecordContext::STATE);
  DeviceRoom& room = Runtime::room_of(*pool);
  const Stream stream = c10::cuda::getCurrentCUDAStream(device).stream();
  try {
    const Address given = room.memory.allocate_at(*pool, reinterpret_cast<Address>(address), bytes, stream);
    auto* const block = reinterpret_cast<void*>(given);
    trace_allocation(block);
    if (is_profiled()) report_allocation(room, block);
    return {block, block, &free_block, cuda_device(device)};
  } catch (const OutOfMemoryError& error) {
    if (!error.is_told) tell_cuda_out_of_memory(room, *pool, bytes, stream);
    rethrow_as_torch(DeviceKind::cuda, device, bytes);
  } catch (const VmmError&) {
    rethrow_as_torch(DeviceKind::cuda, device, bytes);
  }
})

}  // namespace vmm
