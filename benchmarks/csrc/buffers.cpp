// Times stream-ordered allocations and frees of plain memory by the same loops, wherever
// it comes from: a pool of torch_vmm's, the driver's own calls, torch's allocator in
// use, RMM's resources (with BENCHMARK_RMM). Each is one virtual call away.
//
// What is asked for is drawn before the clock starts; nothing is queued on the streams.
#include <c10/core/CPUAllocator.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <cuda.h>
#include <dlfcn.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#ifdef BENCHMARK_RMM
#include <rmm/mr/cuda_async_memory_resource.hpp>
#include <rmm/mr/cuda_memory_resource.hpp>
#include <rmm/mr/pool_memory_resource.hpp>
#endif

#include "stopwatch.h"

namespace {

using Streams = std::vector<std::uintptr_t>;

// Where memory comes from.
class Source {
 public:
  Source() = default;
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;
  virtual ~Source() = default;
  virtual void* take(size_t bytes, void* stream) = 0;
  // In the order of the stream that it was taken for.
  virtual void drop(void* block, size_t bytes, void* stream) = 0;
};

// A pool of torch_vmm's, by its `functions`.
class Exported final : public Source {
 public:
  Exported(std::uintptr_t first, std::uintptr_t allocate, std::uintptr_t free)
      : first_(reinterpret_cast<void*>(first)),
        allocate_(reinterpret_cast<Allocate>(allocate)),
        free_(reinterpret_cast<Free>(free)) {}
  void* take(size_t bytes, void* stream) override { return allocate_(first_, bytes, stream); }
  void drop(void* block, size_t /*bytes*/, void* stream) override { free_(first_, block, stream); }

 private:
  using Allocate = void* (*)(void*, size_t, void*);
  using Free = void (*)(void*, void*, void*);
  void* first_;
  Allocate allocate_;
  Free free_;
};

// torch's allocator of the GPU that is in use.
class TorchGpu final : public Source {
 public:
  void* take(size_t bytes, void* stream) override {
    return c10::cuda::CUDACachingAllocator::raw_alloc_with_stream(bytes, static_cast<cudaStream_t>(stream));
  }
  void drop(void* block, size_t /*bytes*/, void* /*stream*/) override {
    c10::cuda::CUDACachingAllocator::raw_delete(block);
  }
};

class TorchHost final : public Source {
 public:
  void* take(size_t bytes, void* /*stream*/) override { return allocator_->raw_allocate(bytes); }
  void drop(void* block, size_t /*bytes*/, void* /*stream*/) override { allocator_->raw_deallocate(block); }

 private:
  c10::Allocator* allocator_ = c10::GetCPUAllocator();
};

// The driver's own pool and calls, and nothing else. It keeps all that it has had.
class DriverPool final : public Source {
 public:
  explicit DriverPool(int device) {
    find("cuMemPoolCreate", &create_);
    find("cuMemPoolDestroy", &destroy_);
    find("cuMemPoolSetAttribute", &set_);
    find("cuMemAllocFromPoolAsync", &allocate_);
    find("cuMemFreeAsync", &free_);
    find("cuStreamIsCapturing", &is_capturing_);
    find("cuCtxGetCurrent", &get_current_);
    find("cuThreadExchangeStreamCaptureMode", &exchange_);
    CUmemPoolProps asked{};
    asked.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    asked.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
    check(create_(&pool_, &asked), "cuMemPoolCreate");
    cuuint64_t all = std::numeric_limits<cuuint64_t>::max();
    check(set_(pool_, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &all), "cuMemPoolSetAttribute");
  }
  ~DriverPool() override { destroy_(pool_); }
  void* take(size_t bytes, void* stream) override {
    CUdeviceptr address = 0;
    check(allocate_(&address, bytes, pool_, static_cast<CUstream>(stream)), "cuMemAllocFromPoolAsync");
    return reinterpret_cast<void*>(address);
  }
  void drop(void* block, size_t /*bytes*/, void* stream) override {
    check(free_(reinterpret_cast<CUdeviceptr>(block), static_cast<CUstream>(stream)), "cuMemFreeAsync");
  }
  // What a call takes that a caller makes beside those, in ns.
  double beside_ns(const std::string& which, int count, std::uintptr_t stream) {
    CUcontext context = nullptr;
    CUstreamCaptureStatus capturing = CU_STREAM_CAPTURE_STATUS_NONE;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    const Stopwatch watch;
    for (int i = 0; i < count; ++i) {
      if (which == "cuCtxGetCurrent") {
        check(get_current_(&context), "cuCtxGetCurrent");
      } else if (which == "cuStreamIsCapturing") {
        check(is_capturing_(reinterpret_cast<CUstream>(stream), &capturing), "cuStreamIsCapturing");
      } else {
        check(exchange_(&mode), "cuThreadExchangeStreamCaptureMode");
      }
    }
    return watch.ns() / count;
  }

