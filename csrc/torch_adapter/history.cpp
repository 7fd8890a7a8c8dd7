#include "torch_adapter/history.h"

#include <c10/core/AllocatorConfig.h>
#include <c10/cuda/CUDAAllocatorConfig.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>

#include "base/units.h"
#include "torch_adapter/cuda_callbacks.h"
#include "torch_adapter/errors.h"

namespace vmm {

namespace {

using Action = cca::TraceEntry::Action;

std::uint32_t bit(Action action) { return std::uint32_t{1} << static_cast<unsigned>(action); }

// The action under which the history keeps an event, or trackers are told of it.
Action action_of(PoolEvent event) {
  switch (event) {
    case PoolEvent::alloc:
      return cca::TraceEntry::ALLOC;
    case PoolEvent::free_requested:
      return cca::TraceEntry::FREE_REQUESTED;
    case PoolEvent::free_completed:
      return cca::TraceEntry::FREE_COMPLETED;
    case PoolEvent::segment_map:
      return cca::TraceEntry::SEGMENT_MAP;
    case PoolEvent::segment_unmap:
      return cca::TraceEntry::SEGMENT_UNMAP;
    case PoolEvent::segment_alloc:
      return cca::TraceEntry::SEGMENT_ALLOC;
    case PoolEvent::segment_free:
      return cca::TraceEntry::SEGMENT_FREE;
  }
  __builtin_unreachable();
}

template <typename Contexts>
History::Context find_context(const Contexts& contexts, Address address) {
  const auto found = contexts.find(address);
  return found == contexts.end() ? nullptr : found->second;
}

template <typename Contexts>
History::Context take_context(Contexts& contexts, Address address) {
  const auto found = contexts.find(address);
  if (found == contexts.end()) return nullptr;
  History::Context context = std::move(found->second);
  contexts.erase(found);
  return context;
}

// An earlier one of the same address is forgotten.
template <typename Contexts>
void put_context(Contexts& contexts, Address address, const History::Context& context) {
  if (context != nullptr) {
    contexts.insert_or_assign(address, context);
  } else if (!contexts.empty()) {
    contexts.erase(address);
  }
}

std::string joined(const std::string* user, const std::string* owner) {
  if (owner == nullptr) return user == nullptr ? std::string() : *user;
  return (user == nullptr || user->empty() ? std::string() : *user + "; ") + *owner;
}

}  // namespace

History& History::instance() {
  static auto* const kInstance = new History;
  return *kInstance;
}

// ---------------------------------------------------------------- what is wanted

void History::record(bool enabled, cca::CreateContextFn recorder, std::size_t max_entries, cca::RecordContext when,
                     bool clear_history, const std::vector<std::string>& skip_actions) {
  TORCH_CHECK(when == cca::RecordContext::NEVER || recorder != nullptr, "a context is wanted but nothing gathers it");
  std::uint32_t skipped = 0;
  for (const std::string& action : skip_actions) {
    skipped |= bit(c10::CachingDeviceAllocator::parseTraceEntryAction(action));
  }
  // Destroyed after the lock is given up, as there may be many.
  std::vector<std::vector<Entry>> cleared;
  std::unordered_map<Address, Context> forgotten_blocks;
  std::map<Address, Context> forgotten_segments;
  {
    const MutexLock lock(mutex_);
    skipped_actions_ = skipped;
    for (auto& entries : entries_) {
      entries.set_capacity(max_entries);
      if (!enabled || clear_history) cleared.push_back(entries.clear());
    }
    annotations_.set_capacity(max_entries);
    if (!enabled || clear_history) {
      (void)annotations_.clear();
      models_.clear();
      tags_.clear();
    }
    if (!enabled) {
      // Nobody tells of frees from now on, so addresses may come to hold others.
      forgotten_blocks.swap(block_contexts_);
      forgotten_segments.swap(segment_contexts_);
    }
    recorder_.store(enabled ? recorder : nullptr, std::memory_order_relaxed);
    level_.store(enabled ? when : cca::RecordContext::NEVER, std::memory_order_relaxed);
    recording_.store(enabled, std::memory_order_relaxed);
  }
  update_watch();
}

void History::attach_tracker(cca::AllocatorTraceTracker tracker, Registrar kind) {
  if (kind == Registrar::of_all) expect_registrar_of_all();
  {
    const MutexLock lock(mutex_);
    auto more = std::make_shared<Trackers>(*trackers_);
    more->push_back({std::move(tracker), kind});
    trackers_ = std::move(more);
    has_trackers_.store(true, std::memory_order_release);
  }
  update_watch();
}

void History::attach_out_of_memory_observer(cca::OutOfMemoryObserver observer) {
  const MutexLock lock(mutex_);
  out_of_memory_observers_.push_back(std::move(observer));
}

VMM_SINCE_TORCH_2_12(void History::attach_rejection_observer(cca::OomRejectionObserver observer) {
  const MutexLock lock(mutex_);
  rejection_observers_.push_back(std::move(observer));
})

void History::update_watch() {
  const MutexLock one_at_a_time(watch_mutex_);
  bool follows_blocks = is_recording();
  {
    const MutexLock lock(mutex_);
    for (const Tracker& tracker : *trackers_) follows_blocks |= tracker.kind == Registrar::of_all;
  }
  follows_blocks_.store(follows_blocks, std::memory_order_relaxed);
  const bool on = is_recording() || has_trackers();
  on_.store(on, std::memory_order_relaxed);
  for (DeviceRoom* room : Runtime::all_made(DeviceKind::cuda)) {
    room->memory.set_observer(on ? this : nullptr, follows_blocks);
  }
}

void History::expect_registrar_of_all() {
  registers_all_.store(true, std::memory_order_relaxed);
  for (DeviceRoom* room : Runtime::all_made(DeviceKind::cuda)) room->memory.keep_blocks_within_chunks();
}

// torch reads this when a process group is made; here it counts from a device's first
// block on, so that none lies over two chunks when the process group comes.
bool History::nccl_registers_all() {
  const auto is_set = [](const char* name) {
    const char* value = std::getenv(name);
    if (value == nullptr) return false;
    std::string text(value);
    std::transform(text.begin(), text.end(), text.begin(), [](unsigned char letter) { return std::tolower(letter); });
    return text == "1" || text == "y" || text == "yes" || text == "t" || text == "true";
  };
  return is_set("TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK") || is_set("NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK");
}

void History::watch(DeviceRoom& room) {
  if (registers_all_.load(std::memory_order_relaxed) || nccl_registers_all()) room.memory.keep_blocks_within_chunks();
  if (is_on()) room.memory.set_observer(this, follows_blocks_.load(std::memory_order_relaxed));
}

void watch_cuda_memory(DeviceRoom& room) { History::instance().watch(room); }

// --------------------------------------------------------------------- contexts

History::Context History::gather(cca::RecordContext level) const {
  if (level_.load(std::memory_order_relaxed) < level) return nullptr;
  const cca::CreateContextFn recorder = recorder_.load(std::memory_order_relaxed);
  return recorder == nullptr ? nullptr : recorder();
}

void History::Scope::begin(cca::RecordContext level) noexcept {
  try {
    context_ = instance().gather(level);
  } catch (...) {
    report_swallowed("gathering a stack trace");
  }
  outer_ = std::exchange(current_, &context_);
  begun_ = true;
}

// Deletes a thread's notes with the thread; what the thread frees after that
// has none.
struct History::ThreadNotesOwner {
  ~ThreadNotesOwner() {
    ended = true;
    delete std::exchange(notes_, nullptr);
  }
  bool ended = false;
};

History::ThreadNotes* History::notes(bool make) {
  if (notes_ != nullptr || !make) return notes_;
  static thread_local ThreadNotesOwner owner;
  if (!owner.ended) notes_ = new ThreadNotes;
  return notes_;
}

void History::push_compile_context(const std::string& context) {
  if (!is_recording()) return;
  if (ThreadNotes* mine = notes(true); mine != nullptr) {
    mine->compile_contexts.push_back(std::make_shared<const std::string>(context));
  }
}

void History::pop_compile_context() {
  if (!is_recording()) return;
  if (ThreadNotes* mine = notes(false); mine != nullptr && !mine->compile_contexts.empty()) {
    mine->compile_contexts.pop_back();
  }
}

void History::set_user_metadata(const std::string& metadata) {
  if (ThreadNotes* mine = notes(!metadata.empty()); mine != nullptr) {
    mine->user_metadata = metadata.empty() ? nullptr : std::make_shared<const std::string>(metadata);
  }
}

std::string History::user_metadata() {
  const ThreadNotes* mine = notes(false);
  return mine == nullptr || mine->user_metadata == nullptr ? std::string() : *mine->user_metadata;
}

// ------------------------------------------------------------------ what happens

History::Entry History::make_entry(Action action, Address address, std::size_t bytes, Stream stream,
                                   const RegionId& region) const {
  Entry entry;
  entry.action = action;
  entry.address = address;
  entry.bytes = bytes;
  entry.stream = stream;
  entry.region = region;
  entry.time = c10::getApproximateTime();
  if (const ThreadNotes* mine = notes(false); mine != nullptr) {
    if (!mine->compile_contexts.empty()) entry.compile_context = mine->compile_contexts.back();
    entry.user_metadata = mine->user_metadata;
  }
  return entry;
}

History::Text History::owner_of(const Pool& pool) {
  const Pool& model = pool.model();
  const DeviceRoom* room = Runtime::made(DeviceKind::cuda, pool.device());
  Text owner;
  if (room != nullptr && room->default_pool.get() != &model) {
    owner = models_.find(model.name(), [&] { return "model: " + model.name(); });
  }
  if (pool.tag().empty()) return owner;
  const std::string words = "tag: " + pool.tag() + (owner == nullptr ? std::string() : "; " + *owner);
  return tags_.find(words, [&] { return words; });
}

void History::keep(int device, const Entry& entry) {
  if (!is_recording() || (skipped_actions_ & bit(entry.action)) != 0) return;
  entries_.at(static_cast<std::size_t>(device)).insert(entry);
}

void History::on_event(const Pool& pool, PoolEvent event, Address address, std::size_t bytes, Stream stream) noexcept {
  happened(pool.device(), pool.region(), &pool, event, address, bytes, stream);
}

void History::on_provided(int device, const RegionId& region, PoolEvent event, Address address, std::size_t bytes,
                          Stream stream) noexcept {
  try {
    // It goes with whatever free was its last: a tracker is to find its device current.
    const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
    happened(device, region, nullptr, event, address, bytes, stream);
  } catch (...) {
    report_swallowed("recording the memory history");
  }
}

void History::happened(int device, const RegionId& region, const Pool* pool, PoolEvent event, Address address,
                       std::size_t bytes, Stream stream) noexcept {
  const bool is_for_trackers = event == PoolEvent::segment_alloc || event == PoolEvent::segment_free;
  const bool is_for_history = event == PoolEvent::segment_map || event == PoolEvent::segment_unmap;
  if (is_for_trackers ? !has_trackers() : !follows_blocks_.load(std::memory_order_relaxed)) return;
  try {
    Entry entry = make_entry(action_of(event), address, bytes, stream, region);
    if (current_ != nullptr) entry.context = *current_;
    {
      const MutexLock lock(mutex_);
      switch (event) {
        case PoolEvent::alloc:
          put_context(block_contexts_, address, entry.context);
          break;
        case PoolEvent::free_requested:
          if (entry.context == nullptr) entry.context = find_context(block_contexts_, address);
          break;
        case PoolEvent::free_completed:
          if (Context context = take_context(block_contexts_, address); entry.context == nullptr) {
            entry.context = std::move(context);
          }
          break;
        case PoolEvent::segment_map:
          put_context(segment_contexts_, address, entry.context);
          break;
        case PoolEvent::segment_unmap:
          if (Context context = take_context(segment_contexts_, address); entry.context == nullptr) {
            entry.context = std::move(context);
          }
          break;
        case PoolEvent::segment_alloc:
        case PoolEvent::segment_free:
          break;
      }
      if (level_.load(std::memory_order_relaxed) < cca::RecordContext::ALLOC) entry.context = nullptr;
      if (pool != nullptr) entry.owner = owner_of(*pool);
      if (!is_for_trackers) keep(device, entry);
    }
    // NCCL registers what its tracker is told of, and one registration may not
    // cover two chunks: so it is told of chunks, as segments that come and go whole.
    if (has_trackers() && !is_for_history) {
      tell_trackers(device, entry, is_for_trackers && (pool == nullptr || pool->is_mem_pool()));
    }
  } catch (...) {
    report_swallowed("recording the memory history");
  }
}

void History::tell_trackers(int device, const Entry& entry, bool is_of_mem_pool) const noexcept {
  std::shared_ptr<const Trackers> trackers;
  {
    const MutexLock lock(mutex_);
    trackers = trackers_;
  }
  try {
    const TraceEntry told = to_trace_entry(device, entry);
    for (const Tracker& tracker : *trackers) {
      if (tracker.kind == Registrar::of_mem_pools && !is_of_mem_pool) continue;
      // One that throws (NCCL's do once the process group is gone) must break
      // neither the allocation nor the others.
      try {
        tracker.call(told);
      } catch (...) {
        report_swallowed("a tracker of torch's memory");
      }
    }
  } catch (...) {
    report_swallowed("telling the trackers of torch's memory");
  }
}

void History::out_of_memory(DeviceRoom& room, const Pool& pool, std::size_t bytes, Stream stream) {
  Observers observers;
  VMM_SINCE_TORCH_2_12(std::vector<cca::OomRejectionObserver> rejection_observers;) {
    const MutexLock lock(mutex_);
    observers = out_of_memory_observers_;
    VMM_SINCE_TORCH_2_12(rejection_observers = rejection_observers_;)
  }
  MemoryInfo info;
  if (is_on() || !observers.empty()) (void)room.memory.driver().memory_info(room.ordinal, &info);
  if (is_on()) {
    Entry entry = make_entry(cca::TraceEntry::OOM, info.free, align_up(bytes, kBlockAlignment), stream, pool.region());
    if (current_ != nullptr && level_.load(std::memory_order_relaxed) >= cca::RecordContext::ALLOC) {
      entry.context = *current_;
    }
    {
      const MutexLock lock(mutex_);
      entry.owner = owner_of(pool);
      keep(room.ordinal, entry);
    }
    if (has_trackers()) tell_trackers(room.ordinal, entry);
  }
  const std::size_t limit = room.memory.budget().limit();
  const std::size_t total = room.memory.capabilities().total_memory;
  const std::size_t asked = align_up(bytes, room.memory.granularity());
  // torch's throw_on_cudamalloc_oom: requests beyond the memory fraction are
  // turned down without asking the driver. Here they always are.
  VMM_SINCE_TORCH_2_12(const std::size_t held = room.memory.committed_bytes();
                       if (cca::CUDAAllocatorConfig::throw_on_cudamalloc_oom() && limit != kUnlimited &&
                           (asked > limit || held > limit - asked)) {
                         rejections_.at(static_cast<std::size_t>(room.ordinal)).fetch_add(1, std::memory_order_relaxed);
                         for (const auto& observer : rejection_observers) observer(room.ordinal, asked, held, total);
                       })
  for (const auto& observer : observers) {
    observer(room.ordinal, asked, limit == kUnlimited ? total : limit, info.free);
  }
}

void History::annotate(int device, const std::vector<std::pair<std::string, std::string>>& metadata) {
  if (!is_recording()) return;
  c10::CachingDeviceAllocator::AnnotationEntry entry(static_cast<c10::DeviceIndex>(device), c10::getApproximateTime());
  for (const auto& [name, value] : metadata) entry.recordUserMetadata(name, value);
  const MutexLock lock(mutex_);
  annotations_.insert(std::move(entry));
}

VMM_SINCE_TORCH_2_14(void History::annotate_block(int device, const RegionId& region, const Pool* pool, Address block,
                                                  std::size_t bytes, Stream stream, const std::string& metadata) {
  if (!is_on()) return;
  Entry entry = make_entry(cca::TraceEntry::ANNOTATE, block, bytes, stream, region);
  entry.user_metadata = std::make_shared<const std::string>(metadata);
  if (current_ != nullptr) entry.context = *current_;
  {
    const MutexLock lock(mutex_);
    if (pool != nullptr) entry.owner = owner_of(*pool);
    keep(device, entry);
  }
  if (has_trackers()) tell_trackers(device, entry);
})

// -------------------------------------------------------------- what has happened

cca::TraceEntry History::to_trace_entry(int device, const Entry& entry) {
  return {entry.action,
          static_cast<c10::DeviceIndex>(device),
          entry.address,
          entry.bytes,
          entry.stream,
          c10::MempoolId_t{entry.region.first, entry.region.second},
          entry.time,
          entry.context,
          entry.compile_context == nullptr ? "N/A" : *entry.compile_context,
          joined(entry.user_metadata.get(), entry.owner.get())};
}

void History::add_traces(int devices, cca::SnapshotInfo* info) {
  const auto to_nanoseconds = clock_.makeConverter();
  {
    const MutexLock lock(mutex_);
    annotations_.for_each([&](const auto& entry) { info->external_annotations.push_back(entry); });
    for (int device = 0; device < devices; ++device) {
      auto& trace = info->device_traces.at(static_cast<std::size_t>(device));
      entries_.at(static_cast<std::size_t>(device)).for_each([&](const Entry& entry) {
        trace.push_back(to_trace_entry(device, entry));
      });
    }
  }
  // To microseconds, which share their place with the clock's own unit.
  for (auto& entry : info->external_annotations) entry.time_.t_ = to_nanoseconds(entry.time_.approx_t_) / 1000;
  for (auto& trace : info->device_traces) {
    for (TraceEntry& entry : trace) entry.time_.t_ = to_nanoseconds(entry.time_.approx_t_) / 1000;
  }
}

void History::add_contexts(std::vector<cca::SegmentInfo>* segments) const {
  const MutexLock lock(mutex_);
  if (block_contexts_.empty() && segment_contexts_.empty()) return;
  for (cca::SegmentInfo& segment : *segments) {
    segment.context_when_allocated = find_context(segment_contexts_, segment.address);
    Address address = segment.address;
    for (cca::BlockInfo& block : segment.blocks) {
      if (block.active) block.context_when_allocated = find_context(block_contexts_, address);
      address += block.size;
    }
  }
}

void History::mark_snapshot(int device, const RegionId& region, std::size_t active_bytes) {
  const Entry entry = make_entry(cca::TraceEntry::SNAPSHOT, 0, active_bytes, nullptr, region);
  {
    const MutexLock lock(mutex_);
    keep(device, entry);
  }
  if (has_trackers()) tell_trackers(device, entry);
}

History::Context History::context_of(Address block) const {
  const MutexLock lock(mutex_);
  return find_context(block_contexts_, block);
}

}  // namespace vmm
