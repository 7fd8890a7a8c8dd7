// _C.replay(): a recorded allocation trace against a pool.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <unordered_map>

#include "base/errors.h"
#include "bindings/bind.h"
#include "core/device_memory.h"

namespace vmm::bindings {

namespace {

template <typename T>
using Column = py::array_t<T, py::array::c_style | py::array::forcecast>;

// Allocates and frees as the trace did; the pool is left as it was found. The
// memory is never touched, so a trace of 40 GiB needs none.
py::dict replay(Pool& pool, const Column<std::uint8_t>& op, const Column<std::uint64_t>& id,
                const Column<std::uint64_t>& size, const Column<std::uint64_t>& stream) {
  const auto count = static_cast<std::size_t>(op.size());
  if (op.ndim() != 1 || static_cast<std::size_t>(id.size()) != count ||
      static_cast<std::size_t>(size.size()) != count || static_cast<std::size_t>(stream.size()) != count) {
    throw InvalidArgumentError("op, id, size and stream must be columns of one length");
  }
  Runtime::require_own_process();
  if (Runtime::room_of(pool).kind != DeviceKind::cpu) {
    throw InvalidArgumentError("a trace's streams are numbers, not a GPU's: replay it on a pool of \"cpu\"");
  }
  DeviceMemory& memory = *pool.home();
  const std::uint8_t* ops = op.data();
  const std::uint64_t* ids = id.data();
  const std::uint64_t* sizes = size.data();
  const std::uint64_t* streams = stream.data();
  const Statistics before = pool.statistics();
  {
    const py::gil_scoped_release released;
    std::unordered_map<std::uint64_t, Address> live;
    const auto free_all = [&] {
      for (const auto& [block, address] : live) Runtime::free(reinterpret_cast<void*>(address));
    };
    try {
      for (std::size_t k = 0; k < count; ++k) {
        if (ops[k] == 0) {
          // Streams are only told apart here; 16 keeps the default stream 0.
          if (sizes[k] != 0) live[ids[k]] = memory.allocate(pool, sizes[k], to_stream(streams[k] * 16));
        } else if (const auto block = live.find(ids[k]); block != live.end()) {
          Runtime::free(reinterpret_cast<void*>(block->second));
          live.erase(block);
        }
      }
    } catch (...) {
      free_all();
      throw;
    }
    free_all();
  }
  const Statistics after = pool.statistics();
  py::dict result;
  result["allocated_peak"] = after[StatKind::allocated_bytes][0].peak;
  result["reserved_peak"] = after[StatKind::reserved_bytes][0].peak;
  result["chunks_mapped"] = after.num_device_alloc - before.num_device_alloc;
  return result;
}

}  // namespace

void bind_replay(py::module_& module) {
  module.def("replay", &replay, py::arg("pool"), py::arg("op"), py::arg("id"), py::arg("size"), py::arg("stream"));
}

}  // namespace vmm::bindings
