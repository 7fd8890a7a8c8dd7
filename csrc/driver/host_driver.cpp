#include "driver/host_driver.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/errors.h"
#include "driver/host_memory.h"
#include "driver/packing.h"
#include "driver/refusals.h"

namespace vmm {
namespace {

constexpr int kReservedFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

void* pointer(Address address) { return reinterpret_cast<void*>(address); }

int protection(Access access) {
  switch (access) {
    case Access::none:
      return PROT_NONE;
    case Access::read:
      return PROT_READ;
    case Access::read_write:
      return PROT_READ | PROT_WRITE;
  }
  return PROT_NONE;
}

// A file of `size` bytes for a chunk that other processes may be given. Sealed,
// since they hold the same file: whoever made it shorter would end everyone who
// touches what is cut off (SIGBUS).
Status make_exportable_file(std::size_t size, int* out) {
  const int fd = ::memfd_create("torch_vmm_exportable", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return status_from_errno("memfd_create", errno);
  Status made = resize_file(fd, size);
  if (made.ok() && ::fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    made = status_from_errno("fcntl", errno);
  }
  if (made.ok()) {
    *out = fd;
  } else {
    ::close(fd);
  }
  return made;
}

// Makes [address, address + size) inaccessible address space again.
Status reserve_again(Address address, std::size_t size) {
  if (::mmap(pointer(address), size, PROT_NONE, kReservedFlags | MAP_FIXED, -1, 0) == MAP_FAILED) {
    return status_from_errno("mmap", errno);
  }
  return {};
}

HostDriverOptions checked(HostDriverOptions options) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  if (!is_power_of_two(options.granularity) || options.granularity < page) {
    throw InvalidArgumentError("granularity " + std::to_string(options.granularity) +
                               " must be a power of two and at least the page size " + std::to_string(page));
  }
  if (options.device_count < 1 || options.device_count > AddressBook::kMaxDevices) {
    throw InvalidArgumentError("device_count " + std::to_string(options.device_count) + " must be 1 to " +
                               std::to_string(AddressBook::kMaxDevices));
  }
  if (options.device_bytes == 0) options.device_bytes = usable_memory(options.files_root) / 10 * 8;
  options.device_bytes = align_down(options.device_bytes, options.granularity);
  if (options.device_bytes == 0) throw InvalidArgumentError("device_bytes must be at least one granule");
  return options;
}

}  // namespace

HostDriver::HostDriver(const HostDriverOptions& options)
    : options_(checked(options)),
      most_pieces_(most_mappings(options_.files_root) / 8 * 7),
      book_(options_.granularity) {
  {
    const MutexLock lock(mutex_);
    for (int device = 0; device < options_.device_count; ++device) {
      devices_.emplace_back().limit_bytes = options_.device_bytes;
    }
    host_.limit_bytes = align_down(usable_memory(options_.files_root), options_.granularity);
  }
  watch_forks(this);
}

HostDriver::~HostDriver() {
  unwatch_forks(this);
  const MutexLock lock(mutex_);
  for (const auto& [address, size] : book_.reservations()) ::munmap(pointer(address), size);
  for (const auto& [handle, chunk] : chunks_) {
    if (chunk.own_fd) ::close(chunk.fd);
  }
}

// -- What there is.

int HostDriver::device_count() const { return alive() ? options_.device_count : 0; }

Status HostDriver::check_device(int device, const char* call) const {
  if (!alive()) return gone(call);
  if (!has_device(device)) return refuse("a device that does not exist");
  return {};
}

Status HostDriver::capabilities(int device, Capabilities* out) const {
  if (const Status checked = check_device(device, "capabilities"); !checked.ok()) return checked;
  *out = Capabilities{};
  out->granularity = options_.granularity;
  out->total_memory = options_.device_bytes;
  out->exportable = true;
  out->host_located = true;
  out->name = "host";
  return {};
}

std::string HostDriver::missing(int device) const {
  if (!alive()) return "this process is a forked child: host pools stay with the parent";
  if (has_device(device)) return "";
  return "no device " + std::to_string(device) + "; there are " + std::to_string(options_.device_count);
}

Status HostDriver::memory_info(int device, MemoryInfo* out) const {
  if (const Status checked = check_device(device, "memory_info"); !checked.ok()) return checked;
  const MutexLock lock(mutex_);
  const Place& place = devices_[static_cast<std::size_t>(device)];
  *out = {place.limit_bytes - place.used_bytes, place.limit_bytes};
  return {};
}

// -- Address space.

// An eighth is the rest of the process': its libraries, threads, and what it unmaps in
// the middle of others. With none left nothing works any more, undoing neither.
Status HostDriver::check_pieces(std::size_t more) const {
  if (pieces_ + more <= most_pieces_) return {};
  return {StatusCode::out_of_memory,
          "mapping host memory: the process would have more mappings than seven eighths of vm.max_map_count (raise it "
          "with sysctl, or map less, or in larger chunks)"};
}

Status HostDriver::reserve(std::size_t size, std::size_t alignment, Address* out) {
  if (!alive()) return gone("reserve");
  const MutexLock lock(mutex_);
  if (const char* const why = book_.check_reserve(size, alignment)) return refuse(why);
  // mmap() aligns to its page only: take `alignment` more and cut both ends.
  if (sum_overflows(size, alignment)) return {StatusCode::out_of_memory, "reserve"};
  if (const Status enough = check_pieces(1); !enough.ok()) return enough;
  const std::size_t asked = size + alignment;
  void* const got = ::mmap(nullptr, asked, PROT_NONE, kReservedFlags, -1, 0);
  if (got == MAP_FAILED) return status_from_errno("mmap", errno);
  const auto begin = reinterpret_cast<Address>(got);
  const Address aligned = align_up(begin, alignment);
  if (aligned > begin) ::munmap(got, aligned - begin);
  if (begin + asked > aligned + size) ::munmap(pointer(aligned + size), begin + asked - aligned - size);
  try {
    book_.add_reservation(aligned, size);
  } catch (...) {
    ::munmap(pointer(aligned), size);
    throw;
  }
  ++pieces_;
  *out = aligned;
  return {};
}

Status HostDriver::unreserve(Address address, std::size_t size) {
  if (!alive()) return gone("unreserve");
  const MutexLock lock(mutex_);
  if (const char* const why = book_.check_unreserve(address, size)) return refuse(why);
  if (::munmap(pointer(address), size) != 0) return status_from_errno("munmap", errno);
  book_.drop_reservation(address);
  --pieces_;
  return {};
}

// -- Physical chunks.

Status HostDriver::create(const ChunkSpec& spec, ChunkHandle* out) {
  if (!alive()) return gone("create");
  if (spec.size == 0) return refuse("create of size zero");
  if (!is_aligned(spec.size, options_.granularity)) {
    return refuse("create of a size that is no multiple of the granularity");
  }
  if (!has_location(spec.location)) return refuse("create on a device that does not exist");

  const MutexLock lock(mutex_);
  Place& place =
      spec.location.kind == Location::Kind::host ? host_ : devices_[static_cast<std::size_t>(spec.location.device)];
  if (spec.size > place.limit_bytes - place.used_bytes) return {StatusCode::out_of_memory, "create"};
  // First: what there is no room to note would stay for ever.
  const auto noted = chunks_.try_emplace(next_chunk_).first;
  Chunk& chunk = noted->second;
  chunk.size = spec.size;
  chunk.place = &place;
  chunk.exportable = spec.exportable;
  chunk.own_fd = spec.exportable;
  Status made;
  try {
    made = spec.exportable ? make_exportable_file(spec.size, &chunk.fd) : place.arena.take(spec.size, &chunk.offset);
  } catch (...) {
    chunks_.erase(noted);
    throw;
  }
  if (!made.ok()) {
    chunks_.erase(noted);
    return made;
  }
  if (!spec.exportable) chunk.fd = place.arena.fd();
  place.used_bytes += spec.size;
  *out = next_chunk_++;
  return {};
}

Status HostDriver::release(ChunkHandle handle) {
  if (!alive()) return gone("release");
  Chunk dead;
  {
    const MutexLock lock(mutex_);
    const auto found = chunks_.find(handle);
    if (found == chunks_.end() || found->second.released) return refuse("release of an unknown chunk");
    found->second.released = true;
    if (found->second.mappings > 0) return {};
    dead = found->second;
    chunks_.erase(found);
  }
  give_back({&dead, 1});
  return {};
}

void HostDriver::give_back(std::span<const Chunk> chunks) {
  for (const Chunk& chunk : chunks) {
    if (chunk.own_fd) ::close(chunk.fd);
    if (chunk.place == nullptr) continue;
    // The arena's file, once open, stays the same: emptying needs no lock.
    const bool emptied = !chunk.own_fd && HostArena::empty(chunk.fd, chunk.offset, chunk.size);
    const MutexLock lock(mutex_);
    chunk.place->used_bytes -= chunk.size;
    if (!emptied) continue;
    try {
      chunk.place->arena.give_back(chunk.offset, chunk.size);
    } catch (const std::bad_alloc&) {
      // It costs a stretch of a file that is larger than any memory.
    }
  }
}

// -- Mappings.

Status HostDriver::map(Address address, std::size_t size, ChunkHandle handle) {
  if (!alive()) return gone("map");
  const MutexLock lock(mutex_);
  if (const char* const why = book_.check_map(address, size)) return refuse(why);
  const auto found = chunks_.find(handle);
  if (found == chunks_.end() || found->second.released) return refuse("map of an unknown chunk");
  Chunk& chunk = found->second;
  if (chunk.size != size) return refuse("map of a part of a chunk");
  // It takes the place of a free stretch, and leaves what is left of that beside it.
  const std::size_t more = book_.gaps_beside(address, size);
  if (const Status enough = check_pieces(more); !enough.ok()) return enough;
  Mapping mapping;
  mapping.size = size;
  mapping.chunk = handle;
  book_.add_mapping(address, mapping);  // first: there may be no memory to note it
  if (::mmap(pointer(address), size, PROT_NONE, MAP_SHARED | MAP_FIXED, chunk.fd, static_cast<off_t>(chunk.offset)) ==
      MAP_FAILED) {
    const Status failed = status_from_errno("mmap", errno);
    book_.drop_run(address, size);
    reserve_again(address, size).ignore();  // mmap() may have dropped what was there
    return failed;
  }
  pieces_ += more;
  ++chunk.mappings;
  return {};
}

Status HostDriver::unmap(Address address, std::size_t size) {
  if (!alive()) return gone("unmap");
  std::vector<Chunk> dead;
  {
    const MutexLock lock(mutex_);
    if (const char* const why = book_.check_run(address, size)) return refuse(why);
    if (const Status dropped = reserve_again(address, size); !dropped.ok()) return dropped;
    // One free stretch, with those beside it, in the place of the mappings.
    pieces_ = pieces_ + 1 - book_.gaps_beside(address, size);
    const auto end = book_.run_end(address, size);
    for (auto mapping = book_.run_begin(address); mapping != end; ++mapping) {
      --pieces_;
      const auto found = chunks_.find(mapping->second.chunk);
      if (--found->second.mappings > 0 || !found->second.released) continue;
      dead.push_back(found->second);
      chunks_.erase(found);
    }
    book_.drop_run(address, size);
  }
  give_back(dead);
  return {};
}

Status HostDriver::set_access(Address address, std::size_t size, Location who, Access access) {
  if (!alive()) return gone("set_access");
  if (!has_location(who)) return refuse("set_access for a device that does not exist");
  const MutexLock lock(mutex_);
  if (const char* const why = book_.check_run(address, size)) return refuse(why);
  const auto end = book_.run_end(address, size);
  // One mprotect() for each stretch of equal rights, mostly one in all.
  for (auto mapping = book_.run_begin(address); mapping != end;) {
    const Address begin = mapping->first;
    Address stop = begin;
    Access wanted = Access::none;
    for (; mapping != end; ++mapping) {
      Mapping after = mapping->second;
      AddressBook::set_access(&after, who, access);
      if (stop > begin && after.access() != wanted) break;
      wanted = after.access();
      stop += after.size;
    }
    if (::mprotect(pointer(begin), stop - begin, protection(wanted)) == 0) continue;
    const Status failed = status_from_errno("mprotect", errno);
    for (auto old = book_.run_begin(address); old != end && old->first < stop; ++old) {
      static_cast<void>(::mprotect(pointer(old->first), old->second.size, protection(old->second.access())));
    }
    return failed;
  }
  for (auto mapping = book_.run_begin(address); mapping != end; ++mapping) {
    AddressBook::set_access(&mapping->second, who, access);
  }
  return {};
}

// -- Sharing.

Status HostDriver::export_chunk(ChunkHandle handle, int* fd) {
  if (!alive()) return gone("export_chunk");
  const MutexLock lock(mutex_);
  const auto found = chunks_.find(handle);
  if (found == chunks_.end() || found->second.released) return refuse("export of an unknown chunk");
  if (!found->second.exportable) return refuse("export of a chunk that was not created exportable");
  const int copy = ::fcntl(found->second.fd, F_DUPFD_CLOEXEC, 0);
  if (copy < 0) return status_from_errno("fcntl", errno);
  *fd = copy;
  return {};
}

Status HostDriver::import_chunk(int fd, std::size_t size, ChunkHandle* out) {
  if (!alive()) return gone("import_chunk");
  if (size == 0 || !is_aligned(size, options_.granularity)) {
    return refuse("import of a size that is no multiple of the granularity");
  }
  struct stat about {};
  if (::fstat(fd, &about) != 0) return refuse("import of something that is no file descriptor");
  if (!S_ISREG(about.st_mode) || static_cast<std::size_t>(about.st_size) != size) {
    return refuse("import of a file descriptor that is no chunk of this size");
  }
  const MutexLock lock(mutex_);
  const auto at = chunks_.try_emplace(next_chunk_).first;  // first: there may be no memory
  Chunk& chunk = at->second;
  chunk.size = size;
  chunk.fd = ::fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (chunk.fd < 0) {
    const int error = errno;
    chunks_.erase(at);
    return status_from_errno("fcntl", error);
  }
  chunk.own_fd = true;
  chunk.exportable = true;
  *out = next_chunk_++;
  return {};
}

// -- Fences. All work is done at once, so a fence has always passed.

Status HostDriver::check_fence(Fence fence, const char* call) const {
  if (!alive()) return gone(call);
  FenceTable::Entry entry;
  return fences_.find(fence, &entry) ? Status::okay() : refuse("an unknown fence");
}

Status HostDriver::create_fence(int device, Fence* out) {
  if (const Status checked = check_device(device, "create_fence"); !checked.ok()) return checked;
  const Fence fence = fences_.add({nullptr, device});
  if (fence == nullptr) return {StatusCode::out_of_memory, "create_fence"};
  *out = fence;
  return {};
}

Status HostDriver::destroy_fence(Fence fence) {
  if (!alive()) return gone("destroy_fence");
  FenceTable::Entry entry;
  return fences_.remove(fence, &entry) ? Status::okay() : refuse("an unknown fence");
}

Status HostDriver::record(Fence fence, Stream /*stream*/) { return check_fence(fence, "record"); }
Status HostDriver::query(Fence fence) { return check_fence(fence, "query"); }
Status HostDriver::wait(Fence fence) { return check_fence(fence, "wait"); }
Status HostDriver::stream_wait(int /*device*/, Stream /*stream*/, Fence fence) {
  return check_fence(fence, "stream_wait");
}
Status HostDriver::synchronize(int device) { return check_device(device, "synchronize"); }

// A name that no other stream of the process has: an address of our own.
Status HostDriver::create_stream(int device, Stream* out) {
  if (const Status checked = check_device(device, "create_stream"); !checked.ok()) return checked;
  const MutexLock lock(mutex_);
  *out = streams_.emplace_back(std::make_unique<char>()).get();
  return {};
}
Status HostDriver::destroy_stream(int device, Stream stream) {
  if (const Status checked = check_device(device, "destroy_stream"); !checked.ok()) return checked;
  const MutexLock lock(mutex_);
  const auto found = std::find_if(streams_.begin(), streams_.end(),
                                  [stream](const std::unique_ptr<char>& each) { return each.get() == stream; });
  if (found == streams_.end()) return refuse("an unknown stream");
  streams_.erase(found);
  return {};
}

// It is the CPU that copies.
Status HostDriver::pin_host(Address address, std::size_t size) {
  if (!alive()) return gone("pin");
  return address == 0 || size == 0 ? refuse("pin of nothing") : Status::okay();
}
Status HostDriver::unpin_host(Address address) {
  if (!alive()) return gone("unpin");
  return address == 0 ? refuse("unpin of nothing") : Status::okay();
}

// -- Content. No lock while it is moved: the caller keeps what it copies mapped.

std::optional<HostDriver::Stretch> HostDriver::stretch_at(Address address) const {
  const MutexLock lock(mutex_);
  const auto mapping = book_.mapping_at(address);
  if (mapping == book_.mappings().end()) return std::nullopt;
  const std::size_t inside = address - mapping->first;
  const auto chunk = chunks_.find(mapping->second.chunk);
  if (chunk == chunks_.end()) return std::nullopt;
  return Stretch{chunk->second.fd, chunk->second.offset + inside, mapping->second.size - inside};
}

void HostDriver::zero(Address address, std::size_t size) {
  while (size > 0) {
    const std::optional<Stretch> stretch = stretch_at(address);
    if (!stretch) {  // memory that is not ours
      std::memset(pointer(address), 0, size);
      return;
    }
    const std::size_t part = std::min(size, stretch->size);
    HostArena::zero(stretch->fd, stretch->offset, part, pointer(address));
    address += part;
    size -= part;
  }
}

Status HostDriver::copy_async(int device, Address to, Address from, std::size_t size, Stream /*stream*/) {
  if (const Status checked = check_device(device, "copy_async"); !checked.ok()) return checked;
  if (size == 0) return refuse("copy of size zero");
  std::memmove(pointer(to), pointer(from), size);
  return {};
}

Status HostDriver::fill_async(int device, Address address, std::uint8_t byte, std::size_t size, Stream /*stream*/) {
  if (const Status checked = check_device(device, "fill_async"); !checked.ok()) return checked;
  if (size == 0) return refuse("fill of size zero");
  if (byte == 0) {
    zero(address, size);
  } else {
    std::memset(pointer(address), byte, size);
  }
  return {};
}

Status HostDriver::read(int device, void* to, Address from, std::size_t size) {
  if (const Status checked = check_device(device, "read"); !checked.ok()) return checked;
  if (size == 0) return refuse("read of size zero");
  std::memcpy(to, pointer(from), size);
  return {};
}

std::string HostDriver::missing_packing(int device) { return missing(device); }

Status HostDriver::pack_async(int device, packing::Step step, const packing::Job& job, Stream /*stream*/) {
  if (const Status checked = check_device(device, "pack_async"); !checked.ok()) return checked;
  if (job.count == 0) return refuse("packing of nothing");
  packing::run(step, job, *std::make_unique<packing::Scratch>());
  return {};
}

// -- Forks. The lock is taken on one side of the fork and given back on both,
// which the analysis cannot follow.

void HostDriver::before_fork() VMM_NO_THREAD_SAFETY_ANALYSIS { mutex_.lock(); }

void HostDriver::after_fork_in_parent() VMM_NO_THREAD_SAFETY_ANALYSIS { mutex_.unlock(); }

void HostDriver::after_fork_in_child() VMM_NO_THREAD_SAFETY_ANALYSIS {
  // A child's child has private mappings already; mapping the file again would
  // throw away what the child has written.
  if (alive()) {
    for (const auto& [address, mapping] : book_.mappings()) {
      const auto found = chunks_.find(mapping.chunk);
      if (found == chunks_.end()) continue;
      const Chunk& chunk = found->second;
      if (::mmap(pointer(address), mapping.size, protection(mapping.access()), MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE,
                 chunk.fd, static_cast<off_t>(chunk.offset)) == MAP_FAILED) {
        // Rather a fault in the child than a write into the parent's memory.
        static_cast<void>(::mprotect(pointer(address), mapping.size, PROT_NONE));
      }
    }
    alive_.store(false, std::memory_order_relaxed);
  }
  mutex_.unlock();
}

}  // namespace vmm
