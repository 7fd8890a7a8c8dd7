// Statistics as plain values with units: what torch.cuda.memory_stats calls
// them, for one pool and for a device. They change beside the state they
// describe; that they add up is proved by Pool::check() and
// DeviceMemory::check().
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "base/units.h"

namespace vmm {

// torch's two kinds of block: requests of up to 1 MiB are "small_pool".
enum class SizeClass : std::uint8_t { small_pool, large_pool };
inline constexpr std::size_t kSmallLimitBytes = kMiB;
constexpr SizeClass size_class_of(bool is_small) { return is_small ? SizeClass::small_pool : SizeClass::large_pool; }

// The families of torch.cuda.memory_stats that count blocks or bytes.
enum class StatKind : std::uint8_t {
  allocation,       // live blocks
  segment,          // chunks mapped, what the driver gave in one call each; a provider's segments
  active,           // live blocks and freed ones whose record_stream is pending
  allocated_bytes,  // bytes of live blocks, rounded to 512
  reserved_bytes,   // their bytes
  active_bytes,
  requested_bytes,  // bytes asked for, of active blocks
  // Free stretches in chunks that are partly used, and their bytes. Worked out
  // when asked for (Pool::refresh_numbers), not at each event.
  inactive_split,
  inactive_split_bytes,
};
inline constexpr std::size_t kStatKinds = 9;
// torch's key of each, in their order.
inline constexpr std::array<const char*, kStatKinds> kStatNames = {
    "allocation",   "segment",         "active",         "allocated_bytes",     "reserved_bytes",
    "active_bytes", "requested_bytes", "inactive_split", "inactive_split_bytes"};

struct Stat {
  std::int64_t current = 0;
  std::int64_t peak = 0;
  std::int64_t allocated = 0;  // all that ever came, since the last reset
  std::int64_t freed = 0;
  void increase(std::int64_t amount) {
    current += amount;
    allocated += amount;
    if (current > peak) peak = current;
  }
  void decrease(std::int64_t amount) {
    current -= amount;
    freed += amount;
  }
};

// What blocks' lives add up to where nothing but blocks is counted: by size class,
// the blocks, their bytes and the bytes asked for. The first two stand for two kinds
// each, as a block whose free is not pending is live and active at once.
inline constexpr std::size_t kNumbersOfBlocks = 3;
using BlockCounts = std::array<std::array<std::int64_t, kNumbersOfBlocks>, 2>;
inline constexpr std::array<StatKind, 5> kKindsOfBlocks = {StatKind::allocation, StatKind::active,
                                                           StatKind::allocated_bytes, StatKind::active_bytes,
                                                           StatKind::requested_bytes};
// The kinds that the k-th of these numbers stands for.
constexpr std::span<const StatKind> kinds_of_block_count(std::size_t k) {
  return std::span(kKindsOfBlocks).subspan(2 * k, k < 2 ? 2 : 1);
}

// For each family: [0] all, [1] small_pool, [2] large_pool.
using StatTriple = std::array<Stat, 3>;

struct Statistics {
  std::array<StatTriple, kStatKinds> stats;
  Stat oversize_allocations;              // requests of at least torch's max_split_size
  Stat oversize_segments;                 // chunks of at least that size
  std::int64_t num_alloc_retries = 0;     // requests that climbed the reclaim ladder
  std::int64_t num_ooms = 0;              // requests that failed
  std::int64_t num_sync_all_streams = 0;  // empty_cache() and its kind
  std::int64_t num_device_alloc = 0;      // chunks mapped by the driver
  std::int64_t num_device_free = 0;       // chunks unmapped by the driver

  [[nodiscard]] StatTriple& operator[](StatKind kind) { return stats.at(static_cast<std::size_t>(kind)); }
  [[nodiscard]] const StatTriple& operator[](StatKind kind) const { return stats.at(static_cast<std::size_t>(kind)); }
  void increase(StatKind kind, SizeClass size_class, std::size_t amount) {
    auto& triple = (*this)[kind];
    triple[0].increase(static_cast<std::int64_t>(amount));
    triple[size_class == SizeClass::small_pool ? 1 : 2].increase(static_cast<std::int64_t>(amount));
  }
  void decrease(StatKind kind, SizeClass size_class, std::size_t amount) {
    auto& triple = (*this)[kind];
    triple[0].decrease(static_cast<std::int64_t>(amount));
    triple[size_class == SizeClass::small_pool ? 1 : 2].decrease(static_cast<std::int64_t>(amount));
  }
  void reset_peaks();
  void reset_accumulated();
  // Nothing of it is there any more: what ever came and went stays.
  void leave_only_accumulated();
  // Adds what `other` counts; peaks are left alone (they do not sum), but for
  // the oversize ones, which nobody follows together: theirs are bounds.
  void add_totals(const Statistics& other);
  // The same of blocks alone: those there are, and all that ever came.
  void add_blocks(const BlockCounts& current, const BlockCounts& came);
  // Of numbers that were read one after another while threads go on: what was freed by
  // one may have been read, and what another had allocated before not.
  void leave_none_below_zero();
};

// What stands beside the families, by torch's key. Whoever resets, adds or tells them goes
// by these rows.
struct OversizeRow {
  const char* name;
  Stat Statistics::*stat;
};
inline constexpr std::array<OversizeRow, 2> kOversizeStats = {
    {{"oversize_allocations", &Statistics::oversize_allocations},
     {"oversize_segments", &Statistics::oversize_segments}}};
struct CountRow {
  const char* name;
  std::int64_t Statistics::*count;
};
inline constexpr std::array<CountRow, 5> kCounts = {{{"num_alloc_retries", &Statistics::num_alloc_retries},
                                                     {"num_ooms", &Statistics::num_ooms},
                                                     {"num_sync_all_streams", &Statistics::num_sync_all_streams},
                                                     {"num_device_alloc", &Statistics::num_device_alloc},
                                                     {"num_device_free", &Statistics::num_device_free}}};
static_assert(sizeof(Statistics) ==
                  sizeof(Stat) * (3 * kStatKinds + kOversizeStats.size()) + sizeof(std::int64_t) * kCounts.size(),
              "every number has its row");

// What a pool's memory is, in bytes, at one moment:
// physical_usage = allocated + idle + stranded + quarantined.
struct MemoryStats {
  std::size_t virtual_capacity = 0;
  std::size_t physical_usage = 0;
  std::size_t mapped_pages = 0;  // physical_usage / page_size
  double fragmentation_ratio = 0.0;
  std::size_t allocated_bytes = 0;
  std::size_t idle_bytes = 0;         // mapped, unused, whole chunks
  std::size_t stranded_bytes = 0;     // mapped, unused, in chunks that are partly used
  std::size_t quarantined_bytes = 0;  // freed, and queued work may still use it
  std::size_t asleep_bytes = 0;       // that live and have no memory here; in none of the others
  std::size_t spilled_bytes = 0;      // of host memory, mapped for what found none here; in none of the others

