// A driver that does what a test says: it wraps another one, fails or delays
// calls, holds fences back, records calls and counts what is alive. It owns the
// script and the ledger; it never knows what is above the driver.
//
//   HostDriver host;
//   ScriptedDriver driver(host);
//   driver.fail_nth(Call::map, 3, Status(StatusCode::out_of_memory, "map"));
//   ... EXPECT_EQ(driver.leaks(), "");
//
// Thread-safe. A failed call never reaches the wrapped driver. Numbers count
// from 1 and from the moment the script line was given.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/sync.h"
#include "driver/driver.h"

namespace vmm::testing {

// The calls that answer a Status. Asking what there is (capabilities,
// memory_info) is counted and scripted too, but is not a part of `any`.
enum class Call : std::uint8_t {
  reserve,
  unreserve,
  create,
  release,
  map,
  unmap,
  set_access,
  export_chunk,
  import_chunk,
  create_fence,
  destroy_fence,
  record,
  query,
  wait,
  stream_wait,
  synchronize,
  copy_async,
  fill_async,
  read,
  pack,
  create_stream,
  destroy_stream,
  pin,
  unpin,
  memory_info,
  capabilities,
};
inline constexpr std::size_t kCallKinds = 26;
const char* to_string(Call call);

enum class Repeat : std::uint8_t { once, from_then_on };

struct CallRecord {
  Call call = Call::reserve;
  std::uint64_t number = 0;  // 1, 2, .. over all kinds
  std::uint64_t a = 0;       // the arguments, in order, as numbers
  std::uint64_t b = 0;
  std::uint64_t c = 0;
  StatusCode answer = StatusCode::ok;
  // "17 map(0x7f0000000000, 0x200000, 0x5) -> ok"
  [[nodiscard]] std::string text() const;
};

class ScriptedDriver final : public Driver {
 public:
  // `inner` must outlive this.
  explicit ScriptedDriver(Driver& inner) : inner_(inner) {}
  // Whether this thread is within a call: what that allocates a real driver does not.
  [[nodiscard]] static bool is_in_call() { return is_in_call_; }

  // -- Failing. Several lines may be active; the first that applies answers.
  void fail_nth(Call call, std::uint64_t n, const Status& status, Repeat repeat = Repeat::once);
  // The n-th call of any kind, for sweeps: fail 1, 2, .. until nothing failed.
  void fail_nth_call(std::uint64_t n, const Status& status, Repeat repeat = Repeat::once);
  // Fails whatever `when` picks.
  void fail_if(std::function<bool(const CallRecord&)> when, const Status& status);
  void clear_failures();
  // Calls failed by the script since the last clear_failures().
  [[nodiscard]] std::uint64_t failures() const;
  // From now on every call answers driver_gone, as after process exit.
  void go_away();

  // -- Delaying: each call of this kind first sleeps that long, with no lock
  // held. Zero ends it.
  void delay(Call call, std::chrono::microseconds time);

  // Runs `action` before each call of this kind, with no lock held; nullptr ends
  // it. What it calls itself runs it again.
  void before(Call call, std::function<void()> action);

  // -- Fences. A hold is work that does not end: fences recorded on the stream
  // afterwards, and those of streams that wait for them, do not pass until
  // release_fences(). Fences recorded before have passed.
  void hold_fences();  // all streams
  void hold_fences(Stream stream);
  // A blocking stream: fences on the default one cover it as well, as they do
  // every thread's per-thread stream.
  void make_blocking(Stream stream);
  // From now on the stream is being captured: it can neither be recorded nor
  // made to wait, and the default stream cannot be recorded if it is blocking.
  void begin_capture(Stream stream);
  void end_capture(Stream stream);
  void release_fences();  // ends every hold
  void release_fences(Stream stream);
  enum class WaitOnHeld : std::uint8_t {
    block,  // wait() blocks until another thread releases
    pass,   // wait() answers at once, and the fence has passed from then on
  };
  void set_wait_on_held(WaitOnHeld what);

  // -- What capabilities() says, changed: `change` is applied to the wrapped
  // driver's answer.
  void change_capabilities(std::function<void(Capabilities*)> change);

