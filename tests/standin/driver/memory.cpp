#include "memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <iterator>

#include "machine.h"

namespace standin {
namespace {

using vmm::Access;
using vmm::Location;
using vmm::Status;
using vmm::StatusCode;

// 64 bytes of cuIpcGetMemHandle(), and what we put into them.
struct BlockName {
  std::uint64_t magic;
  std::int64_t pid;
  std::int64_t fd;
  std::uint64_t mapped;
  std::uint64_t size;
};
static_assert(sizeof(BlockName) <= sizeof(CUipcMemHandle));
constexpr std::uint64_t kBlockMagic = 0x6b636f6c42646e53;

CUresult result_of(const Status& status) {
  switch (status.code()) {
    case StatusCode::ok:
      return CUDA_SUCCESS;
    case StatusCode::out_of_memory:
      return CUDA_ERROR_OUT_OF_MEMORY;
    case StatusCode::invalid_argument:
      return CUDA_ERROR_INVALID_VALUE;
    case StatusCode::not_supported:
      return CUDA_ERROR_NOT_SUPPORTED;
    default:
      return CUDA_ERROR_UNKNOWN;
  }
}

bool is_host(CUmemLocationType type) {
  return type == CU_MEM_LOCATION_TYPE_HOST || type == CU_MEM_LOCATION_TYPE_HOST_NUMA;
}

// False: a location that there is not.
bool read_location(const CUmemLocation& from, Location* out) {
  if (is_host(from.type)) {
    *out = Location::on_host();
    return true;
  }
  *out = Location::on_device(from.id);
  return from.type == CU_MEM_LOCATION_TYPE_DEVICE && has_device(from.id);
}

vmm::HostDriverOptions options(int devices, std::size_t device_bytes) {
  vmm::HostDriverOptions chosen;
  chosen.granularity = Memory::kGranularity;
  chosen.device_count = devices;
  chosen.device_bytes = device_bytes;
  return chosen;
}

}  // namespace

Memory& Memory::instance() {
  static auto* const kInstance = new Memory(device_count(), standin::device_bytes());
  return *kInstance;
}

Memory::Memory(int devices, std::size_t device_bytes) : host_(options(devices, device_bytes)) {}

// -- Address space, chunks, mappings.

CUresult Memory::reserve(std::size_t size, std::size_t alignment, CUdeviceptr* out) {
  vmm::Address got = 0;
  const std::lock_guard<std::mutex> lock(mutex_);
  const CUresult result = result_of(host_.reserve(size, std::max(alignment, kGranularity), &got));
  if (result != CUDA_SUCCESS) return result;
  book_.add_reservation(got, size);
  *out = got;
  return CUDA_SUCCESS;
}

CUresult Memory::unreserve(CUdeviceptr address, std::size_t size) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const CUresult result = result_of(host_.unreserve(address, size));
  if (result == CUDA_SUCCESS) book_.drop_reservation(address);
  return result;
}

CUresult Memory::create(std::size_t size, const CUmemAllocationProp& how, CUmemGenericAllocationHandle* out) {
  vmm::ChunkSpec spec;
  spec.size = size;
  if (how.type != CU_MEM_ALLOCATION_TYPE_PINNED) return CUDA_ERROR_INVALID_VALUE;
  if (!read_location(how.location, &spec.location)) return CUDA_ERROR_INVALID_DEVICE;
  if ((how.requestedHandleTypes & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) != 0) return CUDA_ERROR_NOT_SUPPORTED;
  spec.exportable = how.requestedHandleTypes != CU_MEM_HANDLE_TYPE_NONE;
  vmm::ChunkHandle chunk = 0;
  const std::lock_guard<std::mutex> lock(mutex_);
  const CUresult result = result_of(host_.create(spec, &chunk));
  if (result != CUDA_SUCCESS) return result;
  chunks_[chunk] = {spec.location, false};
  *out = chunk;
  return CUDA_SUCCESS;
}

CUresult Memory::release(CUmemGenericAllocationHandle chunk) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = chunks_.find(chunk);
  if (found == chunks_.end() || found->second.released) die("cuMemRelease", "of no chunk: " + std::to_string(chunk));
  found->second.released = true;
  return result_of(host_.release(chunk));
}

