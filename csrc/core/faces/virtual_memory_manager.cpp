#include "core/faces/virtual_memory_manager.h"

#include <algorithm>
#include <atomic>

#include "base/errors.h"

namespace vmm {

std::string VirtualAddressRange::text() const {
  return "VA[" + format_hex(base) + ".." + format_hex(end()) + ", " + std::to_string(size) +
         " bytes, align=" + std::to_string(alignment) + "]";
}

std::string PhysicalAllocation::text() const {
  return "PhysAlloc[handle=" + format_hex(handle) + ", " + std::to_string(size) +
         " bytes, dev=" + std::to_string(device) + "]";
}

namespace {
std::uint64_t next_manager_id() {
  static std::atomic<std::uint64_t> next{0};
  return ++next;
}

std::string of(const std::string& name, std::size_t value) { return name + " " + std::to_string(value); }

void require_multiple(std::size_t size, std::size_t grain, const std::string& name) {
  if (is_aligned(size, grain)) return;
  throw InvalidRangeError(size, of("size", size) + " must be a multiple of the " + name + ", " + std::to_string(grain) +
                                    " (" + format_bytes(grain) + ")");
}

constexpr const char* kOwner = "VirtualMemoryManager";  // in errors, as of a pool

}  // namespace

VirtualMemoryManager::VirtualMemoryManager(DeviceMemory& memory) : memory_(memory), id_(next_manager_id()) {}

VirtualMemoryManager::~VirtualMemoryManager() {
  try {
    close();
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): a held range keeps its memory; else no host memory
  }
}

void VirtualMemoryManager::require_open() const {
  if (closed_) throw InvalidArgumentError("the VirtualMemoryManager is closed");
}

VirtualMemoryManager::Range& VirtualMemoryManager::find(const VirtualAddressRange& range) const {
  require_open();
  if (range.manager != id_) throw InvalidArgumentError(range.text() + " belongs to another VirtualMemoryManager");
  const auto found = ranges_.find(range.base);
  if (found == ranges_.end() || found->second.mapped->size() != range.size || found->second.key != range.key) {
    throw InvalidArgumentError(range.text() + " has been released");
  }
  return found->second;
}

Chunk* VirtualMemoryManager::find(const PhysicalAllocation& physical) const {
  require_open();
  if (physical.manager != id_) throw InvalidArgumentError(physical.text() + " belongs to another VirtualMemoryManager");
  const auto found = physical_.find(physical.key);
  if (found == physical_.end()) throw InvalidArgumentError(physical.text() + " has been freed");
  return found->second;
}

// [offset, offset + size) lies in the range, and both are aligned.
void VirtualMemoryManager::require_inside(const VirtualAddressRange& range, std::size_t offset,
                                          std::size_t size) const {
  const std::size_t grain = granularity();
  const auto refuse = [&](const std::string& why) { throw InvalidRangeError(offset, size, range.size, why); };
  if (size == 0) refuse("size must be greater than 0");
  if (sum_overflows(offset, size)) refuse("offset + size overflows");
  if (!is_aligned(offset, grain)) refuse("offset must be a multiple of the granularity " + std::to_string(grain));
  if (!is_aligned(size, grain)) refuse("size must be a multiple of the granularity " + std::to_string(grain));
  if (offset + size > range.size) refuse("beyond the end of the range");
}

void VirtualMemoryManager::require_device(Location location) const {
  const int count = memory_.driver().device_count();
  if (location.kind == Location::Kind::host || (location.device >= 0 && location.device < count)) return;
  throw InvalidArgumentError("device " + std::to_string(location.device) + " does not exist: this machine has " +
                             std::to_string(count));
}

