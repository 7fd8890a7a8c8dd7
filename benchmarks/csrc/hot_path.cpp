// Times allocations and frees through torch's own entry points, so that every
// allocator is measured by the same loops: on a GPU raw_alloc_with_stream and
// raw_delete, on the CPU Allocator::allocate and the DataPtr's deleter. It also
// holds the floor: an allocator that only bumps a pointer.
//
// Threads run under the caller's ThreadLocalState, as autograd's do, so a model
// that is open around the call is open in them.
#include <ATen/ThreadLocalState.h>
#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/cuda/CUDAPluggableAllocator.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <functional>
#include <memory>
#include <queue>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "stopwatch.h"

namespace {

namespace caching = c10::cuda::CUDACachingAllocator;

// Where blocks come from: take(bytes) gives a Block, drop(block) frees it.
class GpuBlocks {
 public:
  using Block = void*;
  static void enter_thread() { c10::cuda::set_device(0); }
  Block take(size_t bytes) const { return caching::raw_alloc_with_stream(bytes, stream_); }
  static void drop(Block& block) {
    if (block != nullptr) caching::raw_delete(block);
    block = nullptr;
  }

 private:
  cudaStream_t stream_ = c10::cuda::getDefaultCUDAStream(0).stream();
};

class HostBlocks {
 public:
  using Block = c10::DataPtr;
  static void enter_thread() {}
  Block take(size_t bytes) const { return allocator_->allocate(bytes); }
  static void drop(Block& block) { block.clear(); }

 private:
  c10::Allocator* allocator_ = c10::GetCPUAllocator();
};

// What a thread has open: a model, for torch_vmm.
struct Opened {
  at::ThreadLocalState state;
};

// Each thread works once uncounted under its own state, then all at once; wall ns.
template <class Source>
double crew_ns(const std::vector<Opened>& opened, const std::function<void(size_t)>& work) {
  std::atomic<size_t> ready{0};
  std::atomic<bool> go{false};
  std::vector<std::thread> crew;
  for (size_t i = 0; i < opened.size(); ++i) {
    crew.emplace_back([&, i] {
      const at::ThreadLocalStateGuard guard(opened[i].state);
      Source::enter_thread();
      work(i);
      ++ready;
      while (!go) std::this_thread::yield();
      work(i);
    });
  }
  while (ready < opened.size()) std::this_thread::yield();
  const Stopwatch watch;
  go = true;
  for (auto& thread : crew) thread.join();
  return watch.ns();
}

// One block at a time, taken and dropped `count` times; ns a pair. The first round
// is not counted.
template <class Source>
double pair_ns(size_t bytes, int count) {
  const Source source;
  const auto work = [&] {
    for (int i = 0; i < count; ++i) {
      auto block = source.take(bytes);
      Source::drop(block);
    }
  };
  work();
  const Stopwatch watch;
  work();
  return watch.ns() / count;
}

// The same on one thread for each of `opened`; wall time over all threads' pairs.
template <class Source>
double crew_pair_ns(size_t bytes, int count, const std::vector<Opened>& opened) {
  const Source source;
  const auto work = [&](size_t) {
    for (int i = 0; i < count; ++i) {
      auto block = source.take(bytes);
      Source::drop(block);
    }
  };
  return crew_ns<Source>(opened, work) / (double(count) * double(opened.size()));
}

// The same on this thread, under each of `opened` in turn. To change what is open costs more than the pair: compare
// with one that is opened again and again.
double switched_pair_ns(size_t bytes, int count, const std::vector<Opened>& opened) {
  const GpuBlocks source;
  const auto work = [&](int rounds) {
    for (int k = 0; k < rounds; ++k) {
      const at::ThreadLocalStateGuard guard(opened[size_t(k) % opened.size()].state);
      void* block = source.take(bytes);
      GpuBlocks::drop(block);
    }
  };
  work(int(opened.size()) * 2);
  const Stopwatch watch;
  work(count);
  return watch.ns() / count;
}

// Every other thread takes blocks, the one after it drops them; wall time over all
// pairs. A ring of 256 blocks between the two.
double crew_hand_on_ns(size_t bytes, int count, const std::vector<Opened>& opened) {
  constexpr size_t kRing = 256;
  struct alignas(128) Ring {
    std::array<std::atomic<void*>, kRing> blocks{};
  };
  const GpuBlocks source;
  std::vector<Ring> rings(opened.size() / 2);
  const auto work = [&](size_t i) {
    Ring& ring = rings[i / 2];
    for (int k = 0; k < count; ++k) {
      std::atomic<void*>& slot = ring.blocks[size_t(k) % kRing];
      if (i % 2 == 0) {
        void* const block = source.take(bytes);
        while (slot.load(std::memory_order_acquire) != nullptr) std::this_thread::yield();
        slot.store(block, std::memory_order_release);
      } else {
        void* block = nullptr;
        while ((block = slot.load(std::memory_order_acquire)) == nullptr) std::this_thread::yield();
        slot.store(nullptr, std::memory_order_release);
        GpuBlocks::drop(block);
      }
    }
  };
  return crew_ns<GpuBlocks>(opened, work) / (double(count) * double(opened.size() / 2));
}

// `live` blocks there all the time, of which a round replaces `count` at random; ns a replacement.
class Replacing {
 public:
  Replacing(size_t bytes, int live, int count) : bytes_(bytes), count_(count), blocks_(live) {
    for (void*& block : blocks_) block = source_.take(bytes_);
  }
  Replacing(const Replacing&) = delete;
  Replacing& operator=(const Replacing&) = delete;
  ~Replacing() {
    for (void*& block : blocks_) GpuBlocks::drop(block);
  }

