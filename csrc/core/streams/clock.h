// A device's clock: has all work that was queued before some moment been done?
// It never knows a block, a chunk or an address.
//
// Nobody knows who reads a tensor. Programs leave record_stream() out and rely
// on what torch's native allocator gives them: memory never leaves its stream,
// so that it is enough to wait before the owner's next use. So memory leaves
// its stream here (for another stream or model, the shelf, the driver, another
// process), and an address is unmapped, only behind a point over all streams of
// every device that can reach the memory, recorded after the free.
//
// Time is an epoch that rises with each tick. What is freed notes the epoch of
// that moment; a tick records a fence on every stream and covers everything
// noted up to its epoch. "May it leave?" compares two integers. A tick costs
// 0.3 to 0.5 us a stream (42 to 64 us where torch has made all of its 128), serves whatever
// was freed before it, on every pool, and is made when somebody asks for what
// no earlier tick covers.
//
// It never ends a stream capture, announced or not. cuCtxRecordEvent would be
// cheaper than a fence a stream, but it ends every capture of the context. What
// a captured stream had queued before is covered once the capture is over, or
// by wait().
//
// Thread-safe. Its lock stands below the pools' and above StreamPoint's.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "base/status.h"
#include "base/sync.h"
#include "core/streams/device_streams.h"
#include "core/streams/stream_point.h"

namespace vmm {

using Epoch = std::uint64_t;
inline constexpr Epoch kLongAgo = 0;  // nothing to wait for

class Clock {
 public:
  explicit Clock(DeviceStreams& own) : devices_{&own} {}
  Clock(const Clock&) = delete;
  Clock& operator=(const Clock&) = delete;

  // Work on the streams of `peer` may use this device's memory from now on.
  void add_peer(DeviceStreams& peer) VMM_EXCLUDES(mutex_);

  // The epoch that something freed now has to note. All work queued before this
  // call is covered by the tick that ends the epoch.
  //
  // Sequentially consistent: the load must not come before the launches that
  // the calling thread made, or a tick could fall in between.
  [[nodiscard]] Epoch now() const { return now_.load(std::memory_order_seq_cst); }
  // What noted `epoch` is used by nobody any more. One comparison; poll() is
  // what makes it true.
  [[nodiscard]] bool has_passed(Epoch epoch) const { return epoch <= passed_.load(std::memory_order_acquire); }
  // Asks the driver which ticks have passed; true if one more has. About 0.3 us
  // while the oldest has not.
  bool poll() VMM_EXCLUDES(mutex_);
  // Makes sure that a tick covers `epoch`, so that it can pass by itself.
  void cover(Epoch epoch) VMM_EXCLUDES(mutex_);
  // The same for what nobody waits for, of which there may be much: not while so many ticks
  // are under way that the GPU is far behind. To be asked again then.
  void cover_in_time(Epoch epoch) VMM_EXCLUDES(mutex_);
  // The same, and whether `epoch` passes in the moment that a GPU with nothing to do takes for its
  // fences: until the oldest tick under way is 100 us old, so not at all where it is busy.
  bool passes_at_once(Epoch epoch) VMM_EXCLUDES(mutex_);
  // Work queued on the stream from now on comes after what `epoch` stands for:
  // the GPU waits, the caller does not. not_supported: as StreamPoint's.
  Status order_before(const StreamUse& later, Epoch epoch) VMM_EXCLUDES(mutex_);
  // Blocks the calling thread until `epoch` has passed. REQUIRES: no lock of a
  // pool is held.
  Status wait(Epoch epoch) VMM_EXCLUDES(mutex_);
  // Blocks it for everything queued until now, on streams that nobody knows too, as
  // native's cudaFree waits. A pool's lock may be held: nothing of ours runs meanwhile.
  Status synchronize() VMM_EXCLUDES(mutex_);
  // Whether the latest tick has no fence, as beside a capture: nothing is ordered by the GPU
  // behind what was freed since the one before.
  [[nodiscard]] bool is_without_fence() const VMM_EXCLUDES(mutex_);
  // Whether it passes only when somebody waits for all of the device: beside a stream that no fence
  // can stand on, not beside a capture, which ends.
  [[nodiscard]] bool has_unreachable() const VMM_EXCLUDES(mutex_);
  // The newest epoch known to have passed.
  [[nodiscard]] Epoch passed() const { return passed_.load(std::memory_order_acquire); }

  // `bytes` of memory were freed. Ticks ahead of need where memory has lately
  // been wanted before its epoch had passed, so that the next one finds it
  // passed.
  void freed(std::size_t bytes) {
    if (credit_.load(std::memory_order_relaxed) != 0) [[unlikely]]
      tick_ahead(bytes);
  }

  // Streams that a tick records: what one costs.
  [[nodiscard]] std::size_t streams() const VMM_EXCLUDES(mutex_);

  // Captures that are announced: a tick right before one lets all that was
  // freed until then pass while it runs.
  void begin_capture() VMM_EXCLUDES(mutex_);
  void end_capture() { captures_.fetch_sub(1, std::memory_order_acq_rel); }
  [[nodiscard]] bool is_capturing() const { return captures_.load(std::memory_order_acquire) != 0; }

  // Ticks that have not passed, for tests.
  [[nodiscard]] std::size_t ticks_under_way() const VMM_EXCLUDES(mutex_);

 private:
  struct Tick {
    Epoch epoch = kLongAgo;  // the last one that it covers
    StreamPointPtr point;
    std::chrono::steady_clock::time_point made;
  };
  StreamPointPtr covering(Epoch epoch) const VMM_REQUIRES(mutex_);
  void cover(Epoch epoch, std::size_t most_under_way) VMM_EXCLUDES(mutex_);
  StreamPointPtr tick() VMM_REQUIRES(mutex_);
  bool poll_locked() VMM_REQUIRES(mutex_);
  void has_passed_until(Epoch epoch) VMM_REQUIRES(mutex_);
  bool has_obstacle() const VMM_REQUIRES(mutex_);
  [[nodiscard]] std::size_t streams_locked() const VMM_REQUIRES(mutex_);
  void tick_ahead(std::size_t bytes) VMM_EXCLUDES(mutex_);

  std::atomic<Epoch> now_{1};
  std::atomic<Epoch> passed_{kLongAgo};
  std::atomic<int> captures_{0};
  std::atomic<int> credit_{0};         // ticks that may still be made ahead of need
  std::atomic<std::size_t> freed_{0};  // bytes since the latest tick
  mutable Mutex mutex_;
  std::vector<DeviceStreams*> devices_ VMM_GUARDED_BY(mutex_);  // its own first
  std::deque<Tick> ticks_ VMM_GUARDED_BY(mutex_);               // that have not passed, oldest first
};

}  // namespace vmm
