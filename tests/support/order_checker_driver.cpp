// OrderChecker: the driver's calls. Each is passed on first; what succeeded is
// judged and booked, under one lock with the call itself, or another thread
// could map what this one has just unmapped and not yet booked.
#include "base/check.h"
#include "support/order_checker.h"

namespace vmm::testing {

namespace {

Status captured(const char* call) { return {StatusCode::not_supported, call}; }

// After a failure part of it may have been done all the same.
bool may_have_begun(const Status& status) {
  return status.ok() || status.code() == StatusCode::driver_error || status.code() == StatusCode::out_of_memory;
}

int key_of(Location who) { return who.kind == Location::Kind::host ? -1 : who.device; }

}  // namespace

// Rule 6.
Status OrderChecker::lane_of_call(const char* call, StreamRef stream, Lane* out) {
  const auto lane = order_.find(stream);
  if (!lane.has_value()) {
    violate(std::string(call) + "() names stream " + format_hex(reinterpret_cast<std::uintptr_t>(stream.handle)) +
            ", which has been destroyed or never was: CUDA crashes");
    return {StatusCode::invalid_argument, "a stream that is no more"};
  }
  *out = *lane;
  return {};
}

// -- Memory

Status OrderChecker::reserve(std::size_t size, std::size_t alignment, Address* out) {
  return inner_.reserve(size, alignment, out);
}

Status OrderChecker::unreserve(Address address, std::size_t size) { return inner_.unreserve(address, size); }

Status OrderChecker::create(const ChunkSpec& spec, ChunkHandle* out) {
  const MutexLock lock(mutex_);
  const Status status = inner_.create(spec, out);
  if (status.ok()) memory_.create(*out, spec.size);
  return status;
}

Status OrderChecker::import_chunk(int fd, std::size_t size, ChunkHandle* out) {
  const MutexLock lock(mutex_);
  const Status status = inner_.import_chunk(fd, size, out);
  if (status.ok()) memory_.create(*out, size);
  return status;
}

// The memory goes with its last mapping, and each of those was judged.
Status OrderChecker::release(ChunkHandle chunk) {
  const MutexLock lock(mutex_);
  const Status status = inner_.release(chunk);
  if (status.ok()) memory_.release(chunk);
  return status;
}

Status OrderChecker::map(Address address, std::size_t size, ChunkHandle chunk) {
  const MutexLock lock(mutex_);
  const Status status = inner_.map(address, size, chunk);
  if (status.ok()) memory_.map(address, size, chunk);
  return status;
}

// Rule 1, and of rule 5 that what is handed out stays mapped.
Status OrderChecker::unmap(Address address, std::size_t size) {
  const MutexLock lock(mutex_);
  const Status status = inner_.unmap(address, size);
  if (!status.ok()) return status;
  memory_.each_mapping(address, size, [&](Address at, Mapping& mapping) VMM_REQUIRES(mutex_) {
    const std::string late = first_late(mapping.uses, &LaneUses::any, order_.host());
    if (!late.empty()) {
      violate("unmap of " + bytes_text(at, mapping.size) + " (chunk " + std::to_string(mapping.chunk) + ") under " +
              late);
    }
    if (!mapping.uses.empty()) ++counts_.unmapped;
    for (auto block = blocks_.lower_bound(at); block != blocks_.end() && block->first < at + mapping.size; ++block) {
      if (asleep_.count(block->second.owner.pool) != 0) continue;
      violate("unmap of " + bytes_text(at, mapping.size) + " takes " + bytes_text(block->first, block->second.size) +
              " away from " + text_of(block->second.owner));
    }
    const auto block = block_at(at);
    if (block != blocks_.end() && block->first < at && asleep_.count(block->second.owner.pool) == 0) {
      violate("unmap of " + bytes_text(at, mapping.size) + " takes part of a block away from " +
              text_of(block->second.owner));
    }
    if (asleep_.count(mapping.pool) != 0) leave_under_sleeper(at, mapping);
  });
  memory_.unmap(address, size);
  return status;
}

Status OrderChecker::set_access(Address address, std::size_t size, Location who, Access access) {
  const MutexLock lock(mutex_);
  const Status status = inner_.set_access(address, size, who, access);
  if (!status.ok()) return status;
  memory_.each_mapping(address, size, [&](Address at, Mapping& mapping) VMM_REQUIRES(mutex_) {
    Access& had = mapping.access[key_of(who)];
    if (access < had) {
      // Only work of that device loses anything, and by a read-only mapping only writes.
      UseSet losers;
      for (const LaneUses& uses : mapping.uses.lanes()) {
        const Seq lost = access == Access::read ? uses.write : uses.any;
        if (order_.device_of(uses.lane) == key_of(who) && lost != 0) losers.note(uses.lane, lost, false, false);
      }
      const std::string late = first_late(losers, &LaneUses::any, order_.host());
      if (!late.empty()) violate("set_access takes " + bytes_text(at, mapping.size) + " away under " + late);
    }
    had = access;
  });
  return status;
}

// -- Fences

Status OrderChecker::create_fence(int device, Fence* out) {
  const MutexLock lock(mutex_);
  const Status status = inner_.create_fence(device, out);
  if (status.ok()) fences_[*out] = {device, {}};
  return status;
}

Status OrderChecker::destroy_fence(Fence fence) {
  const MutexLock lock(mutex_);
  const Status status = inner_.destroy_fence(fence);
  if (status.ok()) fences_.erase(fence);
  return status;
}

Status OrderChecker::record(Fence fence, Stream stream) {
  const MutexLock lock(mutex_);
  const auto found = fences_.find(fence);
  if (found == fences_.end()) return inner_.record(fence, stream);
  Lane lane = 0;
  if (const Status known = lane_of_call("record", {stream, found->second.device}, &lane); !known.ok()) return known;
  if (order_.device_of(lane) != found->second.device) return {StatusCode::invalid_argument, "another device's stream"};
  if (order_.is_captured(lane) || order_.stands_before_a_capture(lane)) return captured("record during a capture");
  const Status status = inner_.record(fence, stream);
  if (status.ok()) found->second.point = order_.reach(lane);
  return status;
}

Status OrderChecker::query(Fence fence) {
  const MutexLock lock(mutex_);
  work_goes_on();
  const Status status = inner_.query(fence);
  const auto found = fences_.find(fence);
  if (!status.ok() || found == fences_.end()) return status;
  if (!order_.is_done(found->second.point)) return {StatusCode::not_ready, "query"};
  order_.host_learns(found->second.point);
  return status;
}

Status OrderChecker::wait(Fence fence) {
  const MutexLock lock(mutex_);
  const Status status = inner_.wait(fence);
  const auto found = fences_.find(fence);
  if (!status.ok() || found == fences_.end()) return status;
  if (covers_copies(found->second.point)) ++counts_.host_waits_for_copies;
  order_.finish(found->second.point);
  order_.host_learns(found->second.point);
  return status;
}

Status OrderChecker::stream_wait(int device, Stream stream, Fence fence) {
  const MutexLock lock(mutex_);
  const auto found = fences_.find(fence);
  if (found == fences_.end()) return inner_.stream_wait(device, stream, fence);
  Lane lane = 0;
  if (const Status known = lane_of_call("stream_wait", {stream, device}, &lane); !known.ok()) {
    return known;
  }
  if (order_.is_captured(lane) || order_.stands_before_a_capture(lane)) return captured("a wait during a capture");
  const Status status = inner_.stream_wait(device, stream, fence);
  if (!status.ok()) return status;
  if (copies_.count(lane) == 0 && covers_copies(found->second.point)) ++counts_.stream_waits_for_copies;
  order_.wait(lane, found->second.point);
  return status;
}

Status OrderChecker::synchronize(int device) {
  const MutexLock lock(mutex_);
  const Status status = inner_.synchronize(device);
  if (!status.ok()) return status;
  const VectorClock all = order_.all_of(device);
  if (covers_copies(all)) ++counts_.host_waits_for_copies;
  order_.finish(all);
  order_.host_learns(all);
  return status;
}

Status OrderChecker::create_stream(int device, Stream* out) {
  const Status status = inner_.create_stream(device, out);
  if (status.ok()) add_stream({*out, device, /*blocking=*/false, "own"});
  return status;
}

// -- Content

// Rule 2. The bytes are the allocator's from here on: whoever gets them comes
// after the filling.
void OrderChecker::fill(Lane lane, Address address, std::size_t size) {
  const VectorClock before = order_.reach(lane);
  const Seq seq = queue(lane, "allocator's fill", address, size);
  const auto who = [&]() VMM_REQUIRES(mutex_) { return text_of(lane, seq); };
  if (!memory_.is_accessible(address, size, order_.device_of(lane), Access::read_write)) {
    violate(who() + " touches memory that is not mapped for its device");
  }
  memory_.each_mapping(address, size, [&](Address /*at*/, Mapping& mapping) {
    mapping.uses.note(lane, seq, /*is_write=*/true, /*is_replay=*/false);
  });
  memory_.each_piece(address, size, [&](const Stretch& stretch, Piece& piece) VMM_REQUIRES(mutex_) {
    if (is_held(piece)) violate(who() + " writes " + bytes_text(stretch) + ", held by " + text_of(piece.owner));
    piece.former.join(piece.uses);
    piece.uses.clear();
    const std::string late = first_late(piece.former, &LaneUses::any, before);
    if (!late.empty()) violate(who() + ": " + bytes_text(stretch) + " comes without order after " + late);
    if (!all_done(piece.former)) ++counts_.filled;
    piece.uses.note(lane, seq, /*is_write=*/true, /*is_replay=*/false);
    piece.moved.note(lane, seq, /*is_write=*/true, /*is_replay=*/false);
    if (piece.block == 0) piece.owner = {kAllocator, order_.device_of(lane), order_.handle_of(lane)};
  });
}

Status OrderChecker::fill_async(int device, Address address, std::uint8_t byte, std::size_t size, Stream stream) {
  const MutexLock lock(mutex_);
  Lane lane = 0;
  if (const Status known = lane_of_call("fill_async", {stream, device}, &lane); !known.ok()) return known;
  if (order_.is_captured(lane) || order_.stands_before_a_capture(lane)) return captured("a fill during a capture");
  const Status status = inner_.fill_async(device, address, byte, size, stream);
  if (may_have_begun(status)) fill(lane, address, size);
  return status;
}

// One side of a copy. It reads what is there, after all writes, or writes what is there, after all
// uses. Either side may be plain memory of the host, of which nothing is known.
void OrderChecker::copy(Lane lane, Address address, std::size_t size, Seq seq, const VectorClock& before,
                        bool is_write) {
  memory_.each_mapping(address, size,
                       [&](Address /*at*/, Mapping& mapping) { mapping.uses.note(lane, seq, is_write, false); });
  memory_.each_piece(address, size, [&](const Stretch& stretch, Piece& piece) VMM_REQUIRES(mutex_) {
    if (is_write && is_held(piece)) {
      violate(text_of(lane, seq) + " writes " + bytes_text(stretch) + ", held by " + text_of(piece.owner));
    }
    for (const UseSet* uses : {&piece.uses, &piece.former}) {
      const std::string late = first_late(*uses, is_write ? &LaneUses::any : &LaneUses::write, before);
      if (!late.empty()) {
        violate(text_of(lane, seq) + ": " + bytes_text(stretch) + " comes without order after " + late);
      }
      if (!all_done(*uses)) ++counts_.copied;
    }
    piece.uses.note(lane, seq, is_write, false);
    piece.moved.note(lane, seq, is_write, false);
  });
}

Status OrderChecker::copy_async(int device, Address to, Address from, std::size_t size, Stream stream) {
  const MutexLock lock(mutex_);
  Lane lane = 0;
  if (const Status known = lane_of_call("copy_async", {stream, device}, &lane); !known.ok()) return known;
  if (order_.is_captured(lane) || order_.stands_before_a_capture(lane)) return captured("a copy during a capture");
  const VectorClock before = order_.reach(lane);
  const Status status = inner_.copy_async(device, to, from, size, stream);
  if (!may_have_begun(status)) return status;
  const Seq seq = queue(lane, "allocator's copy", to, size);
  copies_[lane] = seq;
  copy(lane, from, size, seq, before, /*is_write=*/false);
  copy(lane, to, size, seq, before, /*is_write=*/true);
  return status;
}

// The host reads what is there: after all writes that it knows to be done.
Status OrderChecker::read(int device, void* to, Address from, std::size_t size) {
  const MutexLock lock(mutex_);
  const Status status = inner_.read(device, to, from, size);
  if (!status.ok()) return status;
  memory_.each_piece(from, size, [&](const Stretch& stretch, Piece& piece) VMM_REQUIRES(mutex_) {
    for (const UseSet* uses : {&piece.uses, &piece.former}) {
      const std::string late = first_late(*uses, &LaneUses::write, order_.host());
      if (!late.empty()) violate("a read of " + bytes_text(stretch) + " comes without order after " + late);
    }
  });
  return status;
}

}  // namespace vmm::testing