  double round_ns() {
    const Stopwatch watch;
    for (int i = 0; i < count_; ++i) {
      void*& block = blocks_[random_() % blocks_.size()];
      GpuBlocks::drop(block);
      block = source_.take(bytes_);
    }
    return watch.ns() / count_;
  }

 private:
  const GpuBlocks source_;
  const size_t bytes_;
  const int count_;
  std::vector<void*> blocks_;
  std::mt19937_64 random_{1};
};

// A random live set: each of `count` operations picks one of `live` slots, drops what is in it and takes a block of a
// size from `lowest` to `highest` bytes (uniform in its logarithm). All rounds are the same; the blocks of one are
// there when the next begins. ns an operation.
template <class Source>
class Churn {
 public:
  Churn(size_t lowest, size_t highest, int live, int count, unsigned seed) : operations_(count), slots_(live) {
    std::mt19937_64 random(seed);
    std::uniform_real_distribution<double> exponent(std::log(double(lowest)), std::log(double(highest)));
    for (Operation& operation : operations_) {
      operation = {size_t(random() % slots_.size()), size_t(std::exp(exponent(random)))};
    }
  }
  Churn(const Churn&) = delete;
  Churn& operator=(const Churn&) = delete;
  ~Churn() {
    for (auto& block : slots_) Source::drop(block);
  }

  double round_ns() {
    const Stopwatch watch;
    for (const Operation& operation : operations_) {
      auto& block = slots_[operation.slot];
      Source::drop(block);
      block = source_.take(operation.bytes);
    }
    return watch.ns() / double(operations_.size());
  }

