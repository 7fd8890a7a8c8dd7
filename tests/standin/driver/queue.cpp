#include "queue.h"

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <map>
#include <utility>

#include "captures.h"
#include "machine.h"

namespace standin {
namespace {

using std::chrono::milliseconds;

bool is_ready(Stream& stream) {
  if (stream.held || stream.queue.empty() || world().ended) return false;
  Queued& first = stream.queue.front();
  if (first.running || !std::all_of(first.after.begin(), first.after.end(), has_passed)) return false;
  if (first.job->takes == Clock::duration::zero() || first.awaited) return true;
  if (!first.until) first.until = Clock::now() + first.job->takes;
  return Clock::now() >= *first.until;
}

void run_first(Lock& lock, Stream& stream) {
  Queued& first = stream.queue.front();  // stays where it is while others are queued behind it
  first.running = true;
  std::exception_ptr refused;
  if (first.job->run) {
    const JobPtr job = first.job;
    ++world().running;
    lock.unlock();
    try {
      job->run(stream.device);
    } catch (...) {  // an operator that takes no such tensors: the stream goes on behind it
      refused = std::current_exception();
    }
    lock.lock();
    --world().running;
  }
  first.end->passed = true;
  first.end->at = Clock::now();
  stream.queue.pop_front();
  --world().queued;
  world().changed.notify_all();
  if (refused != nullptr) std::rethrow_exception(refused);
}

// Looks every millisecond while anything is queued.
void tick() {
  World& here = world();
  Lock lock(here.mutex);
  for (;;) {
    pump(lock);
    if (here.queued == 0) {
      here.changed.wait(lock);
    } else {
      here.changed.wait_for(lock, milliseconds(1));
    }
  }
}

// What is queued when the process ends is not done: what it needs is on its way out.
void end_work() {
  Lock lock(world().mutex);
  world().ended = true;
  world().changed.wait(lock, [] { return world().running == 0; });
}

void wake_ticker() {
  world().changed.notify_all();
  if (world().has_ticker) return;
  world().has_ticker = true;
  (void)std::atexit(end_work);
  std::thread(tick).detach();
}

// Somebody waits for the point: work that only takes time ends, as far as the
// point stands behind it.
void await(const PointPtr& point) {
  if (has_passed(point)) return;
  for (const auto& stream : world().streams) {
    const auto awaited =
        std::find_if(stream->queue.begin(), stream->queue.end(), [&](const Queued& work) { return work.end == point; });
    if (awaited == stream->queue.end() || awaited->awaited) continue;
    for (auto work = stream->queue.begin(); work <= awaited; ++work) {
      work->awaited = true;
      for (const PointPtr& before : work->after) await(before);
    }
  }
}

bool takes_its_time(const Queued& work) {
  if (work.job->takes != Clock::duration::zero()) return true;
  return std::any_of(work.after.begin(), work.after.end(), [](const PointPtr& point) { return !!point->elsewhere; });
}

}  // namespace

World& world() {
  static auto* const kInstance = new World;
  return *kInstance;
}

Stream& make_stream(int device, unsigned flags, int priority) {
  auto stream = std::make_unique<Stream>();
  stream->device = device;
  stream->flags = flags;
  stream->priority = priority;
  world().streams.push_back(std::move(stream));
  return *world().streams.back();
}

Stream& legacy_stream(int device) {
  for (const auto& stream : world().streams) {
    if (stream->legacy && stream->device == device) return *stream;
  }
  Stream& made = make_stream(device, 0, 0);
  made.legacy = true;
  return made;
}

Stream& stream_of(CUstream handle, const char* call) {
  if (handle == nullptr || handle == CU_STREAM_LEGACY) return legacy_stream(current_device());
  if (handle == CU_STREAM_PER_THREAD) {
    thread_local std::map<int, Stream*> own;
    Stream*& stream = own[current_device()];
    if (stream == nullptr) stream = &make_stream(current_device(), 0, 0);
    return *stream;
  }
  for (const auto& stream : world().streams) {
    if (handle_of(*stream) != handle) continue;
    if (!stream->alive) die(call, "on a stream that was destroyed");
    return *stream;
  }
  die(call, "on what is no stream: " + std::to_string(reinterpret_cast<std::uintptr_t>(handle)));
}

CUstream handle_of(const Stream& stream) { return reinterpret_cast<CUstream>(const_cast<Stream*>(&stream)); }

CUresult submit(Lock& lock, Stream& stream, JobPtr job, const std::vector<PointPtr>& after, PointPtr* end) {
  if (stream.captured.capture != nullptr) return capture_job(stream, std::move(job));
  if (const CUresult refused = refuse_implicit(stream, /*invalidates=*/true); refused != CUDA_SUCCESS) return refused;
  Queued work;
  work.job = std::move(job);
  const auto wait_for = [&work](const PointPtr& point) {
    if (!has_passed(point)) work.after.push_back(point);
  };
  for (const PointPtr& point : after) wait_for(point);
  if (stream.legacy) {
    for (const auto& other : world().streams) {
      if (other->device == stream.device && other->blocking()) wait_for(other->last);
    }
  } else if (stream.blocking()) {
    wait_for(legacy_stream(stream.device).last);
  }
  stream.last = work.end;
  if (end != nullptr) *end = work.end;
  const bool ticks = takes_its_time(work);
  stream.queue.push_back(std::move(work));
  ++world().queued;
  if (ticks) wake_ticker();
  pump(lock);
  return CUDA_SUCCESS;
}

bool has_passed(const PointPtr& point) {
  if (point == nullptr || point->passed) return true;
  if (point->elsewhere && point->elsewhere()) point->passed = true;
  return point->passed;
}

void pump(Lock& lock) {
  World& here = world();
  for (bool did_some = true; did_some && here.queued > 0;) {
    did_some = false;
    for (std::size_t k = 0; k < here.streams.size(); ++k) {  // work may be queued on new ones meanwhile
      while (is_ready(*here.streams[k])) {
        run_first(lock, *here.streams[k]);
        did_some = true;
      }
    }
  }
}

void wait(Lock& lock, const PointPtr& point) {
  for (;;) {
    await(point);
    pump(lock);
    if (has_passed(point)) return;
    world().changed.wait_for(lock, milliseconds(1));
  }
}

void wait_for_device(Lock& lock, int device) {
  for (const PointPtr& end : ends_of(device)) wait(lock, end);
}

std::vector<PointPtr> ends_of(int device) {
  std::vector<PointPtr> ends;
  for (const auto& stream : world().streams) {
    if (stream->device == device && !has_passed(stream->last)) ends.push_back(stream->last);
  }
  return ends;
}

}  // namespace standin
