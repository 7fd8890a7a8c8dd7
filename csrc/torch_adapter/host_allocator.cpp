#include "torch_adapter/host_allocator.h"

#include <atomic>

#include "base/errors.h"
#include "torch_adapter/errors.h"
#include "torch_adapter/out_of_memory.h"
#include "torch_adapter/profiler.h"
#include "torch_adapter/routing.h"
#include "torch_adapter/strict.h"

namespace vmm {

namespace {

// What torch used before; set once, before we are registered.
std::atomic<c10::Allocator*> previous{nullptr};

c10::Device host() { return c10::Device{c10::DeviceType::CPU}; }

// What it takes, not what was asked for: of a free nobody knows more.
std::int64_t profiled_bytes(void* block) {
  const Pool* pool = Runtime::pool_at(block);
  return pool == nullptr ? 0 : static_cast<std::int64_t>(pool->block_size(reinterpret_cast<Address>(block)));
}

// Frees a block and tells the profiler, with the totals after it.
bool free_and_report(void* block, const DeviceRoom& room) {
  const std::int64_t bytes = profiled_bytes(block);
  if (!Runtime::free(block)) return false;
  report_to_profiler(room, block, -bytes, host());
  return true;
}

// The deleter of every block. It finds the pool by the address; never throws.
void free_block(void* block) {
  if (block == nullptr) return;
  const Pool* pool = Runtime::pool_at(block);
  if (pool == nullptr) [[unlikely]] {
    // raw_deallocate() of what the previous allocator gave in a forked child.
    if (c10::DeleterFnPtr deleter = previous.load(std::memory_order_relaxed)->raw_deleter(); deleter != nullptr) {
      deleter(block);
    }
    return;
  }
  // What a child inherited is a private copy, and its pool is gone: the pages
  // go with the process.
  if (Runtime::in_child()) return;
  try {
    const bool is_known = profiler_is_on() ? free_and_report(block, Runtime::room_of(*pool)) : Runtime::free(block);
    if (!is_known) {
      report_swallowed("free", (format_hex(reinterpret_cast<Address>(block)) + " is no live block of a pool").c_str());
    }
  } catch (...) {
    report_swallowed("free");
  }
}

}  // namespace

HostAllocator& HostAllocator::instance() {
  static auto* const kInstance = new HostAllocator;  // tensors outlive static objects
  return *kInstance;
}

bool HostAllocator::is_enabled() { return c10::GetAllocator(c10::kCPU) == &instance(); }

void HostAllocator::enable() {
  Runtime::room(DeviceKind::cpu, 0);  // says now what is missing, if anything
  if (is_enabled()) return;
  // Above whatever registers itself with the usual priorities later.
  constexpr std::uint8_t kPriority = 200;
  previous.store(c10::GetAllocator(c10::kCPU), std::memory_order_relaxed);
  c10::SetAllocator(c10::kCPU, &instance(), kPriority);
}

c10::DataPtr HostAllocator::allocate(std::size_t bytes) {
  if (Runtime::in_child()) [[unlikely]]
    return previous.load(std::memory_order_relaxed)->allocate(bytes);
  if (bytes == 0) return {nullptr, nullptr, &free_block, host()};
  if (bytes >= kExbibyte) throw_beyond_exbibyte(DeviceKind::cpu, 0, bytes);
  require_model(DeviceKind::cpu, 0, bytes);
  try {
    DeviceRoom& room = Runtime::room(DeviceKind::cpu, 0);
    void* block = reinterpret_cast<void*>(room.memory.allocate(*current_pool(room), bytes, nullptr));
    if (profiler_is_on()) [[unlikely]]
      report_to_profiler(room, block, profiled_bytes(block), host());
    return {block, block, &free_block, host()};
  } catch (const VmmError&) {
    if (profiler_is_on()) report_out_of_memory_to_profiler(DeviceKind::cpu, 0, bytes, host());
    rethrow_as_torch(DeviceKind::cpu, 0, bytes);
  }
}

c10::DeleterFnPtr HostAllocator::raw_deleter() const { return &free_block; }

void HostAllocator::copy_data(void* to, const void* from, std::size_t bytes) const {
  default_copy_data(to, from, bytes);
}

}  // namespace vmm
