// What stands on the devices: streams with their queued work, events, captures
// and graphs, all under one lock. Data only: queue.h runs it, captures.h has
// the rules of captures.
//
// Handles are pointers to these, and none is ever deleted, so a dead handle is
// known as such.
#pragma once

#include <cuda.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace standin {

using Clock = std::chrono::steady_clock;
using Lock = std::unique_lock<std::mutex>;

// A place in a stream's work: passed once all before it is done.
struct Point {
  bool passed = false;
  Clock::time_point at;
  std::function<bool()> elsewhere;  // of another process's stream: asked until it says so
};
using PointPtr = std::shared_ptr<Point>;

// One piece of work, as streams queue it and graphs keep it.
struct Job {
  std::string call;                     // who asked for it
  std::function<void(int device)> run;  // may be empty
  Clock::duration takes{};              // before it is done, from when it is the stream's first; see queue.h
};
using JobPtr = std::shared_ptr<const Job>;

struct Queued {
  JobPtr job;
  std::vector<PointPtr> after;
  PointPtr end = std::make_shared<Point>();
  std::optional<Clock::time_point> until;
  bool running = false;
  bool awaited = false;  // somebody waits until it is done
};

struct Node {
  JobPtr job;
  std::set<std::size_t> after;
};

struct Graph {
  std::vector<Node> nodes;  // in an order that keeps every `after`
  bool alive = true;
};

struct Executable {
  std::vector<JobPtr> jobs;
  bool alive = true;
};

struct Stream;

struct Capture {
  std::uint64_t id = 0;
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  std::thread::id thread;
  Stream* origin = nullptr;
  std::vector<Stream*> streams;  // that have joined, the origin too
  Graph* graph = nullptr;
  bool invalidated = false;
  bool ended = false;
};
using CapturePtr = std::shared_ptr<Capture>;

// Where a captured stream or event stands: the next work comes after these nodes.
struct Captured {
  CapturePtr capture;
  std::set<std::size_t> frontier;
};

struct Stream {
  int device = 0;
  unsigned flags = 0;
  int priority = 0;
  bool legacy = false;
  bool everywhere = false;  // carries records over all streams only
  bool alive = true;
  bool held = false;
  std::deque<Queued> queue;
  PointPtr last;  // null: nothing was ever queued
  Captured captured;

  // Waits for the legacy stream, and that one for it.
  [[nodiscard]] bool blocking() const { return !legacy && (flags & CU_STREAM_NON_BLOCKING) == 0; }
};

struct Event {
  int device = 0;
  unsigned flags = 0;
  bool alive = true;
  PointPtr point;  // null: never recorded
  Captured captured;
  struct Shared* shared = nullptr;  // what other processes see of it
  int shared_fd = -1;
};

struct World {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::unique_ptr<Stream>> streams;
  std::set<const Event*> events;
  std::set<const Graph*> graphs;
  std::set<const Executable*> executables;
  std::vector<CapturePtr> captures;  // that have not ended
  std::uint64_t next_capture = 1;
  std::size_t queued = 0;   // over all streams
  std::size_t running = 0;  // of it
  bool has_ticker = false;
  bool ended = false;
};

// Never destroyed.
World& world();

}  // namespace standin
