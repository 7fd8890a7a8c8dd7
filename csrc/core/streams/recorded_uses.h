// Which streams have used which block besides its own (record_stream()): a list for each
// such block, which knows it by a number. Not thread-safe: the owner's lock guards it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/streams/stream_point.h"

namespace vmm {

class RecordedUses {
 public:
  // Adds `use` to the list `*list`, once. 0: there is none yet, and it becomes one.
  void add(std::uint32_t* list, const StreamUse& use);
  [[nodiscard]] const std::vector<StreamUse>& of(std::uint32_t list) const { return lists_[list - 1]; }
  // Ends it: `*list` is 0.
  void end(std::uint32_t* list);
  // Lists that have not ended.
  [[nodiscard]] std::size_t size() const { return lists_.size() - unused_.size(); }

 private:
  // More than these stay only until all have ended.
  static constexpr std::size_t kMostKept = 1024;

  std::vector<std::vector<StreamUse>> lists_;
  std::vector<std::uint32_t> unused_;
};

}  // namespace vmm
