#include "core/faces/replay.h"

#include <unordered_map>

#include "base/errors.h"
#include "core/blocks/block.h"
#include "core/device/device_memory.h"

namespace vmm {

namespace {

// Streams are only told apart: names that no stream of CUDA's own has (1 and 2
// mean its default ones).
Stream name_of(std::uint64_t stream) { return reinterpret_cast<Stream>(static_cast<std::uintptr_t>(stream * 16)); }

// The live blocks of a replay, freed at its end however it ends: a device is not
// taken down over a live block.
class LiveBlocks {
 public:
  LiveBlocks(AddressSpace& space, DeviceMemory& memory, Pool& pool) : space_(space), memory_(memory), pool_(pool) {}
  LiveBlocks(const LiveBlocks&) = delete;
  LiveBlocks& operator=(const LiveBlocks&) = delete;
  ~LiveBlocks() { free_all(); }

  void allocate(const RecordedStep& step) {
    if (step.size == 0) return;
    free(step.block);
    const Address address = memory_.allocate(pool_, step.size, name_of(step.stream));
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
  Pool& pool_;
  std::unordered_map<std::uint64_t, Block> blocks_;
  std::uint64_t bytes_ = 0;
};

}  // namespace

Replayed replay(Driver& driver, const Options& options, const std::vector<RecordedStep>& program) {
  CountingDriver counting(driver);
  AddressSpace space;
  DeviceMemory memory(counting, space, 0, options);
  PoolSpec spec;
  spec.name = "replay";
  const std::shared_ptr<Pool> pool = memory.create_pool(spec, nullptr);

  Replayed result;
  result.allocated.reserve(program.size());
  result.reserved.reserve(program.size());
  result.driver_calls.reserve(program.size());
  LiveBlocks live(space, memory, *pool);
  for (std::size_t k = 0; k < program.size(); ++k) {
    const RecordedStep& step = program[k];
    try {
      if (step.allocates) {
        live.allocate(step);
      } else {
        live.free(step.block);
      }
    } catch (const OutOfMemoryError&) {
      result.refused_at = k;
      break;
    }
    result.allocated.push_back(live.bytes());
    result.reserved.push_back(pool->physical_bytes());
    result.driver_calls.push_back(counting.calls().total());
  }
  result.calls = counting.calls();
  live.free_all();
  const Statistics statistics = pool->statistics();
  result.allocated_peak = static_cast<std::size_t>(statistics[StatKind::allocated_bytes][0].peak);
  result.reserved_peak = static_cast<std::size_t>(statistics[StatKind::reserved_bytes][0].peak);
  result.left = pool->live_bytes();
  return result;
}

}  // namespace vmm
