// A point in the work of some streams: of those that record_stream() named for
// a block, or of all streams of a device (a tick of its clock). It never knows
// what waits for it.
//
// A stream that is being captured cannot be recorded: CUDA would make the fence
// part of the graph. Its part is recorded when somebody asks and the capture is
// over: later than it should be, so never too early. The same goes for a
// driver call that failed.
//
// Thread-safe. Its lock stands above DeviceStreams'; no wait happens under it.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/status.h"
#include "base/sync.h"
#include "core/streams/device_streams.h"

namespace vmm {

// A stream that uses memory, and which device's it is.
struct StreamUse {
  DeviceStreams* device = nullptr;
  Stream stream = nullptr;
  StreamKind kind = StreamKind::permanent;
  friend bool operator==(const StreamUse& a, const StreamUse& b) {
    return a.device == b.device && a.stream == b.stream;
  }
};

class StreamPoint {
 public:
  // After what these streams have queued until now. An unreachable stream among
  // them must be alive: torch asks the same of a stream that a tensor was
  // recorded on, until the tensor is freed.
  explicit StreamPoint(const std::vector<StreamUse>& uses);
  // After all work of these devices.
  explicit StreamPoint(const std::vector<DeviceStreams*>& devices);
  StreamPoint(const StreamPoint&) = delete;
  StreamPoint& operator=(const StreamPoint&) = delete;
  ~StreamPoint();

  // The stream whose fence tells of this use: the default stream's covers every
  // blocking stream as well.
  static Stream stream_of_fence(const StreamUse& use) {
    return use.kind == StreamKind::permanent || use.kind == StreamKind::unreachable ? use.stream : nullptr;
  }

  // True once the work before this point is known to be done. Never waits. With
  // `queued_is_done` all that was queued before the point is known to be done
  // (the device's clock says so), and only what is being captured is left.
  [[nodiscard]] bool passed(bool queued_is_done = false) VMM_EXCLUDES(mutex_);
  // Blocks the calling thread until all that was queued before this point is
  // done; what is being captured is not queued.
  Status wait() VMM_EXCLUDES(mutex_);
  // Work queued on the stream from now on comes after this point: the GPU waits,
  // not the caller. not_supported: the stream is being captured, or no fence
  // covers some of the work (a capture in the way, an unreachable stream).
  Status order_before(const StreamUse& later) VMM_EXCLUDES(mutex_);
  // Every part that can have a fence has one: nothing is in the way.
  [[nodiscard]] bool is_recorded() VMM_EXCLUDES(mutex_);
  // Of some part no fence ever stands: it has passed when somebody has waited for all of the device.
  [[nodiscard]] bool has_unreachable() VMM_EXCLUDES(mutex_);

 private:
  struct Part {
    DeviceStreams* device = nullptr;
    Stream stream = nullptr;
    Fence fence = nullptr;
    enum class State : std::uint8_t {
      failed,    // the driver refused: to be tried again
      captured,  // the stream was being captured: to be tried again
      recorded,  // `fence` tells
      no_fence,  // only Driver::synchronize() tells
    } state = State::failed;
  };

  StreamPoint() = default;
  void add(DeviceStreams& device, Stream stream) VMM_REQUIRES(mutex_);
  void append(DeviceStreams& device, Stream stream) VMM_REQUIRES(mutex_);
  static bool try_record(Part& part);
  bool passed_locked(bool queued_is_done) VMM_REQUIRES(mutex_);
  bool record_all() VMM_REQUIRES(mutex_);
  Status synchronize(DeviceStreams& device) VMM_EXCLUDES(mutex_);

  Mutex mutex_;
  std::vector<Part> parts_ VMM_GUARDED_BY(mutex_);       // those that are not known to have passed
  std::vector<StreamUse> later_ VMM_GUARDED_BY(mutex_);  // lasting streams that wait for it already
};
using StreamPointPtr = std::shared_ptr<StreamPoint>;

}  // namespace vmm