VirtualAddressRange VirtualMemoryManager::reserve(std::size_t size, std::size_t alignment) {
  const MutexLock lock(mutex_);
  require_open();
  const std::size_t grain = granularity();
  if (size == 0) throw InvalidRangeError(0, "size 0: give at least the granularity");
  if (alignment == kDefaultAlignment) alignment = grain;
  if (!is_power_of_two(alignment)) throw InvalidArgumentError(of("alignment", alignment) + " must be a power of two");
  if (alignment < grain) {
    throw InvalidArgumentError(of("alignment", alignment) + " is below the granularity " + std::to_string(grain));
  }
  require_multiple(size, grain, "granularity");
  require_multiple(size, alignment, "alignment");
  const std::string doing = "reserve(" + std::to_string(size) + ", " + std::to_string(alignment) + ")";
  Address base = 0;
  const Status status = memory_.driver().reserve(size, alignment, &base);
  if (status.code() == StatusCode::out_of_memory) {
    memory_.refuse(OutOfMemoryError(
        "reserve(" + std::to_string(size) + "): no such stretch of virtual addresses is free (" + status.text() + ")",
        size, 0, kMostAddresses, kOwner));
  }
  throw_if_failed(status, doing);
  try {
    Range range;
    range.mapped = std::make_unique<MappedRange>(memory_.driver(), base, size);
    range.alignment = alignment;
    range.key = ++last_key_;
    ranges_.emplace(base, std::move(range));
  } catch (...) {
    memory_.driver().unreserve(base, size).ignore();
    throw;
  }
  return {id_, last_key_, base, size, alignment};
}

void VirtualMemoryManager::release(const VirtualAddressRange& range) {
  const MutexLock lock(mutex_);
  const Range& found = find(range);
  const std::size_t mappings = found.mapped->live().size();
  if (mappings != 0) {
    // What is held is mapped.
    const std::size_t held = found.held.in({0, range.size}).count;
    throw StillInUseError(
        range.text() + " still holds " + format_count(mappings, "mapping") +
            (held == 0 ? "; unmap first"
                       : ", which " + format_count(held, "tensor") + " of tensor() show; drop those and unmap first"),
        found.mapped->mapped_bytes(), std::max(mappings, held));
  }
  const std::string doing = "release " + range.text();
  throw_if_failed(memory_.driver().unreserve(range.base, range.size), doing);
  ranges_.erase(range.base);
}

// Creates with no lock held: it may wait for the GPU.
PhysicalAllocation VirtualMemoryManager::alloc_physical(std::size_t size, Location location, bool exportable) {
  {
    const MutexLock lock(mutex_);
    require_open();
  }
  const std::size_t grain = granularity();
  if (size == 0) throw InvalidRangeError(0, "size 0: give at least the granularity");
  require_multiple(size, grain, "granularity");
  Driver& driver = memory_.driver();
  require_device(location);
  Chunk* chunk = nullptr;
  Budget* refused = nullptr;
  const ChunkSpec spec{size, location, exportable};
  const std::string doing = "alloc_physical(" + std::to_string(size) + ")";  // first: words take memory
  Budget& payer = location.kind == Location::Kind::host ? memory_.host_budget() : memory_.budget();
  // What is beyond all addresses is not even charged: near 2^64 nobody else
  // could charge anything until the driver has refused.
  Status status(StatusCode::out_of_memory, "create");
  if (size <= kMostAddresses) status = memory_.store().create(spec, payer, &chunk, &refused);
  // Another device's memory counts here too, and only the limits can be met from here.
  const bool is_own =
      location == Location::on_device(memory_.device()) || (refused != nullptr && &payer == &memory_.budget());
  if (status.code() == StatusCode::out_of_memory && is_own) {
    memory_.reclaim_for(payer, size, [&] {
      status = memory_.store().create(spec, payer, &chunk, &refused);
      return status.ok();
    });
  }
  if (status.code() == StatusCode::out_of_memory) {
    MemoryInfo info;
    const bool known = location.kind == Location::Kind::device && driver.memory_info(location.device, &info).ok();
    std::size_t available = known ? info.free : 0;
    if (refused != nullptr) available = std::min(payer.headroom(), known ? info.free : kUnlimited);
    memory_.refuse(OutOfMemoryError(
        doing + ": " +
            (refused != nullptr
                 ? "the limit of " + refused->name() + ", " + format_bytes(refused->limit()) + ", is reached"
                 : "the driver has no more (" + status.text() + ")") +
            (known ? "; free " + format_bytes(info.free) + " of " + format_bytes(info.total) : ""),
        size, available, refused != nullptr ? refused->limit() : info.total, kOwner));
  }
  if (status.code() == StatusCode::not_supported) {
    throw NotAvailableError("alloc_physical: " + status.text() + ": this device cannot create " +
                            (exportable ? "exportable" : "such") + " memory" +
                            (location.kind == Location::Kind::host ? " in host memory" : ""));
  }
  throw_if_failed(status, doing);
  const MutexLock lock(mutex_);
  const std::uint64_t key = ++last_key_;
  try {
    require_open();
    physical_.emplace(key, chunk);
  } catch (...) {
    memory_.store().release(chunk).ignore();
    throw;
  }
  return {id_, key, chunk->handle, size, location.kind == Location::Kind::host ? -1 : location.device};
}

