// The memory of one tensor whose pages come and go in place: a part of a model's
// pool with addresses of its own, backed by explicit pages. So the model pays,
// counts and limits it as all that it has, and what leaves waits for the clock.
// It never knows a shape, a dtype or a stream but the one that it is given.
//
// One thread at a time changes it, as a tensor is changed in place; its lock only
// keeps two at once from more than a wrong answer.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/sync.h"
#include "base/units.h"
#include "core/device/device_memory.h"
#include "core/memory/second_mappings.h"
#include "core/memory/zero_cover.h"
#include "core/pool/pool.h"

namespace vmm {

struct TensorRangeSpec {
  std::string what;          // for messages
  std::size_t capacity = 0;  // bytes of addresses, above 0, rounded up to whole pages
  // 0: chunks of up to a 16th of what lies below them.
  std::size_t page_size = 0;
  // What has no memory reads as zero, and faults when it is written to; otherwise
  // it faults when it is read, too. Only with a page size.
  bool zeros = false;
};

class TensorRange final : public SecondMapping {
 public:
  // In `model`, which has to be open. Throws as DeviceMemory::create_pool().
  TensorRange(DeviceMemory& memory, const std::shared_ptr<Pool>& model, const TensorRangeSpec& spec);
  TensorRange(const TensorRange&) = delete;
  TensorRange& operator=(const TensorRange&) = delete;
  // Gives all of it back. Waits for nothing.
  ~TensorRange() override;

  void record_stream(Stream stream, DeviceStreams& device) override;
  // To what reads as zero.
  Status add_accessor(const Location& who) VMM_EXCLUDES(mutex_) override;

  // Backs the pages under `ranges` that have no memory, all or none; usable by work
  // on `stream` at once. They begin as zero; what has memory stays, and queued work may
  // use it meanwhile. Where what has none reads as zero, it waits for queued work first:
  // that may be reading it. Throws InvalidRangeError, OutOfMemoryError, and
  // InvalidArgumentError where the model is closed.
  void commit(const std::vector<ByteRange>& ranges, Stream stream);
  // Gives the memory of the pages under `ranges` back, where they have some. Queued
  // work may still use them, and nobody waits for it, unless they are to read as zero
  // from now on. Memory that shares its chunk with pages that stay is kept mapped.
  // Returns the bytes of these pages. Throws StillInUseError at a stretch that an alias
  // shows; those before it have gone. InvalidArgumentError, before any goes, where a
  // chunk of them is sealed.
  std::size_t decommit(const std::vector<ByteRange>& ranges);
  // The stretches of `range`, widened to whole pages, that have memory, by offset.
  [[nodiscard]] std::vector<ByteRange> committed(ByteRange range) const;
  // Whether all pages under `ranges` have.
  [[nodiscard]] bool is_committed(const std::vector<ByteRange>& ranges) const;

  [[nodiscard]] Address base() const { return part_->base(); }
  [[nodiscard]] std::size_t capacity() const { return part_->capacity(); }
  [[nodiscard]] std::size_t page_size() const { return part_->page_size(); }
  [[nodiscard]] const std::shared_ptr<Pool>& part() const { return part_; }

 private:
  [[nodiscard]] ByteRange pages(ByteRange range) const;
  [[nodiscard]] std::vector<ByteRange> gaps(const std::vector<ByteRange>& ranges) const;
  void wait_for_readers();
  void cover(const std::vector<ByteRange>& ranges) VMM_EXCLUDES(mutex_);
  void uncover(const std::vector<ByteRange>& ranges) VMM_EXCLUDES(mutex_);
  static bool end(DeviceMemory& memory, Pool& part, ZeroCover* zeros) noexcept;
  void let_go() noexcept;
  void undo(const std::vector<ByteRange>& taken) noexcept;
  void mend(const std::vector<ByteRange>& ranges);
  void mend() {  // all of it, after whatever failed
    if (has_holes_.load(std::memory_order_relaxed)) mend({{0, capacity()}});
  }
  std::optional<Refused> commit_missing(const std::vector<ByteRange>& missing, Stream stream);

  DeviceMemory& memory_;
  const std::shared_ptr<Pool> part_;
  Mutex mutex_;
  // nullptr: what has no memory faults. `ending_` owns it.
  ZeroCover* zeros_ VMM_PT_GUARDED_BY(mutex_) = nullptr;
  std::optional<SecondMappings::Place> place_;  // of what reads as zero
  std::atomic<bool> has_holes_{false};          // a driver's failure left some that fault
  std::function<bool()> ending_;                // whether it went
};

}  // namespace vmm
