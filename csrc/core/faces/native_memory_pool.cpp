#include "core/faces/native_memory_pool.h"

#include <algorithm>
#include <exception>
#include <vector>

#include "base/errors.h"

namespace vmm {

namespace {

// What the driver said to `doing`, as a failure. Not its own refusal but ours: a
// stream that is being captured. REQUIRES: not ok.
void raise(const Status& status, const std::string& doing) {
  if (status.code() != StatusCode::not_supported || status.driver_code() != 0) throw_if_failed(status, doing);
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
  pool_.store(made);
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
  if (destroyed_.load()) throw InvalidArgumentError("the " + name() + " is destroyed");
}

// Counts `bytes` as allocated. False: over the maximum.
bool NativeMemoryPool::count(std::size_t bytes) {
  std::size_t charged = charged_.load(std::memory_order_relaxed);
  do {
    if (bytes > limit() - charged) return false;
  } while (!charged_.compare_exchange_weak(charged, charged + bytes));
  return true;
}

// Before the driver is asked. destroy() marks the pool and then looks what is counted; a
// request counts its bytes and then looks whether the pool is marked: one of the two
// sees the other.
void NativeMemoryPool::charge(std::size_t bytes) {
  bool fits = count(bytes);
  if (destroyed_.load()) [[unlikely]] {
    if (fits) charged_.fetch_sub(bytes);
    const MutexLock lock(mutex_);  // until destroy() knows whether it does it
    require_open();
    fits = count(bytes);
  }
  if (fits) [[likely]]
    return;
  const std::size_t charged = charged_.load(std::memory_order_relaxed);
  throw OutOfMemoryError(name() + ": " + format_bytes(bytes) + " asked; its maximum " + format_bytes(limit()) +
                             ", allocated " + format_bytes(charged) + "; free some, or make one with a larger " +
                             "max_size_bytes",
                         bytes, limit() - std::min(charged, limit()), limit(), name());
}

// The driver gave no `bytes`.
void NativeMemoryPool::refuse(const Status& status, std::size_t bytes) const {
  if (status.code() == StatusCode::out_of_memory) {
    MemoryInfo info;
    driver_.memory_info(device_, &info).ignore();
    const std::string maximum =
        max_bytes_ == 0 ? ""
                        : "; its maximum " + format_bytes(max_bytes_) + ", of which the driver gives whole granules";
    throw OutOfMemoryError(name() + ": " + format_bytes(bytes) + " asked, and the driver has none (" + status.text() +
                               ")" + maximum + "; allocated from the pool " + format_bytes(charged_.load()) +
                               ", free on the device " + format_bytes(info.free) + "; free or trim what is not needed",
                           bytes, info.free, max_bytes_ == 0 ? info.total : max_bytes_, name());
  }
  raise(status, "allocating " + format_bytes(bytes) + " from the " + name());
}

Address NativeMemoryPool::allocate(std::size_t bytes, Stream stream) {
  if (bytes == 0) throw InvalidArgumentError("bytes=0: give at least one byte");
  charge(bytes);
  Address address = 0;
  const NativePool pool = pool_.load(std::memory_order_relaxed);
  const Status status = pools_->allocate_from_pool(pool, device_, bytes, stream, &address);
  if (!status.ok()) [[unlikely]] {
    charged_.fetch_sub(bytes, std::memory_order_relaxed);
    refuse(status, bytes);
  }
  try {
    const MutexLock lock(mutex_);
    live_.add(address, bytes);
  } catch (...) {  // no host memory
    pools_->free_to_pool(device_, address, stream).ignore();
    charged_.fetch_sub(bytes, std::memory_order_relaxed);
    throw;
  }
  return address;
}

void NativeMemoryPool::free(Address address, Stream stream) {
  std::size_t bytes = 0;
  bool found = false;
  {
    const MutexLock lock(mutex_);
    require_open();
    found = live_.take(address, &bytes);  // before the driver may give it to another thread
  }
  if (!found) [[unlikely]] {
    throw InvalidArgumentError(format_hex(address) + " is no live allocation of the " + name() +
                               ": it was freed before, or is not what its alloc_async() returned");
  }
  const Status status = pools_->free_to_pool(device_, address, stream);
  if (!status.ok()) [[unlikely]] {
    const MutexLock lock(mutex_);
    live_.add(address, bytes);
    raise(status, "freeing " + format_hex(address) + " to the " + name());
  }
  charged_.fetch_sub(bytes, std::memory_order_relaxed);
}

void NativeMemoryPool::destroy(bool force) {
  const MutexLock destroying(destroying_);  // a second caller is told what became of it
  std::vector<LiveAddresses::Entry> left;
  {
    const MutexLock lock(mutex_);
    if (destroyed_.load()) return;
    left = live_.all();      // first: it may find no memory
    destroyed_.store(true);  // before it is asked whether something is coming
    const std::size_t charged = charged_.load();
    std::size_t live = 0;
    for (const LiveAddresses::Entry& entry : left) live += entry.bytes;
    // What is counted and not in the table is a request, or a free, that the driver has not answered.
    const bool is_answering = charged != live;
    const std::size_t blocks = left.size() + (is_answering ? 1 : 0);
    if (blocks != 0 && (!force || is_answering)) {
      destroyed_.store(false);
      const std::string remedy = is_answering
                                     ? "another thread is just asking or freeing: join it first"
                                     : "free " + std::string(blocks == 1 ? "that" : "them") + " first, or force";
      throw StillInUseError("the " + name() + " still holds " + format_count(blocks, "allocation") + ", " +
                                format_bytes(charged) + "; " + remedy,
                            charged, blocks);
    }
  }
  { const MutexLock lock(asking_); }  // who asks had looked before; from now on it is refused
  // Not only for what is left: where frees were still queued the driver (580.159) died in
  // cuMemPoolDestroy, twice in three runs on an H200.
  Status status = driver_.synchronize(device_);
  std::size_t bytes = 0;
  for (std::size_t k = 0; k < left.size() && status.ok(); ++k) {
    status = pools_->free_to_pool(device_, left[k].address, nullptr);
    if (!status.ok()) break;
    const MutexLock lock(mutex_);
    if (live_.take(left[k].address, &bytes)) charged_.fetch_sub(bytes);
  }
  if (status.ok() && !left.empty()) status = driver_.synchronize(device_);
  if (status.ok()) status = pools_->destroy_pool(pool_.load());
  const MutexLock lock(mutex_);
  destroyed_.store(status.ok());
  throw_if_failed(status, "destroying the " + name());
  pool_.store(0);
}

NativePool NativeMemoryPool::raw() const {
  const MutexLock lock(mutex_);
  require_open();
  return pool_.load();
}

bool NativeMemoryPool::is_destroyed() const { return destroyed_.load(); }

void NativeMemoryPool::ask(const std::string& doing, const FunctionRef<Status(NativePool)>& about) const {
  const MutexLock lock(asking_);
  throw_if_failed(about(raw()), doing + " the " + name());
}

NativePoolUsage NativeMemoryPool::usage() const {
  NativePoolUsage usage;
  ask("asking for the numbers of", [&](NativePool pool) { return pools_->pool_usage(pool, &usage); });
  return usage;
}

std::size_t NativeMemoryPool::trim(std::size_t keep) {
  NativePoolUsage before;
  NativePoolUsage after;
  ask("trimming", [&](NativePool pool) {
    Status status = pools_->pool_usage(pool, &before);
    if (status.ok()) status = pools_->trim_pool(pool, keep);
    return status.ok() ? pools_->pool_usage(pool, &after) : status;
  });
  return before.reserved > after.reserved ? before.reserved - after.reserved : 0;
}

void NativeMemoryPool::set_release_threshold(std::size_t bytes) {
  ask("setting the release threshold of", [&](NativePool pool) { return pools_->set_release_threshold(pool, bytes); });
}

std::size_t NativeMemoryPool::release_threshold() const {
  std::size_t bytes = 0;
  ask("asking for the release threshold of", [&](NativePool pool) { return pools_->release_threshold(pool, &bytes); });
  return bytes;
}

}  // namespace vmm
