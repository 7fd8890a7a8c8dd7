#include "support/scripted_driver.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "driver/packing.h"

namespace vmm::testing {
namespace {

constexpr std::size_t kKeptCalls = 65536;

std::size_t index(Call call) { return static_cast<std::size_t>(call); }
std::uint64_t number(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }
std::uint64_t number(int value) { return static_cast<std::uint64_t>(static_cast<std::int64_t>(value)); }
std::uint64_t number(Location where) {
  return where.kind == Location::Kind::host ? ~std::uint64_t{0} : number(where.device);
}

bool is_question(Call call) { return call == Call::memory_info || call == Call::capabilities; }

CallRecord make(Call call, std::uint64_t a = 0, std::uint64_t b = 0, std::uint64_t c = 0) {
  CallRecord record;
  record.call = call;
  record.a = a;
  record.b = b;
  record.c = c;
  return record;
}

std::size_t sum(const std::map<std::uint64_t, std::size_t>& sizes) {
  std::size_t bytes = 0;
  for (const auto& [key, size] : sizes) bytes += size;
  return bytes;
}

}  // namespace

const char* to_string(Call call) {
  static constexpr const char* kNames[kCallKinds] = {
      "reserve",        "unreserve",    "create",       "release",       "map",         "unmap", "set_access",
      "export_chunk",   "import_chunk", "create_fence", "destroy_fence", "record",      "query", "wait",
      "stream_wait",    "synchronize",  "copy_async",   "fill_async",    "read",        "pack",  "create_stream",
      "destroy_stream", "pin",          "unpin",        "memory_info",   "capabilities"};
  return kNames[index(call)];
}

std::string CallRecord::text() const {
  return std::to_string(number) + " " + to_string(call) + "(" + format_hex(a) + ", " + format_hex(b) + ", " +
         format_hex(c) + ") -> " + vmm::to_string(answer);
}

// -- The script.

void ScriptedDriver::fail_nth(Call call, std::uint64_t n, const Status& status, Repeat repeat) {
  const MutexLock lock(mutex_);
  script_.push_back({call, n, repeat, nullptr, status});
}

void ScriptedDriver::fail_nth_call(std::uint64_t n, const Status& status, Repeat repeat) {
  const MutexLock lock(mutex_);
  script_.push_back({std::nullopt, n, repeat, nullptr, status});
}

void ScriptedDriver::fail_if(std::function<bool(const CallRecord&)> when, const Status& status) {
  const MutexLock lock(mutex_);
  script_.push_back({std::nullopt, 0, Repeat::from_then_on, std::move(when), status});
}

void ScriptedDriver::clear_failures() {
  const MutexLock lock(mutex_);
  script_.clear();
  failures_ = 0;
}

std::uint64_t ScriptedDriver::failures() const {
  const MutexLock lock(mutex_);
  return failures_;
}

void ScriptedDriver::go_away() {
  const MutexLock lock(mutex_);
  gone_ = true;
}

void ScriptedDriver::delay(Call call, std::chrono::microseconds time) {
  const MutexLock lock(mutex_);
  delays_[index(call)] = time;
}

void ScriptedDriver::before(Call call, std::function<void()> action) {
  const MutexLock lock(mutex_);
  before_[index(call)] = std::move(action);
}

void ScriptedDriver::change_capabilities(std::function<void(Capabilities*)> change) {
  const MutexLock lock(mutex_);
  change_ = std::move(change);
}

Status ScriptedDriver::decide(const CallRecord& record) const {
  if (gone_) return {StatusCode::driver_gone, to_string(record.call)};
  Status answer;
  for (Failure& line : script_) {
    if (line.when) {
      if (answer.ok() && line.when(record)) answer = line.status;
      continue;
    }
    if (line.call ? *line.call != record.call : is_question(record.call)) continue;
    // Every line that counts this call counts it, whichever of them answers.
    if (line.n > 1) {
      --line.n;
      continue;
    }
    if (line.n == 0) continue;  // done
    if (answer.ok()) answer = line.status;
    if (line.repeat == Repeat::once) line.n = 0;
  }
  if (!answer.ok()) ++failures_;
  return answer;
}

Status ScriptedDriver::begin(CallRecord* record) const {
  is_in_call_ = true;
  std::chrono::microseconds pause{};
  std::function<void()> action;
  Status answer;
  {
    const MutexLock lock(mutex_);
    ++counts_[index(record->call)];
    record->number = ++total_;
    if (!is_question(record->call)) ++any_;
    pause = delays_[index(record->call)];
    action = before_[index(record->call)];
    answer = decide(*record);
  }
  if (action) action();
  if (pause.count() > 0) std::this_thread::sleep_for(pause);
  return answer;
}

Status ScriptedDriver::end(const CallRecord& record, Status answer) const {
  const MutexLock lock(mutex_);
  calls_.push_back(record);
  calls_.back().answer = answer.code();
  if (calls_.size() > kKeptCalls) calls_.pop_front();
  is_in_call_ = false;
  return answer;
}

template <typename Work>
Status ScriptedDriver::booked(CallRecord record, Work work) {
  const Status scripted = begin(&record);
  if (!scripted.ok()) return end(record, scripted);
  Status answer;
  {
    const MutexLock lock(ledger_mutex_);
    answer = work();
  }
  return end(record, answer);
}

// -- The record.

std::uint64_t ScriptedDriver::count(Call call) const {
  const MutexLock lock(mutex_);
  return counts_[index(call)];
}

std::uint64_t ScriptedDriver::count() const {
  const MutexLock lock(mutex_);
  return any_;
}

std::vector<CallRecord> ScriptedDriver::calls() const {
  const MutexLock lock(mutex_);
  return {calls_.begin(), calls_.end()};
}

std::vector<CallRecord> ScriptedDriver::calls(Call call) const {
  std::vector<CallRecord> picked = calls();
  picked.erase(std::remove_if(picked.begin(), picked.end(), [call](const CallRecord& r) { return r.call != call; }),
               picked.end());
  return picked;
}

std::string ScriptedDriver::transcript() const {
  std::string text;
  for (const CallRecord& record : calls()) text += record.text() + "\n";
  return text;
}

void ScriptedDriver::clear_calls() {
  const MutexLock lock(mutex_);
  calls_.clear();
  std::fill(std::begin(counts_), std::end(counts_), 0);
  total_ = 0;
  any_ = 0;
}

std::string ScriptedDriver::leaks() const {
  const MutexLock lock(ledger_mutex_);
  std::string text;
  const auto add = [&text](std::size_t count, const char* what, std::size_t bytes) {
    if (count == 0) return;
    if (!text.empty()) text += ", ";
    text += std::to_string(count) + " " + what + (count == 1 ? "" : "s");
    if (bytes > 0) text += " (" + format_bytes(bytes) + ")";
  };
  add(reservations_.size(), "reservation", sum(reservations_));
  add(chunks_.size(), "chunk", sum(chunks_));
  add(mappings_.size(), "mapping", sum(mappings_));
  add(fences_.size(), "fence", 0);
  return text;
}

std::size_t ScriptedDriver::live_reservations() const {
  const MutexLock lock(ledger_mutex_);
  return reservations_.size();
}
std::size_t ScriptedDriver::live_chunks() const {
  const MutexLock lock(ledger_mutex_);
  return chunks_.size();
}
std::size_t ScriptedDriver::live_mappings() const {
  const MutexLock lock(ledger_mutex_);
  return mappings_.size();
}
std::size_t ScriptedDriver::live_fences() const {
  const MutexLock lock(ledger_mutex_);
  return fences_.size();
}
std::size_t ScriptedDriver::live_chunk_bytes() const {
  const MutexLock lock(ledger_mutex_);
  return sum(chunks_);
}
std::size_t ScriptedDriver::live_mapped_bytes() const {
  const MutexLock lock(ledger_mutex_);
  return sum(mappings_);
}

// -- What there is.

bool ScriptedDriver::alive() const {
  const MutexLock lock(mutex_);
  return !gone_ && inner_.alive();
}

int ScriptedDriver::device_count() const { return alive() ? inner_.device_count() : 0; }

std::string ScriptedDriver::missing(int device) const {
  if (inner_.alive() && !alive()) return "the script says that the driver has gone";
  return inner_.missing(device);
}

Status ScriptedDriver::capabilities(int device, Capabilities* out) const {
  CallRecord record = make(Call::capabilities, number(device));
  if (const Status scripted = begin(&record); !scripted.ok()) return end(record, scripted);
  const Status answer = inner_.capabilities(device, out);
  if (answer.ok()) {
    const MutexLock lock(mutex_);
    if (change_) change_(out);
  }
  return end(record, answer);
}

Status ScriptedDriver::memory_info(int device, MemoryInfo* out) const {
  CallRecord record = make(Call::memory_info, number(device));
  if (const Status scripted = begin(&record); !scripted.ok()) return end(record, scripted);
  return end(record, inner_.memory_info(device, out));
}

// -- Memory.

void ScriptedDriver::place_next_reservation(Address at) {
  const MutexLock lock(ledger_mutex_);
  next_place_ = at;
}

Status ScriptedDriver::reserve(std::size_t size, std::size_t alignment, Address* out) {
  return booked(make(Call::reserve, size, alignment), [&]() VMM_REQUIRES(ledger_mutex_) {
    const Status answer = inner_.reserve(size, alignment, out);
    if (!answer.ok()) return answer;
    if (next_place_.has_value()) {
      truly_at_[*next_place_] = *out;
      *out = *next_place_;
      next_place_.reset();
    }
    reservations_[*out] = size;
    return answer;
  });
}

Status ScriptedDriver::unreserve(Address address, std::size_t size) {
  return booked(make(Call::unreserve, address, size), [&]() VMM_REQUIRES(ledger_mutex_) {
    const auto placed = truly_at_.find(address);
    const Status answer = inner_.unreserve(placed == truly_at_.end() ? address : placed->second, size);
    if (answer.ok()) reservations_.erase(address);
    if (answer.ok() && placed != truly_at_.end()) truly_at_.erase(placed);
    return answer;
  });
}

Status ScriptedDriver::create(const ChunkSpec& spec, ChunkHandle* out) {
  const CallRecord record = make(Call::create, spec.size, number(spec.location), spec.exportable ? 1 : 0);
  return booked(record, [&]() VMM_REQUIRES(ledger_mutex_) {
    const Status answer = inner_.create(spec, out);
    if (answer.ok()) chunks_[*out] = spec.size;
    return answer;
  });
}

Status ScriptedDriver::release(ChunkHandle chunk) {
  return booked(make(Call::release, chunk), [&]() VMM_REQUIRES(ledger_mutex_) {
    const Status answer = inner_.release(chunk);
    if (answer.ok()) chunks_.erase(chunk);
    return answer;
  });
}

Status ScriptedDriver::map(Address address, std::size_t size, ChunkHandle chunk) {
  return booked(make(Call::map, address, size, chunk), [&]() VMM_REQUIRES(ledger_mutex_) {
    const Status answer = inner_.map(address, size, chunk);
    if (answer.ok()) mappings_[address] = size;
    return answer;
  });
}

Status ScriptedDriver::unmap(Address address, std::size_t size) {
  return booked(make(Call::unmap, address, size), [&]() VMM_REQUIRES(ledger_mutex_) {
    const Status answer = inner_.unmap(address, size);
    if (answer.ok()) mappings_.erase(mappings_.lower_bound(address), mappings_.lower_bound(address + size));
    return answer;
  });
}

Status ScriptedDriver::set_access(Address address, std::size_t size, Location who, Access access) {
  CallRecord record = make(Call::set_access, address, size, (number(who) << 8) | static_cast<std::uint64_t>(access));
  if (const Status scripted = begin(&record); !scripted.ok()) return end(record, scripted);
  return end(record, inner_.set_access(address, size, who, access));
}

Status ScriptedDriver::export_chunk(ChunkHandle chunk, int* fd) {
  CallRecord record = make(Call::export_chunk, chunk);
  if (const Status scripted = begin(&record); !scripted.ok()) return end(record, scripted);
  return end(record, inner_.export_chunk(chunk, fd));
}

Status ScriptedDriver::import_chunk(int fd, std::size_t size, ChunkHandle* out) {
  return booked(make(Call::import_chunk, number(fd), size), [&]() VMM_REQUIRES(ledger_mutex_) {
    const Status answer = inner_.import_chunk(fd, size, out);
    if (answer.ok()) chunks_[*out] = size;
    return answer;
  });
}

Status ScriptedDriver::create_stream(int device, Stream* out) {
  CallRecord record = make(Call::create_stream, number(device));
  if (const Status scripted = begin(&record); !scripted.ok()) return end(record, scripted);
  return end(record, inner_.create_stream(device, out));
}

Status ScriptedDriver::destroy_stream(int device, Stream stream) {
  CallRecord record = make(Call::destroy_stream, number(device), number(stream));
  if (const Status scripted = begin(&record); !scripted.ok()) return end(record, scripted);
  return end(record, inner_.destroy_stream(device, stream));
}

Status ScriptedDriver::pin_host(Address address, std::size_t size) {
  CallRecord record = make(Call::pin, address, size);
  if (const Status scripted = begin(&record); !scripted.ok()) return end(record, scripted);
  return end(record, inner_.pin_host(address, size));
}

Status ScriptedDriver::unpin_host(Address address) {
  CallRecord record = make(Call::unpin, address);
  if (const Status scripted = begin(&record); !scripted.ok()) return end(record, scripted);
  return end(record, inner_.unpin_host(address));
}

Status ScriptedDriver::copy_async(int device, Address to, Address from, std::size_t size, Stream stream) {
  CallRecord record = make(Call::copy_async, to, from, size);
  if (const Status scripted = begin(&record); !scripted.ok()) return end(record, scripted);
  return end(record, inner_.copy_async(device, to, from, size, stream));
}

Status ScriptedDriver::fill_async(int device, Address address, std::uint8_t byte, std::size_t size, Stream stream) {
  CallRecord record = make(Call::fill_async, address, byte, size);
  if (const Status scripted = begin(&record); !scripted.ok()) return end(record, scripted);
  return end(record, inner_.fill_async(device, address, byte, size, stream));
}

Status ScriptedDriver::read(int device, void* to, Address from, std::size_t size) {
  CallRecord record = make(Call::read, from, size);
  if (const Status scripted = begin(&record); !scripted.ok()) return end(record, scripted);
  return end(record, inner_.read(device, to, from, size));
}

void ScriptedDriver::set_missing_packing(std::string why) {
  const MutexLock lock(mutex_);
  missing_packing_ = std::move(why);
}

std::string ScriptedDriver::missing_packing(int device) {
  {
    const MutexLock lock(mutex_);
    if (!missing_packing_.empty()) return missing_packing_;
  }
  return inner_.missing_packing(device);
}

Status ScriptedDriver::pack_async(int device, packing::Step step, const packing::Job& job, Stream stream) {
  CallRecord record = make(Call::pack, static_cast<std::uint64_t>(step), job.memory, job.count);
  if (const Status scripted = begin(&record); !scripted.ok()) return end(record, scripted);
  return end(record, inner_.pack_async(device, step, job, stream));
}

// -- Fences.

void ScriptedDriver::hold_fences() {
  const MutexLock lock(mutex_);
  if (!hold_on_all_) active_.insert(*(hold_on_all_ = next_hold_++));
}

void ScriptedDriver::hold_fences(Stream stream) {
  const MutexLock lock(mutex_);
  const auto [hold, fresh] = hold_on_.emplace(stream, next_hold_);
  if (fresh) active_.insert(next_hold_++);
}

void ScriptedDriver::drop_hold(HoldId hold) {
  active_.erase(hold);
  // What no longer holds anything back is forgotten, or it would pile up.
  for (auto& [stream, holds] : waits_of_) holds.erase(hold);
  for (auto& [fence, holds] : fence_holds_) holds.erase(hold);
}

void ScriptedDriver::release_fences() {
  {
    const MutexLock lock(mutex_);
    const Holds ended = active_;
    for (const HoldId hold : ended) drop_hold(hold);
    hold_on_all_.reset();
    hold_on_.clear();
  }
  released_.notify_all();
}

void ScriptedDriver::release_fences(Stream stream) {
  {
    const MutexLock lock(mutex_);
    const auto found = hold_on_.find(stream);
    if (found == hold_on_.end()) return;
    drop_hold(found->second);
    hold_on_.erase(found);
  }
  released_.notify_all();
}

void ScriptedDriver::set_wait_on_held(WaitOnHeld what) {
  {
    const MutexLock lock(mutex_);
    wait_on_held_ = what;
  }
  released_.notify_all();
}

void ScriptedDriver::make_blocking(Stream stream) {
  const MutexLock lock(mutex_);
  blocking_.insert(stream);
}

void ScriptedDriver::begin_capture(Stream stream) {
  const MutexLock lock(mutex_);
  captured_.insert(stream);
}

void ScriptedDriver::end_capture(Stream stream) {
  const MutexLock lock(mutex_);
  captured_.erase(stream);
}

bool ScriptedDriver::is_captured(Stream stream) const {
  if (captured_.count(stream) != 0) return true;
  return stream == nullptr &&
         std::any_of(captured_.begin(), captured_.end(),
                     [this](Stream captured) VMM_REQUIRES(mutex_) { return blocking_.count(captured) != 0; });
}

ScriptedDriver::Holds ScriptedDriver::holds_of(Stream stream) const {
  Holds holds;
  if (hold_on_all_) holds.insert(*hold_on_all_);
  const auto add = [&](Stream one) VMM_REQUIRES(mutex_) {
    if (const auto own = hold_on_.find(one); own != hold_on_.end()) holds.insert(own->second);
    if (const auto waits = waits_of_.find(one); waits != waits_of_.end()) {
      holds.insert(waits->second.begin(), waits->second.end());
    }
  };
  add(stream);
  if (stream == nullptr) {
    for (Stream blocking : blocking_) add(blocking);
  }
  return holds;
}

bool ScriptedDriver::is_held(const Holds& holds) const {
  return std::any_of(holds.begin(), holds.end(),
                     [this](HoldId hold) VMM_REQUIRES(mutex_) { return active_.count(hold) != 0; });
}

void ScriptedDriver::wait_for(const Holds& holds) VMM_NO_THREAD_SAFETY_ANALYSIS {
  std::unique_lock<Mutex> lock(mutex_);
  released_.wait(lock,
                 [&]() VMM_NO_THREAD_SAFETY_ANALYSIS { return wait_on_held_ == WaitOnHeld::pass || !is_held(holds); });
}

Status ScriptedDriver::create_fence(int device, Fence* out) {
  return booked(make(Call::create_fence, number(device)), [&]() VMM_REQUIRES(ledger_mutex_) {
    const Status answer = inner_.create_fence(device, out);
    if (answer.ok()) fences_.insert(*out);
    return answer;
  });
}

Status ScriptedDriver::destroy_fence(Fence fence) {
  return booked(make(Call::destroy_fence, number(fence)), [&]() VMM_REQUIRES(ledger_mutex_) {
    const Status answer = inner_.destroy_fence(fence);
    if (!answer.ok()) return answer;
    fences_.erase(fence);
    const MutexLock lock(mutex_);
    fence_holds_.erase(fence);
    return answer;
  });
}

Status ScriptedDriver::record(Fence fence, Stream stream) {
  CallRecord record = make(Call::record, number(fence), number(stream));
  if (const Status scripted = begin(&record); !scripted.ok()) return end(record, scripted);
  bool captured = false;
  {
    const MutexLock lock(mutex_);
    captured = is_captured(stream);
  }
  if (captured) return end(record, {StatusCode::not_supported, "record on a capturing stream"});
  const Status answer = inner_.record(fence, stream);
  if (answer.ok()) {
    const MutexLock lock(mutex_);
    fence_holds_[fence] = holds_of(stream);
  }
  return end(record, answer);
}

Status ScriptedDriver::query(Fence fence) {
  CallRecord record = make(Call::query, number(fence));
  if (const Status scripted = begin(&record); !scripted.ok()) return end(record, scripted);
  const Status answer = inner_.query(fence);
  if (!answer.ok()) return end(record, answer);
  bool held = false;
  {
    const MutexLock lock(mutex_);
    const auto found = fence_holds_.find(fence);
    held = found != fence_holds_.end() && is_held(found->second);
  }
  return end(record, held ? Status(StatusCode::not_ready, "query") : answer);
}

Status ScriptedDriver::wait(Fence fence) {
  CallRecord record = make(Call::wait, number(fence));
  if (const Status scripted = begin(&record); !scripted.ok()) return end(record, scripted);
  const Status answer = inner_.wait(fence);
  if (!answer.ok()) return end(record, answer);
  Holds holds;
  {
    const MutexLock lock(mutex_);
    if (const auto found = fence_holds_.find(fence); found != fence_holds_.end()) holds = found->second;
  }
  wait_for(holds);
  {
    const MutexLock lock(mutex_);
    // A fence that was recorded again meanwhile has a new reason to wait.
    if (const auto found = fence_holds_.find(fence); found != fence_holds_.end() && found->second == holds) {
      found->second.clear();
    }
  }
  return end(record, answer);
}

Status ScriptedDriver::stream_wait(int device, Stream stream, Fence fence) {
  CallRecord record = make(Call::stream_wait, number(stream), number(fence), number(device));
  if (const Status scripted = begin(&record); !scripted.ok()) return end(record, scripted);
  bool captured = false;
  {
    const MutexLock lock(mutex_);
    captured = is_captured(stream);
  }
  if (captured) return end(record, {StatusCode::not_supported, "stream_wait on a capturing stream"});
  const Status answer = inner_.stream_wait(device, stream, fence);
  if (answer.ok()) {
    const MutexLock lock(mutex_);
    if (const auto found = fence_holds_.find(fence); found != fence_holds_.end()) {
      for (const HoldId hold : found->second) {
        if (active_.count(hold) != 0) waits_of_[stream].insert(hold);
      }
    }
  }
  return end(record, answer);
}

Status ScriptedDriver::synchronize(int device) {
  CallRecord record = make(Call::synchronize, number(device));
  if (const Status scripted = begin(&record); !scripted.ok()) return end(record, scripted);
  const Status answer = inner_.synchronize(device);
  if (!answer.ok()) return end(record, answer);
  Holds holds;
  {
    const MutexLock lock(mutex_);
    holds = active_;
  }
  wait_for(holds);
  return end(record, answer);
}

}  // namespace vmm::testing
