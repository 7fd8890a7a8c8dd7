// Which queued work comes after which other: streams, events, captures and what
// the host has seen, as CUDA orders them. It knows no memory and no driver.
//
// Work does not run by itself here. It is done when the test says so (run(),
// drift(), or somebody waits for it), and never before what it comes after; so
// streams progress on their own, and a kernel may take as long as a test likes.
//
// - A stream's work runs in order. Work queued now also comes after what its
//   stream was made to wait for, and after all that the host knows to be done.
// - The default stream (nullptr) of a device: its work comes after all that was
//   queued before on the device's blocking streams and on every thread's
//   per-thread default stream, and theirs after its (CUDA's legacy rule). So an
//   event recorded there covers them; no other event covers more than its own
//   stream and what that waited for.
// - kPerThread is another stream on each thread.
// - A stream may be destroyed while it has work: the work goes on, the handle
//   means nothing any more, until a new stream happens to get the same one.
// - What is queued on a captured stream is not work: it is written down, and
//   becomes work on the stream where the graph is launched. What the stream had
//   queued before goes on.
//
// One host clock for all threads: what one of them has seen done, all are taken
// to know. For a program that calls from one thread at a time that is exact.
// Where threads run side by side it forgives a thread that relies on what
// another one saw; to do so without synchronising with it is a data race, which
// ThreadSanitizer finds, not a wrong order of GPU work.
#pragma once

#include <deque>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "driver/driver.h"
#include "support/vector_clock.h"

namespace vmm::testing {

// CUDA's cudaStreamPerThread.
inline const Stream kPerThread = reinterpret_cast<Stream>(std::uintptr_t{2});

struct StreamSpec {
  Stream handle = nullptr;
  int device = 0;
  bool blocking = false;  // keeps order with the device's default stream
  std::string name;       // for messages
};

// A stream as a program names it: nullptr and kPerThread exist on each device.
struct StreamRef {
  Stream handle = nullptr;
  int device = 0;
};

using CaptureId = std::uint64_t;  // from 1; 0: none

class WorkOrder {
 public:
  // -- Streams. The default and the per-thread ones are there from the start.
  void add_stream(const StreamSpec& spec);
  // REQUIRES: alive, not captured.
  void destroy_stream(Stream handle);
  // The lane that a call by this thread reaches by this name; none: the stream
  // has been destroyed, or was never made.
  [[nodiscard]] std::optional<Lane> find(StreamRef stream);
  [[nodiscard]] int device_of(Lane lane) const { return lanes_[lane].device; }
  [[nodiscard]] const std::string& name_of(Lane lane) const { return lanes_[lane].name; }
  [[nodiscard]] Stream handle_of(Lane lane) const { return lanes_[lane].handle; }
  [[nodiscard]] bool is_blocking(Lane lane) const { return lanes_[lane].blocking; }
  [[nodiscard]] bool is_per_thread(Lane lane) const { return lanes_[lane].handle == kPerThread; }

  // -- Order. All that work queued on the lane now would come after: also what
  // an event recorded there now covers.
  [[nodiscard]] VectorClock reach(Lane lane) const;
  // Queues a piece of work and returns its number. A long one is not done by
  // drift().
  Seq queue(Lane lane, bool is_long = false);
  // Work queued on the lane from now on comes after `point`.
  void wait(Lane lane, const VectorClock& point);

  // -- The host
  [[nodiscard]] const VectorClock& host() const { return host_; }
  void host_learns(const VectorClock& point) { host_.join(point); }

  // -- Running
  [[nodiscard]] bool is_done(const VectorClock& point) const { return done_.covers(point); }
  [[nodiscard]] bool is_done(Lane lane, Seq seq) const { return done_.covers(lane, seq); }
  // Everything up to `point` gets done: somebody waits for it. (A point names
  // with each piece of work also what that comes after.)
  void finish(const VectorClock& point) { done_.join(point); }
  // All that is queued on the device, on streams that are no more too.
  [[nodiscard]] VectorClock all_of(int device) const;
  // Up to `count` more pieces of the lane get done, as far as what they come
  // after is.
  void run(Lane lane, std::size_t count);
  // Perhaps one piece of work somewhere gets done.
  void drift(std::mt19937_64& random);

  // -- Captures
  // REQUIRES: the lane is not captured, nor a default stream.
  CaptureId begin_capture(Lane lane);
  // REQUIRES: the capture is valid and the lane is in none.
  void join_capture(Lane lane, CaptureId capture);
  // It becomes invalid: its lanes stay captured until it is ended.
  void invalidate(CaptureId capture) { captures_.at(capture) = false; }
  void end_capture(CaptureId capture);
  [[nodiscard]] bool is_captured(Lane lane) const { return lanes_[lane].capture != 0; }
  // 0 also while it is in one that has become invalid.
  [[nodiscard]] CaptureId capture_of(Lane lane) const;
  // On the default stream, while a stream that it keeps order with is captured:
  // CUDA refuses work and events there, and ends the capture.
  [[nodiscard]] bool stands_before_a_capture(Lane lane) const;

 private:
  struct Work {
    Seq seq = 0;
    bool is_long = false;
    VectorClock after;
  };
  struct LaneState {
    Stream handle = nullptr;
    int device = 0;
    bool blocking = false;
    std::string name;
    Seq queued = 0;
    VectorClock after;       // what its next work comes after, besides its own
    std::deque<Work> works;  // that were not done when last looked at
    CaptureId capture = 0;
  };
  Lane add_lane(const StreamSpec& spec);
  [[nodiscard]] const Work* next_work(Lane lane);
  [[nodiscard]] std::optional<Lane> default_lane(int device) const;

  std::vector<LaneState> lanes_;
  std::map<Stream, Lane> by_handle_;  // alive
  std::map<int, Lane> defaults_;      // by device
  std::map<std::pair<int, std::thread::id>, Lane> per_thread_;
  std::map<CaptureId, bool> captures_;  // that run; true: valid
  CaptureId last_capture_ = 0;
  VectorClock host_;
  VectorClock done_;
};

}  // namespace vmm::testing
