#include "bindings/stays.h"

#include <pybind11/stl.h>
#include <pythread.h>

#include <utility>

#include "base/errors.h"

namespace vmm::bindings {

void Stays::enter(std::vector<std::shared_ptr<Pool>> pools, py::object of) {
  const ByThread::iterator here = open_.try_emplace(PyThread_get_thread_ident()).first;
  std::vector<Stay>& stack = here->second;
  try {
    stack.emplace_back();  // first: what is entered has its place
    stack.back().context = is_carried_ ? enter_carried(std::move(pools)) : enter_model(std::move(pools.at(0)));
    stack.back().of = std::move(of);
  } catch (...) {
    if (!stack.empty() && stack.back().context == nullptr) stack.pop_back();
    if (stack.empty()) open_.erase(here);
    throw;
  }
}

void Stays::leave() {
  auto at = open_.find(PyThread_get_thread_ident());
  if (at == open_.end()) at = another_threads();
  if (at == open_.end()) throw VmmError("a model's context was left on this thread more often than it was entered");
  const Stay last = std::move(at->second.back());
  at->second.pop_back();
  if (at->second.empty()) open_.erase(at);
  leave_model(last.context);
}

// A generator that was begun on one thread and is closed on another, which has not entered this
// object itself (its own stay would be taken for it): leave_model() reports it. A thread that
// has ended leaves nothing itself; of several that live none is put out of its model.
Stays::ByThread::iterator Stays::another_threads() {
  py::set alive;
  for (const py::handle thread : py::module_::import("threading").attr("enumerate")()) alive.add(thread.attr("ident"));
  for (auto at = open_.begin(); at != open_.end(); ++at) {
    if (!alive.contains(at->first)) return at;
  }
  return open_.size() == 1 && open_.begin()->second.size() == 1 ? open_.begin() : open_.end();
}

namespace {

py::object enter_context(const py::object& self) {
  const py::tuple opens = self.attr("_opens")();
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();  // now, rather than with the model open
  self.attr("_stays").cast<Stays&>().enter(opens[0].cast<std::vector<std::shared_ptr<Pool>>>(), self);
  return opens[1];
}

void leave_context(const py::object& self, const py::args& /*kind, error, trace*/) {
  self.attr("_stays").cast<Stays&>().leave();
}

// One that a class has is bound to its objects, which plain functions of C are not.
py::object as_method(const py::cpp_function& function) {
  return py::reinterpret_steal<py::object>(PyInstanceMethod_New(function.ptr()));
}

}  // namespace

void bind_stays(py::module_& module) {
  py::class_<Stays>(module, "Stays").def(py::init<bool>(), py::arg("carried") = false);
  module.attr("enter_context") = as_method(py::cpp_function(&enter_context, py::name("__enter__")));
  module.attr("leave_context") = as_method(py::cpp_function(&leave_context, py::name("__exit__")));
}

}  // namespace vmm::bindings