void VirtualMemoryManager::free_physical(const PhysicalAllocation& physical) {
  const MutexLock lock(mutex_);
  Chunk* chunk = find(physical);
  if (const int mapped = chunk->mappings.load(std::memory_order_acquire); mapped != 0) {
    throw StillInUseError(physical.text() + " is still mapped at " +
                              format_count(static_cast<std::size_t>(mapped), "address", "addresses"),
                          physical.size, static_cast<std::size_t>(mapped));
  }
  const std::string doing = "free_physical " + physical.text();
  throw_if_failed(memory_.store().release(chunk), doing);
  physical_.erase(physical.key);
}

void VirtualMemoryManager::map(const VirtualAddressRange& range, const PhysicalAllocation& physical,
                               std::size_t offset) {
  const MutexLock lock(mutex_);
  Range& found = find(range);
  Chunk* chunk = find(physical);
  require_inside(range, offset, chunk->size);
  const auto gaps = found.mapped->gaps({offset, chunk->size});
  if (gaps.size() != 1 || gaps.front().size != chunk->size) {
    const std::size_t at = gaps.empty() || gaps.front().offset != offset ? offset : gaps.front().end();
    throw AlreadyMappedError(at, granularity(), "map " + physical.text() + " into " + range.text());
  }
  const PlacedChunk placement{offset, chunk};
  throw_if_failed(found.mapped->map({&placement, 1}, {}),
                  "map " + physical.text() + " at offset " + std::to_string(offset), {chunk->size, kOwner});
}

void VirtualMemoryManager::require_whole_mappings(const Range& found, const VirtualAddressRange& range,
                                                  std::size_t offset, std::size_t size, const std::string& doing) {
  const auto gaps = found.mapped->gaps({offset, size});
  if (!gaps.empty()) throw NotMappedError(gaps.front().offset, granularity(), doing + " of " + range.text());
  const auto first = found.mapped->covering(offset);
  const auto last = found.mapped->covering(offset + size - 1);
  if (first->first != offset || last->first + last->second.chunk->size != offset + size) {
    throw InvalidRangeError(offset, size, range.size,
                            doing + " takes whole mappings only: they begin at " + std::to_string(first->first) +
                                " and end at " + std::to_string(last->first + last->second.chunk->size));
  }
}

void VirtualMemoryManager::require_unheld(const Range& found, const VirtualAddressRange& range, ByteRange part,
                                          const std::string& doing) {
  const HeldRanges::Held held = found.held.in(part);
  if (held.count == 0) return;
  throw StillInUseError(doing + " offset " + std::to_string(part.offset) + " size " + std::to_string(part.size) +
                            " of " + range.text() + ": " + format_count(held.count, "tensor") + " of tensor()" +
                            held.still_show("it"),
                        held.bytes, held.count);
}

// Queued work may still use the addresses; the explicit calls wait for it, with
// no lock held.
void VirtualMemoryManager::wait_for_queued_work(const char* doing) {
  throw_if_failed(memory_.clock().wait(memory_.clock().now()), doing);
}

