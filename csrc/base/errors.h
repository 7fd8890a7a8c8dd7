// The named failures that a caller sees, each with its values. bindings/errors
// turns them into the Python exceptions of the same meaning; nothing below
// csrc/core throws anything else on purpose.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>
#include <utility>

#include "base/status.h"

namespace vmm {

class VmmError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class InvalidArgumentError : public VmmError {
 public:
  using VmmError::VmmError;
};

class InvalidPageSizeError : public InvalidArgumentError {
 public:
  // `most` is what the device has, where that is why.
  InvalidPageSizeError(std::size_t page_size, std::size_t granularity, std::size_t most = 0);
  std::size_t page_size;
  std::size_t granularity;
};

class InvalidRangeError : public InvalidArgumentError {
 public:
  // `why` completes "offset .. size .. capacity ..: ".
  InvalidRangeError(std::size_t offset, std::size_t size, std::size_t capacity, const std::string& why);
  // A size that cannot be, of what has no offset and no capacity yet.
  InvalidRangeError(std::size_t size, const std::string& message)
      : InvalidArgumentError(message), offset(0), size(size), capacity(size) {}
  std::size_t offset;
  std::size_t size;
  std::size_t capacity;
};

// `offset`, `size` of the first page at fault.
class AlreadyMappedError : public VmmError {
 public:
  AlreadyMappedError(std::size_t offset, std::size_t size, const std::string& what);
  std::size_t offset;
  std::size_t size;
};

class NotMappedError : public VmmError {
 public:
  NotMappedError(std::size_t offset, std::size_t size, const std::string& what);
  std::size_t offset;
  std::size_t size;
};

class OutOfMemoryError : public VmmError {
 public:
  OutOfMemoryError(const std::string& message, std::size_t requested, std::size_t available, std::size_t limit,
                   std::string pool);
  std::size_t requested;  // bytes asked for
  std::size_t available;  // bytes that could still have been had
  std::size_t limit;      // bytes: the limit that refused
  std::string pool;       // name of the asking pool
  bool is_told = false;   // the pool has counted it, and its device told who wanted to know
};

class ModelExistsError : public VmmError {
 public:
  explicit ModelExistsError(const std::string& model_id);
  std::string model_id;
};

class ModelNotFoundError : public VmmError {
 public:
  // `known` lists the registered ids, for the message.
  ModelNotFoundError(const std::string& model_id, const std::string& known);
  std::string model_id;
};

class StillInUseError : public VmmError {
 public:
  StillInUseError(const std::string& message, std::size_t live_bytes, std::size_t live_blocks);
  std::size_t live_bytes;
  std::size_t live_blocks;
};

class AsleepError : public VmmError {
 public:
  // `tag`: only what stands under it sleeps.
  explicit AsleepError(const std::string& model_id, const std::string& tag = "");
  std::string model_id;
};

class DriverError : public VmmError {
 public:
  explicit DriverError(const Status& status, const std::string& doing = "");
  // The same, with what is known beside it on lines of its own.
  DriverError(const DriverError& error, const std::string& beside)
      : VmmError(std::string(error.what()) + "\n" + beside), call(error.call), code(error.code), name(error.name) {}
  std::string call;
  int code;
  std::string name;
};

class NotAvailableError : public VmmError {
 public:
  explicit NotAvailableError(const std::string& reason) : VmmError(reason), reason(reason) {}
  std::string reason;
};

// A model is entered while torch_vmm is not that device's allocator.
class NotEnabledError : public NotAvailableError {
 public:
  using NotAvailableError::NotAvailableError;
};

// What ran out was wanted for: bytes (0: it is not counted in bytes, as mappings are), and the pool that asked.
struct Wanted {
  std::size_t bytes = 0;
  std::string pool;
};

// Throws what `status` means unless it is ok: OutOfMemoryError, NotAvailableError
// (the driver has gone) or DriverError. `doing` says what was attempted.
void throw_if_failed(const Status& status, const std::string& doing, const Wanted& wanted = {});

}  // namespace vmm
