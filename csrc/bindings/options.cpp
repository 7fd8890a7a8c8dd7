#include "core/options.h"

#include <pybind11/stl.h>

#include <tuple>
#include <vector>

#include "bindings/bind.h"

namespace vmm::bindings {

namespace {

using Row = std::tuple<std::string, std::string, std::string, std::string, std::string>;

std::vector<Row> rows() {
  std::vector<Row> result;
  for (const OptionRow& row : option_table()) {
    result.emplace_back(row.name, row.variable, row.default_text(), row.unit(), row.sentence);
  }
  return result;
}

}  // namespace

void bind_options(py::module_& module) {
  module.def("parse_bytes", &parse_bytes, py::arg("text"));
  module.def("format_bytes", &format_bytes, py::arg("size"));
  module.def("option_table", &rows);
}

}  // namespace vmm::bindings
