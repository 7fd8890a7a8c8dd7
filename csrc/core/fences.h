// Points in streams' work: what has been freed since which fence, and which
// fences have passed. It never knows a block, a chunk or an address.
//
// Recording costs 0.2 us and querying 0.25 us, so a fence is made where memory
// is about to leave its place, not at every free.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <vector>

#include "base/status.h"
#include "base/sync.h"
#include "driver/driver.h"

namespace vmm {

class FencePool;

// CUDA's cudaStreamPerThread.
inline const Stream kPerThreadStream = reinterpret_cast<Stream>(std::uintptr_t{2});

// One recorded fence, shared by everything that left its place at that point.
//
// The handle of the per-thread default stream names another stream on each
// thread, and whoever frees need not be who used: its points are over all
// streams.
//
// A stream that is being captured cannot be recorded (CUDA would end the
// capture). Its point is recorded when the capture is over, by whoever asks
// next: later than it should be, so never too early. Thread-safe.
class FencePoint {
 public:
  FencePoint(FencePool& pool, Stream stream, bool all_streams);
  FencePoint(const FencePoint&) = delete;
  FencePoint& operator=(const FencePoint&) = delete;
  ~FencePoint();

  // True once the work before this point is done. Never waits.
  [[nodiscard]] bool passed();
  // Blocks the calling thread until passed. False, at once, while a capture
  // stands in the way: what it waits for runs when a graph is replayed.
  bool wait();
  // Work queued on `stream` from now on comes after this point. Nothing to do
  // on the point's own stream: order makes it so. not_supported: a capture
  // stands in the way.
  Status order_before(Stream stream);

 private:
  // False while a capture stands in the way.
  bool is_recorded() VMM_EXCLUDES(mutex_);
  bool record_locked() VMM_REQUIRES(mutex_);

  FencePool& pool_;
  Stream stream_;
  Mutex mutex_;  // for recording; above the pool's
  Fence fence_ = nullptr;
  std::atomic<bool> all_streams_;
  std::atomic<bool> recorded_{false};
  std::atomic<bool> passed_{false};
};
using FencePointPtr = std::shared_ptr<FencePoint>;

// Makes points for one device and reuses the driver's fences. Thread-safe.
class FencePool {
 public:
  FencePool(Driver& driver, int device) : driver_(driver), device_(device) {}
  FencePool(const FencePool&) = delete;
  FencePool& operator=(const FencePool&) = delete;
  ~FencePool();

  // A point after all work queued on `stream`. Where the stream is no more, or
  // the driver cannot say, a point after all work of the device.
  FencePointPtr record(Stream stream) { return std::make_shared<FencePoint>(*this, stream, /*all_streams=*/false); }
  // A point after all work of the device, on streams known to us or not.
  FencePointPtr record_all() { return std::make_shared<FencePoint>(*this, nullptr, /*all_streams=*/true); }

  // While a capture runs on the device, points over all streams wait for its
  // end: recording one would invalidate the capture.
  void begin_capture() { captures_.fetch_add(1, std::memory_order_acq_rel); }
  void end_capture() { captures_.fetch_sub(1, std::memory_order_acq_rel); }
  [[nodiscard]] bool is_capturing() const { return captures_.load(std::memory_order_acquire) != 0; }

  // A stream that somebody else made and may destroy at any time. CUDA crashes
  // when it is handed a stream that is no more, so it never is: points of this
  // one are over all streams.
  void add_foreign(Stream stream) VMM_EXCLUDES(mutex_);
  [[nodiscard]] bool is_foreign(Stream stream) VMM_EXCLUDES(mutex_);

  [[nodiscard]] Driver& driver() const { return driver_; }
  [[nodiscard]] int device() const { return device_; }

 private:
  friend class FencePoint;
  Fence take();
  void put_back(Fence fence);

  Driver& driver_;
  int device_;
  std::atomic<int> captures_{0};
  Mutex mutex_;
  std::vector<Fence> free_ VMM_GUARDED_BY(mutex_);
  std::set<Stream> foreign_ VMM_GUARDED_BY(mutex_);
  std::atomic<bool> any_foreign_{false};
};

// The points that must pass before a place or a chunk is nobody's any more.
class FenceSet {
 public:
  void add(FencePointPtr point);
  void add_all(const FenceSet& other);
  [[nodiscard]] bool passed();
  // Waits for those that can be waited for; true when none is left.
  bool wait();
  Status order_before(Stream stream);
  void clear() { points_.clear(); }
  [[nodiscard]] bool empty() const { return points_.empty(); }

 private:
  std::vector<FencePointPtr> points_;
};

}  // namespace vmm
