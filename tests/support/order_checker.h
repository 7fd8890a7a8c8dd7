// A driver for tests that proves in which order memory is used. It wraps another
// driver and knows nothing of who calls it: only the driver's contract, and what
// a test tells of its own program (which kernels it queues, what it was handed
// and took back). Work is asynchronous here as on a GPU: see work_order.h for
// what comes after what, memory_uses.h for which bytes.
//
// THE RULE. Every use of memory that was queued comes before whatever ends it:
//
// 1. An address is unmapped, or loses access, only when the HOST KNOWS that all
//    work through that address is done: query() answered ok, or it waited.
// 2. Memory that is FILLED or copied into by the allocator comes after every use
//    of those bytes, by anyone, on any stream. (Comes after: by stream order, by
//    stream_wait(), or because the host knew it done.)
// 3. Memory that is HANDED OUT
//    a. to the pool and stream that it was last handed out to: at once. Readers
//       on other streams are the program's affair, as under PyTorch's own
//       allocator: it makes the owner's stream wait for them before the next use
//       of newly allocated memory there ("late wait"). Yet also here first come
//       the uses that bind everyone: those of recorded streams, all uses of
//       explicit pages (nobody says on which streams these are used), and those
//       by graphs once the graphs are gone.
//    b. to anyone else (another stream, pool, model): after every use of those
//       bytes, by anyone, on any stream.
//    c. on a stream that is being captured, out of a pool that graphs have for
//       themselves (pinned): nothing can be ordered in front of a graph, which may
//       run at any time anywhere; so "after" means that the host knows. (Out of
//       other pools, as in a capture that nobody announced, the program launches
//       the graph behind what its stream had queued before, natively too.)
// 4. The first use of memory that was handed out comes after every use from
//    before. (For 3a the program sees to it; so this also checks the program.)
// 5. Memory that is handed out is mapped, accessible, nobody else's, and stays
//    so until it is taken back; a graph's memory for as long as the graph.
//    Between asleep() and awake() of its pool, when the program queues nothing of
//    it, memory may be anywhere, and the allocator may write to what is there.
//    From awake() on any stream may use it, so the HOST KNOWS that all is done
//    that was queued on memory that has come, and all that the allocator queued
//    on what stayed.
// 6. Nobody names a stream that has been destroyed, not even to ask what kind it
//    is: CUDA crashes.
//
// 7. What a kernel READS is what was written there last, wherever that has been
//    meanwhile; where nobody has written since it was handed out, zeros or its own
//    pool's bytes, never another's. Where the program had it thrown away, zeros.
//
// What breaks it is told by the next check(): what happened, where, which use by
// whom is not ordered, and what is. "The program:" begins what a test itself did
// wrong.
//
// Not modelled: captures that a driver's call would end (Driver promises that none
// does; that is the GPU tests' to prove); what other processes do with exported chunks; whether streams
// race within memory that is handed out (the program's affair).
//
// Thread-safe; on the one clock of all host threads see work_order.h.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "base/sync.h"
#include "driver/driver.h"
#include "support/block_contents.h"
#include "support/memory_uses.h"
#include "support/work_order.h"

namespace vmm::testing {

enum class Use : std::uint8_t { read, write };

// What was queued on captured streams, for launching.
struct CapturedGraph {
  struct Node {
    Address address = 0;
    std::size_t bytes = 0;
    Use use = Use::read;
    std::uint64_t pool = 0;  // whose memory it was
  };
  std::vector<Node> nodes;
};

class OrderChecker final : public Driver {
 public:
  // `inner` must outlive this. What fails there is passed on and counts for
  // nothing, but a failed fill or copy, which may have been done in part.
  // `with_patterns`: of debug mode.
  explicit OrderChecker(Driver& inner, bool with_patterns = false) : inner_(inner), contents_(with_patterns) {}

  // -- What the test tells -----------------------------------------------------
  // Streams other than the default and the per-thread ones.
  void add_stream(const StreamSpec& spec) VMM_EXCLUDES(mutex_);
  void destroy_stream(Stream handle) VMM_EXCLUDES(mutex_);
  // A name for what the program does now, for messages.
  void at(const std::string& where) VMM_EXCLUDES(mutex_);

