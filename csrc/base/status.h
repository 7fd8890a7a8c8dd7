// Status: what a driver call, or anything that can run out, answers. A caller
// has a plan for each code; misuse is an exception instead (errors.h).
#pragma once

#include <cstdint>
#include <string>

namespace vmm {

enum class StatusCode : std::uint8_t {
  ok,
  out_of_memory,     // the device, or the limit, has no more
  not_ready,         // a fence has not passed yet
  invalid_argument,  // the driver refuses these values
  not_supported,     // this driver, device or its version cannot do it
  driver_gone,       // process exit, a forked child: nothing is done any more
  driver_error,      // anything else; `driver_code` and `driver_name` tell
};

const char* to_string(StatusCode code);

class [[nodiscard]] Status {
 public:
  Status() = default;
  // `call` and `driver_name` are string literals or otherwise live for ever.
  Status(StatusCode code, const char* call, int driver_code = 0, const char* driver_name = "")
      : code_(code), driver_code_(driver_code), call_(call), driver_name_(driver_name) {}
  static Status okay() { return {}; }

  [[nodiscard]] bool ok() const { return code_ == StatusCode::ok; }
  [[nodiscard]] StatusCode code() const { return code_; }
  [[nodiscard]] const char* call() const { return call_; }
  [[nodiscard]] int driver_code() const { return driver_code_; }
  [[nodiscard]] const char* driver_name() const { return driver_name_; }
  // "cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY (2)"
  [[nodiscard]] std::string text() const;
  // For the few places where failing changes nothing that could be undone
  // (dropping a mapping of a driver that is gone): says so, does nothing.
  void ignore() const {}

 private:
  StatusCode code_ = StatusCode::ok;
  int driver_code_ = 0;
  const char* call_ = "";
  const char* driver_name_ = "";
};

}  // namespace vmm
