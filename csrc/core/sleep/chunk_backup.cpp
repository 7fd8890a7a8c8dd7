#include "core/sleep/chunk_backup.h"

#include <algorithm>
#include <iterator>
#include <new>

#include "base/errors.h"

namespace vmm {

ChunkBackup::ChunkBackup(DeviceMemory& own, DeviceMemory& other, std::size_t bytes, const std::string& model)
    : own_(own), other_(other) {
  GuestMemory& guests = other_.guests();
  const auto take = [&] { return guests.take(own_.device(), bytes, places_.get()); };
  const auto lacks = [](const Status& status) { return status.code() == StatusCode::out_of_memory; };
  Status taken = take();
  if (lacks(taken) && guests.trim() != 0) taken = take();  // of other sizes
  if (lacks(taken)) {
    other_.reclaim_for(other_.budget(), bytes, [&] { return !lacks(taken = take()); });
  }
  if (lacks(taken)) {
    MemoryInfo info;
    const bool known = other_.driver().memory_info(other_.device(), &info).ok();
    const std::size_t available = std::min(other_.budget().headroom(), known ? info.free : kUnlimited);
    const std::size_t limit = std::min(other_.budget().limit(), known ? info.total : kUnlimited);
    throw OutOfMemoryError(place() + " has no room for " + format_bytes(bytes) + " of '" + model +
                               "', which are to sleep there: " + format_bytes(available) + " of " +
                               format_bytes(limit) + " are free",
                           bytes, available, limit, model);
  }
  throw_if_failed(taken, "keeping " + format_bytes(bytes) + " of a model that sleeps on another device");
  if (places_->empty()) return;
  // Whether it can be reached shows here, while another place can still be had.
  try {
    throw_if_failed(guests.open(places_->front()), "mapping " + place() + "'s memory for a model that sleeps there");
  } catch (...) {
    let_go();
    throw;
  }
  opened_ = 1;
}

// What the driver refuses to unmap goes when it is asked again.
ChunkBackup::~ChunkBackup() { let_go(); }

void ChunkBackup::let_go() noexcept {
  GuestMemory& guests = other_.guests();
  if (guests.put_back(*places_)) return;
  try {
    other_.once_passed([&guests, places = places_] { return guests.put_back(*places); });
  } catch (const std::bad_alloc&) {
    return;  // it stays, and counts
  }
}

template <typename Each>
void ChunkBackup::for_each_stretch(std::size_t at, std::size_t size, const Each& each) const {
  const auto end_of = [](const GuestMemory::Place& place) { return place.begin + place.size; };
  auto place = std::partition_point(places_->begin(), places_->end(),
                                    [&](const GuestMemory::Place& before) { return end_of(before) <= at; });
  for (std::size_t done = 0; done < size;) {
    const Address address = place->address + (at + done - place->begin);
    auto last = place;
    while (end_of(*last) < at + size && std::next(last)->address == last->address + last->size) ++last;
    const std::size_t bytes = std::min(end_of(*last) - at, size) - done;
    each(address, done, bytes);
    done += bytes;
    place = std::next(last);
  }
}

// One after the other, while what was saved before is on its way: access costs 0.7 ms a GiB,
// and as much again for each further device.
void ChunkBackup::save(std::size_t at, Address from, std::size_t size, const StreamUse& by) {
  while (opened_ < places_->size() && (*places_)[opened_].begin < at + size) {
    throw_if_failed(other_.guests().open((*places_)[opened_]),
                    "mapping " + place() + "'s memory for a model that sleeps there");
    ++opened_;
  }
  for_each_stretch(at, size, [&](Address to, std::size_t done, std::size_t bytes) {
    throw_if_failed(other_.driver().copy_async(by.device->device(), to, from + done, bytes, by.stream),
                    "saving a model on " + place());
  });
}

void ChunkBackup::load(std::size_t at, Address to, std::size_t size, const StreamUse& by) {
  for_each_stretch(at, size, [&](Address from, std::size_t done, std::size_t bytes) {
    throw_if_failed(other_.driver().copy_async(by.device->device(), to + done, from, bytes, by.stream),
                    "loading a model from " + place());
  });
}

void ChunkBackup::read(std::size_t at, std::byte* to, std::size_t size) {
  for_each_stretch(at, size, [&](Address from, std::size_t done, std::size_t bytes) {
    throw_if_failed(own_.driver().read(own_.device(), to + done, from, bytes), "reading a model on " + place());
  });
}

std::string ChunkBackup::place() const { return other_.driver().name() + ":" + std::to_string(other_.device()); }

}  // namespace vmm
