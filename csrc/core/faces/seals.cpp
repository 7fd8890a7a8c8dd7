#include "core/faces/seals.h"

#include <algorithm>
#include <memory>
#include <string>

#include "base/errors.h"
#include "core/device/device_memory.h"
#include "core/pool/pool.h"

namespace vmm {

namespace {

// How often a seal waits for what others free under the tag meanwhile, before it says so.
constexpr int kMostRounds = 16;

// Pieces of one part.
struct InPart {
  std::shared_ptr<Pool> part;
  std::vector<SealedPiece> pieces;
};

// The pieces by the part that holds them.
std::vector<InPart> by_part(const DeviceMemory& memory, const Pool& model, const std::vector<SealedPiece>& pieces) {
  std::vector<InPart> found;
  for (const SealedPiece& piece : pieces) {
    auto part = memory.pool_at(piece.address);
    const auto these = [&piece] { return "tensors: " + format_bytes(piece.size) + " at " + format_hex(piece.address); };
    if (part == nullptr) {
      throw InvalidArgumentError(these() + " are in none of torch_vmm's pools of its device (an alias, or memory of " +
                                 "several devices, has addresses of its own): give tensors that were made in pool '" +
                                 model.name() + "'");
    }
    if (&part->model() != &model) {
      throw InvalidArgumentError(these() + " are of pool '" + part->model().name() + "', not of '" + model.name() +
                                 "'");
    }
    const auto at = std::find_if(found.begin(), found.end(), [&](const InPart& each) { return each.part == part; });
    if (at == found.end()) {
      found.push_back({std::move(part), {piece}});
    } else {
      at->pieces.push_back(piece);
    }
  }
  return found;
}

[[noreturn]] void refuse_what_is_freed(Pool& part) {
  const std::size_t bytes = part.memory_stats().quarantined_bytes;
  throw StillInUseError("pool '" + part.name() + "': " + (bytes == 0 ? "memory" : format_bytes(bytes)) +
                            " that was freed under the tag is still used by other streams, one of which is being " +
                            "captured, or goes on being freed by other threads; seal when that has ended",
                        bytes, 0);
}

}  // namespace

void seal_pages(DeviceMemory& memory, const Pool& model, const std::vector<SealedPiece>& pieces) {
  std::vector<InPart> wanted = by_part(memory, model, pieces);
  for (auto& [part, its] : wanted) {
    if (part->is_spill()) {
      throw InvalidArgumentError("the " + format_bytes(its.front().size) + " at " + format_hex(its.front().address) +
                                 " of pool '" + model.name() + "' have spilled to host memory, which cannot be " +
                                 "sealed: copy the tensor once there is room on the device, and seal the copy");
    }
    // What is read-only already may be a part of a chunk.
    if (const Pool& pool = *part; !pool.is_tag_space()) {
      std::erase_if(its, [&](const SealedPiece& piece) { return pool.is_read_only(piece.address, piece.size); });
    }
    part->require_whole_chunks(its, Access::read);
  }
  Clock& clock = memory.clock();
  struct Changed {
    Pool* part;
    std::vector<ByteRange> stretches;  // that were writable before
  };
  std::vector<Changed> changed;
  changed.reserve(wanted.size());
  try {
    for (const auto& [part, its] : wanted) {
      changed.push_back({part.get(), {}});
      int round = 0;
      for (Epoch freed = clock.now(); freed != kLongAgo; ++round) {
        if (round == kMostRounds) refuse_what_is_freed(*part);
        throw_if_failed(clock.wait(freed), "waiting for queued work that may write what is to be sealed");
        freed = kLongAgo;
        changed.back().stretches = part->set_memory_access(its, Access::read, &freed);
      }
    }
  } catch (...) {
    for (const auto& [part, stretches] : changed) part->undo_read_only(stretches);
    throw;
  }
}

void unseal_pages(DeviceMemory& memory, const Pool& model, const std::vector<SealedPiece>& pieces) {
  Epoch never = kLongAgo;
  const std::vector<InPart> wanted = by_part(memory, model, pieces);
  for (const auto& [part, its] : wanted) part->require_whole_chunks(its, Access::read_write);
  for (const auto& [part, its] : wanted) {
    part->set_memory_access(its, Access::read_write, &never);
  }
}

}  // namespace vmm
