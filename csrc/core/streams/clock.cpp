#include "core/streams/clock.h"

#include <algorithm>
#include <new>
#include <thread>

namespace vmm {

namespace {

// After memory was wanted too early, that many ticks are made ahead of need,
// each after that much has been freed. A tick over one stream costs 0.5 us and
// one over 129 some 100, with what asking for it costs: at 64 MiB a stream the
// dearest kind comes once in 8 GiB.
constexpr int kCredit = 8;
constexpr std::size_t kFreedBytes = 64 * kMiB;
// Ahead of need, or for what nobody waits for, only while few are under way: the GPU is far
// behind otherwise, and one more would pass no sooner. Without it each of 1600 pages that
// left behind a busy GPU made one, of 128 streams 60 us and 127 fences.
constexpr std::size_t kMostAhead = 4;
// For the fences of 129 streams on an idle GPU, of which recording alone takes 60 us.
constexpr std::chrono::nanoseconds kMoment = std::chrono::microseconds(100);

}  // namespace

void Clock::add_peer(DeviceStreams& peer) {
  const MutexLock lock(mutex_);
  if (std::find(devices_.begin(), devices_.end(), &peer) == devices_.end()) devices_.push_back(&peer);
}

// The oldest tick that covers `epoch`, or nullptr.
StreamPointPtr Clock::covering(Epoch epoch) const {
  const auto found = std::lower_bound(ticks_.begin(), ticks_.end(), epoch,
                                      [](const Tick& tick, Epoch wanted) { return tick.epoch < wanted; });
  return found == ticks_.end() ? nullptr : found->point;
}

StreamPointPtr Clock::tick() {
  // The epoch ends before the fences are recorded: who notes the old one has
  // queued its work before them.
  const Epoch ended = now_.fetch_add(1, std::memory_order_seq_cst);
  freed_.store(0, std::memory_order_relaxed);
  ticks_.push_back({ended, std::make_shared<StreamPoint>(devices_), std::chrono::steady_clock::now()});
  return ticks_.back().point;
}

// A capture, or a failing driver, keeps the newest tick from being recorded
// whole. Another one would be in no better place, so none is made meanwhile.
bool Clock::has_obstacle() const { return !ticks_.empty() && !ticks_.back().point->is_recorded(); }

bool Clock::poll_locked() {
  bool any = false;
  while (!ticks_.empty() && ticks_.front().point->passed()) {
    passed_.store(ticks_.front().epoch, std::memory_order_release);
    ticks_.pop_front();
    any = true;
  }
  return any;
}

bool Clock::poll() {
  const MutexLock lock(mutex_);
  return poll_locked();
}

void Clock::cover(Epoch epoch, std::size_t most_under_way) {
  if (has_passed(epoch)) return;
  const MutexLock lock(mutex_);
  if (covering(epoch) != nullptr) return;
  // Whoever only orders by the GPU never asks otherwise, and ticks would gather.
  poll_locked();
  if (ticks_.size() < most_under_way && !has_obstacle()) tick();
}

void Clock::cover(Epoch epoch) { cover(epoch, kUnlimited); }

void Clock::cover_in_time(Epoch epoch) { cover(epoch, kMostAhead); }

bool Clock::passes_at_once(Epoch epoch) {
  cover_in_time(epoch);
  for (;;) {
    {
      const MutexLock lock(mutex_);
      poll_locked();
      if (has_passed(epoch)) return true;
      // Beside a capture no fence stands.
      const bool is_late = ticks_.empty() || std::chrono::steady_clock::now() - ticks_.front().made >= kMoment;
      if (is_late || has_obstacle()) return false;
    }
    std::this_thread::yield();
  }
}

Status Clock::order_before(const StreamUse& later, Epoch epoch) {
  if (has_passed(epoch)) return {};
  const MutexLock lock(mutex_);
  if (has_passed(epoch)) return {};
  StreamPointPtr point = covering(epoch);
  if (point == nullptr) {
    poll_locked();
    if (has_obstacle()) return {StatusCode::not_supported, "order after work that has no fence"};
    point = tick();
    credit_.store(kCredit, std::memory_order_relaxed);
  }
  return point->order_before(later);
}

Status Clock::wait(Epoch epoch) {
  if (has_passed(epoch)) return {};
  StreamPointPtr point;
  {
    const MutexLock lock(mutex_);
    point = covering(epoch);
    if (point == nullptr && !has_passed(epoch)) point = tick();
  }
  if (point == nullptr) return {};
  if (const Status done = point->wait(); !done.ok()) return done;
  const MutexLock lock(mutex_);
  // A later point than any other tick's that covers less: those have passed too.
  const auto mine = std::find_if(ticks_.begin(), ticks_.end(), [&](const Tick& tick) { return tick.point == point; });
  if (mine != ticks_.end()) {
    passed_.store(mine->epoch, std::memory_order_release);
    ticks_.erase(ticks_.begin(), std::next(mine));
  }
  poll_locked();
  return {};
}

Status Clock::synchronize() {
  const Epoch ended = now_.fetch_add(1, std::memory_order_seq_cst);
  std::vector<DeviceStreams*> devices;
  {
    const MutexLock lock(mutex_);
    devices = devices_;
  }
  for (DeviceStreams* device : devices) {
    const Status done = device->driver().synchronize(device->device());
    if (!done.ok()) return done;
  }
  const MutexLock lock(mutex_);
  has_passed_until(ended);
  poll_locked();
  return {};
}

void Clock::has_passed_until(Epoch epoch) {
  while (!ticks_.empty() && ticks_.front().epoch <= epoch) ticks_.pop_front();
  if (passed_.load(std::memory_order_relaxed) < epoch) passed_.store(epoch, std::memory_order_release);
}

void Clock::tick_ahead(std::size_t bytes) {
  const std::size_t freed = freed_.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  if (freed < kFreedBytes) return;
  const MutexLock lock(mutex_);
  if (freed_.load(std::memory_order_relaxed) < kFreedBytes * streams_locked()) return;
  try {
    poll_locked();  // fences are made where there was none, as by a tick
    if (ticks_.size() >= kMostAhead || has_obstacle()) return;
    tick();
  } catch (const std::bad_alloc&) {
    return;  // nobody needs it yet, and who frees can not do without
  }
  credit_.fetch_sub(1, std::memory_order_relaxed);
}

void Clock::begin_capture() {
  captures_.fetch_add(1, std::memory_order_acq_rel);
  try {
    cover(now());
  } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): whoever waits ticks behind the capture
  }
}

std::size_t Clock::streams_locked() const {
  std::size_t streams = 0;
  for (const DeviceStreams* device : devices_) streams += device->count();
  return streams;
}

std::size_t Clock::streams() const {
  const MutexLock lock(mutex_);
  return streams_locked();
}

bool Clock::has_unreachable() const {
  const MutexLock lock(mutex_);
  return !ticks_.empty() && ticks_.back().point->has_unreachable();
}

bool Clock::is_without_fence() const {
  const MutexLock lock(mutex_);
  return has_obstacle();
}

std::size_t Clock::ticks_under_way() const {
  const MutexLock lock(mutex_);
  return ticks_.size();
}

}  // namespace vmm
