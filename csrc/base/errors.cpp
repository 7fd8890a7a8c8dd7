#include "base/errors.h"

#include "base/units.h"

namespace vmm {

InvalidPageSizeError::InvalidPageSizeError(std::size_t page_size, std::size_t granularity, std::size_t most)
    : InvalidArgumentError("page_size " + std::to_string(page_size) +
                           (most != 0 ? " is more than the device has, " + format_bytes(most)
                                      : " must be a power of two and a multiple of the device's granularity " +
                                            std::to_string(granularity) + " (" + format_bytes(granularity) + ")")),
      page_size(page_size),
      granularity(granularity) {}

InvalidRangeError::InvalidRangeError(std::size_t offset, std::size_t size, std::size_t capacity, const std::string& why)
    : InvalidArgumentError("offset " + std::to_string(offset) + ", size " + std::to_string(size) + ", capacity " +
                           std::to_string(capacity) + ": " + why),
      offset(offset),
      size(size),
      capacity(capacity) {}

AlreadyMappedError::AlreadyMappedError(std::size_t offset, std::size_t size, const std::string& what)
    : VmmError(what + ": offset " + std::to_string(offset) + ", size " + std::to_string(size) + " is already mapped"),
      offset(offset),
      size(size) {}

NotMappedError::NotMappedError(std::size_t offset, std::size_t size, const std::string& what)
    : VmmError(what + ": offset " + std::to_string(offset) + ", size " + std::to_string(size) + " is not mapped"),
      offset(offset),
      size(size) {}

OutOfMemoryError::OutOfMemoryError(const std::string& message, std::size_t requested, std::size_t available,
                                   std::size_t limit, std::string pool)
    : VmmError(message), requested(requested), available(available), limit(limit), pool(std::move(pool)) {}

ModelExistsError::ModelExistsError(const std::string& model_id)
    : VmmError("model '" + model_id + "' is already registered; unregister it first or choose another id"),
      model_id(model_id) {}

ModelNotFoundError::ModelNotFoundError(const std::string& model_id, const std::string& known)
    : VmmError("no model '" + model_id + "'; registered: " + (known.empty() ? "none" : known)), model_id(model_id) {}

StillInUseError::StillInUseError(const std::string& message, std::size_t live_bytes, std::size_t live_blocks)
    : VmmError(message), live_bytes(live_bytes), live_blocks(live_blocks) {}

AsleepError::AsleepError(const std::string& model_id, const std::string& tag)
    : VmmError(tag.empty() ? "model '" + model_id + "' is asleep; wake() it first"
                           : "tag '" + tag + "' of model '" + model_id + "' is asleep; wake('" + tag + "') first"),
      model_id(model_id) {}

DriverError::DriverError(const Status& status, const std::string& doing)
    : VmmError((doing.empty() ? "" : doing + ": ") + status.text()),
      call(status.call()),
      code(status.driver_code()),
      name(status.driver_name()[0] == '\0' ? to_string(status.code()) : status.driver_name()) {}

void throw_if_failed(const Status& status, const std::string& doing, const Wanted& wanted) {
  if (status.ok()) return;
  if (status.code() == StatusCode::driver_gone) {
    throw NotAvailableError(doing + ": " + status.text() + "; this process can no longer use the device");
  }
  if (status.code() == StatusCode::out_of_memory) {
    throw OutOfMemoryError(doing + ": " + status.text(), wanted.bytes, 0, 0, wanted.pool);
  }
  throw DriverError(status, doing);
}

}  // namespace vmm