CUresult Memory::map(CUdeviceptr address, std::size_t size, CUmemGenericAllocationHandle chunk) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = chunks_.find(chunk);
  if (found == chunks_.end() || found->second.released) die("cuMemMap", "of no chunk: " + std::to_string(chunk));
  if (found->second.is_stuck) return CUDA_ERROR_UNKNOWN;
  const CUresult result = result_of(host_.map(address, size, chunk));
  if (result != CUDA_SUCCESS) return result;
  Chunk& mapped = found->second;
  ++mapped.mappings;
  if (mapped.anchor == 0) mapped.anchor = address;
  vmm::Mapping mapping;
  mapping.size = size;
  mapping.chunk = chunk;
  book_.add_mapping(address, mapping);
  return CUDA_SUCCESS;
}

CUresult Memory::unmap(CUdeviceptr address, std::size_t size) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const CUresult result = result_of(host_.unmap(address, size));
  if (result != CUDA_SUCCESS) return result;
  const auto end = book_.run_end(address, size);
  for (auto mapping = book_.run_begin(address); mapping != end; ++mapping) {
    Chunk& chunk = chunks_.at(mapping->second.chunk);
    if (chunk.anchor == mapping->first) chunk.anchor = 0;
    if (--chunk.mappings == 0) chunk.is_stuck = false;
  }
  book_.drop_run(address, size);
  return CUDA_SUCCESS;
}

CUresult Memory::set_access(CUdeviceptr address, std::size_t size, const CUmemAccessDesc& who) {
  Location location;
  if (!read_location(who.location, &location)) return CUDA_ERROR_INVALID_DEVICE;
  const Access access = who.flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE ? Access::read_write
                        : who.flags == CU_MEM_ACCESS_FLAGS_PROT_READ    ? Access::read
                                                                        : Access::none;
  const std::lock_guard<std::mutex> lock(mutex_);
  const CUresult result = result_of(host_.set_access(address, size, location, access));
  if (result != CUDA_SUCCESS) return result;
  const auto end = book_.run_end(address, size);
  for (auto mapping = book_.run_begin(address); mapping != end; ++mapping) {
    Chunk& chunk = chunks_.at(mapping->second.chunk);
    const vmm::Mapping before = mapping->second;
    vmm::AddressBook::set_access(&mapping->second, location, access);
    const bool is_same = before.readers == mapping->second.readers && before.writers == mapping->second.writers;
    if (chunk.anchor == 0 && !is_same) chunk.is_stuck = true;
  }
  return CUDA_SUCCESS;
}

CUresult Memory::export_chunk(CUmemGenericAllocationHandle chunk, int* fd) {
  return result_of(host_.export_chunk(chunk, fd));
}

CUresult Memory::import_chunk(int device, int fd, CUmemGenericAllocationHandle* out) {
  struct stat about {};
  if (::fstat(fd, &about) != 0) return CUDA_ERROR_INVALID_VALUE;
  const auto size = static_cast<std::size_t>(about.st_size);
  vmm::ChunkHandle chunk = 0;
  const std::lock_guard<std::mutex> lock(mutex_);
  const CUresult result = result_of(host_.import_chunk(fd, size, &chunk));
  if (result != CUDA_SUCCESS) return result;
  chunks_[chunk] = {Location::on_device(device), false};
  *out = chunk;
  return CUDA_SUCCESS;
}

CUresult Memory::info(int device, std::size_t* free, std::size_t* total) {
  vmm::MemoryInfo info;
  const CUresult result = result_of(host_.memory_info(device, &info));
  *free = info.free;
  *total = info.total;
  return result;
}

// -- Blocks.

CUresult Memory::place_block(int device, std::size_t size, vmm::ChunkHandle chunk, bool opened, CUdeviceptr* out) {
  const std::size_t mapped = vmm::align_up(size, kGranularity);
  vmm::Address at = 0;
  if (const Status got = host_.reserve(mapped, kGranularity, &at); !got.ok()) return result_of(got);
  Status placed = host_.map(at, mapped, chunk);
  if (placed.ok()) placed = host_.set_access(at, mapped, Location::on_device(device), Access::read_write);
  if (!placed.ok()) {
    host_.unmap(at, mapped).ignore();
    host_.unreserve(at, mapped).ignore();
    return result_of(placed);
  }
  blocks_[at] = {size, mapped, device, chunk, -1, opened};
  *out = at;
  return CUDA_SUCCESS;
}

