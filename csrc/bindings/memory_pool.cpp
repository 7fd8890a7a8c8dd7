// _C.MemoryPool and the buffers that it gives out.
#include "core/faces/memory_pool.h"

#include <pybind11/stl.h>

#include <limits>

#include "base/errors.h"
#include "bindings/bind.h"
#include "bindings/numbers.h"
#include "bindings/tensor_view.h"
#include "ipc/ipc_exports.h"
#include "torch_adapter/errors.h"

namespace vmm::bindings {

namespace {

// A pool, and whose it is. Its buffers keep it.
struct Buffers {
  Buffers(DeviceRoom& room, py::handle buffer_class) : room(room), pool(room.memory), buffer_class(buffer_class) {}
  ~Buffers() = default;
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;

  [[nodiscard]] MemoryPool& here() {
    Runtime::require_own_process();
    return pool;
  }

  DeviceRoom& room;
  MemoryPool pool;
  const py::handle buffer_class;  // of the objects that Python sees; it outlives the interpreter's use of them
};
using BuffersPtr = std::shared_ptr<Buffers>;

// A buffer, live until it is freed and no tensor shows it any more, or until nobody
// has it. One of no bytes stands nowhere.
class Buffer {
 public:
  struct Spec {
    std::int64_t count = 0;  // elements
    py::handle dtype;        // torch's live for ever
    std::size_t bytes = 0;
    Stream stream = nullptr;
    std::optional<std::int64_t> stream_id = std::nullopt;  // torch's, where it was the current one
  };

  Buffer(BuffersPtr of, const Spec& spec)
      : of_(std::move(of)), spec_(spec), address_(bytes() == 0 ? 0 : of_->here().allocate(bytes(), spec.stream)) {}
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() {
    if (!given_back_) give_back();
  }

  [[nodiscard]] DeviceRoom& room() const { return of_->room; }
  [[nodiscard]] std::int64_t count() const { return spec_.count; }
  [[nodiscard]] std::size_t bytes() const { return spec_.bytes; }
  [[nodiscard]] py::handle dtype() const { return spec_.dtype; }
  [[nodiscard]] Stream stream() const { return spec_.stream; }
  [[nodiscard]] std::optional<std::int64_t> stream_id() const { return spec_.stream_id; }
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
        throw StillInUseError(text() + " is shown by " + format_count(uses_, "tensor") + "; drop " +
                                  (uses_ == 1 ? "that" : "them") + " first, or force",
                              bytes(), uses_);
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
    return "the buffer of " + format_bytes(bytes()) + " at " + format_hex(address_);
  }
  void require_live() const VMM_REQUIRES(mutex_) {
    if (freed_) throw InvalidArgumentError(text() + " has been freed");
  }
  void give_back() noexcept {
    if (address_ == 0) return;
    try {
      IpcExports::before_free(address_);
      of_->pool.free(address_);
    } catch (...) {
      report_swallowed("the end of a buffer");
    }
  }

  const BuffersPtr of_;
  const Spec spec_;
  const Address address_;
  Mutex mutex_;  // a leaf
  std::size_t uses_ VMM_GUARDED_BY(mutex_) = 0;
  bool freed_ VMM_GUARDED_BY(mutex_) = false;  // by its owner
  bool given_back_ = false;                    // set once; read when nobody else has the buffer
};
using BufferPtr = std::shared_ptr<Buffer>;

BuffersPtr make_buffers(const std::string& kind, int ordinal, py::handle buffer_class) {
  DeviceRoom& room = [&]() -> DeviceRoom& {
    const GilReleased released;
    return to_room(kind, ordinal);
  }();
  initialize_torch(room);
  return destroyed_without_gil(std::make_unique<Buffers>(room, buffer_class));
}

// Ends with the GIL held where Python drops it last: a free waits for nothing, and
// whoever lets go of the GIL while the interpreter ends does not get it back.
BufferPtr make_buffer(const BuffersPtr& of, const Buffer::Spec& spec) {
  return {std::make_unique<Buffer>(of, spec).release(), [](Buffer* last) {
            if (!Runtime::in_child()) delete last;
          }};
}

// A buffer as an object of `cls`, a class that Python derives from Buffer's: in the
// way in which pybind11 makes what a function returns, which is of Buffer's own.
py::object wrap(const BufferPtr& buffer, py::handle cls) {
  auto object =
      py::reinterpret_steal<py::object>(py::detail::make_new_instance(reinterpret_cast<PyTypeObject*>(cls.ptr())));
  auto* const instance = reinterpret_cast<py::detail::instance*>(object.ptr());
  instance->owned = true;
  py::detail::values_and_holders(instance).begin()->value_ptr() = buffer.get();
  static const py::detail::type_info* const type = py::detail::get_type_info(typeid(Buffer), /*throw_if_missing=*/true);
  type->init_instance(instance, &buffer);
  return object;
}

py::object allocate(const BuffersPtr& self, std::int64_t count, py::handle dtype,
                    std::optional<std::uintptr_t> stream) {
  Buffer::Spec spec{count, dtype, tensor_bytes({count}, dtype)};
  if (spec.bytes > static_cast<std::size_t>(std::numeric_limits<std::int64_t>::max())) {
    throw InvalidArgumentError("a buffer of " + format_bytes(spec.bytes) + " is more than there are addresses");
  }
  spec.stream =
      stream.has_value() ? to_stream(*stream) : current_stream(self->room.kind, self->room.ordinal, &spec.stream_id);
  if (spec.stream == kPerThreadStream && self->room.kind == DeviceKind::cuda) {
    throw InvalidArgumentError(
        "stream 2 is CUDA's per-thread default stream, which is another one on each thread, and a freed buffer is used "
        "again in the order of its stream: give a stream of its own");
  }
  BufferPtr buffer;
  {
    const GilReleased released;
    self->here().pool().require_open();
    buffer = make_buffer(self, spec);
  }
  return wrap(buffer, self->buffer_class);
}

// What a tensor keeps of a buffer: its memory, and behind that what was given as its streams.
class Shown {
 public:
  Shown(BufferPtr buffer, py::object streams)
      : buffer_(std::move(buffer)), streams_(std::move(streams)), address_(buffer_->begin_use()) {}
  Shown(const Shown&) = delete;
  Shown& operator=(const Shown&) = delete;
  ~Shown() {
    if (!Runtime::in_child()) buffer_->end_use();
    if (Runtime::in_child() || !may_run_python()) {
      (void)streams_.release();
      return;
    }
    const py::gil_scoped_acquire gil;  // torch ends a tensor without it
    streams_ = py::object();
  }
  [[nodiscard]] Address address() const { return address_; }

