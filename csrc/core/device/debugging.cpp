// DeviceMemory: debug mode. Which requests are watched, when what was freed is looked at,
// and what is told of it.
#include <cstdio>
#include <thread>

#include "base/errors.h"
#include "core/device/device_memory.h"
#include "driver/device_fault.h"

namespace vmm {

namespace {

constexpr std::size_t kMostTold = 16;  // blocks of each kind

std::string frames_of(const WatchedBlock& block) {
  const std::string text = with_stack(block);
  return text.empty() ? "" : text.substr(text.find('\n'));
}

// Once in a process: it can go on after none.
std::atomic<bool> is_fault_reported{false};

}  // namespace

Address DeviceMemory::allocate_in_debug_mode(Pool& pool, std::size_t bytes, Stream stream) {
  const bool is_watched = log_->picks();
  tend_if_any_wait();
  if (!is_watched) {
    if (const Address kept = caches_.take(pool, bytes, stream); kept != 0) return kept;
  }
  const auto stack = is_watched ? WatchLog::stack_here() : nullptr;
  const auto attempt = [&](Grant* grant, Shortage* lacks) {
    return is_watched ? pool.try_allocate_watched(bytes, stream, stack, grant, lacks)
                      : pool.try_allocate(bytes, stream, grant, lacks);
  };
  try {
    settle_watched(pool);
    Shortage shortage;
    if (const Address address = attempt(nullptr, &shortage)) return address;
    return go_on(pool, bytes, stream, attempt, shortage);
  } catch (const DriverError& error) {
    if (device_fault().load() == nullptr) throw;
    report_fault();
    throw DriverError(error, debug_report());
  }
}

void DeviceMemory::settle_watched(Pool& pool) {
  if (log_ == nullptr) return;
  if (pool.settle_watched()) trim_shelf(pool);
  report_fault();
}

// What other threads look at now is memory that a request may need.
void DeviceMemory::await_judges() {
  if (log_ == nullptr) return;
  for (const auto& pool : pools()) {
    while (pool->is_being_judged()) std::this_thread::yield();
  }
}

std::vector<Damage> DeviceMemory::check_watched() {
  if (log_ == nullptr) return {};
  for (const auto& pool : pools()) {
    const Status status = pool->check_watched();
    if (status.ok()) continue;
    const std::string doing = "waiting for queued work, to look at what is watched in pool '" + pool->name() + "'";
    if (device_fault().load() == nullptr) throw_if_failed(status, doing);
    throw DriverError(DriverError(status, doing), debug_report());
  }
  settle(/*wait=*/true);
  return log_->damages();
}

ByteRange DeviceMemory::faults_beyond(const WatchedBlock& block) const {
  const auto pool = pool_at(block.address);
  const bool has_memory = block.freed == 0 || !block.is_unmapped;
  const Address from = has_memory ? block.memory_end : block.zone_begin;
  if (pool == nullptr) return {from, block.zone_end - from};  // its addresses have gone with the pool
  const Address until = pool->memory_from(from);
  return {from, until - from};
}

std::string DeviceMemory::debug_report() const {
  if (log_ == nullptr) return "";
  const WatchLog::Counts counts = log_->counts();
  std::string text = "torch_vmm: debug mode '" + to_string(log_->mode()) + "' of " + budget_.name() + ": " +
                     std::to_string(counts.watched) + " allocations watched, " + std::to_string(counts.live) +
                     " of them live, " + std::to_string(counts.damaged) + " with damaged patterns";
  if (counts.missed != 0) {
    text += "; " + std::to_string(counts.missed) + " could not be watched (a graph's, or no addresses were left)";
  }
  if (const char* const call = device_fault().load(); call != nullptr) {
    text += std::string(
                "\nwork on the device has touched an address without memory, or written where it may only read, and ") +
            "the driver does not say where (" + call + "); from what was allocated last:";
  }
  for (const Damage& damage : log_->damages()) text += "\n  " + to_string(damage) + frames_of(damage.block);
  const auto tell = [&](const WatchedBlock& block) {
    text += "\n  " + to_string(block);
    const ByteRange range = faults_beyond(block);
    if (range.size != 0 && block.is_unmapped) {
      text += ": accesses to " + format_hex(range.offset) + " .. " + format_hex(range.end() - 1) + " fault";
    } else if (range.size != 0) {
      text += ": accesses from " + std::to_string(range.offset - block.end()) + " bytes beyond its end on fault, to " +
              format_bytes(range.end() - block.end()) + " beyond it";
    }
    text += frames_of(block);
  };
  for (const WatchedBlock& block : log_->live(kMostTold)) tell(block);
  for (const WatchedBlock& block : log_->freed_lately(kMostTold)) tell(block);
  return text;
}

// Where the driver has told of an access to no memory: says what may have been meant.
void DeviceMemory::report_fault() const noexcept {
  if (device_fault().load(std::memory_order_relaxed) == nullptr) return;
  if (is_fault_reported.exchange(true)) return;
  try {
    (void)std::fprintf(stderr, "%s\n", debug_report().c_str());
  } catch (...) {
    is_fault_reported.store(false);  // no memory for the text: another time
  }
}

}  // namespace vmm
