// _C.replay(): a recorded allocation trace on a device of host memory of its own.
#include "core/faces/replay.h"

#include <pybind11/stl.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "base/errors.h"
#include "bindings/bind.h"
#include "driver/host_driver.h"

namespace vmm::bindings {

namespace {

// A column of numbers by the buffer protocol: an array.array or numpy's, without
// needing numpy. REQUIRES: `buffer` outlives it.
template <typename T>
class Column {
 public:
  Column(const py::buffer& buffer, const char* name) : info_(buffer.request()) {
    if (info_.ndim != 1 || !info_.item_type_is_equivalent_to<T>() || info_.strides[0] != info_.itemsize) {
      throw InvalidArgumentError(std::string(name) + ": give one contiguous column of unsigned " +
                                 std::to_string(8 * sizeof(T)) + "-bit numbers");
    }
  }
  [[nodiscard]] std::size_t size() const { return static_cast<std::size_t>(info_.size); }
  [[nodiscard]] T operator[](std::size_t k) const { return static_cast<const T*>(info_.ptr)[k]; }

 private:
  py::buffer_info info_;
};

// Microseconds; as nanoseconds they still fit 63 bits.
constexpr std::uint64_t kLatest = 1ULL << 53;

std::vector<RecordedStep> to_program(const py::buffer& op, const py::buffer& id, const py::buffer& size,
                                     const py::buffer& stream, const std::optional<py::buffer>& model,
                                     const std::optional<py::buffer>& time_us) {
  const Column<std::uint8_t> ops(op, "op");
  const Column<std::uint64_t> ids(id, "id");
  const Column<std::uint64_t> sizes(size, "size");
  const Column<std::uint64_t> streams(stream, "stream");
  const std::size_t count = ops.size();
  if (ids.size() != count || sizes.size() != count || streams.size() != count) {
    throw InvalidArgumentError("op, id, size and stream must be columns of one length");
  }
  std::vector<RecordedStep> program(count);
  for (std::size_t k = 0; k < count; ++k) program[k] = {ops[k] == 0, ids[k], sizes[k], streams[k]};
  if (model.has_value()) {
    const Column<std::uint8_t> models(*model, "model");
    if (models.size() != count) throw InvalidArgumentError("op and model must be columns of one length");
    for (std::size_t k = 0; k < count; ++k) program[k].model = models[k];
  }
  if (time_us.has_value()) {
    const Column<std::uint64_t> times(*time_us, "time_us");
    if (times.size() != count) throw InvalidArgumentError("op and time_us must be columns of one length");
    for (std::size_t k = 0; k < count; ++k) {
      if (times[k] > kLatest || (k != 0 && times[k] < times[k - 1])) {
        throw InvalidArgumentError("time_us must never fall, nor be more than " + std::to_string(kLatest) + ": step " +
                                   std::to_string(k) + " is at " + std::to_string(times[k]));
      }
      program[k].time = std::chrono::microseconds(times[k]);
    }
  }
  return program;
}

py::bytes to_bytes(const std::vector<std::uint64_t>& series) {
  return {reinterpret_cast<const char*>(series.data()), series.size() * sizeof(std::uint64_t)};
}

py::dict replay_on_host(const py::buffer& op, const py::buffer& id, const py::buffer& size, const py::buffer& stream,
                        std::size_t device_bytes, const std::optional<py::buffer>& model,
                        std::optional<std::size_t> limit, std::uint64_t behind,
                        const std::optional<py::buffer>& time_us) {
  const std::vector<RecordedStep> program = to_program(op, id, size, stream, model, time_us);
  Replayed done;
  {
    const GilReleased released;
    HostDriverOptions host;
    host.device_bytes = device_bytes;
    HostDriver driver(host);
    Options options = Options::from_environment();
    options.exportable = false;  // a descriptor a chunk
    options.scrub = false;       // nobody reads it
    done = replay(driver, options, program, {limit.value_or(kUnlimited), behind});
  }
  py::dict calls;
  calls["create"] = done.calls.create;
  calls["release"] = done.calls.release;
  calls["map"] = done.calls.map;
  calls["unmap"] = done.calls.unmap;
  calls["set_access"] = done.calls.set_access;
  py::dict result;
  result["allocated"] = to_bytes(done.allocated);
  result["reserved"] = to_bytes(done.reserved);
  result["driver_calls"] = to_bytes(done.driver_calls);
  result["calls"] = std::move(calls);
  result["allocated_peak"] = done.allocated_peak;
  result["reserved_peak"] = done.reserved_peak;
  result["left"] = done.left;
  result["refused_at"] = done.refused_at;
  return result;
}

}  // namespace

void bind_replay(py::module_& module) {
  module.def("replay", &replay_on_host, py::arg("op"), py::arg("id"), py::arg("size"), py::arg("stream"),
             py::arg("device_bytes"), py::arg("model") = py::none(), py::arg("limit") = py::none(),
             py::arg("behind") = 0, py::arg("time_us") = py::none());
}

}  // namespace vmm::bindings
