#include "core/sleep/sleeper.h"

#include <algorithm>
#include <iterator>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "core/memory/file_backup.h"
#include "core/memory/host_backup.h"
#include "core/memory/packed_backup.h"
#include "core/sleep/chunk_backup.h"
#include "driver/host_memory.h"

namespace vmm {

StreamUse Sleeper::stream(Stream* which) {
  const MutexLock lock(mutex_);
  if (*which == nullptr) {
    Stream made = nullptr;
    throw_if_failed(driver().create_stream(memory_.device(), &made), "making a stream for copies");
    memory_.streams().add_own(made);
    *which = made;
  }
  return {&memory_.streams(), *which, StreamKind::permanent};
}

void Sleeper::wait_for_queued_work() noexcept {
  try {
    if (memory_.clock().synchronize().ok()) return;
  } catch (...) {
    // No memory for a tick: the device itself is asked.
  }
  driver().synchronize(memory_.device()).ignore();
}

std::shared_ptr<PinnedMemory> Sleeper::host_memory(const Budget& group) {
  std::vector<std::shared_ptr<PinnedMemory>> ended;  // unpinned with no lock held
  const MutexLock lock(mutex_);
  for (auto at = host_memory_.begin(); at != host_memory_.end();) {
    // A new group may stand where one was that has ended.
    if (at->first != &memory_.budget() && at->second.group.expired()) {
      ended.push_back(std::move(at->second.memory));
      at = host_memory_.erase(at);
    } else {
      ++at;
    }
  }
  OfGroup& found = host_memory_[&group];
  if (found.memory == nullptr) found = {group.weak_from_this(), std::make_shared<PinnedMemory>(driver())};
  return found.memory;
}

// What awake models under `group` keep there in case they sleep again unchanged. Returns
// whether there was any.
bool Sleeper::forget_unchanged(const Budget& group) {
  bool any = false;
  for (const auto& pool : memory_.pools_under(group)) {
    if (&pool->group() == &group) any = pool->forget_unchanged() || any;  // else it is in another's memory
  }
  return any;
}

std::size_t Sleeper::release_host_memory(const Budget& group) {
  forget_unchanged(group);
  return host_memory(group)->release_unused();
}

std::size_t Sleeper::set_host_limit(const Budget& group, std::size_t bytes) {
  const std::shared_ptr<PinnedMemory> memory = host_memory(group);
  std::size_t went = memory->set_limit(bytes);
  if (memory->used_bytes() > bytes && forget_unchanged(group)) went += memory->set_limit(bytes);
  return went;
}

void Sleeper::end_host_memory(const Budget& group) {
  forget_unchanged(group);
  host_memory(group)->close();
}

std::vector<std::shared_ptr<PinnedMemory>> Sleeper::all_host_memory() {
  const MutexLock lock(mutex_);
  std::vector<std::shared_ptr<PinnedMemory>> all;
  all.reserve(host_memory_.size());
  for (const auto& [group, each] : host_memory_) all.push_back(each.memory);
  return all;
}

// What nobody uses of other groups' pinned memory goes until the host has `bytes`. Returns what it has.
std::size_t Sleeper::release_unused_of_others(const PinnedMemory& memory, std::size_t bytes) {
  std::size_t available = available_memory();
  for (const auto& each : all_host_memory()) {
    if (available >= bytes) break;
    if (each.get() != &memory && each->release_unused() != 0) available = available_memory();
  }
  return available;
}

std::size_t Sleeper::release_all_host_memory(std::size_t bytes) {
  const auto all = all_host_memory();
  const auto release = [&all] {
    std::size_t went = 0;
    for (const auto& each : all) went += each->release_unused();
    return went;
  };
  std::size_t unused = 0;
  std::size_t used = 0;
  for (const auto& each : all) {
    unused += each->unused_bytes();
    used += each->used_bytes();
  }
  const std::size_t available = available_memory();
  if (bytes > available && bytes - available > unused + used) return 0;
  if (const std::size_t went = release(); went != 0) return went;
  for (const auto& pool : memory_.pools()) pool->forget_unchanged();
  return release();
}

void Sleeper::make_host_room(const PinnedMemory& memory, std::size_t bytes, Pool& asker) {
  // Whole slabs, as it takes them.
  const std::size_t slabs = align_up(bytes, PinnedMemory::kSlabBytes);
  const auto lacks = [&] { return slabs - std::min(slabs, memory.unused_bytes()); };
  const std::size_t most = align_down(memory.limit(), PinnedMemory::kSlabBytes);
  std::size_t missing = lacks();
  std::size_t available = available_memory();
  if (missing > available) available = release_unused_of_others(memory, missing);
  const bool is_short =
      missing > available || missing > most - std::min(most, memory.used_bytes() + memory.unused_bytes());
  // Copying again is better than not sleeping.
  if (is_short && forget_unchanged(asker.group())) {
    missing = lacks();
    available = available_memory();
  }
  if (missing > available) {
    throw OutOfMemoryError("the host has " + format_bytes(available) + " of memory left, and " + format_bytes(bytes) +
                               " of '" + asker.model().name() +
                               "' are to sleep there; name a file or another device, or discard",
                           bytes, available, available, asker.model().name());
  }
}

namespace {

[[noreturn]] void refuse(const PinnedMemory& memory, std::size_t bytes, Pool& asker) {
  const std::size_t room = memory.limit() - std::min(memory.limit(), memory.used_bytes());
  throw OutOfMemoryError("host_backup_limit is " + format_bytes(memory.limit()) + ", of which " +
                             format_bytes(memory.used_bytes()) + " are in use, and " + format_bytes(bytes) + " of '" +
                             asker.model().name() + "' are to sleep there (in pieces of " +
                             format_bytes(PinnedMemory::kSlabBytes) + "); raise it, wake a model, or name a file",
                         bytes, room, memory.limit(), asker.model().name());
}

}  // namespace

std::shared_ptr<Backup> Sleeper::make_host_backup(std::size_t bytes, Pool& asker) {
  const std::shared_ptr<PinnedMemory> memory = host_memory(asker.group());
  make_host_room(*memory, bytes, asker);
  std::shared_ptr<Backup> backup = HostBackup::make(driver(), memory, bytes);
  if (backup == nullptr) refuse(*memory, bytes, asker);
  return backup;
}

// Of how much memory that is, only looking at it tells.
std::shared_ptr<Backup> Sleeper::make_packed_backup(const std::vector<Content>& contents, Pool& asker) {
  const std::shared_ptr<PinnedMemory> memory = host_memory(asker.group());
  const std::size_t table = PackedBackup::table_bytes(contents);
  make_host_room(*memory, table, asker);
  std::shared_ptr<PackedBackup> backup = PackedBackup::survey(driver(), memory, contents, out());
  if (backup == nullptr) refuse(*memory, table, asker);
  make_host_room(*memory, backup->bytes() - std::min(backup->bytes(), align_up(table, PinnedMemory::kSlabBytes)),
                 asker);
  if (!backup->take_room()) {
    const std::size_t bytes = backup->bytes();
    backup.reset();  // its table is none of what is in use
    refuse(*memory, bytes, asker);
  }
  return backup;
}

std::shared_ptr<Backup> Sleeper::make_backup(const Places& places, const std::vector<Content>& contents, Pool& asker) {
  std::size_t bytes = 0;
  for (const Content& each : contents) bytes += each.size;
  if (std::any_of(places.begin(), places.end(), [](const Place& place) { return place.is_packed; })) {
    const std::string missing = driver().missing_packing(memory_.device());
    if (!missing.empty()) throw NotAvailableError("memory cannot be packed: " + missing);
  }
  for (auto place = places.begin(); place != places.end(); ++place) {
    try {
      switch (place->kind) {
        case Place::Kind::discard:
          return nullptr;
        case Place::Kind::host:
          return place->is_packed ? make_packed_backup(contents, asker) : make_host_backup(bytes, asker);
        case Place::Kind::file:
          return std::make_shared<FileBackup>(driver(), place->path, bytes);
        case Place::Kind::device:
          return std::make_shared<ChunkBackup>(memory_, *place->device, bytes, asker.model().name());
      }
    } catch (const InvalidArgumentError&) {
      throw;  // a mistake, and not for want of room
    } catch (const OutOfMemoryError& error) {
      if (std::next(place) == places.end()) memory_.refuse(error);
    } catch (const VmmError&) {
      if (std::next(place) == places.end()) throw;
    } catch (const std::bad_alloc&) {
      if (std::next(place) == places.end()) throw;
    }
  }
  return nullptr;
}

}  // namespace vmm