// The range, if [offset, offset + size) of it can be unmapped.
VirtualMemoryManager::Range& VirtualMemoryManager::require_unmappable(const VirtualAddressRange& range,
                                                                      std::size_t offset, std::size_t size) {
  Range& found = find(range);
  require_inside(range, offset, size);
  require_whole_mappings(found, range, offset, size, "unmap");
  require_unheld(found, range, {offset, size}, "unmap");
  return found;
}

void VirtualMemoryManager::unmap(const VirtualAddressRange& range, std::size_t offset, std::size_t size) {
  {
    const MutexLock lock(mutex_);
    require_unmappable(range, offset, size);
  }
  wait_for_queued_work("unmap");
  const MutexLock lock(mutex_);
  throw_if_failed(require_unmappable(range, offset, size).mapped->unmap({offset, size}),
                  "unmap offset " + std::to_string(offset) + " size " + std::to_string(size));
}

// The mappings in [offset, offset + size) of the range, or in all of it from
// `offset` on, if their access can become that.
std::vector<ByteRange> VirtualMemoryManager::require_changeable(const VirtualAddressRange& range, Access access,
                                                                const std::vector<Location>& who, std::size_t offset,
                                                                std::size_t size) {
  const Range& found = find(range);
  for (const Location& location : who) require_device(location);
  // Tensors are read by the manager's own device.
  const bool closes =
      access == Access::none && std::find(who.begin(), who.end(), Location::on_device(memory_.device())) != who.end();
  if (size != 0) {
    require_inside(range, offset, size);
    require_whole_mappings(found, range, offset, size, "set_access");
    if (closes) require_unheld(found, range, {offset, size}, "set_access to NONE,");
    return {{offset, size}};
  }
  // The whole of what is mapped from `offset` on, holes allowed.
  if (offset >= range.size) throw InvalidRangeError(offset, size, range.size, "beyond the end of the range");
  if (!is_aligned(offset, granularity())) {
    throw InvalidRangeError(offset, size, range.size,
                            "offset must be a multiple of the granularity " + std::to_string(granularity()));
  }
  const auto& live = found.mapped->live();
  const auto first = found.mapped->reaching(offset);
  if (first == live.end()) throw NotMappedError(offset, granularity(), "set_access of " + range.text());
  if (first->first < offset) {
    require_whole_mappings(found, range, offset, first->second.chunk->size - (offset - first->first), "set_access");
  }
  std::vector<ByteRange> parts;
  for (auto it = first; it != live.end(); ++it) {
    parts.push_back({it->first, it->second.chunk->size});
  }
  if (closes) require_unheld(found, range, {offset, range.size - offset}, "set_access to NONE,");
  return parts;
}

void VirtualMemoryManager::set_access(const VirtualAddressRange& range, Access access, const std::vector<Location>& who,
                                      std::size_t offset, std::size_t size) {
  if (access != Access::read_write) {
    {
      const MutexLock lock(mutex_);
      static_cast<void>(require_changeable(range, access, who, offset, size));
    }
    wait_for_queued_work("set_access");  // which may use what is taken away
  }
  const MutexLock lock(mutex_);
  const std::vector<ByteRange> parts = require_changeable(range, access, who, offset, size);
  if (access != Access::none) {
    for (const Location& location : who) memory_.watch_streams_of(location);
  }
  change_access(*find(range).mapped, parts, who, access);
}

// All or nothing: on a refusal, or without host memory, everyone gets back what they had.
void VirtualMemoryManager::change_access(MappedRange& mapped, const std::vector<ByteRange>& parts,
                                         const std::vector<Location>& who, Access access) {
  struct Before {
    ByteRange range;
    Location who;
    Access access = Access::none;
  };
  std::vector<Before> before;
  std::size_t changed = 0;  // of these
  try {
    for (const ByteRange& part : parts) {
      for (const Location& location : who) {
        for (auto it = mapped.from(part.offset); it != mapped.live().end() && it->first < part.end(); ++it) {
          before.push_back({{it->first, it->second.chunk->size}, location, it->second.access_of(location)});
        }
        changed = before.size();  // one that fails may have changed some
        if (const Status status = mapped.set_access(part, location, access); !status.ok()) {
          throw_if_failed(status,
                          "set_access offset " + std::to_string(part.offset) + " size " + std::to_string(part.size));
        }
      }
    }
  } catch (...) {
    // Backwards: a location may have been named twice.
    for (; changed != 0; --changed) {
      const Before& each = before[changed - 1];
      mapped.restore_access(each.range, each.who, each.access);
    }
    throw;
  }
}

