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

namespace {

// They live as long as the process: under AddressSanitizer 512 threads take longer to make than what
// they do.
class Lanes {
 public:
  Lanes() {
    for (unsigned lane = 0; lane < kThreads; ++lane) threads_.emplace_back([this, lane] { run(lane); });
  }
  ~Lanes() {
    ends_ = true;
    begin_.arrive_and_wait();
    for (std::thread& thread : threads_) thread.join();
  }

  void do_together(packing_by_lanes::Step step, const packing_by_lanes::Job& job) {
    step_ = step;
    job_ = job;
    begin_.arrive_and_wait();
    end_.arrive_and_wait();
  }

 private:
  void run(unsigned lane) {
    threadIdx.x = lane;
    for (;;) {
      begin_.arrive_and_wait();
      if (ends_) return;
      switch (step_) {
        case packing_by_lanes::Step::survey:
          packing_by_lanes::vmm_survey(job_);
          break;
        case packing_by_lanes::Step::pack:
          packing_by_lanes::vmm_pack(job_);
          break;
        case packing_by_lanes::Step::unpack:
          packing_by_lanes::vmm_unpack(job_);
          break;
      }
      end_.arrive_and_wait();
    }
  }

  std::barrier<> begin_{kThreads + 1};
  std::barrier<> end_{kThreads + 1};
  bool ends_ = false;  // these are read behind begin_
  packing_by_lanes::Step step_{};
  packing_by_lanes::Job job_{};
  std::vector<std::thread> threads_;
};

}  // namespace

void pack_by_lanes(packing::Step step, const packing::Job& job) {
  static Lanes lanes;
  packing_by_lanes::Job mine{};
  std::memcpy(&mine, static_cast<const void*>(&job), sizeof(mine));
  lanes.do_together(static_cast<packing_by_lanes::Step>(step), mine);
}

}  // namespace testing
}  // namespace vmm
