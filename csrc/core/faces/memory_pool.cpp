#include "core/faces/memory_pool.h"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "base/errors.h"

namespace vmm {

namespace {

std::shared_ptr<Pool> make_pool(DeviceMemory& memory) {
  static std::atomic<int> next{0};
  PoolSpec spec;
  spec.name = "buffers-" + std::to_string(++next);
  spec.grows_freely = true;  // as other pools of buffers do; what is idle others can have
  return memory.create_pool(spec, nullptr);
}

std::size_t sum_at_most(std::size_t a, std::size_t b) { return sum_overflows(a, b) ? kUnlimited : a + b; }

}  // namespace

MemoryPool::MemoryPool(DeviceMemory& memory, Now now)
    : memory_(memory),
      now_(std::move(now)),
      pool_(make_pool(memory)),
      freed_(memory.granularity()),
      since_(now_()),
      changed_(since_) {}

MemoryPool::~MemoryPool() {
  try {
    close(/*force=*/true);
  } catch (const VmmError&) {  // NOLINT(bugprone-empty-catch): forced closing throws only when the driver has gone
  }
}

Address MemoryPool::allocate(std::size_t bytes, Stream stream) {
  pool_->require_open();
  const Address address = memory_.allocate(*pool_, bytes, stream);
  const std::size_t bytes_held = pool_->block_size(address);
  look(Asks::user, live_.fetch_add(bytes_held, std::memory_order_relaxed) + bytes_held);
  return address;
}

void MemoryPool::free(Address address) {
  const std::size_t bytes = pool_->block_size(address);
  {
    // Before it can be another buffer's.
    const MutexLock lock(mutex_);
    freed_.note(range_of(address, bytes));
  }
  DeviceMemory::free(memory_.address_space(), address);
  // After it: one that there is no room to note has not been made.
  look(Asks::user, live_.fetch_sub(bytes, std::memory_order_relaxed) - bytes);
}

BufferStats MemoryPool::stats() {
  look(Asks::reader, live_.load(std::memory_order_relaxed));
  const Statistics numbers = pool_->statistics();
  const Stat& blocks = numbers[StatKind::allocation][0];
  const Stat& bytes = numbers[StatKind::allocated_bytes][0];
  BufferStats stats;
  stats.allocated_bytes = static_cast<std::size_t>(bytes.current);
  stats.peak_bytes = static_cast<std::size_t>(bytes.peak);
  stats.allocation_count = static_cast<std::size_t>(blocks.allocated);
  stats.free_count = static_cast<std::size_t>(blocks.freed);
  // Of one moment, unless threads go on meanwhile.
  stats.cached_bytes =
      static_cast<std::size_t>(std::max<std::int64_t>(0, numbers[StatKind::reserved_bytes][0].current - bytes.current));
  return stats;
}

std::uint64_t MemoryPool::freed_at(ByteRange range) {
  const MutexLock lock(mutex_);
  return freed_.newest(range);
}

std::size_t MemoryPool::trim(std::size_t keep) {
  pool_->require_open();
  return memory_.trim(*pool_, [&] {
    const MemoryStats now = pool_->memory_stats();
    const std::size_t cached = now.physical_usage - now.allocated_bytes;
    // What is not idle cannot go, and counts.
    const std::size_t fixed = cached - now.idle_bytes;
    pool_->shed_oldest(keep > fixed ? keep - fixed : 0, [this](ByteRange range) { return freed_at(range); });
  });
}

void MemoryPool::set_threshold(std::size_t bytes) {
  pool_->require_open();
  const MutexLock lock(mutex_);
  if (threshold() == kUnlimited) {
    // Nobody has looked so far.
    since_ = changed_ = now_();
    high_ = live_.load(std::memory_order_relaxed);
  }
  threshold_.store(bytes, std::memory_order_relaxed);
}

// Gives back what has not been needed, once in kUnused.
void MemoryPool::look(Asks who, std::size_t live) noexcept {
  const std::size_t threshold = this->threshold();
  if (threshold == kUnlimited || is_closed()) return;
  std::size_t needed = 0;
  {
    const MutexLock lock(mutex_);
    const Time now = now_();
    high_ = std::max(high_, live);
    // Since the last request or free all has stood still.
    const bool has_rested = who == Asks::reader && now - changed_ >= kUnused;
    if (who == Asks::user) changed_ = now;
    if (now - since_ < kUnused && !has_rested) return;
    needed = has_rested ? live : high_;
    high_ = live;
    since_ = now;
  }
  const std::size_t keep = sum_at_most(needed, threshold);
  const std::size_t held = pool_->physical_bytes();
  if (held <= keep) return;
  try {
    memory_.trim_passed(*pool_,
                        [&] { pool_->shed_unused(held - keep, [this](ByteRange range) { return freed_at(range); }); });
  } catch (const std::exception&) {
    return;
  }
}

void MemoryPool::close(bool force) {
  if (is_closed()) return;
  memory_.close_pool(*pool_, force);
}

}  // namespace vmm
