// Which streams a device has, and the driver's fences for them. It never knows
// what the streams work on.
//
// A point in the work of a device has to cover every stream that may be reading
// its memory. Streams are of four kinds:
//   the default stream    always there
//   permanent             live as long as the process (torch never destroys its
//                         own); each gets a fence of its own
//   blocking              somebody else's, may be destroyed at any time. A fence
//                         on the default stream covers it, by CUDA's rule for
//                         blocking streams, so its handle is never needed; that
//                         goes for every thread's per-thread stream too
//   unreachable           somebody else's and not blocking: no fence of ours
//                         covers it, and its handle may be dead at any time
//                         (driver 580 crashes when it is handed one). Only
//                         Driver::synchronize() waits for it
//
// Lock: a leaf but for the driver's own.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <unordered_set>
#include <vector>

#include "base/status.h"
#include "base/sync.h"
#include "driver/driver.h"

namespace vmm {

// CUDA's cudaStreamLegacy and cudaStreamPerThread. The handle of the latter
// names another stream on each thread.
inline const Stream kLegacyStream = reinterpret_cast<Stream>(std::uintptr_t{1});
inline const Stream kPerThreadStream = reinterpret_cast<Stream>(std::uintptr_t{2});

enum class StreamKind : std::uint8_t { default_stream, permanent, blocking, unreachable };
// Its name means the same stream for ever. Another's may be given to a new stream
// when it has been destroyed, or means another one on each thread.
constexpr bool is_lasting(StreamKind kind) {
  return kind == StreamKind::permanent || kind == StreamKind::default_stream;
}

// What only the one who made the streams can tell.
struct StreamCensus {
  // Appends the permanent streams that there are now. Asked for each point, so
  // that a stream counts although no pool has met it.
  std::function<void(std::vector<Stream>*)> permanent;
  // Of a stream that is none of these, and alive: is it blocking?
  std::function<bool(Stream)> is_blocking;
  // Without the former, so many of those that are met are permanent; later ones come and go, as
  // blocking ones do. For devices whose work is done when its call returns.
  std::size_t most_met = kUnlimited;
};

class DeviceStreams {
 public:
  DeviceStreams(Driver& driver, int device) : driver_(driver), device_(device) {}
  DeviceStreams(const DeviceStreams&) = delete;
  DeviceStreams& operator=(const DeviceStreams&) = delete;
  ~DeviceStreams();

  // Without a census each stream that is met counts as permanent.
  void set_census(StreamCensus census) VMM_EXCLUDES(mutex_);
  // One of our own, which lives as long as this: permanent, and in no census.
  void add_own(Stream stream) VMM_EXCLUDES(mutex_);
  // A pool meets `stream`. REQUIRES: it is alive.
  StreamKind meet(Stream stream) VMM_EXCLUDES(mutex_);
  // The streams that need a fence each, for a point over all work: the default
  // one and the permanent ones.
  [[nodiscard]] std::vector<Stream> to_record() VMM_EXCLUDES(mutex_);
  // An unreachable stream has been met: fences alone cover not all work.
  [[nodiscard]] bool has_unreachable() const { return has_unreachable_.load(std::memory_order_acquire); }
  // How many of the former were known when last counted.
  [[nodiscard]] std::size_t count() const { return count_.load(std::memory_order_relaxed); }

  // nullptr where the driver makes no more.
  [[nodiscard]] Fence take_fence() VMM_EXCLUDES(mutex_);
  // There is room for it since it was made.
  void put_back(Fence fence) noexcept VMM_EXCLUDES(mutex_);
  // Gives the driver back those that nobody has taken.
  void destroy_free_fences() VMM_EXCLUDES(mutex_);

  [[nodiscard]] Driver& driver() const { return driver_; }
  [[nodiscard]] int device() const { return device_; }

 private:
  void take_census() VMM_REQUIRES(mutex_);
  void add_permanent(Stream stream) VMM_REQUIRES(mutex_);

  Driver& driver_;
  const int device_;
  std::atomic<bool> has_unreachable_{false};
  std::atomic<std::size_t> count_{1};  // the default stream
  Mutex mutex_;
  StreamCensus census_ VMM_GUARDED_BY(mutex_);
  std::vector<Stream> permanent_ VMM_GUARDED_BY(mutex_);  // of the census, or met
  std::vector<Stream> own_ VMM_GUARDED_BY(mutex_);
  std::unordered_set<Stream> known_ VMM_GUARDED_BY(mutex_);  // all of these
  std::vector<Stream> counted_ VMM_GUARDED_BY(mutex_);       // the census's latest answer
  std::vector<Fence> free_ VMM_GUARDED_BY(mutex_);
  std::size_t fences_ VMM_GUARDED_BY(mutex_) = 0;  // that there are, taken or free
};

}  // namespace vmm
