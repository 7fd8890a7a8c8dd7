#include "core/memory/pinned_slabs.h"

#include <algorithm>
#include <chrono>
#include <system_error>

namespace vmm {

namespace {

// 16 GiB, touched and pinned: 0.39 to 0.57 s with twelve threads that touch parts of a slab and
// one that pins; 0.59 to 0.79 with sixteen that touch a slab and then wait for their turn to pin.
constexpr std::size_t kMostTouching = 12;
constexpr std::size_t kPartBytes = 4 * kMiB;
constexpr std::size_t kParts = PinnedMemory::kSlabBytes / kPartBytes;
// The driver pins under a lock, 0.7 ms a slab: whoever would queue a copy does not come to it
// where the next one is pinned at once, and all copies come behind all of the pinning.
constexpr std::chrono::microseconds kLetOthersIn{100};

}  // namespace

PinnedSlabs::~PinnedSlabs() {
  {
    const MutexLock lock(mutex_);
    is_ending_ = true;
  }
  changed_.notify_all();
  finish();
  const MutexLock lock(mutex_);
  memory_->put_back(std::move(slabs_));
}

bool PinnedSlabs::grow_to(std::size_t bytes) {
  const std::size_t count = (bytes + PinnedMemory::kSlabBytes - 1) / PinnedMemory::kSlabBytes;
  std::size_t more = 0;
  {
    const MutexLock lock(mutex_);
    if (count <= slabs_.size()) return true;
    more = count - slabs_.size();
    slabs_.reserve(count);  // before: what is taken has its place
    is_ready_.reserve(count);
    new_.reserve(count);
  }
  std::vector<PinnedMemory::SlabPtr> slabs;
  if (!memory_->take(more, &slabs)) return false;
  std::size_t missing = 0;
  try {
    for (PinnedMemory::SlabPtr& each : slabs) {
      if (each != nullptr) continue;
      each = memory_->make();
      ++missing;
    }
  } catch (...) {
    memory_->put_back(std::move(slabs));
    throw;
  }
  add(std::move(slabs));
  start_workers(missing);
  return true;
}

void PinnedSlabs::add(std::vector<PinnedMemory::SlabPtr> slabs) noexcept {
  const MutexLock lock(mutex_);
  for (PinnedMemory::SlabPtr& each : slabs) {
    is_ready_.push_back(each->is_ready());
    if (!is_ready_.back()) new_.push_back({slabs_.size()});
    slabs_.push_back(std::move(each));
  }
}

void PinnedSlabs::start_workers(std::size_t count) {
  if (count == 0) return;
  const std::size_t cores = std::max(1U, std::thread::hardware_concurrency());
  const std::size_t touching = std::min({count * kParts, cores, kMostTouching});
  const std::size_t before = workers_.size();
  workers_.reserve(before + touching + 1);
  try {
    while (workers_.size() < before + touching) workers_.emplace_back([this] { touch(); });
  } catch (const std::system_error&) {
    if (workers_.size() == before) touch();
  }
  try {
    workers_.emplace_back([this] { pin(); });
  } catch (const std::system_error&) {
    pin();
  }
}

void PinnedSlabs::finish() {
  for (std::thread& worker : workers_) worker.join();
  workers_.clear();
}

void PinnedSlabs::touch() {
  for (Part part = take_part(); part.slab != nullptr; part = take_part()) {
    part.slab->touch(part.at, kPartBytes);
    note_touched(part);
  }
}

void PinnedSlabs::pin() {
  std::size_t index = 0;
  for (PinnedMemory::Slab* slab = take_touched(&index); slab != nullptr; slab = take_touched(&index)) {
    memory_->pin(*slab);
    note_ready(index);
    std::this_thread::sleep_for(kLetOthersIn);
  }
}

PinnedSlabs::Part PinnedSlabs::take_part() {
  const MutexLock lock(mutex_);
  if (is_ending_ || next_part_ == new_.size() * kParts) return {};
  const std::size_t number = next_part_ / kParts;
  const std::size_t at = next_part_++ % kParts * kPartBytes;
  return {slabs_[new_[number].index].get(), number, at};
}

void PinnedSlabs::note_touched(const Part& part) {
  {
    const MutexLock lock(mutex_);
    if (++new_[part.number].touched < kParts) return;
  }
  changed_.notify_all();
}

PinnedMemory::Slab* PinnedSlabs::take_touched(std::size_t* index) {
  const MutexLock lock(mutex_);
  if (next_to_pin_ == new_.size()) return nullptr;
  const std::size_t number = next_to_pin_++;
  while (!is_ending_ && new_[number].touched < kParts) changed_.wait(mutex_);
  *index = new_[number].index;
  return is_ending_ ? nullptr : slabs_[*index].get();
}

void PinnedSlabs::note_ready(std::size_t index) {
  {
    const MutexLock lock(mutex_);
    is_ready_[index] = true;
  }
  changed_.notify_all();
}

const PinnedMemory::Slab& PinnedSlabs::slab(std::size_t index) {
  const MutexLock lock(mutex_);
  while (!is_ready_[index]) changed_.wait(mutex_);
  return *slabs_[index];
}

}  // namespace vmm
