#include "core/faces/tensor_alias.h"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "base/errors.h"
#include "core/memory/shared_chunks.h"
#include "core/pool/seal_rule.h"

namespace vmm {

TensorAlias::TensorAlias(DeviceMemory& memory, std::shared_ptr<Pool> opener, const std::vector<AliasedPiece>& pieces,
                         std::size_t copies, bool read_only)
    : memory_(memory),
      opener_(std::move(opener)),
      access_(read_only ? Access::read : Access::read_write),
      place_(memory.second_mappings()) {
  opener_->require_open();
  if (pieces.empty() || copies == 0)
    throw InvalidArgumentError("an alias of nothing: give at least one tensor and one copy");
  std::size_t bytes = 0;
  for (const AliasedPiece& piece : pieces) bytes += std::min(piece.size, kMostAddresses - bytes);
  // So many copies of a granule are fewer than an int holds, which a chunk's mappings are counted in.
  if (copies > kMostAddresses / std::max<std::size_t>(bytes, 1)) {
    const std::size_t most = kUnlimited / std::max<std::size_t>(bytes, 1);
    memory_.refuse(OutOfMemoryError(std::to_string(copies) + " copies of " + format_bytes(bytes) +
                                        " are more than there are virtual addresses, " + format_bytes(kMostAddresses),
                                    bytes * std::min(copies, most), 0, kMostAddresses, opener_->name()));
  }
  holds_.reserve(pieces.size());  // nothing is held that there is no room to note
  shown_.reserve(pieces.size());
  // Before there is anything to end: once it is mapped nothing may fail.
  range_ = std::make_shared<AliasRange>(memory_.driver());
  ending_ = [range = range_] { return range->end(); };
  std::vector<ByteRange> of_others;  // their addresses
  bool is_shown = false;
  try {
    SharedChunks shared(static_cast<int>(copies));
    for (const AliasedPiece& piece : pieces) {
      const std::shared_ptr<Pool> pool = memory_.pool_at(piece.address);
      if (pool == nullptr) {
        throw InvalidArgumentError("the memory at " + format_hex(piece.address) +
                                   " is in none of torch_vmm's pools on " + "this device");
      }
      if (pool->is_private()) {
        throw InvalidArgumentError("pool '" + pool->name() + "': the " + format_bytes(piece.size) + " at " +
                                   format_hex(piece.address) + " are a CUDA graph's or a torch.cuda.MemPool's, which " +
                                   "torch may take back: make the tensor with torch_vmm.aligned(shape, dtype, device)");
      }
      const std::size_t offset = piece.address - pool->base();
      const std::vector<ByteRange> pages = pool->held_pages(offset, piece.size);
      if (!pages.empty()) {
        if (pages.size() != 1 || pages.front().offset > offset || pages.front().end() < offset + piece.size) {
          throw InvalidArgumentError(what_is_not_there(pool->name(), piece.address, piece.size));
        }
        pool->hold_pages(offset, piece.size);
        holds_.push_back({pool, offset, piece.size});
      }
      pool->share_chunks(piece.address, piece.size, &shared);
      shown_.push_back(piece.address);
      if (&pool->model() != opener_.get()) of_others.push_back({piece.address, piece.size});
    }
    for (const ByteRange& range : joined(std::move(of_others))) shared_bytes_ += range.size;  // whatever is shown twice
    memory_.add_shared(*opener_, shared_bytes_);
    is_shown = true;
    Status status;
    DeviceMemory::while_nobody_is_let_in({&memory_}, [&] {
      const std::vector<Location> accessors = memory_.accessors();
      const std::vector<Chunk*> chunks = shared.release();  // on failure it takes the mappings back itself
      status = range_->map(memory_.granularity(), chunks, copies, access_, accessors);
      if (status.ok()) place_.enter({base(), size()}, this);
    });
    if (status.ok()) return;
    if (status.code() == StatusCode::out_of_memory) {
      memory_.refuse(OutOfMemoryError("there are no addresses, or mappings, for " +
                                          format_count(copies, "copy", "copies") + " of " + format_bytes(bytes) + " (" +
                                          status.text() + ")",
                                      bytes * copies, 0, kMostAddresses, opener_->name()));
    }
    throw_if_failed(status, "mapping memory at further addresses");
  } catch (...) {
    if (is_shown) memory_.remove_shared(*opener_, shared_bytes_);
    let_go();
    throw;
  }
}

TensorAlias::~TensorAlias() {
  place_.leave();
  memory_.remove_shared(*opener_, shared_bytes_);
  let_go();
  memory_.once_passed(std::move(ending_));
}

void TensorAlias::record_stream(Stream stream, DeviceStreams& device) {
  for (const Address address : shown_) {
    if (const std::shared_ptr<Pool> pool = memory_.pool_at(address)) pool->record_stream(address, stream, &device);
  }
}

Status TensorAlias::add_accessor(const Location& who) { return range_->add_accessor(who, access_); }

// Its owner's pages may go; whoever gets them comes behind all that is queued now.
void TensorAlias::let_go() noexcept {
  for (const Hold& hold : holds_) {
    try {
      memory_.unhold_pages(*hold.pool, hold.offset, hold.size);
    } catch (const std::exception&) {
      continue;  // of giving back what is idle over a limit: another free does that
    }
  }
  holds_.clear();
}

}  // namespace vmm