  // -- What missing_packing() says.
  void set_missing_packing(std::string why) VMM_EXCLUDES(mutex_);

  // -- Pools of the driver's own: these, which outlive this; else the wrapped driver's.
  void set_native_pools(NativePools& pools) { native_pools_ = &pools; }
  [[nodiscard]] NativePools* native_pools() override {
    return native_pools_ != nullptr ? native_pools_ : inner_.native_pools();
  }

  // -- Time. It stands still but for this.
  void pass_time(std::chrono::nanoseconds time) { now_ += time.count(); }
  [[nodiscard]] std::chrono::nanoseconds now() const override { return std::chrono::nanoseconds(now_); }

  // -- Addresses. The next reservation is said to begin at `at`, wherever it is
  // in truth: for arithmetic on addresses. Nothing can be mapped in it.
  void place_next_reservation(Address at);

  // -- The record. Counts are exact; of the records the newest 65536 are kept.
  [[nodiscard]] std::uint64_t count(Call call) const;
  [[nodiscard]] std::uint64_t count() const;  // as fail_nth_call counts
  [[nodiscard]] std::vector<CallRecord> calls() const;
  [[nodiscard]] std::vector<CallRecord> calls(Call call) const;
  [[nodiscard]] std::string transcript() const;  // one line a call
  void clear_calls();

  // -- What is alive. "" or "2 reservations (4 GiB), 1 chunk (2 MiB)".
  [[nodiscard]] std::string leaks() const;
  [[nodiscard]] std::size_t live_reservations() const;
  [[nodiscard]] std::size_t live_chunks() const;  // not released
  [[nodiscard]] std::size_t live_mappings() const;
  [[nodiscard]] std::size_t live_fences() const;
  [[nodiscard]] std::size_t live_chunk_bytes() const;
  [[nodiscard]] std::size_t live_mapped_bytes() const;

  // -- Driver.
  [[nodiscard]] std::string name() const override { return "scripted(" + inner_.name() + ")"; }
  [[nodiscard]] bool alive() const override;
  [[nodiscard]] int device_count() const override;
  Status capabilities(int device, Capabilities* out) const override;
  [[nodiscard]] std::string missing(int device) const override;
  Status reserve(std::size_t size, std::size_t alignment, Address* out) override;
  Status unreserve(Address address, std::size_t size) override;
  Status create(const ChunkSpec& spec, ChunkHandle* out) override;
  Status release(ChunkHandle chunk) override;
  Status map(Address address, std::size_t size, ChunkHandle chunk) override;
  Status unmap(Address address, std::size_t size) override;
  Status set_access(Address address, std::size_t size, Location who, Access access) override;
  Status export_chunk(ChunkHandle chunk, int* fd) override;
  Status import_chunk(int fd, std::size_t size, ChunkHandle* out) override;
  Status create_fence(int device, Fence* out) override;
  Status destroy_fence(Fence fence) override;
  Status record(Fence fence, Stream stream) override;
  Status query(Fence fence) override;
  Status wait(Fence fence) override;
  Status stream_wait(int device, Stream stream, Fence fence) override;
  Status synchronize(int device) override;
  Status create_stream(int device, Stream* out) override;
  Status destroy_stream(int device, Stream stream) override;
  Status pin_host(Address address, std::size_t size) override;
  Status unpin_host(Address address) override;
  [[nodiscard]] bool pins_host() const override { return inner_.pins_host(); }
  Status copy_async(int device, Address to, Address from, std::size_t size, Stream stream) override;
  Status fill_async(int device, Address address, std::uint8_t byte, std::size_t size, Stream stream) override;
  Status read(int device, void* to, Address from, std::size_t size) override;
  [[nodiscard]] std::string missing_packing(int device) override;
  Status pack_async(int device, packing::Step step, const packing::Job& job, Stream stream) override;
  Status memory_info(int device, MemoryInfo* out) const override;

 private:
  struct Failure {
    std::optional<Call> call;  // none: any
    std::uint64_t n = 0;       // calls to go; 1 is the next
    Repeat repeat = Repeat::once;
    std::function<bool(const CallRecord&)> when;
    Status status;
  };
  using HoldId = std::uint64_t;
  using Holds = std::set<HoldId>;

