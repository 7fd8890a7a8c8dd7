// _C.MemoryPool and the buffers that it gives out.
#include "core/faces/memory_pool.h"

#include <pybind11/stl.h>

#include "base/errors.h"
#include "bindings/bind.h"
#include "bindings/tensor_view.h"
#include "torch_adapter/errors.h"

namespace vmm::bindings {

namespace {

// A pool, and whose it is. Its buffers keep it.
struct Buffers {
  explicit Buffers(DeviceRoom& room) : room(room), pool(room.memory) {}
  ~Buffers() = default;
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;

  [[nodiscard]] MemoryPool& here() {
    Runtime::require_own_process();
    return pool;
  }

  DeviceRoom& room;
  MemoryPool pool;
};
using BuffersPtr = std::shared_ptr<Buffers>;

// A buffer, live until it is freed and no tensor shows it any more, or until nobody
// has it. One of no bytes stands nowhere.
class Buffer {
 public:
  Buffer(BuffersPtr of, std::size_t bytes, Stream stream)
      : of_(std::move(of)), bytes_(bytes), address_(bytes == 0 ? 0 : of_->here().allocate(bytes, stream)) {}
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() {
    if (!given_back_) give_back();
  }

  [[nodiscard]] DeviceRoom& room() const { return of_->room; }
  [[nodiscard]] Address address() VMM_EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    require_live();
    return address_;
  }
  [[nodiscard]] bool is_freed() VMM_EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    return freed_;
  }
  void record_stream(Stream stream) {
    const Address at = begin_use();
    const std::shared_ptr<void> use(nullptr, [this](void*) { end_use(); });
    if (at != 0) of_->pool.record_stream(at, stream);
  }
  void free(bool force) VMM_EXCLUDES(mutex_) {
    Runtime::require_own_process();
    {
      const MutexLock lock(mutex_);
      if (freed_) return;
      if (uses_ != 0 && !force) {
        throw StillInUseError(text() + " is shown by " + std::to_string(uses_) + " tensors; drop them first, or force",
                              bytes_, uses_);
      }
      freed_ = true;
      if (uses_ != 0) return;
      given_back_ = true;
    }
    give_back();
  }
  // The address; until end_use() the memory stays. InvalidArgumentError once it is freed.
  Address begin_use() VMM_EXCLUDES(mutex_) {
    Runtime::require_own_process();
    const MutexLock lock(mutex_);
    require_live();
    ++uses_;
    return address_;
  }
  void end_use() VMM_EXCLUDES(mutex_) {
    {
      const MutexLock lock(mutex_);
      if (--uses_ != 0 || !freed_) return;
      given_back_ = true;
    }
    give_back();
  }

 private:
  [[nodiscard]] std::string text() const {
    return "the buffer of " + format_bytes(bytes_) + " at " + format_hex(address_);
  }
  void require_live() const VMM_REQUIRES(mutex_) {
    if (freed_) throw InvalidArgumentError(text() + " has been freed");
  }
  void give_back() noexcept {
    if (address_ == 0) return;
    try {
      of_->pool.free(address_);
    } catch (...) {
      report_swallowed("the end of a buffer");
    }
  }

  const BuffersPtr of_;
  const std::size_t bytes_;
  const Address address_;
  Mutex mutex_;  // a leaf
  std::size_t uses_ VMM_GUARDED_BY(mutex_) = 0;
  bool freed_ VMM_GUARDED_BY(mutex_) = false;  // by its owner
  bool given_back_ = false;                    // set once; read when nobody else has the buffer
};
using BufferPtr = std::shared_ptr<Buffer>;

BuffersPtr make(const std::string& kind, int ordinal) {
  const py::gil_scoped_release released;
  return destroyed_without_gil(std::make_unique<Buffers>(to_room(kind, ordinal)));
}

// Ends with the GIL held, as torch's tensors do: a free waits for nothing, and
// whoever lets go of the GIL while the interpreter ends does not get it back.
BufferPtr make_buffer(const BuffersPtr& of, std::size_t bytes, Stream stream) {
  return {std::make_unique<Buffer>(of, bytes, stream).release(), [](Buffer* last) {
            if (!Runtime::in_child()) delete last;
          }};
}

BufferPtr allocate(const BuffersPtr& self, std::int64_t count, py::handle dtype, std::uintptr_t stream) {
  const std::size_t bytes = tensor_bytes({count}, dtype);
  const py::gil_scoped_release released;
  self->here().pool().require_open();
  return make_buffer(self, bytes, to_stream(stream));
}

py::object tensor(const BufferPtr& self, const std::vector<std::int64_t>& shape, py::handle dtype) {
  static_cast<void>(tensor_bytes(shape, dtype));  // refuses what is no dtype, before anything is held
  const Address address = self->begin_use();
  // From here on the tensor's end, or a failure to make it, lets go.
  const std::shared_ptr<void> hold(nullptr, [self](void*) {
    if (!Runtime::in_child()) self->end_use();
  });
  return make_tensor(address, shape, dtype, self->room(), hold);
}

py::dict as_dict(const BufferStats& stats) {
  py::dict result;
  result["allocated_bytes"] = stats.allocated_bytes;
  result["peak_bytes"] = stats.peak_bytes;
  result["allocation_count"] = stats.allocation_count;
  result["free_count"] = stats.free_count;
  result["cached_bytes"] = stats.cached_bytes;
  return result;
}

}  // namespace

void bind_memory_pool(py::module_& module) {
  py::class_<Buffer, BufferPtr>(module, "Buffer")
      .def_property_readonly("address", &Buffer::address)
      .def_property_readonly("is_freed", &Buffer::is_freed)
      .def(
          "record_stream", [](Buffer& self, std::uintptr_t stream) { self.record_stream(to_stream(stream)); },
          py::arg("stream"), WithoutGil())
      .def("free", &Buffer::free, py::arg("force") = false, WithoutGil())
      .def("tensor", &tensor, py::arg("shape"), py::arg("dtype"));

  py::class_<Buffers, BuffersPtr>(module, "MemoryPool")
      .def(py::init(&make), py::arg("kind"), py::arg("ordinal") = 0)
      .def_property_readonly("key",
                             [](const Buffers& self) { return reinterpret_cast<std::uintptr_t>(&self.pool.pool()); })
      .def_property_readonly("name", [](const Buffers& self) { return self.pool.pool().name(); })
      .def_property_readonly("is_closed", [](const Buffers& self) { return self.pool.is_closed(); })
      .def_property_readonly("threshold", [](const Buffers& self) { return from_limit(self.pool.threshold()); })
      .def("allocate", &allocate, py::arg("count"), py::arg("dtype"), py::arg("stream") = 0)
      .def("stats",
           [](Buffers& self) {
             BufferStats stats;
             {
               const py::gil_scoped_release released;
               stats = self.here().stats();
             }
             return as_dict(stats);
           })
      .def(
          "trim", [](Buffers& self, std::size_t keep) { return self.here().trim(keep); }, py::arg("keep"), WithoutGil())
      .def(
          "set_threshold",
          [](Buffers& self, std::optional<std::size_t> bytes) { self.here().set_threshold(to_limit(bytes)); },
          py::arg("bytes"), WithoutGil())
      .def(
          "close", [](Buffers& self, bool force) { self.here().close(force); }, py::arg("force") = false, WithoutGil());
}

}  // namespace vmm::bindings