CUresult Memory::drop_block(CUdeviceptr address) {
  const auto found = blocks_.find(address);
  const Block block = found->second;
  blocks_.erase(found);
  freed_[address] = block.mapped;
  if (block.shared >= 0) ::close(block.shared);
  const Status unmapped = host_.unmap(address, block.mapped);
  const Status released = host_.release(block.chunk);
  return result_of(unmapped.ok() ? released : unmapped);
}

CUresult Memory::allocate(int device, std::size_t size, CUdeviceptr* out) {
  if (size == 0) return CUDA_ERROR_INVALID_VALUE;
  vmm::ChunkSpec spec;
  if (size > std::size_t{1} << 57U) return CUDA_ERROR_OUT_OF_MEMORY;
  spec.size = vmm::align_up(size, kGranularity);
  spec.location = Location::on_device(device);
  spec.exportable = true;  // any block can be shared
  vmm::ChunkHandle chunk = 0;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (const Status created = host_.create(spec, &chunk); !created.ok()) return result_of(created);
  const CUresult placed = place_block(device, size, chunk, false, out);
  if (placed != CUDA_SUCCESS) host_.release(chunk).ignore();
  return placed;
}

CUresult Memory::free(CUdeviceptr block) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = blocks_.find(block);
  if (found == blocks_.end() || found->second.opened) {
    die("cuMemFree",
        vmm::format_hex(block) + (range_at(freed_, block) != nullptr ? " was freed before" : " is no block"));
  }
  return drop_block(block);
}

int Memory::device_of_block(CUdeviceptr block) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = blocks_.find(block);
  return found == blocks_.end() ? -1 : found->second.device;
}

bool Memory::enable_peer(int device, int peer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return peers_.emplace(device, peer).second;
}

// -- Blocks of other processes: opened through the descriptor of the one that has them.

CUresult Memory::share_block(CUdeviceptr inside, CUipcMemHandle* out) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto found = blocks_.upper_bound(inside);
  if (found == blocks_.begin()) return CUDA_ERROR_INVALID_VALUE;
  --found;
  Block& block = found->second;
  if (inside - found->first >= block.mapped || block.opened) return CUDA_ERROR_INVALID_VALUE;
  if (block.shared < 0) {
    if (const Status shared = host_.export_chunk(block.chunk, &block.shared); !shared.ok()) return result_of(shared);
  }
  const BlockName name{kBlockMagic, ::getpid(), block.shared, block.mapped, block.size};
  *out = {};
  std::memcpy(out, &name, sizeof(name));
  return CUDA_SUCCESS;
}

CUresult Memory::open_block(int device, const CUipcMemHandle& handle, CUdeviceptr* out) {
  BlockName name{};
  std::memcpy(&name, &handle, sizeof(name));
  if (name.magic != kBlockMagic) return CUDA_ERROR_INVALID_VALUE;
  if (name.pid == ::getpid()) return CUDA_ERROR_INVALID_CONTEXT;  // as CUDA: a process does not open its own
  const std::string path = "/proc/" + std::to_string(name.pid) + "/fd/" + std::to_string(name.fd);
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return CUDA_ERROR_INVALID_HANDLE;
  vmm::ChunkHandle chunk = 0;
  const std::lock_guard<std::mutex> lock(mutex_);
  const Status imported = host_.import_chunk(fd, name.mapped, &chunk);
  ::close(fd);
  if (!imported.ok()) return result_of(imported);
  const CUresult placed = place_block(device, name.size, chunk, true, out);
  if (placed != CUDA_SUCCESS) host_.release(chunk).ignore();
  return placed;
}

CUresult Memory::close_block(CUdeviceptr block) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = blocks_.find(block);
  if (found == blocks_.end() || !found->second.opened)
    die("cuIpcCloseMemHandle", vmm::format_hex(block) + " was not opened");
  return drop_block(block);
}

// -- Pinned host memory.