  // A kernel is queued that uses these bytes. On a captured stream it becomes
  // part of the graph. A long one is not done by drift.
  void use(StreamRef stream, Address address, std::size_t bytes, Use use, bool is_long = false) VMM_EXCLUDES(mutex_);
  // The program's own events: a point in a stream's work, and waiting for it.
  [[nodiscard]] VectorClock point(StreamRef stream) VMM_EXCLUDES(mutex_);
  void wait(StreamRef stream, const VectorClock& point) VMM_EXCLUDES(mutex_);
  // Asked by the allocator, of a stream that it meets: rule 6.
  [[nodiscard]] bool is_blocking(StreamRef stream) VMM_EXCLUDES(mutex_);
  // Neither work nor a wait may be queued there: it is captured, or the default
  // stream beside a capture of a blocking stream.
  [[nodiscard]] bool is_blocked(StreamRef stream) VMM_EXCLUDES(mutex_);
  // All of it is mapped, and the device may use it so.
  [[nodiscard]] bool is_accessible(Address address, std::size_t bytes, int device, Access access) const
      VMM_EXCLUDES(mutex_);

  // The allocator gave this memory for `stream` out of `pool` (a number of the
  // test's, above 0), and the program gives it back. Sizes are rounded up to 512.
  void hand_out(Address address, std::size_t bytes, StreamRef stream, std::uint64_t pool) VMM_EXCLUDES(mutex_);
  // A checkpoint made it the program's again. What of its own stream and pool uses
  // it, graphs too, is the program's affair.
  void hand_out_again(Address address, std::size_t bytes, StreamRef stream, std::uint64_t pool) VMM_EXCLUDES(mutex_);
  // Says nothing where it is the block's own stream, by its name.
  void record_stream(Address address, StreamRef stream) VMM_EXCLUDES(mutex_);
  void take_back(Address address) VMM_EXCLUDES(mutex_);
  // Explicit pages, which may be given back in parts.
  void hand_out_pages(Address address, std::size_t bytes, StreamRef stream, std::uint64_t pool) VMM_EXCLUDES(mutex_);
  void take_back_pages(Address address, std::size_t bytes) VMM_EXCLUDES(mutex_);

  // -- Sleep. The program asks for it, and queues nothing of the pool until it is awake.
  void asleep(std::uint64_t pool) VMM_EXCLUDES(mutex_);
  void awake(std::uint64_t pool) VMM_EXCLUDES(mutex_);
  // What the program had written to the pool's memory is zero when that is awake, or, unless
  // `surely`, may be.
  void throw_away(std::uint64_t pool, bool surely) VMM_EXCLUDES(mutex_);
  // Of a pool that is asleep, or a graph that uses one's memory.
  [[nodiscard]] bool is_asleep(std::uint64_t pool) const VMM_EXCLUDES(mutex_);
  [[nodiscard]] bool is_asleep(const CapturedGraph& graph) const VMM_EXCLUDES(mutex_);

  // -- Captures and graphs
  CaptureId begin_capture(StreamRef stream) VMM_EXCLUDES(mutex_);
  void join_capture(StreamRef stream, CaptureId capture) VMM_EXCLUDES(mutex_);
  void invalidate_capture(CaptureId capture) VMM_EXCLUDES(mutex_);
  // An invalid one gives an empty graph.
  CapturedGraph end_capture(CaptureId capture) VMM_EXCLUDES(mutex_);
  // The valid capture that the stream takes part in; 0: none.
  [[nodiscard]] CaptureId capture_of(StreamRef stream) VMM_EXCLUDES(mutex_);
  // Graphs use the memory of this pool at any launch, freed or not; none does
  // any more, and from now on what they queued binds everyone.
  void pin(std::uint64_t pool) VMM_EXCLUDES(mutex_);
  void unpin(std::uint64_t pool) VMM_EXCLUDES(mutex_);
  void launch(const CapturedGraph& graph, StreamRef stream) VMM_EXCLUDES(mutex_);

  // -- When work is done: only as said here, or when somebody waits for it.
  // Up to `count` pieces of the stream's work, as far as they may run.
  void run(StreamRef stream, std::size_t count) VMM_EXCLUDES(mutex_);
  void run_all() VMM_EXCLUDES(mutex_);
  // From now on, at each driver call, some work may get done, as this seed says;
  // 0: none.
  void drift(std::uint64_t seed) VMM_EXCLUDES(mutex_);