 private:
  const BufferPtr buffer_;
  py::object streams_;
  const Address address_;
};

py::object shown_tensor(const BufferPtr& self, py::object streams) {
  auto shown = std::make_shared<Shown>(self, std::move(streams));
  const Address address = shown->address();
  return make_tensor(address, {self->count()}, self->dtype(), self->room(), std::move(shown));
}

// Before the attributes of the object go, among them its streams.
void finalize(PyObject* object) {
  if (Runtime::in_child()) return;
  auto* const instance = reinterpret_cast<py::detail::instance*>(object);
  auto holders = py::detail::values_and_holders(instance);
  auto at = holders.begin();
  if (at->holder_constructed()) at->holder<BufferPtr>()->free(/*force=*/true);
}

// The same without Python, for loops in C++: `functions` has their addresses.
void* allocate_from(void* pool, std::size_t bytes, void* stream) {
  Runtime::require_own_process();
  return reinterpret_cast<void*>(static_cast<MemoryPool*>(pool)->allocate(bytes, stream));
}
void free_to(void* pool, void* address, void* /*stream*/) {
  Runtime::require_own_process();
  static_cast<MemoryPool*>(pool)->free(reinterpret_cast<Address>(address));
}

}  // namespace

void bind_memory_pool(py::module_& module) {
  const auto with_finalizer =
      py::custom_type_setup([](PyHeapTypeObject* type) { type->ht_type.tp_finalize = &finalize; });
  py::class_<Buffer, BufferPtr>(module, "Buffer", with_finalizer)
      .def_property_readonly("_address", &Buffer::address)
      .def_property_readonly("_count", &Buffer::count)
      .def_property_readonly("_bytes", &Buffer::bytes)
      .def_property_readonly("_dtype",
                             [](const Buffer& self) { return py::reinterpret_borrow<py::object>(self.dtype()); })
      .def_property_readonly("_stream_pointer",
                             [](const Buffer& self) { return reinterpret_cast<std::uintptr_t>(self.stream()); })
      .def_property_readonly("_stream_id", &Buffer::stream_id)
      .def_property_readonly(
          "_room", [](const Buffer& self) { return py::make_tuple(to_string(self.room().kind), self.room().ordinal); })
      .def_property_readonly("_freed", &Buffer::is_freed)
      .def(
          "_use_on", [](Buffer& self, std::uintptr_t stream) { self.record_stream(to_stream(stream)); },
          py::arg("stream"), WithoutGil())
      .def("_give_back", &Buffer::free, py::arg("force"))
      .def("_show", &shown_tensor, py::arg("streams"));

  py::class_<Buffers, BuffersPtr>(module, "MemoryPool")
      .def(py::init(&make_buffers), py::arg("kind"), py::arg("ordinal"), py::arg("buffer_class"))
      .def_property_readonly("key",
                             [](const Buffers& self) { return reinterpret_cast<std::uintptr_t>(&self.pool.pool()); })
      .def_property_readonly("name", [](const Buffers& self) { return self.pool.pool().name(); })
      .def_property_readonly("is_closed", [](const Buffers& self) { return self.pool.is_closed(); })
      .def_property_readonly("threshold", [](const Buffers& self) { return from_limit(self.pool.threshold()); })
      .def("allocate", &allocate, py::arg("count"), py::arg("dtype"), py::arg("stream") = py::none())
      .def_property_readonly("functions",
                             [](Buffers& self) {
                               return py::make_tuple(reinterpret_cast<std::uintptr_t>(&self.pool),
                                                     reinterpret_cast<std::uintptr_t>(&allocate_from),
                                                     reinterpret_cast<std::uintptr_t>(&free_to));
                             })
      .def("stats",
           [](Buffers& self) {
             BufferStats stats;
             {
               const GilReleased released;
               stats = self.here().stats();
             }
             return to_dict(stats, kBufferFields);
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
