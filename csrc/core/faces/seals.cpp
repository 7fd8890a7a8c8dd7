#include "core/faces/seals.h"

#include <exception>
#include <memory>
#include <string>

#include "base/errors.h"

namespace vmm {

namespace {

// The part that holds each piece.
PoolList parts_of(const DeviceMemory& memory, const Pool& model, const std::vector<AliasedPiece>& pieces) {
  PoolList parts;
  for (const AliasedPiece& piece : pieces) {
    parts.push_back(memory.pool_at(piece.address));
    if (parts.back() != nullptr && &parts.back()->model() == &model) continue;
    throw InvalidArgumentError("the memory at " + format_hex(piece.address) + " is not of pool '" + model.name() + "'");
  }
  return parts;
}

}  // namespace

void seal_pages(DeviceMemory& memory, const Pool& model, const std::vector<AliasedPiece>& pieces) {
  const PoolList parts = parts_of(memory, model, pieces);
  std::vector<std::size_t> writable;  // of the pieces
  for (std::size_t k = 0; k < pieces.size(); ++k) {
    if (parts[k]->is_read_only(pieces[k].address, pieces[k].size)) continue;
    parts[k]->require_whole_pages(pieces[k].address, pieces[k].size);
    writable.push_back(k);
  }
  Clock& clock = memory.clock();
  throw_if_failed(clock.wait(clock.now()), "waiting for queued work that may write what is to be sealed");
  struct Changed {
    Pool* part;
    std::vector<ByteRange> stretches;  // that were writable before
  };
  std::vector<Changed> changed;
  changed.reserve(writable.size());
  try {
    for (const std::size_t k : writable) {
      changed.push_back({parts[k].get(), parts[k]->set_pages_access(pieces[k].address, pieces[k].size, Access::read)});
    }
  } catch (...) {
    for (const auto& [part, stretches] : changed) {
      for (const ByteRange& stretch : stretches) {
        try {
          part->set_pages_access(part->base() + stretch.offset, stretch.size, Access::read_write);
        } catch (const std::exception&) {
          continue;  // the first failure is what is told
        }
      }
    }
    throw;
  }
}

void unseal_pages(DeviceMemory& memory, const Pool& model, const std::vector<AliasedPiece>& pieces) {
  const PoolList parts = parts_of(memory, model, pieces);
  for (std::size_t k = 0; k < pieces.size(); ++k) {
    parts[k]->set_pages_access(pieces[k].address, pieces[k].size, Access::read_write);
  }
}

}  // namespace vmm