  // -- What came of it
  // Throws std::runtime_error with what broke the rule since the last check().
  void check() VMM_EXCLUDES(mutex_);
  [[nodiscard]] std::vector<std::string> violations() const VMM_EXCLUDES(mutex_);
  // How often the rule had something to forbid: where these stay 0, a test proves
  // nothing.
  struct Counts {
    std::uint64_t reused = 0;    // stretches handed out again before a late wait (3a)
    std::uint64_t moved = 0;     // handed to somebody else behind work that was not done (3b)
    std::uint64_t filled = 0;    // filled behind work that was not done (2)
    std::uint64_t unmapped = 0;  // mappings dropped that had been used (1)
    std::uint64_t launched = 0;  // graphs
    std::uint64_t copied = 0;    // copies behind work that was not done
    std::uint64_t came = 0;      // stretches of blocks that came back in other memory (5)
    // What asked for it, by the host's waits and by streams', besides what it needs:
    std::uint64_t host_waits_for_copies = 0;    // that were not done
    std::uint64_t stream_waits_for_copies = 0;  // the same
  };
  [[nodiscard]] Counts counts() const VMM_EXCLUDES(mutex_);

  // -- Driver -------------------------------------------------------------------
  [[nodiscard]] std::string name() const override { return "ordered(" + inner_.name() + ")"; }
  [[nodiscard]] bool alive() const override { return inner_.alive(); }
  [[nodiscard]] int device_count() const override { return inner_.device_count(); }
  Status capabilities(int device, Capabilities* out) const override { return inner_.capabilities(device, out); }
  [[nodiscard]] std::string missing(int device) const override { return inner_.missing(device); }
  Status reserve(std::size_t size, std::size_t alignment, Address* out) override;
  Status unreserve(Address address, std::size_t size) override;
  Status create(const ChunkSpec& spec, ChunkHandle* out) override VMM_EXCLUDES(mutex_);
  Status release(ChunkHandle chunk) override VMM_EXCLUDES(mutex_);
  Status map(Address address, std::size_t size, ChunkHandle chunk) override VMM_EXCLUDES(mutex_);
  Status unmap(Address address, std::size_t size) override VMM_EXCLUDES(mutex_);
  Status set_access(Address address, std::size_t size, Location who, Access access) override VMM_EXCLUDES(mutex_);
  Status export_chunk(ChunkHandle chunk, int* fd) override { return inner_.export_chunk(chunk, fd); }
  Status import_chunk(int fd, std::size_t size, ChunkHandle* out) override VMM_EXCLUDES(mutex_);
  Status create_fence(int device, Fence* out) override VMM_EXCLUDES(mutex_);
  Status destroy_fence(Fence fence) override VMM_EXCLUDES(mutex_);
  Status record(Fence fence, Stream stream) override VMM_EXCLUDES(mutex_);
  Status query(Fence fence) override VMM_EXCLUDES(mutex_);
  Status wait(Fence fence) override VMM_EXCLUDES(mutex_);
  Status stream_wait(int device, Stream stream, Fence fence) override VMM_EXCLUDES(mutex_);
  Status synchronize(int device) override VMM_EXCLUDES(mutex_);
  Status create_stream(int device, Stream* out) override VMM_EXCLUDES(mutex_);
  Status destroy_stream(int device, Stream stream) override { return inner_.destroy_stream(device, stream); }
  Status pin_host(Address address, std::size_t size) override { return inner_.pin_host(address, size); }
  Status unpin_host(Address address) override { return inner_.unpin_host(address); }
  [[nodiscard]] bool pins_host() const override { return inner_.pins_host(); }
  Status copy_async(int device, Address to, Address from, std::size_t size, Stream stream) override
      VMM_EXCLUDES(mutex_);
  Status fill_async(int device, Address address, std::uint8_t byte, std::size_t size, Stream stream) override
      VMM_EXCLUDES(mutex_);
  Status read(int device, void* to, Address from, std::size_t size) override VMM_EXCLUDES(mutex_);
  // Nothing sleeps packed here.
  [[nodiscard]] std::string missing_packing(int device) override { return inner_.missing_packing(device); }
  Status pack_async(int device, packing::Step step, const packing::Job& job, Stream stream) override {
    return inner_.pack_async(device, step, job, stream);
  }
  Status memory_info(int device, MemoryInfo* out) const override { return inner_.memory_info(device, out); }
  bool current_context(const void** out) const override { return inner_.current_context(out); }
  [[nodiscard]] const void* used_context(int device) const override { return inner_.used_context(device); }
  [[nodiscard]] std::chrono::nanoseconds now() const override { return inner_.now(); }

 private:
  struct Block {
    std::size_t size = 0;
    Owner owner;
    std::uint64_t number = 0;
    bool pages = false;
    std::vector<Lane> recorded;
  };
  struct FenceState {
    int device = 0;
    VectorClock point;  // when it passes, this is done
  };
  // One piece of work, for messages.
  struct Deed {
    const char* what = "";
    Address address = 0;
    std::size_t bytes = 0;
    std::shared_ptr<const std::string> where;
  };
  using Blocks = std::map<Address, Block>;

