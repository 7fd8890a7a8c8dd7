#include "core/faces/tensor_range.h"

#include "base/errors.h"

namespace vmm {

TensorRange::TensorRange(DeviceMemory& memory, const std::shared_ptr<Pool>& model, const std::string& what,
                         std::size_t capacity, std::size_t page_size)
    : memory_(memory), part_(memory.create_range(model, what, capacity, page_size)) {}

TensorRange::~TensorRange() { memory_.close_pool(*part_, /*force=*/true); }

ByteRange TensorRange::pages(ByteRange range) const {
  if (sum_overflows(range.offset, range.size) || range.end() > capacity()) {
    throw InvalidRangeError(range.offset, range.size, capacity(), "beyond the end of '" + part_->name() + "'");
  }
  if (range.size == 0) return {range.offset, 0};
  const std::size_t first = align_down(range.offset, page_size());
  return {first, align_up(range.end(), page_size()) - first};
}

void TensorRange::commit(ByteRange range, Stream stream) {
  const ByteRange wanted = pages(range);
  part_->model().require_open();
  if (wanted.size == 0) return;
  std::vector<ByteRange> gaps;
  std::size_t at = wanted.offset;
  for (const ByteRange& held : part_->held_pages(wanted.offset, wanted.size)) {
    if (held.offset > at) gaps.push_back({at, held.offset - at});
    at = held.end();
  }
  if (at < wanted.end()) gaps.push_back({at, wanted.end() - at});
  for (std::size_t k = 0; k < gaps.size(); ++k) {
    try {
      memory_.allocate_pages(*part_, gaps[k].offset, gaps[k].size, stream);
    } catch (...) {
      while (k-- > 0) memory_.deallocate_pages(*part_, gaps[k].offset, gaps[k].size);
      throw;
    }
  }
}

std::size_t TensorRange::decommit(ByteRange range) {
  std::size_t bytes = 0;
  for (const ByteRange& held : committed(range)) {
    memory_.deallocate_pages(*part_, held.offset, held.size);
    bytes += held.size;
  }
  return bytes;
}

std::vector<ByteRange> TensorRange::committed(ByteRange range) const {
  const ByteRange wanted = pages(range);
  return wanted.size == 0 ? std::vector<ByteRange>() : part_->held_pages(wanted.offset, wanted.size);
}

bool TensorRange::is_committed(ByteRange range) const {
  const ByteRange wanted = pages(range);
  if (wanted.size == 0) return true;
  const std::vector<ByteRange> held = part_->held_pages(wanted.offset, wanted.size);
  return held.size() == 1 && held.front() == wanted;
}

}  // namespace vmm
