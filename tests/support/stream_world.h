// The world in which stream programs run: an allocator over the order checker,
// and a model of the program that uses it. The model sees to it that the program
// is right under PyTorch's own allocator, and does no more than that:
//
// - A stream that uses a block first waits for the stream that allocated it, as
//   that was right after the allocation, and for the block's writers; a writer
//   waits for its readers too.
// - What is freed while other streams use it (and they were not recorded) is a
//   debt of its owner's stream. It is paid as late as can be: by whoever first
//   uses a block that was allocated on that stream after the free ("late wait").
//   Recorded streams make no debt.
// - Graphs of one private pool, and all other users of its memory, take turns.
//   A graph is launched while everything that it uses is there. One that nobody
//   announced has memory of its stream's like any work there, and so is launched
//   behind what that had queued before the capture.
// - Nothing is queued on the default stream while a blocking one is captured,
//   and only work on a captured one.
// - A foreign non-blocking stream reads without being recorded only after the
//   allocator has met one on its device: what it never heard of it cannot cover
//   (and natively only a wait by the owner makes that right).
// - A stream that was recorded for a block lives until the block is freed.
// - Nothing is queued that uses memory of a model from before it is told to sleep until
//   it has woken; what was queued before may still run. Its blocks may be freed.
// - torch's own streams appear when they are first used: the allocator finds them
//   in its census, though no pool has met them.
//
// Kernels write and read their blocks' contents (block_contents.h).
#pragma once

#include <array>
#include <condition_variable>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/device/private_pools.h"
#include "core/faces/shared_memory_pool.h"
#include "core/faces/virtual_memory_manager.h"
#include "core/memory/address_space.h"
#include "core/sleep/transfer.h"
#include "driver/host_driver.h"
#include "support/order_checker.h"
#include "support/scripted_driver.h"
#include "support/stepped_transfer.h"
#include "support/stream_program.h"

namespace vmm::testing {

// Runs what it is given on a thread of its own, one thing at a time, and waits.
class OtherThread {
 public:
  OtherThread() : thread_([this] { loop(); }) {}
  ~OtherThread();
  OtherThread(const OtherThread&) = delete;
  OtherThread& operator=(const OtherThread&) = delete;
  // Exceptions come out here.
  void run(const std::function<void()>& work);

 private:
  void loop();
  std::mutex mutex_;
  std::condition_variable changed_;
  const std::function<void()>* work_ = nullptr;
  std::exception_ptr error_;
  bool done_ = false;
  bool ends_ = false;
  std::thread thread_;
};

// The streams of a program, by number. Operations name them modulo their count.
struct StreamSlot {
  std::string name;
  Stream handle = nullptr;
  int device = 0;
  enum class Kind : std::uint8_t { standard, own, per_thread, of_other_thread, blocking, non_blocking } kind;
  [[nodiscard]] bool is_foreign() const { return kind == Kind::blocking || kind == Kind::non_blocking; }
};
inline constexpr std::size_t kNamedStreams = 14;
inline constexpr std::size_t kCrowd = 72;  // more of torch's own than a pool keeps a place for
inline constexpr std::size_t kStreamSlots = kNamedStreams + kCrowd;
const std::array<StreamSlot, kStreamSlots>& stream_slots();

// Pools, by number: three models under one limit, a pool of its own, a part of
// that, a pool of the other device, and a tag of the first model.
inline constexpr std::size_t kPoolSlots = 7;
inline constexpr std::size_t kGroupPools = 3;
inline constexpr std::size_t kPlainPool = 3;
inline constexpr std::size_t kPartOfPlain = 4;
inline constexpr std::size_t kPeerPool = 5;
inline constexpr std::size_t kTagOfFirst = 6;
inline constexpr const char* kTag = "weights";
// Graphs and captures, by number; regions: 0 none, 1 and 2 graphs', 3 and 4 MemPools'.
inline constexpr std::size_t kGraphSlots = 4;
inline constexpr std::size_t kRegions = 5;
// Mappings by hand.
inline constexpr std::size_t kPlaces = 8;
inline constexpr std::size_t kChunkSlots = 4;

class StreamWorld {
 public:
  // `debug`: TORCH_VMM_DEBUG.
  explicit StreamWorld(const std::string& debug);
  ~StreamWorld();
  StreamWorld(const StreamWorld&) = delete;
  StreamWorld& operator=(const StreamWorld&) = delete;

