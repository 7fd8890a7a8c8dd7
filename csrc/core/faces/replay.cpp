#include "core/faces/replay.h"

#include <algorithm>
#include <string>
#include <unordered_map>

#include "base/errors.h"
#include "core/blocks/block.h"
#include "core/device/device_memory.h"
#include "core/memory/address_space.h"

namespace vmm {

namespace {

// Streams are only told apart: names that no stream of CUDA's own has (1 and 2
// mean its default ones).
Stream name_of(std::uint64_t stream) { return reinterpret_cast<Stream>(static_cast<std::uintptr_t>(stream * 16)); }

// Counts, answers as a GPU that is so many steps behind whoever queues its work, and has
// the recording's time.
class LateDriver final : public CountingDriver {
 public:
  LateDriver(Driver& inner, std::uint64_t behind) : CountingDriver(inner), behind_(behind) {}
  void go_on(std::chrono::nanoseconds now) {
    ++step_;
    now_ = now;
  }
  [[nodiscard]] std::chrono::nanoseconds now() const override { return now_; }

  Status record(Fence fence, Stream stream) override {
    due_[fence] = step_ + behind_;
    return CountingDriver::record(fence, stream);
  }
  Status query(Fence fence) override {
    const auto due = due_.find(fence);
    if (due != due_.end() && due->second > step_) return {StatusCode::not_ready, "query a fence"};
    return CountingDriver::query(fence);
  }
  Status wait(Fence fence) override {
    due_.erase(fence);
    return CountingDriver::wait(fence);
  }
  Status synchronize(int device) override {
    due_.clear();
    return CountingDriver::synchronize(device);
  }

 private:
  const std::uint64_t behind_;
  std::uint64_t step_ = 0;
  std::chrono::nanoseconds now_{0};
  std::unordered_map<Fence, std::uint64_t> due_;  // at which step it passes
};

// The live blocks of a replay, freed at its end however it ends: a device is not
// taken down over a live block.
class LiveBlocks {
 public:
  LiveBlocks(AddressSpace& space, DeviceMemory& memory) : space_(space), memory_(memory) {}
  LiveBlocks(const LiveBlocks&) = delete;
  LiveBlocks& operator=(const LiveBlocks&) = delete;
  ~LiveBlocks() { free_all(); }

  void allocate(const RecordedStep& step, Pool& pool) {
    if (step.size == 0) return;
    free(step.block);
    const Address address = memory_.allocate(pool, step.size, name_of(step.stream));
    const std::uint64_t bytes = align_up(step.size, kBlockAlignment);
    blocks_[step.block] = {address, bytes};
    bytes_ += bytes;
  }
  void free(std::uint64_t block) {
    const auto found = blocks_.find(block);
    if (found == blocks_.end()) return;
    DeviceMemory::free(space_, found->second.address);
    bytes_ -= found->second.bytes;
    blocks_.erase(found);
  }
  void free_all() {
    for (const auto& [name, block] : blocks_) DeviceMemory::free(space_, block.address);
    blocks_.clear();
    bytes_ = 0;
  }
  [[nodiscard]] std::uint64_t bytes() const { return bytes_; }

 private:
  struct Block {
    Address address = 0;
    std::uint64_t bytes = 0;
  };
  AddressSpace& space_;
  DeviceMemory& memory_;
  std::unordered_map<std::uint64_t, Block> blocks_;
  std::uint64_t bytes_ = 0;
};

}  // namespace

Replayed replay(Driver& driver, const Options& options, const std::vector<RecordedStep>& program,
                const ReplayTerms& terms) {
  LateDriver counting(driver, terms.behind);
  AddressSpace space;
  DeviceMemory memory(counting, space, 0, options);
  std::size_t models = 1;
  for (const RecordedStep& step : program) models = std::max<std::size_t>(models, step.model + std::size_t{1});
  const std::shared_ptr<Budget> group = memory.create_group("replay", terms.limit);
  std::vector<std::shared_ptr<Pool>> pools;
  for (std::size_t k = 0; k < models; ++k) {
    PoolSpec spec;
    spec.name = "model " + std::to_string(k);
    pools.push_back(memory.create_pool(spec, group.get()));
  }
  memory.end_group(*group);  // with the last of them

  Replayed result;
  result.allocated.reserve(program.size());
  result.reserved.reserve(program.size());
  result.driver_calls.reserve(program.size());
  LiveBlocks live(space, memory);
  for (std::size_t k = 0; k < program.size(); ++k) {
    const RecordedStep& step = program[k];
    counting.go_on(step.time);
    try {
      if (step.allocates) {
        live.allocate(step, *pools[step.model]);
      } else {
        live.free(step.block);
      }
    } catch (const OutOfMemoryError&) {
      result.refused_at = k;
      break;
    }
    result.allocated.push_back(live.bytes());
    std::size_t reserved = 0;
    for (const auto& pool : pools) reserved += pool->physical_bytes();
    result.reserved.push_back(reserved);
    result.driver_calls.push_back(counting.calls().total());
  }
  result.calls = counting.calls();
  live.free_all();
  const Statistics statistics = memory.statistics();
  result.allocated_peak = static_cast<std::size_t>(statistics[StatKind::allocated_bytes][0].peak);
  result.reserved_peak = static_cast<std::size_t>(statistics[StatKind::reserved_bytes][0].peak);
  for (const auto& pool : pools) result.left += pool->live_bytes();
  return result;
}

}  // namespace vmm
