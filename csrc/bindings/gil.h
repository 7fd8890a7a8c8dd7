// Work without Python's lock.
#pragma once

#include <cxxabi.h>
#include <pybind11/pybind11.h>
#include <unistd.h>

namespace vmm::bindings {

// For calls that may wait or take a lock for long. Before 3.14 Python ends a daemon
// thread that wants its lock back while the interpreter ends, by unwinding its stack:
// std::terminate where that comes to a destructor, as pybind11's gil_scoped_release has
// one, and objects are let go without the lock where it does not. Here such a thread stands
// still until the process is gone, as Python 3.14 has it. It holds no lock of ours.
class GilReleased {
 public:
  GilReleased() : thread_(PyEval_SaveThread()) {}
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;
  ~GilReleased() {
    try {
      PyEval_RestoreThread(thread_);
    } catch (const abi::__forced_unwind&) {
      while (true) pause();
    }
  }

 private:
  PyThreadState* const thread_;
};

}  // namespace vmm::bindings