 private:
  struct Operation {
    size_t slot;
    size_t bytes;
  };
  const Source source_;
  std::vector<Operation> operations_;
  std::vector<typename Source::Block> slots_;
};

template <class Source>
void bind_churn(pybind11::module_& m, const char* name) {
  using Unlocked = pybind11::call_guard<pybind11::gil_scoped_release>;
  pybind11::class_<Churn<Source>>(m, name)
      .def(pybind11::init<size_t, size_t, int, int, unsigned>())
      .def("round_ns", &Churn<Source>::round_ns, Unlocked());
}

// A mixed program, an operation after the other: sizes from 512 B to 128 MiB, lifetimes from one operation to a hundred
// thousand, four streams. The same for the same `count` and `seed`; some thirteen hundred blocks are live at a time.
struct MixedOperation {
  size_t slot;
  size_t bytes;   // 0: frees what is in the slot
  size_t stream;  // of the four
};

class MixedProgram {
 public:
  MixedProgram(size_t count, unsigned seed) : random_(seed) {
    operations.reserve(count);
    std::vector<size_t> free_slots;
    while (operations.size() < count) {
      if (!due_.empty() && due_.top().first <= operations.size()) {
        free_slots.push_back(due_.top().second);
        operations.push_back({due_.top().second, 0, 0});
        due_.pop();
        continue;
      }
      if (free_slots.empty()) free_slots.push_back(slots++);
      const size_t slot = free_slots.back();
      free_slots.pop_back();
      due_.emplace(operations.size() + lifetime(), slot);
      const bool is_default = uniform() < 0.7;
      operations.push_back({slot, bytes(), is_default ? 0 : 1 + size_t(random_() % 3)});
    }
  }

  std::vector<MixedOperation> operations;
  size_t slots = 0;

 private:
  using Due = std::pair<size_t, size_t>;  // operation, slot

  double uniform() { return double(random_() >> 11) / double(1ULL << 53); }
  double log_uniform(double lowest, double highest) { return lowest * std::pow(highest / lowest, uniform()); }
  size_t bytes() {
    constexpr double kMiB = 1 << 20;
    const double which = uniform();
    if (which < 0.80) return size_t(log_uniform(512, kMiB));
    return size_t(which < 0.95 ? log_uniform(kMiB, 16 * kMiB) : log_uniform(16 * kMiB, 128 * kMiB));
  }
  size_t lifetime() {
    const double which = uniform();
    return 1 + size_t(log_uniform(1, which < 0.70 ? 16 : which < 0.95 ? 1'000 : 100'000));
  }

  std::mt19937_64 random_;
  std::priority_queue<Due, std::vector<Due>, std::greater<>> due_;
};

// What the allocator counts of its driver calls and climbs.
struct Counters {
  int64_t mapped = 0;    // chunks mapped; torch's own: segments allocated
  int64_t unmapped = 0;  // the same, given back
  int64_t climbs = 0;    // requests that had to look for memory elsewhere

  static Counters now() {
    const auto stats = caching::getDeviceStats(0);
    return {stats.num_device_alloc, stats.num_device_free, stats.num_alloc_retries};
  }
};

// One operation that took long: its number, bytes (of a free: 0), and what was counted up to its end since the last one
// that took long. No driver call is so fast that its operation is not among them.
using LongOperation = std::tuple<size_t, size_t, int64_t, int64_t, int64_t>;
constexpr double kLongNs = 3000;

// The program `rounds` times over. For each round the time of each operation in ns, and the long ones. With `counts`
// false the allocator is not asked (the floor has no counters).
std::vector<std::pair<std::vector<double>, std::vector<LongOperation>>> latencies_ns(size_t count, unsigned seed,
                                                                                     int rounds, bool counts) {
  const MixedProgram program(count, seed);
  std::vector<cudaStream_t> streams = {c10::cuda::getDefaultCUDAStream(0).stream()};
  while (streams.size() < 4) streams.push_back(c10::cuda::getStreamFromPool(false, 0).stream());
  std::vector<std::pair<std::vector<double>, std::vector<LongOperation>>> answer;
  for (int round = 0; round < rounds; ++round) {
    std::vector<double> times(count);
    std::vector<LongOperation> slow;
    slow.reserve(count);  // no growth between two operations
    std::vector<void*> blocks(program.slots);
    Counters last = counts ? Counters::now() : Counters{};
    for (size_t i = 0; i < count; ++i) {
      const MixedOperation& operation = program.operations[i];
      void*& block = blocks[operation.slot];
      const Stopwatch watch;
      if (operation.bytes == 0) {
        caching::raw_delete(block);
        times[i] = watch.ns();
        block = nullptr;
      } else {
        block = caching::raw_alloc_with_stream(operation.bytes, streams[operation.stream]);
        times[i] = watch.ns();
      }
      if (times[i] < kLongNs) continue;
      const Counters now = counts ? Counters::now() : Counters{};
      slow.emplace_back(i, operation.bytes, now.mapped - last.mapped, now.unmapped - last.unmapped,
                        now.climbs - last.climbs);
      last = now;
    }
    for (void* block : blocks) {
      if (block != nullptr) caching::raw_delete(block);
    }
    answer.emplace_back(std::move(times), std::move(slow));
  }
  return answer;
}

// at::empty of 1000 floats, in ns.
double empty_ns(const std::string& device, int count) {
  const auto options = at::TensorOptions().device(c10::Device(device)).dtype(at::kFloat);
  const Stopwatch watch;
  for (int i = 0; i < count; ++i) at::empty({1000}, options);
  return watch.ns() / count;
}

// The floor: the next address in a window, round and round; frees do nothing.
// Blocks overlap once it has gone round, so only the calls can be measured.
class FloorAllocator final : public torch::cuda::CUDAPluggableAllocator::CUDAPluggableAllocator {
 public:
  static constexpr size_t kWindow = size_t(4) << 30;

