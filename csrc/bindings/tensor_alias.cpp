// Tensors over other tensors' memory, and pages that nobody may write to.
#include "core/faces/tensor_alias.h"

#include <pybind11/stl.h>

#include <tuple>

#include "base/errors.h"
#include "bindings/bind.h"
#include "bindings/tensor_view.h"
#include "core/faces/seals.h"

namespace vmm::bindings {

namespace {

// An alias and what it shows, for as long as whoever has it: its tensor's memory, and a graph
// that was captured with it.
struct Shown {
  std::vector<HeldMemory> memory;
  std::unique_ptr<TensorAlias> alias;  // ends first
};

// Address and bytes; of what is sealed, also whether the tensor's memory ends there.
using Pieces = std::vector<std::pair<std::uintptr_t, std::size_t>>;
using Sealed = std::vector<std::tuple<std::uintptr_t, std::size_t, bool>>;

std::vector<AliasedPiece> to_pieces(const Pieces& pieces) {
  std::vector<AliasedPiece> result;
  result.reserve(pieces.size());
  for (const auto& [address, size] : pieces) result.push_back({address, size});
  return result;
}

std::vector<SealedPiece> to_pieces(const Sealed& pieces) {
  std::vector<SealedPiece> result;
  result.reserve(pieces.size());
  for (const auto& [address, size, is_last] : pieces) result.push_back({address, size, is_last});
  return result;
}

py::object alias(const std::shared_ptr<Pool>& pool, const std::vector<py::object>& tensors, const Pieces& pieces,
                 std::size_t copies, bool read_only, const std::vector<std::int64_t>& shape, py::handle dtype) {
  DeviceMemory& memory = home_of(*pool);
  const std::size_t bytes = tensor_bytes(shape, dtype);
  const std::shared_ptr<Shown> made = destroyed_without_gil(std::make_unique<Shown>());
  for (const py::object& tensor : tensors) made->memory.push_back(hold_memory(tensor));
  {
    const GilReleased released;
    made->alias = std::make_unique<TensorAlias>(memory, pool, to_pieces(pieces), copies, read_only);
  }
  const TensorAlias& shown = *made->alias;
  if (bytes > shown.size()) throw InvalidRangeError(0, bytes, shown.size(), "a tensor beyond the end of its addresses");
  return make_tensor_of_pages(shown.base(), shape, dtype, Runtime::room_of(*pool), made);
}

}  // namespace

void bind_tensor_alias(py::module_& module) {
  module.def("alias", &alias, py::arg("pool"), py::arg("tensors"), py::arg("pieces"), py::arg("copies"),
             py::arg("read_only"), py::arg("shape"), py::arg("dtype"));
  module.def("share_version", &share_version, py::arg("tensor"), py::arg("source"));
  module.def(
      "seal", [](const Pool& pool, const Sealed& pieces) { seal_pages(open_home_of(pool), pool, to_pieces(pieces)); },
      py::arg("pool"), py::arg("pieces"), WithoutGil());
  module.def(
      "unseal",
      [](const Pool& pool, const Sealed& pieces) { unseal_pages(open_home_of(pool), pool, to_pieces(pieces)); },
      py::arg("pool"), py::arg("pieces"), WithoutGil());
  module.def(
      "is_sealed",
      [](const Pool& pool, std::uintptr_t address, std::size_t size) {
        const std::shared_ptr<Pool> part = home_of(pool).pool_at(address);
        return part != nullptr && part->is_read_only(address, size);
      },
      py::arg("pool"), py::arg("address"), py::arg("size"), WithoutGil());
  module.def(
      "shared_bytes", [](const Pool& pool) { return home_of(pool).shared_bytes_of(pool); }, py::arg("pool"),
      WithoutGil());
}

}  // namespace vmm::bindings
