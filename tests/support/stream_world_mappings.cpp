// StreamWorld: two devices, and mappings by hand.
#include "base/errors.h"
#include "support/stream_world.h"

namespace vmm::testing {

namespace {
constexpr std::size_t kPlaceBytes = 2 * kMiB;
}  // namespace

void StreamWorld::add_peers() {
  peers_ =
      memory_->add_accessor(Location::on_device(1)).ok() && peer_memory_->add_accessor(Location::on_device(0)).ok();
}

void StreamWorld::open_manager() {
  manager_ = std::make_unique<VirtualMemoryManager>(*memory_);
  chunks_ = {};
  places_.clear();
  range_ = {};
  try {
    range_ = manager_->reserve(kPlaces * kPlaceBytes, VirtualMemoryManager::kDefaultAlignment);
  } catch (const VmmError&) {
    // A failing call: until the next one this manager has no range.
  }
}

void StreamWorld::create_chunk(std::size_t bytes) {
  for (auto& chunk : chunks_) {
    if (chunk.has_value()) continue;
    try {
      chunk = manager_->alloc_physical(kPlaceBytes * (1 + bytes % 2), Location::on_device(0), /*exportable=*/false);
    } catch (const VmmError&) {
      // No memory.
    }
    return;
  }
}

void StreamWorld::map_chunk(std::size_t number, std::size_t place, bool for_peer) {
  if (!chunks_[number].has_value() || range_.size == 0) return;
  const std::size_t size = chunks_[number]->size;
  try {
    manager_->map(range_, *chunks_[number], place * kPlaceBytes);
    places_[place] = {number, size};
    std::vector<Location> who = {Location::on_device(0)};
    if (for_peer) who.push_back(Location::on_device(1));
    manager_->set_access(range_, Access::read_write, who, place * kPlaceBytes, size);
  } catch (const VmmError&) {
    // Taken, beyond the end, or a failing call: then mapped, perhaps, without access.
  }
}

void StreamWorld::use_mapping(std::size_t place, std::size_t stream, std::uint64_t flags) {
  const auto found = places_.find(place);
  if (found == places_.end() || !may_work(stream)) return;
  if (!is_coverable(stream)) return;
  const bool writes = (flags & kUseWrites) != 0;
  const Address address = range_.base + place * kPlaceBytes;
  const Access access = writes ? Access::read_write : Access::read;
  if (!driver_.is_accessible(address, found->second.size, slot(stream).device, access)) return;
  on_thread_of(stream, [&] {
    driver_.use(ref(stream), address, found->second.size, writes ? Use::write : Use::read, (flags & kUseIsLong) != 0);
  });
}

void StreamWorld::set_access(std::size_t place, std::uint64_t access, int device) {
  const auto found = places_.find(place);
  if (found == places_.end()) return;
  try {
    manager_->set_access(range_, static_cast<Access>(access % 3), {Location::on_device(device)}, place * kPlaceBytes,
                         found->second.size);
  } catch (const VmmError&) {
    // A failing call, or a capture stands in the way.
  }
}

void StreamWorld::unmap_chunk(std::size_t place) {
  const auto found = places_.find(place);
  if (found == places_.end()) return;
  try {
    manager_->unmap(range_, place * kPlaceBytes, found->second.size);
    places_.erase(found);
  } catch (const VmmError&) {
    // A failing call, or a capture stands in the way.
  }
}

void StreamWorld::free_chunk(std::size_t number) {
  if (!chunks_[number].has_value()) return;
  try {
    manager_->free_physical(*chunks_[number]);
    chunks_[number].reset();
  } catch (const VmmError&) {
    // Still mapped.
  }
}

void StreamWorld::close_manager() {
  try {
    manager_->close();
  } catch (const VmmError&) {
    return;  // a failing call, or a capture stands in the way: it goes on
  }
  open_manager();
}

}  // namespace vmm::testing
