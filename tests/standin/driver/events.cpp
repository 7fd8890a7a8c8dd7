#include "events.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <utility>

#include "captures.h"
#include "machine.h"
#include "queue.h"

namespace standin {

// A page that both processes map. Records are counted, and so is how many of
// them have passed.
struct Shared {
  std::atomic<std::uint64_t> recorded;
  std::atomic<std::uint64_t> passed;
};

namespace {

struct EventName {
  std::uint64_t magic;
  std::int64_t pid;
  std::int64_t fd;
};
static_assert(sizeof(EventName) <= sizeof(CUipcEventHandle));
constexpr std::uint64_t kEventMagic = 0x746e657645646e53;

Shared* map_shared(int fd) {
  void* const got = ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  return got == MAP_FAILED ? nullptr : static_cast<Shared*>(got);
}

JobPtr record_job(const Event& event) {
  Job job;
  job.call = "cuEventRecord";
  if (Shared* const shared = event.shared; shared != nullptr) {
    const std::uint64_t number = ++shared->recorded;
    job.run = [shared, number](int) { shared->passed = number; };
  }
  return std::make_shared<const Job>(std::move(job));
}

Event& add_event(int device, unsigned flags) {
  auto* const event = new Event;  // a handle: never deleted
  event->device = device;
  event->flags = flags;
  world().events.insert(event);
  return *event;
}

}  // namespace

CUevent handle_of(const Event& event) { return reinterpret_cast<CUevent>(const_cast<Event*>(&event)); }

Event& event_of(CUevent handle, const char* call) {
  auto* const event = reinterpret_cast<Event*>(handle);
  if (world().events.count(event) == 0) die(call, "on what is no event");
  if (!event->alive) die(call, "on an event that was destroyed");
  return *event;
}

CUresult make_event(int device, unsigned flags, CUevent* out) {
  int fd = -1;
  Shared* shared = nullptr;
  if ((flags & CU_EVENT_INTERPROCESS) != 0) {
    if ((flags & CU_EVENT_DISABLE_TIMING) == 0) return CUDA_ERROR_INVALID_VALUE;
    fd = ::memfd_create("standin_event", MFD_CLOEXEC);
    if (fd < 0 || ::ftruncate(fd, sizeof(Shared)) != 0) return CUDA_ERROR_OUT_OF_MEMORY;
    shared = map_shared(fd);
  }
  Event& event = add_event(device, flags);
  event.shared_fd = fd;
  event.shared = shared;
  *out = handle_of(event);
  return CUDA_SUCCESS;
}

void destroy_event(Event& event) {
  event.alive = false;
  event.point = nullptr;
  event.captured = {};
  // The page stays mapped: queued records write to it.
  if (event.shared_fd >= 0) ::close(event.shared_fd);
}

CUresult share_event(Event& event, CUipcEventHandle* out) {
  if (event.shared_fd < 0) return CUDA_ERROR_INVALID_HANDLE;
  const EventName name{kEventMagic, ::getpid(), event.shared_fd};
  *out = {};
  std::memcpy(out, &name, sizeof(name));
  return CUDA_SUCCESS;
}

CUresult open_event(int device, const CUipcEventHandle& handle, CUevent* out) {
  EventName name{};
  std::memcpy(&name, &handle, sizeof(name));
  if (name.magic != kEventMagic) return CUDA_ERROR_INVALID_VALUE;
  if (name.pid == ::getpid()) return CUDA_ERROR_INVALID_CONTEXT;  // as CUDA: a process does not open its own
  const std::string path = "/proc/" + std::to_string(name.pid) + "/fd/" + std::to_string(name.fd);
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return CUDA_ERROR_INVALID_HANDLE;
  Event& event = add_event(device, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING);
  event.shared = map_shared(fd);
  ::close(fd);
  *out = handle_of(event);
  return CUDA_SUCCESS;
}

CUresult record_event(Lock& lock, Event& event, Stream& stream) {
  if (stream.captured.capture != nullptr) return capture_record(stream, event);
  event.captured = {};
  return submit(lock, stream, record_job(event), {}, &event.point);
}

CUresult record_event_everywhere(Lock& lock, Event& event, int device) {
  event.captured = {};
  // On a stream of its own: on the legacy one blocking streams would wait for it.
  Stream* everywhere = nullptr;
  for (const auto& stream : world().streams) {
    if (stream->device == device && stream->everywhere) everywhere = stream.get();
  }
  if (everywhere == nullptr) {
    everywhere = &make_stream(device, CU_STREAM_NON_BLOCKING, 0);
    everywhere->everywhere = true;
  }
  return submit(lock, *everywhere, record_job(event), ends_of(device), &event.point);
}

PointPtr point_of(const Event& event) {
  if (event.point != nullptr || event.shared == nullptr) return event.point;
  auto point = std::make_shared<Point>();
  const std::uint64_t number = event.shared->recorded;
  point->elsewhere = [shared = event.shared, number] { return shared->passed >= number; };
  return point;
}

}  // namespace standin
