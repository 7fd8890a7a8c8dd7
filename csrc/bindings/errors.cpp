// vmm's failures as the Python exceptions of the same names, which the package
// defines (torch_vmm/errors.py) and this looks up when one is raised.
#include "base/errors.h"

#include <c10/util/Exception.h>

#include <exception>

#include "bindings/bind.h"

namespace vmm::bindings {

namespace {

// Raises Class(message, **attributes).
void raise(const char* name, const char* message, const py::dict& attributes) {
  try {
    const py::object type = py::module_::import("torch_vmm.errors").attr(name);
    // What it quotes may be cut within a character, or be no text at all.
    const py::object text = py::reinterpret_steal<py::object>(
        PyUnicode_DecodeUTF8(message, static_cast<Py_ssize_t>(std::strlen(message)), "replace"));
    if (!text) throw py::error_already_set();
    const py::object error = type(text, **attributes);
    PyErr_SetObject(type.ptr(), error.ptr());
  } catch (py::error_already_set& error) {
    error.restore();  // no such class: that is the error to see
  }
}

void raise(const InvalidPageSizeError& error) {
  py::dict attributes;
  attributes["page_size"] = error.page_size;
  attributes["granularity"] = error.granularity;
  raise("InvalidPageSizeError", error.what(), attributes);
}

void raise(const InvalidRangeError& error) {
  py::dict attributes;
  attributes["offset"] = error.offset;
  attributes["size"] = error.size;
  attributes["capacity"] = error.capacity;
  raise("InvalidRangeError", error.what(), attributes);
}

template <typename Error>
void raise_with_range(const char* name, const Error& error) {
  py::dict attributes;
  attributes["offset"] = error.offset;
  attributes["size"] = error.size;
  raise(name, error.what(), attributes);
}

void raise(const OutOfMemoryError& error) {
  py::dict attributes;
  attributes["requested"] = error.requested;
  attributes["available"] = error.available;
  attributes["limit"] = error.limit;
  attributes["pool"] = error.pool;
  raise("OutOfMemoryError", error.what(), attributes);
}

void raise_with_model(const char* name, const char* message, const std::string& model_id) {
  py::dict attributes;
  attributes["model_id"] = model_id;
  raise(name, message, attributes);
}

void raise(const StillInUseError& error) {
  py::dict attributes;
  attributes["live_bytes"] = error.live_bytes;
  attributes["live_blocks"] = error.live_blocks;
  raise("StillInUseError", error.what(), attributes);
}

void raise(const DriverError& error) {
  py::dict attributes;
  attributes["call"] = error.call;
  attributes["code"] = error.code;
  attributes["name"] = error.name;
  raise("DriverError", error.what(), attributes);
}

void raise_with_reason(const char* name, const NotAvailableError& error) {
  py::dict attributes;
  attributes["reason"] = error.reason;
  raise(name, error.what(), attributes);
}

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const InvalidPageSizeError& error) {
    raise(error);
  } catch (const InvalidRangeError& error) {
    raise(error);
  } catch (const InvalidArgumentError& error) {
    raise("InvalidArgumentError", error.what(), py::dict());
  } catch (const AlreadyMappedError& error) {
    raise_with_range("AlreadyMappedError", error);
  } catch (const NotMappedError& error) {
    raise_with_range("NotMappedError", error);
  } catch (const OutOfMemoryError& error) {
    raise(error);
  } catch (const ModelExistsError& error) {
    raise_with_model("ModelExistsError", error.what(), error.model_id);
  } catch (const ModelNotFoundError& error) {
    raise_with_model("ModelNotFoundError", error.what(), error.model_id);
  } catch (const StillInUseError& error) {
    raise(error);
  } catch (const AsleepError& error) {
    raise_with_model("AsleepError", error.what(), error.model_id);
  } catch (const DriverError& error) {
    raise(error);
  } catch (const NotEnabledError& error) {
    raise_with_reason("NotEnabledError", error);
  } catch (const NotAvailableError& error) {
    raise_with_reason("NotAvailableError", error);
  } catch (const VmmError& error) {
    raise("VmmError", error.what(), py::dict());
  } catch (const c10::Error& error) {
    // torch's own refusals, without the C++ stack.
    PyErr_SetString(PyExc_RuntimeError, error.what_without_backtrace());
  }
}

}  // namespace

void bind_errors(py::module_& /*module*/) { py::register_local_exception_translator(&translate); }

}  // namespace vmm::bindings
