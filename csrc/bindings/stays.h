// The open stays of one context manager, by thread, the innermost last. Touched under the GIL.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "bindings/bind.h"
#include "torch_adapter/routing.h"

namespace vmm::bindings {

class Stays {
 public:
  // `is_carried`: exactly the pools that are entered are open inside, whatever is open outside.
  explicit Stays(bool is_carried) : is_carried_(is_carried) {}
  // Opens one on this thread, of `of`, which lives until it is closed: another object of the
  // same pool would not find it. Throws as enter_model() and enter_carried().
  void enter(std::vector<std::shared_ptr<Pool>> pools, py::object of);
  // Closes the one that this thread opened last. VmmError as leave_model(), and where none is
  // open here, unless it is clear whose it is.
  void leave();

 private:
  struct Stay {
    ModelContextPtr context;
    py::object of;
  };
  using ByThread = std::map<unsigned long, std::vector<Stay>>;
  ByThread::iterator another_threads();

  const bool is_carried_;
  ByThread open_;
};

// Binds Stays, and enter_context and leave_context: the __enter__ and __exit__ of a class whose
// objects have `_stays`, and `_opens()`, which answers with the pools and what `as` names. They
// are functions of C, as those of threading.Lock are. A Ctrl-C is raised where a function of
// Python begins or goes on: between `with` and the stay's end, and the thread was in that model
// for good. (From Python 3.14 on also between __enter__ and what `with` protects: a microsecond
// is left, as with a lock.)
void bind_stays(py::module_& module);

}  // namespace vmm::bindings
