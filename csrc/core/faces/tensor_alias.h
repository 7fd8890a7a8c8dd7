// The memory of tensors at further addresses: the same chunks, several times in a row
// or several tensors' one after the other. Their owners pay; whoever has the alias
// shows it as shared. It never knows a shape or a dtype.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "base/units.h"
#include "core/device/device_memory.h"
#include "core/memory/alias_range.h"
#include "core/memory/second_mappings.h"
#include "core/pool/pool.h"

namespace vmm {

// What one tensor covers.
struct AliasedPiece {
  Address address = 0;
  std::size_t size = 0;  // bytes
};

class TensorAlias final : public SecondMapping {
 public:
  // `pieces`, each of which stands on whole chunks of `memory`'s, `copies` times, for
  // `opener`, which has to be open. Throws InvalidArgumentError that says what does not,
  // OutOfMemoryError (no addresses). REQUIRES: what is in none of the explicit pages
  // stays until it ends; explicit pages it holds itself.
  TensorAlias(DeviceMemory& memory, std::shared_ptr<Pool> opener, const std::vector<AliasedPiece>& pieces,
              std::size_t copies, bool read_only);
  TensorAlias(const TensorAlias&) = delete;
  TensorAlias& operator=(const TensorAlias&) = delete;
  // Waits for nothing: its addresses go when no queued work uses them.
  ~TensorAlias() override;

  // Of a stream that uses it here: the blocks and pages that it shows are not reused before
  // that work is done.
  void record_stream(Stream stream, DeviceStreams& device) override;
  Status add_accessor(const Location& who) override;

  [[nodiscard]] Address base() const { return range_->base(); }
  [[nodiscard]] std::size_t size() const { return range_->size(); }
  [[nodiscard]] DeviceMemory& memory() const { return memory_; }
  [[nodiscard]] const std::shared_ptr<Pool>& opener() const { return opener_; }

 private:
  struct Hold {
    std::shared_ptr<Pool> pool;
    std::size_t offset = 0;
    std::size_t size = 0;
  };
  void let_go() noexcept;

  DeviceMemory& memory_;
  const std::shared_ptr<Pool> opener_;
  const Access access_;
  SecondMappings::Place place_;
  std::vector<Address> shown_;  // where each piece begins
  std::vector<Hold> holds_;     // of explicit pages
  std::size_t shared_bytes_ = 0;
  std::shared_ptr<AliasRange> range_;
  std::function<bool()> ending_;  // whether its addresses went
};

}  // namespace vmm
