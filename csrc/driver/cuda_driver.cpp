// Devices, contexts and memory. Fences and content are in cuda_streams.cpp, what packs it
// in cuda_packing.cpp, the driver's own pools in cuda_native_pools.cpp.
#include "driver/cuda_driver.h"

#include <fcntl.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <optional>
#include <utility>

#include "driver/device_fault.h"

namespace vmm {
namespace {

// By number: older headers, with which the package must build too, lack the
// names; older drivers answer CUDA_ERROR_INVALID_VALUE, which reads as "no".
constexpr auto kHostNumaSupported = static_cast<CUdevice_attribute>(141);  // ..HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT..
constexpr auto kHostSupported = static_cast<CUdevice_attribute>(145);      // ..HOST_VIRTUAL_MEMORY_MANAGEMENT..
constexpr auto kHostNumaId = static_cast<CUdevice_attribute>(134);

// No GPU can map more: the largest address space there is has 57 bits. CUDA
// calls such a size invalid, the contract calls it too much.
constexpr std::size_t kLargestReservation = std::size_t{1} << 57;

int attribute(const CudaApi& api, CUdevice device, CUdevice_attribute which) {
  int value = 0;
  return api.cuDeviceGetAttribute(&value, which, device) == CUDA_SUCCESS ? value : 0;
}

CUmemAllocationProp properties(CUmemLocation where) {
  CUmemAllocationProp asked{};
  asked.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  asked.location = where;
  return asked;
}

CUmemLocation host_location_near(const CudaApi& api, CUdevice device) {
  if (attribute(api, device, kHostNumaSupported) != 0) {
    return {CU_MEM_LOCATION_TYPE_HOST_NUMA, std::max(0, attribute(api, device, kHostNumaId))};
  }
  return {CU_MEM_LOCATION_TYPE_HOST, 0};
}

}  // namespace

// -- What there is.

bool CudaDriver::is_installed(std::string* why_not) { return CudaApi().load(why_not); }

std::unique_ptr<Driver> CudaDriver::make(std::string* why_not) {
  CudaApi api;
  if (!api.load(why_not)) return nullptr;
  int count = 0;
  CUresult result = api.cuInit(0);
  if (result == CUDA_SUCCESS) result = api.cuDeviceGetCount(&count);
  if (result != CUDA_SUCCESS || count == 0) {
    *why_not =
        "no usable NVIDIA GPU: " + (result == CUDA_SUCCESS ? "none visible" : api.status(result, "cuInit").text());
    const char* const visible = std::getenv("CUDA_VISIBLE_DEVICES");
    if (visible != nullptr) *why_not += "; CUDA_VISIBLE_DEVICES is '" + std::string(visible) + "'";
    *why_not += "; see what nvidia-smi shows, or give device=\"cpu\"";
    return nullptr;
  }
  Devices devices;
  std::size_t granularity = 2 * kMiB;
  for (int ordinal = 0; ordinal < std::min(count, AddressBook::kMaxDevices); ++ordinal) {
    devices.push_back(std::make_unique<Device>());
    ask(api, ordinal, devices.back().get());
    granularity = std::max(granularity, devices.back()->capabilities.granularity);
  }
  return std::unique_ptr<Driver>(new CudaDriver(api, std::move(devices), granularity));
}

void CudaDriver::ask(const CudaApi& api, int ordinal, Device* device) {
  const std::string who = "device " + std::to_string(ordinal);
  if (const CUresult result = api.cuDeviceGet(&device->handle, ordinal); result != CUDA_SUCCESS) {
    device->missing = who + ": " + api.status(result, "cuDeviceGet").text();
    return;
  }
  std::array<char, 256> name{};
  Capabilities& can = device->capabilities;
  if (api.cuDeviceGetName(name.data(), static_cast<int>(name.size()), device->handle) == CUDA_SUCCESS) {
    can.name = name.data();
  }
  if (attribute(api, device->handle, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) == 0) {
    device->missing = who + " (" + can.name + "): virtual memory management " +
                      "(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) is not supported";
    return;
  }
  const CUmemAllocationProp asked = properties({CU_MEM_LOCATION_TYPE_DEVICE, device->handle});
  for (const auto kind : {CU_MEM_ALLOC_GRANULARITY_MINIMUM, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED}) {
    std::size_t bytes = 0;
    const CUresult result = api.cuMemGetAllocationGranularity(&bytes, &asked, kind);
    if (result != CUDA_SUCCESS || !is_power_of_two(bytes)) {
      device->missing = who + " (" + can.name +
                        "): no allocation granularity: " + api.status(result, "cuMemGetAllocationGranularity").text();
      return;
    }
    can.granularity = std::max(can.granularity, bytes);
  }
  std::size_t total = 0;
  if (api.cuDeviceTotalMem(&total, device->handle) == CUDA_SUCCESS) can.total_memory = total;
  can.exportable = attribute(api, device->handle, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED) != 0;
  can.gpu_direct_rdma =
      attribute(api, device->handle, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED) != 0;
  can.host_located =
      attribute(api, device->handle, kHostNumaSupported) != 0 || attribute(api, device->handle, kHostSupported) != 0;
  if (!api.lacks_for_pools.empty()) {
    device->missing_pools = "the NVIDIA driver is too old for memory pools of its own: it lacks " +
                            api.lacks_for_pools + "; CUDA 11.2 (driver 460) and newer have them";
  } else if (attribute(api, device->handle, CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED) == 0) {
    device->missing_pools =
        who + " (" + can.name + "): memory pools (CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED) are not supported";
  }
}

CudaDriver::CudaDriver(const CudaApi& api, Devices devices, std::size_t granularity)
    : api_(api), devices_(std::move(devices)), granularity_(granularity), book_(granularity) {
  for (const auto& device : devices_) device->capabilities.granularity = granularity_;
  host_location_ = host_location_near(api_, devices_.front()->handle);
  watch_forks(this);
}

CudaDriver::~CudaDriver() {
  unwatch_forks(this);
  if (!alive()) return;
  for (std::size_t ordinal = 0; ordinal < devices_.size(); ++ordinal) {
    const auto& device = devices_[ordinal];
    if (device->context.load() == nullptr) continue;
    if (CUstream reading = device->reading.load(); reading != nullptr) {
      const Current current(*this, static_cast<int>(ordinal));
      answer(api_.cuStreamDestroy(reading), "cuStreamDestroy").ignore();
    }
    answer(api_.cuDevicePrimaryCtxRelease(device->handle), "cuDevicePrimaryCtxRelease").ignore();
  }
}

int CudaDriver::device_count() const { return alive() ? static_cast<int>(devices_.size()) : 0; }

Status CudaDriver::check_device(int device, const char* call) const {
  if (!alive()) return gone(call);
  if (!has_device(device)) return refuse("a device that does not exist");
  if (!device_at(device).missing.empty()) return {StatusCode::not_supported, call};
  return {};
}

Status CudaDriver::capabilities(int device, Capabilities* out) const {
  if (const Status checked = check_device(device, "capabilities"); !checked.ok()) return checked;
  *out = device_at(device).capabilities;
  return {};
}

std::string CudaDriver::missing(int device) const {
  if (!alive()) return "the CUDA driver has shut down, or this process is a forked child";
  if (has_device(device)) return device_at(device).missing;
  return "no device " + std::to_string(device) + "; visible: " + std::to_string(devices_.size());
}

Status CudaDriver::memory_info(int device, MemoryInfo* out) const {
  if (const Status checked = check_device(device, "memory_info"); !checked.ok()) return checked;
  const Current current(*this, device);
  if (!current.status().ok()) return current.status();
  MemoryInfo info;
  const Status asked = answer(api_.cuMemGetInfo(&info.free, &info.total), "cuMemGetInfo");
  if (asked.ok()) *out = info;
  return asked;
}

// -- Contexts.

Status CudaDriver::answer(CUresult result, const char* call) const {
  if (result == CUDA_SUCCESS) return {};
  if (result == CUDA_ERROR_DEINITIALIZED) gone_.store(true, std::memory_order_relaxed);
  if (result == CUDA_ERROR_ILLEGAL_ADDRESS) note_device_fault(call);
  return api_.status(result, call);
}

Status CudaDriver::context_of(int device, CUcontext* out) const {
  Device& its = device_at(device);
  *out = its.context.load(std::memory_order_acquire);
  if (*out != nullptr) return {};
  const MutexLock lock(context_mutex_);
  *out = its.context.load(std::memory_order_relaxed);
  if (*out != nullptr) return {};
  const Status retained = answer(api_.cuDevicePrimaryCtxRetain(out, its.handle), "cuDevicePrimaryCtxRetain");
  if (retained.ok()) its.context.store(*out, std::memory_order_release);
  return retained;
}

bool CudaDriver::current_context(const void** out) const {
  CUcontext now = nullptr;
  if (!alive() || api_.cuCtxGetCurrent(&now) != CUDA_SUCCESS) return false;
  *out = now;
  return true;
}

const void* CudaDriver::used_context(int device) const {
  return has_device(device) ? device_at(device).context.load(std::memory_order_acquire) : nullptr;
}

CudaDriver::Current::Current(const CudaDriver& driver, int device) : driver_(driver) {
  status_ = driver.context_of(device, &context_);
  if (!status_.ok()) return;
  CUcontext now = nullptr;
  status_ = driver.answer(driver.api_.cuCtxGetCurrent(&now), "cuCtxGetCurrent");
  if (!status_.ok() || now == context_) return;
  status_ = driver.answer(driver.api_.cuCtxPushCurrent(context_), "cuCtxPushCurrent");
  pushed_ = status_.ok();
}

CudaDriver::Current::~Current() {
  CUcontext popped = nullptr;
  if (pushed_) driver_.answer(driver_.api_.cuCtxPopCurrent(&popped), "cuCtxPopCurrent").ignore();
}

int CudaDriver::device_for_host() {
  if (const int chosen = device_for_host_.load(std::memory_order_relaxed); chosen >= 0) return chosen;
  const auto is_used = [](const auto& device) { return device->context.load(std::memory_order_acquire) != nullptr; };
  const auto used = std::find_if(devices_.begin(), devices_.end(), is_used);
  int none = -1;
  const int found = used == devices_.end() ? 0 : static_cast<int>(used - devices_.begin());
  return device_for_host_.compare_exchange_strong(none, found, std::memory_order_relaxed) ? found : none;
}

CUmemLocation CudaDriver::location(Location where) const {
  if (where.kind == Location::Kind::host) return host_location_;
  return {CU_MEM_LOCATION_TYPE_DEVICE, device_at(where.device).handle};
}

// -- Address space.

Status CudaDriver::reserve(std::size_t size, std::size_t alignment, Address* out) {
  if (!alive()) return gone("reserve");
  {
    const MutexLock lock(mutex_);
    if (const char* const why = book_.check_reserve(size, alignment)) return refuse(why);
  }
  if (size > kLargestReservation) return {StatusCode::out_of_memory, "reserve"};
  CUdeviceptr got = 0;
  const Status reserved = answer(api_.cuMemAddressReserve(&got, size, alignment, 0, 0), "cuMemAddressReserve");
  if (!reserved.ok()) return reserved;
  if (!is_aligned(got, alignment)) {
    answer(api_.cuMemAddressFree(got, size), "cuMemAddressFree").ignore();
    return {StatusCode::not_supported, "cuMemAddressReserve with this alignment"};
  }
  try {
    const MutexLock lock(mutex_);
    book_.add_reservation(got, size);
  } catch (...) {
    answer(api_.cuMemAddressFree(got, size), "cuMemAddressFree").ignore();
    throw;
  }
  *out = got;
  return {};
}

Status CudaDriver::unreserve(Address address, std::size_t size) {
  if (!alive()) return gone("unreserve");
  {
    const MutexLock lock(mutex_);
    if (const char* const why = book_.check_unreserve(address, size)) return refuse(why);
    book_.drop_reservation(address);
  }
  const Status freed = answer(api_.cuMemAddressFree(address, size), "cuMemAddressFree");
  if (!freed.ok()) {
    const MutexLock lock(mutex_);
    book_.add_reservation(address, size);
  }
  return freed;
}

// -- Physical chunks.

Status CudaDriver::create(const ChunkSpec& spec, ChunkHandle* out) {
  if (!alive()) return gone("create");
  if (spec.size == 0) return refuse("create of size zero");
  if (!is_aligned(spec.size, granularity_)) return refuse("create of a size that is no multiple of the granularity");
  const bool on_host = spec.location.kind == Location::Kind::host;
  const int device = on_host ? 0 : spec.location.device;
  if (const Status checked = check_device(device, "create"); !checked.ok()) return checked;
  const Capabilities& can = device_at(device).capabilities;
  if (on_host && !can.host_located) return {StatusCode::not_supported, "create in host memory"};
  // Memory of CU_MEM_LOCATION_TYPE_HOST cannot be shared between processes.
  if (spec.exportable && (!can.exportable || (on_host && host_location_.type == CU_MEM_LOCATION_TYPE_HOST))) {
    return {StatusCode::not_supported, "create of an exportable chunk"};
  }
  const Current current(*this, on_host ? device_for_host() : device);
  if (!current.status().ok()) return current.status();
  CUmemAllocationProp asked = properties(location(spec.location));
  if (spec.exportable) asked.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  if (!on_host && can.gpu_direct_rdma) asked.allocFlags.gpuDirectRDMACapable = 1;
  Chunk chunk;
  chunk.size = spec.size;
  chunk.exportable = spec.exportable;
  const RelaxedCapture relaxed(api_);
  const Status created = answer(api_.cuMemCreate(&chunk.handle, spec.size, &asked, 0), "cuMemCreate");
  if (!created.ok()) return created;
  return note(chunk, out);
}

// The chunk has a name from now on. Where there is no memory to note it, CUDA has it back.
Status CudaDriver::note(const Chunk& chunk, ChunkHandle* out) {
  try {
    const MutexLock lock(mutex_);
    *out = next_chunk_++;
    chunks_.emplace(*out, chunk);
  } catch (...) {
    answer(api_.cuMemRelease(chunk.handle), "cuMemRelease").ignore();
    throw;
  }
  return {};
}

Status CudaDriver::release(ChunkHandle handle) {
  if (!alive()) return gone("release");
  Chunks::node_type noted;
  {
    const MutexLock lock(mutex_);
    noted = chunks_.extract(handle);
    if (noted.empty()) return refuse("release of an unknown chunk");
  }
  const RelaxedCapture relaxed(api_);
  const Status released = answer(api_.cuMemRelease(noted.mapped().handle), "cuMemRelease");
  if (!released.ok()) {
    const MutexLock lock(mutex_);
    chunks_.insert(std::move(noted));
  }
  return released;
}

// -- Mappings. The book is changed before CUDA is, and back if CUDA refuses, so
// that two threads cannot both pass the check.

Status CudaDriver::map(Address address, std::size_t size, ChunkHandle handle) {
  if (!alive()) return gone("map");
  CUmemGenericAllocationHandle physical = 0;
  const MutexLock changing(changing_);
  {
    const MutexLock lock(mutex_);
    if (const char* const why = book_.check_map(address, size)) return refuse(why);
    const auto found = chunks_.find(handle);
    if (found == chunks_.end()) return refuse("map of an unknown chunk");
    if (found->second.size != size) return refuse("map of a part of a chunk");
    physical = found->second.handle;
    Mapping mapping;
    mapping.size = size;
    mapping.chunk = handle;
    book_.add_mapping(address, mapping);
    if (found->second.anchor == 0) found->second.anchor = address;
  }
  const RelaxedCapture relaxed(api_);
  const Status mapped = answer(api_.cuMemMap(address, size, 0, physical, 0), "cuMemMap");
  if (!mapped.ok()) {
    const MutexLock lock(mutex_);
    book_.drop_run(address, size);
    forget_anchor(handle, address);
  }
  return mapped;
}

// The chunk's mapping at `address` has gone.
void CudaDriver::forget_anchor(ChunkHandle chunk, Address address) {
  const auto found = chunks_.find(chunk);
  if (found != chunks_.end() && found->second.anchor == address) found->second.anchor = 0;
}

std::vector<CudaDriver::Chunk> CudaDriver::without_anchor(Address address, std::size_t size) {
  std::vector<Chunk> found;
  const auto end = book_.run_end(address, size);
  for (auto mapping = book_.run_begin(address); mapping != end; ++mapping) {
    const auto chunk = chunks_.find(mapping->second.chunk);  // one that was released is mapped nowhere again
    if (chunk != chunks_.end() && chunk->second.anchor == 0) found.push_back(chunk->second);
  }
  return found;
}

Status CudaDriver::unmap(Address address, std::size_t size) {
  if (!alive()) return gone("unmap");
  AddressBook::Mappings run;
  const MutexLock changing(changing_);
  {
    const MutexLock lock(mutex_);
    if (const char* const why = book_.check_run(address, size)) return refuse(why);
    run = book_.take_run(address, size);
  }
  const RelaxedCapture relaxed(api_);
  const Status unmapped = answer(api_.cuMemUnmap(address, size), "cuMemUnmap");
  if (!unmapped.ok()) {
    const MutexLock lock(mutex_);
    book_.put_back(std::move(run));
    return unmapped;
  }
  {
    const MutexLock lock(mutex_);
    for (const auto& [at, mapping] : run) forget_anchor(mapping.chunk, at);
  }
  if (host_accessible_.load(std::memory_order_relaxed) == 0) return {};
  for (const auto& [at, mapping] : run) {
    if (mapping.access() != Access::none) host_accessible_.fetch_sub(1, std::memory_order_relaxed);
  }
  return {};
}

// A mapping that is made while its chunk has no anchor becomes that. Where it has gone, and
// another one gets other rights than it had, cuMemMap refuses the chunk everywhere (error
// 999) until it is mapped nowhere. So each such chunk has one more mapping meanwhile, which
// nobody may access (18 us). As well as it can: where that fails, so does a later map, which
// its caller survives. Seen with driver 580.159 on an H100 and an H200, of memory that may be
// used for GPUDirect RDMA.
class CudaDriver::Anchors {
 public:
  Anchors(const CudaDriver& driver, const std::vector<Chunk>& chunks) : driver_(driver) {
    for (const Chunk& chunk : chunks) reserved_ += chunk.size;
    if (reserved_ == 0) return;
    const CudaApi& api = driver_.api_;
    if (!driver_.answer(api.cuMemAddressReserve(&begin_, reserved_, 0, 0, 0), "cuMemAddressReserve").ok()) {
      reserved_ = 0;
      return;
    }
    for (const Chunk& chunk : chunks) {
      if (!driver_.answer(api.cuMemMap(begin_ + mapped_, chunk.size, 0, chunk.handle, 0), "cuMemMap").ok()) return;
      mapped_ += chunk.size;
    }
  }
  ~Anchors() {
    const CudaApi& api = driver_.api_;
    if (mapped_ != 0) driver_.answer(api.cuMemUnmap(begin_, mapped_), "cuMemUnmap").ignore();
    if (reserved_ != 0) driver_.answer(api.cuMemAddressFree(begin_, reserved_), "cuMemAddressFree").ignore();
  }
  Anchors(const Anchors&) = delete;
  Anchors& operator=(const Anchors&) = delete;