 private:
  template <class Function>
  static void find(const char* name, Function* out) {
    static void* const library = dlopen("libcuda.so.1", RTLD_NOW);
    *out = library == nullptr ? nullptr : reinterpret_cast<Function>(dlsym(library, name));
    if (*out == nullptr) throw std::runtime_error(std::string("the driver has no ") + name);
  }
  static void check(CUresult result, const char* call) {
    if (result != CUDA_SUCCESS) throw std::runtime_error(std::string(call) + ": " + std::to_string(result));
  }

  decltype(&cuMemPoolCreate) create_ = nullptr;
  decltype(&cuMemPoolDestroy) destroy_ = nullptr;
  decltype(&cuMemPoolSetAttribute) set_ = nullptr;
  decltype(&cuMemAllocFromPoolAsync) allocate_ = nullptr;
  decltype(&cuMemFreeAsync) free_ = nullptr;
  decltype(&cuStreamIsCapturing) is_capturing_ = nullptr;
  decltype(&cuCtxGetCurrent) get_current_ = nullptr;
  decltype(&cuThreadExchangeStreamCaptureMode) exchange_ = nullptr;
  CUmemoryPool pool_ = nullptr;
};

#ifdef BENCHMARK_RMM
template <class Resource>
class Rmm final : public Source {
 public:
  template <class... Arguments>
  explicit Rmm(Arguments&&... arguments) : resource_(std::forward<Arguments>(arguments)...) {}
  void* take(size_t bytes, void* stream) override { return resource_.allocate(of(stream), bytes, kAlignment); }
  void drop(void* block, size_t bytes, void* stream) override {
    resource_.deallocate(of(stream), block, bytes, kAlignment);
  }