  void step(const StreamOp& op);
  void check();
  [[nodiscard]] OrderChecker::Counts counts() const { return driver_.counts(); }

 private:
  // A stream in one of its lives.
  using User = std::pair<std::size_t, unsigned>;
  // A private pool, or a part that is pinned by hand: who uses its memory takes turns.
  struct Region {
    VectorClock turns;
    int graphs = 0;
    std::vector<std::uint64_t> parts;  // numbers of the pools that serve it
    bool is_object = false;            // a MemPool
    bool is_routed = false;
  };
  using RegionPtr = std::shared_ptr<Region>;
  struct Live {
    Address address = 0;
    std::size_t size = 0;
    std::uint64_t number = 0;  // of the block
    std::size_t pool = 0;      // slot
    std::weak_ptr<Pool> home;  // the pool or part that holds it
    std::uint64_t home_number = 0;
    std::size_t owner = 0;  // stream slot
    bool pages = false;
    bool again = false;  // by a checkpoint
    bool held = false;
    RegionPtr region;
    VectorClock born;    // whoever uses it comes after this
    VectorClock writes;  // by now
    VectorClock reads;
    std::vector<std::pair<User, VectorClock>> users;
    std::vector<User> recorded;
  };
  struct Graph {
    CaptureId capture = 0;  // while it is captured
    bool invalid = false;
    std::size_t region_slot = 0;
    RegionPtr region;
    CapturedGraph work;
    VectorClock born;
    std::vector<std::uint64_t> blocks;  // of others than its region's that it uses
    std::shared_ptr<std::uint64_t> id;  // that its route's filter knows
    [[nodiscard]] bool is_there() const { return region != nullptr || !work.nodes.empty(); }
  };

  // stream_world.cpp: streams and pools
  [[nodiscard]] static const StreamSlot& slot(std::size_t number) { return stream_slots()[number % kStreamSlots]; }
  [[nodiscard]] std::size_t block_of(std::uint64_t number) const;
  [[nodiscard]] static StreamRef ref(std::size_t number) { return {slot(number).handle, slot(number).device}; }
  [[nodiscard]] bool is_alive(std::size_t number);
  [[nodiscard]] bool may_work(std::size_t number);
  [[nodiscard]] User user(std::size_t number) const { return {number, lives_[number]}; }
  // On the thread whose stream it is.
  void on_thread_of(std::size_t number, const std::function<void()>& work);
  VectorClock point(std::size_t number);
  void wait(std::size_t number, const VectorClock& point);
  DeviceMemory& memory_of(int device) { return device == 0 ? *memory_ : *peer_memory_; }
  void note_met(std::size_t number);
  [[nodiscard]] bool is_coverable(std::size_t number) const;
  [[nodiscard]] StreamCensus census(int device);
  void open(std::size_t pool);
  void end_pool(std::size_t pool, bool keeps_tensors);
  void end_tag(bool keeps_tensors);
  void close_pool(std::size_t pool, bool keeps_tensors);
  void close_group(bool keeps_tensors);
  void end_blocks_of(std::size_t pool, bool keeps_tensors);
  void create_stream(std::size_t number);
  void destroy_stream(std::size_t number);
  void fail_call(std::uint64_t n, std::uint64_t how);

  // stream_world_blocks.cpp: blocks, and explicit pages
  void allocate(std::size_t pool, std::size_t bytes, std::size_t stream);
  void allocate_at(std::size_t pool, std::size_t bytes, std::size_t stream, std::uint64_t where);
  void pages(std::size_t pool, std::size_t first, std::size_t count, std::size_t stream);
  void first_pages(std::size_t pool, std::size_t count, std::size_t stream);
  void adopt(Live live, const std::shared_ptr<Pool>& home, std::size_t stream);
  std::uint64_t number_of(const std::shared_ptr<Pool>& pool);
  void owe(const Live& live, bool by_other_thread);
  void free_block(std::size_t index, bool by_other_thread, std::size_t page_count);
  void hold(std::size_t index);
  void unhold(std::size_t index);
  void use_block(std::size_t index, std::size_t stream, std::uint64_t flags);
  void record_stream(std::size_t index, std::size_t stream);