 private:
  const CudaDriver& driver_;
  CUdeviceptr begin_ = 0;
  std::size_t reserved_ = 0;  // bytes
  std::size_t mapped_ = 0;    // of these
};

Status CudaDriver::set_access(Address address, std::size_t size, Location who, Access access) {
  if (!alive()) return gone("set_access");
  const int device = who.kind == Location::Kind::host ? 0 : who.device;
  if (const Status checked = check_device(device, "set_access"); !checked.ok()) return checked;
  std::vector<Chunk> loose;
  const MutexLock changing(changing_);
  {
    const MutexLock lock(mutex_);
    if (const char* const why = book_.check_run(address, size)) return refuse(why);
    loose = without_anchor(address, size);
  }
  const Current current(*this, device);
  if (!current.status().ok()) return current.status();
  CUmemAccessDesc rights{};
  rights.location = location(who);
  rights.flags = access == Access::none   ? CU_MEM_ACCESS_FLAGS_PROT_NONE
                 : access == Access::read ? CU_MEM_ACCESS_FLAGS_PROT_READ
                                          : CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  const RelaxedCapture relaxed(api_);
  const Anchors anchors(*this, loose);
  const Status set = answer(api_.cuMemSetAccess(address, size, &rights, 1), "cuMemSetAccess");
  if (!set.ok()) return set;
  const MutexLock lock(mutex_);
  const auto end = book_.run_end(address, size);
  // The devices' rights are CUDA's business; the host's decide how to copy.
  if (who.kind != Location::Kind::host) return set;
  for (auto mapping = book_.run_begin(address); mapping != end; ++mapping) {
    const bool before = mapping->second.access() != Access::none;
    AddressBook::set_access(&mapping->second, who, access);
    const bool after = mapping->second.access() != Access::none;
    if (after && !before) host_accessible_.fetch_add(1, std::memory_order_relaxed);
    if (before && !after) host_accessible_.fetch_sub(1, std::memory_order_relaxed);
  }
  return {};
}

// -- Sharing.

Status CudaDriver::export_chunk(ChunkHandle handle, int* fd) {
  if (!alive()) return gone("export_chunk");
  CUmemGenericAllocationHandle physical = 0;
  {
    const MutexLock lock(mutex_);
    const auto found = chunks_.find(handle);
    if (found == chunks_.end()) return refuse("export of an unknown chunk");
    if (!found->second.exportable) return refuse("export of a chunk that was not created exportable");
    physical = found->second.handle;
  }
  int got = -1;
  const Status exported =
      answer(api_.cuMemExportToShareableHandle(&got, physical, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
             "cuMemExportToShareableHandle");
  if (exported.ok()) *fd = got;
  return exported;
}

Status CudaDriver::import_chunk(int fd, std::size_t size, ChunkHandle* out) {
  if (!alive()) return gone("import_chunk");
  if (size == 0 || !is_aligned(size, granularity_)) {
    return refuse("import of a size that is no multiple of the granularity");
  }
  if (::fcntl(fd, F_GETFD) < 0) return refuse("import of something that is no file descriptor");
  // Any context will do: the caller's, so that a process that uses another
  // device gets none on device 0.
  CUcontext now = nullptr;
  const Status asked = answer(api_.cuCtxGetCurrent(&now), "cuCtxGetCurrent");
  if (!asked.ok()) return asked;
  std::optional<Current> current;
  if (now == nullptr) {
    current.emplace(*this, 0);
    if (!current->status().ok()) return current->status();
  }
  Chunk chunk;
  chunk.size = size;
  chunk.exportable = true;
  // CUDA takes the descriptor in a pointer's place.
  void* const descriptor = reinterpret_cast<void*>(static_cast<std::uintptr_t>(fd));
  const Status imported =
      answer(api_.cuMemImportFromShareableHandle(&chunk.handle, descriptor, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
             "cuMemImportFromShareableHandle");
  if (!imported.ok()) return imported;
  return note(chunk, out);
}

}  // namespace vmm