 private:
  static constexpr size_t kAlignment = 256;  // RMM's own default
  static cuda::stream_ref of(void* stream) { return cuda::stream_ref{static_cast<cudaStream_t>(stream)}; }
  Resource resource_;
};
#endif

std::unique_ptr<Source> rmm_source(const std::string& which, size_t initial_bytes) {
#ifdef BENCHMARK_RMM
  if (which == "async") return std::make_unique<Rmm<rmm::mr::cuda_async_memory_resource>>();
  return std::make_unique<Rmm<rmm::mr::pool_memory_resource>>(rmm::mr::cuda_memory_resource{}, initial_bytes);
#else
  throw std::runtime_error("built without RMM: " + which + ", " + std::to_string(initial_bytes));
#endif
}

constexpr bool kHasRmm =
#ifdef BENCHMARK_RMM
    true;
#else
    false;
#endif

void* at(const Streams& streams, size_t i) { return reinterpret_cast<void*>(streams[i % streams.size()]); }

// One block at a time, taken and dropped, on the streams in turn; ns a pair. The first
// round is not counted.
double pair_ns(Source& source, size_t bytes, int count, const Streams& streams) {
  const auto work = [&](int rounds) {
    for (int i = 0; i < rounds; ++i) {
      void* const stream = at(streams, size_t(i));
      source.drop(source.take(bytes, stream), bytes, stream);
    }
  };
  work(count / 4);
  const Stopwatch watch;
  work(count);
  return watch.ns() / count;
}

struct Operation {
  size_t slot;
  size_t bytes;  // 0: drops what is in the slot
  size_t stream;
};

// The operations in turn, `rounds` times; ns an operation in each round. What is left at
// the end of a round is dropped, outside of the time.
std::vector<double> rounds_ns(Source& source, const std::vector<Operation>& operations, size_t slots, int rounds,
                              const Streams& streams) {
  struct Held {
    void* block = nullptr;
    size_t bytes = 0;
    void* stream = nullptr;
  };
  std::vector<Held> held(slots);
  std::vector<double> times;
  for (int round = 0; round < rounds; ++round) {
    const Stopwatch watch;
    for (const Operation& operation : operations) {
      Held& slot = held[operation.slot];
      if (operation.bytes == 0) {
        source.drop(slot.block, slot.bytes, slot.stream);
        slot = {};
      } else {
        void* const stream = at(streams, operation.stream);
        slot = {source.take(operation.bytes, stream), operation.bytes, stream};
      }
    }
    times.push_back(watch.ns() / double(operations.size()));
    for (Held& slot : held) {
      if (slot.block != nullptr) source.drop(slot.block, slot.bytes, slot.stream);
      slot = {};
    }
  }
  return times;
}

// `live` blocks, one after another replaced at random; sizes uniform in their logarithm.
std::vector<double> churn_ns(Source& source, size_t lowest, size_t highest, size_t live, size_t count, int rounds,
                             const Streams& streams) {
  std::mt19937_64 random(1);
  std::uniform_real_distribution<double> exponent(std::log(double(lowest)), std::log(double(highest)));
  const auto bytes = [&] { return std::max<size_t>(1, size_t(std::exp(exponent(random)))); };
  std::vector<Operation> operations;
  for (size_t slot = 0; slot < live; ++slot) operations.push_back({slot, bytes(), slot});
  for (size_t i = 0; i < count; ++i) {
    const size_t slot = size_t(random() % live);
    operations.push_back({slot, 0, 0});
    operations.push_back({slot, bytes(), i});
  }
  return rounds_ns(source, operations, live, rounds, streams);
}

// RMM's own benchmark (random_allocations): 73 of 100 operations allocate, a uniform
// number of bytes up to `highest`, while less than `most` is in use and fewer than
// `allocations` were made; the others free one at random. Drawn as it draws.
std::vector<double> random_ns(Source& source, size_t highest, size_t most, size_t allocations, int rounds,
                              const Streams& streams) {
  std::default_random_engine random;
  std::uniform_int_distribution<size_t> bytes(1, highest);
  std::uniform_int_distribution<int> chance(0, 99);
  std::uniform_int_distribution<int> index(0, int(allocations) - 1);
  struct Live {
    size_t slot;
    size_t bytes;
  };
  std::vector<Live> live;
  std::vector<Operation> operations;
  size_t made = 0;
  size_t in_use = 0;
  for (size_t i = 0; i < allocations * 2; ++i) {
    const size_t size = bytes(random);
    const bool takes = live.empty() || (chance(random) < 73 && made < allocations && in_use + size < most);
    if (takes) {
      operations.push_back({made, size, made});
      live.push_back({made++, size});
      in_use += size;
    } else {
      const size_t which = size_t(index(random)) % live.size();
      operations.push_back({live[which].slot, 0, 0});
      in_use -= live[which].bytes;
      std::swap(live[which], live.back());
      live.pop_back();
    }
  }
  return rounds_ns(source, operations, made, rounds, streams);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  namespace py = pybind11;
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  py::class_<Source>(m, "Source");
  py::class_<DriverPool, Source>(m, "DriverPool")
      .def(py::init<int>(), py::arg("device"))
      .def("beside_ns", &DriverPool::beside_ns, Unlocked());
  m.def("exported", [](std::uintptr_t first, std::uintptr_t allocate, std::uintptr_t free) {
    return std::unique_ptr<Source>(new Exported(first, allocate, free));
  });
  m.def("torch_gpu", [] { return std::unique_ptr<Source>(new TorchGpu()); });
  m.def("torch_host", [] { return std::unique_ptr<Source>(new TorchHost()); });
  m.def("rmm", &rmm_source);
  m.attr("has_rmm") = kHasRmm;
  m.def("pair_ns", &pair_ns, Unlocked());
  m.def("churn_ns", &churn_ns, Unlocked());
  m.def("random_ns", &random_ns, Unlocked());
}
