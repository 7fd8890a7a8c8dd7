#include "base/status.h"

namespace vmm {

const char* to_string(StatusCode code) {
  switch (code) {
    case StatusCode::ok:
      return "ok";
    case StatusCode::out_of_memory:
      return "out of memory";
    case StatusCode::not_ready:
      return "not ready";
    case StatusCode::invalid_argument:
      return "invalid argument";
    case StatusCode::not_supported:
      return "not supported";
    case StatusCode::driver_gone:
      return "the driver has gone";
    case StatusCode::driver_error:
      return "driver error";
  }
  return "unknown";
}

std::string Status::text() const {
  if (ok()) return "ok";
  std::string text = std::string(call_) + ": ";
  if (driver_name_[0] == '\0') return text + to_string(code_);
  text += driver_name_;
  return text + " (" + std::to_string(driver_code_) + ")";
}

}  // namespace vmm
