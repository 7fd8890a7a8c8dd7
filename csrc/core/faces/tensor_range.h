// The memory of one tensor whose pages come and go in place: a part of a model's
// pool with addresses of its own, backed by explicit pages. So the model pays,
// counts and limits it as all that it has, and what leaves waits for the clock.
// It never knows a shape, a dtype or a stream but the one that it is given.
//
// No lock of its own: whoever changes a tensor in place orders that himself.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "base/units.h"
#include "core/device/device_memory.h"
#include "core/pool/pool.h"

namespace vmm {

class TensorRange {
 public:
  // `capacity` > 0 bytes of addresses, rounded up to whole pages, in `model`, which
  // has to be open. page_size 0: chunks of up to a 16th of what lies below them.
  // `what`: for messages. Throws as DeviceMemory::create_pool().
  TensorRange(DeviceMemory& memory, const std::shared_ptr<Pool>& model, const std::string& what, std::size_t capacity,
              std::size_t page_size);
  TensorRange(const TensorRange&) = delete;
  TensorRange& operator=(const TensorRange&) = delete;
  // Gives all of it back. Waits for nothing.
  ~TensorRange();

  // Backs the pages under `range` that have no memory, all or none; usable by work
  // on `stream` at once. What was there stays, and queued work may use it
  // meanwhile. Throws InvalidRangeError, OutOfMemoryError, and InvalidArgumentError
  // where the model is closed.
  void commit(ByteRange range, Stream stream);
  // Gives the memory of the pages under `range` back, where they have some. Nobody
  // waits; queued work may still use them. Memory that shares its chunk with pages
  // that stay is kept mapped. Returns the bytes of these pages.
  std::size_t decommit(ByteRange range);
  // The stretches of `range`, widened to whole pages, that have memory, by offset.
  [[nodiscard]] std::vector<ByteRange> committed(ByteRange range) const;
  [[nodiscard]] bool is_committed(ByteRange range) const;

  [[nodiscard]] Address base() const { return part_->base(); }
  [[nodiscard]] std::size_t capacity() const { return part_->capacity(); }
  [[nodiscard]] std::size_t page_size() const { return part_->page_size(); }
  // The whole pages under `range`, which lies within the capacity; nothing under nothing.
  [[nodiscard]] ByteRange pages(ByteRange range) const;
  [[nodiscard]] const std::shared_ptr<Pool>& part() const { return part_; }

 private:
  DeviceMemory& memory_;
  const std::shared_ptr<Pool> part_;
};

}  // namespace vmm
