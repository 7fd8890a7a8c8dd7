#include "core/memory/guest_memory.h"

#include <algorithm>
#include <utility>

namespace vmm {

namespace {

std::vector<std::size_t> sizes_for(std::size_t bytes, std::size_t granularity) {
  std::vector<std::size_t> sizes;
  std::size_t size = std::max(GuestMemory::kMostBytes, granularity);
  for (std::size_t left = align_up(bytes, granularity); left != 0; left -= size) {
    while (size > left) size /= 2;
    sizes.push_back(size);
  }
  return sizes;
}

}  // namespace

GuestMemory::~GuestMemory() {
  const MutexLock lock(mutex_);
  trim();
  for (const Run& run : runs_) {
    store_.dormant().abandon(run.address, run.size);
    driver_.unreserve(run.address, run.size).ignore();
  }
  store_.forget(payer_);
}

// With the chunk that lay there, or as nothing but addresses.
bool GuestMemory::take_idle(int guest, std::size_t size, bool with_chunk, Places* out) {
  for (auto at = idle_.begin(); at != idle_.end(); ++at) {
    if (at->guest != guest || at->size != size) continue;
    if (with_chunk && (at->chunk == nullptr || !store_.take(payer_, payer_, at->chunk, size))) {
      at->chunk = nullptr;
      continue;
    }
    if (!with_chunk && at->chunk != nullptr) continue;
    out->push_back(*at);  // there is room
    idle_.erase(at);
    return true;
  }
  return false;
}

// Places without a chunk, idle ones first.
Status GuestMemory::take_addresses(int guest, std::vector<std::size_t> sizes, Places* out) {
  std::erase_if(sizes, [&](std::size_t size) VMM_REQUIRES(mutex_) { return take_idle(guest, size, false, out); });
  if (sizes.empty()) return {};
  Run run;
  for (const std::size_t size : sizes) run.size += size;
  runs_.reserve(runs_.size() + 1);
  if (const Status status = driver_.reserve(run.size, store_.granularity(), &run.address); !status.ok()) return status;
  runs_.push_back(run);
  for (const std::size_t size : sizes) {
    out->push_back({0, run.address, size, guest});
    run.address += size;
  }
  return {};
}

// A chunk for it: one that lay at another place, or a new one.
Status GuestMemory::fill(Place& place) {
  if (const Status status = store_.dormant().clear(place.address, place.size); !status.ok()) return status;
  Budget* refused = nullptr;
  place.chunk = store_.take_at_most(payer_, payer_, place.size, /*exact=*/true, &refused);
  if (place.chunk != nullptr) return {};
  return store_.create(store_.spec(place.size), payer_, &place.chunk, &refused);
}

Status GuestMemory::take(int guest, std::size_t bytes, Places* out) {
  std::vector<std::size_t> missing = sizes_for(bytes, store_.granularity());
  const MutexLock lock(mutex_);
  Places taken;
  taken.reserve(missing.size());
  out->reserve(out->size() + missing.size());
  idle_.reserve(idle_.size() + taken_ + missing.size());
  std::erase_if(missing, [&](std::size_t size) VMM_REQUIRES(mutex_) { return take_idle(guest, size, true, &taken); });
  const std::size_t as_they_were = taken.size();
  Status status;
  const auto put_all_back = [&]() VMM_REQUIRES(mutex_) {
    taken_ += taken.size();
    for (const Place& place : taken) put_idle(place);
  };
  try {
    status = take_addresses(guest, std::move(missing), &taken);
    for (std::size_t k = as_they_were; k < taken.size() && status.ok(); ++k) status = fill(taken[k]);
  } catch (...) {
    put_all_back();
    throw;
  }
  if (!status.ok()) {
    put_all_back();
    return status;
  }
  taken_ += taken.size();
  for (std::size_t k = 0; k < as_they_were; ++k) {
    Place& place = taken[k];
    place.is_mapped = place.is_open = store_.dormant().claim(place.address, place.chunk);
    if (place.is_mapped) place.chunk->note_mapped();
  }
  std::sort(taken.begin(), taken.end(),
            [](const Place& a, const Place& b) { return a.size != b.size ? a.size > b.size : a.address < b.address; });
  std::size_t begin = 0;
  for (Place& place : taken) {
    place.begin = begin;
    begin += place.size;
    out->push_back(place);
  }
  return {};
}

Status GuestMemory::open(Place& place) {
  if (place.is_open) return {};
  if (!place.is_mapped) {
    const Status status = driver_.map(place.address, place.size, place.chunk->handle);
    if (!status.ok()) return status;
    place.chunk->note_mapped();
    place.is_mapped = true;
  }
  const Location guest = Location::on_device(place.guest);
  const Status status = driver_.set_access(place.address, place.size, guest, Access::read_write);
  place.is_open = status.ok();
  return status;
}

void GuestMemory::put_idle(Place place) noexcept {
  if (place.is_mapped) {
    place.chunk->note_unmapped();
    place.is_mapped = false;
  }
  place.is_open = false;
  if (place.chunk != nullptr) store_.put(payer_, place.chunk);
  idle_.push_back(place);  // there is room
  --taken_;
}

bool GuestMemory::put_back(Places& places) noexcept {
  {
    const MutexLock lock(mutex_);
    std::erase_if(places, [this](Place& place) VMM_REQUIRES(mutex_) {
      if (place.is_mapped && !(place.is_open && store_.dormant().keep(place.address, place.chunk, &unmapped_))) {
        const Status status = driver_.unmap(place.address, place.size);
        if (!status.ok() && status.code() != StatusCode::driver_gone) return false;
      }
      put_idle(place);
      return true;
    });
  }
  // One may have been lowered while they were in use.
  for (const Budget* level = &payer_; level != nullptr; level = level->parent()) {
    if (level->is_over()) trim();
  }
  return places.empty();
}

}  // namespace vmm
