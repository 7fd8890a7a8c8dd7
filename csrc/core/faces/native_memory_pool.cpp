#include "core/faces/native_memory_pool.h"

#include <exception>
#include <utility>

#include "base/errors.h"

namespace vmm {

namespace {

// What the driver said to `doing`, as a failure. Not its own refusal but ours: a
// stream that is being captured.
void require(const Status& status, const std::string& doing) {
  if (status.code() != StatusCode::not_supported || status.driver_code() != 0) {
    throw_if_failed(status, doing);
    return;
  }
  throw NotAvailableError(doing +
                          ": the stream is being captured, and a graph would do it anew at each launch; do it " +
                          "outside the capture");
}

}  // namespace

NativeMemoryPool::NativeMemoryPool(Driver& driver, int device, std::size_t max_bytes, Report report)
    : driver_(driver), pools_(driver.native_pools()), device_(device), max_bytes_(max_bytes), report_(report) {
  if (pools_ == nullptr) {
    throw NotAvailableError("a NativeMemoryPool needs a GPU: it is a pool of the CUDA driver's own, and device " +
                            driver.name() + ":" + std::to_string(device) +
                            " is none of CUDA's; MemoryPool works there");
  }
  if (const std::string missing = pools_->missing_pools(device); !missing.empty()) throw NotAvailableError(missing);
  NativePool made = 0;
  throw_if_failed(pools_->create_pool(device, max_bytes, &made), "creating a memory pool of the driver's");
  const MutexLock lock(mutex_);
  pool_ = made;
}

NativeMemoryPool::~NativeMemoryPool() {
  try {
    if (driver_.alive()) destroy(/*force=*/true);
  } catch (const std::exception& error) {
    if (!driver_.alive()) return;  // and with it all that it gave
    failures_.fetch_add(1, std::memory_order_relaxed);
    report_("~NativeMemoryPool", error.what());
  }
}

void NativeMemoryPool::require_open() const {
  if (destroyed_) throw InvalidArgumentError("the " + name() + " is destroyed");
}

// Counts `bytes` as allocated, before the driver is asked.
void NativeMemoryPool::charge(std::size_t bytes) {
  const MutexLock lock(mutex_);
  require_open();
  const std::size_t limit = max_bytes_ == 0 ? kUnlimited : max_bytes_;
  if (bytes > limit - charged_) {
    throw OutOfMemoryError(name() + ": " + format_bytes(bytes) + " asked; its maximum " + format_bytes(limit) +
                               ", allocated " + format_bytes(charged_) + "; free some, or make one with a larger " +
                               "max_size_bytes",
                           bytes, limit - charged_, limit, name());
  }
  charged_ += bytes;
  ++coming_;
}

Address NativeMemoryPool::allocate(std::size_t bytes, Stream stream) {
  if (bytes == 0) throw InvalidArgumentError("bytes=0: give at least one byte");
  charge(bytes);
  Address address = 0;
  NativePool pool = 0;
  {
    const MutexLock lock(mutex_);
    pool = pool_;
  }
  const Status status = pools_->allocate_from_pool(pool, device_, bytes, stream, &address);
  std::size_t charged = 0;
  {
    const MutexLock lock(mutex_);
    --coming_;
    if (status.ok()) {
      live_.emplace(address, bytes);
      return address;
    }
    charged_ -= bytes;
    charged = charged_;
  }
  if (status.code() == StatusCode::out_of_memory) {
    MemoryInfo info;
    driver_.memory_info(device_, &info).ignore();
    throw OutOfMemoryError(name() + ": " + format_bytes(bytes) + " asked, and the driver has none (" + status.text() +
                               "); allocated from the pool " + format_bytes(charged) + ", free on the device " +
                               format_bytes(info.free) + "; free or trim what is not needed",
                           bytes, info.free, max_bytes_ == 0 ? info.total : max_bytes_, name());
  }
  require(status, "allocating " + format_bytes(bytes) + " from the " + name());
  return 0;
}

void NativeMemoryPool::free(Address address, Stream stream) {
  std::size_t bytes = 0;
  {
    const MutexLock lock(mutex_);
    require_open();
    const auto found = live_.find(address);
    if (found == live_.end()) {
      throw InvalidArgumentError(format_hex(address) + " is no live allocation of the " + name() +
                                 ": it was freed before, or is not what its alloc_async() returned");
    }
    bytes = found->second;
    live_.erase(found);  // before the driver may give it to another thread
  }
  const Status status = pools_->free_to_pool(device_, address, stream);
  const MutexLock lock(mutex_);
  if (!status.ok()) live_.emplace(address, bytes);
  require(status, "freeing " + format_hex(address) + " to the " + name());
  charged_ -= bytes;
}

void NativeMemoryPool::destroy(bool force) {
  std::unordered_map<Address, std::size_t> left;
  NativePool pool = 0;
  {
    const MutexLock lock(mutex_);
    if (destroyed_) return;
    const std::size_t blocks = live_.size() + coming_;
    if (blocks != 0 && (!force || coming_ != 0)) {
      throw StillInUseError("the " + name() + " still holds " + std::to_string(blocks) + " allocations, " +
                                format_bytes(charged_) + "; free them first, or force",
                            charged_, blocks);
    }
    destroyed_ = true;
    left = live_;
    pool = pool_;
  }
  // Not only for what is left: where frees were still queued the driver (580.159) died in
  // cuMemPoolDestroy, twice in three runs on an H200.
  Status status = driver_.synchronize(device_);
  for (auto block = left.begin(); status.ok() && block != left.end();) {
    status = pools_->free_to_pool(device_, block->first, nullptr);
    if (status.ok()) block = left.erase(block);
  }
  if (status.ok()) status = pools_->destroy_pool(pool);
  const MutexLock lock(mutex_);
  live_ = std::move(left);
  charged_ = 0;
  for (const auto& [address, bytes] : live_) charged_ += bytes;
  destroyed_ = status.ok();
  throw_if_failed(status, "destroying the " + name());
  pool_ = 0;
}

NativePool NativeMemoryPool::raw() const {
  const MutexLock lock(mutex_);
  require_open();
  return pool_;
}

bool NativeMemoryPool::is_destroyed() const {
  const MutexLock lock(mutex_);
  return destroyed_;
}

NativePoolUsage NativeMemoryPool::usage() const {
  NativePoolUsage usage;
  throw_if_failed(pools_->pool_usage(raw(), &usage), "asking for the numbers of the " + name());
  return usage;
}

std::size_t NativeMemoryPool::trim(std::size_t keep) {
  const std::size_t before = usage().reserved;
  throw_if_failed(pools_->trim_pool(raw(), keep), "trimming the " + name());
  const std::size_t after = usage().reserved;
  return before > after ? before - after : 0;
}

void NativeMemoryPool::set_release_threshold(std::size_t bytes) {
  throw_if_failed(pools_->set_release_threshold(raw(), bytes), "setting the release threshold of the " + name());
}

std::size_t NativeMemoryPool::release_threshold() const {
  std::size_t bytes = 0;
  throw_if_failed(pools_->release_threshold(raw(), &bytes), "asking for the release threshold of the " + name());
  return bytes;
}

}  // namespace vmm
