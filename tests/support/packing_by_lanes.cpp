// What CUDA has and C++ lacks, as macros and functions; then the text itself.
#include <atomic>
#include <barrier>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

namespace {

constexpr unsigned kThreads = 512;
constexpr unsigned kWarp = 32;

struct Index {
  unsigned x;
};
thread_local Index threadIdx{0};
constexpr Index blockIdx{0};
constexpr Index gridDim{1};

std::barrier<>& block() {
  static std::barrier<> all(kThreads);
  return all;
}
std::barrier<>& warp() {
  static std::vector<std::unique_ptr<std::barrier<>>> all = [] {
    std::vector<std::unique_ptr<std::barrier<>>> made;
    for (unsigned k = 0; k < kThreads / kWarp; ++k) made.push_back(std::make_unique<std::barrier<>>(kWarp));
    return made;
  }();
  return *all[threadIdx.x / kWarp];
}

void __syncthreads() { block().arrive_and_wait(); }  // NOLINT(bugprone-reserved-identifier): CUDA's
void atomicAdd(unsigned* to, unsigned value) { std::atomic_ref<unsigned>(*to).fetch_add(value); }
unsigned __shfl_up_sync(unsigned /*mask*/, unsigned value, unsigned by) {  // NOLINT(bugprone-reserved-identifier)
  static unsigned values[kThreads];
  const unsigned lane = threadIdx.x;
  values[lane] = value;
  warp().arrive_and_wait();
  const unsigned found = lane % kWarp >= by ? values[lane - by] : value;
  warp().arrive_and_wait();
  return found;
}

}  // namespace

// NOLINTBEGIN(bugprone-reserved-identifier): CUDA's
#define __CUDACC_RTC__
#define __device__
#define __forceinline__ inline
#define __global__
#define __shared__ static
#define __launch_bounds__(threads)
// NOLINTEND(bugprone-reserved-identifier)
#define packing packing_by_lanes  // another namespace than the CPU's
#include "driver/packing.h"
#undef packing

namespace vmm {
namespace packing {
enum class Step : unsigned int;
struct Job;
}  // namespace packing

namespace testing {

void pack_by_lanes(packing::Step step, const packing::Job& job) {
  packing_by_lanes::Job mine{};
  std::memcpy(&mine, static_cast<const void*>(&job), sizeof(mine));
  std::vector<std::thread> lanes;
  for (unsigned lane = 0; lane < kThreads; ++lane) {
    lanes.emplace_back([&, lane] {
      threadIdx.x = lane;
      switch (static_cast<packing_by_lanes::Step>(step)) {
        case packing_by_lanes::Step::survey:
          return packing_by_lanes::vmm_survey(mine);
        case packing_by_lanes::Step::pack:
          return packing_by_lanes::vmm_pack(mine);
        case packing_by_lanes::Step::unpack:
          return packing_by_lanes::vmm_unpack(mine);
      }
    });
  }
  for (std::thread& lane : lanes) lane.join();
}

}  // namespace testing
}  // namespace vmm