  // stream_world_graphs.cpp: captures, graphs, private pools, the part
  RegionPtr region_of(const RegionId& id);
  static RegionId region_id(std::size_t slot) { return slot < 3 ? RegionId{slot, 0} : RegionId{0, slot}; }
  void pin(Region& region);
  void unpin(Region& region);
  void forget_region_if_unused(std::size_t slot);
  void begin_capture(std::size_t number, std::size_t stream, std::size_t region, bool is_refused);
  void join_capture(std::size_t number, std::size_t stream);
  void invalidate_capture(std::size_t number);
  void end_capture(std::size_t number);
  void launch(std::size_t number, std::size_t stream);
  void drop_graph(std::size_t number);
  void note_captured(CaptureId capture, const Live& live);
  void open_mempool(std::size_t region, bool use_on_oom);
  void enter_mempool(std::size_t region);
  void leave_mempool(std::size_t region);
  void close_mempool(std::size_t region);
  void pin_part();
  void unpin_part();
  void forget_pin();
  void launch_part(std::size_t stream);
  void checkpoint();
  void restore();
  void end_all_graphs();

  // stream_world_sleep.cpp: models that sleep. `how`: where to (modulo 8), which parts, and
  // whether it gives its memory back to the driver.
  struct UnderWay {
    std::unique_ptr<SteppedTransfer> transfer;
    std::vector<std::uint64_t> pools;                         // by number
    std::vector<std::pair<std::uint64_t, bool>> thrown_away;  // of these, and whether it was awake
  };
  PoolList family(std::size_t pool, std::uint64_t parts);
  Place place(std::uint64_t kind, int device);
  void transfer(std::optional<std::size_t> out, std::optional<std::size_t> in, std::uint64_t how, std::uint64_t looks);
  void go_on(std::size_t number, std::size_t looks, bool stops);
  void note_awake();
  void end_transfers();

  // stream_world_mappings.cpp: two devices, mappings by hand
  void add_peers();
  void open_manager();
  void create_chunk(std::size_t bytes);
  void map_chunk(std::size_t number, std::size_t place, bool for_peer);
  void use_mapping(std::size_t place, std::size_t stream, std::uint64_t flags);
  void set_access(std::size_t place, std::uint64_t access, int device);
  void unmap_chunk(std::size_t place);
  void free_chunk(std::size_t number);
  void close_manager();

  std::size_t steps_ = 0;
  HostDriver host_;
  ScriptedDriver scripted_;
  OrderChecker driver_;
  AddressSpace space_;
  OtherThread other_thread_;
  std::unique_ptr<DeviceMemory> memory_;
  std::unique_ptr<DeviceMemory> peer_memory_;
  std::unique_ptr<Sleeper> sleeper_;
  std::unique_ptr<Sleeper> peer_sleeper_;
  std::unique_ptr<SharedMemoryPool> group_;
  std::unique_ptr<PrivatePools> private_pools_;
  std::array<std::shared_ptr<Pool>, kPoolSlots> pools_;
  std::map<const Pool*, std::pair<std::weak_ptr<Pool>, std::uint64_t>> pool_numbers_;
  std::uint64_t last_pool_ = 0;
  std::uint64_t last_name_ = 0;

  std::array<unsigned, kStreamSlots> lives_{};  // of foreign streams: odd while alive
  std::vector<std::size_t> own_streams_;        // that have appeared
  std::array<bool, 2> has_met_unreachable_{};   // by device
  std::vector<Live> live_;
  std::uint64_t last_block_ = 0;
  std::map<std::pair<int, Stream>, VectorClock> debts_;
  bool peers_ = false;

  std::array<RegionPtr, kRegions> regions_;
  std::array<Graph, kGraphSlots> graphs_;
  RegionPtr part_region_;
  CapturedGraph part_work_;
  bool part_is_pinned_ = false;
  std::optional<std::pair<PoolCheckpoint, std::vector<Live>>> saved_;

  std::map<std::uint64_t, std::weak_ptr<Pool>> asleep_;  // as the program knows it, by number
  std::vector<UnderWay> transfers_;
  std::filesystem::path folder_;  // of files in which models sleep
  std::uint64_t last_file_ = 0;

  std::unique_ptr<VirtualMemoryManager> manager_;
  VirtualAddressRange range_;
  std::array<std::optional<PhysicalAllocation>, kChunkSlots> chunks_;
  struct MappedAt {
    std::size_t chunk = 0;
    std::size_t size = 0;
  };
  std::map<std::size_t, MappedAt> places_;  // by number: 2 MiB each
};

}  // namespace vmm::testing