  FloorAllocator()
      : CUDAPluggableAllocator([](size_t, int, cudaStream_t) -> void* { return nullptr; },
                               [](void*, size_t, int, cudaStream_t) {}) {}
  void* raw_alloc(size_t bytes) override { return bump(bytes); }
  void* raw_alloc_with_stream(size_t bytes, cudaStream_t /*stream*/) override { return bump(bytes); }
  void raw_delete(void* /*block*/) override {}
  c10::DeleterFnPtr raw_deleter() const override { return &leave; }
  c10::DataPtr allocate(size_t bytes) override {
    void* const block = bump(bytes);
    return {block, block, &leave, c10::Device(c10::kCUDA, 0)};
  }

 private:
  static void leave(void* /*block*/) {}
  void* bump(size_t bytes) {
    static thread_local size_t next = 0;
    if (base_ == nullptr) C10_CUDA_CHECK(cudaMalloc(&base_, kWindow));
    const size_t rounded = (bytes + 511) / 512 * 512;
    if (next + rounded > kWindow) next = 0;
    void* const block = static_cast<char*>(base_) + next;
    next += rounded;
    return block;
  }
  void* base_ = nullptr;  // set by the first allocation, before there are threads
};

void install_floor() {
  torch::cuda::CUDAPluggableAllocator::changeCurrentAllocator(std::make_shared<FloorAllocator>());
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using Unlocked = pybind11::call_guard<pybind11::gil_scoped_release>;
  pybind11::class_<Opened>(m, "Opened").def(pybind11::init<>(), "what the calling thread has open");
  m.def("gpu_pair_ns", &pair_ns<GpuBlocks>, Unlocked());
  m.def("gpu_crew_pair_ns", &crew_pair_ns<GpuBlocks>, Unlocked());
  m.def("gpu_crew_hand_on_ns", &crew_hand_on_ns, Unlocked());
  m.def("gpu_switched_pair_ns", &switched_pair_ns, Unlocked());
  pybind11::class_<Replacing>(m, "GpuReplacing")
      .def(pybind11::init<size_t, int, int>())
      .def("round_ns", &Replacing::round_ns, Unlocked());
  bind_churn<GpuBlocks>(m, "GpuChurn");
  bind_churn<HostBlocks>(m, "HostChurn");
  m.def("gpu_latencies_ns", &latencies_ns, Unlocked());
  m.def("host_pair_ns", &pair_ns<HostBlocks>, Unlocked());
  m.def("host_crew_pair_ns", &crew_pair_ns<HostBlocks>, Unlocked());
  m.def("empty_ns", &empty_ns, Unlocked());
  m.def("install_floor", &install_floor);
}