  // Of several pools; what is no sum (kMemoryFields) is left alone.
  void add(const MemoryStats& part);
  void subtract(const MemoryStats& part);
};

// The same for a SharedMemoryPool:
// physical_usage = allocated + idle + stranded + quarantined + store.
struct GlobalMemoryStats {
  std::size_t physical_limit = kUnlimited;
  std::size_t physical_usage = 0;
  std::size_t num_models = 0;
  std::size_t allocated_bytes = 0;
  std::size_t idle_bytes = 0;
  std::size_t stranded_bytes = 0;
  std::size_t quarantined_bytes = 0;
  std::size_t store_bytes = 0;    // held by the chunk store, mapped nowhere
  std::size_t asleep_bytes = 0;   // that live and have no memory here; in none of the others
  std::size_t spilled_bytes = 0;  // of host memory, held for what found none here; in none of the others
};

// A field of such numbers by its name in Python. Whoever adds or tells them goes by these rows.
template <typename Numbers>
struct FieldRow {
  const char* name = nullptr;
  std::variant<std::size_t Numbers::*, double Numbers::*> field;
  bool adds_up = true;  // over several pools
};
// Every field is eight bytes, so they are as many as their bytes say.
template <typename Numbers, std::size_t kRows>
constexpr bool every_field_has_its_row(const std::array<FieldRow<Numbers>, kRows>& rows) {
  return sizeof(Numbers) == sizeof(std::size_t) * rows.size();
}
static_assert(sizeof(double) == sizeof(std::size_t));

inline constexpr std::array<FieldRow<MemoryStats>, 10> kMemoryFields = {
    {{"virtual_capacity", &MemoryStats::virtual_capacity, false},
     {"physical_usage", &MemoryStats::physical_usage},
     {"mapped_pages", &MemoryStats::mapped_pages},
     {"fragmentation_ratio", &MemoryStats::fragmentation_ratio, false},
     {"allocated_bytes", &MemoryStats::allocated_bytes},
     {"idle_bytes", &MemoryStats::idle_bytes},
     {"stranded_bytes", &MemoryStats::stranded_bytes},
     {"quarantined_bytes", &MemoryStats::quarantined_bytes},
     {"asleep_bytes", &MemoryStats::asleep_bytes},
     {"spilled_bytes", &MemoryStats::spilled_bytes}}};
static_assert(every_field_has_its_row(kMemoryFields));
inline constexpr std::array<FieldRow<GlobalMemoryStats>, 10> kGlobalMemoryFields = {
    {{"physical_limit", &GlobalMemoryStats::physical_limit},
     {"physical_usage", &GlobalMemoryStats::physical_usage},
     {"num_models", &GlobalMemoryStats::num_models},
     {"allocated_bytes", &GlobalMemoryStats::allocated_bytes},
     {"idle_bytes", &GlobalMemoryStats::idle_bytes},
     {"stranded_bytes", &GlobalMemoryStats::stranded_bytes},
     {"quarantined_bytes", &GlobalMemoryStats::quarantined_bytes},
     {"store_bytes", &GlobalMemoryStats::store_bytes},
     {"asleep_bytes", &GlobalMemoryStats::asleep_bytes},
     {"spilled_bytes", &GlobalMemoryStats::spilled_bytes}}};
static_assert(every_field_has_its_row(kGlobalMemoryFields));

// One block of a snapshot; they tile their segment.
struct BlockSnapshot {
  enum class State : std::uint8_t { allocated, pending_free, inactive };
  std::size_t size = 0;       // bytes
  std::size_t requested = 0;  // bytes asked for; 0 when inactive
  State state = State::inactive;
};

// One contiguous mapped stretch of one size class and stream: as long as it
// lasts, or cut at every chunk's border.
enum class SnapshotGrain : std::uint8_t { run, chunk };
struct SegmentSnapshot {
  Address address = 0;
  std::uint64_t number = 0;  // of the mapping of its first chunk; rises with each mapping of the process
  std::size_t total_size = 0;
  std::size_t allocated_size = 0;
  std::size_t active_size = 0;
  std::size_t requested_size = 0;
  SizeClass size_class = SizeClass::large_pool;
  void* stream = nullptr;
  std::vector<BlockSnapshot> blocks;
};

}  // namespace vmm
