#include "core/faces/placed_memory.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/errors.h"
#include "core/memory/shared_chunks.h"
#include "core/streams/stream_point.h"

namespace vmm {

namespace {

// Of the mapping, by whichever device asks.
class Ending {
 public:
  explicit Ending(std::shared_ptr<AliasRange> range) : range_(std::move(range)) {}
  bool end() {
    const MutexLock lock(mutex_);
    return range_->end();
  }

 private:
  Mutex mutex_;
  const std::shared_ptr<AliasRange> range_;
};

}  // namespace

PlacedMemory::PlacedMemory(const std::vector<PlacedShare>& shares) {
  if (shares.empty()) throw InvalidArgumentError("memory over no device: give at least one");
  for (const PlacedShare& share : shares) {
    share.pool->require_open();
    DeviceMemory* const memory = share.pool->home();
    if (&memory->driver() != &shares.front().pool->home()->driver()) {
      throw InvalidArgumentError("memory over devices of different kinds has no addresses that all of them reach");
    }
    if (!is_on(*memory)) devices_.push_back(memory);
  }
  std::size_t granularity = 0;
  for (const DeviceMemory* memory : devices_) granularity = std::max(granularity, memory->granularity());
  for (std::size_t k = 0; k < shares.size(); ++k) {
    const bool ends_a_page = k + 1 == shares.size() || is_aligned(shares[k].size, granularity);
    if (shares[k].size != 0 && ends_a_page) continue;
    throw InvalidArgumentError("share " + std::to_string(k) + " of " + std::to_string(shares[k].size) +
                               " bytes: each but the last is a multiple of " + format_bytes(granularity));
  }
  watch_each_other();
  back(shares);
  order(shares);
  map();
}

PlacedMemory::~PlacedMemory() {
  for (SecondMappings::Place& place : places_) place.leave();
  // Each device asks: what its models lack may be held by the mapping alone.
  for (std::size_t k = 0; k < devices_.size(); ++k) devices_[k]->once_passed(std::move(endings_[k]));
}

Status PlacedMemory::add_accessor(const Location& who) {
  const std::vector<Location> all = accessors();
  if (std::find(all.begin(), all.end(), who) == all.end()) return {};
  return range_->add_accessor(who, Access::read_write);
}

void PlacedMemory::record_stream(Stream stream, DeviceStreams& device) {
  for (const auto& range : ranges_) range->part()->record_stream(range->base(), stream, &device);
}

bool PlacedMemory::is_on(const DeviceMemory& memory) const {
  return std::find(devices_.begin(), devices_.end(), &memory) != devices_.end();
}

// Who may reach all of it: its devices, and whoever was let into the pools of each.
std::vector<Location> PlacedMemory::accessors() const {
  std::vector<Location> found;
  found.reserve(devices_.size());
  for (const DeviceMemory* memory : devices_) found.push_back(Location::on_device(memory->device()));
  for (const Location& who : devices_.front()->accessors()) {
    const bool is_known = std::find(found.begin(), found.end(), who) != found.end();
    const bool is_let_in = std::all_of(devices_.begin(), devices_.end(), [&](const DeviceMemory* memory) {
      const std::vector<Location> others = memory->accessors();
      return std::find(others.begin(), others.end(), who) != others.end();
    });
    if (!is_known && is_let_in) found.push_back(who);
  }
  return found;
}

// From now on no device's memory goes to anybody else before what the others queued.
void PlacedMemory::watch_each_other() const {
  for (DeviceMemory* memory : devices_) {
    for (const DeviceMemory* other : devices_) {
      if (other != memory) memory->watch_streams_of(Location::on_device(other->device()));
    }
  }
}

void PlacedMemory::back(const std::vector<PlacedShare>& shares) {
  ranges_.reserve(shares.size());
  for (const PlacedShare& share : shares) {
    TensorRangeSpec spec;
    spec.what = "placed tensor";
    spec.capacity = share.size;
    ranges_.push_back(std::make_unique<TensorRange>(*share.pool->home(), share.pool, spec));
    ranges_.back()->commit({{0, share.size}}, share.stream);
  }
}

// Each share is zeroed, and comes after its former users, on its own stream: the others
// come after that. Where the GPU cannot be made to wait, the caller does.
void PlacedMemory::order(const std::vector<PlacedShare>& shares) {
  std::vector<StreamUse> uses;
  for (const PlacedShare& share : shares) {
    DeviceStreams& streams = share.pool->home()->streams();
    const StreamUse use{&streams, share.stream, streams.meet(share.stream)};
    if (std::find(uses.begin(), uses.end(), use) == uses.end()) uses.push_back(use);
  }
  for (const StreamUse& use : uses) {
    StreamPoint point(std::vector<StreamUse>{use});
    for (const StreamUse& other : uses) {
      if (other == use || point.order_before(other).ok()) continue;
      throw_if_failed(point.wait(), "waiting for the memory of a placed tensor to be zeroed");
    }
  }
}

void PlacedMemory::map() {
  DeviceMemory& first = *devices_.front();
  // Before there is anything to end: afterwards nothing may fail.
  range_ = std::make_shared<AliasRange>(first.driver());
  const auto ending = std::make_shared<Ending>(range_);
  endings_.reserve(devices_.size());
  places_.reserve(devices_.size());
  for (DeviceMemory* memory : devices_) {
    endings_.emplace_back([ending] { return ending->end(); });
    places_.emplace_back(memory->second_mappings());
  }
  SharedChunks shared(/*copies=*/1);
  std::size_t bytes = 0;
  for (const auto& range : ranges_) {
    range->part()->share_chunks(range->base(), range->capacity(), &shared);
    bytes += range->capacity();
  }
  Status status;
  DeviceMemory::while_nobody_is_let_in(devices_, [&] {
    const std::vector<Location> who = accessors();
    const std::vector<Chunk*> chunks = shared.release();  // on failure it takes the mappings back itself
    status = range_->map(first.granularity(), chunks, 1, Access::read_write, who);
    if (!status.ok()) return;
    for (SecondMappings::Place& place : places_) place.enter({base(), size()}, this);
  });
  if (status.ok()) return;
  if (status.code() == StatusCode::out_of_memory) {
    throw OutOfMemoryError(
        "no " + format_bytes(bytes) + " of virtual addresses are left for a placed tensor (" + status.text() + ")",
        bytes, 0, kMostAddresses, ranges_.front()->part()->model().name());
  }
  throw_if_failed(status, "mapping memory of " + std::to_string(devices_.size()) +
                              " devices into one range that each of them reaches");
}

}  // namespace vmm
