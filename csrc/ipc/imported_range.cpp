#include "ipc/imported_range.h"

#include <algorithm>

#include "base/check.h"
#include "base/units.h"

namespace vmm {

Status ImportedRange::make(Driver& driver, std::span<const ImportedPart> parts, std::span<const Location> accessors,
                           std::unique_ptr<ImportedRange>* out) {
  VMM_CHECK(!parts.empty() && !accessors.empty(), "parts ", parts.size(), " accessors ", accessors.size());
  Capabilities capabilities;
  if (const Status asked = driver.capabilities(accessors.front().device, &capabilities); !asked.ok()) return asked;
  std::size_t size = 0;
  for (const ImportedPart& part : parts) {
    if (sum_overflows(size, part.size)) return {StatusCode::invalid_argument, "import of more bytes than there can be"};
    size += part.size;
  }
  // What a failure leaves behind, its destructor takes away.
  std::unique_ptr<ImportedRange> range(new ImportedRange(driver));
  if (const Status reserved = driver.reserve(size, capabilities.granularity, &range->base_); !reserved.ok()) {
    return reserved;
  }
  range->size_ = size;
  if (const Status mapped = range->map_parts(parts); !mapped.ok()) return mapped;
  for (const Location& who : accessors) {
    if (const Status given = range->add_accessor(who); !given.ok()) return given;
  }
  *out = std::move(range);
  return {};
}

Status ImportedRange::map_parts(std::span<const ImportedPart> parts) {
  for (const ImportedPart& part : parts) {
    ChunkHandle chunk = 0;
    if (const Status imported = driver_.import_chunk(part.fd, part.size, &chunk); !imported.ok()) return imported;
    const Status mapped = driver_.map(base_ + mapped_, part.size, chunk);
    // The mapping keeps the memory; the name is not needed again.
    driver_.release(chunk).ignore();
    if (!mapped.ok()) return mapped;
    mapped_ += part.size;
  }
  return {};
}

ImportedRange::~ImportedRange() {
  if (mapped_ != 0) driver_.unmap(base_, mapped_).ignore();
  if (size_ != 0) driver_.unreserve(base_, size_).ignore();
}

Status ImportedRange::add_accessor(Location who) {
  if (std::find(accessors_.begin(), accessors_.end(), who) != accessors_.end()) return {};
  const Status given = driver_.set_access(base_, mapped_, who, Access::read_write);
  if (given.ok()) accessors_.push_back(who);
  return given;
}

}  // namespace vmm
