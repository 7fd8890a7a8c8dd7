#include "core/faces/tensor_range.h"

#include <exception>
#include <string>
#include <utility>

#include "base/errors.h"

namespace vmm {

TensorRange::TensorRange(DeviceMemory& memory, const std::shared_ptr<Pool>& model, const TensorRangeSpec& spec)
    : memory_(memory), part_(memory.create_range(model, spec.what, spec.capacity, spec.page_size)) {
  try {
    // Here, where it may fail for want of memory: an end may not.
    ending_ = [memory = &memory_, part = part_] { return end(*memory, *part, nullptr); };
    if (!spec.zeros) return;
    place_.emplace(memory_.second_mappings());
    const std::shared_ptr<ZeroChunks> chunks = memory_.zero_chunks();
    DeviceMemory::while_nobody_is_let_in({&memory_}, [&] {
      const auto zeros = std::make_shared<ZeroCover>(memory_.driver(), chunks, base(), capacity(), memory_.accessors());
      ending_ = [memory = &memory_, part = part_, zeros] { return end(*memory, *part, zeros.get()); };
      zeros_ = zeros.get();
      place_->enter({base(), capacity()}, this);
    });
    cover({{0, capacity()}});
  } catch (...) {
    let_go();
    throw;
  }
}

TensorRange::~TensorRange() { let_go(); }

void TensorRange::record_stream(Stream stream, DeviceStreams& device) { part_->record_stream(base(), stream, &device); }

Status TensorRange::add_accessor(const Location& who) {
  const MutexLock lock(mutex_);
  return zeros_->add_accessor(who);
}

// Whether all of it went. REQUIRES: no queued work reads zeros there.
bool TensorRange::end(DeviceMemory& memory, Pool& part, ZeroCover* zeros) noexcept {
  try {
    if (zeros != nullptr && !zeros->uncover({0, part.capacity()}).ok()) return false;
    memory.close_pool(part, /*force=*/true);
    return true;
  } catch (const std::exception&) {
    return false;  // another time
  }
}

void TensorRange::let_go() noexcept {
  if (place_.has_value()) place_->leave();  // nobody is told that it is let in any more
  if (zeros_ == nullptr) {
    if (end(memory_, *part_, nullptr) || !ending_) return;
  } else {
    // Its memory serves others at once; the addresses wait for those who read zeros.
    try {
      part_->drop_pages();
      memory_.store().trim(part_->group(), memory_.options().store_bytes);
    } catch (const std::exception&) {
      // They go with the addresses.
    }
    zeros_ = nullptr;
  }
  memory_.once_passed(std::move(ending_));
}

// The whole pages under `range`; nothing under nothing.
ByteRange TensorRange::pages(ByteRange range) const {
  if (sum_overflows(range.offset, range.size) || range.end() > capacity()) {
    throw InvalidRangeError(range.offset, range.size, capacity(), "beyond the end of '" + part_->name() + "'");
  }
  if (range.size == 0) return {range.offset, 0};
  const std::size_t first = align_down(range.offset, page_size());
  return {first, align_up(range.end(), page_size()) - first};
}

// What of `ranges` has no memory.
std::vector<ByteRange> TensorRange::gaps(const std::vector<ByteRange>& ranges) const {
  std::vector<ByteRange> wanted;
  wanted.reserve(ranges.size());
  for (const ByteRange& range : ranges) wanted.push_back(pages(range));
  std::vector<ByteRange> found;
  for (const ByteRange& range : joined(std::move(wanted))) {
    std::size_t at = range.offset;
    for (const ByteRange& held : part_->held_pages(range.offset, range.size)) {
      if (held.offset > at) found.push_back({at, held.offset - at});
      at = held.end();
    }
    if (at < range.end()) found.push_back({at, range.end() - at});
  }
  return found;
}

void TensorRange::wait_for_readers() {
  Clock& clock = memory_.clock();
  throw_if_failed(clock.wait(clock.now()), "waiting for queued work that may read '" + part_->name() + "'");
}

void TensorRange::cover(const std::vector<ByteRange>& ranges) {
  const auto attempt = [&] {
    const MutexLock lock(mutex_);
    Status status = zeros_->prepare();
    for (std::size_t k = 0; k < ranges.size() && status.ok(); ++k) status = zeros_->cover_gaps(ranges[k]);
    return status;
  };
  Status status = attempt();
  if (status.code() == StatusCode::out_of_memory) {
    // What others have idle serves as well; the smallest chunk that reads as zero is all that it takes.
    memory_.reclaim_for(memory_.budget(), memory_.store().granularity(), [&] { return (status = attempt()).ok(); });
  }
  std::size_t bytes = 0;
  for (const ByteRange& range : ranges) bytes += range.size;
  throw_if_failed(status, "mapping what reads as zero in '" + part_->name() + "'", {bytes, part_->model().name()});
}

void TensorRange::uncover(const std::vector<ByteRange>& ranges) {
  has_holes_.store(true, std::memory_order_relaxed);
  try {
    Status status;
    {
      const MutexLock lock(mutex_);
      for (std::size_t k = 0; k < ranges.size() && status.ok(); ++k) status = zeros_->uncover(ranges[k]);
    }
    throw_if_failed(status, "unmapping what reads as zero in '" + part_->name() + "'");
  } catch (...) {
    undo({});
    throw;
  }
}

// Makes what of `ranges` has no memory read as zero again. REQUIRES: all else does.
void TensorRange::mend(const std::vector<ByteRange>& ranges) {
  if (zeros_ == nullptr || !has_holes_.load(std::memory_order_relaxed)) return;
  part_->shed(0);  // what stayed mapped under pages that have gone, where there was no memory to say so
  wait_for_readers();
  part_->settle();  // former mappings go
  cover(gaps(ranges));
  has_holes_.store(false, std::memory_order_relaxed);
}

// What fails here as well, the next call mends.
void TensorRange::undo(const std::vector<ByteRange>& taken) noexcept {
  try {
    for (const ByteRange& range : taken) memory_.deallocate_pages(*part_, range.offset, range.size);
    mend();
  } catch (const std::exception&) {
    return;
  }
}

// While what reads as zero is away nobody else's code may run: it would read here, or give
// rows of this very tensor back. So it is called between two tries, with all in place.
void TensorRange::commit(const std::vector<ByteRange>& ranges, Stream stream) {
  for (int reliefs = 0;; ++reliefs) {
    const std::vector<ByteRange> missing = gaps(ranges);
    const auto relieve = [&] {
      std::size_t bytes = 0;
      for (const ByteRange& range : missing) bytes += range.size;
      return reliefs < Ladder::kMostReliefs && memory_.ladder().relieve(*part_, bytes);
    };
    std::optional<Refused> refused;
    try {
      const Ladder::NoRelief here;
      refused = commit_missing(missing, stream);
    } catch (const OutOfMemoryError&) {  // what reads as zero did not come back
      if (!relieve()) throw;
      continue;
    }
    if (!refused.has_value()) return;
    if (has_holes_.load(std::memory_order_relaxed) || !relieve()) memory_.tell(*std::move(refused));
  }
}

// What was refused, or nothing.
std::optional<Refused> TensorRange::commit_missing(const std::vector<ByteRange>& missing, Stream stream) {
  part_->model().require_open();
  mend();
  if (missing.empty()) return std::nullopt;
  std::vector<ByteRange> taken;
  taken.reserve(missing.size());
  if (zeros_ != nullptr) {
    wait_for_readers();
    uncover(missing);
  }
  std::optional<Refused> refused;
  Ladder::Beside beside;  // all of them or none: nobody yields for what the others make too much
  for (const ByteRange& range : missing) beside.to_come += range.size;
  try {
    for (const ByteRange& range : missing) {
      beside.to_come -= range.size;
      if (memory_.allocate_pages(*part_, range.offset, range.size, stream, &refused, beside) == 0) break;
      taken.push_back(range);
      beside.there += range.size;
    }
  } catch (...) {
    undo(taken);
    throw;
  }
  if (refused.has_value()) {
    undo(taken);
  } else {
    has_holes_.store(false, std::memory_order_relaxed);
  }
  return refused;
}

std::size_t TensorRange::decommit(const std::vector<ByteRange>& ranges) {
  mend();
  std::vector<ByteRange> held;
  for (const ByteRange& range : ranges) {
    const std::vector<ByteRange> found = committed(range);
    held.insert(held.end(), found.begin(), found.end());
  }
  held = joined(std::move(held));
  for (const ByteRange& range : held) {
    if (!part_->has_read_only(base() + range.offset, range.size)) continue;
    // A chunk that stays mapped would serve its next pages read-only.
    throw InvalidArgumentError("'" + part_->name() + "': pages of the " + format_bytes(range.size) + " at offset " +
                               std::to_string(range.offset) + " are sealed; unseal() them first");
  }
  std::size_t bytes = 0;
  if (zeros_ != nullptr && !held.empty()) has_holes_.store(true, std::memory_order_relaxed);
  try {
    for (const ByteRange& range : held) {
      memory_.deallocate_pages(*part_, range.offset, range.size);
      bytes += range.size;
    }
  } catch (...) {
    undo({});
    throw;
  }
  mend(held);  // a failure here leaves all to the next call
  return bytes;
}

std::vector<ByteRange> TensorRange::committed(ByteRange range) const {
  const ByteRange wanted = pages(range);
  return wanted.size == 0 ? std::vector<ByteRange>() : part_->held_pages(wanted.offset, wanted.size);
}

bool TensorRange::is_committed(const std::vector<ByteRange>& ranges) const { return gaps(ranges).empty(); }

}  // namespace vmm