  Lane lane_of_program(StreamRef stream) VMM_REQUIRES(mutex_);
  // The lane of a driver call, or the answer to give at once.
  Status lane_of_call(const char* call, StreamRef stream, Lane* out) VMM_REQUIRES(mutex_);
  Seq queue(Lane lane, const char* what, Address address, std::size_t bytes, bool is_long = false) VMM_REQUIRES(mutex_);
  enum class Handing : std::uint8_t { block, pages, again };
  void hand_out_block(Address address, std::size_t bytes, StreamRef stream, std::uint64_t pool, Handing how)
      VMM_REQUIRES(mutex_);
  void take_piece_back(const Block& block, Piece& piece) VMM_REQUIRES(mutex_);
  Blocks::iterator block_at(Address address) VMM_REQUIRES(mutex_);
  void note_use(Lane lane, Seq seq, const VectorClock& before, const CapturedGraph::Node& node, bool is_replay)
      VMM_REQUIRES(mutex_);
  void fill(Lane lane, Address address, std::size_t size) VMM_REQUIRES(mutex_);
  void copy(Lane lane, Address address, std::size_t size, Seq seq, const VectorClock& before, bool is_write)
      VMM_REQUIRES(mutex_);
  [[nodiscard]] bool is_held(const Piece& piece) const VMM_REQUIRES(mutex_);
  void touch_content(const CapturedGraph::Node& node, Lane lane, Seq seq) VMM_REQUIRES(mutex_);
  void leave_under_sleeper(Address at, const Mapping& mapping) VMM_REQUIRES(mutex_);
  void come_back(Address address, std::size_t size, const Owner& owner, std::uint64_t block) VMM_REQUIRES(mutex_);
  [[nodiscard]] bool covers_copies(const VectorClock& point) const VMM_REQUIRES(mutex_);
  void work_goes_on() VMM_REQUIRES(mutex_);
  // The newest use that `point` does not cover, as text; "" when it covers all.
  std::string first_late(const UseSet& uses, Seq LaneUses::*which, const VectorClock& point) const VMM_REQUIRES(mutex_);
  [[nodiscard]] bool all_done(const UseSet& uses) const VMM_REQUIRES(mutex_);
  [[nodiscard]] std::string text_of(Lane lane, Seq seq) const VMM_REQUIRES(mutex_);
  [[nodiscard]] std::string text_of(const Owner& owner) VMM_REQUIRES(mutex_);
  void violate(const std::string& text) VMM_REQUIRES(mutex_);

  Driver& inner_;
  mutable Mutex mutex_;
  WorkOrder order_ VMM_GUARDED_BY(mutex_);
  MemoryUses memory_ VMM_GUARDED_BY(mutex_);
  Blocks blocks_ VMM_GUARDED_BY(mutex_);  // handed out, by address
  std::uint64_t last_block_ VMM_GUARDED_BY(mutex_) = 0;
  std::map<Fence, FenceState> fences_ VMM_GUARDED_BY(mutex_);
  std::map<CaptureId, CapturedGraph> captures_ VMM_GUARDED_BY(mutex_);
  std::set<std::uint64_t> pinned_ VMM_GUARDED_BY(mutex_);
  std::set<std::uint64_t> asleep_ VMM_GUARDED_BY(mutex_);
  struct Gone {
    Address address = 0;
    std::size_t size = 0;
    Owner owner;
  };
  std::vector<Gone> gone_ VMM_GUARDED_BY(mutex_);  // freed memory of graphs, whose pool is asleep
  BlockContents contents_ VMM_GUARDED_BY(mutex_);
  std::map<Lane, Seq> copies_ VMM_GUARDED_BY(mutex_);  // the newest of each lane
  std::map<Lane, std::vector<Deed>> deeds_ VMM_GUARDED_BY(mutex_);
  std::shared_ptr<const std::string> where_ VMM_GUARDED_BY(mutex_) = std::make_shared<std::string>("the start");
  bool drifts_ VMM_GUARDED_BY(mutex_) = false;
  std::mt19937_64 random_ VMM_GUARDED_BY(mutex_);
  std::uint64_t checks_ VMM_GUARDED_BY(mutex_) = 0;
  std::vector<std::string> violations_ VMM_GUARDED_BY(mutex_);
  Counts counts_ VMM_GUARDED_BY(mutex_);
};

}  // namespace vmm::testing