CUresult Memory::allocate_host(std::size_t size, void** out) {
  if (size == 0) return CUDA_ERROR_INVALID_VALUE;
  const std::size_t whole = vmm::align_up(size, std::size_t{4096});
  void* const got = ::mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (got == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  const auto at = reinterpret_cast<CUdeviceptr>(got);
  const std::lock_guard<std::mutex> lock(mutex_);
  pinned_[at] = whole;
  host_blocks_.insert(at);
  *out = got;
  return CUDA_SUCCESS;
}

CUresult Memory::free_host(void* block) {
  const auto at = reinterpret_cast<CUdeviceptr>(block);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (host_blocks_.erase(at) == 0) die("cuMemFreeHost", vmm::format_hex(at) + " is no pinned block");
  ::munmap(block, pinned_[at]);
  pinned_.erase(at);
  return CUDA_SUCCESS;
}

CUresult Memory::pin(void* address, std::size_t size) {
  const auto at = reinterpret_cast<CUdeviceptr>(address);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (range_at(pinned_, at) != nullptr) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  pinned_[at] = size;
  return CUDA_SUCCESS;
}

CUresult Memory::unpin(void* address) {
  const auto at = reinterpret_cast<CUdeviceptr>(address);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (host_blocks_.count(at) != 0 || pinned_.erase(at) == 0) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  return CUDA_SUCCESS;
}

// -- What an address is.

const std::pair<const CUdeviceptr, std::size_t>* Memory::range_at(const Ranges& ranges, CUdeviceptr address) {
  auto found = ranges.upper_bound(address);
  if (found == ranges.begin()) return nullptr;
  --found;
  return address - found->first < found->second ? &*found : nullptr;
}

Memory::Place Memory::place_of(CUdeviceptr address) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (const auto* range = range_at(pinned_, address)) return {Kind::pinned, 0, range->first, range->second};
  if (auto block = blocks_.upper_bound(address); block != blocks_.begin()) {
    --block;
    if (address - block->first < block->second.mapped) {
      return {Kind::device, block->second.device, block->first, block->second.size};
    }
  }
  if (auto mapping = book_.mappings().upper_bound(address); mapping != book_.mappings().begin()) {
    --mapping;
    if (address - mapping->first < mapping->second.size) {
      return {Kind::device, chunks_[mapping->second.chunk].location.device, mapping->first, mapping->second.size};
    }
  }
  return {};
}

std::string Memory::problem(int device, CUdeviceptr address, std::size_t size, bool writes, bool across_devices) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const CUdeviceptr end = address + size;
  if (range_at(freed_, address) != nullptr || range_at(freed_, end - 1) != nullptr) return "was freed";
  if (auto block = blocks_.upper_bound(address); block != blocks_.begin()) {
    --block;
    const auto& [at, about] = *block;
    if (address - at < about.mapped) {
      if (end > at + about.mapped) return "ends beyond its block";
      const bool reached = about.device == device || across_devices || peers_.count({device, about.device}) != 0;
      return reached ? "" : "is of device " + std::to_string(about.device) + ", to which there is no peer access";
    }
  }
  const auto& reservations = book_.reservations();
  auto reservation = reservations.upper_bound(end - 1);
  if (reservation == reservations.begin()) return "";
  --reservation;
  if (address - reservation->first >= reservation->second) return "";  // the host's own
  const std::uint64_t bit = vmm::AddressBook::location_bit(Location::on_device(device));
  for (CUdeviceptr at = address; at < end;) {
    auto mapping = book_.mappings().upper_bound(at);
    if (mapping == book_.mappings().begin()) return "is not mapped";
    --mapping;
    if (at - mapping->first >= mapping->second.size) return "is not mapped at " + vmm::format_hex(at);
    const std::uint64_t allowed = writes ? mapping->second.writers : mapping->second.readers | mapping->second.writers;
    if ((allowed & bit) == 0)
      return std::string(writes ? "may not be written" : "may not be read") + " at " + vmm::format_hex(at);
    at = mapping->first + mapping->second.size;
  }
  return "";
}

void Memory::must_reach(const std::string& call, int device, CUdeviceptr address, std::size_t size, bool writes,
                        bool across_devices) {
  if (size == 0) return;
  const std::string why = problem(device, address, size, writes, across_devices);
  if (why.empty()) return;
  die(call, "on device " + std::to_string(device) + " " + (writes ? "writes " : "reads ") + std::to_string(size) +
                " bytes at " + vmm::format_hex(address) + ", which " + why);
}

}  // namespace standin