  // The script's part of a call: counts, delays, decides. Not ok: the answer.
  Status begin(CallRecord* record) const VMM_EXCLUDES(mutex_);
  // Notes the answer and hands it on.
  Status end(const CallRecord& record, Status answer) const VMM_EXCLUDES(mutex_);
  [[nodiscard]] Status decide(const CallRecord& record) const VMM_REQUIRES(mutex_);
  [[nodiscard]] Holds holds_of(Stream stream) const VMM_REQUIRES(mutex_);
  [[nodiscard]] bool is_captured(Stream stream) const VMM_REQUIRES(mutex_);
  [[nodiscard]] bool is_held(const Holds& holds) const VMM_REQUIRES(mutex_);
  void drop_hold(HoldId hold) VMM_REQUIRES(mutex_);
  // True once nothing in `holds` is active, at once if waits pass.
  void wait_for(const Holds& holds) VMM_EXCLUDES(mutex_);
  // Runs `work` under the ledger's lock: a driver call and its booking are one
  // step, or another thread could map what this one has just unmapped and not
  // yet booked.
  template <typename Work>
  Status booked(CallRecord record, Work work);

  inline static thread_local bool is_in_call_ = false;
  Driver& inner_;
  NativePools* native_pools_ = nullptr;
  std::atomic<std::chrono::nanoseconds::rep> now_{0};

  mutable Mutex mutex_;  // the script; before ledger_mutex_ never, after neither
  mutable std::vector<Failure> script_ VMM_GUARDED_BY(mutex_);
  mutable std::uint64_t failures_ VMM_GUARDED_BY(mutex_) = 0;
  mutable std::deque<CallRecord> calls_ VMM_GUARDED_BY(mutex_);
  mutable std::uint64_t counts_[kCallKinds] VMM_GUARDED_BY(mutex_) = {};
  mutable std::uint64_t total_ VMM_GUARDED_BY(mutex_) = 0;
  mutable std::uint64_t any_ VMM_GUARDED_BY(mutex_) = 0;
  std::chrono::microseconds delays_[kCallKinds] VMM_GUARDED_BY(mutex_) = {};
  std::function<void()> before_[kCallKinds] VMM_GUARDED_BY(mutex_);
  bool gone_ VMM_GUARDED_BY(mutex_) = false;
  std::function<void(Capabilities*)> change_ VMM_GUARDED_BY(mutex_);
  std::string missing_packing_ VMM_GUARDED_BY(mutex_);

  std::condition_variable_any released_;
  WaitOnHeld wait_on_held_ VMM_GUARDED_BY(mutex_) = WaitOnHeld::block;
  HoldId next_hold_ VMM_GUARDED_BY(mutex_) = 1;
  Holds active_ VMM_GUARDED_BY(mutex_);
  std::optional<HoldId> hold_on_all_ VMM_GUARDED_BY(mutex_);
  std::map<Stream, HoldId> hold_on_ VMM_GUARDED_BY(mutex_);
  std::set<Stream> blocking_ VMM_GUARDED_BY(mutex_) = {reinterpret_cast<Stream>(std::uintptr_t{2})};
  std::set<Stream> captured_ VMM_GUARDED_BY(mutex_);
  std::map<Stream, Holds> waits_of_ VMM_GUARDED_BY(mutex_);  // by stream_wait()
  std::map<Fence, Holds> fence_holds_ VMM_GUARDED_BY(mutex_);

  mutable Mutex ledger_mutex_;
  std::map<Address, std::size_t> reservations_ VMM_GUARDED_BY(ledger_mutex_);
  std::optional<Address> next_place_ VMM_GUARDED_BY(ledger_mutex_);
  std::map<Address, Address> truly_at_ VMM_GUARDED_BY(ledger_mutex_);  // of the placed ones
  std::map<ChunkHandle, std::size_t> chunks_ VMM_GUARDED_BY(ledger_mutex_);
  std::map<Address, std::size_t> mappings_ VMM_GUARDED_BY(ledger_mutex_);
  std::set<Fence> fences_ VMM_GUARDED_BY(ledger_mutex_);
};

}  // namespace vmm::testing