std::vector<MappingRecord> VirtualMemoryManager::mappings(const VirtualAddressRange& range) const {
  const MutexLock lock(mutex_);
  const Range& found = find(range);
  std::vector<MappingRecord> records;
  for (const auto& [offset, mapping] : found.mapped->live()) {
    records.push_back({offset, mapping.chunk->size, mapping.chunk->handle, mapping.access()});
  }
  return records;
}

Address VirtualMemoryManager::hold(const VirtualAddressRange& range, std::size_t offset, std::size_t size) {
  const MutexLock lock(mutex_);
  Range& found = find(range);
  if (size == 0) throw InvalidRangeError(offset, size, range.size, "size must be greater than 0");
  if (sum_overflows(offset, size) || offset + size > range.size) {
    throw InvalidRangeError(offset, size, range.size, "beyond the end of the range");
  }
  const auto gaps = found.mapped->gaps({offset, size});
  if (!gaps.empty()) {
    throw NotMappedError(align_down(gaps.front().offset, granularity()), granularity(), "tensor over " + range.text());
  }
  for (auto it = found.mapped->covering(offset); it != found.mapped->live().end() && it->first < offset + size; ++it) {
    if (it->second.access_of(Location::on_device(memory_.device())) == Access::none) {
      throw InvalidArgumentError("tensor over " + range.text() + ": offset " + std::to_string(it->first) +
                                 " is not accessible; set_access first");
    }
  }
  found.held.hold({offset, size});
  return range.base + offset;
}

void VirtualMemoryManager::unhold(const VirtualAddressRange& range, std::size_t offset, std::size_t size) {
  const MutexLock lock(mutex_);
  ranges_.at(range.base).held.unhold({offset, size});  // what is held is not released
}

void VirtualMemoryManager::require_nothing_held() const {
  HeldRanges::Held held;
  for (const auto& [base, range] : ranges_) {
    const auto [count, bytes] = range.held.in({0, range.mapped->size()});
    held.count += count;
    held.bytes += bytes;
  }
  if (held.count == 0) return;
  throw StillInUseError(
      "close: " + format_count(held.count, "tensor") + " of tensor()" + held.still_show("this manager's ranges"),
      held.bytes, held.count);
}

void VirtualMemoryManager::close() {
  {
    const MutexLock lock(mutex_);
    if (closed_) return;
    require_nothing_held();
  }
  wait_for_queued_work("close");
  const MutexLock lock(mutex_);
  if (closed_) return;
  require_nothing_held();
  // What the driver refuses stays, and can be closed again. When the driver has
  // gone, everything has.
  Status refused;
  const auto done = [&refused](const Status& status) {
    if (status.ok() || status.code() == StatusCode::driver_gone) return true;
    refused = status;
    return false;
  };
  std::erase_if(ranges_, [&](auto& entry) {
    MappedRange& mapped = *entry.second.mapped;
    while (!mapped.live().empty()) {
      const auto& [offset, mapping] = *mapped.live().begin();
      const Status status = mapped.unmap({offset, mapping.chunk->size});
      if (status.code() == StatusCode::driver_gone) break;
      if (!done(status)) return false;
    }
    return done(memory_.driver().unreserve(entry.first, mapped.size()));
  });
  std::erase_if(physical_, [&](const auto& entry) {
    Chunk* chunk = entry.second;
    if (!memory_.driver().alive()) chunk->mappings.store(0, std::memory_order_release);
    return chunk->mappings.load(std::memory_order_acquire) == 0 && done(memory_.store().release(chunk));
  });
  throw_if_failed(refused, "close");
  closed_ = true;
}

bool VirtualMemoryManager::is_closed() const { return closed_.load(std::memory_order_acquire); }

}  // namespace vmm
